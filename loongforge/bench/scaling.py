"""A small model of the communication that a step cannot hide, beyond the two GPUs that it was measured on.

    python3 -m loongforge.bench.scaling            prints the tables of docs/scaling.md
    python3 -m loongforge.bench.scaling --write    and puts them into the page

A collective of S bytes over n ranks takes ``latency + S * (n - 1) / n / bandwidth`` (a ring; an all-reduce twice).  It
hides behind the products that are started with it and leaves ``max(0, time - products)``; while it runs, its kernels
take a share of the multiprocessors from those products.  The exchange of the statistics has nothing to hide behind.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loongforge.bench.shapes import SHAPES, HeadShape
from loongforge.bench.tensor_parallel_report import share_text
from loongforge.plan import plan_chunks

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "benchmarks" / "h200-x2" / "results.json"
PAGE = ROOT / "docs" / "scaling.md"
BEGIN, END = "<!-- scaling: begin -->", "<!-- scaling: end -->"

HEADS = ("dsv3", "llama3-8b")
VOCABULARIES = (None, 262144, 1048576)
RANKS = (2, 4, 8, 16)
GPUS_PER_NODE = 8
BYTES = 2
"""Of one bf16 number."""
STATISTICS = 3
"""float32 numbers per token that are exchanged."""
MICROSECOND = 1e-6


@dataclass(frozen=True)
class Machine:
    """Rates of one GPU and its links; bandwidths are what one rank sends, in bytes per second."""

    flops: float
    latency: float
    bandwidth: float
    node_latency: float  # added where a ring leaves the node
    node_bandwidth: float  # of one GPU's share of the node's network
    contention: float  # share of a hidden collective's time by which the products beside it take longer
    source: str

    def collective(self, num_bytes: float, ranks: int, rounds: int = 1) -> float:
        """Seconds; ``rounds`` is 2 for an all-reduce."""
        crosses = ranks > GPUS_PER_NODE
        bandwidth = min(self.bandwidth, self.node_bandwidth * GPUS_PER_NODE) if crosses else self.bandwidth
        latency = self.latency + (self.node_latency if crosses else 0.0)
        return rounds * (latency + num_bytes * (ranks - 1) / ranks / bandwidth)


STATED = Machine(
    flops=690e12,
    latency=20 * MICROSECOND,
    bandwidth=0.8 * 450e9,
    node_latency=30 * MICROSECOND,
    node_bandwidth=0.9 * 50e9,
    contention=0.15,
    source="assumed: 80% of NVLink's 450 GB/s, 90% of 8 x 400 Gbit/s InfiniBand, 690 TFLOP/s, a contention of 15%",
)


@dataclass(frozen=True)
class Step:
    """One way to run a head over ``ranks``."""

    shape: HeadShape
    ranks: int
    sequence_parallel: bool
    kept: bool

    def product(self, tokens: float, rows: float, machine: Machine) -> float:
        """Seconds of one product of ``tokens`` by ``rows`` logits."""
        return 2.0 * tokens * rows * self.shape.hidden / machine.flops

    def collectives(self, machine: Machine) -> list[tuple[str, float, float]]:
        """Name, seconds, and seconds of products beside it."""
        tokens, rows = self.shape.tokens, self.shape.vocab / self.ranks
        hidden_bytes = BYTES * tokens * self.shape.hidden
        plan = plan_chunks("triton", tokens, self.shape.hidden, int(rows), BYTES, ranks_add_rounded=self.ranks > 1)
        first, last = plan.backward_chunks(0)[0], plan.backward_chunks(0)[-1]
        last_rows = rows if self.kept else last[1] - last[0]
        exchange = machine.collective(4.0 * STATISTICS * tokens * self.ranks, self.ranks)
        found = [("statistics", exchange, 0.0)]
        weight_grad = self.product(tokens, last_rows, machine)
        if not self.sequence_parallel:
            return [*found, ("all-reduce", machine.collective(hidden_bytes, self.ranks, rounds=2), weight_grad)]
        gather = machine.collective(hidden_bytes, self.ranks)
        local = tokens / self.ranks
        # Forward's tile kernels go through all rows for one piece of the tokens, as the product of kept logits does.
        found.append(("gather", gather, self.product(local, rows, machine)))
        again = self.product(tokens, rows, machine) if self.kept else self.product(local, first[1] - first[0], machine)
        return [*found, ("gather again", gather, again), ("reduce-scatter", gather, weight_grad)]

    def floor(self, machine: Machine) -> float:
        """Seconds of the three products of one rank."""
        return 3 * self.product(self.shape.tokens, self.shape.vocab / self.ranks, machine)

    def exposed(self, machine: Machine) -> float:
        """Seconds that communication adds."""
        total = 0.0
        for _, seconds, beside in self.collectives(machine):
            total += max(0.0, seconds - beside) + machine.contention * min(seconds, beside)
        return total

    def alone(self, machine: Machine) -> float:
        """Seconds of the collectives by themselves."""
        return sum(seconds for _, seconds, _ in self.collectives(machine))


def read(path: Path) -> dict[str, Any] | None:
    """What ``scripts/benchmark_tp.py`` wrote, if it is there."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def machine_of(recorded: Mapping[str, Any] | None) -> Machine:
    """Rates fitted on the measurements: links by size, products by the floors, contention by what was exposed."""
    if recorded is None:
        return STATED
    ranks = recorded["environment"]["ranks"]
    latency, bandwidth = _line(
        [
            (link["bytes"] * (ranks - 1) / ranks, link["ms"] / 1e3)
            for link in recorded["links"]
            if link["collective"] != "all_reduce"
        ]
    )
    work = [
        6.0 * head["tokens"] * head["hidden"] * head["vocab"] / ranks / (result["floor_ms"] / 1e3)
        for head, result in _results(recorded)
    ]
    machine = Machine(
        flops=sum(work) / len(work),
        latency=latency,
        bandwidth=bandwidth,
        node_latency=STATED.node_latency,
        node_bandwidth=STATED.node_bandwidth,
        contention=0.0,
        source="",
    )
    hidden = measured = 0.0
    for head, result in _results(recorded):
        step = _step(head, result, ranks)
        measured += max(0.0, result["exposed_ms"] / 1e3 - step.exposed(machine))
        hidden += sum(min(seconds, beside) for _, seconds, beside in step.collectives(machine))
    contention = min(1.0, measured / hidden)
    source = (
        f"fitted: {bandwidth / 1e9:.0f} GB/s and {latency / MICROSECOND:.0f} us of NVLink, "
        f"{machine.flops / 1e12:.0f} TFLOP/s, a contention of {contention:.0%}; assumed beyond 8 GPUs: 90% of "
        "8 x 400 Gbit/s InfiniBand"
    )
    return Machine(**{**vars(machine), "contention": contention, "source": source})


