"""``cross_entropy(hidden @ weight.T, target)`` as one autograd operation that never holds the logits.

Read from the bottom: :func:`linear_cross_entropy` checks, weighs and reduces, :mod:`loongforge.per_token` has the
autograd Function over the chunk loop of :mod:`loongforge.chunks`; :mod:`loongforge.formula` holds the algebra of the
options, :mod:`loongforge.compact` leaves tokens out.
T tokens, H hidden, V vocabulary rows of this rank.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from loongforge import checks, env, operators, sharded
from loongforge.agreement import ranks_agree, refusals_travel
from loongforge.call import Labels, WeightGradSink, prepare_call
from loongforge.compact import CarriedTokens
from loongforge.dispatch import row_kernels
from loongforge.gradients_in_forward import LossSum, gradient_bytes
from loongforge.options import OPTION_NAMES, LossOptions
from loongforge.parallel import VocabParallel
from loongforge.per_token import LossPerToken


@refusals_travel
def fused_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    options: LossOptions,
    *,
    bias: torch.Tensor | None = None,
    normalizer: torch.Tensor | float | None = None,
    class_weight: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    adapter: tuple[torch.Tensor, torch.Tensor] | None = None,
    weight_grad_sink: WeightGradSink | None = None,
) -> torch.Tensor:
    """:func:`linear_cross_entropy` with its options already built, and a place for the weight gradient to go."""
    compiling = torch.compiler.is_compiling()
    if compiling:
        options = build_options({name: getattr(options, name) for name in OPTION_NAMES})
    else:
        checks.refuse_function_transforms()
        hidden, weight, target, bias, options = sharded.local_parts(hidden, weight, target, bias, options)
    parallel = VocabParallel.from_group(options.tp_group, options.sequence_parallel)
    given: dict[str, Any] = {"hidden": hidden, "weight": weight, "target": target, "bias": bias}
    given.update(class_weight=class_weight, token_weight=token_weight, adapter=adapter, normalizer=normalizer)
    with ranks_agree(parallel, options, given):
        checks.check_inputs(hidden, weight, target, bias, class_weight, normalizer, options, parallel)
        checks.check_token_weight(token_weight, target)
        checks.check_adapter(adapter, hidden, weight)
        if parallel.size > 1 and not compiling:  # what only this rank's device or environment refuses
            kernels = row_kernels(hidden.device, options, checks.compute_dtype(hidden), class_weight is not None)
            env.logits_budget_mb(), env.vocab_split_size(kernels.name, "FWD"), env.vocab_split_size(kernels.name, "BWD")
    num_classes = options.vocab_size or weight.shape[0] * parallel.size
    wide = torch.promote_types(checks.compute_dtype(hidden), torch.float32)
    if class_weight is not None:
        class_weight = class_weight.detach().to(wide).contiguous()
    target_T, token_weight_T = _weighted_tokens(target, token_weight, options, wide)
    if not compiling and env.check_labels():
        out_of_range_T = Labels.among(target_T, num_classes, options.ignore_index).out_of_range_T
        checks.check_labels_in_range(target, out_of_range_T.view(target.shape), num_classes)
    base_weight = None
    if adapter is not None:
        base_weight, weight = weight, adapter[1]
        hidden = torch.cat([hidden, adapter[0]], -1)

    carried, label_T, label_weight_T = None, target_T, token_weight_T
    if options.compact_tokens is not False:
        carried = CarriedTokens.of(target_T != options.ignore_index, options.compact_tokens)
        hidden, parallel = carried.hidden(hidden, parallel), VocabParallel.from_group(options.tp_group)
        label_T = carried.values(target_T, options.ignore_index)
        label_weight_T = None if token_weight_T is None else carried.values(token_weight_T, 0.0)
    denominator = denominator_of(target_T, class_weight, normalizer, options, num_classes, wide, token_weight_T)
    loss = _losses(
        hidden, weight, bias, label_T, class_weight, base_weight, label_weight_T, denominator,
        options, parallel, weight_grad_sink,
    )  # fmt: skip
    if carried is not None:
        loss = carried.marked(loss if options.reduction != "none" else carried.losses(loss))
    return reduce_loss(loss, target, denominator, options)


def _weighted_tokens(
    target: torch.Tensor, token_weight: torch.Tensor | None, options: LossOptions, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Labels [T], ignored where the weight is 0, and weights [T], 0 where the label is ignored."""
    target_T = target.reshape(-1).long()
    if token_weight is None:
        return target_T, None
    token_weight_T = token_weight.reshape(-1).to(dtype)
    target_T = target_T.masked_fill(token_weight_T == 0, options.ignore_index)
    return target_T, token_weight_T.masked_fill(target_T == options.ignore_index, 0.0)


