"""``loongforge plan``: predictions against what was measured on the H200, advice that keeps its word, and bad input."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from loongforge import cli
from loongforge.bench.shapes import HeadShape, parse_shape
from loongforge.planning import advise, fitted
from loongforge.planning.devices import DEVICES, MEASURED
from loongforge.planning.inputs import memory_size
from loongforge.planning.measured import own_rows
from loongforge.planning.predict import FITTED, TORCH, Layer, Work, has_tiles, peak_bytes, rates_of, unfused_peaks

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/benchmarks/h200/results.json"
OWN = own_rows(RESULTS)
SMALL = ("--tokens", "64", "--hidden", "32", "--vocab", "1000")


def layer(tokens=8192, hidden=4096, vocab=32000, dtype=torch.bfloat16, **more):
    return Layer(HeadShape.of_sizes(tokens, hidden, vocab), dtype, **more)


# ---------------------------------------------------------------- against measurements


@pytest.mark.parametrize("row", OWN, ids=lambda row: f"{row.shape.name}-{row.name.replace(' ', '-')}")
def test_prediction_is_what_was_measured(row):
    assert row.peak_bytes / 2**20 == pytest.approx(row.peak_mib, rel=0.05)
    assert FITTED.milliseconds(row.work) == pytest.approx(row.step_ms, rel=0.10)


SHARDED = {
    (shape["name"], line["variant"]): (shape, line)
    for shape in json.loads((ROOT / "docs/benchmarks/h200-x2/results.json").read_text())["shapes"]
    for line in shape["results"]
}


@pytest.mark.parametrize("name", SHARDED, ids=" ".join)
def test_prediction_for_a_shard_is_what_was_measured_on_two_gpus(name):
    shape, line = SHARDED[name]
    assert line["variant"].endswith((", all kept", ", none kept"))
    budget = "all" if line["variant"].endswith("all kept") else 0
    rank = HeadShape.of_sizes(shape["tokens"], shape["hidden"], shape["vocab"] // 2)
    asked = Layer(rank, torch.bfloat16, "none", 2, sequence_parallel="SP" in line["variant"])
    plan = asked.plan(budget, True)
    assert peak_bytes(asked, plan) / 2**20 == pytest.approx(line["peak_mib"], rel=0.01)
    predicted = FITTED.milliseconds(Work.of(plan))
    assert predicted == pytest.approx(line["silent_ms"], rel=0.10), "without collectives"


def test_every_setting_was_measured():
    assert len(OWN) >= 60 and len({row.shape.name for row in OWN}) >= 5
    assert any(row.plan.tokens_per_chunk for row in OWN), "gradients in forward are among them"
    assert {row.plan.kept_rows == 0 for row in OWN} == {True, False}


def test_constants_are_the_fit_of_the_script():
    spec = importlib.util.spec_from_file_location("fit_plan", ROOT / "scripts/fit_plan.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, value in vars(script.fit(OWN)).items():
        assert value == pytest.approx(getattr(FITTED, name), rel=1e-3), name
    errors = [FITTED.milliseconds(row.work) / row.step_ms - 1 for row in OWN]
    assert max(map(abs, errors)) == pytest.approx(fitted.LARGEST_ERROR, abs=2e-3)


PEERS = {
    "megatron unfused": "megatron-core unfused",
    "megatron native fused": "megatron-core native fused",
    "torch eager fp32 loss": TORCH,
}


def test_unfused_peaks_are_what_was_measured():
    lines = [line for line in json.loads(RESULTS.read_text())["results"] if line["name"] in PEERS]
    assert len(lines) >= 15
    for line in lines:
        predicted = unfused_peaks(Layer(parse_shape(line["shape"]), torch.bfloat16))[PEERS[line["name"]]]
        assert predicted / 2**20 == pytest.approx(line["peak_mib"], rel=0.05), line


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; CI compares with the recorded H200 results")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("reduction", ("none", "mean"))
@pytest.mark.parametrize("budget", (0, 100, 400, "all"))
def test_memory_on_this_gpu(dtype, reduction, budget):
    from loongforge.bench.contenders import ours
    from loongforge.bench.measure import make_problem, measure

    shape = HeadShape.of_sizes(4096, 1024, 50304)
    contender = next(one for one in ours([budget]) if one.per_token == (reduction == "none"))
    result = measure(contender, shape, make_problem(shape, torch.device("cuda"), dtype), 1)
    asked = Layer(shape, dtype, reduction)
    assert peak_bytes(asked, asked.plan(budget, True)) / 2**20 == pytest.approx(result.peak_mib, rel=0.05)


# ---------------------------------------------------------------- the model


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("reduction", ("none", "mean"))
@pytest.mark.parametrize("vocab", (999, 32000, 128256))
def test_the_plans_own_bound_is_above(dtype, reduction, vocab):
    """``ChunkPlan.peak_bytes`` bounds everything but float16's float32 rows of one chunk."""
    asked = layer(vocab=vocab, dtype=dtype, reduction=reduction)
    for row in advise.rows(asked, None, True):
        bound = row.plan.peak_bytes
        if dtype == torch.float16:
            widest = max(row.plan.kept_rows, row.plan.backward_width)
            bound += (vocab if row.plan.tokens_per_chunk else min(vocab, widest)) * 4096 * 4 + 8192 * 4096 * 4
        gradients = (8192 + vocab) * 4096 * dtype.itemsize
        assert gradients + row.plan.kept_bytes <= row.peak_bytes <= bound