def _results(recorded: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    return ((head, result) for head in recorded["shapes"] for result in head["results"])


def _step(head: Mapping[str, Any], result: Mapping[str, Any], ranks: int) -> Step:
    shape = HeadShape(head["name"], head["tokens"], head["hidden"], head["vocab"])
    return Step(shape, ranks, "SP" in result["variant"], result["variant"].endswith("all kept"))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency and bandwidth of ``time = latency + bytes / bandwidth`` with the least relative error."""
    weights = [1.0 / time**2 for _, time in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    moment = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    slope = moment / sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    return max(0.0, mean_y - slope * mean_x), 1.0 / slope


def measured_table(recorded: Mapping[str, Any] | None, machine: Machine) -> list[str]:
    """Two GPUs: what was measured beside what the model says."""
    if recorded is None:
        return ["Not measured yet: `torchrun --nproc_per_node 2 scripts/benchmark_tp.py --output-dir DIR`."]
    environment = recorded["environment"]
    lines = [
        f"{environment['device']} x {environment['ranks']}, torch {environment['versions']['torch']}, "
        f"{environment['date']}, forward plus backward in bf16; every number is the slower rank's.",
        "",
        "| head | variant | ms | / floor | in series ms | exposed ms | model ms | collectives alone ms | hidden "
        "| peak MiB | held MiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for head, result in _results(recorded):
        model = 1e3 * _step(head, result, environment["ranks"]).exposed(machine)
        memory = [f"{result[name]:.0f}" if result[name] is not None else "" for name in ("peak_mib", "held_mib")]
        cells = [
            head["name"], result["variant"], f"{result['step_ms']:.2f}", f"{result['ratio']:.3f}",
            f"{result['series_ms']:.2f}", f"{result['exposed_ms']:.2f}", f"{model:.2f}",
            f"{result['collectives_ms']:.2f}", share_text(result["hidden_share"]), *memory,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def model_table(machine: Machine) -> list[str]:
    """Sequence parallelism over more ranks and larger vocabularies."""
    lines = [
        "| head | vocabulary | TP | floor ms | collectives ms | exposed ms, all kept | exposed ms, none kept "
        "| of the floor | logits kept MiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in HEADS:
        for vocabulary in VOCABULARIES:
            shape = SHAPES[name]
            shape = HeadShape(name, shape.tokens, shape.hidden, vocabulary or shape.vocab)
            for ranks in RANKS:
                kept, none = (Step(shape, ranks, True, kept) for kept in (True, False))
                exposed = [step.exposed(machine) for step in (kept, none)]
                share = " / ".join(f"{seconds / kept.floor(machine):.1%}" for seconds in exposed)
                logits = BYTES * shape.tokens * shape.vocab / ranks / 2**20
                cells = [
                    name, f"{shape.vocab:,}", str(ranks), f"{1e3 * kept.floor(machine):.1f}",
                    f"{1e3 * kept.alone(machine):.2f}", *(f"{1e3 * seconds:.2f}" for seconds in exposed), share,
                    f"{logits:.0f}",
                ]  # fmt: skip
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def text_of(recorded: Mapping[str, Any] | None) -> str:
    """Both tables in Markdown."""
    machine = machine_of(recorded)
    lines = ["### Two GPUs, measured", "", *measured_table(recorded, machine), ""]
    lines += ["### More GPUs and larger vocabularies, from the model", "", f"Rates {machine.source}.", ""]
    return "\n".join([*lines, *model_table(machine)])


def in_page(page: str, text: str) -> str:
    """``page`` with ``text`` between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="of scripts/benchmark_tp.py")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    options = parser.parse_args(arguments)
    text = text_of(read(options.results))
    print(text)
    if options.write:
        PAGE.write_text(in_page(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    main()
