"""Log-probabilities of given classes, entropy, log-sum-exp and predictions from one pass over the vocabulary.

With p the softmax, y the target, lse the log-sum-exp and H the entropy, for upstream gradients g of the three,

    d / dx_j = g_logprob * ([j = y] - p_j) + g_lse * p_j - g_H * p_j * (log p_j + H)

so that two coefficients per token more than the loss's own suffice: p_j is multiplied by a + b * (x_j - max).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from loongforge import checks, chunks, env
from loongforge.agreement import ranks_agree, refusals_travel
from loongforge.call import Call, Labels, head_of, prepare_call
from loongforge.compact import CarriedTokens
from loongforge.kernels.interface import Chunk, OutputKernels, RowCoefficients, RowStats
from loongforge.loss import with_options_spelled_out
from loongforge.operators import Computation, Computed, Operators
from loongforge.options import LossOptions
from loongforge.outputs.common import (
    HEAD_OPTIONS,
    PassedOn,
    gathered,
    moved,
    moved_relative,
    output_options,
    over_sum,
    per_token,
)
from loongforge.parallel import VocabParallel
from loongforge.per_token import products

OPTIONS = ("ignore_index", "z_loss_weight", *HEAD_OPTIONS, "compact_tokens", "logits_budget_mb")
NO_PREDICTION = -1
"""In ``predictions``, at ignored tokens."""


class LogProbs(NamedTuple):
    """Results of :func:`linear_logprobs`: of target's shape but for ``accuracy``, and 0 at ignored tokens."""

    logprobs: torch.Tensor
    """Log-probability of the target."""
    log_sum_exp: torch.Tensor
    """Of all logits, after scale, softcap and temperature."""
    entropy: torch.Tensor | None
    """Of the distribution over the vocabulary, in nats; None unless asked for."""
    predictions: torch.Tensor | None
    """int64 class with the largest logit, the smallest of several; -1 at ignored tokens, None unless asked for."""
    accuracy: torch.Tensor | None
    """Share of the tokens that count whose target is predicted, a scalar; None unless predictions are asked for."""
    z_loss: torch.Tensor | None
    """``z_loss_weight * log_sum_exp ** 2``; None without ``z_loss_weight``."""


class _WithOutputs(PassedOn):
    """Folds chunks into two more statistics than the loss needs."""

    def __init__(self, kernels: OutputKernels, relative_sum_T, argmax_T) -> None:
        super().__init__(kernels)
        self._more = {"relative_sum_T": relative_sum_T, "argmax_T": argmax_T}

    def accumulate(self, logits_TC: torch.Tensor, chunk: Chunk, stats: RowStats) -> None:
        # The tensors are the same: what is added to these statistics is added to the loop's.
        super().accumulate(logits_TC, chunk, replace(stats, **self._more))


def _over_ranks(stats: RowStats, call: Call) -> RowStats:
    values = [stats.max_T, stats.sum_exp_T, stats.label_logit_T]
    if stats.relative_sum_T is not None:
        values.append(stats.relative_sum_T)
    max_RT, sum_exp_RT, label_logit_RT, *relative_RT = gathered(values, call.parallel)
    max_T = max_RT.amax(0)
    scale_RT, shift_RT = moved(max_RT, max_T)
    relative_T = argmax_T = None
    if relative_RT:
        relative_T = moved_relative(relative_RT[0], sum_exp_RT, scale_RT, shift_RT).sum(0)
    if stats.argmax_T is not None:
        (class_RT,) = gathered([stats.argmax_T + call.parallel.rank * call.rows_per_rank], call.parallel)
        argmax_T = class_RT.gather(0, max_RT.argmax(0, keepdim=True))[0]
    return RowStats(max_T, (sum_exp_RT * scale_RT).sum(0), label_logit_RT.sum(0), None, relative_T, argmax_T)