def test_ranks_add_the_operand_of_their_sum_and_the_gathered_tokens():
    single, plain, split = layer(), layer(tensor_parallel=8), layer(tensor_parallel=8, sequence_parallel=True)
    rounded = 8192 * 4096 * 2
    for budget in (0, 100, "all"):
        alone, ranks, gathered = (peak_bytes(one, one.plan(budget, True)) for one in (single, plain, split))
        assert 0 <= ranks - alone <= rounded
        assert gathered - ranks == rounded + rounded // 8
    assert peak_bytes(plain, plain.plan(0, True)) == peak_bytes(single, single.plan(0, True)) + rounded


def test_work_is_that_of_the_plan():
    asked = layer()
    for budget, thv in ((0, 8), ("all", 6)):
        tiles, plain = (Work.of(asked.plan(budget, with_tiles)) for with_tiles in (True, False))
        assert tiles.library_flops + tiles.tile_flops == plain.library_flops == thv * 8192 * 4096 * 32000
        assert plain.tile_flops == plain.tile_logits == 0
    assert Work.of(asked.plan(0, True)).tile_logits == 8192 * 32000
    assert Work.of(asked.plan("all", True)).tile_logits == 0


def test_more_kept_is_less_time():
    times = [row.time_ms for row in advise.rows(layer(vocab=128256), FITTED, True)]
    assert times == sorted(times, reverse=True) and times[0] > 1.2 * times[-1]


def test_rates_of_other_devices():
    h200, h100, a100 = (rates_of(DEVICES[key], torch.bfloat16) for key in (MEASURED, "h100", "a100"))
    assert h200 == FITTED
    assert h100.library_tflops == h200.library_tflops and h100.terabytes < h200.terabytes
    assert a100.library_tflops == pytest.approx(h200.library_tflops * 312.0 / 989.5)
    for device in DEVICES.values():
        if device.arch.vendor == "amd":
            assert "nothing was ever timed" in rates_of(device, torch.bfloat16)
    assert rates_of(DEVICES[MEASURED], torch.float16) == "only bf16 was measured"


@pytest.mark.parametrize("vocab", (16160, 128256))
@pytest.mark.parametrize("reduction", ("none", "mean"))
def test_the_recommended_budget_fits_and_nothing_better_does(vocab, reduction):
    asked = layer(vocab=vocab, reduction=reduction)
    least = peak_bytes(asked, asked.plan(0, True))
    assert advise.recommend(asked, least, FITTED, True) is None, "no room for the margin"
    table = advise.rows(asked, FITTED, True)
    for free in (int(least * factor) for factor in (1.06, 1.2, 1.5, 1.9, 3.0)):
        best = advise.recommend(asked, free, FITTED, True)
        assert best.peak_bytes * advise.MARGIN <= free
        assert best.plan == asked.plan(best.budget_mb, True)
        for row in table:
            assert row.time_ms >= best.time_ms or row.peak_bytes * advise.MARGIN > free
    assert advise.recommend(asked, 10**12, FITTED, True).plan.flops == 6 * 8192 * 4096 * vocab


