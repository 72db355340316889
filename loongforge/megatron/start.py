"""What the hook's entries say at start: what was hooked, in which version, and which implementation runs."""

from __future__ import annotations

import os

import torch

from loongforge import dispatch
from loongforge.megatron.hook import HookReport, install
from loongforge.options import LossOptions


def install_and_say() -> HookReport:
    """Install the hook and say so on rank 0; raises where it does not fit or the implementation cannot run here."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    choice = dispatch.choose(device, LossOptions(), torch.bfloat16)
    report = install()
    say(f"{report}; implementation {choice}")
    return report


def say(message: str) -> None:
    """Print on rank 0 of a torchrun."""
    if os.environ.get("RANK", "0") == "0":
        print(f"loongforge: {message}", flush=True)
