"""Megatron's own ``pretrain()`` through the launcher, and the script that compares its runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.megatron.launching import ROOT, environment
from tests.megatron.matrix import UNPACKED
from tests.megatron.scripts import script

HALF = "unfused, half micro-batches"
# typing.override is Python 3.12's; Megatron's training code imports it.
SITE = """
import typing
typing.override = getattr(typing, "override", lambda function: function)
"""
MODEL = (
    "--num-layers 2 --hidden-size 128 --seq-length 32 --vocab-size 500 --micro-batch-size 2 --train-iters 5 "
    "--timed-steps 3 --jobs 2 --specs local"
)


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    return script("compare_megatron")


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return script("megatron_table")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", UNPACKED)
def test_pretrain_unfused_and_fused(version, tmp_path, request):
    if version != "0.19.2" and not request.config.getoption("--full-matrix", False):
        pytest.skip("runs with --full-matrix")
    (tmp_path / "sitecustomize.py").write_text(SITE)
    variables = environment(version)
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), variables["PYTHONPATH"]])
    command = [sys.executable, "scripts/compare_megatron.py", "--output-dir", str(tmp_path)]
    command += [*MODEL.split(" "), "--rows", "unfused", "linear", HALF]
    result = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=900)
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        logs = "\n".join(archive.extractfile(name).read().decode() for name in archive.getnames())
    assert result.returncode == 0, result.stdout + result.stderr[-2000:] + logs[-3000:]
    unfused, half, linear = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert linear["fused_losses"] == 5 and unfused["fused_losses"] == 0
    assert len(linear["losses"]) == 5 and linear["losses"] == pytest.approx(unfused["losses"], rel=2e-3)
    assert linear["grad_norms"] == pytest.approx(unfused["grad_norms"], rel=2e-2)
    assert len(set(linear["losses"])) == 5, "nothing was updated"
    assert half["losses"] == pytest.approx(unfused["losses"], rel=2e-3)
    assert half["grad_norms"] == pytest.approx(unfused["grad_norms"], rel=2e-2)
    for outcome in (unfused, half, linear):
        assert outcome["alone_from"] == 3 and len(outcome["milliseconds"]) == 5
    assert (tmp_path / "compare.md").read_text() in result.stdout and "not timed" not in result.stdout
    assert "| local, linear | " in result.stdout and f"megatron-core {version}" in logs


LOG = """
 [09:54:16.308] iteration        1/       2 | consumed samples: 4 | elapsed time per iteration (ms): 226.2 |\
 learning rate: 1.0E-03 | global batch size: 4 | lm loss: 6.938772E+00 | loss scale: 1.0 | grad norm: 1.455 |
 [09:54:16.507] iteration        2/       2 | consumed samples: 8 | elapsed time per iteration (ms): 100.0 |\
 learning rate: 1.0E-03 | global batch size: 4 | lm loss: nan | loss scale: 1.0 | grad norm: nan |
