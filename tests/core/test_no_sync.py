"""Nothing on the path reads a result on the host or has a shape that depends on data (CUDA graphs, Liger #1292)."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loongforge import linear_cross_entropy
from tests.helpers import make_inputs

SYNCHRONISING = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::nonzero",
    "aten::masked_select",
    "aten::is_nonzero",
    "aten::equal",
    "aten::unique_dim",
    "aten::_unique2",
}


class Forbidden(TorchDispatchMode):
    """Raises at the first operation that would make a GPU's host wait, boolean-mask indexing included."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split(".")[0]
        self.seen.add(name)
        indices = args[1] if name in ("aten::index", "aten::index_put", "aten::index_put_") else ()
        boolean = any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
        if name in SYNCHRONISING or boolean:
            raise AssertionError(f"{name} synchronises with the host")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("budget", (0, 1, "all"))
@pytest.mark.parametrize(
    "options",
    (
        {},
        {"reduction": "none"},
        {"normalizer": 3.0},
        {"normalizer": torch.tensor(7)},
        {"label_smoothing": 0.1, "label_smoothing_formula": "megatron", "z_loss_weight": 0.1},
        {"vocab_size": 90, "softcap": 5.0, "logit_scale": 0.5},
        {"class_weight": torch.ones(101), "label_smoothing": 0.1},
        {"token_weight": torch.arange(37) % 3, "compact_tokens": 20, "fp32_logits": True},
    ),
    ids=str,
)
def test_forward_and_backward_never_synchronise(options, budget, dtype, monkeypatch):
    monkeypatch.setenv("LCE_FWD_VOCAB_SPLIT_SIZE", "32")
    monkeypatch.setenv("LCE_BWD_VOCAB_SPLIT_SIZE", "32")
    inputs = make_inputs(dtype=dtype, bias=True).leaves()
    inputs.target.clamp_(max=89)
    with Forbidden() as mode:
        loss = linear_cross_entropy(
            inputs.hidden, inputs.weight, inputs.target, bias=inputs.bias, logits_budget_mb=budget, **options
        )
        torch.autograd.grad(loss, inputs.tensors, torch.ones_like(loss))
    assert len(mode.seen) > 5


def test_the_mode_sees_what_it_forbids():
    tensor = torch.arange(4.0)
    for act in (lambda: tensor.sum().item(), lambda: bool(tensor.any()), lambda: tensor[tensor > 1], tensor.nonzero):
        with pytest.raises(AssertionError, match="synchronises"), Forbidden():
            act()


def test_the_debugging_check_is_what_synchronises(monkeypatch):
    monkeypatch.setenv("LCE_CHECK_LABELS", "1")
    inputs = make_inputs()
    with pytest.raises(AssertionError, match="nonzero"), Forbidden():
        linear_cross_entropy(*inputs.tensors, inputs.target)
