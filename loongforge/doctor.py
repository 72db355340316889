"""``loongforge doctor``: what is installed, what was found, what is chosen and why, and whether it computes rightly."""

from __future__ import annotations

import importlib.metadata
import platform
import time
import warnings
from typing import Any

import torch

import loongforge
from loongforge import LossOptions, dispatch, env, linear_cross_entropy
from loongforge.kernels.interface import RowKernels
from loongforge.kernels.reference import reference_loss
from loongforge.options import IMPLEMENTATIONS

PACKAGES = ("loongforge", "torch", "numpy", "triton", "flydsl", "megatron-core", "transformer-engine")
SELF_TEST_SHAPE = (67, 72, 7003)
"""T, H, V of the self-test: nothing divides anything, and on a CPU there are three chunks."""
SELF_TEST_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all logits kept": {"logits_budget_mb": "all"},
    "options": {"label_smoothing": 0.1, "z_loss_weight": 1e-3, "softcap": 4.0, "logit_scale": 1.5, "ignore_index": 3},
}
"""Cases of the self-test, each with a bias, ignored tokens and an upstream gradient that is not uniform."""

# Twice what torch's own rounding of the same computation costs in each dtype, as relative norms.
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def examine() -> dict[str, Any]:
    """Everything the command prints, as plain data; ``healthy`` is False where any entry is an ``error``."""
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "torch_built_for": _torch_build(),
        "environment": env.in_force(),
        "unknown_variables": env.unknown(),
        "devices": [_device(device) for device in _devices()],
        "megatron": _megatron(),
    }
    problems = env.problems()
    for device in report["devices"]:
        if "error" in device and not any(problem in device["error"] for problem in problems):
            problems.append(f"{device['device']}: {device['error']}")
    problems += [f"{name} is no variable of loongforge{hint}" for name, hint in report["unknown_variables"].items()]
    if "error" in report["megatron"]:
        problems.append(f"megatron: {report['megatron']['error']}")
    return report | {"problems": problems, "healthy": not problems}


def describe(report: dict[str, Any]) -> str:
    """The report for people."""
    packages = dict(report["packages"])
    lines = [f"Python {report['python']}", f"torch {packages.pop('torch')}, built for {report['torch_built_for']}"]
    lines += [f"{name} {version or 'not installed'}" for name, version in packages.items()]
    lines.append("environment: " + (", ".join(f"{k}={v}" for k, v in report["environment"].items()) or "no LCE_* set"))
    for device in report["devices"]:
        lines += _describe_device(device)
    lines.append("megatron hook: " + (report["megatron"].get("error") or report["megatron"]["status"]))
    lines.append("healthy" if report["healthy"] else "NOT healthy: " + "; ".join(report["problems"]))
    return "\n".join(lines)


def _describe_device(device: dict[str, Any]) -> list[str]:
    memory = f", {device['memory_gib']:.0f} GiB" if "memory_gib" in device else ""
    lines = [f"{device['device']}: {device['name']} ({device['arch']}{memory})"]
    if "implementation" in device:
        tiles = f", with {device['tile_kernels']}" if device.get("tile_kernels") else ""
        lines.append(f"  implementation {device['implementation']}: {device['reason']}{tiles}")
        lines += [f"  not {name}: {why}" for name, why in device["rejected"].items()]
    lines += _describe_self_test(device.get("self_test", []))
    if "self_test_seconds" in device:
        lines.append(f"  self-test took {device['self_test_seconds']:.1f} s")
    if "error" in device:
        lines.append(f"  error: {device['error']}")
    return lines


def _describe_self_test(results: list[dict[str, Any]]) -> list[str]:
    """A line for each dtype with the largest errors of its cases, and one for each case that is wrong."""
    lines = []
    for dtype in dict.fromkeys(line["dtype"] for line in results):
        cases = [line for line in results if line["dtype"] == dtype]
        largest = {name: max(line["errors"][name] for line in cases) for name in cases[0]["errors"]}
        wrong = [line["case"] for line in cases if not line["passed"]]
        verdict = f"WRONG in {', '.join(wrong)}" if wrong else "ok"
        errors = ", ".join(f"{name} {value:.1e}" for name, value in largest.items())
        lines.append(f"  self-test {dtype}: {verdict} (largest relative errors: {errors})")
    return lines


def _version(name: str) -> str | None:
    if name == "loongforge":
        return loongforge.__version__  # of the package that runs: a checkout need not be installed
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_build() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]


