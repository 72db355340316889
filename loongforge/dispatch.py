"""Architecture -> row kernels.  The only place that imports an implementation, and only when it is chosen.

The selection itself is a pure function: what is asked, what the device is and what is installed go in, the
implementation and its reason come out.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from loongforge import env
from loongforge.arch import Arch, detect
from loongforge.kernels.interface import LogitTransform, TileKernels
from loongforge.options import LossOptions

logger = logging.getLogger("loongforge")

FLYDSL_ARCHS = ("gfx942", "gfx950", "gfx1100", "gfx1150", "gfx1151", "gfx1200", "gfx1201")
TILE_ARCHS = ("sm_90",)
"""Where the tile kernels were measured to win."""
OLDEST_TRITON_NVIDIA = 80
OLDEST_TRITON = (3, 4)
OLDEST_GLUON, NEWEST_GLUON = (3, 6), (3, 9)
"""Versions of Triton whose Gluon, an experimental part of it, compiles ``kernels/gluon_tiles.py``."""


@dataclass(frozen=True)
class Choice:
    """The implementation chosen, why, and for each one passed over why not."""

    impl: str
    reason: str
    rejected: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        passed_over = "".join(f"; not {name}: {why}" for name, why in self.rejected.items())
        return f"{self.impl} ({self.reason}){passed_over}"


@dataclass(frozen=True)
class _Implementation:
    name: str
    module: str
    class_name: str
    runs_on: Callable[[Arch], str | None]  # None: supported, else what the device would have to be
    needs: str | None = None  # importable package
    lacks: Callable[[LossOptions, torch.dtype], str | None] = lambda options, dtype: None
    lacks_outputs: Callable[[frozenset[str], torch.dtype], str | None] = lambda outputs, dtype: None


def _flydsl_runs_on(arch: Arch) -> str | None:
    if arch.vendor == "amd" and arch.name in FLYDSL_ARCHS:
        return None
    return f"needs an AMD GPU among {', '.join(FLYDSL_ARCHS)}, the device is {arch}"


def _flydsl_lacks(options: LossOptions, dtype: torch.dtype) -> str | None:
    return "float64" if dtype == torch.float64 else None


def _flydsl_lacks_outputs(outputs: frozenset[str], dtype: torch.dtype) -> str | None:
    return " and ".join(sorted(outputs)) or None


def _triton_lacks_outputs(outputs: frozenset[str], dtype: torch.dtype) -> str | None:
    return "top_k of float64 logits" if "top_k" in outputs and dtype == torch.float64 else None


def _triton_runs_on(arch: Arch) -> str | None:
    if arch.vendor == "amd" or arch.compute_capability >= OLDEST_TRITON_NVIDIA:
        return None
    return f"needs an NVIDIA GPU of sm_{OLDEST_TRITON_NVIDIA} or newer or an AMD GPU, the device is {arch}"


# In the order in which `auto` tries them.
_IMPLEMENTATIONS = (
    _Implementation(
        "flydsl",
        "loongforge.kernels.amd_flydsl",
        "FlyDSLRowKernels",
        _flydsl_runs_on,
        "flydsl",
        _flydsl_lacks,
        _flydsl_lacks_outputs,
    ),
    _Implementation(
        "triton",
        "loongforge.kernels.triton_output_kernels",
        "TritonOutputKernels",
        _triton_runs_on,
        "triton",
        lacks_outputs=_triton_lacks_outputs,
    ),
    _Implementation("generic", "loongforge.kernels.generic", "GenericRowKernels", lambda arch: None),
)


def missing_package(name: str) -> str | None:
    """What to install for implementation ``name``, or None if it is there."""
    implementation = next(entry for entry in _IMPLEMENTATIONS if entry.name == name)
    if importlib.util.find_spec(implementation.module) is None:
        return f"this version of loongforge has no {name} row kernels yet"
    if implementation.needs is None:
        return None
    if importlib.util.find_spec(implementation.needs) is None:
        return f"the package {implementation.needs} is not installed (pip install 'loongforge[{name}]')"
    return _too_old(implementation.needs, name) if name == "triton" else None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@cache
def _too_old(package: str, extra: str) -> str | None:
    version = importlib.import_module(package).__version__
    if _release(version) >= OLDEST_TRITON:
        return None
    oldest = ".".join(map(str, OLDEST_TRITON))
    return f"{package} {version} is too old, {oldest} or newer is needed (pip install 'loongforge[{extra}]')"


def select(
    arch: Arch,
    options: LossOptions,
    dtype: torch.dtype,
    requested: str = "auto",
    missing: Callable[[str], str | None] = missing_package,
    outputs: frozenset[str] = frozenset(),
) -> Choice:
    """Choose the implementation for ``arch``; a pure function of its arguments.

    ``requested`` other than ``auto`` is met or refused: ``RuntimeError`` where device or package do not allow it,
    ``NotImplementedError`` where the implementation lacks an option, a dtype or one of ``outputs``.
    """
    rejected: dict[str, str] = {}
    for entry in _IMPLEMENTATIONS:
        if requested not in ("auto", entry.name):
            continue
        obstacle = entry.runs_on(arch) or missing(entry.name)
        lack = None if obstacle else entry.lacks(options, dtype) or entry.lacks_outputs(outputs, dtype)
        if obstacle is None and lack is None:
            reason = f"device {arch}" if requested == "auto" else f"asked for, device {arch}"
            return Choice(entry.name, reason, rejected)
        if requested == entry.name:
            if lack:
                raise NotImplementedError(f"impl={requested!r} was asked for, but it lacks {lack}")
            raise RuntimeError(f"impl={requested!r} was asked for, but {obstacle}; impl='auto' picks what can run")
        rejected[entry.name] = obstacle or f"lacks {lack}"
    raise AssertionError(f"no implementation for {arch}: {rejected}")


def requested_implementation(options: LossOptions) -> str:
    """``options.impl``, or where that is ``auto`` what the environment asks for."""
    return options.impl if options.impl != "auto" else env.implementation()


def row_kernels(
    device: torch.device,
    options: LossOptions,
    dtype: torch.dtype,
    has_class_weight: bool = False,
    outputs: frozenset[str] = frozenset(),
) -> Any:
    """The row kernels for tensors on ``device``, :class:`loongforge.kernels.interface.OutputKernels` for ``outputs``.

    Logs the choice once per device, dtype and request.
    """
    choice = choose(device, options, dtype, outputs)
    uniform = options.label_smoothing != 0  # without it class weights are a matter of the coefficients
    failure = _unusable(choice.impl, device, dtype, options.transform, uniform, uniform and has_class_weight)
    if failure is not None:
        if requested_implementation(options) != "auto":
            raise failure
        choice = _without(choice.impl, failure, detect(device), options, dtype, outputs)
    _log_once(str(choice))
    return _load(choice.impl)


@cache
def _unusable(
    impl: str,
    device: torch.device,
    dtype: torch.dtype,
    transform: LogitTransform,
    uniform: bool,
    class_weighted: bool,
) -> RuntimeError | None:
    """Why kernels that are compiled ahead (FlyDSL's) cannot be: too old a package, a compiler that fails."""
    if impl != "flydsl":
        return None
    try:
        _load(impl).prepare(device, dtype, transform, uniform, class_weighted)
    except RuntimeError as failure:
        return failure
    return None


def _without(
    impl: str,
    failure: RuntimeError,
    arch: Arch,
    options: LossOptions,
    dtype: torch.dtype,
    outputs: frozenset[str],
) -> Choice:
    """The next choice after ``impl`` failed, with a warning that carries the real exception."""

    def missing(name: str) -> str | None:
        return str(failure) if name == impl else missing_package(name)

    choice = select(arch, options, dtype, missing=missing, outputs=outputs)
    _warn_once(f"{failure}; the output layer uses {choice.impl} instead")
    return choice


def choose(
    device: torch.device, options: LossOptions, dtype: torch.dtype, outputs: frozenset[str] = frozenset()
) -> Choice:
    """:func:`select` for a real device, with the request taken from ``options`` or the environment."""
    return select(detect(device), options, dtype, requested_implementation(options), outputs=outputs)


def tile_kernels(impl: str, hidden: torch.Tensor, weight: torch.Tensor) -> TileKernels | None:
    """GEMM and row kernel in one for these operands, or None: so far Triton on Hopper, where it was measured to win."""
    if impl != "triton" or detect(hidden.device).name not in TILE_ARCHS:
        return None
    kernels = _load_tiles()
    return kernels if kernels.supports(hidden.flatten(0, -2), weight) else None


@cache
def _load_tiles() -> TileKernels:
    return load_tiles("gluon" if why_not_gluon() is None else "triton")


def why_not_gluon() -> str | None:
    """Why this version of Triton does not compile the Gluon kernels, or None if it does."""
    version = importlib.import_module("triton").__version__
    if OLDEST_GLUON <= _release(version) <= NEWEST_GLUON:
        return None
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST_GLUON, NEWEST_GLUON))
    return f"the Gluon kernels are for Triton {oldest} to {newest}, this is {version}"


def load_tiles(variant: str) -> TileKernels:
    """The tile kernels in ``gluon`` or in plain ``triton``, whether or not this device can run them."""
    if variant == "gluon":
        return importlib.import_module("loongforge.kernels.gluon_tiles").GluonTileKernels()
    return importlib.import_module("loongforge.kernels.triton_tiles").TritonTileKernels()


@cache
def _load(impl: str) -> Any:
    entry = next(entry for entry in _IMPLEMENTATIONS if entry.name == impl)
    return getattr(importlib.import_module(entry.module), entry.class_name)()


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=5)


@cache
def _log_once(message: str) -> None:
    logger.info("output layer implementation: %s", message)
