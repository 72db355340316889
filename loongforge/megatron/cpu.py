"""Stand-ins for what megatron-core 0.16 to 0.19 assumes of CUDA, so that it trains on a CPU with gloo.

Nothing here runs by itself: call :func:`apply`, or use ``with stand_ins():``, before building anything.  Refused
where CUDA is present.  What each one stands in for is said where it is set.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.config
from torch.overrides import TorchFunctionMode

from loongforge.megatron.patches import Patches
from loongforge.megatron.versions import check_supported, megatron_version

_CPU = torch.device("cpu")


def apply() -> None:
    """Set all stand-ins; a second call changes nothing.  ``RuntimeError`` where CUDA is present."""
    global _applied
    if _applied is not None:
        return
    if torch.cuda.is_available():
        raise RuntimeError("loongforge.megatron.cpu stands in for CUDA, which is present here: do not call it")
    check_supported(megatron_version())
    with contextlib.ExitStack() as stack:
        patches = Patches()
        stack.callback(patches.undo)
        for step in (_devices, _streams, _random_state, _norms, _weight_gradient_kernel, _split_sizes):
            step(patches)
        # jit_fuser is torch.compile: eager saves some 20 s of building on the first step.
        stack.enter_context(torch._dynamo.config.patch(disable=True))
        stack.enter_context(_without_expected_warning())
        stack.enter_context(_CudaToCpu())
        _applied = stack.pop_all()


def undo() -> None:
    """Put torch and megatron-core back as they were; from the thread that called :func:`apply`."""
    global _applied
    if _applied is not None:
        stack, _applied = _applied, None
        stack.close()


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """``apply`` on entering, ``undo`` on leaving."""
    apply()
    try:
        yield
    finally:
        undo()


class _CudaToCpu(TorchFunctionMode):
    """``device="cuda"`` in factory calls, ``Tensor.cuda()``, and type strings that the optimizer compares."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: D102
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(args[0]).replace("torch.", "torch.cuda.", 1)  # compared with 'torch.cuda.FloatTensor'
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


_applied: contextlib.ExitStack | None = None


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _does_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _no_op() -> Callable[..., None]:
    """A function of its own for each name: torch.compile refuses one object under two names."""
    return lambda *args, **kwargs: None


def _devices(patches: Patches) -> None:
    """``torch.cuda.current_device()`` is only ever used as ``device=``."""
    patches.set(torch.cuda, "current_device", lambda: _CPU)
    for name in ("set_device", "synchronize", "empty_cache"):
        patches.set(torch.cuda, name, _no_op())


class _Stream:
    """Work on a CPU is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = _does_nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _streams(patches: Patches) -> None:
    """Streams and events of the gradient buffers, and profiler ranges."""
    patches.set(torch.cuda, "Stream", _Stream)
    patches.set(torch.cuda, "Event", _Stream)
    patches.set(torch.cuda, "current_stream", _Stream)
    patches.set(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    patches.set(torch.Tensor, "record_stream", _no_op())
    patches.set(torch.cuda, "is_current_stream_capturing", lambda: False)
    patches.set(torch.cuda.nvtx, "range_push", _no_op())
    patches.set(torch.cuda.nvtx, "range_pop", _no_op())


def _random_state(patches: Patches) -> None:
    """Megatron's tracker forks the CUDA generator; here the CPU generator plays its part."""
    from megatron.core.tensor_parallel import random

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    for owner in (torch.cuda, torch.cuda.random):
        patches.set(owner, "get_rng_state", get_state)
        patches.set(owner, "set_rng_state", set_state)
    patches.set(torch.cuda, "manual_seed", lambda seed: torch.default_generator.manual_seed(int(seed)))
    patches.set(random, "_get_cuda_rng_state", get_state)
    patches.set(random, "_set_cuda_rng_state", set_state)


@contextlib.contextmanager
def _without_expected_warning() -> Iterator[None]:
    """Drops "CPU RNG state changed within GPU RNG context", which is true here by construction."""

    def keep(record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()

    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _norms(patches: Patches) -> None:
    """The local norm refuses sequence parallelism, and the hybrid stack's last norm is Transformer Engine's."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def new(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> torch.nn.Module:
        if not config.sequence_parallel:
            return original(cls, config, hidden_size, eps, **kwargs)
        config = copy.copy(config)
        config.sequence_parallel = False
        norm = original(cls, config, hidden_size, eps, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True  # finalize_model_grads sums its gradient over the group
        return norm

    patches.set(WrappedTorchNorm, "__new__", staticmethod(new))
    try:
        from megatron.core.models.hybrid import hybrid_block
    except ImportError:  # up to 0.17
        from megatron.core.ssm import mamba_block as hybrid_block
    if not _has_transformer_engine():
        patches.set(hybrid_block, "TENorm", WrappedTorchNorm)


def _has_transformer_engine() -> bool:
    import importlib.util

    return importlib.util.find_spec("transformer_engine") is not None


def _weight_gradient_kernel(patches: Patches) -> None:
    """APEX's kernel behind ``gradient_accumulation_fusion``."""
    from megatron.core.tensor_parallel import layers

    def accumulate(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.add_(grad_output.to(main_grad.dtype).t() @ total_input.to(main_grad.dtype))

    kernel: dict[str, Callable] = {"wgrad_gemm_accum_fp32": accumulate, "wgrad_gemm_accum_fp16": accumulate}
    patches.set(layers, "fused_weight_gradient_mlp_cuda", types.SimpleNamespace(**kernel))
    patches.set(layers, "_grad_accum_fusion_available", True)


def _split_sizes(patches: Patches) -> None:
    """MoE's all-to-all takes its sizes as host arrays; tensors that are on the host already stay tensors."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    patches.set(token_dispatcher, "maybe_move_tensor_to_cpu", to_host)
