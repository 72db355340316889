"""What ``torch.compile`` sees of a computation per token: an operator of ``torch.library`` and one for its gradients.

Dynamo traces :func:`loongforge.linear_cross_entropy` as far as :func:`losses` (and the outputs as far as
:func:`loongforge.outputs.common.per_token`) and puts one operator into its graph, the backward of which is a second
one.  Inside they are the eager code.  Three things differ from it: kept logits are an output, so their number is fixed
when the graph is made (the budget is each call's own, not the process's); backward overwrites a copy of them, for a
backward that runs twice (inductor makes it in their own place, since nobody reads them again), which lives until it
has run, beside the chunks that it recomputes; gradients are not computed in forward.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch

from loongforge import env, per_token
from loongforge.agreement import ranks_agree
from loongforge.budget import KeptLogits, rows_kept_by
from loongforge.call import Call, Labels, prepare_call
from loongforge.checks import check_is_here, compute_dtype, refuse_batched_gradients
from loongforge.options import OPTION_NAMES, LossOptions
from loongforge.parallel import VocabParallel


class Computed(NamedTuple):
    """Results per token, what backward needs beside the operands, and kept logits."""

    values: Sequence[torch.Tensor | None]
    saved: Sequence[torch.Tensor | None]
    kept: torch.Tensor | None = None


class Computation:
    """The eager code of some values per token; an instance holds plain settings.

    ``operands`` are hidden, weight, bias, one tensor [T] of the gathered tokens, and whatever :attr:`OPERANDS` adds.
    """

    OPERANDS: ClassVar[str]
    """Their names and types, as a schema of ``torch.library`` has them."""
    VALUES: ClassVar[Sequence[str]]
    SAVED: ClassVar[Sequence[str]]
    """Without any there is no backward, and :meth:`gradients` is not asked."""

    @classmethod
    def names(cls) -> list[str]:
        """Of the operands, as a caller knows them."""
        return [_of_the_caller(operand.split()[-1]) for operand in cls.OPERANDS.split(", ")]

    def call(
        self, operands: Sequence[Any], options: LossOptions, parallel: VocabParallel, dtype: torch.dtype | None = None
    ) -> Call:
        """Kernels and plan."""
        raise NotImplementedError

    def forward(self, operands: Sequence[Any], call: Call, keep: bool) -> Computed:
        """None in the places of values and saved tensors that the settings do without."""
        raise NotImplementedError

    def gradients(
        self,
        grads: Sequence[torch.Tensor | None],
        operands: Sequence[Any],
        saved: Sequence[Any],
        kept: KeptLogits | None,
        needs: Sequence[bool],
        call: Call,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Of hidden, weight and bias, for upstream gradients of the values, one at least; ``kept`` is taken."""
        raise NotImplementedError

    def like(self, operands: Sequence[Any], wide: torch.dtype) -> Computed:
        """Tensors such as :meth:`forward` gives, without contents; ``wide`` is the dtype of statistics."""
        raise NotImplementedError


def _of_the_caller(name: str) -> str:
    return name.replace("teacher_", "teacher.")


def constants(options: dict[str, Any]) -> dict[str, Any]:
    """Numbers that Dynamo made variables of, since they differed between calls, as constants that it guards."""
    if not torch.compiler.is_compiling():
        return options
    return {name: _constant(value) for name, value in options.items()}


