"""Knowledge distillation through the output layer: KL divergences of student and teacher without logits of either."""

from __future__ import annotations

from typing import Any, Literal

import torch

from loongforge import checks, env
from loongforge.agreement import ranks_agree, refusals_travel
from loongforge.loss import denominator_of, reduce_loss, with_options_spelled_out
from loongforge.operators import constants
from loongforge.options import check_transform
from loongforge.outputs.common import HEAD_OPTIONS, at_temperature, output_options, per_token
from loongforge.outputs.teacher_head import FROM_HEAD, TeacherHead
from loongforge.outputs.teacher_top_k import FROM_TOP_K, RESTS, TeacherTopK, teacher_of
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
    given: dict[str, Any] = {"hidden": hidden, "weight": weight, "target": target, "bias": bias}
    given.update(teacher=teacher, divergence=divergence, normalizer=normalizer)
    with ranks_agree(parallel, built, given):
        checks.check_inputs(hidden, weight, target, bias, None, normalizer, built, parallel)
        num_classes = built.vocab_size or weight.shape[0] * parallel.size
        settings = _checked_settings(teacher, hidden, weight, target, temperature, num_classes)
    target_T = target.reshape(-1).long()
    ignored_T = target_T == built.ignore_index
    if not isinstance(teacher, TeacherHead) and not torch.compiler.is_compiling() and env.check_labels():
        _check_distributions(teacher, ignored_T, num_classes)
    operators = FROM_HEAD if isinstance(teacher, TeacherHead) else FROM_TOP_K
    operands = (hidden, weight, bias, ignored_T, *_operands_of(teacher))
    (divergence_T,) = per_token(operators, {**settings, "is_reverse": is_reverse}, operands, built, parallel)
    denominator = denominator_of(target_T, None, normalizer, built, num_classes, divergence_T.dtype)
    return reduce_loss(divergence_T, target, denominator, built)


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


def _checked_settings(teacher, hidden, weight, target, temperature: float, num_classes: int) -> dict[str, Any]:
    """Of the computation, once the teacher fits the rest of the call."""
    if isinstance(teacher, TeacherHead):
        _check_head(teacher, hidden, weight)
        return _transform(teacher, temperature)
    _check_top_k(teacher, target, num_classes)
    return {"rest": teacher.rest}


def _transform(teacher: TeacherHead, temperature: float) -> dict[str, float | None]:
    """Of the teacher's logits at the temperature; checked with what is its own alone, so that messages name it."""
    own = constants({"logit_scale": teacher.logit_scale, "softcap": teacher.softcap})
    check_transform(**own, of="teacher.")
    divided = at_temperature(**own, **constants({"temperature": temperature}))
    check_transform(**divided, of="teacher.")
    return {f"teacher_{name}": value for name, value in divided.items()}


def _check_head(teacher: TeacherHead, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    named = {"teacher.hidden": teacher.hidden, "teacher.weight": teacher.weight}
    if teacher.bias is not None:
        named["teacher.bias"] = teacher.bias
    for name, tensor in named.items():
        checks.check_tensor(name, tensor, hidden)
    checks.check_operands(hidden, named)
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
    checks.check_tensor("teacher.logprobs", teacher.logprobs, target)
    checks.check_tensor("teacher.ids", teacher.ids, target)
    if teacher.logprobs.dtype not in checks.FLOAT_DTYPES or teacher.ids.dtype not in (torch.int64, torch.int32):
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


def _operands_of(teacher: TeacherHead | TeacherTopK) -> tuple[Any, ...]:
    if isinstance(teacher, TeacherHead):
        bias = None if teacher.bias is None else teacher.bias.detach()
        return teacher.hidden.detach(), teacher.weight.detach(), bias
    k = teacher.ids.shape[-1]
    return teacher.logprobs.detach().reshape(-1, k), teacher.ids.reshape(-1, k).long()


def _check_distributions(teacher: TeacherTopK, ignored_T: torch.Tensor, num_classes: int) -> None:
    """``LCE_CHECK_LABELS=1``: raise ValueError naming the first token that is no distribution.  Synchronises."""
    checks.refuse_under_graph_capture("LCE_CHECK_LABELS=1", ignored_T.device)
    logprobs_TK, ids_TK = _operands_of(teacher)
    wide = torch.promote_types(logprobs_TK.dtype, torch.float32)
    rows = (teacher_of(logprobs_TK.to(wide), ids_TK, teacher.rest, num_classes).bad_T & ~ignored_T).nonzero()
    if len(rows):
        row = int(rows[0])
        ids, mass = ids_TK[row], logprobs_TK[row].exp().sum()
        raise ValueError(
            f"token {row} of the teacher has ids {ids.tolist()} and probabilities that sum to {float(mass):.4f}: ids "
            f"must be different numbers in [0, {num_classes}) and the sum at most 1 ({len(rows)} such token(s))"
        )


with_options_spelled_out(linear_distillation, OPTIONS)
