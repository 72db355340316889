"""Device -> architecture, by the names that compilers use (``sm_90``, ``gfx942``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Arch:
    """``vendor`` is ``nvidia``, ``amd`` or the torch device type; ``name`` is what a compiler calls the target."""

    vendor: str
    name: str

    @property
    def compute_capability(self) -> int:
        """``90`` for ``sm_90``; 0 for anything that is not NVIDIA."""
        return int(self.name.removeprefix("sm_")) if self.vendor == "nvidia" else 0

    def __str__(self) -> str:
        return self.name if self.vendor == self.name else f"{self.vendor} {self.name}"


@cache
def detect(device: torch.device) -> Arch:
    """Architecture of ``device``.  Target features such as ``:sramecc+:xnack-`` are stripped from a gfx name."""
    if device.type != "cuda":
        return Arch(device.type, device.type)
    if torch.version.hip:
        return amd_arch(torch.cuda.get_device_properties(device).gcnArchName)
    major, minor = torch.cuda.get_device_capability(device)
    return Arch("nvidia", f"sm_{major}{minor}")


def amd_arch(gcn_arch_name: str) -> Arch:
    """``gfx942:sramecc+:xnack-`` -> ``Arch("amd", "gfx942")``."""
    return Arch("amd", gcn_arch_name.partition(":")[0])