@dataclass(frozen=True)
class _LogProbsPerToken(Computation):
    """(hidden, weight, bias, target [T]) -> log-probability, log-sum-exp, entropy and prediction [T]."""

    entropy: bool
    predictions: bool

    OPERANDS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target"
    VALUES = ("logprob", "log_sum_exp", "entropy", "prediction")
    SAVED = ("max", "sum_exp", "mean")

    def call(self, operands, options: LossOptions, parallel: VocabParallel, dtype=None) -> Call:
        hidden, weight, bias, target_T = operands
        outputs = frozenset(name for name, wanted in vars(self).items() if wanted)
        return prepare_call(
            hidden, weight, bias, False, target_T.shape[0], options, parallel, None, None, dtype=dtype, outputs=outputs
        )

    def forward(self, operands, call: Call, keep: bool) -> Computed:
        hidden, weight, bias, target_T = operands
        head = head_of(hidden, weight, bias, None, target_T, call)
        stats, kept = self._statistics(head, call, keep)
        labels = Labels.of(target_T, call)
        log_sum_T = stats.sum_exp_T.log()
        logprob_T = labels.mark_(stats.label_logit_T - stats.max_T - log_sum_T)
        log_sum_exp_T = labels.mark_(stats.max_T + log_sum_T)
        mean_T = entropy_T = None
        if stats.relative_sum_T is not None:
            mean_T = stats.relative_sum_T / stats.sum_exp_T
            entropy_T = labels.mark_(log_sum_T - mean_T)
        prediction_T = stats.argmax_T
        if prediction_T is not None:
            prediction_T = prediction_T.masked_fill_(labels.ignored_T, NO_PREDICTION)
        values = (logprob_T, log_sum_exp_T, entropy_T, prediction_T)
        return Computed(values, (stats.max_T, stats.sum_exp_T, mean_T), kept)

    def _statistics(self, head: chunks.Head, call: Call, keep: bool) -> tuple[RowStats, torch.Tensor | None]:
        """Statistics over all ranks, and kept logits."""
        shape = (call.plan.num_tokens,)
        relative_T = head.tokens.new_empty(shape, head.statistics_dtype).zero_() if self.entropy else None
        argmax_T = head.tokens.new_empty(shape, torch.int64).zero_() if self.predictions else None
        if self.entropy or self.predictions:
            head = replace(head, kernels=_WithOutputs(call.kernels, relative_T, argmax_T))
        stats, kept = chunks.forward(head, with_weighted_sum=False, keep=keep)
        stats = replace(stats, relative_sum_T=relative_T, argmax_T=argmax_T)
        return (stats if call.parallel.size == 1 else _over_ranks(stats, call)), kept

    def gradients(self, grads, operands, saved, kept, needs, call: Call):
        grad_logprob_T, grad_log_sum_exp_T, grad_entropy_T, _ = grads
        hidden, weight, bias, target_T = operands
        max_T, sum_exp_T, mean_T = saved
        labels = Labels.of(target_T, call)
        onehot_T = labels.mark_(torch.zeros_like(max_T) if grad_logprob_T is None else -grad_logprob_T.to(max_T.dtype))
        softmax_T, relative_over_sum_T = onehot_T.clone(), None
        if grad_log_sum_exp_T is not None:
            softmax_T += grad_log_sum_exp_T
        if self.entropy and grad_entropy_T is not None:
            softmax_T += grad_entropy_T * mean_T
            relative_over_sum_T = over_sum(labels.mark_(-grad_entropy_T.to(max_T.dtype)), sum_exp_T)
        softmax_over_sum_T = over_sum(labels.mark_(softmax_T), sum_exp_T)
        coefficients = RowCoefficients(max_T, softmax_over_sum_T, onehot_T, None, relative_over_sum_T)
        operands = (hidden, weight, bias, target_T, None, None)
        return products(coefficients, operands, sum_exp_T, kept, needs, call)

    def like(self, operands, wide: torch.dtype) -> Computed:
        target_T = operands[3]
        logprob_T, log_sum_exp_T, max_T, sum_exp_T = (torch.empty_like(target_T, dtype=wide) for _ in range(4))
        entropy_T, mean_T = (torch.empty_like(target_T, dtype=wide) if self.entropy else None for _ in range(2))
        prediction_T = torch.empty_like(target_T) if self.predictions else None
        return Computed((logprob_T, log_sum_exp_T, entropy_T, prediction_T), (max_T, sum_exp_T, mean_T))


_LOGPROBS = Operators("logprobs", _LogProbsPerToken)


