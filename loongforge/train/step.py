"""One optimizer step and one validation, through megatron-core's forward-backward schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from loongforge.train.config import TrainConfig
from loongforge.train.distributed import Layout, from_last_stage
from loongforge.train.model import TrainState

Batches = Iterator[dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step reports; equal on every rank."""

    loss: float
    grad_norm: float
    num_tokens: int


def train_step(config: TrainConfig, state: TrainState, layout: Layout, data: Batches) -> StepResult:
    """Forward, backward, clip, Adam and learning rate for one global batch."""
    state.model.train()
    state.model.zero_grad_buffer()
    state.optimizer.zero_grad()
    loss_sum, num_tokens = _run_schedule(config, state, layout, data, forward_only=False)
    updated, grad_norm, _ = state.optimizer.step()
    if updated:
        state.scheduler.step(1)
    return StepResult(loss=loss_sum / num_tokens, grad_norm=float(grad_norm or 0.0), num_tokens=int(num_tokens))


def evaluate(config: TrainConfig, state: TrainState, layout: Layout, data: Batches) -> float:
    """Mean loss per token over ``eval_iters`` global batches."""
    state.model.eval()
    loss_sum = num_tokens = 0.0
    with torch.no_grad():
        for _ in range(config.training.eval_iters):
            batch_loss, batch_tokens = _run_schedule(config, state, layout, data, forward_only=True)
            loss_sum, num_tokens = loss_sum + batch_loss, num_tokens + batch_tokens
    return loss_sum / num_tokens


def _run_schedule(
    config: TrainConfig, state: TrainState, layout: Layout, data: Batches, forward_only: bool
) -> tuple[float, float]:
    """(sum of losses, number of tokens) of one global batch over all ranks."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    training = config.training
    reports = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=data,
        model=[state.model],
        num_microbatches=training.global_batch_size // (training.micro_batch_size * layout.data_parallel),
        seq_length=config.model.seq_length,
        micro_batch_size=training.micro_batch_size,
        forward_only=forward_only,
    )
    totals = torch.zeros(2, dtype=torch.float64, device=layout.device)
    for report in reports:
        totals += report["lm loss"].to(torch.float64)
    if layout.is_last_stage:
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
    loss_sum, num_tokens = from_last_stage(totals).tolist()
    return loss_sum, num_tokens


def _forward_step(data: Batches, model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(data)
    # The causal mask is the attention layer's own; MTP heads shift the loss mask themselves.
    extra = {"loss_mask": batch["loss_mask"]} if model.config.mtp_num_layers else {}
    loss_SB = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], **extra)
    return loss_SB, partial(_reduce_loss, batch["loss_mask"])


def _reduce_loss(loss_mask: torch.Tensor, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """(sum, number of tokens, report), from which megatron-core takes the mean."""
    mask = loss_mask.view(-1).float()
    loss_sum = (loss.float().view(-1) * mask).sum()
    num_tokens = mask.sum()
    report = torch.stack([loss_sum.detach(), num_tokens])
    return loss_sum, num_tokens.to(torch.int), {"lm loss": report}
