"""Apple's Cut Cross-Entropy by its own names and argument order (cut-cross-entropy 25.1.1), computed by loongforge.

    from loongforge.integrations.cut_cross_entropy import linear_cross_entropy

in place of ``from cut_cross_entropy import linear_cross_entropy``; the package need not be installed.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from loongforge import loss


def linear_cross_entropy(
    e: torch.Tensor,
    c: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool = False,
    filter_eps: float | str | None = "high",
    impl: str = "cce",
) -> torch.Tensor:
    """Cross-entropy of ``e @ c.T``.

    Args:
        e: [..., D] embeddings.
        c: [V, D] classifier.
        targets: [...] class numbers or ``ignore_index``.
        ignore_index, softcap, reduction: as for :func:`loongforge.linear_cross_entropy`.
        shift: position t is scored against label t + 1 along the last dimension of ``targets``, so that one loss less
            than labels comes back.
        filter_eps: how small a gradient CCE may leave out.  loongforge leaves none out, whatever is said here.
        impl: only CCE's default: loongforge's own implementation is chosen by ``LCE_IMPL``.

    Returns:
        The loss in float32; without a valid token ``mean`` is 0, where CCE gives NaN.
    """
    if str(getattr(impl, "name", impl)).lower() != "cce":
        raise NotImplementedError(f"impl={impl!r}: loongforge's implementation is chosen by LCE_IMPL")
    if isinstance(filter_eps, str) and filter_eps not in ("auto", "high"):
        raise ValueError(f"filter_eps must be 'auto', 'high', a number or None, got {filter_eps!r}")
    if shift not in (False, True):
        raise NotImplementedError(f"shift={shift!r}: only False and True (one position); slice e and targets yourself")
    if shift:
        e, targets = e[..., :-1, :], targets[..., 1:]
    return loss.linear_cross_entropy(e, c, targets, ignore_index=ignore_index, softcap=softcap, reduction=reduction)


class LinearCrossEntropy(nn.Module):
    """:func:`linear_cross_entropy` with its options held; CCE's class has two of them in another order."""

    ORDER = ("ignore_index", "softcap", "reduction", "filter_eps", "shift", "impl")

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__()
        placed = dict(zip(self.ORDER, values, strict=False))
        if len(values) > len(self.ORDER) or not set(named) <= set(self.ORDER) - set(placed):
            raise TypeError(f"the options are {', '.join(self.ORDER)}, once each, got {values} and {named}")
        parameters = inspect.signature(linear_cross_entropy).parameters
        for name in self.ORDER:  # CCE's attributes, which may be set later
            setattr(self, name, {**placed, **named}.get(name, parameters[name].default))

    def forward(self, e: torch.Tensor, c: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See :func:`linear_cross_entropy`."""
        return linear_cross_entropy(e, c, targets, **{name: getattr(self, name) for name in self.ORDER})