def _losses(
    hidden, weight, bias, target_T, class_weight, base_weight, token_weight_T, denominator: torch.Tensor | None,
    options: LossOptions, parallel: VocabParallel, weight_grad_sink: WeightGradSink | None,
) -> torch.Tensor:  # fmt: skip
    """Weighted losses [T], or their sum where gradients are computed in forward."""
    if torch.compiler.is_compiling():
        if weight_grad_sink is not None:
            raise NotImplementedError("a sink for the weight gradient (Megatron's main_grad) does not exist in a graph")
        operands = (hidden, weight, bias, target_T, class_weight, base_weight)
        loss_T = operators.losses(*operands, options, parallel.sequence_parallel)
        return loss_T if token_weight_T is None else loss_T * token_weight_T
    # A sum has one upstream gradient for all tokens; over ranks its statistics would have to travel chunk by chunk.
    may_run_in_forward = options.reduction != "none" and parallel.size == 1 and weight_grad_sink is None
    if token_weight_T is not None and token_weight_T.requires_grad:
        may_run_in_forward = False
    saved = gradient_bytes(hidden, weight, bias) if may_run_in_forward else None
    call = prepare_call(
        hidden, weight, bias, class_weight is not None, target_T.shape[0], options, parallel, weight_grad_sink, saved,
        has_adapter=base_weight is not None,
    )  # fmt: skip
    operands = (hidden, weight, bias, target_T, class_weight, base_weight)
    if call.plan.tokens_per_chunk:
        return LossSum.apply(*operands, token_weight_T, _expected_gradient(denominator), call)[0]
    loss_T = LossPerToken.apply(*operands, call)
    return loss_T if token_weight_T is None else loss_T * token_weight_T


def _expected_gradient(denominator: torch.Tensor | None) -> torch.Tensor | None:
    """Of a sum that is divided by this and differentiated, as training does; 1 where it would be no number."""
    if denominator is None:
        return None
    gradient = denominator.detach().reciprocal()
    return torch.where(gradient.isfinite() & (gradient != 0), gradient, 1.0)


def reduce_loss(
    loss: torch.Tensor, target: torch.Tensor, denominator: torch.Tensor | None, options: LossOptions
) -> torch.Tensor:
    """``options.reduction`` of the losses of single tokens (or of what already is their sum)."""
    if options.reduction == "none":
        return loss.view(target.shape)
    loss = loss.sum()
    return loss if denominator is None else loss / denominator


def denominator_of(
    target_T, class_weight, normalizer, options: LossOptions, num_classes: int, dtype: torch.dtype, token_weight_T=None
) -> torch.Tensor | None:
    """What ``mean`` divides by, a scalar of ``dtype``; None for other reductions.

    Valid tokens (their weights, as in torch) or the caller's number; 1 where no token is valid.
    """
    if options.reduction != "mean":
        return None
    valid_T = target_T != options.ignore_index
    # A sum and not any(), for which inductor's code on a GPU gives int8: Triton warns of such a condition.
    num_valid = valid_T.sum()
    if isinstance(normalizer, torch.Tensor):
        count = normalizer.reshape(())
    elif normalizer is not None:
        count = torch.full((), normalizer, dtype=dtype, device=target_T.device)
    elif class_weight is not None or token_weight_T is not None:
        weight_T = 1.0 if class_weight is None else class_weight[target_T.clamp(0, num_classes - 1)]
        weight_T = weight_T if token_weight_T is None else weight_T * token_weight_T
        count = torch.where(valid_T, weight_T, 0.0).sum()
    else:
        return num_valid.clamp_min(1).to(dtype)
    return torch.where((num_valid != 0) | (count != 0), count, 1).to(dtype)


