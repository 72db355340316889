"""Knowledge distillation through the output layer: KL divergences of student and teacher without logits of either."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch

from loongforge import checks, env
from loongforge.agreement import ranks_agree, refusals_travel
from loongforge.call import prepare_call
from loongforge.loss import reduce_loss, with_options_spelled_out
from loongforge.options import LossOptions
from loongforge.outputs.common import HEAD_OPTIONS, output_options
from loongforge.outputs.teacher_head import DivergenceFromHead, TeacherHead
from loongforge.outputs.teacher_top_k import RESTS, DivergenceFromTopK, TeacherTopK, teacher_of
from loongforge.outputs.top_k import MAX_K, no_target
from loongforge.parallel import VocabParallel

OPTIONS = ("reduction", "ignore_index", *HEAD_OPTIONS, "logits_budget_mb")
DIVERGENCES = ("forward", "reverse")


@refusals_travel
def linear_distillation(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: TeacherHead | TeacherTopK,
    *,
    divergence: Literal["forward", "reverse"] = "forward",
    target: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    normalizer: torch.Tensor | float | None = None,
    **options: Any,
) -> torch.Tensor:
    """KL divergence of the student ``softmax((hidden @ weight.T + bias) / temperature)`` and a teacher.

    Args:
        hidden: [..., H], the student's; bf16, fp16, fp32 or fp64.  Under ``sequence_parallel`` this rank's slice.
        weight: [V, H], this rank's rows of the student's output layer.
        teacher: :class:`loongforge.TeacherHead` (hidden states and weight) or :class:`loongforge.TeacherTopK`.
        divergence: ``forward`` is KL(teacher || student), ``reverse`` KL(student || teacher).
        target: [...] labels of which only ``ignore_index`` is looked at: those tokens have divergence 0 and gradient
            0.  None: all tokens count.
        bias: [V], of the student.
        temperature: divides the logits of the student and of a TeacherHead.  The result is not multiplied by its
            square.
        normalizer: what ``reduction="mean"`` divides by instead of this rank's tokens that count.
        **options: the fields of :class:`loongforge.LossOptions` in this signature; they are the student's.

    Returns:
        The divergence in fp32 (fp64 for fp64 inputs): a scalar, or one per token for ``reduction="none"``.  A token
        whose TeacherTopK names a class twice or out of range, or probabilities that sum to more than 1, has a
        divergence and gradients of NaN (``LCE_CHECK_LABELS=1`` raises instead).

    Raises:
        TypeError, ValueError: inputs that do not fit together, unknown options.
        RuntimeError: ``impl`` cannot run on this device.  NotImplementedError: it lacks an option or this output.
    """
    built = output_options("linear_distillation", OPTIONS, options, temperature)
    checks.refuse_function_transforms()
    parallel = VocabParallel.from_group(built.tp_group, built.sequence_parallel)
    if target is None:
        target = no_target(hidden, parallel)
        target = target + 1 if built.ignore_index == -1 else target
    is_reverse = _is_reverse(divergence, teacher)
    given = {"hidden": hidden, "weight": weight, "target": target, "bias": bias, "divergence": divergence}
    with ranks_agree(parallel, built, {**given, "teacher": tuple(vars(teacher).values())}):
        checks.check_inputs(hidden, weight, target, bias, None, normalizer, built, parallel)
        num_classes = built.vocab_size or weight.shape[0] * parallel.size
        if isinstance(teacher, TeacherHead):
            _check_head(teacher, hidden, weight)
        else:
            _check_top_k(teacher, target, num_classes)
    target_T = target.reshape(-1).long()
    ignored_T = target_T == built.ignore_index
    student = (hidden, weight, bias, ignored_T)
    if isinstance(teacher, TeacherHead):
        divergence_T = _from_head(*student, teacher, is_reverse, built, parallel, temperature)
    else:
        divergence_T = _from_top_k(*student, teacher, is_reverse, built, parallel)
    return reduce_loss(divergence_T, target, target_T, None, normalizer, built, num_classes)


def _from_head(hidden, weight, bias, ignored_T, teacher, is_reverse: bool, options: LossOptions, parallel, temperature):
    own = {"logit_scale": teacher.logit_scale, "softcap": teacher.softcap}
    transform = output_options("TeacherHead", HEAD_OPTIONS, own, temperature).transform
    call = prepare_call(
        hidden, weight, bias, False, ignored_T.shape[0], options, parallel, None, None,
        outputs=frozenset({"divergence from a teacher's head"}),
    )  # fmt: skip
    of_teacher = (
        None if tensor is None else tensor.detach() for tensor in (teacher.hidden, teacher.weight, teacher.bias)
    )
    return DivergenceFromHead.apply(hidden, weight, bias, *of_teacher, ignored_T, transform, is_reverse, call)


def _from_top_k(hidden, weight, bias, ignored_T, teacher, is_reverse: bool, options: LossOptions, parallel):
    call = prepare_call(hidden, weight, bias, False, ignored_T.shape[0], options, parallel, None, None)
    k = teacher.ids.shape[-1]
    ids_TK, logprobs_TK = teacher.ids.reshape(-1, k).long(), teacher.logprobs.detach().reshape(-1, k)
    if env.check_labels():
        bad_T = teacher_of(logprobs_TK, ids_TK, teacher.rest, call.num_classes).bad_T & ~ignored_T
        _check_distributions(bad_T, teacher, call.num_classes)
    # Its row kernels take classes out of a chunk, which tile kernels never store.
    call = replace(call, tiles=None)
    return DivergenceFromTopK.apply(
        hidden, weight, bias, ignored_T, logprobs_TK, ids_TK, teacher.rest, is_reverse, call
    )  # fmt: skip


def _is_reverse(divergence: object, teacher: object) -> bool:
    if not isinstance(teacher, (TeacherHead, TeacherTopK)):
        raise TypeError(f"teacher must be a TeacherHead or a TeacherTopK, got {type(teacher).__name__}")
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence must be one of {', '.join(map(repr, DIVERGENCES))}, got {divergence!r}")
    if isinstance(teacher, TeacherTopK):
        if teacher.rest not in RESTS:
            raise ValueError(f"rest must be one of {', '.join(map(repr, RESTS))}, got {teacher.rest!r}")
        if divergence == "reverse" and teacher.rest == "renormalize":
            raise ValueError(
                "the reverse divergence from a teacher without any mass outside its k classes is infinite: use "
                "rest='bucket'"
            )
    return divergence == "reverse"


def _check_head(teacher: TeacherHead, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    named = {"teacher.hidden": teacher.hidden, "teacher.weight": teacher.weight}
    if teacher.bias is not None:
        named["teacher.bias"] = teacher.bias
    autocast = torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64
    for name, tensor in named.items():
        _check_tensor(name, tensor, hidden)
        if tensor.dtype != hidden.dtype and not autocast:
            raise TypeError(f"hidden is {hidden.dtype} and {name} is {tensor.dtype}: cast one of them")
    if teacher.hidden.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"teacher.hidden must be {list(hidden.shape[:-1])} + [H_teacher], got {list(teacher.hidden.shape)}"
        )
    if teacher.weight.dim() != 2 or teacher.weight.shape[1] != teacher.hidden.shape[-1]:
        raise ValueError(
            f"teacher.weight must be [V, {teacher.hidden.shape[-1]}] for teacher.hidden {list(teacher.hidden.shape)}, "
            f"got {list(teacher.weight.shape)}"
        )
    if teacher.weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"teacher.weight has {teacher.weight.shape[0]} rows and weight {weight.shape[0]}: student and teacher must "
            "have one vocabulary, padded to the same size and sharded alike"
        )
    if teacher.bias is not None and teacher.bias.shape != (weight.shape[0],):
        raise ValueError(f"teacher.bias must have shape [{weight.shape[0]}], got {list(teacher.bias.shape)}")


def _check_top_k(teacher: TeacherTopK, target: torch.Tensor, num_classes: int) -> None:
    _check_tensor("teacher.logprobs", teacher.logprobs, target)
    _check_tensor("teacher.ids", teacher.ids, target)
    if not teacher.logprobs.is_floating_point() or teacher.ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"teacher.logprobs must be floats and teacher.ids int64 or int32, got {teacher.logprobs.dtype} and "
            f"{teacher.ids.dtype}"
        )
    shape, k = teacher.ids.shape, teacher.ids.shape[-1] if teacher.ids.dim() else 0
    if teacher.logprobs.shape != shape or shape[:-1] != target.shape or not 1 <= k <= min(MAX_K, num_classes):
        raise ValueError(
            f"teacher.logprobs and teacher.ids must be {list(target.shape)} + [k] with k from 1 to {MAX_K} and at most "
            f"the vocabulary of {num_classes}, got {list(teacher.logprobs.shape)} and {list(shape)}"
        )


def _check_tensor(name: str, tensor: object, like: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, hidden on {like.device}: move them to one device")
    checks.check_is_here(name, tensor)


def _check_distributions(bad_T: torch.Tensor, teacher: TeacherTopK, num_classes: int) -> None:
    """``LCE_CHECK_LABELS=1``: raise ValueError naming the first token that is no distribution.  Synchronises."""
    checks.refuse_under_graph_capture("LCE_CHECK_LABELS=1", bad_T.device)
    rows = bad_T.nonzero()
    if len(rows):
        row = int(rows[0])
        ids, mass = teacher.ids.reshape(len(bad_T), -1)[row], teacher.logprobs.reshape(len(bad_T), -1)[row].exp().sum()
        raise ValueError(
            f"token {row} of the teacher has ids {ids.tolist()} and probabilities that sum to {float(mass):.4f}: ids "
            f"must be different numbers in [0, {num_classes}) and the sum at most 1 ({len(rows)} such token(s))"
        )


with_options_spelled_out(linear_distillation, OPTIONS)
