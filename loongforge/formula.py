"""The loss of one token and the coefficients of its gradient, for every option at once (``docs/math.md``).

    loss_t = share * w_y * (lse - x_y) + uniform * sum_j w_j * (lse - x_j) + z_loss_weight * lse ** 2

with ``share = 1 - smoothing``, ``uniform = smoothing / V`` and class weights ``w``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loongforge.kernels.interface import RowCoefficients, RowStats
from loongforge.options import LossOptions


@dataclass
class Formula:
    """The loss of one token and its gradient's coefficients, for every option at once (``docs/math.md``)."""

    label_share: float  # 1 - smoothing
    uniform_share: float  # smoothing / V
    z_loss_weight: float
    label_weight_T: torch.Tensor | float  # class weight of the label
    total_weight: torch.Tensor | float  # sum of all class weights

    @classmethod
    def of(
        cls, options: LossOptions, num_classes: int, target_T: torch.Tensor, class_weight: torch.Tensor | None
    ) -> Formula:
        """``num_classes`` is the global vocabulary, ``class_weight`` [num_classes]; out-of-range labels are legal."""
        smoothing = options.label_smoothing
        if options.label_smoothing_formula == "megatron" and smoothing:
            smoothing *= num_classes / (num_classes - 1)
        label_weight_T: torch.Tensor | float = 1.0
        total_weight: torch.Tensor | float = float(num_classes)
        if class_weight is not None:
            label_weight_T = class_weight[target_T.clamp(0, num_classes - 1)]
            total_weight = class_weight.sum()
        return cls(1.0 - smoothing, smoothing / num_classes, options.z_loss_weight, label_weight_T, total_weight)

    def loss(self, stats: RowStats) -> torch.Tensor:
        """[T] from global statistics: ``log(sum) - (label - max)``, the order that keeps large logits exact."""
        log_sum_T = stats.sum_exp_T.log()
        nll_T = log_sum_T - (stats.label_logit_T - stats.max_T)
        loss_T = self._at_label(nll_T)
        if stats.weighted_sum_T is not None:
            lse_T = stats.max_T + log_sum_T
            loss_T = loss_T + self.uniform_share * (self.total_weight * lse_T - stats.weighted_sum_T)
        if self.z_loss_weight:
            loss_T = loss_T + self.z_loss_weight * (stats.max_T + log_sum_T).square()
        return loss_T

    @property
    def is_plain(self) -> bool:
        """Whether the loss is ``lse - x_y`` and nothing else."""
        return self._is_one_at_label and not self.uniform_share and not self.z_loss_weight

    @property
    def _is_one_at_label(self) -> bool:
        return isinstance(self.label_weight_T, float) and self.label_weight_T * self.label_share == 1.0

    def _at_label(self, value_T: torch.Tensor) -> torch.Tensor:
        if self._is_one_at_label:
            return value_T
        return value_T * (self.label_weight_T * self.label_share)

    def coefficients(self, grad_loss_T: torch.Tensor, max_T: torch.Tensor, sum_exp_T: torch.Tensor) -> RowCoefficients:
        """Row coefficients of ``sum_t grad_loss_t * loss_t``."""
        onehot_T = self._at_label(grad_loss_T)
        softmax_T, uniform_T = onehot_T, None
        if self.uniform_share:
            uniform_T = grad_loss_T * self.uniform_share
            softmax_T = softmax_T + uniform_T * self.total_weight
        if self.z_loss_weight:
            z_term_T = grad_loss_T * (2.0 * self.z_loss_weight * (max_T + sum_exp_T.log()))
            softmax_T = softmax_T + torch.where(grad_loss_T == 0, 0.0, z_term_T)
        # An ignored row stays an exact zero even where its sum of exponentials is 0 or NaN (z_term_T likewise).
        softmax_over_sum_T = torch.where(softmax_T == 0, 0.0, softmax_T / sum_exp_T)
        return RowCoefficients(max_T, softmax_over_sum_T, onehot_T, uniform_T)


def scaled_for_float16(
    coefficients: RowCoefficients, sum_exp_T: torch.Tensor, class_weight: torch.Tensor | None, logit_scale: float
) -> tuple[RowCoefficients, torch.Tensor]:
    """Coefficients times a power of two that puts the largest logit gradient near 2**13, and that power.

    float16 holds 6e-8 to 65504: neither ``p / num_tokens`` nor a loss scale of 65536 fits, their quotient does.
    """
    uniform_T = coefficients.uniform_T
    size_T = (coefficients.softmax_over_sum_T * sum_exp_T).abs() + coefficients.onehot_T.abs()
    if uniform_T is not None:
        size_T = size_T + uniform_T.abs() * (1.0 if class_weight is None else class_weight.abs().max())
    relative_T = coefficients.relative_over_sum_T
    if relative_T is not None:
        # p * distance from the maximum is below 1 / e, but for two heads it has no bound: room for distances of 512.
        size_T = size_T + 64.0 * (relative_T * sum_exp_T).abs()
    size_T = torch.cat([size_T.where(size_T.isfinite(), 0.0), size_T.new_zeros(1)])
    _, exponent = torch.frexp(size_T.max() * abs(logit_scale))
    scale = torch.ldexp(sum_exp_T.new_ones(()), (13 - exponent).clamp(-100, 100))
    scaled = RowCoefficients(
        coefficients.max_T,
        coefficients.softmax_over_sum_T * scale,
        coefficients.onehot_T * scale,
        None if uniform_T is None else uniform_T * scale,
        None if relative_T is None else relative_T * scale,
    )
    return scaled, scale