def _device(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"device": str(device), "arch": "unknown", "name": _cpu_name()}
    try:
        if device.type == "cuda":
            found["name"] = torch.cuda.get_device_name(device)
            found["memory_gib"] = torch.cuda.get_device_properties(device).total_memory / 2**30
        found["arch"] = dispatch.detect(device).name
        found |= _choice(device)
        start = time.monotonic()
        found["self_test"] = [_self_test(device, dtype, case) for dtype in _TOLERANCE for case in SELF_TEST_OPTIONS]
        found["self_test_seconds"] = time.monotonic() - start
        wrong = dict.fromkeys(line["dtype"] for line in found["self_test"] if not line["passed"])
        if wrong:
            found["error"] = f"the self-test is wrong in {', '.join(wrong)}"
    except Exception as error:  # whatever breaks on this device is what the report is for
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def _cpu_name() -> str:
    return platform.processor() or platform.machine()


def _choice(device: torch.device) -> dict[str, Any]:
    """What runs here and why, and for every other implementation why not."""
    choice = dispatch.choose(device, LossOptions(), torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernels = dispatch.row_kernels(device, LossOptions(), torch.bfloat16)
    rejected = dict(choice.rejected)
    if kernels.name != choice.impl:  # it was chosen, but its kernels could not be made ready
        rejected[choice.impl] = "; ".join(str(warning.message) for warning in caught)
    for name in IMPLEMENTATIONS:
        if name not in ("auto", kernels.name, *rejected):
            rejected[name] = _why_not_tried(kernels)
    return {
        "implementation": kernels.name,
        "reason": choice.reason,
        "tile_kernels": _tile_kernels(device, kernels),
        "rejected": rejected,
    }


def _why_not_tried(kernels: RowKernels) -> str:
    if dispatch.requested_implementation(LossOptions()) != "auto":
        return f"{kernels.name} was asked for"
    return f"{kernels.name} comes first and can run"


def _tile_kernels(device: torch.device, kernels: RowKernels) -> str | None:
    hidden, weight = (torch.empty(256, 256, dtype=torch.bfloat16, device=device) for _ in range(2))
    tiles = dispatch.tile_kernels(kernels.name, hidden, weight)
    return None if tiles is None else type(tiles).__name__


def _self_test(device: torch.device, dtype: torch.dtype, case: str) -> dict[str, Any]:
    """Loss and gradients against float64."""
    options = LossOptions(reduction="none", **SELF_TEST_OPTIONS[case])
    num_tokens, hidden_size, num_classes = SELF_TEST_SHAPE
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).to(dtype)
    weight = (torch.randn(num_classes, hidden_size, generator=generator) / hidden_size**0.5).to(dtype)
    bias = (torch.randn(num_classes, generator=generator) / 4).to(dtype)
    target = torch.randint(0, num_classes, (num_tokens,), generator=generator)
    target[::7] = options.ignore_index
    upstream = torch.randn(num_tokens, generator=generator)

    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight, bias)]
    expected = reference_loss(exact[0], exact[1], target, options, bias=exact[2])
    truth = torch.autograd.grad(expected, exact, upstream.double())
    ours = [tensor.to(device).requires_grad_() for tensor in (hidden, weight, bias)]
    loss = linear_cross_entropy(
        ours[0], ours[1], target.to(device), bias=ours[2], reduction="none", **SELF_TEST_OPTIONS[case]
    )
    grads = torch.autograd.grad(loss, ours, upstream.to(device))

    names = ("loss", "grad_hidden", "grad_weight", "grad_bias")
    pairs = zip(names, (loss, *grads), (expected, *truth), strict=True)
    errors = {name: _relative_error(actual, right) for name, actual, right in pairs}
    passed = all(error <= _TOLERANCE[dtype] for error in errors.values())  # NaN fails
    return {"dtype": str(dtype).removeprefix("torch."), "case": case, "errors": errors, "passed": passed}


def _relative_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    return float((actual.detach().cpu().double() - truth.detach()).norm() / truth.detach().norm())


def _megatron() -> dict[str, str]:
    """Whether the hook fits, by putting it in place and taking it away; an absent megatron-core is no error."""
    from loongforge.megatron import hook
    from loongforge.megatron.versions import check_supported

    version = _version("megatron-core")
    if version is None:
        return {"status": "megatron-core is not installed (pip install 'loongforge[megatron]')"}
    try:
        check_supported(version)
        was_installed = hook.is_installed()
        fitted = hook.install()
        if not was_installed:
            hook.uninstall()
    except Exception as error:  # a broken installation is for the report to tell
        cause = f" ({error.__cause__})" if error.__cause__ and str(error.__cause__) not in str(error) else ""
        kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
        return {"error": f"{kind}{error}{cause}"}
    return {"status": f"fits megatron-core {version}: {fitted}"}
