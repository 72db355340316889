"""The logic of the comparison on CPU: truth, verdicts, table, picture; nothing depends on how long a call took."""

import argparse
import io
import json
import math
import re
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from loongforge import cli
from loongforge.bench import kernels, memory, options, report, sft, tensor_parallel
from loongforge.bench import run as bench_run
from loongforge.bench.contenders import PEERS, Contender, ours
from loongforge.bench.measure import Problem, Result, make_problem, measure
from loongforge.bench.progress import Progress
from loongforge.bench.report import draw, duels, table, write_json
from loongforge.bench.shapes import SHAPES, HeadShape, parse_shape, shapes_of
from loongforge.errors import UsageError
from tests.helpers import worst

SHAPE = HeadShape("tiny", 37, 16, 101)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem(SHAPE, CPU, torch.float32)


def eager(reduction, grad_scale=1.0):
    def loss(hidden, weight, target):
        value = functional.cross_entropy(hidden @ weight.t(), target, reduction=reduction)
        return grad_scale * value + (1.0 - grad_scale) * value.detach()

    return lambda: loss


def arguments(*words):
    parser = argparse.ArgumentParser()
    bench_run.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("per_token", (True, False))
def test_truth_is_the_gradient_of_the_loss(problem, per_token):
    hidden, weight = (tensor.double().requires_grad_() for tensor in (problem.hidden_TH, problem.weight_VH))
    loss = functional.cross_entropy(hidden @ weight.t(), problem.target_T, reduction="none" if per_token else "mean")
    loss.backward(problem.upstream_T.double() if per_token else None)
    assert (problem.target_T == -100).any()
    for actual, expected in zip(problem.truth[per_token], (loss, hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(actual.double(), expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("per_token", (True, False))
def test_a_right_contender_is_measured(problem, per_token):
    contender = Contender("eager", per_token, eager("none" if per_token else "mean"))
    result = measure(contender, SHAPE, problem, repetitions=1)
    assert result.status == "ok"
    assert result.step_ms > 0 and result.forward_ms > 0 and result.ratio == result.step_ms / result.floor_ms
    assert worst(result.errors.values()) < 1e-5
    logits, gradients = SHAPE.tokens * SHAPE.vocab * 4, SHAPE.vocab * SHAPE.hidden * 4
    assert max(2 * logits, logits + gradients) < result.peak_mib * 2**20 < 4 * logits + 2 * gradients


def test_a_wrong_gradient_is_reported_and_not_timed(problem):
    result = measure(Contender("off", False, eager("mean", grad_scale=0.9)), SHAPE, problem, repetitions=1)
    assert result.status.startswith("wrong: grad_hidden, grad_weight") and math.isnan(result.step_ms)


def test_a_nan_is_wrong(problem):
    result = measure(Contender("nan", False, eager("mean", grad_scale=math.nan)), SHAPE, problem, repetitions=1)
    assert result.status.startswith("wrong: loss")


def test_what_a_contender_raises_becomes_its_line(problem):
    def missing():
        raise ImportError("No module named 'peer'")

    def broken():
        raise ValueError("bad shape\nsecond line")

    def silent():
        raise AssertionError

    results = [measure(Contender(f.__name__, False, f), SHAPE, problem, 1) for f in (missing, broken, silent)]
    assert [result.status for result in results] == [
        "not installed: No module named 'peer'",
        "failed: ValueError: bad shape",
        f"failed: AssertionError: test_bench.py:{silent.__code__.co_firstlineno + 1}: raise AssertionError",
    ]
    text = table(SHAPE, results)
    assert "not installed" in text and "bad shape" in text


def test_everyone_is_timed_behind_a_floor(problem):
    ran = []
    recorded = replace(problem, floor=lambda: (ran.append("floor"), problem.floor()))

    def build():
        loss = eager("mean")()

        def run(*operands):
            ran.append("loss")
            return loss(*operands)

        return run

    result = measure(Contender("one", False, build), SHAPE, recorded, repetitions=1)
    assert result.floor_ms > 0 and result.forward_ratio == result.forward_ms / (result.floor_ms / 3)
    assert ran.count("floor") == 6, "two warm-ups and a repetition, each for a step and for the forward alone"


def line(name, step_ms, peak_mib, error=2e-3, is_ours=False, per_token=True):
    errors = {"loss": 1e-4, "grad_hidden": error, "grad_weight": error / 2}
    return Result("tiny", name, per_token, is_ours, None, "ok", step_ms, 1.0, 10.0, peak_mib, errors)


def test_duels_name_the_budget_that_wins_or_the_distance():
    mine = [line("ours 0", 14.0, 100.0, is_ours=True), line("ours all", 10.3, 300.0, is_ours=True)]
    peers = [
        line("slow", 15.0, 200.0),  # ours 0 wins in both
        line("big", 11.0, 900.0),  # only ours all is fast enough
        line("lean", 20.0, 50.0),  # less memory than any of ours
        line("exact", 20.0, 900.0, error=1e-4),  # as good a gradient as nobody of ours has
    ]
    slow, big, lean, exact = duels([*peers, *mine])
    assert slow.startswith("slow: beaten by ours 0 (time -6.7%, memory -100 MiB")
    assert big.startswith("big: beaten by ours all")
    assert lean.startswith("lean: not beaten; nearest ours 0 (time -30.0%, memory +50 MiB")
    assert exact.startswith("exact: not beaten")


def test_a_loss_per_token_is_not_beaten_by_a_mean():
    mine = [line("ours mean", 1.0, 1.0, is_ours=True, per_token=False)]
    assert duels([line("token", 2.0, 2.0), *mine]) == []
    assert duels([line("mean", 2.0, 2.0, per_token=False), *mine])[0].startswith("mean: beaten by ours mean")


def test_picture_and_json(tmp_path):
    mine = [line("ours 0", 14.0, 100.0, is_ours=True), line("ours all", 11.0, 300.0, is_ours=True)]
    results = [line("peer", 15.0, 200.0), *mine]
    write_json(tmp_path / "results.json", {"device": "none"}, results)
    loaded = json.loads((tmp_path / "results.json").read_text())
    assert loaded["results"][0]["ratio"] == 1.5 and loaded["environment"] == {"device": "none"}
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install 'loongforge[plot]')")
    draw(tmp_path / "tiny.png", SHAPE, results, "nothing")
    assert (tmp_path / "tiny.png").read_bytes().startswith(b"\x89PNG")


def test_whole_comparison_prints_the_table_last(tmp_path, capsys):
    options = arguments(
        "40x16x101", "--device", "cpu", "--dtype", "fp32", "--repetitions", "1",
        "--only", "torch eager,loongforge,cce", "--budgets", "0,all", "--output-dir", str(tmp_path / "new"),
    )  # fmt: skip
    results = bench_run.run(options)
    by_name = {result.name: result for result in results}
    for name in ("torch eager", "torch eager fp32 loss", "loongforge token 0", "loongforge mean all"):
        assert by_name[name].status == "ok", by_name[name].status
    captured = capsys.readouterr()
    table_lines = captured.out.rstrip().splitlines()[-(len(results) + 4) :]
    assert table_lines[0].startswith("40x16x101: T=40 H=16 V=101, three-GEMM floor")
    assert [line.split(":")[0] for line in table_lines[-2:]] == ["torch eager fp32 loss", "torch eager"]
    steps = captured.err.splitlines()
    assert len(steps) == len(results) and steps[0].startswith("  40x16x101 torch eager fp32 loss: ")
    saved = json.loads((tmp_path / "new/results.json").read_text())
    assert all(entry["peak_mib"] > 0 for entry in saved["results"] if entry["status"] == "ok")
    assert [entry["name"] for entry in saved["results"]] == [result.name for result in results]
    assert {"device", "versions", "command", "date"} <= set(saved["environment"])


def test_default_curve_runs_from_nothing_to_everything():
    budgets = bench_run.default_budgets(HeadShape("s", 8192, 4096, 128256), torch.bfloat16)
    assert budgets[0] == 0 and budgets[-1] == "all" and budgets[1:-1] == sorted(budgets[1:-1])


def test_names_are_unique():
    names = [contender.name for contender in (*PEERS, *ours([0, 100, "all"]))]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("text", ("llama9", "1x2", "0x2x3", "axbxc"))
def test_unknown_shapes_are_refused(text):
    with pytest.raises(UsageError, match="TOKENSxHIDDENxVOCAB"):
        parse_shape(text)


def test_shapes_by_name_and_by_sizes():
    assert shapes_of(arguments("llama2", "8x4x2"), "dsv3") == [SHAPES["llama2"], HeadShape("8x4x2", 8, 4, 2)]
    sizes = ("--tokens", "8", "--hidden", "4", "--vocab", "2")
    assert shapes_of(arguments("llama2", *sizes), "dsv3") == [SHAPES["llama2"], HeadShape("8x4x2", 8, 4, 2)]
    assert shapes_of(arguments(), "dsv3") == [SHAPES["dsv3"]]
    with pytest.raises(UsageError, match="belong together: --hidden and --vocab not given"):
        shapes_of(arguments("--tokens", "8"), "dsv3")


def test_unknown_budgets_names_and_devices_are_refused(capsys):
    with pytest.raises(UsageError, match="whole numbers of MiB or all"):
        bench_run.parse_budgets("0,half")
    with pytest.raises(UsageError, match="leaves nobody to measure"):
        bench_run.select(PEERS, "nobody", "")
    with pytest.raises(UsageError, match="must be cpu or cuda"):
        bench_run.device_of("meta")
    with pytest.raises(UsageError, match="is no device"):
        bench_run.device_of("h200")
    with pytest.raises(UsageError, match="is not there"):
        bench_run.device_of("cuda:99")
    assert cli.main(["bench", "llama9", "--device", "cpu"]) == 2
    assert "loongforge: error: a shape is one of" in capsys.readouterr().err
    for sizes in (("--tokens", "0"), ("--repetitions", "x")):
        with pytest.raises(SystemExit):
            arguments(*sizes)
        assert "must be a whole number from 1 to 2**31 - 1" in capsys.readouterr().err


def test_the_command_measures_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install 'loongforge[plot]')")
    words = ["--tokens", "40", "--hidden", "16", "--vocab", "101", "--only", "torch eager,loongforge token"]
    words += ["--device", "cpu", "--repetitions", "1", "--output-dir", str(tmp_path)]
    assert cli.main(["bench", *words]) == 0
    picture = tmp_path / "40x16x101.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    assert cli.main(["bench", "--redraw", str(tmp_path / "results.json")]) == 0
    assert picture.exists()
    (tmp_path / "results.json").write_text("[]")
    assert cli.main(["bench", "--redraw", str(tmp_path / "results.json")]) == 2
    assert "is not a results.json" in capsys.readouterr().err


def test_redraw_makes_table_and_pictures_of_every_shape(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(report, "draw", lambda path, shape, results, source: drawn.update({path.name: source}))
    environment = {"device": "GPU", "command": "now", "versions": {"torch": "2"}}
    errors = dict.fromkeys(("loss", "grad_hidden", "grad_weight"), 0.0)
    results = [
        Result(shape, name, True, name != "peer", 0, "ok", step_ms, 1.0, floor_ms, 1.0, errors)
        for shape in ("8x4x2", "16x4x8")
        for name, step_ms, floor_ms in (("peer", 4.0, 2.0), ("loongforge token 0", 6.0, 6.0))
    ]
    write_json(tmp_path / "results.json", environment, results)
    report.redraw(tmp_path / "results.json")
    assert drawn == {"8x4x2.png": "GPU", "16x4x8.png": "GPU"}
    top, *tables = (tmp_path / "table.txt").read_text().split("\n\n")
    assert top == "device GPU, command now\ntorch 2"
    assert [text.split(":")[0] for text in tables] == ["8x4x2", "16x4x8"]
    for text in tables:
        assert "floor 4.00 ms" in text, "the median"
        assert "peer: beaten by loongforge token 0 (time -50.0%" in text, "each time over its own floor"


@pytest.mark.parametrize(
    "words",
    (
        ("bench", "8x4x2", "--device", "cpu", "--output-dir", "{}"),
        ("bench", "8x4x2", "--device", "cpu", "--output-dir", "{}/new"),
        ("memory", "8x4x2", "--device", "cpu", "--output", "{}/new.json"),
    ),
    ids=" ".join,
)
def test_a_folder_that_cannot_be_is_refused_before_the_measurement(words, tmp_path, capsys, monkeypatch):
    for module in (bench_run, memory):
        monkeypatch.setattr(module, "make_problem", lambda *given: pytest.fail("measured first"))
    file = tmp_path / "file"
    file.write_text("here already")
    assert cli.main([word.format(file) for word in words]) == 2
    assert "results go to a folder that can be written to" in capsys.readouterr().err
    assert file.read_text() == "here already"


@pytest.mark.parametrize("module", (kernels, options, sft, tensor_parallel), ids=lambda module: module.__name__)
def test_every_benchmark_looks_at_its_folder_first(module, tmp_path):
    """Of the scripts, whose flags are their own."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    file = tmp_path / "file"
    file.write_text("here already")
    with pytest.raises(UsageError, match="a folder that can be written to"):
        module.run(parser.parse_args(["40x16x512", "--device", "cpu", "--output-dir", str(file)]))


@pytest.mark.parametrize(
    "results", ("5", "[]", "[5]", '[{"shape": "8x4x2"}]', '[{"shape": "8x4x2", "ratio": 1, "kernel": 2}]')
)
def test_results_of_something_else_are_not_drawn(results, tmp_path, capsys):
    file = tmp_path / "results.json"
    file.write_text(f'{{"environment": {{"device": "cpu"}}, "results": {results}}}')
    assert cli.main(["bench", "--redraw", str(file)]) == 2
    assert "is not a results.json of the comparison" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize(
    "damage",
    ({"errors": {}}, {"step_ms": "12"}, {"forward_ms": "x"}, {"floor_ms": 0}, {"environment": {"versions": None}}),
    ids=str,
)
def test_results_with_damage_inside_are_refused_by_name(damage, tmp_path, capsys):
    environment = {"device": "cpu", "versions": {}} | damage.get("environment", {})
    errors = dict.fromkeys(("loss", "grad_hidden", "grad_weight"), 0.0)
    result = Result("8x4x2", "loongforge token 0", True, True, 0, "ok", 1.0, 1.0, 1.0, 1.0, errors)
    write_json(tmp_path / "results.json", environment, [result])
    record = json.loads((tmp_path / "results.json").read_text())
    record["results"][0] |= {key: value for key, value in damage.items() if key != "environment"}
    (tmp_path / "results.json").write_text(json.dumps(record))
    assert cli.main(["bench", "--redraw", str(tmp_path / "results.json")]) == 2
    assert "is not a results.json of the comparison" in capsys.readouterr().err
    assert not (tmp_path / "table.txt").exists()


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_one_moving_line_on_a_terminal():
    stream = _Terminal()
    progress = Progress(4, stream)
    for name in ("a", "b"):
        with progress.step(name) as step:
            step.outcome = "1 ms"
    first, second = re.findall(r"\r(\[[^\r]*)", stream.getvalue())
    assert first.startswith("[........................] 0/4") and first.endswith(" a")
    assert second.startswith("[######..................] 1/4") and second.endswith(" b")
    assert stream.getvalue().endswith("\r\033[K  b: 1 ms\n")