@pytest.mark.parametrize("device", ("h200", "h100", "l40s", "mi300x"))
@pytest.mark.parametrize(
    "sizes", ((8192, 256, 151936), (131072, 2048, 262144), (16384, 4096, 16160), (1024, 256, 50304)), ids=str
)
@pytest.mark.parametrize("reduction", ("none", "mean"))
def test_no_budget_of_the_table_is_faster_than_the_recommended_one(device, sizes, reduction):
    """Equal work need not be equal time: sums of weight gradients and row kernels move bytes too."""
    asked, rates = layer(*sizes, reduction=reduction), rates_of(DEVICES[device], torch.bfloat16)
    rates = None if isinstance(rates, str) else rates
    for free in (1 << 30, 8 << 30, 1 << 40):
        best = advise.recommend(asked, free, rates, has_tiles(DEVICES[device]))
        for row in advise.rows(asked, rates, has_tiles(DEVICES[device])):
            if row.peak_bytes * advise.MARGIN <= free:
                assert best.plan.flops <= row.plan.flops if rates is None else best.time_ms <= row.time_ms


def test_where_nothing_fits_the_least_is_named(capsys):
    """Which is not a budget of 0: logits of a chunk's size are free at the peak, gradients in forward may be less."""
    sizes = ("--tokens", "131072", "--hidden", "2048", "--vocab", "50304", "--device", "h200", "--free-memory", "1GiB")
    assert "the least is 3332 MiB with LCE_LOGITS_BUDGET_MB=2112;" in run(capsys, *sizes)[1]
    assert "the least is 1723 MiB with LCE_LOGITS_BUDGET_MB=960;" in run(capsys, *sizes, "--reduction", "mean")[1]


# ---------------------------------------------------------------- the command


