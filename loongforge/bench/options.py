"""What options and outputs cost: each on and off, on one shape, checked against torch in float32 before it is timed."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from loongforge import TeacherHead, TeacherTopK
from loongforge.bench.measure import LARGEST_ERROR, failure, relative_error, release, three_products, time_ms
from loongforge.bench.option_cases import CASES, TEACHER_K, Case, Operands
from loongforge.bench.progress import TimeLimit
from loongforge.bench.report import heading, redraw_markdown, write_markdown, write_record
from loongforge.bench.run import DTYPES, add_measurement_flags, describe, device_of
from loongforge.bench.shapes import HeadShape, parse_shape
from loongforge.errors import require_folder
from loongforge.matmul import product_

BLOCK_TOKENS = 512
"""Tokens whose float32 logits exist at once in the check."""


@dataclass
class Line:
    """One case at one logits budget; NaN where it was not measured."""

    name: str
    budget_mb: int | str
    status: str = "ok"
    step_ms: float = math.nan
    forward_ms: float = math.nan
    peak_mib: float = math.nan
    errors: dict[str, float] = field(default_factory=dict)
    unfused_errors: dict[str, float] = field(default_factory=dict)
    """Of torch with logits in memory, in the same dtype."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``scripts/benchmark_options.py``."""
    parser.add_argument("shape", nargs="?", default="llama3-8b", help="a name, or TOKENSxHIDDENxVOCAB")
    parser.add_argument("--only", default="", help="comma-separated beginnings of cases' names; default: all")
    parser.add_argument("--budgets", default="0,all", help="comma-separated MiB of kept logits, or all")
    add_measurement_flags(parser)
    TimeLimit.add_argument(parser)
    parser.add_argument("--output-dir", type=Path, help="folder for options.json and options.md; default: print only")
    parser.add_argument("--redraw", type=Path, metavar="OPTIONS_JSON", help="only tabulate earlier results")


def run(options: argparse.Namespace) -> list[Line]:
    """Measure, write after every line, print the table last; returns every line."""
    if options.redraw:
        redraw_markdown(options.redraw, report)
        return []
    limit = TimeLimit(options.time_limit)
    shape, device, dtype = parse_shape(options.shape), device_of(options.device), DTYPES[options.dtype]
    prefixes = [text.strip() for text in options.only.split(",") if text.strip()]
    cases = [case for case in CASES if not prefixes or case.name.startswith(tuple(prefixes))]
    budgets: list[int | str] = [text if text == "all" else int(text) for text in options.budgets.split(",")]
    require_folder(options.output_dir)
    operands = make_operands(shape, device, dtype)
    floor = time_ms(three_products(operands.hidden.detach(), operands.weight.detach()), device, options.repetitions)
    lines: list[Line] = []
    record: dict[str, Any] = {"environment": describe(device, dtype), "shape": asdict(shape), "floor_ms": floor}
    record["results"] = []
    for case in cases:
        for line in lines_of(case, operands, budgets, options.repetitions, limit):
            lines.append(line)
            print(f"  {line.name}, budget {line.budget_mb}: {line.step_ms:.2f} ms, {line.status}", file=sys.stderr)
            record["results"] = [asdict(line) for line in lines]
            if options.output_dir:
                write_record(options.output_dir / "options.json", record)
        release(device)
    print(report(record))
    if options.output_dir:
        write_markdown(options.output_dir / "options.json", report(record))
    return lines


def report(record: dict[str, Any]) -> str:
    """Heading and table of what was written."""
    lines, floor = [Line(**line) for line in record["results"]], record["floor_ms"]
    sizes = f"{HeadShape(**record['shape'])}; three products {floor:.2f} ms"
    return "\n\n".join([heading(record["environment"]), sizes, table(lines, floor)])


