"""The most probable classes of every token, chunk by chunk: the k largest logits so far travel with the statistics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from loongforge import checks, chunks
from loongforge.agreement import ranks_agree, refusals_travel
from loongforge.call import Call, StatisticsExchange, head_of, prepare_call
from loongforge.kernels.generic import first_k
from loongforge.kernels.interface import NO_CLASS, Chunk, OutputKernels, RowStats
from loongforge.loss import with_options_spelled_out
from loongforge.operators import Computation, Computed, Operators, constants
from loongforge.options import LossOptions
from loongforge.outputs.common import HEAD_OPTIONS, PassedOn, output_options, per_token
from loongforge.parallel import VocabParallel

MAX_K = 128


class TopK(NamedTuple):
    """Results of :func:`linear_top_k`; no gradient flows through them."""

    logprobs: torch.Tensor
    """[..., k] log-probabilities in descending order."""
    ids: torch.Tensor
    """[..., k] int64 global class numbers; of equal logits the smaller comes first."""
    log_sum_exp: torch.Tensor
    """[...], of all logits, after scale, softcap and temperature."""


class _Largest(PassedOn):
    def __init__(self, kernels: OutputKernels, values_TK: torch.Tensor, classes_TK: torch.Tensor) -> None:
        super().__init__(kernels)
        self._values_TK, self._classes_TK = values_TK, classes_TK

    def accumulate(self, logits_TC: torch.Tensor, chunk: Chunk, stats: RowStats) -> None:
        super().accumulate(logits_TC, chunk, stats)
        self.kernels.top_k_(logits_TC, chunk.first_class, self._values_TK, self._classes_TK, chunk.transform)


@dataclass(frozen=True)
class _LargestPerToken(Computation):
    """(hidden, weight, bias, labels [T] that no kernel looks at) -> log-probabilities and ids [T, k], log-sum-exp."""

    k: int

    OPERANDS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target"
    VALUES = ("logprobs", "ids", "log_sum_exp")
    SAVED = ()

    def call(self, operands, options: LossOptions, parallel: VocabParallel, dtype=None) -> Call:
        hidden, weight, bias, target_T = operands
        return prepare_call(
            hidden, weight, bias, False, target_T.shape[0], options, parallel, None, None,
            dtype=dtype, outputs=frozenset({"top_k"}),
        )  # fmt: skip

    def forward(self, operands, call: Call, keep: bool) -> Computed:
        hidden, weight, bias, target_T = operands
        head = head_of(hidden, weight, bias, None, target_T, call)
        shape = (call.plan.num_tokens, self.k)
        values_TK = head.tokens.new_empty(shape, head.statistics_dtype).fill_(-torch.inf)
        classes_TK = head.tokens.new_empty(shape, torch.int64).fill_(NO_CLASS)
        head = replace(head, kernels=_Largest(call.kernels, values_TK, classes_TK))
        stats, _ = chunks.forward(head, with_weighted_sum=False, keep=False)
        stats = StatisticsExchange(stats, call.parallel).wait()
        if call.parallel.size > 1:
            values_RTK = call.parallel.gather_statistics(values_TK).wait()
            classes_RTK = call.parallel.gather_statistics(classes_TK + call.parallel.rank * call.rows_per_rank).wait()
            values_TK, classes_TK = first_k(_beside(values_RTK), _beside(classes_RTK), self.k)
        log_sum_T = stats.sum_exp_T.log()
        logprobs_TK = values_TK - stats.max_T[:, None] - log_sum_T[:, None]
        return Computed((logprobs_TK, classes_TK, stats.max_T + log_sum_T), ())

    def like(self, operands, wide: torch.dtype) -> Computed:
        target_T = operands[3]
        shape_TK = (target_T.shape[0], self.k)
        values_TK, classes_TK = target_T.new_empty(shape_TK, dtype=wide), target_T.new_empty(shape_TK)
        return Computed((values_TK, classes_TK, torch.empty_like(target_T, dtype=wide)), ())


_TOP_K = Operators("top_k", _LargestPerToken)


@torch.no_grad()
@refusals_travel
def linear_top_k(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    **options: Any,
) -> TopK:
    """The k most probable classes under ``softmax((hidden @ weight.T + bias) / temperature)``.

    Args:
        hidden: [..., H]; bf16, fp16, fp32 or fp64.  Under ``sequence_parallel`` this rank's slice along dim 0.
        weight: [V, H], this rank's rows of the output layer.
        k: 1 to 128, at most the vocabulary.
        bias: [V], added to the logits.
        temperature: divides the logits, after scale and softcap.
        **options: the fields of :class:`loongforge.LossOptions` in this signature.

    Returns:
        :class:`loongforge.TopK` in fp32 (fp64 for fp64 inputs), of all gathered tokens under ``sequence_parallel``,
        without gradients.

    Raises:
        TypeError, ValueError: inputs that do not fit together, unknown options, k out of range.
        RuntimeError: ``impl`` cannot run on this device.  NotImplementedError: it lacks an option or this output.
    """
    built = output_options("linear_top_k", HEAD_OPTIONS, options, temperature, reduction="none")
    checks.refuse_function_transforms()
    parallel = VocabParallel.from_group(built.tp_group, built.sequence_parallel)
    target = no_target(hidden, parallel)
    k = constants({"k": k})["k"]
    with ranks_agree(parallel, built, {"hidden": hidden, "weight": weight, "target": target, "bias": bias, "k": k}):
        checks.check_inputs(hidden, weight, target, bias, None, None, built, parallel)
        _check_k(k, built.vocab_size or weight.shape[0] * parallel.size)
    logprobs_TK, ids_TK, log_sum_exp_T = per_token(
        _TOP_K, {"k": k}, (hidden, weight, bias, target.view(-1)), built, parallel
    )
    shape = target.shape
    return TopK(logprobs_TK.view(*shape, k), ids_TK.view(*shape, k), log_sum_exp_T.view(shape))


def _beside(value_RTK: torch.Tensor) -> torch.Tensor:
    """[T, R * K]."""
    return value_RTK.movedim(0, 1).flatten(1)


def no_target(hidden: torch.Tensor, parallel: VocabParallel) -> torch.Tensor:
    """Labels -1 of hidden's gathered leading shape: checks and chunk loop want some, and -1 is no class."""
    checks.check_hidden(hidden)
    first, *rest = hidden.shape[:-1]
    size = parallel.size if parallel.sequence_parallel else 1
    return torch.full((first * size, *rest), -1, device=hidden.device)


def _check_k(k: object, num_classes: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"k must be an int, got {k!r} of type {type(k).__name__}")
    if not 1 <= k <= min(MAX_K, num_classes):
        raise ValueError(f"k must be 1 to {MAX_K} and at most the vocabulary of {num_classes}, got {k}")


with_options_spelled_out(linear_top_k, HEAD_OPTIONS)
