"""``loongforge doctor`` tells the truth, and notices when something is wrong."""

import json

from loongforge import call, cli, doctor
from loongforge.kernels.generic import GenericRowKernels


def run(capsys, *arguments):
    status = cli.main(["doctor", *arguments])
    return status, capsys.readouterr().out


def test_a_healthy_machine(capsys):
    status, text = run(capsys)
    assert status == 0 and text.endswith("healthy\n")
    assert "implementation generic: device cpu" in text and "not triton: needs an NVIDIA GPU" in text
    assert text.count("self-test") >= 3 and "WRONG" not in text


def test_json_holds_the_same(capsys, monkeypatch):
    monkeypatch.setenv("LCE_LOGITS_BUDGET_MB", "7")
    status, text = run(capsys, "--json")
    report = json.loads(text)
    assert status == 0 and report["healthy"] and report["problems"] == []
    assert report["environment"] == {"LCE_LOGITS_BUDGET_MB": "7"}
    cpu = report["devices"][0]
    assert cpu["implementation"] == "generic" and set(cpu["rejected"]) == {"flydsl", "triton"}
    assert all(line["passed"] and len(line["errors"]) == 3 for line in cpu["self_test"])


class _HalfGradient(GenericRowKernels):
    def gradient_(self, logits_TC, *arguments):
        super().gradient_(logits_TC, *arguments)
        logits_TC.mul_(0.5)


def test_a_wrong_gradient_is_found(capsys, monkeypatch):
    monkeypatch.setattr(call, "row_kernels", lambda *arguments: _HalfGradient())
    status, text = run(capsys)
    assert status == 1 and "WRONG" in text and "NOT healthy: cpu: the self-test is wrong in float32" in text


def test_a_request_that_cannot_be_met_is_found(capsys, monkeypatch):
    monkeypatch.setenv("LCE_IMPL", "triton")
    status, text = run(capsys)
    assert status == 1 and "impl='triton' was asked for" in text


def test_an_unknown_megatron_is_found(capsys, monkeypatch):
    original = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "0.99.0" if name == "megatron-core" else original(name))
    status, text = run(capsys)
    assert status == 1 and "megatron hook: loongforge.megatron knows megatron-core from 0.16.1" in text


def test_a_machine_without_megatron_is_healthy(capsys, monkeypatch):
    original = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "megatron-core" else original(name))
    status, text = run(capsys)
    assert status == 0 and "megatron-core not installed" in text
