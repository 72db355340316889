"""The table of models and layouts in docs/megatron_runs.md: every command in it selects tests."""

from __future__ import annotations

import ast
import json
import re
import shlex
import statistics
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.megatron.launching import ROOT
from tests.megatron.matrix import UNPACKED, full
from tests.megatron.scripts import script

PAGE = ROOT / "docs" / "megatron_runs.md"
RESULTS = ROOT / "docs" / "benchmarks" / "h200-megatron"
SHORT = {name: f"tests/megatron/test_{name}.py" for name in ("entries", "hook", "wrapping")}


def table() -> list[list[str]]:
    """Cells of the rows that say what happens with a model or a layout."""
    text = PAGE.read_text().split("## Models and layouts")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def commands() -> list[str]:
    return sorted({command for *_, cell in table() for command in re.findall(r"`([^`]+)`", cell)})


def test_names(path: str) -> list[str]:
    functions = (node for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef))
    return [f"{path}::{node.name}" for node in functions if node.name.startswith("test_")]


test_names.__test__ = False


def selected(command: str) -> list[str]:
    """What the command's file and -k expression select; a name stands for all its parameters."""
    words = shlex.split(command)
    if words[0] == "matrix":
        names, expression = [row.name for row in full(UNPACKED[-1])], words[1]
    elif words[0] in SHORT:
        names, expression = test_names(SHORT[words[0]]), words[1]
    elif words[0] == "python":
        parsed = script(Path(words[1]).stem).parse(words[2:])
        names, expression = [row.name for row in script(Path(words[1]).stem).rows(parsed)], "unfused"
    else:
        assert words[0] == "pytest", command
        path = words[1]
        files = sorted((ROOT / path).rglob("test_*.py")) if (ROOT / path).is_dir() else [ROOT / path]
        names = [name for file in files for name in test_names(str(file.relative_to(ROOT)))]
        expression = words[words.index("-k") + 1] if "-k" in words else "test"
    compiled = Expression.compile(expression)

    def matches(name: str) -> bool:
        return compiled.evaluate(lambda part, **_: part.lower() in name.lower())

    return list(filter(matches, names))


def test_every_row_has_a_command_or_says_that_it_was_not_run():
    rows = table()
    assert len(rows) >= 20
    for name, happens, seen, command in rows:
        assert happens and (re.search("`.+`", command) or seen == "not run"), name


@pytest.mark.parametrize("command", commands())
def test_every_command_selects_tests(command):
    assert selected(command)


def test_an_unknown_name_selects_nothing():
    assert not selected("matrix no_such_layout") and not selected("hook no_such_test")


def test_the_rows_measured_on_a_gpu_are_those_of_their_json():
    content = json.loads((RESULTS / "compare.json").read_text())
    tables = script("megatron_table")
    made = tables.table([tables.Outcome(**row) for row in content["rows"]], content["settings"])
    assert made == (RESULTS / "compare.md").read_text()
    assert made.partition("\n\n")[0] in PAGE.read_text()


YARDSTICKS = ("native", "unfused, half micro-batches")


def test_quotients_of_differences_by_yardsticks_of_rounding():
    """The graph's yardstick is the unfused run outside it."""
    tables = script("megatron_table")
    rows = {row["name"]: row for row in json.loads((RESULTS / "compare.json").read_text())["rows"]}

    def apart(name: str, base: str) -> list[float]:
        found = [tables.differences(rows[name][what], rows[base][what]) for what in ("losses", "grad_norms")]
        return [number for one in found for number in (max(one[:10]), statistics.median(one), max(one))]

    for name, row in rows.items():
        if ", linear" not in name:
            continue
        layers = name.partition(", ")[0]
        others = [apart(f"{layers}, {loss}", row["base"]) for loss in YARDSTICKS if f"{layers}, {loss}" in rows]
        bounds = [max(numbers) for numbers in zip(*others or [apart(row["base"], "te, unfused")], strict=True)]
        (line,) = re.findall(rf"^\| {name} \|((?: [\d.]+ \|){{6}})$", PAGE.read_text(), re.MULTILINE)
        for cell, number, bound in zip(line.strip(" |").split(" | "), apart(name, row["base"]), bounds, strict=True):
            assert float(cell) == pytest.approx(number / bound, abs=0.0051), name


def test_the_yardsticks_of_the_long_run_are_those_of_their_json():
    content = json.loads((RESULTS / "rounding.json").read_text())
    training = script("compare_training")
    runs = {result["variant"]: result for result in content["runs"]}
    assert runs["again"]["losses"] == runs["unfused"]["losses"]
    plain = training.final_validation(runs["unfused"])
    for variant in ("fused", *training.YARDSTICKS):
        loss, cosine = training.final_validation(runs[variant]), content["cosines"][training.pair_name(variant, 1)]
        assert f"| {variant} | {loss:.4f} | {loss - plain:+.4f} | {cosine:.3f} |\n" in PAGE.read_text(), variant


def test_the_long_run_in_the_page_is_that_of_its_json(capsys):
    content = json.loads((RESULTS / "training.json").read_text())
    assert script("compare_training").report(content, sigmas=2.0)
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \| (\S+) \| ([\d.]*)", capsys.readouterr().out, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2", "3", "mean"]
    for name, fused, unfused, difference, cosine in rows:
        cells = f"| {name} | {float(fused):.4f} | {float(unfused):.4f} | {float(difference):+.4f} |"
        assert cells + (f" {float(cosine):.3f} |" if cosine else " |") in PAGE.read_text(), name
