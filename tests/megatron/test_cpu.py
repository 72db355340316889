"""The CPU stand-ins: explicit, refused where CUDA is, undone without a trace."""

from __future__ import annotations

import sys

import pytest
import torch

from loongforge.megatron import cpu

NAMES = ("current_device", "set_device", "synchronize", "empty_cache", "Stream", "Event", "current_stream", "stream",
         "manual_seed", "get_rng_state", "set_rng_state", "is_current_stream_capturing")  # fmt: skip


def state() -> list[object]:
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return [
        *(getattr(torch.cuda, name) for name in NAMES),
        random._get_cuda_rng_state,
        random._set_cuda_rng_state,
        layers._grad_accum_fusion_available,
        vars(WrappedTorchNorm)["__new__"],
        torch._dynamo.config.disable,
        torch.overrides._get_current_function_mode(),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="they are refused where CUDA is")
def test_undone_without_a_trace():
    before = state()
    with cpu.stand_ins():
        cpu.apply()  # a second time changes nothing
        assert torch.empty(3, device=torch.cuda.current_device()).device.type == "cpu"
        assert torch.empty(3, device="cuda").cuda().to("cuda:0").device.type == "cpu"
        assert torch.empty(3).type() == "torch.cuda.FloatTensor"
        assert all(new is not old for new, old in zip(state(), before, strict=True))
    assert all(new is old for new, old in zip(state(), before, strict=True))
    assert torch.empty(3).type() == "torch.FloatTensor"


def test_refused_where_cuda_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = state()
    with pytest.raises(RuntimeError, match="stands in for CUDA, which is present"):
        cpu.apply()
    assert all(new is old for new, old in zip(state(), before, strict=True))


def test_importing_the_package_imports_no_megatron():
    import subprocess

    code = "import sys, loongforge.megatron, loongforge.megatron.cpu; print('megatron' in sys.modules)"
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
