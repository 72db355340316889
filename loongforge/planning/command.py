"""``loongforge plan``: its flags, its text and its JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from loongforge import env
from loongforge.bench.run import DTYPES
from loongforge.bench.shapes import add_size_flags, positive
from loongforge.errors import UsageError
from loongforge.planning import fitted
from loongforge.planning.advise import MARGIN, MIB, Row, recommend, rows, smallest
from loongforge.planning.devices import DEVICES, MEASURED, Device, device_here, device_named
from loongforge.planning.inputs import dtype_name, layer_of, memory_size
from loongforge.planning.predict import Layer, Rates, has_tiles, rates_of, unfused_peaks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_size_flags(parser, tokens="tokens of one step on one rank, after the sequence-parallel gather")
    parser.add_argument("--tp", type=positive, metavar="N", help="tensor-parallel ranks that share the vocabulary")
    parser.add_argument(
        "--sequence-parallel", action=argparse.BooleanOptionalAction, help="hidden states are split over those ranks"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: the file's, else bf16")
    parser.add_argument("--reduction", choices=("none", "mean"), default="none", help="none (default): as in Megatron")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--config", type=Path, metavar="FILE", help="sizes from a config of loongforge train")
    source.add_argument("--hf", type=Path, metavar="FILE", help="sizes from a Hugging Face config.json")
    parser.add_argument("--device", help=f"{', '.join(DEVICES)}; default: this machine's GPU, else {MEASURED}")
    parser.add_argument("--free-memory", type=memory_size, metavar="SIZE", help="recommend a budget for it: 20GiB")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")


def run(options: argparse.Namespace) -> str:
    """What to print; :class:`UsageError` for anything that cannot be planned."""
    layer, global_vocab = layer_of(options)
    device = device_named(options.device) if options.device else device_here() or DEVICES[MEASURED]
    try:
        report = examine(layer, global_vocab, device, options.free_memory)
    except UsageError:
        raise
    except ValueError as error:  # an LCE_* variable that cannot be read
        raise UsageError(str(error)) from error
    return json.dumps(report, indent=2) if options.json else describe(report)


def examine(layer: Layer, global_vocab: int, device: Device, free_bytes: int | None) -> dict[str, Any]:
    """Everything the command prints, as plain data; memory in MiB, time in milliseconds."""
    rates, why_not = _rates(device, layer)
    floor = None if rates is None else rates.floor_ms(layer.shape)
    tiles = has_tiles(device)
    shape = layer.shape
    best = None if free_bytes is None else recommend(layer, free_bytes, rates, tiles)
    return {
        "layer": {
            "tokens": shape.tokens,
            "hidden": shape.hidden,
            "vocab": global_vocab,
            "vocab_per_rank": shape.vocab,
            "tp": layer.tensor_parallel,
            "sequence_parallel": layer.sequence_parallel,
            "dtype": dtype_name(layer.dtype),
            "reduction": layer.reduction,
        },
        "device": {"name": device.product, "arch": device.arch.name},
        "environment": {name: text for name, text in env.in_force().items() if "SPLIT_SIZE" in name},
        "time": {"source": why_not or _source(device), "three_gemms_ms": floor},
        "logits_mib": layer.logits_bytes / MIB,
        "unfused_peak_mib": {name: size / MIB for name, size in unfused_peaks(layer).items()},
        "weight_gradient_mib": shape.vocab * shape.hidden * layer.itemsize / MIB,
        "budgets": [_plain(row, floor) for row in rows(layer, rates, tiles)],
        "free_mib": None if free_bytes is None else free_bytes / MIB,
        "recommended": None if best is None else _plain(best, floor),
        "smallest": None if best is not None or free_bytes is None else _plain(smallest(layer, rates, tiles), floor),
    }


def _rates(device: Device, layer: Layer) -> tuple[Rates | None, str | None]:
    found = rates_of(device, layer.dtype)
    return (None, f"not predicted: {found}") if isinstance(found, str) else (found, None)


def _source(device: Device) -> str:
    if device.key == MEASURED:
        return (
            f"a model fitted to measurements on one H200, which it repeats within {fitted.LARGEST_ERROR:.1%}; "
            "collectives are not in it"
        )
    return (
        f"ESTIMATE, never measured on {device.product}: the H200's shares of the data sheet's bf16 rate and bandwidth; "
        "collectives are not in it"
    )


def _plain(row: Row, floor: float | None) -> dict[str, Any]:
    plan = row.plan
    in_forward = plan.tokens_per_chunk > 0
    return {
        "budget_mb": row.budget_mb,
        "kept_rows": plan.kept_rows,
        "withheld_rows": plan.withheld_rows,
        "kept_share": plan.kept_rows / plan.vocab_rows,
        "gradients_in_forward": in_forward,
        "chunk_rows": {"forward": plan.forward_width, "backward": plan.backward_width},
        "chunk_tokens": plan.tokens_per_chunk or plan.num_tokens,
        "chunk_mib": (plan.tokens_per_chunk * plan.vocab_rows * plan.itemsize if in_forward else plan.buffer_bytes)
        / MIB,
        "peak_mib": row.peak_bytes / MIB,
        "thv": plan.flops / (plan.num_tokens * plan.hidden_size * plan.vocab_rows),
        "flops": plan.flops,
        "time_ms": row.time_ms,
        "x_three_gemms": None if row.time_ms is None or floor is None else row.time_ms / floor,
    }


def describe(report: dict[str, Any]) -> str:
    """The report for people."""
    layer, nothing_kept = report["layer"], report["budgets"][0]
    tp = f", {layer['vocab_per_rank']} on each of {layer['tp']} ranks" if layer["tp"] > 1 else ""
    parallel = ", sequence parallel" if layer["sequence_parallel"] else ""
    lines = [
        f"T={layer['tokens']} H={layer['hidden']} V={layer['vocab']}{tp}, {layer['dtype']}{parallel}, "
        f"{report['device']['name']} ({report['device']['arch']})",
        "",
        f"one copy of the logits         {report['logits_mib']:8.0f} MiB",
    ]
    lines += [f"{name:30} {size:8.0f} MiB at the peak" for name, size in report["unfused_peak_mib"].items()]
    chunk = nothing_kept["chunk_rows"]
    width = f"{chunk['forward']}" if len(set(chunk.values())) == 1 else f"{chunk['forward']} and {chunk['backward']}"
    lines += [
        f"{'loongforge, nothing kept':30} {nothing_kept['peak_mib']:8.0f} MiB at the peak, "
        f"chunks of {width} rows ({nothing_kept['chunk_mib']:.0f} MiB)",
        "",
        *_table(report),
        "",
        f"Memory: above the inputs, both gradients included; {report['weight_gradient_mib']:.0f} MiB of it is the "
        "weight's, which Megatron's fused accumulation keeps elsewhere.",
        f"Time: {report['time']['source']}.",
    ]
    if report["environment"]:
        lines.append("In force: " + ", ".join(f"{name}={text}" for name, text in report["environment"].items()))
    lines.append(_recommendation(report))
    return "\n".join(lines)


def _table(report: dict[str, Any]) -> list[str]:
    timed = report["time"]["three_gemms_ms"] is not None
    heads = f"{'budget MiB':>10} {'kept':>6} {'peak MiB':>9} {'work':>8} {'TFLOP':>7}"
    lines = [heads + (f" {'time ms':>8} {'x 3 GEMMs':>10}" if timed else "")]
    for row in report["budgets"]:
        kept = "tokens" if row["gradients_in_forward"] else f"{row['kept_share']:.0%}"
        line = (
            f"{row['budget_mb']:>10} {kept:>6} {row['peak_mib']:9.0f} {row['thv']:5.2f}THV {row['flops'] / 1e12:7.2f}"
        )
        lines.append(line + (f" {row['time_ms']:8.1f} {row['x_three_gemms']:10.2f}" if timed else ""))
    if any(row["withheld_rows"] for row in report["budgets"]):
        lines.append(
            "fewer rows are kept than some budgets hold: at the peak these would take as much memory as keeping all"
        )
    if any(row["gradients_in_forward"] for row in report["budgets"]):
        lines.append("kept = tokens: gradients are computed in forward, a chunk of tokens at a time")
    return lines


def _recommendation(report: dict[str, Any]) -> str:
    best, least, free = report["recommended"], report["smallest"], report["free_mib"]
    if free is None:
        return "With --free-memory SIZE a budget is recommended."
    if best is None:
        return (
            f"Nothing fits {free:.0f} MiB with a margin of {MARGIN - 1:.0%}: the least is {least['peak_mib']:.0f} MiB "
            f"with LCE_LOGITS_BUDGET_MB={least['budget_mb']}; take fewer tokens a step or more tensor parallelism."
        )
    time = "" if best["time_ms"] is None else f", {best['time_ms']:.1f} ms"
    return (
        f"For {free:.0f} MiB free: LCE_LOGITS_BUDGET_MB={best['budget_mb']} "
        f"({best['peak_mib']:.0f} MiB at the peak{time}; {MARGIN - 1:.0%} are left as a margin)."
    )
