"""Which implementation is chosen, and why: a pure function over architectures, options and installed packages."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from loongforge import LossOptions, dispatch, linear_cross_entropy
from loongforge.arch import Arch, amd_arch, detect
from loongforge.dispatch import FLYDSL_ARCHS, select
from loongforge.kernels.generic import GenericRowKernels
from tests.helpers import make_inputs

OPTIONS = LossOptions()


def installed(*names: str):
    return lambda name: None if name in (*names, "generic") else f"the package {name} is not installed (pip ...)"


EVERYTHING, NOTHING = installed("flydsl", "triton"), installed()

TABLE = (
    *((Arch("amd", name), EVERYTHING, "flydsl") for name in FLYDSL_ARCHS),
    *((Arch("amd", name), installed("triton"), "triton") for name in FLYDSL_ARCHS),
    *((Arch("amd", name), EVERYTHING, "triton") for name in ("gfx90a", "gfx908", "gfx1030", "gfx1101", "gfx1250")),
    *((Arch("nvidia", f"sm_{n}"), EVERYTHING, "triton") for n in (80, 86, 89, 90, 100, 103, 120)),
    *((Arch("nvidia", f"sm_{n}"), EVERYTHING, "generic") for n in (61, 70, 75)),
    *((Arch(name, name), EVERYTHING, "generic") for name in ("cpu", "xpu", "mps", "npu")),
    (Arch("nvidia", "sm_90"), NOTHING, "generic"),
    (Arch("amd", "gfx942"), NOTHING, "generic"),
)


@pytest.mark.parametrize(
    ("arch", "missing", "expected"), TABLE, ids=lambda value: "" if callable(value) else str(value)
)
def test_auto(arch, missing, expected):
    choice = select(arch, OPTIONS, torch.bfloat16, "auto", missing)
    assert choice.impl == expected and str(arch) in choice.reason
    order = ("flydsl", "triton", "generic")
    assert tuple(choice.rejected) == order[: order.index(expected)]
    for why in choice.rejected.values():
        assert "needs" in why or "not installed" in why
    assert str(choice).startswith(expected)


def test_design_list_of_flydsl_architectures():
    assert FLYDSL_ARCHS == ("gfx942", "gfx950", "gfx1100", "gfx1150", "gfx1151", "gfx1200", "gfx1201")


@pytest.mark.parametrize(
    ("requested", "arch", "missing", "message"),
    (
        (
            "triton",
            Arch("cpu", "cpu"),
            EVERYTHING,
            "needs an NVIDIA GPU of sm_80 or newer or an AMD GPU, the device is cpu",
        ),
        ("triton", Arch("nvidia", "sm_75"), EVERYTHING, "sm_80 or newer .* the device is nvidia sm_75"),
        ("triton", Arch("nvidia", "sm_90"), NOTHING, "the package triton is not installed"),
        ("flydsl", Arch("nvidia", "sm_90"), EVERYTHING, "needs an AMD GPU among gfx942, .* the device is nvidia sm_90"),
        ("flydsl", Arch("amd", "gfx90a"), EVERYTHING, "the device is amd gfx90a"),
        ("flydsl", Arch("amd", "gfx942"), NOTHING, "the package flydsl is not installed"),
    ),
)
def test_an_explicit_request_never_falls_back(requested, arch, missing, message):
    with pytest.raises(RuntimeError, match=f"impl='{requested}' was asked for, but .*{message}"):
        select(arch, OPTIONS, torch.bfloat16, requested, missing)


@pytest.mark.parametrize("arch", (Arch("amd", "gfx942"), Arch("nvidia", "sm_90"), Arch("cpu", "cpu")), ids=str)
def test_generic_can_be_asked_for_anywhere(arch):
    assert select(arch, OPTIONS, torch.bfloat16, "generic", EVERYTHING).impl == "generic"


def test_an_option_that_an_implementation_lacks(monkeypatch):
    """Refused by name where it was asked for; passed over, with the reason, by auto."""
    entries = tuple(
        dispatch._Implementation(
            entry.name,
            entry.module,
            entry.class_name,
            entry.runs_on,
            entry.needs,
            (lambda options, dtype: "softcap" if options.softcap else None) if entry.name == "triton" else entry.lacks,
        )
        for entry in dispatch._IMPLEMENTATIONS
    )
    monkeypatch.setattr(dispatch, "_IMPLEMENTATIONS", entries)
    hopper, capped = Arch("nvidia", "sm_90"), LossOptions(softcap=3.0)
    with pytest.raises(NotImplementedError, match="impl='triton' was asked for, but it lacks softcap"):
        select(hopper, capped, torch.bfloat16, "triton", EVERYTHING)
    choice = select(hopper, capped, torch.bfloat16, "auto", EVERYTHING)
    assert choice.impl == "generic" and choice.rejected["triton"] == "lacks softcap"
    assert select(hopper, OPTIONS, torch.bfloat16, "triton", EVERYTHING).impl == "triton"


def test_float64_on_amd_passes_flydsl_over():
    choice = select(Arch("amd", "gfx942"), OPTIONS, torch.float64, "auto", EVERYTHING)
    assert choice.impl == "triton" and choice.rejected == {"flydsl": "lacks float64"}
    with pytest.raises(NotImplementedError, match="impl='flydsl' was asked for, but it lacks float64"):
        select(Arch("amd", "gfx942"), OPTIONS, torch.float64, "flydsl", EVERYTHING)


def test_missing_package_names_the_extra(monkeypatch):
    original = dispatch.importlib.util.find_spec
    monkeypatch.setattr(
        dispatch.importlib.util, "find_spec", lambda name: None if name in ("triton", "flydsl") else original(name)
    )
    for name in ("triton", "flydsl"):
        assert f"pip install 'loongforge[{name}]'" in dispatch.missing_package(name)
    assert dispatch.missing_package("generic") is None


def test_target_features_are_stripped():
    assert amd_arch("gfx942:sramecc+:xnack-") == Arch("amd", "gfx942") == amd_arch("gfx942")
    assert select(amd_arch("gfx950:sramecc+:xnack-"), OPTIONS, torch.bfloat16, "auto", EVERYTHING).impl == "flydsl"


def test_compute_capability():
    assert Arch("nvidia", "sm_100").compute_capability == 100
    assert Arch("amd", "gfx942").compute_capability == Arch("cpu", "cpu").compute_capability == 0
    assert detect(torch.device("cpu")) == Arch("cpu", "cpu")


def test_the_call_honours_request_and_environment(monkeypatch):
    inputs = make_inputs()
    with pytest.raises(RuntimeError, match="impl='triton' was asked for, but .* the device is cpu"):
        linear_cross_entropy(*inputs.tensors, inputs.target, impl="triton")
    monkeypatch.setenv("LCE_IMPL", "triton")
    with pytest.raises(RuntimeError, match="impl='triton' was asked for"):
        linear_cross_entropy(*inputs.tensors, inputs.target)
    linear_cross_entropy(*inputs.tensors, inputs.target, impl="generic")  # an argument outranks the environment
    monkeypatch.delenv("LCE_IMPL")
    monkeypatch.setenv("LCE_FORCE_GENERIC", "1")
    linear_cross_entropy(*inputs.tensors, inputs.target)
    assert isinstance(dispatch.row_kernels(torch.device("cpu"), OPTIONS, torch.float32), GenericRowKernels)


def test_the_choice_is_logged_once(caplog):
    dispatch._log_once.cache_clear()
    inputs = make_inputs()
    with caplog.at_level(logging.INFO, logger="loongforge"):
        for _ in range(3):
            linear_cross_entropy(*inputs.tensors, inputs.target)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "generic (device cpu)" in lines[0] and "not triton: needs an NVIDIA GPU" in lines[0]


@pytest.mark.parametrize("version, works", [("3.3.1", False), ("3.4.0", True), ("3.10.0+rocm6.4", True), ("4.0", True)])
def test_an_old_triton_is_refused_with_both_versions(monkeypatch, version, works):
    package = type(sys)("an_old_triton")
    package.__version__ = version
    monkeypatch.setitem(sys.modules, "an_old_triton", package)
    dispatch._too_old.cache_clear()
    obstacle = dispatch._too_old("an_old_triton", "triton")
    dispatch._too_old.cache_clear()
    assert (obstacle is None) == works
    assert works or (version in obstacle and "3.4 or newer" in obstacle and "loongforge[triton]" in obstacle)
