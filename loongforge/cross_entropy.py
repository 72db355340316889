"""``cross_entropy(logits, target)`` for logits that already exist, on the same row kernels as the fused operation.

Forward reads the logits once; backward reads them once and writes their gradient once, over the logits themselves when
``inplace_backward`` says so.  The algebra of the options, the labels and the reductions are those of
:mod:`loongforge.loss`.
"""

from __future__ import annotations

from typing import Any

import torch

from loongforge import checks, env
from loongforge.agreement import ranks_agree, refusals_travel
from loongforge.call import Call, Labels, StatisticsExchange, formula_of, losses_of, refusing_second_derivatives
from loongforge.dispatch import row_kernels
from loongforge.kernels.interface import Chunk, RowStats
from loongforge.loss import build_options, denominator_of, reduce_loss, with_options_spelled_out
from loongforge.options import LossOptions
from loongforge.parallel import VocabParallel
from loongforge.plan import plan_chunks


class _LossPerToken(torch.autograd.Function):
    """(logits [T, V], target [T], class_weight) -> loss [T]."""

    @staticmethod
    def forward(ctx, logits, target_T, class_weight, call: Call, inplace: bool):  # noqa: D102
        formula = formula_of(target_T, class_weight, call)
        stats = _empty_stats(logits, call)
        if logits.shape[0]:
            chunk = _chunk(target_T, class_weight, call)
            call.kernels.accumulate(logits[:, : call.plan.vocab_rows], chunk, stats)
        stats = StatisticsExchange(stats, call.parallel).wait()
        ctx.save_for_backward(logits, target_T, class_weight, stats.max_T, stats.sum_exp_T)
        ctx.call, ctx.inplace = call, inplace
        return losses_of(stats, formula, target_T, call)[0]

    @staticmethod
    @refusing_second_derivatives
    def backward(ctx, grad_loss_T):  # noqa: D102
        call: Call = ctx.call
        logits, target_T, class_weight, max_T, sum_exp_T = ctx.saved_tensors
        grad_loss_T = Labels.of(target_T, call).mark_(grad_loss_T.to(max_T.dtype, copy=True))
        coefficients = formula_of(target_T, class_weight, call).coefficients(grad_loss_T, max_T, sum_exp_T)
        rows = call.plan.vocab_rows
        grad = logits.detach() if ctx.inplace else logits.detach().clone(memory_format=torch.contiguous_format)
        if ctx.inplace:  # whoever else saved these logits gets torch's error about modified tensors
            torch.autograd.graph.increment_version(logits)
        grad[:, rows:] = 0  # padded rows take no part in the softmax
        if logits.shape[0]:
            call.kernels.gradient_(grad[:, :rows], _chunk(target_T, class_weight, call), coefficients)
        return grad, None, None, None, None


def _chunk(target_T: torch.Tensor, class_weight: torch.Tensor | None, call: Call) -> Chunk:
    """All classes of this rank, padded columns left out."""
    first_class = call.parallel.rank * call.rows_per_rank
    weight = None if class_weight is None else class_weight[first_class : first_class + call.plan.vocab_rows]
    return Chunk((target_T - first_class).contiguous(), 0, call.options.transform, weight)


def _empty_stats(logits: torch.Tensor, call: Call) -> RowStats:
    zeros_T = logits.new_zeros(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))
    weighted_sum_T = zeros_T.clone() if call.options.label_smoothing else None
    return RowStats(torch.full_like(zeros_T, -torch.inf), zeros_T, zeros_T.clone(), weighted_sum_T)