ALONE FROM STEP 1
PEAK MEMORY BYTES 2147483648
loongforge: 12 fused losses, 0 times materialised logits
"""


def test_a_log_is_read(tables):
    outcome = tables.Outcome("local, linear", "local, unfused")
    tables.read_log(LOG, outcome)
    assert outcome.losses[0] == 6.938772 and outcome.losses[1] != outcome.losses[1]
    assert outcome.grad_norms[0] == 1.455 and outcome.milliseconds == [226.2, 100.0]
    assert outcome.peak_bytes == 2 << 30 and outcome.fused_losses == 12
    assert tables.speed_cell(outcome, 50) == "500 (500 to 500)"  # step 1 waited for its turn
    outcome.alone_from = 0
    assert tables.speed_cell(outcome, 50) == "not timed"


def test_differences_say_where_and_how_typical_they_are(tables):
    """One step of 50 differs by 3, after the first ten; half of the others by 0.01."""
    expected = [2.0] * 50
    values = [2.0 * (1.01 if step % 2 else 1.0) for step in range(50)]
    values[43] = 8.0
    assert tables.difference_cell(values, expected) == "1.0e-02 / 5.0e-03 / 3.0e+00 (44)"
    values[46] = float("nan")
    assert tables.difference_cell(values, expected).endswith("nan (47)")


def test_a_quotient_has_the_spread_of_both_rows(tables):
    base = tables.Outcome("base", "base", milliseconds=[999, 50, 50, 60, 70, 70], alone_from=1)
    ours = tables.Outcome("ours", "base", milliseconds=[999, 999, 20, 20, 30, 40, 40], alone_from=2)
    assert tables.quotient_cell(ours, base) == "2.00 (1.25 to 3.50)"
    assert tables.speed_cell(ours, 60) == "2000 (1500 to 3000)"
    assert tables.quotient_cell(ours, tables.Outcome("base", "base", milliseconds=[50.0])) == ""


def test_rows_that_left_the_unfused_losses_or_failed_are_named(tables):
    base = tables.Outcome("base", "base", [2.0, 1.0], [1.0, 1.0], [10.0, 10.0])
    near = tables.Outcome("near", "base", [2.0, 1.01], [1.0, 1.1], [10.0, 5.0], alone_from=1, peak_bytes=3 << 30)
    far = tables.Outcome("far", "base", [2.0, 1.1], [1.0, 1.0], [10.0, 10.0])
    nan = tables.Outcome("nan", "base", [2.0, float("nan")], [1.0, 1.0], [10.0, 10.0])
    died = tables.Outcome("died", "base", error="failed (status 1)")
    absent = tables.Outcome("absent", "base", error="not run: transformer-engine absent")
    orphan = tables.Outcome("orphan", "died", [2.0], [1.0], [10.0])
    outcomes = [base, near, far, nan, died, absent, orphan]
    assert tables.wrong_rows(outcomes, 2e-2) == ["far", "nan", "died"]
    sizes = {"seq_length": 50, "micro_batch_size": 2, "global_batch_size": 0, "train_iters": 2}
    table = tables.table(outcomes, {**sizes, "versions": {"device": "NVIDIA H200"}})
    near = "1.0e-02 / 5.0e-03 / 1.0e-02 (2) | 1.0e-01 / 5.0e-02 / 1.0e-01 (2)"
    assert f"| near | 1.010000 | {near} | 20000 (20000 to 20000) |  | 3.0 |" in table
    assert "| absent | not run: transformer-engine absent |" in table
    assert "| orphan | 2.000000 |  |  | not timed |  | unknown |" in table
    assert "device NVIDIA H200, 2 steps of 100 tokens." in table


def settings(compare, *flags):
    return compare.parse(["--output-dir", "unused", *flags])


def test_missing_requirements_are_said_and_not_failures(compare, monkeypatch):
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
    rows = compare.rows(settings(compare, "--fp8-recipes", "delayed", "--graph"))
    assert [row.missing for row in rows if row.name.startswith("local")] == [""] * 5
    assert {row.missing for row in rows if row.name.startswith("te")} == {"not run: transformer-engine absent"}
    monkeypatch.setattr(compare, "find_spec", lambda name: object())
    (unfused, _, linear) = compare.rows(settings(compare, "--specs", "--fp8-recipes", "mxfp8"))
    assert linear.base == unfused.name and "needs compute capability 10.0" in linear.missing


TRAINS = """
import sys, time
if "linear" in sys.argv and not __import__("os").path.exists({mark!r}):
    open({mark!r}, "w").close()
    raise MemoryError("CUDA out of memory. Tried to allocate 4.00 GiB")
for step in (1, 2):
    print(f"iteration {{step}}/ 2 | elapsed time per iteration (ms): 10 | lm loss: 2.0 | grad norm: 1.0 |", flush=True)
    time.sleep({seconds})