def lines_of(
    case: Case, operands: Operands, budgets: Sequence[int | str], repetitions: int, limit: TimeLimit
) -> Iterator[Line]:
    """One line a budget; a case without a gradient keeps no logits and has one.  What fails becomes a line's status."""
    truth: list[torch.Tensor] = []
    unfused: dict[str, float] = {}
    for budget in budgets if case.has_gradient else budgets[:1]:
        if obstacle := limit.obstacle():
            yield Line(case.name, budget, obstacle)
            continue
        with limit.line():
            try:
                if not truth:
                    truth = truth_of(case, operands)
                    unfused = errors_of(case, truth_of(case, operands, operands.hidden.dtype), truth)
                line = measure(case, operands, truth, budget, repetitions)
                line.unfused_errors = unfused
            except Exception as error:  # a kernel that a device or a compiler refuses must not end the measurement
                line = Line(case.name, budget, failure(error))
        yield line


def make_operands(shape: HeadShape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Operands:
    """Hidden states and logits of unit variance, every 17th token ignored; a teacher near the student."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, generator=generator)

    hidden, weight = normal(shape.tokens, shape.hidden), normal(shape.vocab, shape.hidden) * shape.hidden**-0.5
    target = torch.randint(0, shape.vocab, (shape.tokens,), device=device, generator=generator)
    target[::17] = -100
    teacher_hidden = (hidden + 0.3 * normal(shape.tokens, shape.hidden)).to(dtype)
    teacher = TeacherHead(teacher_hidden, weight.to(dtype))
    logprobs, ids = [], []
    for rows in teacher_hidden.split(BLOCK_TOKENS):
        best = (rows.float() @ teacher.weight.float().t()).log_softmax(1).topk(min(TEACHER_K, shape.vocab - 1))
        logprobs.append(best.values)
        ids.append(best.indices)
    return Operands(
        hidden=hidden.to(dtype).requires_grad_(),
        weight=weight.to(dtype).requires_grad_(),
        bias=(0.5 * normal(shape.vocab)).to(dtype).requires_grad_(),
        target=target,
        class_weight=torch.rand(shape.vocab, device=device, generator=generator) + 0.5,
        teacher=teacher,
        teacher_top_k=TeacherTopK(torch.cat(logprobs), torch.cat(ids)),
        budget=0,
    )


def upstream(number: int, like: torch.Tensor) -> torch.Tensor:
    """Non-uniform gradient of the ``number``-th value."""
    generator = torch.Generator(like.device).manual_seed(1000 + number)
    return torch.rand(like.shape, device=like.device, generator=generator).to(like.dtype) / len(like)


def leaves(case: Case, operands: Operands) -> list[torch.Tensor]:
    return [operands.hidden, operands.weight, *([operands.bias] if case.uses_bias else [])]


def truth_of(case: Case, operands: Operands, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Values and gradients through torch's autograd, a block of tokens at a time.

    In float32 the truth; in a narrower ``dtype`` what unfused code gives that stores logits and their gradient in it,
    with the softmax in float32 and every product rounded once.
    """
    o = operands
    hidden, weight, bias = (tensor.detach().to(dtype) for tensor in (o.hidden, o.weight, o.bias))
    teacher_weight = o.teacher.weight.to(dtype) if case.uses_teacher else None
    values: list[list[torch.Tensor]] = []
    sums = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (hidden, weight, bias)]
    grad_hidden, grad_weight, grad_bias = sums
    all_upstream = [upstream(number, o.hidden.detach()[:, 0].float()) for number in range(3)]
    for start in range(0, len(hidden), BLOCK_TOKENS):
        block = slice(start, min(start + BLOCK_TOKENS, len(hidden)))
        logits = torch.nn.functional.linear(hidden[block], weight, bias if case.uses_bias else None)
        logits = logits.float().requires_grad_()
        teacher: Any = None
        if teacher_weight is not None:
            teacher = (o.teacher.hidden[block].to(dtype) @ teacher_weight.t()).float()
        outputs = case.eager(logits, teacher, o, block)
        values.append([value.detach() for value in outputs])
        if case.has_gradient:
            total: Any = sum(
                (value * all_upstream[n][block]).sum() for n, value in enumerate(outputs) if value.requires_grad
            )
            grad_logits = torch.autograd.grad(total, logits)[0].to(dtype)
            grad_hidden[block] = (grad_logits @ weight).float()
            product_(grad_weight, grad_logits.t(), hidden[block], accumulate=True)
            grad_bias += torch.sum(grad_logits, 0, dtype=torch.float32)
    gradients = sums[: len(leaves(case, o))] if case.has_gradient else []
    return [*(torch.cat(parts) for parts in zip(*values, strict=True)), *(sum_.to(dtype).float() for sum_ in gradients)]


