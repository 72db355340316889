"""The oracle: the whole loss in float64 with materialised logits and torch's own autograd.  For tests and doctor."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from loongforge.options import LossOptions


def reference_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    options: LossOptions,
    *,
    bias: torch.Tensor | None = None,
    normalizer: torch.Tensor | float | None = None,
    class_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """What :func:`loongforge.linear_cross_entropy` must return, for unsharded tensors and labels in range.

    hidden [..., H], weight [V, H], target [...]; gradients flow to hidden, weight and bias in their own dtypes.
    """
    logits = hidden.double() @ weight.double().t()
    if bias is not None:
        logits = logits + bias.double()
    logits = logits.reshape(-1, weight.shape[0])[:, : options.vocab_size] * options.logit_scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    num_classes = logits.shape[1]
    smoothing = options.label_smoothing
    if options.label_smoothing_formula == "megatron" and smoothing:
        smoothing *= num_classes / (num_classes - 1)
    target_T = target.reshape(-1).long()
    valid_T = target_T != options.ignore_index
    log_probability = F.log_softmax(logits, dim=1)
    class_weight_V = logits.new_ones(num_classes) if class_weight is None else class_weight.double()
    safe_target_T = target_T.clamp(0, num_classes - 1)
    label_log_probability_T = log_probability.gather(1, safe_target_T[:, None])[:, 0]
    loss_T = -(1.0 - smoothing) * class_weight_V[safe_target_T] * label_log_probability_T
    if smoothing:
        loss_T = loss_T - smoothing / num_classes * (log_probability * class_weight_V).sum(1)
    loss_T = torch.where(valid_T, loss_T, 0.0)
    if options.z_loss_weight:
        loss_T = loss_T + torch.where(valid_T, options.z_loss_weight * logits.logsumexp(1).square(), 0.0)
    if options.reduction == "none":
        return loss_T.view(target.shape)
    if options.reduction == "sum":
        return loss_T.sum()
    if normalizer is not None:
        return loss_T.sum() / torch.as_tensor(normalizer, dtype=torch.float64, device=loss_T.device)
    total = torch.where(valid_T, class_weight_V[safe_target_T], 0.0).sum()
    return loss_T.sum() / torch.where(valid_T.any(), total, 1.0)