def run(capsys, *words):
    status = cli.main(["plan", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_text_and_json_say_the_same(capsys):
    words = ("--tokens", "16384", "--hidden", "7168", "--vocab", "129280", "--tp", "8", "--device", "h200")
    words += ("--free-memory", "1.2GiB")
    status, text, _ = run(capsys, *words)
    assert status == 0 and max(map(len, text.splitlines())) < 150
    report = json.loads(run(capsys, *words, "--json")[1])
    assert report["layer"]["vocab_per_rank"] == 16160 and report["logits_mib"] == 505
    assert set(report["unfused_peak_mib"]) == {"megatron-core unfused", "megatron-core native fused"}
    for row in report["budgets"]:
        assert f"{row['peak_mib']:9.0f} {row['thv']:5.2f}THV {row['flops'] / 1e12:7.2f} {row['time_ms']:8.1f}" in text
    best = report["recommended"]
    assert best["budget_mb"] == "all" and f"LCE_LOGITS_BUDGET_MB=all ({best['peak_mib']:.0f} MiB" in text
    assert [row["withheld_rows"] for row in report["budgets"]] == [0, 1792, 3840, 7936, 12032, 0]
    assert "fewer rows are kept than some budgets hold" in text
    assert "16160 on each of 8 ranks" in text and "fitted to measurements on one H200" in text


def test_an_estimate_says_so_and_amd_has_no_time(capsys):
    _, text, _ = run(capsys, *SMALL, "--device", "B200")
    assert "ESTIMATE, never measured on NVIDIA B200" in text and "time ms" in text
    _, text, _ = run(capsys, *SMALL, "--device", "mi300x", "--free-memory", "1GiB")
    assert "gfx942" in text and "not predicted: nothing was ever timed on an AMD GPU" in text and "time ms" not in text
    report = json.loads(run(capsys, *SMALL, "--device", "mi300x", "--json")[1])
    assert {row["time_ms"] for row in report["budgets"]} == {None} and report["budgets"][0]["flops"] == 8 * 64 * 32000
    _, text, _ = run(capsys, *SMALL, "--device", "h200", "--dtype", "fp32")
    assert "not predicted: only bf16 was measured" in text and "megatron-core" not in text


def test_nothing_fits_is_said(capsys):
    status, text, _ = run(capsys, "--tokens", "8192", "--hidden", "4096", "--vocab", "32000", "--free-memory", "100MiB")
    assert status == 0 and "Nothing fits 100 MiB" in text
    assert "--free-memory SIZE" in run(capsys, *SMALL)[1]


def test_chunk_widths_in_force_are_planned_with(capsys, monkeypatch):
    monkeypatch.setenv("LCE_TRITON_BWD_VOCAB_SPLIT_SIZE", "512")
    report = json.loads(run(capsys, *SMALL, "--json")[1])
    assert report["budgets"][0]["chunk_rows"]["backward"] == 512
    assert "In force: LCE_TRITON_BWD_VOCAB_SPLIT_SIZE=512" in run(capsys, *SMALL)[1]
    monkeypatch.setenv("LCE_TRITON_BWD_VOCAB_SPLIT_SIZE", "wide")
    status, _, error = run(capsys, *SMALL)
    assert status == 2 and "LCE_TRITON_BWD_VOCAB_SPLIT_SIZE must be a whole number" in error


def test_from_a_training_config(capsys):
    pytest.importorskip("yaml", reason="needs pyyaml (pip install 'loongforge[train]')")
    report = json.loads(run(capsys, "--config", str(ROOT / "configs/llama3_8b.yaml"), "--json")[1])
    expected = {"tokens": 8192, "hidden": 4096, "vocab": 128256, "tp": 8, "sequence_parallel": True, "dtype": "bf16"}
    assert expected.items() <= report["layer"].items()
    words = ("--config", str(ROOT / "configs/llama3_8b.yaml"), "--tp", "1", "--no-sequence-parallel", "--tokens", "99")
    changed = json.loads(run(capsys, *words, "--json")[1])["layer"]
    assert (changed["tp"], changed["tokens"], changed["sequence_parallel"]) == (1, 99, False)


@pytest.mark.parametrize(
    "config",
    (
        {"hidden_size": 64, "vocab_size": 1024, "torch_dtype": "float32"},
        {"n_embd": 64, "vocab_size": 1024, "dtype": "float32"},
        {
            "vision_config": {"hidden_size": 3},
            "text_config": {"hidden_size": 64, "vocab_size": 1024},
            "dtype": "float32",
        },
        {"n_embed": 64, "vocab_size": 1024, "dtype": "float32"},
        {"hidden_size": 64, "padded_vocab_size": 1024, "dtype": "float32"},
        {"llm_config": {"hidden_size": 64, "vocab_size": 1024}, "hidden_size": 3, "dtype": "float32"},
        {"language_config": {"hidden_size": 64, "vocab_size": 1024}, "dtype": "float32"},
        {"encoder": {"hidden_size": 3}, "decoder": {"hidden_size": 64, "vocab_size": 1024, "dtype": "float32"}},
        {
            "talker_config": {"text_config": {"hidden_size": 3, "vocab_size": 5}},
            "thinker_config": {"text_config": {"hidden_size": 64, "vocab_size": 1024}},
            "dtype": "float32",
        },
    ),
    ids=("plain", "gpt2", "nested", "bloom", "chatglm", "internvl", "deepseek-vl2", "encoder-decoder", "omni"),
)
def test_from_a_hugging_face_config(capsys, tmp_path, config):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    report = json.loads(run(capsys, "--hf", str(file), "--tokens", "128", "--json")[1])
    assert {"tokens": 128, "hidden": 64, "vocab": 1024, "dtype": "fp32"}.items() <= report["layer"].items()
    assert (
        json.loads(run(capsys, "--hf", str(file), "--tokens", "8", "--dtype", "bf16", "--json")[1])["layer"]["dtype"]
        == "bf16"
    )
    assert "--tokens not given" in run(capsys, "--hf", str(file))[2]


@pytest.mark.parametrize(
    ("words", "message"),
    (
        ((), "--tokens, --hidden, --vocab not given"),
        ((*SMALL, "--tp", "3"), "must be a multiple of --tp 3, as every rank holds equally many rows: pad it to 1152"),
        ((*SMALL, "--sequence-parallel"), "tp must divide it, and be > 1"),
        ((*SMALL, "--device", "h300"), "--device must be one of h200"),
        (("--hf", "nowhere.json"), "--hf nowhere.json cannot be read as JSON"),
        (("--config", "nowhere.yaml"), "config file nowhere.yaml does not exist"),
    ),
)
def test_bad_input(capsys, words, message):
    status, out, error = run(capsys, *words)
    assert status == 2 and not out and message in error and error.startswith("loongforge: error: ")


@pytest.mark.parametrize(
    ("config", "message"),
    (
        ("[]", "must hold a whole number hidden_size from 1 to 2**31 - 1, got None"),
        ('{"hidden_size": 4}', "must hold a whole number vocab_size from 1 to 2**31 - 1, got None"),
        ('{"hidden_size": 4, "vocab_size": 2147483648}', "vocab_size from 1 to 2**31 - 1, got 2147483648"),
        ('{"hidden_size": "4", "vocab_size": 8}', "hidden_size from 1 to 2**31 - 1, got '4'"),
        ('{"hidden_size": 4, "vocab_size": 8, "dtype": "int8"}', "dtype 'int8' is none of bfloat16, float16, float32"),
        ('{"hidden_size": 4, "vocab_size": 8, "dtype": ["int8"]}', "dtype ['int8'] is none of bfloat16"),
    ),
)
def test_a_config_json_that_says_too_little(capsys, tmp_path, config, message):
    """The message names the flag that says it instead, and with that flag it is said."""
    file = tmp_path / "config.json"
    file.write_text(config)
    status, _, error = run(capsys, "--hf", str(file), "--tokens", "8")
    assert status == 2 and message in error and ": say --" in error
    flags = ("--hidden", "4", "--vocab", "8", "--dtype", "fp16", "--json")
    status, out, _ = run(capsys, "--hf", str(file), "--tokens", "8", *flags)
    layer = json.loads(out)["layer"]
    assert status == 0 and (layer["hidden"], layer["vocab"], layer["dtype"]) == (4, 8, "fp16")


@pytest.mark.parametrize("content", (b"", b"\xff\xfe\x00", b"[" * 100_000), ids=("empty", "binary", "deep"))
def test_a_config_json_that_is_none(capsys, tmp_path, content):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    status, _, error = run(capsys, "--hf", str(file), "--tokens", "8")
    assert status == 2 and error.startswith("loongforge: error: --hf ") and "cannot be read as JSON" in error


def test_sizes_of_memory():
    assert memory_size("20GiB") == 20 << 30 and memory_size("512MiB") == 512 << 20
    assert memory_size("16GB") == 16 * 10**9 and memory_size("1.5KiB") == 1536 and memory_size("7") == 7
    for text in ("", "GiB", "-1GiB", "5GiBB", "1e99", "nan", "5giB"):
        with pytest.raises(Exception, match="must be a size such as 20GiB"):
            memory_size(text)


@pytest.mark.parametrize("words", ((*SMALL[:-1], "0"), (*SMALL, "--free-memory", "much"), (*SMALL, "--dtype", "int4")))
def test_flags_that_argparse_refuses(capsys, words):
    with pytest.raises(SystemExit) as stop:
        run(capsys, *words)
    assert stop.value.code == 2 and "error: argument" in capsys.readouterr().err


def test_a_huge_vocabulary_tries_a_bounded_number_of_budgets(monkeypatch):
    """And still finds one that fits and nearly fills what is free."""
    asked = layer(16384, 4096, 100_000_000)
    tried = []
    monkeypatch.setattr(advise, "row", lambda *given, row=advise.row: tried.append(given) or row(*given))
    best = advise.recommend(asked, 2 << 40, None, False)
    assert len(tried) <= advise.MOST_BUDGETS + 2
    assert best is not None and 0.98 * (2 << 40) < best.peak_bytes * advise.MARGIN <= 2 << 40


def test_a_folder_a_byte_order_mark_and_a_projected_embedding(capsys, tmp_path):
    """OPT-350m's head is as wide as its embedding, not as its layers."""
    config = {"hidden_size": 1024, "word_embed_proj_dim": 512, "vocab_size": 50272, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8-sig")
    report = json.loads(run(capsys, "--hf", str(tmp_path), "--tokens", "128", "--json")[1])
    assert report["layer"]["hidden"] == 512 and report["layer"]["vocab"] == 50272


@pytest.mark.parametrize("number", ("99999999999", "0", "-1", "\u0663", "1.5"))
def test_sizes_are_whole_numbers_that_a_tensor_can_have(capsys, number):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--tokens", number, "--hidden", "8", "--vocab", "9"])
    assert "must be a whole number from 1 to 2**31 - 1" in capsys.readouterr().err or number == "-1"
