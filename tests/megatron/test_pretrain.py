"""Megatron's own ``pretrain()`` through the launcher, and the script that compares its runs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from types import ModuleType

import pytest

from tests.megatron.launching import ROOT, environment
from tests.megatron.matrix import UNPACKED

# typing.override is Python 3.12's; Megatron's training code imports it.
SITE = """
import typing
typing.override = getattr(typing, "override", lambda function: function)
"""
MODEL = (
    "--num-layers 2 --hidden-size 128 --seq-length 32 --vocab-size 500 --micro-batch-size 2 --train-iters 5 "
    "--specs local --rows unfused linear"
)


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look here
    spec.loader.exec_module(module)
    return module


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
    logs = "\n".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert result.returncode == 0, result.stdout + result.stderr[-2000:] + logs[-3000:]
    unfused, linear = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert linear["fused_losses"] == 5 and unfused["fused_losses"] == 0
    assert len(linear["losses"]) == 5 and linear["losses"] == pytest.approx(unfused["losses"], rel=2e-3)
    assert linear["grad_norms"] == pytest.approx(unfused["grad_norms"], rel=2e-2)
    assert len(set(linear["losses"])) == 5, "nothing was updated"
    assert "| local, linear | " in result.stdout and f"megatron-core {version}" in logs


LOG = """
 [09:54:16.308] iteration        1/       2 | consumed samples: 4 | elapsed time per iteration (ms): 226.2 |\
 learning rate: 1.0E-03 | global batch size: 4 | lm loss: 6.938772E+00 | loss scale: 1.0 | grad norm: 1.455 |
 [09:54:16.507] iteration        2/       2 | consumed samples: 8 | elapsed time per iteration (ms): 100.0 |\
 learning rate: 1.0E-03 | global batch size: 4 | lm loss: nan | loss scale: 1.0 | grad norm: nan |
PEAK MEMORY BYTES 2147483648
loongforge: 12 fused losses, 0 times materialised logits
"""


def test_a_log_is_read(compare):
    outcome = compare.Outcome("local, linear", "local, unfused")
    compare.read_log(LOG, outcome)
    assert outcome.losses[0] == 6.938772 and outcome.losses[1] != outcome.losses[1]
    assert outcome.grad_norms[0] == 1.455 and outcome.milliseconds == [226.2, 100.0]
    assert outcome.peak_bytes == 2 << 30 and outcome.fused_losses == 12


def test_rows_that_left_the_unfused_losses_or_failed_are_named(compare):
    base = compare.Outcome("base", "base", [2.0, 1.0], [1.0, 1.0], [10.0, 10.0])
    near = compare.Outcome("near", "base", [2.0, 1.01], [1.0, 1.1], [10.0, 5.0], peak_bytes=3 << 30)
    far = compare.Outcome("far", "base", [2.0, 1.1], [1.0, 1.0], [10.0, 10.0])
    nan = compare.Outcome("nan", "base", [2.0, float("nan")], [1.0, 1.0], [10.0, 10.0])
    died = compare.Outcome("died", "base", error="failed (status 1)")
    absent = compare.Outcome("absent", "base", error="not run: transformer-engine absent")
    outcomes = [base, near, far, nan, died, absent]
    assert compare.wrong_rows(outcomes, 2e-2) == ["far", "nan", "died"]
    table = compare.table(outcomes, tokens_per_step=100)
    assert "| near | 2.000000 | 1.010000 | 1.0e-02 | 1.0e-01 | 20000 | 3.0 |" in table
    assert "| absent | not run: transformer-engine absent |" in table


def test_missing_requirements_are_said_and_not_failures(compare, monkeypatch):
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
    rows = compare.rows(["local", "te"], ["delayed"], "hybrid", list(compare.LOSSES))
    assert [row.missing for row in rows if row.name.startswith("local")] == [""] * 4
    assert {row.missing for row in rows if row.name.startswith("te")} == {"not run: transformer-engine absent"}
    monkeypatch.setattr(compare, "find_spec", lambda name: object())
    (unfused, linear) = compare.rows([], ["mxfp8"], "hybrid", list(compare.LOSSES))
    assert linear.base == unfused.name and "needs compute capability 10.0" in linear.missing


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
    content = {"runs": runs, "cosines": {f"seed {seed}": 0.99 for seed in range(3)}}
    assert training.report(content, sigmas=2.0)
    runs[0]["validation"]["1200"] = 1.5
    assert not training.report(content, sigmas=0.1)
    assert "| 1 | 1.02000 | 1.02000 | +0.00000 | 0.990000 |" in capsys.readouterr().out


def test_text_is_taken_from_installed_packages(tmp_path, monkeypatch):
    training = script("compare_training")
    monkeypatch.setattr(training, "PACKAGES", ())
    written = training.write_text(tmp_path / "docs.txt", max_files=20)
    assert 0 < written <= (tmp_path / "docs.txt").stat().st_size + 20
