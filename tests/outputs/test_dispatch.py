"""Which implementation computes an output: what it lacks is refused by name, or passed over by auto with the reason."""

from __future__ import annotations

import pytest
import torch

from loongforge import LossOptions, dispatch
from loongforge.arch import Arch
from loongforge.dispatch import select
from loongforge.kernels.generic import GenericRowKernels
from loongforge.kernels.interface import OutputKernels

OPTIONS, GFX942, HOPPER = LossOptions(), Arch("amd", "gfx942"), Arch("nvidia", "sm_90")
OUTPUTS = ("entropy", "predictions", "top_k", "divergence from a teacher's head")


def everything(name: str) -> None:
    """Nothing is missing."""


@pytest.mark.parametrize("output", OUTPUTS)
def test_flydsl_lacks_the_outputs(output):
    with pytest.raises(NotImplementedError, match=f"impl='flydsl' was asked for, but it lacks {output}"):
        select(GFX942, OPTIONS, torch.bfloat16, "flydsl", everything, frozenset({output}))
    choice = select(GFX942, OPTIONS, torch.bfloat16, "auto", everything, frozenset({output}))
    assert choice.impl == "triton" and choice.rejected == {"flydsl": f"lacks {output}"}
    assert f"not flydsl: lacks {output}" in str(choice)
    assert select(GFX942, OPTIONS, torch.bfloat16, "auto", everything).impl == "flydsl"


def test_several_lacks_are_all_named():
    with pytest.raises(NotImplementedError, match="it lacks entropy and predictions"):
        select(GFX942, OPTIONS, torch.bfloat16, "flydsl", everything, frozenset({"predictions", "entropy"}))


def test_triton_has_all_but_the_largest_float64_logits():
    for output in OUTPUTS:
        assert select(HOPPER, OPTIONS, torch.bfloat16, "triton", everything, frozenset({output})).impl == "triton"
    with pytest.raises(NotImplementedError, match="it lacks top_k of float64 logits"):
        select(HOPPER, OPTIONS, torch.float64, "triton", everything, frozenset({"top_k"}))
    choice = select(HOPPER, OPTIONS, torch.float64, "auto", everything, frozenset({"top_k"}))
    assert choice.impl == "generic" and choice.rejected["triton"] == "lacks top_k of float64 logits"


def test_the_kernels_have_every_method():
    wanted = [name for name in vars(OutputKernels) if not name.startswith("_")]
    assert {"accumulate_pair", "pair_gradient_", "top_k_"} <= set(wanted)
    assert all(callable(getattr(GenericRowKernels, name)) for name in wanted)
    assert (
        dispatch.row_kernels(torch.device("cpu"), OPTIONS, torch.float64, outputs=frozenset(OUTPUTS)).name == "generic"
    )
