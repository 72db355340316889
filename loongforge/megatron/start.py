"""What the hook's entries say at start: what was hooked, in which version, and which implementation runs."""

from __future__ import annotations

import os

import torch

from loongforge import dispatch, env
from loongforge.megatron.hook import HookReport, install
from loongforge.options import LossOptions


def install_and_say() -> HookReport:
    """Install the hook and say so on rank 0; raises where it does not fit, the implementation
    cannot run here or an ``LCE_*`` variable has a bad value."""
    env.check()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    choice = dispatch.choose(device, LossOptions(), torch.bfloat16)
    report = install()
    say(f"{report}; implementation {choice}")
    return report


def say(message: str, rank: int = 0) -> None:
    """Print on one rank of a torchrun."""
    if int(os.environ.get("RANK", "0")) == rank:
        print(f"loongforge: {message}", flush=True)
