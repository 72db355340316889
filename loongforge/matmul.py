"""Matrix products through the vendor library, with float32 accumulation and one rounding.

Where torch can write a float32 result from bf16/fp16 operands (``out_dtype``, CUDA, torch >= 2.8) that is used.
Elsewhere the operands are upcast in pieces of bounded size; a low-precision product is never added up.
"""

from __future__ import annotations

from functools import cache

import torch

PIECE_ELEMENTS = 1 << 22
"""Most elements of one upcast operand piece (16 MiB in float32)."""

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def product_(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    """``out = a @ b`` or ``out += a @ b``; a [M, K] and b [K, N] of one dtype, out [M, N] of any float dtype."""
    native = out.dtype == a.dtype and (a.dtype not in _LOW_PRECISION or a.device.type != "cpu")
    if native:
        return out.addmm_(a, b) if accumulate else torch.mm(a, b, out=out)
    if out.dtype == torch.float32 and has_float32_output(a.device):
        if accumulate:
            return torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return _product_in_pieces(out, a, b, accumulate)


def project_(
    out_TC: torch.Tensor, hidden_TH: torch.Tensor, weight_CH: torch.Tensor, bias_C: torch.Tensor | None
) -> None:
    """``out = hidden @ weight.T + bias``, the bias added before the one rounding (out may be float32: none at all)."""
    if bias_C is None:
        product_(out_TC, hidden_TH, weight_CH.t())
    elif hidden_TH.dtype in _LOW_PRECISION and (hidden_TH.device.type == "cpu" or out_TC.dtype != hidden_TH.dtype):
        out_TC.copy_(bias_C.expand_as(out_TC))
        product_(out_TC, hidden_TH, weight_CH.t(), accumulate=True)
    else:
        torch.addmm(bias_C, hidden_TH, weight_CH.t(), out=out_TC)


def column_sums_(out_C: torch.Tensor, a_TC: torch.Tensor) -> torch.Tensor:
    """``out = a.sum(0)`` in out's dtype.

    ``torch.sum`` allocates many partial sums for each column on a GPU, and a wider copy of ``a`` on a CPU; a product
    with ones does not.
    """
    has_product = a_TC.device.type == "cpu" or has_float32_output(a_TC.device)
    if a_TC.dtype in _LOW_PRECISION and out_C.dtype == torch.float32 and has_product:
        product_(out_C[None], a_TC.new_ones(1, a_TC.shape[0]), a_TC)
        return out_C
    return torch.sum(a_TC, 0, dtype=out_C.dtype, out=out_C)


def multiplied(a: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``a * factor``, rounded once to ``dtype``: in pieces on a CPU, where torch makes a wider copy of the result."""
    result = torch.empty_like(a, dtype=dtype)
    if a.device.type != "cpu" or dtype == a.dtype:
        return torch.mul(a, factor, out=result)
    num_rows = max(1, PIECE_ELEMENTS // max(1, a[:1].numel()))
    for piece, rounded in zip(a.split(num_rows), result.split(num_rows), strict=True):
        torch.mul(piece, factor, out=rounded)
    return result


def _product_in_pieces(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, accumulate: bool) -> torch.Tensor:
    num_rows, depth = a.shape
    step_k = max(1, PIECE_ELEMENTS // max(1, b.shape[1]))
    step_m = max(1, PIECE_ELEMENTS // max(1, min(depth, step_k), b.shape[1]))
    accumulator = torch.promote_types(out.dtype, torch.float32)
    for m in range(0, num_rows, step_m):
        rows = out[m : m + step_m]
        direct = rows.dtype == accumulator
        total = rows if direct else rows.to(accumulator)
        if not accumulate:
            total.zero_()
        for k in range(0, depth, step_k):
            total.addmm_(a[m : m + step_m, k : k + step_k].to(accumulator), b[k : k + step_k].to(accumulator))
        if not direct:
            rows.copy_(total)
    return out


@cache
def has_float32_output(device: torch.device) -> bool:
    """Whether ``torch.mm`` takes ``out_dtype=torch.float32`` for bf16 operands there: asked once, by trying."""
    if device.type != "cuda":
        return False
    operand = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    out = torch.zeros(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(out, operand, operand, out_dtype=torch.float32, out=out)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return True
