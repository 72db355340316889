"""One small GPTModel and one batch for the tests that need no second process."""

from __future__ import annotations

from typing import Any

import torch

from tests.megatron.matrix import Row
from tests.megatron.training import LINEAR, SEQUENCE, batches, build_model, configuration

Gradients = dict[str, torch.Tensor]


def build(row: Row | None = None, *, linear: bool = True, dtype: torch.dtype = torch.float32, **config: Any):
    """The model of a row; the same weights with and without ``linear``."""
    row = row or Row()
    settings = configuration(row, dtype, **(LINEAR if linear else {}))
    for name, value in config.items():
        setattr(settings, name, value)
    return build_model(row, settings)


def batch(**replaced: Any) -> dict[str, torch.Tensor]:
    """Arguments of a labelled forward; every label is valid."""
    arguments = dict(next(batches()))
    del arguments["loss_mask"]
    arguments["labels"] = arguments["labels"].clamp_min(0)
    return {**arguments, **replaced}


def upstream() -> torch.Tensor:
    """A different gradient for every token, [B, S]."""
    return torch.rand(2, SEQUENCE, generator=torch.Generator().manual_seed(5)) + 0.1


def run(model: torch.nn.Module, **replaced: Any) -> tuple[torch.Tensor, Gradients]:
    """Loss [B, S] and every parameter's gradient under :func:`upstream`."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch(**replaced))
    loss.backward(upstream())
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(found: tuple[torch.Tensor, Gradients], expected: tuple[torch.Tensor, Gradients]) -> None:
    """Loss to 1e-6 and each gradient to 1e-5, as relative norms."""
    assert relative_error(found[0], expected[0]) <= 1e-6
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.any() and relative_error(found[1][name], gradient) <= 1e-5, name


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    assert value.shape == truth.shape
    return float((value.double() - truth.double()).norm() / truth.double().norm())
