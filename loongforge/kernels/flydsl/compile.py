"""Variants -> compiled launchers, each compiled once per process."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from loongforge.kernels.flydsl.variant import Variant

OLDEST_FLYDSL = (0, 5)
_lock = threading.RLock()


def require_flydsl() -> None:
    """Raise ``RuntimeError`` unless flydsl is there and new enough."""
    oldest = ".".join(map(str, OLDEST_FLYDSL))
    hint = "install it with: pip install 'loongforge[flydsl]'"
    try:
        found = version("flydsl")
    except PackageNotFoundError:
        raise RuntimeError(
            f"impl='flydsl' needs the package flydsl >= {oldest}, which is not installed; {hint}"
        ) from None
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST_FLYDSL:
        raise RuntimeError(f"impl='flydsl' needs flydsl >= {oldest}, found {found}; {hint}")


@cache
def launcher(variant: Variant) -> Callable[..., None]:
    """The compiled launcher: called with addresses, numbers and a stream handle, it does not trace again.

    ``RuntimeError`` names the variant and carries FlyDSL's message where compilation fails.
    """
    require_flydsl()
    with _lock, _compile_for(variant.arch):
        try:
            module = importlib.import_module(f"loongforge.kernels.flydsl.{variant.kernel}")
            return _compile(module.build(variant), variant)
        except Exception as error:  # of the compiler, or of a flydsl whose own libraries do not load
            raise RuntimeError(f"FlyDSL could not compile the {variant}: {error}") from error


def _compile(launch: Callable, variant: Variant) -> Callable[..., None]:
    import flydsl.compiler as flyc
    import flydsl.expr as fx

    from loongforge.kernels.flydsl.vectors import ELEMENTS

    pointees = (ELEMENTS[variant.dtype], fx.Int64, *[fx.Float32] * 5)
    pointers = [flyc.from_c_void_p(pointee, None) for pointee in pointees]  # null: compile, do not launch
    row_stride = num_classes = first_class = num_rows = 0
    numbers = (row_stride, num_classes, first_class, 1.0, 1.0, 1.0, num_rows)
    return flyc.compile(launch, *pointers, *numbers, None)


@contextmanager
def _compile_for(arch: str) -> Iterator[None]:
    """FlyDSL takes the architecture from the environment, and otherwise that of the first GPU it finds."""
    name = "FLYDSL_GPU_ARCH"
    before = os.environ.get(name)
    os.environ[name] = arch
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
