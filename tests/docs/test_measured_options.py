"""What the pages say of options, outputs and masked tokens is what the committed measurements hold."""

from __future__ import annotations

import json
import re

import pytest

from loongforge.bench import options, sft
from tests.docs.test_docs import ROOT, rows, text_of

MEASURED = ROOT / "docs/benchmarks/h200"
SFT = {
    "loss per token": "token ",
    "`fp32_logits=True`": "token fp32 logits, ",
    "80% of the tokens masked": "token 80% masked, ",
    "80% masked, `compact_tokens=True`": "token 80% masked, compact, ",
    "80% masked, `compact_tokens=1784`": "token 80% masked, at most 1784, ",
    "mean": "mean ",
    "mean, compiled": "mean compiled, ",
}
OPTIONS = {
    "loss": "loss",
    "loss, `label_smoothing`": "loss label_smoothing",
    "loss, `z_loss_weight`": "loss z_loss_weight",
    "loss, `softcap`": "loss softcap",
    "loss, `logit_scale`": "loss logit_scale",
    "loss, `bias` and its gradient": "loss bias",
    "loss, `class_weight`": "loss class_weight",
    "log-probability": "logprobs",
    "log-probability and entropy": "logprobs entropy",
    "log-probability and predictions": "logprobs predictions",
    "distillation, forward, from a head": "distillation forward head",
    "distillation, reverse, from a head": "distillation reverse head",
    "distillation, forward, from 64 classes": "distillation forward top 64",
    "distillation, reverse, from 64 classes": "distillation reverse top 64",
}


def table_of(page: str, names: dict[str, str]) -> dict[str, list[float]]:
    """Name in the record -> numbers of its row."""
    cells = {row[0]: " / ".join(row[1:]).split("/") for row in rows(text_of(ROOT / page))}
    return {name: [*map(float, cells[title])] for title, name in names.items()}


def record_of(name: str) -> dict:
    return json.loads((MEASURED / name).read_text(encoding="utf-8"))


def test_masked_tokens_precision_and_compiled_code():
    results = {result["name"]: result for result in record_of("sft.json")["results"]}
    for name, numbers in table_of("docs/options.md", SFT).items():
        pair = results[f"{name}0"], results[f"{name}all"]
        assert numbers[::2] == pytest.approx([result["step_ms"] for result in pair], abs=0.051), name
        assert numbers[1::2] == pytest.approx([result["peak_mib"] for result in pair], abs=0.51), name
    page = text_of(ROOT / "docs/options.md")
    ((counted, bounded),) = re.findall(r"A fifth of the tokens costs (\d\.\d+) of .* and (\d\.\d+) with a bound", page)
    for ratio, way in ((counted, "compact"), (bounded, "at most 1784")):
        time = results[f"token 80% masked, {way}, 0"]["step_ms"] / results["token 80% masked, 0"]["step_ms"]
        assert float(ratio) == pytest.approx(time, abs=0.006)
    (more_time,) = re.findall(r"it takes (\d+)% more time and the same memory", page)
    compiled, eager = results["mean compiled, all"], results["mean all"]
    assert float(more_time) / 100 == pytest.approx(compiled["step_ms"] / eager["step_ms"] - 1, abs=0.006)
    assert compiled["peak_mib"] == pytest.approx(eager["peak_mib"], abs=1)


def test_options_and_outputs():
    results = {(result["name"], result["budget_mb"]): result for result in record_of("options.json")["results"]}
    for name, numbers in table_of("docs/outputs.md", OPTIONS).items():
        for place, budget in enumerate((0, "all")):
            result, plain = results[name, budget], results["loss", budget]
            expected = [result["step_ms"], result["step_ms"] / plain["step_ms"], result["peak_mib"]]
            found = [*numbers[2 * place : 2 * place + 2], numbers[4 + place]]
            for number, exact, digits in zip(found, expected, (0.051, 0.006, 0.51), strict=True):
                assert number == pytest.approx(exact, abs=digits), (name, budget)
    page = text_of(ROOT / "docs/outputs.md")
    ((one, eight, most),) = re.findall(r"([\d.]+) ms for 1 class, ([\d.]+) for 8, ([\d.]+) for 128", page)
    for time, k in ((one, 1), (eight, 8), (most, 128)):
        assert float(time) == pytest.approx(results[f"top_k {k}", 0]["step_ms"], abs=0.051)


def test_errors_of_divergences_are_those_of_unfused_code():
    largest = {}
    for result in record_of("options.json")["results"]:
        if result["name"].startswith("distillation"):
            ours, unfused = (f"{max(result[what].values()):.1e}" for what in ("errors", "unfused_errors"))
            assert largest.setdefault(result["name"], ours) == ours == unfused, result["name"]
    head, forward, reverse = re.search(
        r"same data: (\S+) from a head, and from 64 classes (\S+) forward and (\S+) reverse",
        text_of(ROOT / "docs/outputs.md"),
    ).groups()
    told = {"forward head": head, "reverse head": head, "forward top 64": forward, "reverse top 64": reverse}
    assert {name: float(error) for name, error in largest.items()} == {
        f"distillation {name}": float(error) for name, error in told.items()
    }


@pytest.mark.parametrize("name, report", (("sft", sft.report), ("options", options.report)))
def test_tables_are_those_of_the_data(name, report):
    record = record_of(f"{name}.json")
    assert {line["status"] for line in record["results"]} == {"ok"}
    assert text_of(MEASURED / f"{name}.md") == report(record) + "\n"
    assert "--output-dir docs/benchmarks/h200" in record["environment"]["command"]
