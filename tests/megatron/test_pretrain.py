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

# typing.override is Python 3.12's; Megatron's training code imports it.
SITE = """
import typing
typing.override = getattr(typing, "override", lambda function: function)
"""
MODEL = (
    "--num-layers 2 --hidden-size 128 --seq-length 32 --vocab-size 500 --micro-batch-size 2 --train-iters 5 "
    "--timed-steps 3 --jobs 2 --specs local --rows unfused linear"
)


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    return script("compare_megatron")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", UNPACKED)
def test_pretrain_unfused_and_fused(version, tmp_path, request):
    if version != "0.19.2" and not request.config.getoption("--full-matrix", False):
        pytest.skip("runs with --full-matrix")
    (tmp_path / "sitecustomize.py").write_text(SITE)
    variables = environment(version)
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), variables["PYTHONPATH"]])
    command = [sys.executable, "scripts/compare_megatron.py", "--output-dir", str(tmp_path), *MODEL.split(" ")]
    result = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=900)
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        logs = "\n".join(archive.extractfile(name).read().decode() for name in archive.getnames())
    assert result.returncode == 0, result.stdout + result.stderr[-2000:] + logs[-3000:]
    unfused, linear = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert linear["fused_losses"] == 5 and unfused["fused_losses"] == 0
    assert len(linear["losses"]) == 5 and linear["losses"] == pytest.approx(unfused["losses"], rel=2e-3)
    assert linear["grad_norms"] == pytest.approx(unfused["grad_norms"], rel=2e-2)
    assert len(set(linear["losses"])) == 5, "nothing was updated"
    for outcome in (unfused, linear):
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


def test_a_log_is_read(compare):
    outcome = compare.Outcome("local, linear", "local, unfused")
    compare.read_log(LOG, outcome)
    assert outcome.losses[0] == 6.938772 and outcome.losses[1] != outcome.losses[1]
    assert outcome.grad_norms[0] == 1.455 and outcome.milliseconds == [226.2, 100.0]
    assert outcome.peak_bytes == 2 << 30 and outcome.fused_losses == 12
    assert compare.tokens_per_second(outcome, 50) == 500  # step 1 waited for its turn
    outcome.alone_from = 0
    assert compare.tokens_per_second(outcome, 50) is None


def test_rows_that_left_the_unfused_losses_or_failed_are_named(compare):
    base = compare.Outcome("base", "base", [2.0, 1.0], [1.0, 1.0], [10.0, 10.0])
    near = compare.Outcome("near", "base", [2.0, 1.01], [1.0, 1.1], [10.0, 5.0], alone_from=1, peak_bytes=3 << 30)
    far = compare.Outcome("far", "base", [2.0, 1.1], [1.0, 1.0], [10.0, 10.0])
    nan = compare.Outcome("nan", "base", [2.0, float("nan")], [1.0, 1.0], [10.0, 10.0])
    died = compare.Outcome("died", "base", error="failed (status 1)")
    absent = compare.Outcome("absent", "base", error="not run: transformer-engine absent")
    orphan = compare.Outcome("orphan", "died", [2.0], [1.0], [10.0])
    outcomes = [base, near, far, nan, died, absent, orphan]
    assert compare.wrong_rows(outcomes, 2e-2) == ["far", "nan", "died"]
    table = compare.table(outcomes, settings(compare, "--seq-length", "50", "--micro-batch-size", "2"))
    assert "| near | 2.000000 | 1.010000 | 1.0e-02 | 1.0e-01 | 20000 | 3.0 |" in table
    assert "| absent | not run: transformer-engine absent |" in table
    assert "| orphan | 2.000000 | 2.000000 |  |  | not timed | unknown |" in table


def settings(compare, *flags):
    return compare.parse(["--output-dir", "unused", *flags])


def test_missing_requirements_are_said_and_not_failures(compare, monkeypatch):
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
    rows = compare.rows(settings(compare, "--fp8-recipes", "delayed", "--graph"))
    assert [row.missing for row in rows if row.name.startswith("local")] == [""] * 4
    assert {row.missing for row in rows if row.name.startswith("te")} == {"not run: transformer-engine absent"}
    monkeypatch.setattr(compare, "find_spec", lambda name: object())
    (unfused, linear) = compare.rows(settings(compare, "--specs", "--fp8-recipes", "mxfp8"))
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
    content = {"runs": runs, "cosines": {f"seed {seed}": 0.99 for seed in range(3)}}
    assert training.report(content, sigmas=2.0)
    runs[0]["validation"]["1200"] = 1.5
    assert not training.report(content, sigmas=0.1)
    assert "| 1 | 1.02000 | 1.02000 | +0.00000 | 0.990000 |" in capsys.readouterr().out
    training.report({"runs": runs, "cosines": {}}, sigmas=2.0)  # ended before they were computed
    assert "| 1 | 1.02000 | 1.02000 | +0.00000 | nan |" in capsys.readouterr().out


def test_text_is_taken_from_installed_packages(tmp_path, monkeypatch):
    training = script("compare_training")
    monkeypatch.setattr(training, "PACKAGES", ())
    written = training.write_text(tmp_path / "docs.txt", max_files=20)
    assert 0 < written <= (tmp_path / "docs.txt").stat().st_size + 20
