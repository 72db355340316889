"""What masked tokens, float32 logits and torch.compile cost: fine-tuning with most labels ignored, on one shape.

Every line is checked against float32 before it is timed.  With a share of masked tokens, leaving them out of the
products should cost about the rest of the share.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import loongforge
from loongforge.bench.contenders import Contender, LossFunction
from loongforge.bench.measure import Problem, Result, float32_truth, make_problem, measure, release
from loongforge.bench.progress import TimeLimit
from loongforge.bench.report import heading, median_floor_ms, redraw_markdown, write_markdown, write_record
from loongforge.bench.run import DTYPES, add_measurement_flags, describe, device_of, select
from loongforge.bench.shapes import HeadShape, parse_shape
from loongforge.errors import require_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``scripts/benchmark_sft.py``."""
    parser.add_argument("shape", nargs="?", default="llama3-8b", help="a name, or TOKENSxHIDDENxVOCAB")
    parser.add_argument("--masked", type=float, default=0.8, help="share of tokens without a loss (default 0.8)")
    add_measurement_flags(parser)
    TimeLimit.add_argument(parser)
    parser.add_argument("--only", default="", help="comma-separated beginnings of cases' names; default: all")
    parser.add_argument("--output-dir", type=Path, help="folder for sft.json and sft.md; default: print only")
    parser.add_argument("--redraw", type=Path, metavar="SFT_JSON", help="only tabulate earlier results")


def run(options: argparse.Namespace) -> list[Result]:
    """Measure, write after every line, print the table last; returns every line."""
    if options.redraw:
        redraw_markdown(options.redraw, report)
        return []
    limit = TimeLimit(options.time_limit)
    shape, device, dtype = parse_shape(options.shape), device_of(options.device), DTYPES[options.dtype]
    require_folder(options.output_dir)
    bound = round(shape.tokens * (1 - options.masked) * 1.05) + 64
    every, with_mask = every_token(), with_masked_tokens(options.masked, bound)
    names = {contender.name for contender in select([*every, *with_mask], options.only, "")}
    results: list[Result] = []
    record: dict[str, Any] = {"environment": describe(device, dtype), "shape": asdict(shape), "masked": options.masked}
    problem = make_problem(shape, device, dtype)
    release(device)

    def measure_all(problem: Problem, contenders: Sequence[Contender]) -> None:
        for contender in contenders:
            if contender.name not in names:
                continue
            torch.compiler.reset()
            results.append(measure_or_say_why_not(limit, contender, shape, problem, options.repetitions))
            last = results[-1]
            print(f"  {last.name}: {last.step_ms:.2f} ms, {last.status}", file=sys.stderr, flush=True)
            record["results"] = [asdict(result) for result in results]
            if options.output_dir:
                write_record(options.output_dir / "sft.json", record)

    measure_all(problem, every)
    if names & {contender.name for contender in with_mask}:
        measure_all(masked(problem, options.masked), with_mask)
    print(report(record))
    if options.output_dir:
        write_markdown(options.output_dir / "sft.json", report(record))
    return results


def report(record: dict[str, Any]) -> str:
    """Heading and table of what was written."""
    results = [Result(**result) for result in record["results"]]
    sizes = f"{HeadShape(**record['shape'])}; three products {median_floor_ms(results):.2f} ms"
    return "\n\n".join([heading(record["environment"]), sizes, table(results)])


def measure_or_say_why_not(
    limit: TimeLimit, contender: Contender, shape: HeadShape, problem: Problem, repetitions: int
) -> Result:
    """The contender's line, measured if there is time for it."""
    if obstacle := limit.obstacle():
        return Result(shape.name, contender.name, contender.per_token, contender.is_ours, contender.budget_mb, obstacle)
    with limit.line():
        return measure(contender, shape, problem, repetitions)


def masked(problem: Problem, share: float) -> Problem:
    """The same with this share of the tokens ignored, at random places."""
    generator = torch.Generator(problem.hidden_TH.device).manual_seed(1)
    places = torch.rand(len(problem.target_T), device=problem.hidden_TH.device, generator=generator).argsort()
    target_T = problem.target_T.masked_fill(places < share * len(places), -100)
    num_valid = (target_T >= 0).sum()
    uniform_T = torch.full_like(problem.upstream_T, 1.0) / num_valid
    loss_T, *grads = float32_truth(problem.hidden_TH, problem.weight_VH, target_T, uniform_T)
    per_token = float32_truth(problem.hidden_TH, problem.weight_VH, target_T, problem.upstream_T)
    return replace(problem, target_T=target_T, truth={False: (loss_T.sum() / num_valid, *grads), True: per_token})


def every_token() -> list[Contender]:
    """Precision and compilation, without a mask to speak of."""
    found = []
    for budget in (0, "all"):
        for reduction in ("none", "mean"):
            for name, fp32 in (("", False), ("fp32 logits, ", True)):
                found.append(contender(f"{name}{budget}", reduction, logits_budget_mb=budget, fp32_logits=fp32))
        found.append(contender(f"compiled, {budget}", "mean", compiled, logits_budget_mb=budget))
    return found


def with_masked_tokens(share: float, bound: int) -> list[Contender]:
    """Compaction off, on, and with a bound that needs no synchronisation."""
    found = [
        contender(f"{share:.0%} masked, {name}{budget}", reduction, logits_budget_mb=budget, **options)
        for budget in (0, "all")
        for reduction in ("none", "mean")
        for name, options in (
            ("", {}),
            ("compact, ", {"compact_tokens": True}),
            (f"at most {bound}, ", {"compact_tokens": bound}),
        )
    ]
    name = f"{share:.0%} masked, at most {bound}, compiled, 0"
    return [*found, contender(name, "mean", compiled, logits_budget_mb=0, compact_tokens=bound)]


def eager(**options) -> LossFunction:
    return partial(loongforge.linear_cross_entropy, **options)


def compiled(**options) -> LossFunction:
    loss = loongforge.LinearCrossEntropy(**options)
    return torch.compile(lambda hidden, weight, target: loss(hidden, weight, target), fullgraph=True)


def contender(name: str, reduction: str, build: Callable[..., LossFunction] = eager, **options) -> Contender:
    full_name = f"{'token' if reduction == 'none' else reduction} {name}"
    build = partial(build, reduction=reduction, **options)
    return Contender(full_name, reduction == "none", build, "loongforge", options["logits_budget_mb"])


def table(results: Sequence[Result]) -> str:
    """Markdown; ratios are to the three products over all tokens, whatever is masked."""
    lines = ["| reduction, case, budget | step ms | / products | forward ms | peak MiB | errors |", "| --- " * 6 + "|"]
    for result in results:
        if result.status != "ok":
            lines.append(f"| {result.name} | {result.status} | | | | |")
            continue
        errors = ", ".join(f"{error:.0e}" for error in result.errors.values())
        lines.append(
            f"| {result.name} | {result.step_ms:.2f} | {result.ratio:.2f} | {result.forward_ms:.2f} | "
            f"{result.peak_mib:.0f} | {errors} |"
        )
    return "\n".join(lines)