@refusals_travel
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    normalizer: torch.Tensor | float | None = None,
    class_weight: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    adapter: tuple[torch.Tensor, torch.Tensor] | None = None,
    **options: Any,
) -> torch.Tensor:
    """Cross-entropy of ``hidden @ weight.T + bias`` without ever holding the logits.

    Args:
        hidden: [..., H]; bf16, fp16, fp32 or fp64.  Under ``sequence_parallel`` this rank's slice along dim 0.
        weight: [V, H], this rank's rows of the output layer; hidden's dtype, or any under autocast.
        target: [...] integer *global* class indices; hidden's leading shape, gathered under ``sequence_parallel``.
        bias: [V], added to the logits.
        normalizer: what ``reduction="mean"`` divides by instead of this rank's valid tokens: a number or a scalar
            tensor on the device (the global count under data parallelism, ``num_items_in_batch``).
        class_weight: [V_global] float, weight of each class as in ``torch.nn.functional.cross_entropy``; no gradient.
        token_weight: target's shape, bool or a number: each token's loss is multiplied by it, and ``mean`` divides by
            the sum of the weights of the valid tokens (times their class weights).  Where it is 0 the token is ignored.
        adapter: ``(low_rank [..., R], up [V, R])`` adds ``low_rank @ up.T`` to the logits, for LoRA
            ``(scale * hidden @ A.T, B)``; weight must not require a gradient, and none of its size is computed.
        **options: fields of :class:`loongforge.LossOptions`.

    Returns:
        The loss in fp32 (fp64 for fp64 inputs): a scalar, or target's shape for ``reduction="none"``.  Without a
        valid token ``mean`` is 0 with zero gradients attached.  A label outside ``[0, V_global)`` that is not
        ``ignore_index`` makes its loss, its row of grad_hidden and this rank's grad_weight NaN
        (``LCE_CHECK_LABELS=1`` raises IndexError instead).

    Raises:
        TypeError, ValueError: inputs that do not fit together, unknown options.
        RuntimeError: ``impl`` cannot run on this device.  NotImplementedError: it lacks an option.
    """
    return fused_loss(
        hidden, weight, target, build_options(options),
        bias=bias, normalizer=normalizer, class_weight=class_weight, token_weight=token_weight, adapter=adapter,
    )  # fmt: skip


class LinearCrossEntropy(nn.Module):
    """:func:`linear_cross_entropy` as a module that holds the options (and ``class_weight`` as a buffer)."""

    def __init__(self, *, class_weight: torch.Tensor | None = None, **options: Any) -> None:
        super().__init__()
        self.options = build_options(options)
        self.class_weight: torch.Tensor | None
        self.register_buffer("class_weight", class_weight)

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        token_weight: torch.Tensor | None = None,
        adapter: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """See :func:`linear_cross_entropy`."""
        return fused_loss(
            hidden, weight, target, self.options,
            bias=bias, normalizer=normalizer, class_weight=self.class_weight, token_weight=token_weight,
            adapter=adapter,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """The options that differ from their defaults."""
        defaults = LossOptions()
        named = ((name, getattr(self.options, name)) for name in OPTION_NAMES)
        return ", ".join(f"{name}={value!r}" for name, value in named if value != getattr(defaults, name))


def build_options(options: dict[str, Any]) -> LossOptions:
    options = operators.constants(options)
    for name in options:
        if name not in OPTION_NAMES:
            close = difflib.get_close_matches(name, OPTION_NAMES, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise TypeError(f"unknown option {name!r}: {hint}options are {', '.join(OPTION_NAMES)}")
    return LossOptions(**options)


def with_options_spelled_out(function: Any, names: Sequence[str] = OPTION_NAMES) -> None:
    """Show fields of LossOptions in ``help()`` and editors without writing the list a second time."""
    signature = inspect.signature(function)
    explicit = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    fields = [p for p in inspect.signature(LossOptions).parameters.values() if p.name in names]
    function.__signature__ = signature.replace(parameters=[*explicit, *fields])


with_options_spelled_out(linear_cross_entropy)
with_options_spelled_out(LinearCrossEntropy.__init__)
