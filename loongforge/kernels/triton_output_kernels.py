"""Triton's :class:`loongforge.kernels.interface.OutputKernels`: the loss's row kernels and those of the outputs."""

from contextlib import nullcontext

import torch

from loongforge.kernels.interface import Chunk, LogitTransform, PairCoefficients, PairStats, RowCoefficients, RowStats
from loongforge.kernels.triton_outputs import (
    ACCUMULATE_CONFIG,
    GRADIENT_CONFIG,
    accumulate_outputs_kernel,
    gradient_outputs_kernel,
)
from loongforge.kernels.triton_rows import TritonRowKernels, _bits, _transform_arguments, _warp_size
from loongforge.kernels.triton_top_k import fold_top_k


class TritonOutputKernels(TritonRowKernels):
    """On NVIDIA and AMD GPUs; what asks for nothing beside the loss runs the loss's own kernels."""

    def accumulate(self, logits_TC: torch.Tensor, chunk: Chunk, stats: RowStats) -> None:
        if stats.relative_sum_T is None and stats.argmax_T is None:
            super().accumulate(logits_TC, chunk, stats)
            return
        assert stats.weighted_sum_T is None, "label smoothing and outputs beside the loss exclude each other"
        rows = (
            chunk.label_T, stats.max_T, stats.sum_exp_T, stats.label_logit_T, stats.relative_sum_T, stats.argmax_T,
            None, None,
        )  # fmt: skip
        transforms = (chunk.transform, chunk.transform)
        _launch(accumulate_outputs_kernel, ACCUMULATE_CONFIG, logits_TC, None, rows, chunk.first_class, *transforms)

    def gradient_(self, logits_TC: torch.Tensor, chunk: Chunk, coefficients: RowCoefficients) -> None:
        c = coefficients
        if c.relative_over_sum_T is None:
            super().gradient_(logits_TC, chunk, c)
            return
        assert c.uniform_T is None, "label smoothing and outputs beside the loss exclude each other"
        rows = (chunk.label_T, c.max_T, c.softmax_over_sum_T, c.onehot_T, c.relative_over_sum_T, None, None)
        transforms = (chunk.transform, chunk.transform)
        _launch(gradient_outputs_kernel, GRADIENT_CONFIG, logits_TC, None, rows, chunk.first_class, *transforms)

    def accumulate_pair(
        self,
        a_TC: torch.Tensor,
        b_TC: torch.Tensor,
        stats: PairStats,
        transform_a: LogitTransform,
        transform_b: LogitTransform,
    ) -> None:
        s = stats
        rows = (None, s.max_a_T, s.sum_exp_a_T, None, s.gap_sum_T, None, s.max_b_T, s.sum_exp_b_T)
        _launch(accumulate_outputs_kernel, ACCUMULATE_CONFIG, a_TC, b_TC, rows, 0, transform_a, transform_b)

    def pair_gradient_(
        self,
        student_TC: torch.Tensor,
        teacher_TC: torch.Tensor,
        coefficients: PairCoefficients,
        transform: LogitTransform,
        teacher_transform: LogitTransform,
    ) -> None:
        c = coefficients
        rows = (None, c.max_T, c.softmax_over_sum_T, None, c.gap_over_sum_T, c.teacher_max_T, c.teacher_over_sum_T)
        _launch(gradient_outputs_kernel, GRADIENT_CONFIG, student_TC, teacher_TC, rows, 0, transform, teacher_transform)

    def top_k_(
        self,
        logits_TC: torch.Tensor,
        first_class: int,
        values_TK: torch.Tensor,
        classes_TK: torch.Tensor,
        transform: LogitTransform,
    ) -> None:
        fold_top_k(logits_TC, first_class, values_TK, classes_TK, transform)


def _launch(kernel, config, logits_TC, other_TC, rows, first_class, transform, other_transform) -> None:
    """Start one program per row on the device of the logits, which need not be the current one."""
    num_tokens, num_classes = logits_TC.shape
    if num_tokens == 0 or num_classes == 0:
        return
    assert num_classes == 1 or logits_TC.stride(1) == 1, f"logits need unit stride along C, got {logits_TC.stride()}"
    for row in rows:
        assert row is None or row.is_contiguous(), "per-token tensors must be contiguous"
    if other_TC is not None:
        assert other_TC.dtype == logits_TC.dtype and other_TC.shape == logits_TC.shape, "heads must be of one kind"
        assert num_classes == 1 or other_TC.stride(1) == 1, f"logits need unit stride along C, got {other_TC.stride()}"
    mode, factor, softcap = _transform_arguments(transform)
    other_mode, other_factor, other_softcap = _transform_arguments(other_transform)
    strides = logits_TC.stride(0), 0 if other_TC is None else other_TC.stride(0)
    with torch.cuda.device(logits_TC.device) if logits_TC.is_cuda else nullcontext():
        kernel[(num_tokens,)](
            logits_TC, other_TC, *rows, *strides, num_classes, first_class,
            _bits(factor), _bits(softcap), _bits(other_factor), _bits(other_softcap),
            TRANSFORM=mode, B_TRANSFORM=other_mode,
            B_ALIGNED=other_TC is None or _alignment(other_TC) == _alignment(logits_TC),
            **config.meta(_warp_size(logits_TC.device)),
            enable_fp_fusion=True,  # whatever this Triton's default
        )  # fmt: skip


def _alignment(logits_TC: torch.Tensor) -> tuple[int, int]:
    """What the split of a row into 16-byte vectors depends on."""
    return logits_TC.data_ptr() % 16, logits_TC.stride(0) * logits_TC.element_size() % 16
