"""GPUs that a plan can be made for, and of NVIDIA's what the data sheet of the product states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loongforge.arch import Arch, detect
from loongforge.errors import UsageError


@dataclass(frozen=True)
class DataSheet:
    """Figures that the time of a device nobody measured is estimated from."""

    tflops: float
    """Dense bf16 matrix rate with float32 accumulation."""
    terabytes: float
    """Memory bandwidth per second."""


@dataclass(frozen=True)
class Device:
    """One product."""

    key: str
    product: str
    arch: Arch
    sheet: DataSheet | None = None
    """None: no time is predicted."""


def _nvidia(key: str, product: str, capability: int, tflops: float, terabytes: float) -> Device:
    return Device(key, f"NVIDIA {product}", Arch("nvidia", f"sm_{capability}"), DataSheet(tflops, terabytes))


def _amd(key: str, product: str, gfx: str) -> Device:
    return Device(key, f"AMD {product}", Arch("amd", gfx))


DEVICES = {
    device.key: device
    for device in (
        _nvidia("h200", "H200 SXM", 90, 989.5, 4.8),
        _nvidia("h100", "H100 SXM", 90, 989.5, 3.35),
        _nvidia("a100", "A100 SXM 80GB", 80, 312.0, 2.039),
        _nvidia("b200", "B200", 100, 2250.0, 8.0),
        _nvidia("l40s", "L40S", 89, 362.0, 0.864),
        _amd("mi250x", "Instinct MI250X", "gfx90a"),
        _amd("mi300x", "Instinct MI300X", "gfx942"),
        _amd("mi325x", "Instinct MI325X", "gfx942"),
        _amd("mi350x", "Instinct MI350X", "gfx950"),
        _amd("mi355x", "Instinct MI355X", "gfx950"),
        _amd("rx7900xtx", "Radeon RX 7900 XTX", "gfx1100"),
        _amd("rx9070xt", "Radeon RX 9070 XT", "gfx1201"),
    )
}
MEASURED = "h200"
"""The device that the constants of the time model were fitted on."""


def device_named(key: str) -> Device:
    if key.lower() not in DEVICES:
        raise UsageError(f"--device must be one of {', '.join(DEVICES)}, got {key!r}")
    return DEVICES[key.lower()]


def device_here() -> Device | None:
    """The GPU of this machine if it is in the table."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0).upper().replace(" ", "")
    arch = detect(torch.device("cuda", 0))
    found = [device for device in DEVICES.values() if device.key.upper() in name and device.arch == arch]
    return found[0] if found else None
