"""DeferredLogits: the loss takes it, everything else gets real logits, nothing changes it in place."""

from __future__ import annotations

import gc
import types
import weakref

import pytest
import torch
from torch.nn import functional as F

from loongforge.megatron import DeferredLogits, counters
from loongforge.megatron.hook import _marked
from tests.megatron.matrix import Row
from tests.megatron.small import batch, build, relative_error
from tests.megatron.training import LINEAR, AllocationWatch, configuration

pytestmark = pytest.mark.usefixtures("hook")
S, B, V, H = 32, 2, 512, 32


@pytest.fixture
def model():
    return build()


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(1)).requires_grad_()


def defer(model, hidden, **kwargs) -> DeferredLogits:
    with _marked(model):
        logits, bias = model.output_layer(hidden, **kwargs)
    assert isinstance(logits, DeferredLogits) and bias is None
    return logits


OPERATIONS = {
    "add a number": lambda x: x + 1,
    "number minus": lambda x: 1 - x,
    "adapter's output": lambda x: x + torch.ones(V),
    "tensor plus": lambda x: torch.ones(V) + x,
    "tensor times": lambda x: torch.arange(V) * x,
    "divide by a tensor": lambda x: x / torch.full((V,), 3.0),
    "negate": lambda x: -x,
    "power": lambda x: x**2,
    "matmul": lambda x: x @ torch.ones(V, 3),
    "index": lambda x: x[..., 3:9],
    "mask": lambda x: x[x > 0],
    "method": lambda x: x.transpose(0, 1).contiguous(),
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float64),
    "softmax": lambda x: torch.softmax(x, -1),
    "keyword": lambda x: torch.sum(input=x, dim=0),
    "in a list": lambda x: torch.cat([x, x], dim=1),
    "both sides": lambda x: x * x,
    "loss": lambda x: F.cross_entropy(x.view(-1, V), torch.arange(S * B)),
    "max with gradient": lambda x: x.max(dim=-1).values,
    "max of all": lambda x: torch.max(x),
    "clone": lambda x: x.clone(),
    "in place on a copy": lambda x: x.clone().mul_(2),
    "into another": lambda x: torch.ones(S, B, V).add_(x),
    "iterate": lambda x: torch.stack(list(x)),
    "times zero": lambda x: x * 0,
    "compare": lambda x: torch.where(x > 0.1, x, -x),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_operation_sees_real_differentiable_logits(model, hidden, operation):
    result = operation(defer(model, hidden))
    assert counters.materialized == 1
    expected = operation(F.linear(hidden, model.output_layer.weight))
    assert torch.equal(result, expected) and type(result) is torch.Tensor
    upstream = torch.rand(expected.shape, dtype=expected.dtype)
    inputs = (hidden, model.output_layer.weight)
    for found, truth in zip(
        torch.autograd.grad(result, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(found, truth)


def test_the_callers_grad_mode_decides(model, hidden):
    logits = defer(model, hidden)
    with torch.no_grad():
        assert not logits.float().requires_grad
    assert logits.float().requires_grad
    with torch.no_grad():
        assert not (logits + 1).requires_grad


def test_what_can_be_told_without_logits(model, hidden):
    with AllocationWatch(S * B * V) as watch:
        logits = defer(model, hidden)
        assert logits.shape == logits.size() == (S, B, V) and logits.size(-1) == V and logits.ndim == logits.dim() == 3
        assert logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.numel() == S * B * V
        assert len(logits) == S and "DeferredLogits(shape=[32, 2, 512]" in repr(logits)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert logits.dtype == torch.bfloat16
    assert counters.materialized == 0 and watch.found == []


def labels() -> torch.Tensor:
    return batch()["labels"]


def test_scaling_returns_a_new_object(model, hidden):
    logits = defer(model, hidden)
    for scaled, factor in (
        (logits * 0.25, 0.25),
        (-2 * logits, -2.0),
        (logits / 4, 0.25),
        (torch.mul(logits, 3), 3.0),
        (torch.div(logits, 2), 0.5),
        ((logits * 2) / 8, 0.25),
    ):
        assert isinstance(scaled, DeferredLogits) and scaled is not logits
        expected = F.cross_entropy(factor * F.linear(hidden, model.output_layer.weight).permute(1, 2, 0), labels(),
                                   reduction="none")  # fmt: skip
        assert relative_error(scaled.loss(labels()), expected) < 1e-6
        torch.testing.assert_close(scaled.float(), factor * F.linear(hidden, model.output_layer.weight))
    before = counters.materialized
    plain = F.cross_entropy(F.linear(hidden, model.output_layer.weight).permute(1, 2, 0), labels(), reduction="none")
    assert relative_error(logits.loss(labels()), plain) < 1e-6
    assert counters.materialized == before == 6


def _augmented_mul(x):
    x *= 2


def _augmented_add(x):
    x += torch.ones(V)


def _set_item(x):
    x[..., 5:] = 0


@pytest.mark.parametrize(
    "change",
    [
        _augmented_mul,
        _augmented_add,
        _set_item,
        lambda x: x.mul_(2),
        lambda x: x.masked_fill_(torch.ones(V, dtype=torch.bool), 0),
        lambda x: torch.relu_(x),
        lambda x: torch.add(torch.ones(V), 1, out=x),
        lambda x: F.relu(x, inplace=True),
    ],
)
def test_in_place_use_raises(model, hidden, change):
    logits = defer(model, hidden)
    with pytest.raises(TypeError, match="in place"):
        change(logits)
        logits.loss(labels())


def test_in_place_use_through_a_view_raises_at_the_loss(model, hidden):
    logits = defer(model, hidden)
    with torch.no_grad():
        logits[..., 500:].fill_(-1e4)
    with pytest.raises(TypeError, match="changed in place"):
        logits.loss(labels())
    with pytest.raises(TypeError, match="changed in place"):
        logits * 2


@pytest.mark.parametrize("name", ["grad", "data", "register_hook", "retain_grad", "grad_fn"])
def test_attributes_that_fused_logits_cannot_have(model, hidden, name):
    with pytest.raises(AttributeError, match="cross_entropy_loss_fusion=False"):
        getattr(defer(model, hidden), name)


def test_argmax_over_the_vocabulary_needs_no_logits(model, hidden):
    logits = defer(model, hidden)
    real = F.linear(hidden, model.output_layer.weight)
    with torch.no_grad(), AllocationWatch(S * B * V) as watch:
        found = [torch.argmax(logits, dim=-1), logits.argmax(-1), logits.max(dim=-1).indices, torch.max(logits, -1)[1]]
        smallest = (logits * -1).argmax(dim=2)
        values = logits.max(dim=-1).values
    assert watch.found == [] and counters.materialized == 0
    assert all(torch.equal(rows, real.argmax(-1)) for rows in found)
    assert torch.equal(smallest, real.argmin(-1))
    torch.testing.assert_close(values, real.max(-1).values)
    with torch.no_grad():
        assert torch.equal(logits.argmax(0), real.argmax(0))  # another dimension: real logits
    assert counters.materialized == 1


def test_argmax_finds_nan_as_torch_does(model, hidden):
    with torch.no_grad():
        model.output_layer.weight[77] = torch.nan
        assert (defer(model, hidden).argmax(-1) == 77).all()


def test_negative_labels_are_ignored_and_labels_beyond_the_vocabulary_are_not(model, hidden):
    target = labels()
    target[0, :4] = torch.tensor([-1, -100, -5, V])
    loss = defer(model, hidden).loss(target)
    assert loss[0, :3].tolist() == [0, 0, 0] and loss[0, 3].isnan()
    others = loss.flatten()[4:]
    assert (others > 0).all()
    (gradient,) = torch.autograd.grad(others.sum() + loss[0, :3].sum(), hidden)
    assert not gradient[:3, 0].any() and gradient[3, 0].isnan().all() and gradient[4:].isfinite().all()


@pytest.mark.parametrize(("sequence", "width", "vocabulary"), [(40, 16, 777), (3, 64, 500), (64, 8, 100)])
def test_the_largest_allocation_is_a_chunk_or_an_input(sequence, width, vocabulary):
    from megatron.core.tensor_parallel import ColumnParallelLinear

    config = configuration(Row(), torch.float32, **LINEAR)
    layer = ColumnParallelLinear(width, vocabulary, config=config, init_method=torch.nn.init.normal_, bias=False)
    hidden = torch.randn(sequence, B, width).requires_grad_()
    target = torch.randint(0, vocabulary, (B, sequence))
    tokens = sequence * B
    allowed = max(tokens * min(48, vocabulary), tokens * width, vocabulary * width)
    with AllocationWatch(allowed + 1) as too_large, AllocationWatch(tokens * min(48, vocabulary)) as chunks:
        defer(types.SimpleNamespace(output_layer=layer), hidden).loss(target).mean().backward()
    assert too_large.found == [] and len(chunks.found) >= 2  # forward's and backward's
    with AllocationWatch(allowed + 1) as unfused:
        F.cross_entropy(layer(hidden)[0].permute(1, 2, 0), target).backward()
    assert unfused.found or allowed >= tokens * vocabulary


def test_nothing_outlives_the_loss_in_a_cycle(model):
    hidden = torch.randn(S, B, H)
    gone = weakref.ref(hidden)
    gc.disable()
    try:
        with torch.no_grad():
            logits = defer(model, hidden)
            logits.loss(labels())
            logits.argmax(-1)
            logits.float()
        del hidden, logits
        assert gone() is None
    finally:
        gc.enable()


def test_logits_that_something_read_go_with_the_loss(model, hidden):
    logits = defer(model, hidden)
    gone = weakref.ref(logits.materialize())
    assert gone() is not None  # kept until the loss, to see whether they are changed in place
    logits.loss(labels())
    assert gone() is None
    gone = weakref.ref(logits.materialize())
    assert gone() is None


@pytest.mark.parametrize("register", ("register_full_backward_hook", "register_full_backward_pre_hook"))
def test_backward_hooks_of_the_output_layer_are_refused_instead_of_never_firing(register):
    model = build()
    getattr(model.output_layer, register)(lambda *arguments: None)
    with pytest.raises(NotImplementedError, match="full backward hooks on GPTModel's output layer"):
        model(**batch())
