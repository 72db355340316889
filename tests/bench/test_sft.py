"""The measurement of masked tokens, float32 logits and torch.compile, at a size that takes a moment."""

from __future__ import annotations

import argparse
import json
import math

import pytest

from loongforge.bench import progress, sft
from loongforge.errors import UsageError
from tests.helpers import worst


def test_every_line_is_right(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sft, "compiled", sft.eager)  # tests/core/test_compile.py compiles
    parser = argparse.ArgumentParser()
    sft.add_arguments(parser)
    flags = ["60x8x40", "--dtype", "fp32", "--device", "cpu", "--repetitions", "1", "--output-dir", str(tmp_path)]
    results = sft.run(parser.parse_args(flags))
    assert {result.status for result in results} == {"ok"} and len(results) == 23
    assert worst(worst(result.errors.values()) for result in results) < 1e-5
    assert sum("compact" in result.name for result in results) == 4
    record = json.loads((tmp_path / "sft.json").read_text())
    assert len(record["results"]) == len(results) and record["masked"] == 0.8
    printed = capsys.readouterr().out
    assert printed.count("80% masked, at most ") == 5 and (tmp_path / "sft.md").read_text() == printed
    sft.run(parser.parse_args(["--redraw", str(tmp_path / "sft.json")]))
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("only", ("mean all", "mean 80% masked,mean compiled"))
def test_only_some(only, monkeypatch):
    monkeypatch.setattr(sft, "measure", lambda contender, shape, *_: sft.Result(shape.name, contender.name, True, True))
    parser = argparse.ArgumentParser()
    sft.add_arguments(parser)
    results = sft.run(parser.parse_args(["30x8x40", "--dtype", "fp32", "--device", "cpu", "--only", only]))
    assert results and all(result.name.startswith(tuple(only.split(","))) for result in results)
    with pytest.raises(UsageError, match="leaves nobody to measure"):
        sft.run(parser.parse_args(["30x8x40", "--device", "cpu", "--only", "men"]))


def test_lines_without_time_are_listed_as_not_run(tmp_path, monkeypatch):
    """Every look at the clock is a second, so every line takes 2: the second of two finds too little left."""
    seconds = iter(range(1000))
    monkeypatch.setattr(sft, "every_token", lambda: [sft.contender(name, "mean", logits_budget_mb=0) for name in "ab"])
    monkeypatch.setattr(sft, "with_masked_tokens", lambda share, bound: [])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    parser = argparse.ArgumentParser()
    sft.add_arguments(parser)
    flags = ["60x8x40", "--dtype", "fp32", "--device", "cpu", "--repetitions", "1", "--output-dir", str(tmp_path)]
    first, second = sft.run(parser.parse_args([*flags, "--time-limit", "5"]))
    assert first.status == "ok" and second.status == "not run: --time-limit 5 left 1 s"
    assert math.isnan(second.step_ms) and second.budget_mb == 0
    record = json.loads((tmp_path / "sft.json").read_text())
    assert [line["status"] for line in record["results"]] == [first.status, second.status]


def test_a_bound_that_is_too_low_shows_as_an_error():
    """Tokens that did not fit would be a wrong loss: the line says so."""
    from loongforge.bench.measure import make_problem, measure
    from loongforge.bench.shapes import HeadShape

    shape = HeadShape.of_sizes(60, 8, 40)
    problem = sft.masked(make_problem(shape, "cpu", sft.DTYPES["fp32"]), 0.5)
    line = measure(sft.contender("low", "mean", logits_budget_mb=0, compact_tokens=9), shape, problem, 1)
    assert line.status.startswith("wrong: loss, grad_hidden, grad_weight")
