"""``loongforge doctor``: what is installed, what was found, what is chosen and why, and whether it computes rightly."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

from loongforge import LossOptions, dispatch, env, linear_cross_entropy
from loongforge.kernels.reference import reference_loss

PACKAGES = ("loongforge", "torch", "numpy", "triton", "flydsl", "megatron-core", "transformer-engine")
SELF_TEST_SHAPE = (67, 72, 1003)
"""T, H, V of the self-test: nothing divides anything."""

# Twice what torch's own rounding of the same computation costs in each dtype, as relative norms.
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


def examine() -> dict[str, Any]:
    """Everything the command prints, as plain data; ``healthy`` is False where any entry is an ``error``."""
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "environment": env.in_force(),
        "devices": [_device(device) for device in _devices()],
        "megatron": _megatron(),
    }
    problems = [f"{device['device']}: {device['error']}" for device in report["devices"] if "error" in device]
    if "error" in report["megatron"]:
        problems.append(f"megatron: {report['megatron']['error']}")
    return report | {"problems": problems, "healthy": not problems}


def describe(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"Python {report['python']}"]
    lines += [f"{name} {version or 'not installed'}" for name, version in report["packages"].items()]
    lines.append("environment: " + (", ".join(f"{k}={v}" for k, v in report["environment"].items()) or "no LCE_* set"))
    for device in report["devices"]:
        lines.append(f"{device['device']}: {device['name']} ({device['arch']})")
        if "implementation" in device:
            lines.append(f"  implementation {device['implementation']}: {device['reason']}")
            lines += [f"  not {name}: {why}" for name, why in device["rejected"].items()]
        for line in device.get("self_test", []):
            errors = ", ".join(f"{name} {value:.1e}" for name, value in line["errors"].items())
            lines.append(
                f"  self-test {line['dtype']}: {'ok' if line['passed'] else 'WRONG'} (relative errors: {errors})"
            )
        if "error" in device:
            lines.append(f"  error: {device['error']}")
    lines.append("megatron hook: " + (report["megatron"].get("error") or report["megatron"]["status"]))
    lines.append("healthy" if report["healthy"] else "NOT healthy: " + "; ".join(report["problems"]))
    return "\n".join(lines)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]


def _device(device: torch.device) -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    found: dict[str, Any] = {"device": str(device), "arch": dispatch.detect(device).name}
    found["name"] = name if device.type == "cpu" else torch.cuda.get_device_name(device)
    try:
        choice = dispatch.choose(device, LossOptions(), torch.bfloat16)
        found |= {"implementation": choice.impl, "reason": choice.reason, "rejected": dict(choice.rejected)}
        found["self_test"] = [_self_test(device, dtype) for dtype in _TOLERANCE]
        wrong = [line["dtype"] for line in found["self_test"] if not line["passed"]]
        if wrong:
            found["error"] = f"the self-test is wrong in {', '.join(wrong)}"
    except Exception as error:  # whatever breaks on this device is what the report is for
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def _self_test(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Loss and gradients against float64, with ignored rows and an uneven upstream gradient."""
    num_tokens, hidden_size, num_classes = SELF_TEST_SHAPE
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).to(dtype)
    weight = (torch.randn(num_classes, hidden_size, generator=generator) / hidden_size**0.5).to(dtype)
    target = torch.randint(0, num_classes, (num_tokens,), generator=generator)
    target[::7] = -100
    upstream = torch.randn(num_tokens, generator=generator)

    exact = (hidden.double().requires_grad_(), weight.double().requires_grad_())
    expected = reference_loss(*exact, target, LossOptions(reduction="none"))
    expected_grads = torch.autograd.grad(expected, exact, upstream.double())
    ours = (hidden.to(device).requires_grad_(), weight.to(device).requires_grad_())
    loss = linear_cross_entropy(*ours, target.to(device), reduction="none")
    grads = torch.autograd.grad(loss, ours, upstream.to(device))

    pairs = zip(("loss", "grad_hidden", "grad_weight"), (loss, *grads), (expected, *expected_grads), strict=True)
    errors = {name: _relative_error(actual, truth) for name, actual, truth in pairs}
    passed = all(error <= _TOLERANCE[dtype] for error in errors.values())  # NaN fails
    return {"dtype": str(dtype).removeprefix("torch."), "errors": errors, "passed": passed}


def _relative_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    return float((actual.detach().cpu().double() - truth.detach()).norm() / truth.detach().norm())


def _megatron() -> dict[str, str]:
    """Whether the hook fits; a version that is there but not known is an error, an absent one is not."""
    from loongforge.megatron.versions import check_supported

    version = _version("megatron-core")
    if version is None:
        return {"status": "megatron-core is not installed (pip install 'loongforge[megatron]')"}
    try:
        check_supported(version)
    except RuntimeError as error:
        return {"error": str(error)}
    return {"status": f"fits megatron-core {version}"}
