"""GEMM and row kernel in one, in Triton, for Hopper: a tile of logits never leaves the registers unless it is kept.

Where logits are not kept, forward needs nothing of them but three numbers per token, and backward nothing but their
gradient.  These two kernels compute a [BLOCK_T, BLOCK_C] tile of ``hidden @ weight.T`` with the tensor cores (TMA
loads and stores, persistent programs) and finish it in the epilogue:

* ``statistics_kernel`` reduces the tile to a maximum and a sum of exponentials per row, which
  :mod:`loongforge.kernels.triton_tiles_finish` folds;
* ``tile_gradient_kernel`` turns the tile into its gradient and stores that.

Both see the float32 accumulator: losses and gradients are those of unrounded logits.  A probability must be
normalised by a sum over the same logits, so a chunk is either in these kernels' hands in both directions or in none.

Measured against the vendor library's GEMM plus a row kernel in ``docs/performance.md``.
"""

import functools
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from loongforge.kernels.interface import Chunk, RowCoefficients, RowStats
from loongforge.kernels.triton_rows import (
    IDENTITY,
    LOG2_E,
    _bits,
    _float_from_bits,
    _gradient,
    _offset,
    _transform,
    _transform_arguments,
)
from loongforge.kernels.triton_tiles_finish import finish_statistics


