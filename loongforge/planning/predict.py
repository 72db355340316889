"""Peak memory and time of one output layer from its :class:`loongforge.plan.ChunkPlan`.

Memory is the sum of what is alive at the two moments that can be the largest (``docs/tools.md``).  Time is work over
rates: products of the vendor's library, products of the tile kernels with their exponentials, and bytes that the row
kernels and the float32 sums move.  The rates of the H200 are fitted on measurements; those of another NVIDIA GPU are
the same shares of what its vendor states, an estimate that nobody measured.  For AMD GPUs nothing was measured on
hardware and no time is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from loongforge.bench.shapes import HeadShape
from loongforge.budget import LogitsBudget
from loongforge.dispatch import TILE_ARCHS
from loongforge.gradients_in_forward import gradient_bytes
from loongforge.options import LossOptions
from loongforge.plan import ChunkPlan, plan_chunks
from loongforge.planning import fitted
from loongforge.planning.devices import DEVICES, MEASURED, Device

IMPLEMENTATION = "triton"
"""All devices of the table run it; FlyDSL has the same chunk widths."""


@dataclass(frozen=True)
class Layer:
    """One rank's output layer."""

    shape: HeadShape
    """Tokens after the gather, and this rank's vocabulary rows."""
    dtype: torch.dtype
    reduction: str = "none"
    tensor_parallel: int = 1
    sequence_parallel: bool = False

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def logits_bytes(self) -> int:
        """One copy of the logits."""
        return self.shape.tokens * self.shape.vocab * self.itemsize

    def plan(self, budget_mb: int | str, with_tiles: bool) -> ChunkPlan:
        """What a call with this budget alone in its process would do."""
        tokens, hidden, vocab = self.shape.tokens, self.shape.hidden, self.shape.vocab
        plan_for = partial(
            plan_chunks,
            IMPLEMENTATION,
            tokens,
            hidden,
            vocab,
            self.itemsize,
            in_tiles=with_tiles,
            scaled=self.dtype == torch.float16,
            ranks_add_rounded=self.tensor_parallel > 1,
        )
        saved, in_forward = 0, None
        if self.reduction != "none" and self.tensor_parallel == 1:
            hidden_TH, weight_VH = (
                torch.empty(size, hidden, dtype=self.dtype, device="meta", requires_grad=True)
                for size in (tokens, vocab)
            )
            saved, in_forward = gradient_bytes(hidden_TH, weight_VH, None), plan_for(gradients_in_forward=True)
        return LogitsBudget().reserve(LossOptions(logits_budget_mb=budget_mb), plan_for(), in_forward, saved).plan


def peak_bytes(layer: Layer, plan: ChunkPlan) -> int:
    """Most bytes above the inputs during forward and backward, both gradients included."""
    gathered = plan.num_tokens * plan.hidden_size * layer.itemsize if layer.sequence_parallel else 0
    return plan.tensor_bytes + gathered + gathered // layer.tensor_parallel


TORCH = "torch, loss in float32"
COPIES_BFLOAT16 = {"megatron-core unfused": 3, "megatron-core native fused": 5, TORCH: 6}
"""Copies of the bf16 logits alive at once, as measured on the H200 (``docs/benchmarks/h200/results.json``)."""


def unfused_peaks(layer: Layer) -> dict[str, int]:
    """Peak bytes above the inputs of losses over materialised logits; empty where it was not measured (not bf16).

    torch's own loss knows no vocabulary shards.
    """
    if layer.dtype != torch.bfloat16:
        return {}
    tokens, hidden, rows = layer.shape.tokens, layer.shape.hidden, layer.shape.vocab
    with_gradients = layer.logits_bytes + (tokens + rows) * hidden * layer.itemsize
    return {
        name: max(copies * layer.logits_bytes, with_gradients)
        for name, copies in COPIES_BFLOAT16.items()
        if layer.tensor_parallel == 1 or name != TORCH
    }


@dataclass(frozen=True)
class Work:
    """What forward and backward do, by who does it."""

    library_flops: float
    tile_flops: float
    tile_logits: float
    num_bytes: float

    @classmethod
    def of(cls, plan: ChunkPlan) -> Work:
        """Tile kernels take the logits that are not kept, twice; the library's products and row kernels the rest."""
        tokens, hidden, rows = plan.num_tokens, plan.hidden_size, plan.vocab_rows
        in_tiles = rows - plan.kept_rows if plan.in_tiles and not plan.tokens_per_chunk else 0
        tile_flops = 4 * tokens * hidden * in_tiles
        row_kernels = 3 * tokens * (rows - in_tiles) * plan.itemsize  # one read, then one read and one write
        return cls(plan.flops - tile_flops, tile_flops, tokens * in_tiles, row_kernels + _bytes_of_sums(plan))


def _bytes_of_sums(plan: ChunkPlan) -> int:
    """Reads and writes of the float32 sum that the chunks' products are added to."""
    wide = max(plan.itemsize, 4)
    if plan.tokens_per_chunk:
        num_chunks = -(-plan.num_tokens // plan.tokens_per_chunk)
        return num_chunks * plan.vocab_rows * plan.hidden_size * 2 * wide
    products, elements = plan.num_products, plan.num_tokens * plan.hidden_size
    return elements * (plan.itemsize if products == 1 else products * 2 * wide)


@dataclass(frozen=True)
class Rates:
    """What one device does in a millisecond."""

    library_tflops: float
    tile_tflops: float
    tile_ms_per_gigalogit: float
    terabytes: float

    def milliseconds(self, work: Work) -> float:
        return (
            work.library_flops / self.library_tflops * 1e-9
            + work.tile_flops / self.tile_tflops * 1e-9
            + work.tile_logits * self.tile_ms_per_gigalogit * 1e-9
            + work.num_bytes / self.terabytes * 1e-9
        )

    def floor_ms(self, shape: HeadShape) -> float:
        """The three products that no method can do without."""
        return 6 * shape.tokens * shape.hidden * shape.vocab / self.library_tflops * 1e-9


FITTED = Rates(fitted.LIBRARY_TFLOPS, fitted.TILE_TFLOPS, fitted.TILE_MS_PER_GIGALOGIT, fitted.TERABYTES_PER_SECOND)


def has_tiles(device: Device) -> bool:
    return device.arch.name in TILE_ARCHS


def rates_of(device: Device, dtype: torch.dtype) -> Rates | str:
    """The rates, or why no time is given."""
    if device.sheet is None:
        return "nothing was ever timed on an AMD GPU (docs/amd.md)"
    if dtype != torch.bfloat16:
        return "only bf16 was measured"
    measured = DEVICES[MEASURED].sheet
    assert measured is not None
    share = device.sheet.tflops / measured.tflops
    return Rates(
        FITTED.library_tflops * share,
        FITTED.tile_tflops * share,
        FITTED.tile_ms_per_gigalogit / share,
        FITTED.terabytes * (device.sheet.terabytes / measured.terabytes),
    )
