"""The losses of all tokens from their statistics, in one launch of Triton instead of eight of torch."""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from loongforge.kernels.interface import RowStats

_BLOCK = 256


@triton.jit(do_not_specialize=["num_tokens", "num_classes", "ignore_index"])
def token_losses_kernel(
    target_ptr,
    max_ptr,
    sum_exp_ptr,
    label_logit_ptr,
    loss_ptr,
    ignored_ptr,
    no_class_ptr,
    num_tokens: tl.int64,
    num_classes: tl.int64,
    ignore_index: tl.int64,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = token < num_tokens
    target = tl.load(target_ptr + token, mask=exists, other=0)
    ignored = target == ignore_index
    no_class = (target < 0) | (target >= num_classes)
    log_sum = tl.log(tl.load(sum_exp_ptr + token, mask=exists, other=1.0))
    label_logit = tl.load(label_logit_ptr + token, mask=exists, other=0.0)
    loss = log_sum - (label_logit - tl.load(max_ptr + token, mask=exists, other=0.0))
    tl.store(loss_ptr + token, tl.where(ignored, 0.0, tl.where(no_class, float("nan"), loss)), mask=exists)
    tl.store(ignored_ptr + token, ignored, mask=exists)
    tl.store(no_class_ptr + token, no_class, mask=exists)


def token_losses(
    target_T: torch.Tensor, stats: RowStats, num_classes: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:meth:`loongforge.kernels.interface.TokenLossKernels.token_losses`."""
    num_tokens = len(target_T)
    target_T = target_T.contiguous()
    rows = [value_T.contiguous() for value_T in (stats.max_T, stats.sum_exp_T, stats.label_logit_T)]
    loss_T = torch.empty_like(rows[0])
    ignored_T, no_class_T = (torch.empty_like(target_T, dtype=torch.bool) for _ in range(2))
    if num_tokens:
        with torch.cuda.device(target_T.device) if target_T.is_cuda else nullcontext():
            token_losses_kernel[(triton.cdiv(num_tokens, _BLOCK),)](
                target_T, *rows, loss_T, ignored_T, no_class_T, num_tokens, num_classes, ignore_index,
                BLOCK=_BLOCK, enable_fp_fusion=True,
            )  # fmt: skip
    return loss_T, ignored_T, no_class_T
