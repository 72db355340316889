"""``loongforge doctor`` tells the truth, and notices when something is wrong."""

import functools
import importlib.metadata
import json
import sys
import warnings

import pytest
import torch

import loongforge
from loongforge import arch, call, cli, dispatch, doctor, env
from loongforge.kernels.generic import GenericRowKernels


@pytest.fixture(autouse=True)
def _hook_is_fitted_once(monkeypatch, request):
    """Importing megatron-core takes seconds: one test does it."""
    if "megatron" not in request.node.name:
        monkeypatch.setattr(doctor, "_megatron", lambda: {"status": "not looked at"})


def run(capsys, *arguments):
    status = cli.main(["doctor", *arguments])
    return status, capsys.readouterr().out


def test_a_healthy_machine(capsys):
    status, text = run(capsys)
    assert status == 0 and text.endswith("healthy\n")
    assert "implementation generic: device cpu" in text and "not triton: needs an NVIDIA GPU" in text
    assert text.count("self-test") >= 4 and "WRONG" not in text
    assert f"torch {importlib.metadata.version('torch')}, built for " in text
    assert f"loongforge {loongforge.__version__}\n" in text, "a checkout has a version too"


def test_json_holds_the_same(capsys, monkeypatch):
    monkeypatch.setenv("LCE_LOGITS_BUDGET_MB", "7")
    status, text = run(capsys, "--json")
    report = json.loads(text)
    assert status == 0 and report["healthy"] and report["problems"] == []
    assert report["environment"] == {"LCE_LOGITS_BUDGET_MB": "7"}
    cpu = report["devices"][0]
    assert cpu["implementation"] == "generic" and set(cpu["rejected"]) == {"flydsl", "triton"}
    assert all(line["passed"] and len(line["errors"]) == 4 for line in cpu["self_test"])
    assert {line["case"] for line in cpu["self_test"]} == set(doctor.SELF_TEST_OPTIONS)
    assert {line["dtype"] for line in cpu["self_test"]} == {"float32", "bfloat16", "float16"}


class _HalfGradient(GenericRowKernels):
    def gradient_(self, logits_TC, *arguments):
        super().gradient_(logits_TC, *arguments)
        logits_TC.mul_(0.5)


def test_a_wrong_gradient_is_found(capsys, monkeypatch):
    monkeypatch.setattr(call, "row_kernels", lambda *arguments: _HalfGradient())
    status, text = run(capsys)
    assert status == 1 and "WRONG" in text and "NOT healthy: cpu: the self-test is wrong in float32" in text


def test_every_implementation_that_is_not_chosen_has_its_reason(capsys, monkeypatch):
    monkeypatch.setenv("LCE_IMPL", "generic")
    _, text = run(capsys)
    assert "not triton: generic was asked for" in text and "not flydsl: generic was asked for" in text
    monkeypatch.delenv("LCE_IMPL")
    amd = arch.Arch("amd", "gfx942")
    monkeypatch.setattr(dispatch, "detect", lambda device: amd)
    monkeypatch.setattr(dispatch, "missing_package", lambda name: None)
    monkeypatch.setattr(dispatch, "_unusable", lambda *arguments: RuntimeError("compiler failed"))
    monkeypatch.setattr(dispatch, "select", functools.partial(dispatch.select, missing=lambda name: None))
    failed_first = dispatch.Choice("triton", "device amd gfx942", {"flydsl": "compiler failed"})
    monkeypatch.setattr(dispatch, "_without", lambda *arguments: warnings.warn("why", stacklevel=1) or failed_first)
    found = doctor._choice(torch.device("cpu"))
    assert found["implementation"] == "triton" and found["rejected"]["flydsl"] == "why"
    assert found["rejected"]["generic"] == "triton comes first and can run"


def test_a_misspelt_variable_is_found(capsys, monkeypatch):
    monkeypatch.setenv("LCE_LOGIT_BUDGET_MB", "7")
    status, text = run(capsys)
    assert (
        status == 1 and "LCE_LOGIT_BUDGET_MB is no variable of loongforge; did you mean LCE_LOGITS_BUDGET_MB?" in text
    )


@pytest.mark.parametrize("value", ("much", "-1", "0.5"))
def test_every_bad_value_is_found(capsys, monkeypatch, value):
    """Those too that no call on this machine would read."""
    monkeypatch.setattr(doctor, "_devices", list)
    for name in env.VARIABLES:
        monkeypatch.setenv(name, value)
    status, text = run(capsys)
    assert status == 1
    for name in env.VARIABLES:
        assert text.splitlines()[-1].count(f"{name} must be ") == 1, name


def test_a_bad_value_that_stops_a_device_is_one_problem(capsys, monkeypatch):
    monkeypatch.setenv("LCE_LOGITS_BUDGET_MB", "much")
    status, text = run(capsys, "--json")
    (problem,) = json.loads(text)["problems"]
    assert status == 1 and problem.startswith("LCE_LOGITS_BUDGET_MB must be a whole number")


def test_a_request_that_cannot_be_met_is_found(capsys, monkeypatch):
    monkeypatch.setenv("LCE_IMPL", "triton")
    status, text = run(capsys)
    assert status == 1 and "impl='triton' was asked for" in text


def test_an_unknown_megatron_is_found(capsys, monkeypatch):
    original = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "0.99.0" if name == "megatron-core" else original(name))
    status, text = run(capsys)
    assert status == 1 and "megatron hook: loongforge.megatron knows megatron-core from 0.16.0" in text


def test_a_machine_without_megatron_is_healthy(capsys, monkeypatch):
    original = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "megatron-core" else original(name))
    status, text = run(capsys)
    assert status == 0 and "megatron-core not installed" in text


def test_megatron_is_hooked_and_left_as_it_was(capsys):
    pytest.importorskip("megatron.core", reason="needs megatron-core (pip install 'loongforge[megatron]')")
    from loongforge.megatron import hook

    before = hook.is_installed()
    status, text = run(capsys)
    assert status == 0 and "fused linear cross-entropy in GPTModel" in text
    assert hook.is_installed() is before


def test_a_megatron_that_does_not_fit_is_found(capsys, monkeypatch):
    from loongforge.megatron import hook

    def broken():
        raise AttributeError("no such class") from ImportError("No module named 'numpy'")

    monkeypatch.setattr(hook, "install", broken)
    monkeypatch.setattr(doctor, "_version", lambda name: "0.16.1")
    status, text = run(capsys)
    assert status == 1 and "megatron hook: AttributeError: no such class (No module named 'numpy')" in text


def test_a_megatron_that_cannot_be_imported_is_said_once(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "0.16.1")
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    hook = importlib.import_module("loongforge.megatron.hook")
    monkeypatch.setattr(hook, "_installed", None)
    status, text = run(capsys)
    cause = "import of megatron.core halted; None in sys.modules"
    said = f"({cause}): pip install 'loongforge[megatron]' brings what is missing\n"
    assert status == 1 and said in text
