"""Who is measured: loongforge at several settings, and every peer that can be imported.

A contender maps ``(hidden_TH, weight_VH, target_T)`` to the mean loss over valid tokens, or to one loss per token where
it supports any upstream gradient.  Targets are class numbers or -100.  Each is built on first use and may raise
ImportError, which the table reports instead of a time.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

import loongforge
from loongforge.bench.records import versions_of

LossFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """One line of the table."""

    name: str
    per_token: bool
    """Returns a loss per token (and takes any upstream gradient); otherwise the mean."""
    build: Callable[[], LossFunction]
    distribution: str = "torch"
    """Whose version the report names."""
    budget_mb: int | str | None = None
    """Of our own contenders: the logits budget that they ran with."""

    @property
    def is_ours(self) -> bool:
        return self.distribution == "loongforge"


def ours(budgets: Sequence[int | str]) -> list[Contender]:
    """loongforge per token and reduced inside, at each logits budget (MiB or ``"all"``)."""

    return [
        Contender(
            f"loongforge {'token' if reduction == 'none' else reduction} {budget}",
            reduction == "none",
            partial(_ours, reduction, budget),
            "loongforge",
            budget,
        )
        for reduction in ("none", "mean")
        for budget in budgets
    ]


def _ours(reduction: str, budget: int | str) -> LossFunction:
    return lambda hidden, weight, target: loongforge.linear_cross_entropy(
        hidden, weight, target, reduction=reduction, logits_budget_mb=budget
    )


def _torch_float32() -> LossFunction:
    return lambda hidden, weight, target: functional.cross_entropy((hidden @ weight.t()).float(), target)


def _torch_native() -> LossFunction:
    return lambda hidden, weight, target: functional.cross_entropy(hidden @ weight.t(), target)


def _torch_compiled() -> LossFunction:
    return torch.compile(_torch_float32())


def _torch_linear_cross_entropy() -> LossFunction:
    if not hasattr(functional, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda hidden, weight, target: functional.linear_cross_entropy(hidden, weight, target, options=options)


def _megatron(module: str, function: str) -> LossFunction:
    """Megatron's losses know no ignored label: those rows are computed and masked, as Megatron itself does."""
    loss = getattr(importlib.import_module(module), function)
    group = _tensor_parallel_group()
    # A version whose loss takes no group looks it up itself.
    extra = {"tp_group": group} if "tp_group" in inspect.signature(loss).parameters else {}

    def call(hidden, weight, target):
        logits = (hidden @ weight.t()).unsqueeze(1)
        return loss(logits, target.clamp_min(0).unsqueeze(1), **extra)[:, 0] * (target >= 0)

    return call


def _tensor_parallel_group():
    """Megatron's group of this one process, set up if it is not there yet."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    return parallel_state.get_tensor_model_parallel_group()


def _megatron_unfused() -> LossFunction:
    return _megatron("megatron.core.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy")


def _megatron_fused() -> LossFunction:
    return _megatron("megatron.core.fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy")


def _liger(accumulate_in: torch.dtype | None) -> LossFunction:
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    apply = module.LigerFusedLinearCrossEntropyFunction.apply
    # bias, class weight, ignore_index, z-loss, smoothing, reduction, softcap, return z-loss, accumulation dtype
    options = (None, None, -100, 0.0, 0.0, "mean", None, False, accumulate_in)
    return lambda hidden, weight, target: apply(hidden, weight, target, *options)[0]


def _liger_cute() -> LossFunction:
    module = importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")
    apply = module.LigerFusedLinearCrossEntropySM90Function.apply

    def call(hidden, weight, target):
        loss = apply(hidden, weight, target)
        return loss[0] if isinstance(loss, tuple) else loss

    return call


def _cce(filter_gradients: bool, reduction: str) -> LossFunction:
    loss = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    options = {} if filter_gradients else {"filter_eps": None}
    return lambda hidden, weight, target: loss(hidden, weight, target, reduction=reduction, **options)


def _quack(scaled_exp: bool) -> LossFunction:
    loss = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy

    def call(hidden, weight, target):
        # Its scaled-exp mode refuses a chunk equal to the hidden size.
        chunk_size = 8192 if scaled_exp and hidden.shape[1] == 4096 else 4096
        return loss(hidden, weight, target, chunk_size=chunk_size, use_scaled_exp=scaled_exp)

    return call


PEERS = (
    Contender("torch eager fp32 loss", False, _torch_float32),
    Contender("torch eager", False, _torch_native),
    Contender("torch.compile", False, _torch_compiled),
    Contender("torch linear_cross_entropy", False, _torch_linear_cross_entropy),
    Contender("megatron unfused", True, _megatron_unfused, "megatron-core"),
    Contender("megatron native fused", True, _megatron_fused, "megatron-core"),
    Contender("liger triton", False, lambda: _liger(None), "liger-kernel"),
    Contender("liger triton fp32 acc", False, lambda: _liger(torch.float32), "liger-kernel"),
    Contender("liger cute sm90", False, _liger_cute, "liger-kernel"),
    Contender("quack chunked", False, lambda: _quack(False), "quack-kernels"),
    Contender("quack scaled-exp", False, lambda: _quack(True), "quack-kernels"),
    Contender("cce", False, lambda: _cce(True, "mean"), "cut-cross-entropy"),
    Contender("cce exact", False, lambda: _cce(False, "mean"), "cut-cross-entropy"),
    Contender("cce token", True, lambda: _cce(True, "none"), "cut-cross-entropy"),
)


def versions() -> dict[str, str]:
    """Version of every package that takes part and of what they stand on; absent ones are left out."""
    names = {"torch", "triton", "loongforge", *(peer.distribution for peer in PEERS)}
    return {"loongforge": loongforge.__version__} | versions_of(sorted(names - {"loongforge"}))