def _constant(value: Any) -> Any:
    if isinstance(value, float):
        return float(_decimal(value.hex()))
    return operator.index(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _evaluated_in_the_trace(function: Callable) -> Callable:
    """``torch.compiler.assume_constant_result``, which would import the compiler for everyone."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_evaluated_in_the_trace
def _decimal(text: str) -> str:
    """Dynamo of torch 2.8 knows no ``float.fromhex``, and would make a variable of a float that this returned."""
    return repr(float.fromhex(text))


class Operators:
    """``loongforge::NAME`` and ``loongforge::NAME_gradients`` of a computation; a call puts the first in a graph."""

    def __init__(self, name: str, computation: type[Computation]) -> None:
        operands, self.computation = computation.OPERANDS, computation
        self._names = computation.names()
        self._num_operands, self._num_values = len(self._names), len(computation.VALUES)
        results = ["Tensor"] * (self._num_values + len(computation.SAVED) + 1)
        schema = f"({operands}, str settings, ScalarType dtype, SymInt kept_rows) -> ({', '.join(results)})"
        self.forward = torch.library.custom_op(f"loongforge::{name}", self._forward, mutates_args=(), schema=schema)
        self.forward.register_fake(self._forward_fake)
        if computation.SAVED:
            grads = [f"Tensor? grad_{value}" for value in computation.VALUES]
            saved = [*(f"Tensor {value}" for value in computation.SAVED), "Tensor(a!) kept"]
            schema = f"({operands}, {', '.join([*grads, *saved])}, str settings, ScalarType dtype, bool[] needs)"
            self.gradients = torch.library.custom_op(
                f"loongforge::{name}_gradients",
                self._gradients,
                mutates_args=("kept",),
                schema=schema + " -> (Tensor, Tensor, Tensor)",
            )
            self.gradients.register_fake(self._gradients_fake)
            self.forward.register_autograd(self._backward, setup_context=self._setup_context)

    def __call__(
        self, settings: dict[str, Any], operands: Sequence[Any], options: LossOptions, sequence_parallel: bool
    ) -> tuple[torch.Tensor, ...]:
        """The values, an empty tensor for each that the settings (constants of the graph) do without."""
        hidden, weight, bias, any_T = operands[:4]
        needs_grad = torch.is_grad_enabled() and (
            hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        )
        dtype = compute_dtype(hidden)
        num_kept = _kept_rows(options, _constant(weight.shape[0]), dtype, any_T.shape[0]) if needs_grad else 0
        # Plain values: Dynamo would hand a dataclass that was made in the trace over without its fields.
        values = {name: getattr(options, name) for name in OPTION_NAMES} | {"sequence_parallel": sequence_parallel}
        text = encoded(tuple(settings), tuple(settings.values()), tuple(values), tuple(values.values()))
        return self.forward(*operands, text, dtype, num_kept)[: self._num_values]

    def _named(self, operands: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self._names, operands, strict=True))

    def _prepared(self, operands, text: str, dtype: torch.dtype, kept_rows: int) -> tuple[Computation, Call]:
        settings, options = _decoded(text)
        for name, tensor in self._named(operands).items():
            if tensor is not None:
                check_is_here(name, tensor)
        computation = self.computation(**settings)
        with torch.no_grad():  # so that nothing is reserved
            parallel = VocabParallel.from_group(options.tp_group, options.sequence_parallel)
            call = computation.call(operands, options, parallel, dtype)
        return computation, replace(call, plan=replace(call.plan, kept_rows=kept_rows))

    def _forward(self, *inputs):
        *operands, text, dtype, kept_rows = inputs
        hidden, _, _, any_T = operands[:4]
        settings, options = _decoded(text)
        parallel = VocabParallel.from_group(options.tp_group, options.sequence_parallel)
        given = self._named(operands) | {_of_the_caller(name): value for name, value in settings.items()}
        with ranks_agree(parallel, options, given | {"target": any_T}):
            computation, call = self._prepared(operands, text, dtype, kept_rows)
        with torch.autocast(hidden.device.type, enabled=False):
            values, saved, kept = computation.forward(operands, call, keep=True)
        if kept is None:
            kept = hidden.new_empty((any_T.shape[0], 0), dtype=call.logits_dtype)
        return tuple(_or_empty((*values, *saved, kept), hidden))

    def _forward_fake(self, *inputs):
        *operands, text, dtype, kept_rows = inputs
        hidden, _, _, any_T = operands[:4]
        settings, options = _decoded(text)
        like = self.computation(**settings).like(operands, torch.promote_types(dtype, torch.float32))
        kept = hidden.new_empty((any_T.shape[0], kept_rows), dtype=_logits_dtype(options, dtype))
        return tuple(_or_empty((*like.values, *like.saved, kept), hidden))

    def _split(self, inputs) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Operands, gradients and saved tensors among the inputs of the second operator."""
        grads, saved = self._num_operands, self._num_operands + self._num_values
        return inputs[:grads], inputs[grads:saved], inputs[saved:]

    def _gradients(self, *inputs):
        *tensors, kept, text, dtype, needs = inputs
        operands, grads, saved = self._split(tensors)
        computation, call = self._prepared(operands, text, dtype, kept.shape[1])
        kept_logits = KeptLogits(kept) if kept.shape[1] else None
        with torch.autocast(kept.device.type, enabled=False):
            found = computation.gradients(grads, operands, saved, kept_logits, needs, call)
        return tuple(_or_empty(found, kept))

    def _gradients_fake(self, *inputs):
        *tensors, kept, _, _, needs = inputs
        like = (
            torch.empty_like(tensor, memory_format=torch.contiguous_format) if needed else None
            for tensor, needed in zip(tensors[:3], needs, strict=True)
        )
        return tuple(_or_empty(like, tensors[0]))

    def _setup_context(self, ctx, inputs, output) -> None:
        *operands, ctx.text, ctx.dtype, _ = inputs
        values, saved = output[: self._num_values], output[self._num_values :]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *saved)
        ctx.mark_non_differentiable(*saved, *(value for value in values if not value.is_floating_point()))

    def _backward(self, ctx, *grads):
        grads = grads[: self._num_values]
        refuse_batched_gradients(grads)
        tensors = ctx.saved_tensors
        operands, (*saved, kept) = tensors[: self._num_operands], tensors[self._num_operands :]
        needs = list(ctx.needs_input_grad[:3])
        found = [None] * 3
        if any(grad is not None for grad in grads):
            found = self.gradients(*operands, *grads, *saved, kept.clone(), ctx.text, ctx.dtype, needs)
        found = [grad if needed else None for grad, needed in zip(found, needs, strict=True)]
        return *found, *[None] * self._num_operands  # three operands, and three settings in place of them


