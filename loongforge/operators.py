"""The loss of every token as operators of ``torch.library``: what ``torch.compile`` sees of it.

Dynamo traces :func:`loongforge.linear_cross_entropy` as far as :func:`losses` and puts one operator into its graph, the
backward of which is a second one.  Inside they are the eager code.  Three things differ from it: kept logits are an
output, so their number is fixed when the graph is made (the budget is each call's own, not the process's); backward
leaves them as they are, for a backward that runs twice; gradients are not computed in forward.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from loongforge import env, per_token
from loongforge.call import Call, Labels, prepare_call
from loongforge.checks import compute_dtype
from loongforge.options import OPTION_NAMES, LossOptions
from loongforge.parallel import VocabParallel
from loongforge.plan import rows_kept_by

_OPERANDS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, Tensor? base_weight"
_SETTINGS = "str options, ScalarType dtype"
_LOSSES = f"({_OPERANDS}, {_SETTINGS}, SymInt kept_rows) -> (Tensor, Tensor, Tensor, Tensor)"
_GRADIENTS = (
    f"({_OPERANDS}, Tensor grad_loss, Tensor max, Tensor sum_exp, Tensor kept, {_SETTINGS}, bool[] needs)"
    " -> (Tensor, Tensor, Tensor)"
)


def constants(options: dict[str, Any]) -> dict[str, Any]:
    """Numbers that Dynamo made variables of, since they differed between calls, as constants that it guards."""
    return {name: _constant(value) for name, value in options.items()}


def _constant(value: Any) -> Any:
    if isinstance(value, float):
        return float.fromhex(value.hex())
    return operator.index(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _evaluated_in_the_trace(function: Callable) -> Callable:
    """``torch.compiler.assume_constant_result``, which would import the compiler for everyone."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def losses(
    hidden, weight, bias, target_T, class_weight, base_weight, options: LossOptions, sequence_parallel: bool
) -> torch.Tensor:
    """[T] like :class:`loongforge.per_token.LossPerToken`, by the operators of this module."""
    needs_grad = torch.is_grad_enabled() and (
        hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    dtype = compute_dtype(hidden)
    num_kept = _kept_rows(options, weight.shape[0], dtype, target_T.shape[0]) if needs_grad else 0
    # Plain values: Dynamo would hand a dataclass that was made in the trace over without its fields.
    values = {name: getattr(options, name) for name in OPTION_NAMES} | {"sequence_parallel": sequence_parallel}
    text = _encoded(tuple(values), tuple(values.values()))
    return _losses(hidden, weight, bias, target_T, class_weight, base_weight, text, dtype, num_kept)[0]


def _kept_rows(options: LossOptions, num_rows: int, dtype: torch.dtype, num_tokens: int) -> int:
    budget = _budget_mb(options.logits_budget_mb)
    vocab_rows = _vocab_rows(options.tp_group, options.vocab_size, num_rows)
    return rows_kept_by(budget, num_tokens, vocab_rows, _logits_dtype(options, dtype).itemsize) if budget else 0


def _logits_dtype(options: LossOptions, dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if options.fp32_logits else dtype


@_evaluated_in_the_trace
def _budget_mb(logits_budget_mb: int | str | None) -> int | str:
    return env.logits_budget_mb() if logits_budget_mb is None else logits_budget_mb


@_evaluated_in_the_trace
def _vocab_rows(tp_group: Any, vocab_size: int | None, num_rows: int) -> int:
    parallel = VocabParallel.from_group(tp_group)
    return min(max((vocab_size or num_rows * parallel.size) - parallel.rank * num_rows, 0), num_rows)


@_evaluated_in_the_trace
def _encoded(names: tuple[str, ...], values: tuple[Any, ...]) -> str:
    """Text that names the options in a graph; the process group by its name in this process."""
    options = dict(zip(names, values, strict=True))
    if options["tp_group"] is not None:
        options["tp_group"] = options["tp_group"].group_name
    return json.dumps(options)


@functools.lru_cache(maxsize=256)
def _decoded(text: str) -> LossOptions:
    values = json.loads(text)
    if values["tp_group"] is not None:
        values["tp_group"] = torch.distributed.distributed_c10d._resolve_process_group(values["tp_group"])
    return LossOptions(**values)


def _call_of(operands, options: LossOptions, dtype: torch.dtype, kept_rows: int) -> Call:
    hidden, weight, bias, target_T, class_weight, base_weight = operands
    with torch.no_grad():  # so that nothing is reserved
        call = prepare_call(
            hidden, weight, bias, class_weight is not None, target_T.shape[0], options,
            VocabParallel.from_group(options.tp_group, options.sequence_parallel), None, None,
            has_adapter=base_weight is not None, dtype=dtype,
        )  # fmt: skip
    return replace(call, plan=replace(call.plan, kept_rows=kept_rows))


@torch.library.custom_op("loongforge::losses", mutates_args=(), schema=_LOSSES)
def _losses(hidden, weight, bias, target, class_weight, base_weight, options, dtype, kept_rows):
    operands = (hidden, weight, bias, target, class_weight, base_weight)
    call = _call_of(operands, _decoded(options), dtype, kept_rows)
    result = per_token.losses(*operands, call, keep=True)
    kept = result.kept
    if kept is None:
        kept = hidden.new_empty((target.shape[0], 0), dtype=call.logits_dtype)
    return result.loss_T, result.max_T, result.sum_exp_T, kept


@_losses.register_fake
def _(hidden, weight, bias, target, class_weight, base_weight, options, dtype, kept_rows):
    per_token_T = [target.new_empty(target.shape, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(3)]
    logits_dtype = _logits_dtype(_decoded(options), dtype)
    return *per_token_T, hidden.new_empty((target.shape[0], kept_rows), dtype=logits_dtype)


@torch.library.custom_op("loongforge::loss_gradients", mutates_args=(), schema=_GRADIENTS)
def _gradients(
    hidden, weight, bias, target, class_weight, base_weight, grad_loss, max, sum_exp, kept, options, dtype, needs
):
    operands = (hidden, weight, bias, target, class_weight, base_weight)
    call = _call_of(operands, _decoded(options), dtype, kept.shape[1])
    kept_logits = kept if kept.shape[1] else None
    grads = per_token.gradients(
        grad_loss, operands, max, sum_exp, Labels.of(target, call), kept_logits, needs, call, overwrite_kept=False
    )
    return tuple(hidden.new_empty(0) if grad is None else grad for grad in grads)


@_gradients.register_fake
def _(hidden, weight, bias, target, class_weight, base_weight, grad_loss, max, sum_exp, kept, options, dtype, needs):
    tensors = zip((hidden, weight, bias), needs, strict=True)
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format) if needed else hidden.new_empty(0)
        for tensor, needed in tensors
    )


def _setup_context(ctx, inputs, output) -> None:
    *operands, ctx.options, ctx.dtype, _ = inputs
    _, max_T, sum_exp_T, kept = output
    ctx.save_for_backward(*operands, max_T, sum_exp_T, kept)
    ctx.mark_non_differentiable(max_T, sum_exp_T, kept)


def _backward(ctx, grad_loss, *_):
    *operands, max_T, sum_exp_T, kept = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    grads = _gradients(*operands, grad_loss, max_T, sum_exp_T, kept, ctx.options, ctx.dtype, needs)
    found = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return *found, *[None] * 6


_losses.register_autograd(_backward, setup_context=_setup_context)