print("loongforge: 2 fused losses")
"""


def compared(compare, folder, seconds, *flags):
    """The whole comparison of a script that trains nothing."""
    arguments = settings(compare, "--train-iters", "2", "--timed-steps", "2", "--specs", "local", *flags)
    arguments.output_dir = folder
    comparison = compare.Comparison(arguments, folder)
    program = TRAINS.format(mark=str(folder / "mark"), seconds=seconds)

    def job(row):
        log = folder / f"{row.name}.log"
        return compare.Job(row.name, [sys.executable, "-c", program, *row.flags], log, dict(os.environ))

    comparison.job = job
    comparison.run()
    return json.loads((folder / "compare.json").read_text())["rows"]


def test_rows_of_an_earlier_run_stay_and_only_missing_and_named_ones_run(compare, tmp_path):
    def ran(*flags):
        compared(compare, tmp_path / "2", 0, "--add-to", str(tmp_path / "1/compare.json"), "--jobs", "1", *flags)
        return sorted(path.stem for path in (tmp_path / "2").glob("*.log")), (tmp_path / "2/compare.md").read_text()

    for name in "12":
        (tmp_path / name).mkdir()
        (tmp_path / name / "mark").touch()
    compared(compare, tmp_path / "1", 0, "--rows", "native", "--jobs", "1")
    names, table = ran("--rows", "linear")
    assert names == ["local, linear"] and table.count("\n| local, ") == 3
    names, table = ran("--rows", HALF, "linear")  # in the order of the losses
    places = [table.index(f"| local, {loss} |") for loss in ("unfused", HALF, "native", "linear")]
    assert places == sorted(places)
    (tmp_path / f"2/local, {HALF}.log").unlink()
    names, table = ran("--rows", "linear")
    (tmp_path / "2/local, linear.log").unlink()
    names, table = ran("--rows", "native")
    assert names == ["local, native"] and table.count("\n| local, ") == 2
    with pytest.raises(SystemExit, match="measured with seq_length 2048, this run has 64"):
        ran("--seq-length", "64")
    (tmp_path / "2/compare.md").unlink()
    compare.redraw(tmp_path / "2")
    assert (tmp_path / "2/compare.md").read_text() == table


def test_rows_that_had_not_run_yet_when_a_run_was_ended_run_later(compare, tables, tmp_path):
    (tmp_path / "mark").touch()
    rows = compared(compare, tmp_path, 0, "--rows", "native", "linear", "--jobs", "1")
    for row in rows[:2]:  # the one that the last is compared with, and another
        row.update(losses=[], grad_norms=[], milliseconds=[], fused_losses=0)
    content = json.loads((tmp_path / "compare.json").read_text()) | {"rows": rows}
    (tmp_path / "compare.json").write_text(json.dumps(content))
    outcomes, table = compare.redraw(tmp_path)
    assert table.count("| not run: not yet |") == 2 and tables.wrong_rows(outcomes, 2e-2) == []
    for log in tmp_path.glob("*.log"):
        log.unlink()
    compared(compare, tmp_path, 0, "--add-to", str(tmp_path / "compare.json"), "--jobs", "1", "--rows", "native")
    assert sorted(log.stem for log in tmp_path.glob("*.log")) == ["local, native", "local, unfused"]


@pytest.mark.parametrize(
    "text", ["", "[]", "5", "\xff\xfe", '{"rows": [{"name": "x"}]}', '{"settings": {}, "rows": [{}]}', None]
)
def test_what_holds_no_results_is_named_without_a_traceback(compare, monkeypatch, tmp_path, text):
    training = script("compare_training")
    for name in ("compare.json", "training.json") if text is not None else ():
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(SystemExit, match=r"compare.json holds no results of this script: \w+: "):
        compare.redraw(tmp_path)
    with pytest.raises(SystemExit, match=r"compare.json holds no results of this script: \w+: "):
        compare.earlier(tmp_path / "compare.json", {"seq_length": 64})
    monkeypatch.setattr(sys, "argv", ["compare_training.py", "--output-dir", str(tmp_path), "--redraw"])
    with pytest.raises(SystemExit, match=r"training.json holds no results of this script: \w+: "):
        training.main()


def test_halves_need_an_even_micro_batch(compare, capsys):
    (half,) = (row for row in compare.rows(settings(compare, "--specs", "local")) if row.loss == HALF)
    assert half.base == "local, unfused" and half.flags[-2:] == ("--micro-batch-size", "1")
    odd = settings(compare, "--micro-batch-size", "3", "--specs", "local")
    assert HALF not in [row.loss for row in compare.rows(odd)] and len(compare.rows(odd)) == 4
    with pytest.raises(SystemExit):
        settings(compare, "--micro-batch-size", "3", "--rows", HALF)
    assert "needs an even --micro-batch-size, this is 3" in capsys.readouterr().err


def test_without_timed_steps_nothing_waits(compare, tmp_path):
    arguments = settings(compare, "--timed-steps", "0", "--specs", "local", "--rows", "linear")
    comparison = compare.Comparison(arguments, tmp_path)
    assert "TIMED_STEPS" not in comparison.job(comparison.rows[0]).environment


def test_a_row_that_ran_out_of_memory_beside_others_runs_again_alone(compare, tmp_path):
    beside, alone = tmp_path / "beside", tmp_path / "alone"
    for folder in (beside, alone):
        folder.mkdir()
    unfused, linear = compared(compare, beside, 0, "--rows", "linear", "--jobs", "2")
    assert (unfused["error"], linear["error"], linear["fused_losses"]) == ("", "", 2)
    unfused, linear = compared(compare, alone, 0, "--rows", "linear", "--jobs", "1")
    assert unfused["error"] == "" and "out of memory" in linear["error"] and linear["log_tail"]


def test_the_time_limit_leaves_results_and_names_what_is_missing(compare, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "LEAST", 2.0)
    (tmp_path / "mark").touch()
    started = time.monotonic()
    flags = ("--rows", "native", "--jobs", "1", "--time-limit", "8")
    unfused, native = compared(compare, tmp_path, 200, *flags)
    assert time.monotonic() - started < 100
    assert unfused["error"] == "stopped at the time limit after 1 of 2 steps" and unfused["losses"] == [2.0]
    assert native["error"].startswith("not run: --time-limit 8 left") and "| local, native | not run" in (
        Path(tmp_path / "compare.md").read_text()
    )


def test_the_long_run_reads_docstrings_and_judges_by_the_noise_between_seeds(tmp_path, capsys):
    training = script("compare_training")
    (tmp_path / "code.py").write_text('"""Module."""\ndef f():\n    """Function."""\n')
    assert training.docstrings(tmp_path / "code.py") == "Module.\n\nFunction.\n\n"
    (tmp_path / "broken.py").write_text("def (")
    assert training.docstrings(tmp_path / "broken.py") == ""
    finals = {"fused": [1.00, 1.02, 1.04], "unfused": [1.01, 1.02, 1.04]}
    runs = [
        {"variant": variant, "seed": seed, "validation": {"100": 2.0, "1200": value}}
        for variant, values in finals.items()
        for seed, value in enumerate(values)
    ]
    runs.append({"variant": "fused", "seed": 7, "validation": {"1200": 9.0}})  # its partner had no time
    versions = {"device": "a GPU", "torch": "2.13"}
    content = {"runs": runs, "versions": versions, "cosines": {f"seed {seed}": 0.99 for seed in range(3)}}
    assert training.report(content, sigmas=2.0)
    runs[0]["validation"]["1200"] = 1.5
    assert not training.report(content, sigmas=0.1)
    assert "| 1 | 1.02000 | 1.02000 | +0.00000 | 0.990000 |" in capsys.readouterr().out
    runs.append({"variant": "native", "seed": 1, "validation": {"1200": 1.04}})
    content = {"runs": runs, "versions": versions, "cosines": {"native, seed 1": 0.97}}
    training.report(content, sigmas=2.0)
    printed = capsys.readouterr().out
    assert "device a GPU, torch 2.13\n" in printed
    assert "| native | 1 | 1.04000 | +0.02000 | 0.970000 |" in printed
    training.report({**content, "cosines": {}}, sigmas=2.0)  # ended before they were computed
    assert "| 1 | 1.02000 | 1.02000 | +0.00000 | nan |" in capsys.readouterr().out


def test_text_is_taken_from_installed_packages(tmp_path, monkeypatch):
    training = script("compare_training")
    monkeypatch.setattr(training, "PACKAGES", ())
    written = training.write_text(tmp_path / "docs.txt", max_files=20)
    assert 0 < written <= (tmp_path / "docs.txt").stat().st_size + 20


TEXT = "A line of text, and another one.\n\n" * 200


def test_text_of_an_earlier_run_is_used_again(tmp_path, monkeypatch):
    training = script("compare_training")
    made = []
    monkeypatch.setattr(training, "write_text", lambda path, max_files: made.append(path) or path.write_text(TEXT))
    flags = ["--output-dir", str(tmp_path), "--work-dir", str(tmp_path), "--vocab-size"]
    first = training.prepare_text(training.parse([*flags, "300"]))
    assert training.prepare_text(training.parse([*flags, "300"])) == first and len(made) == 1
    training.prepare_text(training.parse([*flags, "310"]))
    assert len(made) == 2


def test_yardsticks_differ_from_the_plain_run_in_one_setting(tmp_path):
    training = script("compare_training")
    arguments = training.parse(["--output-dir", str(tmp_path), "--work-dir", str(tmp_path), "--yardsticks", "half"])
    names = ("unfused", "half", "native", "again")
    plain, half, native, again = (training.configuration(arguments, name, 1) for name in names)
    assert again.training == plain.training and again.output_layer == plain.output_layer
    assert (half.training.micro_batch_size, plain.training.micro_batch_size) == (16, 32)
    assert (
        half.training.global_batch_size == plain.training.global_batch_size and half.output_layer == plain.output_layer
    )
    assert native.training == plain.training and native.output_layer.cross_entropy_fusion_impl == "native"