@refusals_travel
def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    predictions: bool = False,
    **options: Any,
) -> LogProbs:
    """Log-probabilities of ``target`` under ``softmax((hidden @ weight.T + bias) / temperature)``, entropy and more.

    Gradients of ``logprobs``, ``log_sum_exp``, ``z_loss`` and ``entropy`` are exact for any upstream gradient per
    token, of one or of all of them; an entropy that nothing is differentiated through costs backward nothing.

    Args:
        hidden: [..., H]; bf16, fp16, fp32 or fp64.  Under ``sequence_parallel`` this rank's slice along dim 0.
        weight: [V, H], this rank's rows of the output layer.
        target: [...] integer *global* class numbers, hidden's leading shape, gathered under ``sequence_parallel``.
        bias: [V], added to the logits.
        temperature: divides the logits, after scale and softcap.
        entropy: also return the entropy of every token's distribution.
        predictions: also return the most probable class of every token, and the accuracy.
        **options: the fields of :class:`loongforge.LossOptions` in this signature.

    Returns:
        :class:`loongforge.LogProbs` in fp32 (fp64 for fp64 inputs).  A target outside ``[0, V_global)`` that is not
        ``ignore_index`` makes its numbers, its row of grad_hidden and this rank's grad_weight NaN
        (``LCE_CHECK_LABELS=1`` raises IndexError instead).

    Raises:
        TypeError, ValueError: inputs that do not fit together, unknown options.
        RuntimeError: ``impl`` cannot run on this device.  NotImplementedError: it lacks an option or an output.
    """
    built = output_options("linear_logprobs", OPTIONS, options, temperature, reduction="none")
    wanted = {"entropy": entropy, "predictions": predictions}
    parallel = _checked(hidden, weight, target, bias, built, wanted)
    num_classes = built.vocab_size or weight.shape[0] * parallel.size
    target_T = target.reshape(-1).long()
    if not torch.compiler.is_compiling() and env.check_labels():
        labels = Labels.among(target_T, num_classes, built.ignore_index)
        checks.check_labels_in_range(target, labels.out_of_range_T.view(target.shape), num_classes)
    (logprob_T, log_sum_exp_T, entropy_T, prediction_T), carried = _per_token(
        hidden, weight, bias, target_T, built, parallel, wanted
    )
    accuracy = None if not predictions else _accuracy(prediction_T, target_T, built.ignore_index, logprob_T)
    return LogProbs(
        logprobs=logprob_T.view(target.shape),
        log_sum_exp=log_sum_exp_T.view(target.shape),
        entropy=None if not entropy else entropy_T.view(target.shape),
        predictions=None if not predictions else prediction_T.view(target.shape),
        accuracy=accuracy if accuracy is None or carried is None else carried.marked(accuracy),
        z_loss=built.z_loss_weight * log_sum_exp_T.square().view(target.shape) if built.z_loss_weight else None,
    )


def _per_token(hidden, weight, bias, target_T, options: LossOptions, parallel: VocabParallel, wanted: dict[str, bool]):
    """What :class:`_LogProbsPerToken` gives, for all tokens where only some are carried through the products: which."""
    if options.compact_tokens is False:
        return per_token(_LOGPROBS, wanted, (hidden, weight, bias, target_T), options, parallel), None
    carried = CarriedTokens.of(target_T != options.ignore_index, options.compact_tokens)
    operands = carried.hidden(hidden, parallel), weight, bias, carried.values(target_T, options.ignore_index)
    values = per_token(_LOGPROBS, wanted, operands, options, VocabParallel.from_group(options.tp_group))
    logprob_N, log_sum_exp_N, entropy_N, prediction_N = values

    def whole(value_N):
        # Marked where the tokens are whole again: one that did not fit must not read as a log-probability of 0.
        return carried.marked(carried.losses(value_N))

    return (
        whole(logprob_N),
        whole(log_sum_exp_N),
        whole(entropy_N) if wanted["entropy"] else None,
        # Shifted, so that the 0 of what is left out reads NO_PREDICTION.
        carried.losses(prediction_N - NO_PREDICTION) + NO_PREDICTION if wanted["predictions"] else None,
    ), carried


def _checked(hidden, weight, target, bias, options, wanted: dict[str, bool]) -> VocabParallel:
    for name, value in wanted.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    checks.refuse_function_transforms()
    parallel = VocabParallel.from_group(options.tp_group, options.sequence_parallel)
    given = {"hidden": hidden, "weight": weight, "target": target, "bias": bias, **wanted}
    with ranks_agree(parallel, options, given):
        checks.check_inputs(hidden, weight, target, bias, None, None, options, parallel)
    return parallel


def _accuracy(prediction_T, target_T, ignore_index: int, like: torch.Tensor) -> torch.Tensor:
    valid_T = target_T != ignore_index
    hits = (prediction_T == target_T).logical_and_(valid_T).sum()
    return (hits / valid_T.sum().clamp_min(1)).to(like.dtype)


with_options_spelled_out(linear_logprobs, OPTIONS)