def errors_of(case: Case, actual: Sequence[Any], truth: Sequence[torch.Tensor]) -> dict[str, float]:
    """Of values and gradients, by name."""
    gradients = ["grad_hidden", "grad_weight", "grad_bias"][: 2 + case.uses_bias] if case.has_gradient else []
    names = [*(f"value {n}" for n in range(len(truth) - len(gradients))), *gradients]
    return {name: _error(*pair) for name, *pair in zip(names, actual, truth, strict=True)}


def measure(case: Case, operands: Operands, truth: Sequence[torch.Tensor], budget: int | str, repetitions: int) -> Line:
    """Check, then peak memory, then time."""
    line, o = Line(case.name, budget), Operands(**{**vars(operands), "budget": budget})
    device, tensors = o.hidden.device, leaves(case, o)

    def step() -> Sequence[torch.Tensor]:
        for tensor in tensors:
            tensor.grad = None
        outputs = case.ours(o)
        with_gradient = [(value, upstream(n, value)) for n, value in enumerate(outputs) if value.requires_grad]
        if case.has_gradient:
            values, gradients = zip(*with_gradient, strict=True)
            torch.autograd.backward(values, gradients)
        return outputs

    outputs = step()
    actual: list[Any] = [*outputs, *(tensor.grad for tensor in tensors if case.has_gradient)]
    line.errors = errors_of(case, actual, truth)
    del outputs, actual
    wrong = [name for name, error in line.errors.items() if not error <= LARGEST_ERROR]
    if wrong:
        line.status = f"wrong: {', '.join(wrong)}"
        return line
    line.peak_mib = _peak_mib(step, tensors, device)
    line.step_ms = time_ms(step, device, repetitions)
    with torch.no_grad():
        line.forward_ms = time_ms(lambda: case.ours(o), device, repetitions)
    return line


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error; of predictions, which rounded logits may turn around, the share that differ less 5 %."""
    if not actual.requires_grad and torch.equal(expected, expected.round()):
        return max(0.0, float((actual != expected).float().mean()) - 0.05)
    return relative_error(actual.detach(), expected)


def _peak_mib(step, tensors: Sequence[torch.Tensor], device: torch.device) -> float:
    for tensor in tensors:
        tensor.grad = None
    release(device)
    if device.type != "cuda":
        return math.nan
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def table(lines: Sequence[Line], floor: float) -> str:
    """Markdown; "to plain" divides by the loss, or the log-probabilities, with nothing else at the same budget."""
    columns = ("case", "budget MiB", "step ms", "to plain", "of the floor", "forward ms", "peak MiB", "largest error")
    rows = [f"| {' | '.join((*columns, 'unfused'))} |", "| --- " * (len(columns) + 1) + "|"]
    plain = {(line.name, line.budget_mb): line.step_ms for line in lines}
    for line in lines:
        errors = " | ".join(_largest(errors) for errors in (line.errors, line.unfused_errors))
        if line.status != "ok":
            rows.append(f"| {line.name} | {line.budget_mb} | {line.status} | | | | | {errors} |")
            continue
        first = "logprobs" if line.name.startswith("logprobs") else "loss"
        to_plain = line.step_ms / plain.get((first, line.budget_mb), math.nan)
        rows.append(
            f"| {line.name} | {line.budget_mb} | {line.step_ms:.2f} | {to_plain:.3f} | {line.step_ms / floor:.3f} | "
            f"{line.forward_ms:.2f} | {line.peak_mib:.0f} | {errors} |"
        )
    return "\n".join(rows)


def _largest(errors: dict[str, float]) -> str:
    return f"{max(errors.values()):.1e}" if errors else "-"
