"""What the run's output layer will do, in words: implementation, chunks, memory."""

from __future__ import annotations

import torch

from loongforge.budget import logits_budget
from loongforge.dispatch import choose
from loongforge.options import LossOptions
from loongforge.plan import plan_chunks
from loongforge.train.config import TrainConfig
from loongforge.train.model import padded_vocab_size, parameter_dtype

_MIB = 1 << 20


def describe_output_layer(config: TrainConfig, vocab_size: int, device: torch.device) -> str:
    """Lines for people, per process: which implementation and why, chunk widths, memory of the logits saved."""
    tp = config.parallel.tensor_model_parallel_size
    num_tokens = config.model.seq_length * config.training.micro_batch_size
    rows = padded_vocab_size(config, vocab_size) // tp
    dtype = parameter_dtype(config)
    head = f"output layer: {num_tokens} tokens x {rows} of {rows * tp} vocabulary rows, {str(dtype)[6:]}"
    layer = config.output_layer
    if not layer.cross_entropy_loss_fusion or layer.cross_entropy_fusion_impl != "linear":
        name = layer.cross_entropy_fusion_impl if layer.cross_entropy_loss_fusion else "plain"
        copy = num_tokens * rows * dtype.itemsize / _MIB
        return f"{head}\n  Megatron's {name} loss over materialised logits, one copy is {copy:.1f} MiB"
    options = LossOptions()
    choice = choose(device, options, dtype)
    plan = plan_chunks(
        choice.impl, num_tokens, config.model.hidden_size, rows, dtype.itemsize, ranks_add_rounded=tp > 1
    )
    plan = logits_budget.reserve(options, plan).plan
    saved = (plan.unfused_bytes - plan.kept_bytes - plan.buffer_bytes) / _MIB
    return (
        f"{head}\n  implementation: {choice}\n  plan: {plan.explain()}\n"
        f"  saved against one copy of the logits: {saved:.1f} MiB"
    )