@triton.jit
def _tile_position(tile, num_tokens, num_classes, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of tile number ``tile``: columns of GROUP row blocks, so that L2 serves both operands."""
    num_t = tl.cdiv(num_tokens, BLOCK_T)
    num_c = tl.cdiv(num_classes, BLOCK_C)
    group = tile // (GROUP * num_c)
    first_t = group * GROUP
    group_size = tl.minimum(num_t - first_t, GROUP)
    return first_t + tile % group_size, (tile % (GROUP * num_c)) // group_size


@triton.jit
def _tile_logits(hidden_desc, weight_desc, bias_ptr, tile_t, tile_c, num_classes, hidden_size,
                 BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """float32 logits [BLOCK_T, BLOCK_C]; rows and columns past the end come from TMA's zero padding."""
    z = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for k in range(tl.cdiv(hidden_size, BLOCK_H)):
        hidden = hidden_desc.load([tile_t * BLOCK_T, k * BLOCK_H])
        weight = weight_desc.load([tile_c * BLOCK_C, k * BLOCK_H])
        z = tl.dot(hidden, weight.T, z)
    if bias_ptr is not None:
        column = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
        z += tl.load(bias_ptr + column, mask=column < num_classes, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit
def _weighted_tile(x, column, class_weight_ptr, num_classes):
    """``class_weight * x`` of the columns that exist, 0 elsewhere."""
    weighted = tl.where((column < num_classes)[None, :], x, 0.0)
    if class_weight_ptr is not None:
        weighted *= tl.load(class_weight_ptr + column, mask=column < num_classes, other=0.0)[None, :]
    return weighted


@triton.jit
def _exponentials(x, max_x):
    return tl.exp2((x - _offset(max_x)[:, None]) * LOG2_E)


@triton.jit
def _store_statistics(z, row, column, tile_c, partial_ptr, class_weight_ptr, num_tokens, num_classes, factor, softcap,
                      TRANSFORM: tl.constexpr, WEIGHTED_SUM: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """Maximum, sum of exponentials and weighted sum of every row of a tile of logits ``z``."""
    row_exists = row < num_tokens
    x, _ = _transform(z, factor, softcap, TRANSFORM)
    partial = partial_ptr + tile_c.to(tl.int64) * num_tokens + row
    plane = tl.cdiv(num_classes, BLOCK_C).to(tl.int64) * num_tokens
    if WEIGHTED_SUM:
        weighted = _weighted_tile(x, column, class_weight_ptr, num_classes)
        tl.store(partial + 2 * plane, tl.sum(weighted, 1), mask=row_exists)
    if (tile_c + 1) * BLOCK_C > num_classes:  # only the last tiles pay for the mask
        x = tl.where((column < num_classes)[None, :], x, float("-inf"))
    tile_max = tl.max(x, 1)
    tl.store(partial, tile_max, mask=row_exists)
    tl.store(partial + plane, tl.sum(_exponentials(x, tile_max), 1), mask=row_exists)


@triton.jit
def _store(desc, row, column, tile, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """Store a tile through shared memory, in halves so that it fits beside the pipeline's buffers."""
    left, right = tl.split(tl.permute(tl.reshape(tile, (BLOCK_T, 2, BLOCK_C // 2)), (0, 2, 1)))
    desc.store([row, column], left.to(desc.dtype))
    desc.store([row, column + BLOCK_C // 2], right.to(desc.dtype))


_NUMBERS = ["num_tokens", "num_classes", "first_class", "factor_bits", "softcap_bits"]


@triton.jit(do_not_specialize=_NUMBERS)
def statistics_kernel(
    hidden_desc,
    weight_desc,
    bias_ptr,  # None: no bias
    partial_ptr,  # [2 or 3, num_tiles_c, num_tokens]: maximum, sum of exponentials, weighted sum
    class_weight_ptr,  # None: all ones
    num_tokens: tl.int32,
    num_classes: tl.int32,
    hidden_size: tl.int32,
    factor_bits: tl.int64,
    softcap_bits: tl.int64,
    TRANSFORM: tl.constexpr,
    WEIGHTED_SUM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
):
    factor = _float_from_bits(factor_bits, tl.float32)
    softcap = _float_from_bits(softcap_bits, tl.float32)
    num_tiles = tl.cdiv(num_tokens, BLOCK_T) * tl.cdiv(num_classes, BLOCK_C)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile_t, tile_c = _tile_position(tile, num_tokens, num_classes, BLOCK_T, BLOCK_C, GROUP)
        z = _tile_logits(hidden_desc, weight_desc, bias_ptr, tile_t, tile_c, num_classes, hidden_size,
                         BLOCK_T, BLOCK_C, BLOCK_H)  # fmt: skip
        row = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
        column = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
        _store_statistics(z, row, column, tile_c, partial_ptr, class_weight_ptr, num_tokens, num_classes, factor,
                          softcap, TRANSFORM, WEIGHTED_SUM, BLOCK_C)  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def tile_gradient_kernel(
    hidden_desc,
    weight_desc,
    out_desc,
    bias_ptr,  # None: no bias
    label_ptr,
    max_ptr,
    softmax_over_sum_ptr,
    onehot_ptr,
    uniform_ptr,  # None: no label smoothing
    class_weight_ptr,  # None: all ones
    num_tokens: tl.int32,
    num_classes: tl.int32,
    first_class: tl.int64,
    hidden_size: tl.int32,
    factor_bits: tl.int64,
    softcap_bits: tl.int64,
    TRANSFORM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
):
    factor = _float_from_bits(factor_bits, tl.float32)
    softcap = _float_from_bits(softcap_bits, tl.float32)
    num_tiles = tl.cdiv(num_tokens, BLOCK_T) * tl.cdiv(num_classes, BLOCK_C)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        tile_t, tile_c = _tile_position(tile, num_tokens, num_classes, BLOCK_T, BLOCK_C, GROUP)
        z = _tile_logits(hidden_desc, weight_desc, bias_ptr, tile_t, tile_c, num_classes, hidden_size,
                         BLOCK_T, BLOCK_C, BLOCK_H)  # fmt: skip
        row = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
        column = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
        row_exists = row < num_tokens
        exists = (column < num_classes)[None, :]
        max_x = tl.load(max_ptr + row, mask=row_exists, other=0.0)
        softmax_over_sum = tl.load(softmax_over_sum_ptr + row, mask=row_exists, other=0.0)
        onehot = tl.load(onehot_ptr + row, mask=row_exists, other=0.0)
        active = (softmax_over_sum != 0.0) | (onehot != 0.0)
        uniform = None
        if uniform_ptr is not None:
            row_uniform = tl.load(uniform_ptr + row, mask=row_exists, other=0.0)
            active = active | (row_uniform != 0.0)
            uniform = row_uniform[:, None]
        label = tl.load(label_ptr + row, mask=row_exists, other=-1) - first_class
        label = tl.where((label >= 0) & (label < num_classes), label, -1).to(tl.int32)
        grad = _gradient(z, column[None, :], exists, label[:, None], max_x[:, None], softmax_over_sum[:, None],
                         onehot[:, None], uniform, class_weight_ptr, factor, softcap, TRANSFORM)  # fmt: skip
        grad = tl.where(active[:, None], grad, 0.0)
        _store(out_desc, tile_t * BLOCK_T, tile_c * BLOCK_C, grad, BLOCK_T, BLOCK_C)


@dataclass(frozen=True)
class TileConfig:
    """Shape of a tile and how a program works on it."""

    block_t: int = 128
    block_c: int = 256
    block_h: int = 64
    group: int = 8
    num_warps: int = 8
    num_stages: int = 3

    def meta(self) -> dict[str, int]:
        return {
            "BLOCK_T": self.block_t, "BLOCK_C": self.block_c, "BLOCK_H": self.block_h, "GROUP": self.group,
            "num_warps": self.num_warps, "num_stages": self.num_stages,
            "enable_fp_fusion": True,  # whatever this Triton's default
        }  # fmt: skip


CONFIG = TileConfig()
_TMA_BYTES = 16
"""Alignment that the tensor memory accelerator asks of addresses and row strides."""


class TritonTileKernels:
    """``interface.TileKernels`` for Hopper; a subclass replaces the five methods before :meth:`supports`."""

    def _statistics(self, plain: bool) -> tuple[Any, int, dict[str, Any]]:
        """Statistics kernel, columns of its tiles and how to launch it; ``plain``: no option in its epilogue."""
        return statistics_kernel, CONFIG.block_c, CONFIG.meta()

    def _labels(
        self, hidden_TH: torch.Tensor, weight_CH: torch.Tensor, chunk: Chunk, stats: RowStats
    ) -> tuple[Any, ...]:
        """What a statistics kernel takes (``FIRST`` beside it) that computes the logits at the labels meanwhile."""
        return ()

    def _gradient(self) -> tuple[Any, dict[str, Any]]:
        """Gradient kernel and how to launch it."""
        return tile_gradient_kernel, CONFIG.meta()

    def _operands(self, hidden_TH: torch.Tensor, weight_CH: torch.Tensor) -> tuple[Any, ...]:
        """Descriptors of aligned operands."""
        both = (hidden_TH, CONFIG.block_t), (weight_CH, CONFIG.block_c)
        return tuple(TensorDescriptor.from_tensor(operand, [rows, CONFIG.block_h]) for operand, rows in both)

    def _output(self, out_TC: torch.Tensor) -> Any:
        return TensorDescriptor.from_tensor(out_TC, [CONFIG.block_t, CONFIG.block_c // 2])

    def supports(self, hidden_TH: torch.Tensor, weight_VH: torch.Tensor) -> bool:
        return (
            hidden_TH.dtype in (torch.bfloat16, torch.float16)
            and hidden_TH.dtype == weight_VH.dtype
            and hidden_TH.numel() > 0
            and hidden_TH.shape[1] * hidden_TH.element_size() % _TMA_BYTES == 0
            and _is_aligned(weight_VH)
        )

    def accumulate(
        self,
        hidden_TH: torch.Tensor,
        weight_CH: torch.Tensor,
        bias_C: torch.Tensor | None,
        chunk: Chunk,
        stats: RowStats,
        first: bool = False,
    ) -> None:
        weighted_sum = stats.weighted_sum_T is not None
        _require_contiguous(bias_C, chunk, vars(stats).values())
        mode, factor, softcap = _transform_arguments(chunk.transform)
        plain = mode == IDENTITY.value and bias_C is None and not weighted_sum
        kernel, width, launch = self._statistics(plain)
        num_tiles = triton.cdiv(weight_CH.shape[0], width)
        partial = stats.max_T.new_empty((3 if weighted_sum else 2, num_tiles, hidden_TH.shape[0]))
        hidden_TH, weight_CH = _aligned(hidden_TH), _aligned(weight_CH)
        labels = self._labels(hidden_TH, weight_CH, chunk, stats)
        if labels:
            launch = launch | {"FIRST": first}
        with torch.cuda.device(hidden_TH.device) if hidden_TH.is_cuda else nullcontext():
            kernel[(_num_programs(hidden_TH.device),)](
                *self._operands(hidden_TH, weight_CH), *labels, bias_C, partial,
                chunk.class_weight_C if weighted_sum else None,
                hidden_TH.shape[0], weight_CH.shape[0], hidden_TH.shape[1], _bits(factor), _bits(softcap),
                TRANSFORM=mode, WEIGHTED_SUM=weighted_sum, **launch,
            )  # fmt: skip
            finish_statistics(partial, hidden_TH, weight_CH, bias_C, chunk, stats, first, not labels)

    def gradient(
        self,
        hidden_TH: torch.Tensor,
        weight_CH: torch.Tensor,
        bias_C: torch.Tensor | None,
        chunk: Chunk,
        coefficients: RowCoefficients,
        out_TC: torch.Tensor,
    ) -> None:
        c = coefficients
        _require_contiguous(bias_C, chunk, vars(c).values())
        mode, factor, softcap = _transform_arguments(chunk.transform)
        kernel, launch = self._gradient()
        with torch.cuda.device(hidden_TH.device) if hidden_TH.is_cuda else nullcontext():
            kernel[(_num_programs(hidden_TH.device),)](
                *self._operands(_aligned(hidden_TH), _aligned(weight_CH)), self._output(out_TC), bias_C,
                chunk.label_T, c.max_T, c.softmax_over_sum_T, c.onehot_T, c.uniform_T,
                None if c.uniform_T is None else chunk.class_weight_C,
                hidden_TH.shape[0], weight_CH.shape[0], chunk.first_class, hidden_TH.shape[1],
                _bits(factor), _bits(softcap), TRANSFORM=mode, **launch,
            )  # fmt: skip


def _require_contiguous(bias_C: torch.Tensor | None, chunk: Chunk, per_token: Iterable[torch.Tensor | None]) -> None:
    for vector in (bias_C, chunk.label_T, chunk.class_weight_C, *per_token):
        assert vector is None or vector.is_contiguous(), "bias, per-token and per-class tensors must be contiguous"


def _aligned(operand: torch.Tensor) -> torch.Tensor:
    """The operand, or a copy whose address and rows the tensor memory accelerator takes."""
    return operand if _is_aligned(operand) else operand.clone(memory_format=torch.contiguous_format)


def _is_aligned(operand: torch.Tensor) -> bool:
    return (
        operand.stride(1) == 1
        and operand.stride(0) > 0  # no expanded row
        and operand.stride(0) * operand.element_size() % _TMA_BYTES == 0
        and operand.data_ptr() % _TMA_BYTES == 0
    )


@functools.cache
def _num_programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
