"""What follows the tiles of statistics, in one launch of Triton for all rows.

The statistics kernels of :mod:`loongforge.kernels.triton_tiles` and :mod:`loongforge.kernels.gluon_tiles` leave partial
results for every tile.  ``finish_kernel`` folds a row's in a fixed order, without atomics, so that results repeat bit
for bit, and computes the one logit per row that has to be known by itself.
"""

import torch
import triton
import triton.language as tl

from loongforge.kernels.interface import Chunk, RowStats
from loongforge.kernels.triton_rows import (
    LOG2_E,
    _bits,
    _float_from_bits,
    _fold,
    _offset,
    _transform,
    _transform_arguments,
)

FINISH = {"ROWS": 32, "TILES": 32, "BLOCK_H": 1024}
_UNSPECIALIZED = [
    "num_tokens", "num_tiles", "num_classes", "first_class", "hidden_stride", "weight_stride", "factor_bits",
    "softcap_bits",
]  # fmt: skip


@triton.jit
def _store_label_logit(row, hidden_ptr, weight_ptr, bias_ptr, label_ptr, label_logit_ptr, hidden_stride, weight_stride,
                       num_classes, first_class, hidden_size, factor, softcap, TRANSFORM: tl.constexpr,
                       FIRST: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """The logit at the label of one row: one dot product, cheaper than looking for it in every tile."""
    label = tl.load(label_ptr + row) - first_class
    if (label >= 0) & (label < num_classes):
        total = tl.zeros((BLOCK_H,), tl.float32)
        for k in range(0, hidden_size, BLOCK_H):
            column = k + tl.arange(0, BLOCK_H)
            mask = column < hidden_size
            hidden = tl.load(hidden_ptr + row * hidden_stride + column, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + label * weight_stride + column, mask=mask, other=0.0).to(tl.float32)
            total += hidden * weight
        z = tl.sum(total, 0)
        if bias_ptr is not None:
            z += tl.load(bias_ptr + label).to(tl.float32)
        x, _ = _transform(z, factor, softcap, TRANSFORM)
        tl.store(label_logit_ptr + row, x)
    elif FIRST:
        tl.store(label_logit_ptr + row, 0.0)


@triton.jit
def _fold_rows(row, partial_ptr, max_ptr, sum_exp_ptr, weighted_sum_ptr, num_tokens, num_tiles,
               FIRST: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """Fold the partial statistics of a few rows, tile after tile, into what earlier chunks left."""
    row_exists = row < num_tokens
    plane = num_tiles.to(tl.int64) * num_tokens
    lane_max = tl.full((TILES, ROWS), float("-inf"), tl.float32)
    lane_sum = tl.zeros((TILES, ROWS), tl.float32)
    lane_weighted = tl.zeros((TILES, ROWS), tl.float32)
    for first in range(0, num_tiles, TILES):
        tile = first + tl.arange(0, TILES)
        mask = (tile < num_tiles)[:, None] & row_exists[None, :]
        partial = partial_ptr + tile.to(tl.int64)[:, None] * num_tokens + row[None, :]
        tile_max = tl.load(partial, mask=mask, other=float("-inf"))
        tile_sum = tl.load(partial + plane, mask=mask, other=0.0)
        lane_max, lane_sum = _fold(lane_max, lane_sum, tile_max, tile_sum)
        if weighted_sum_ptr is not None:
            lane_weighted += tl.load(partial + 2 * plane, mask=mask, other=0.0)
    new_max = tl.max(lane_max, 0)
    new_sum = tl.sum(lane_sum * tl.exp2((lane_max - _offset(new_max)[None, :]) * LOG2_E), 0)
    if not FIRST:
        old_max = tl.load(max_ptr + row, mask=row_exists, other=float("-inf"))
        old_sum = tl.load(sum_exp_ptr + row, mask=row_exists, other=0.0)
        new_max, new_sum = _fold(old_max, old_sum, new_max, new_sum)
    tl.store(max_ptr + row, new_max, mask=row_exists)
    tl.store(sum_exp_ptr + row, new_sum, mask=row_exists)
    if weighted_sum_ptr is not None:
        weighted = tl.sum(lane_weighted, 0)
        if not FIRST:
            weighted += tl.load(weighted_sum_ptr + row, mask=row_exists, other=0.0)
        tl.store(weighted_sum_ptr + row, weighted, mask=row_exists)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def finish_kernel(
    partial_ptr,
    hidden_ptr,
    weight_ptr,
    bias_ptr,  # None: no bias
    label_ptr,
    max_ptr,
    sum_exp_ptr,
    label_logit_ptr,
    weighted_sum_ptr,  # None: not wanted
    hidden_stride: tl.int64,
    weight_stride: tl.int64,
    num_tokens: tl.int32,
    num_tiles: tl.int32,
    num_classes: tl.int32,
    first_class: tl.int64,
    hidden_size: tl.int32,
    factor_bits: tl.int64,
    softcap_bits: tl.int64,
    TRANSFORM: tl.constexpr,
    FIRST: tl.constexpr,  # nothing was accumulated before
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """What follows the tiles, in one launch: few programs that fold, beside them one per row for its label."""
    num_folds = tl.cdiv(num_tokens, ROWS)
    if tl.program_id(0) < num_folds:
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        _fold_rows(rows, partial_ptr, max_ptr, sum_exp_ptr, weighted_sum_ptr, num_tokens, num_tiles, FIRST, ROWS,
                   TILES)  # fmt: skip
    else:
        row = (tl.program_id(0) - num_folds).to(tl.int64)
        factor, softcap = _float_from_bits(factor_bits, tl.float32), _float_from_bits(softcap_bits, tl.float32)
        _store_label_logit(row, hidden_ptr, weight_ptr, bias_ptr, label_ptr, label_logit_ptr, hidden_stride,
                           weight_stride, num_classes, first_class, hidden_size, factor, softcap, TRANSFORM, FIRST,
                           BLOCK_H)  # fmt: skip


def finish_statistics(
    partial: torch.Tensor, hidden_TH: torch.Tensor, weight_CH: torch.Tensor, bias_C: torch.Tensor | None, chunk: Chunk,
    stats: RowStats, first: bool, with_labels: bool = True,
) -> None:  # fmt: skip
    """Fold the partial statistics of all tiles into ``stats``; ``with_labels`` computes the logits there as well."""
    num_tokens, num_tiles = hidden_TH.shape[0], partial.shape[1]
    mode, factor, softcap = _transform_arguments(chunk.transform)
    finish_kernel[(triton.cdiv(num_tokens, FINISH["ROWS"]) + num_tokens * with_labels,)](
        partial, hidden_TH, weight_CH, bias_C, chunk.label_T, stats.max_T, stats.sum_exp_T, stats.label_logit_T,
        stats.weighted_sum_T, hidden_TH.stride(0), weight_CH.stride(0), num_tokens, num_tiles, weight_CH.shape[0],
        chunk.first_class, hidden_TH.shape[1], _bits(factor), _bits(softcap), TRANSFORM=mode, FIRST=first, **FINISH,
    )  # fmt: skip