def _or_empty(tensors, like: torch.Tensor):
    """An operator has as many results as its schema says."""
    return (like.new_empty(0) if tensor is None else tensor for tensor in tensors)


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
def encoded(settings: tuple[str, ...], chosen: tuple[Any, ...], names: tuple[str, ...], values: tuple[Any, ...]) -> str:
    """Text that names a computation's settings and the options in a graph; the process group by its name here."""
    options = dict(zip(names, values, strict=True))
    if options["tp_group"] is not None:
        options["tp_group"] = options["tp_group"].group_name
    return json.dumps([dict(zip(settings, chosen, strict=True)), options])


def _decoded(text: str) -> tuple[dict[str, Any], LossOptions]:
    settings, values, group = _parsed(text)
    if group is not None:  # looked up anew: a world that is made again gives its groups the same names
        group = torch.distributed.distributed_c10d._resolve_process_group(group)
    return settings, LossOptions(tp_group=group, **values)


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
    settings, values = json.loads(text)
    return settings, values, values.pop("tp_group")


class Loss(Computation):
    """(hidden, weight, bias, target [T], class_weight, base_weight) -> loss [T]: :mod:`loongforge.per_token`."""

    OPERANDS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, Tensor? base_weight"
    VALUES, SAVED = ("loss",), ("max", "sum_exp")

    def call(self, operands, options, parallel, dtype=None) -> Call:
        hidden, weight, bias, target_T, class_weight, base_weight = operands
        return prepare_call(
            hidden, weight, bias, class_weight is not None, target_T.shape[0], options, parallel, None, None,
            has_adapter=base_weight is not None, dtype=dtype,
        )  # fmt: skip

    def forward(self, operands, call, keep) -> Computed:
        hidden, weight, bias, target_T, class_weight, base_weight = operands
        result = per_token.losses(hidden, weight, bias, target_T, class_weight, base_weight, call, keep)
        return Computed([result.loss_T], [result.max_T, result.sum_exp_T], result.kept)

    def gradients(self, grads, operands, saved, kept, needs, call):
        labels = Labels.of(operands[3], call)
        return per_token.gradients(*grads, operands, *saved, labels, kept, needs, call)

    def like(self, operands, wide) -> Computed:
        loss, *saved = (torch.empty_like(operands[3], dtype=wide) for _ in range(3))
        return Computed([loss], saved)


_LOSSES = Operators("loss", Loss)


def losses(
    hidden, weight, bias, target_T, class_weight, base_weight, options: LossOptions, sequence_parallel: bool
) -> torch.Tensor:
    """[T] like :class:`loongforge.per_token.LossPerToken`, by operators."""
    return _LOSSES({}, (hidden, weight, bias, target_T, class_weight, base_weight), options, sequence_parallel)[0]
