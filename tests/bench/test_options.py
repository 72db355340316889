"""The table of options and outputs: every case is right on a small shape, and a wrong one is reported, not timed."""

from __future__ import annotations

import argparse
import json
import math

import pytest
import torch

from loongforge.bench import options, progress
from loongforge.bench.option_cases import CASES
from loongforge.bench.shapes import HeadShape
from loongforge.errors import UsageError
from tests.helpers import worst


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return parser.parse_args(words)


def test_every_case_is_checked_measured_and_written(tmp_path, capsys):
    lines = options.run(
        arguments(
            "40x16x300", "--dtype", "fp32", "--device", "cpu", "--repetitions", "1", "--output-dir", str(tmp_path)
        )
    )  # fmt: skip
    assert [line.status for line in lines] == ["ok"] * (2 * len(CASES) - 3)  # top_k has no backward: one budget
    assert all(worst(line.errors.values()) < 1e-4 and line.step_ms > 0 for line in lines)
    assert all("grad_bias" in line.errors for line in lines if "bias" in line.name)
    written = json.loads((tmp_path / "options.json").read_text())
    assert [result["name"] for result in written["results"]] == [line.name for line in lines]
    printed = capsys.readouterr().out
    assert printed.count("\n| ") == len(lines) + 2 and "| loss softcap | all |" in printed
    assert (tmp_path / "options.md").read_text() == printed
    assert all(line.unfused_errors.keys() == line.errors.keys() for line in lines)


def test_earlier_results_are_tabulated(tmp_path, capsys):
    options.run(small("--only", "loss", "--budgets", "0", "--output-dir", str(tmp_path)))
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "options.json").read_text())
    del record["results"][0]["unfused_errors"]  # older than they are
    (tmp_path / "options.json").write_text(json.dumps(record))
    (tmp_path / "options.md").unlink()
    options.run(arguments("--redraw", str(tmp_path / "options.json")))
    again = capsys.readouterr().out
    assert again == (tmp_path / "options.md").read_text() and again.count("| - |") == 1
    assert [line.rpartition("|")[0] for line in again.splitlines()[1:3]] == [
        line.rpartition("|")[0] for line in printed.splitlines()[1:3]
    ]
    with pytest.raises(UsageError, match="holds no results of this script"):
        options.run(arguments("--redraw", str(tmp_path / "options.md")))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_errors_are_those_of_unfused_code(dtype):
    """Every case within 1.5 times of torch with logits in memory; the divergences' are larger than a loss's in both."""
    operands = options.make_operands(HeadShape("small", 96, 64, 1500), torch.device("cpu"), dtype)
    largest = {}
    for case in CASES:
        (line,) = options.lines_of(case, operands, [0], 1, progress.TimeLimit(None))
        assert line.status == "ok", line
        for name, error in line.errors.items():
            assert error <= 1.5 * line.unfused_errors[name] + 1e-6, (case.name, name, line)
        largest[case.name] = max(line.unfused_errors.values())
    if dtype == torch.bfloat16:
        assert min(error for name, error in largest.items() if name.startswith("distill")) > 2 * largest["loss"]


def test_a_wrong_case_is_not_timed():
    operands = options.make_operands(HeadShape("small", 40, 16, 300), torch.device("cpu"), torch.float32)
    case = next(case for case in CASES if case.name == "logprobs entropy")
    truth = options.truth_of(case, operands)
    assert options.measure(case, operands, truth, 0, 1).status == "ok"
    truth[-1] = 1.1 * truth[-1]
    line = options.measure(case, operands, truth, 0, 1)
    assert line.status == "wrong: grad_weight" and math.isnan(line.step_ms)
    assert "wrong: grad_weight" in options.table([line], 1.0)


@pytest.mark.parametrize("only", ("logprobs", "loss softcap,top_k 8"))
def test_only_some(only, monkeypatch):
    chosen = []
    monkeypatch.setattr(options, "measure", lambda case, *rest: chosen.append(case.name) or options.Line(case.name, 0))
    options.run(arguments("8x8x200", "--device", "cpu", "--repetitions", "1", "--budgets", "0", "--only", only))
    assert chosen and all(name.startswith(tuple(part.strip() for part in only.split(","))) for name in chosen)


def small(*words: str) -> argparse.Namespace:
    return arguments("8x8x200", "--dtype", "fp32", "--device", "cpu", "--repetitions", "1", *words)


def test_lines_without_time_are_listed_as_not_run(tmp_path, monkeypatch):
    """Every look at the clock is a second, so every line takes 2: the third of three finds too little left."""
    seconds = iter(range(1000))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    lines = options.run(small("--time-limit", "8", "--only", "loss", "--budgets", "0", "--output-dir", str(tmp_path)))
    outcomes = [line.status for line in lines]
    assert outcomes[:2] == ["ok", "ok"] and len(lines) == 8
    assert outcomes[2:] == [f"not run: --time-limit 8 left {left} s" for left in (1, 0, 0, 0, 0, 0)]
    written = json.loads((tmp_path / "options.json").read_text())
    assert [line["status"] for line in written["results"]] == outcomes


def test_what_ends_early_has_written_its_lines(tmp_path, monkeypatch):
    original = options.measure

    def ends_at_the_third(case, operands, truth, budget, repetitions):
        if case.name == "loss z_loss_weight":
            raise KeyboardInterrupt
        return original(case, operands, truth, budget, repetitions)

    monkeypatch.setattr(options, "measure", ends_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        options.run(small("--budgets", "0", "--output-dir", str(tmp_path)))
    written = json.loads((tmp_path / "options.json").read_text())
    assert [line["name"] for line in written["results"]] == ["loss", "loss label_smoothing"]
    assert [path.name for path in tmp_path.iterdir()] == ["options.json"]


def test_a_case_that_fails_does_not_end_the_measurement(monkeypatch):
    def refuse(case, *rest):
        raise RuntimeError("no such kernel\nmore")

    monkeypatch.setattr(options, "measure", refuse)
    lines = options.run(small("--only", "top_k"))
    assert [line.status for line in lines] == ["failed: RuntimeError: no such kernel"] * 3
