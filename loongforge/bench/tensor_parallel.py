"""The output layer on the GPUs of one host: values against one GPU, then time, memory and communication.

Started by ``torchrun`` with one process a GPU; the tensor-parallel group is the world.  Every time is the slowest
rank's, the median over rounds in which all variants take turns: under a power limit clocks drift, and a floor measured
at another moment is another floor.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from loongforge import linear_cross_entropy
from loongforge.bench.communication import AS_IT_IS, Collective, Mode, Overlap, collective, modes, overlaps
from loongforge.bench.measure import float32_truth, relative_error, release, three_products
from loongforge.bench.ranks import World
from loongforge.bench.run import describe
from loongforge.bench.shapes import HeadShape, parse_shape, positive
from loongforge.bench.tensor_parallel_report import Result, report
from loongforge.errors import UsageError, require_folder

SHAPES = ("dsv3", "llama3-8b")
LINK_MIB = (1, 4, 16, 64, 256)
NAMES = ("loss", "grad_hidden", "grad_weight")


@dataclass(frozen=True)
class Variant:
    """One way to run the head over the group."""

    sequence_parallel: bool
    budget_mb: int | str

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"TP{' + SP' if self.sequence_parallel else ''}, {'all' if self.budget_mb == 'all' else 'none'} kept"


VARIANTS = tuple(Variant(sequence_parallel, budget) for sequence_parallel in (True, False) for budget in ("all", 0))


class Head:
    """Whole tensors, the same on every rank, and this rank's parts of them as leaves."""

    def __init__(self, shape: HeadShape, world: World, dtype: torch.dtype) -> None:
        if shape.vocab % world.size or shape.tokens % world.size:
            raise UsageError(f"{shape} cannot be split over {world.size} ranks: tokens and vocabulary must divide")
        generator = torch.Generator(world.device).manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, device=world.device, generator=generator)

        self.world = world
        self.hidden_TH = normal(shape.tokens, shape.hidden).to(dtype)
        self.weight_VH = (normal(shape.vocab, shape.hidden) * shape.hidden**-0.5).to(dtype)
        self.target_T = torch.randint(0, shape.vocab, (shape.tokens,), device=world.device, generator=generator)
        self.target_T[::17] = -100
        self.upstream_T = torch.rand(shape.tokens, device=world.device, generator=generator) / shape.tokens
        self.local_hidden = self._part(self.hidden_TH).clone().requires_grad_()
        self.all_hidden = self.hidden_TH.clone().requires_grad_()
        self.rows = self._part(self.weight_VH).clone().requires_grad_()

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(self.world.size)[self.world.rank]

    def hidden(self, variant: Variant) -> torch.Tensor:
        """The leaf that goes in."""
        return self.local_hidden if variant.sequence_parallel else self.all_hidden

    def forward(self, variant: Variant, mode: Mode = AS_IT_IS) -> torch.Tensor:
        """Loss per token of all tokens."""
        self.drop_gradients()
        return linear_cross_entropy(
            self.hidden(variant),
            self.rows,
            self.target_T,
            reduction="none",
            tp_group=self.world.high_priority_group if mode.high_priority else self.world.group,
            sequence_parallel=variant.sequence_parallel,
            logits_budget_mb=variant.budget_mb,
        )

    def step(self, variant: Variant, mode: Mode = AS_IT_IS) -> torch.Tensor:
        """Forward and backward."""
        with mode.context():
            loss_T = self.forward(variant, mode)
            loss_T.backward(self.upstream_T)
        return loss_T.detach()

    def drop_gradients(self) -> None:
        self.local_hidden.grad = self.all_hidden.grad = self.rows.grad = None

    def check(self) -> dict[Variant, Result]:
        """Errors of one GPU and of every variant against float32: relative norms, the worst rank's.

        Raises:
            RuntimeError: a variant is further off than one GPU explains, or ranks see different losses.
        """
        loss_T, grad_hidden, grad_weight = float32_truth(self.hidden_TH, self.weight_VH, self.target_T, self.upstream_T)
        truth = (loss_T, grad_hidden, grad_weight)
        # One GPU with the same budget: kept logits are rounded, recomputed ones may not be.
        alone = {budget: self._alone(truth, budget) for budget in dict.fromkeys(v.budget_mb for v in VARIANTS)}
        results = {}
        for variant in VARIANTS:
            loss_T = self.step(variant)
            grad_hidden = self._part(truth[1]) if variant.sequence_parallel else truth[1]
            mine = (truth[0], grad_hidden, self._part(truth[2]))
            found = self._against(mine, loss_T, self.hidden(variant).grad, self.rows.grad)
            single = alone[variant.budget_mb]
            _require_close(variant, found, single)
            if self._differs_between_ranks(loss_T):
                raise RuntimeError(f"{variant.name}: the ranks' losses are not the same bit for bit")
            results[variant] = Result(variant.name, found, single, self._repeats(variant, loss_T))
        return results

    def _alone(self, truth: tuple[torch.Tensor, ...], budget_mb: int | str) -> dict[str, float]:
        hidden, weight = (whole.detach().requires_grad_() for whole in (self.hidden_TH, self.weight_VH))
        loss_T = linear_cross_entropy(hidden, weight, self.target_T, reduction="none", logits_budget_mb=budget_mb)
        loss_T.backward(self.upstream_T)
        return self._against(truth, loss_T.detach(), hidden.grad, weight.grad)

    def _repeats(self, variant: Variant, loss_T: torch.Tensor) -> bool:
        first = self._left_behind(variant, loss_T)
        same = _same_bits(first, self._left_behind(variant, self.step(variant)))
        return not self.world.slowest([float(not same)])[0]

    def _left_behind(self, variant: Variant, loss_T: torch.Tensor) -> list[torch.Tensor]:
        """Results of a step; the next one makes new tensors."""
        grads = (self.hidden(variant).grad, self.rows.grad)
        return [loss_T, *(grad for grad in grads if grad is not None)]

    def _against(self, truth, *actual) -> dict[str, float]:
        errors = [relative_error(*pair) for pair in zip(actual, truth, strict=True)]
        return dict(zip(NAMES, self.world.slowest(errors), strict=True))

    def _differs_between_ranks(self, loss_T: torch.Tensor) -> bool:
        first_T = loss_T.clone()
        dist.broadcast(first_T, 0)
        return bool(self.world.slowest([float(not torch.equal(first_T, loss_T))])[0])

    def memory_mib(self, variant: Variant) -> tuple[float, float]:
        """Peak of a step above the inputs, and what is held between forward and backward; the worst rank's."""
        if self.world.device.type != "cuda":
            return math.nan, math.nan
        self.drop_gradients()
        release(self.world.device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss_T = self.forward(variant)
        held = torch.cuda.memory_allocated() - before
        loss_T.backward(self.upstream_T)
        torch.cuda.synchronize()
        peak_mib, held_mib = self.world.slowest([torch.cuda.max_memory_allocated() - before, held])
        return peak_mib / 2**20, held_mib / 2**20

    def collectives(self, variant: Variant) -> dict[str, Collective]:
        """What a step of the variant sends, in its order."""
        size, statistics_of_all = self.world.size, self.upstream_T.new_empty((self.world.size * 3, len(self.target_T)))
        exchange = collective("all_gather", statistics_of_all, size)
        if not variant.sequence_parallel:
            return {"statistics": exchange, "all-reduce": collective("all_reduce", self._like_hidden(), size)}
        gather = collective("all_gather", self._like_hidden(), size)
        scatter = collective("reduce_scatter", self._like_hidden(), size)
        return {"gather": gather, "statistics": exchange, "gather again": gather, "reduce-scatter": scatter}

    def _like_hidden(self) -> torch.Tensor:
        return torch.zeros_like(self.hidden_TH)

    def profile(self, variant: Variant, lead: Callable[[], object]) -> list[Overlap]:
        """Communication kernels of one step and what ran beside them, each on the rank that waited least in it."""
        if self.world.device.type != "cuda":
            return []
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(2):  # the first finds the profiler starting
                dist.barrier()
                self.world.begin_together(lead)
                self.step(variant)
            torch.cuda.synchronize()
        mine = overlaps(profile)[-len(self.collectives(variant)) :]
        of_ranks: list[list[Overlap]] = [[] for _ in range(self.world.size)]
        dist.all_gather_object(of_ranks, mine)
        return [min(same, key=lambda kernel: kernel.time_us) for same in zip(*of_ranks, strict=True)]

    def replay(self, variant: Variant) -> str:
        """A captured step, replayed, against the eager one, which must not wait for the host either."""
        if self.world.device.type != "cuda":
            return "no GPU, nothing to capture"
        eager = self._left_behind(variant, self.step(variant))
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_sync_debug_mode("error")
        with torch.cuda.stream(aside):
            self.step(variant)
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss_T = self.step(variant)
        graph.replay()
        torch.cuda.synchronize()
        same = _same_bits(eager, self._left_behind(variant, loss_T))
        self.drop_gradients()
        return f"no synchronisation; replayed from a CUDA graph with {'the same' if same else 'OTHER'} bits"


def _same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == 3 and all(map(torch.equal, first, second))


def _require_close(variant: Variant, found: dict[str, float], single: dict[str, float]) -> None:
    for name, error in found.items():
        bar = 2 * single[name] + 1e-6
        if not error <= bar:
            raise RuntimeError(f"{variant.name}: {name} is off by {error:.2e}, one GPU by {single[name]:.2e}")


def measure(shape: HeadShape, world: World, dtype: torch.dtype, rounds: int) -> list[Result]:
    """All variants on one shape: checked, then measured."""
    head = Head(shape, world, dtype)
    results = head.check()
    release(world.device)
    lead = three_products(head.hidden_TH[: max(1, shape.tokens // 8)], head.rows.detach())
    calls: dict[str, Callable[[], object]] = {"floor": three_products(head.hidden_TH, head.rows.detach())}
    for variant in VARIANTS:
        for mode in modes(head.hidden_TH):
            calls[variant.name + mode.name] = partial(head.step, variant, mode)
        calls[variant.name + " alone"] = partial(_one_after_another, list(head.collectives(variant).values()))
    times = world.interleaved(calls, rounds, lead)
    calls.clear()
    for variant, result in results.items():
        result.floor_ms = statistics.median(times["floor"])
        _fill(result, {name.removeprefix(variant.name): ms for name, ms in times.items()})
        result.peak_mib, result.held_mib = head.memory_mib(variant)
        result.kernels = head.profile(variant, lead)
    return list(results.values())


def _one_after_another(collectives: list[Collective]) -> None:
    for one in collectives:
        one.call()


def _fill(result: Result, times: dict[str, list[float]]) -> None:
    """Medians, and what communication exposes within a round: between rounds clocks drift by more than that."""
    for field, mode in (
        ("step_ms", ""), ("series_ms", " in series"), ("silent_ms", " without"), ("collectives_ms", " alone"),
        ("at_once_ms", " at once"), ("high_priority_ms", " high priority"),
    ):  # fmt: skip
        setattr(result, field, statistics.median(times[mode]))
    exposed = [step - silent for step, silent in zip(times[""], times[" without"], strict=True)]
    low, result.exposed_ms, high = statistics.quantiles(exposed, n=4, method="inclusive")
    result.exposed_spread_ms = (high - low) / 2


def measure_links(world: World, rounds: int) -> list[dict[str, float | str]]:
    """Time and bandwidth of the collectives by size."""
    sizes = LINK_MIB if world.device.type == "cuda" else LINK_MIB[:1]
    parts = [
        collective(
            name, torch.zeros(2**19 // world.size * world.size * mib, device=world.device).bfloat16(), world.size
        )
        for name in ("all_gather", "reduce_scatter", "all_reduce")
        for mib in sizes
    ]
    busy = torch.zeros(2048, 2048, device=world.device)
    times = world.interleaved(
        {f"{part.name} {part.num_bytes}": part.call for part in parts}, 2 * rounds, lambda: busy @ busy
    )
    return [
        {"collective": part.name, "bytes": part.num_bytes, "ms": ms, "gb_per_s": part.sent_bytes / ms / 1e6}
        for part, ms in zip(parts, map(statistics.median, times.values()), strict=True)
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"default: {' '.join(SHAPES)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: GPUs where there are any")
    parser.add_argument("--rounds", type=positive, default=15, help="rounds, over which medians are taken; at least 2")
    parser.add_argument("--graphs", action="store_true", help="also capture a step of each variant and replay it")
    parser.add_argument("--output-dir", type=Path, help="folder for results.json and table.txt; default: print only")


def run(options: argparse.Namespace) -> None:
    """Check, measure, print on rank 0, write."""
    shapes = [parse_shape(text) for text in options.shapes or SHAPES]
    if options.rounds < 2:
        raise UsageError("--rounds must be at least 2: differences between variants need a spread")
    require_folder(options.output_dir)
    world = World.join(options.device)
    dtype = torch.bfloat16
    try:
        environment = describe(world.device, dtype) | {"ranks": world.size, "rounds": options.rounds}
        results = {}
        for shape in shapes:
            results[shape] = measure(shape, world, dtype, options.rounds)
            release(world.device)
            if world.rank == 0:
                print(f"{shape.name}: measured", flush=True)
        links = measure_links(world, options.rounds)
        if world.rank == 0:
            report(environment, results, links, options.output_dir)
        if options.graphs:
            head = Head(shapes[-1], world, dtype)
            for variant in VARIANTS:
                outcome = head.replay(variant)
                if world.rank == 0:
                    print(f"{variant.name}: {outcome}", flush=True)
    finally:
        dist.destroy_process_group()