@refusals_travel
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    normalizer: torch.Tensor | float | None = None,
    class_weight: torch.Tensor | None = None,
    inplace_backward: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Cross-entropy of existing logits, without an fp32 copy of them or a tensor of probabilities.

    Args:
        logits: [..., V]; bf16, fp16, fp32 or fp64.  Under ``tp_group`` this rank's columns.
        target: [...] integer *global* class indices; the leading shape of logits.
        normalizer: as in :func:`loongforge.linear_cross_entropy`.
        class_weight: likewise, of the whole vocabulary.
        inplace_backward: backward writes the gradient over ``logits``, which must not be used afterwards.
        **options: fields of :class:`loongforge.LossOptions`; ``sequence_parallel``, ``logits_budget_mb``,
            ``compact_tokens``, ``fp32_logits`` and ``fp32_grad_hidden`` have no meaning here and are refused.

    Returns:
        The loss in fp32 (fp64 for fp64 logits): a scalar, or target's shape for ``reduction="none"``.

    Raises:
        TypeError, ValueError: inputs that do not fit together, unknown options.
        RuntimeError: ``impl`` cannot run on this device.  NotImplementedError: it lacks an option.
    """
    built = build_options(options)
    checks.refuse_function_transforms()
    parallel = VocabParallel.from_group(built.tp_group, False)
    given = {"logits": logits, "target": target, "class_weight": class_weight, "normalizer": normalizer}
    with ranks_agree(parallel, built, given):  # all that a single rank may refuse: the others wait for it after this
        _check(logits, target, built, parallel, inplace_backward)
        logits_TV = logits.reshape(-1, logits.shape[-1])
        if logits_TV.shape[1] > 1 and logits_TV.stride(1) != 1:
            logits_TV = logits_TV.contiguous()
        overlapping = logits_TV.shape[0] > 1 and logits_TV.stride(0) < logits_TV.shape[1]
        if inplace_backward and (overlapping or logits_TV.data_ptr() != logits.data_ptr()):
            raise ValueError(
                "inplace_backward needs logits that flatten to [T, V] without a copy and whose rows share no memory, "
                f"got {_layout(logits)}"
            )
        call = _prepare_call(logits_TV, class_weight is not None, built, parallel)
        checks.check_reduction(logits, class_weight, normalizer, built, call.num_classes)
    target_T = target.reshape(-1).long()
    if env.check_labels():
        out_of_range = Labels.of(target_T, call).out_of_range_T.view(target.shape)
        checks.check_labels_in_range(target, out_of_range, call.num_classes)
    if class_weight is not None:
        class_weight = class_weight.detach().to(torch.promote_types(call.dtype, torch.float32)).contiguous()
    loss_T = _LossPerToken.apply(logits_TV, target_T, class_weight, call, inplace_backward)
    denominator = denominator_of(target_T, class_weight, normalizer, built, call.num_classes, loss_T.dtype)
    return reduce_loss(loss_T, target, denominator, built)


def _prepare_call(
    logits_TV: torch.Tensor, has_class_weight: bool, options: LossOptions, parallel: VocabParallel
) -> Call:
    num_tokens, columns = logits_TV.shape
    num_classes = options.vocab_size or columns * parallel.size
    rows = min(max(num_classes - parallel.rank * columns, 0), columns)
    kernels = row_kernels(logits_TV.device, options, logits_TV.dtype, has_class_weight)
    return Call(
        options=options,
        parallel=parallel,
        kernels=kernels,
        tiles=None,
        plan=plan_chunks(kernels.name, num_tokens, 1, rows, logits_TV.element_size()),
        dtype=logits_TV.dtype,
        logits_dtype=logits_TV.dtype,
        num_classes=num_classes,
        rows_per_rank=columns,
        needs_grad=logits_TV.requires_grad,
        reservation=None,
        weight_grad_sink=None,
    )


def _check(
    logits: torch.Tensor, target: torch.Tensor, options: LossOptions, parallel: VocabParallel, inplace_backward: bool
) -> None:
    checks.check_logits(logits, target)
    checks.check_vocabulary("logits have", "columns", logits.shape[-1], options, parallel)
    for name in ("sequence_parallel", "logits_budget_mb", "compact_tokens", "fp32_logits", "fp32_grad_hidden"):
        if getattr(options, name) not in (False, None):
            raise ValueError(f"{name} has no meaning for logits that exist: use loongforge.linear_cross_entropy")
    if inplace_backward and logits.is_leaf and logits.requires_grad:
        raise ValueError("inplace_backward would make a leaf's own data its gradient: leave it False for leaf logits")


def _layout(tensor: torch.Tensor) -> str:
    return f"shape {list(tensor.shape)} with strides {list(tensor.stride())}"


with_options_spelled_out(cross_entropy)
