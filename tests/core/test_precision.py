"""``fp32_logits``: bf16 and fp16 operands whose logits are not rounded."""

from __future__ import annotations

import pytest
import torch

from loongforge import LossOptions, call, dispatch, linear_cross_entropy
from loongforge import budget as budgets
from loongforge.budget import logits_budget
from loongforge.plan import plan_chunks
from tests.core import implementations
from tests.helpers import (
    LOW_PRECISION,
    assert_honest,
    eager,
    loss_and_gradients,
    make_inputs,
    oracle,
    record_allocations,
    relative,
    upstream,
    worst,
)

each_dtype = pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)


@each_dtype
@pytest.mark.parametrize("budget", (0, "half", "all"))
@pytest.mark.parametrize("reduction", ("none", "mean", "sum"))
def test_losses_are_those_of_unrounded_logits(loss, reduction, budget, dtype, monkeypatch):
    monkeypatch.setattr(budgets, "_MIB", 1)
    inputs = make_inputs(67, 24, 611, dtype, spread=3.0, bias=True)
    options = LossOptions(reduction=reduction, label_smoothing=0.1, z_loss_weight=0.01, softcap=20.0, vocab_size=590)
    inputs.target.clamp_(max=589)
    given = {name: getattr(options, name) for name in ("label_smoothing", "z_loss_weight", "softcap", "vocab_size")}
    given |= {"reduction": reduction, "logits_budget_mb": 67 * 300 * 4 if budget == "half" else budget}
    truth = loss_and_gradients(oracle(options), inputs.leaves(torch.float64))

    def run(fp32_logits):
        return loss_and_gradients(
            lambda hidden, weight, target, bias: loss(
                hidden, weight, target, bias=bias, fp32_logits=fp32_logits, **given
            ),
            inputs.leaves(),
        )

    precise, rounded = run(True), run(False)
    assert relative(precise[0], truth[0]) < 1e-6
    assert_honest(precise, loss_and_gradients(eager(options), inputs.leaves()), truth)
    in_tiles = call.tile_kernels(loss.impl, *(t.to(loss.device) for t in inputs.tensors[:2])) is not None
    if in_tiles and budget == 0:
        assert all(torch.equal(a, b) for a, b in zip(rounded, precise, strict=True)), "no logit is stored: no option"
    elif dtype == torch.bfloat16 or reduction == "none":
        assert relative(rounded[0], truth[0]) > 1e-5, "the option would change nothing"


def test_float32_operands_are_as_they_were():
    for dtype in (torch.float32, torch.float64):
        inputs = make_inputs(dtype=dtype).leaves()
        for budget in (0, "all"):
            one, other = (
                linear_cross_entropy(*inputs.tensors, inputs.target, fp32_logits=flag, logits_budget_mb=budget)
                for flag in (False, True)
            )
            gradients = [torch.autograd.grad(loss, inputs.tensors) for loss in (one, other)]
            assert torch.equal(one, other) and all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_autocast():
    inputs = make_inputs(hidden=32, spread=3.0)
    rounded = inputs.hidden.bfloat16(), inputs.weight.bfloat16()
    truth = oracle(LossOptions())(*(t.double() for t in rounded), inputs.target)
    leaves = inputs.leaves()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(*leaves.tensors, leaves.target, fp32_logits=True)
        loss.backward()
    assert relative(loss, truth) < 1e-6
    assert leaves.hidden.grad.dtype == leaves.weight.grad.dtype == torch.float32


def test_a_second_backward_recomputes_in_float32(monkeypatch):
    monkeypatch.setattr(budgets, "_MIB", 1)
    inputs = make_inputs(67, 24, 611, torch.bfloat16).leaves()
    loss = linear_cross_entropy(*inputs.tensors, inputs.target, fp32_logits=True, logits_budget_mb=67 * 300 * 4)
    first = torch.autograd.grad(loss, inputs.tensors, retain_graph=True)
    second = torch.autograd.grad(loss, inputs.tensors)
    assert worst(relative(a, b) for a, b in zip(second, first, strict=True)) < 5e-3


def test_kept_logits_are_counted_with_four_bytes():
    inputs = make_inputs(1024, 8, 1024, torch.bfloat16).leaves()
    for fp32_logits, mib in ((False, 2), (True, 4)):
        loss = linear_cross_entropy(*inputs.tensors, inputs.target, fp32_logits=fp32_logits, logits_budget_mb="all")
        assert logits_budget.bytes_in_use == mib << 20
        loss.backward()
        assert logits_budget.bytes_in_use == 0
    half = linear_cross_entropy(*inputs.tensors, inputs.target, reduction="none", fp32_logits=True, logits_budget_mb=2)
    assert logits_budget.bytes_in_use == 2 << 20
    del half


@pytest.mark.parametrize("kept_rows", (0, 1024, 2500))
def test_peak_memory_is_what_the_plan_states(kept_rows, monkeypatch):
    tokens, hidden, vocab = 700, 64, 2500
    kept_bytes = tokens * kept_rows * 4
    plan = plan_chunks("generic", tokens, hidden, vocab, 4, kept_bytes, operand_itemsize=2)
    assert plan.kept_rows == kept_rows and plan.kept_bytes == kept_bytes
    monkeypatch.setattr(budgets, "_MIB", 1)
    inputs = make_inputs(tokens, hidden, vocab, torch.bfloat16).leaves()

    def step():
        linear_cross_entropy(
            *inputs.tensors, inputs.target, reduction="none", fp32_logits=True, logits_budget_mb=kept_bytes
        ).sum().backward()

    measured = record_allocations(step)
    assert tokens * min(vocab, 3072) * 4 <= measured.peak <= plan.peak_bytes
    rounded = plan_chunks("generic", tokens, hidden, vocab, 2, kept_bytes // 2)
    assert plan.peak_bytes > rounded.peak_bytes


class TorchTiles:
    """:class:`loongforge.kernels.interface.TileKernels` in torch: float32 logits that nobody stores."""

    def __init__(self, kernels):
        self._kernels, self.calls = kernels, 0

    def supports(self, hidden_TH, weight_VH):
        return True

    def accumulate(self, hidden_TH, weight_CH, bias_C, chunk, stats, first=False):
        self.calls += 1
        if first:  # may hold anything
            for name, value_T in vars(stats).items():
                if value_T is not None:
                    value_T.fill_(-torch.inf if name == "max_T" else 0.0)
        self._kernels.accumulate(self._logits(hidden_TH, weight_CH, bias_C), chunk, stats)

    def gradient(self, hidden_TH, weight_CH, bias_C, chunk, coefficients, out_TC):
        assert out_TC.dtype == hidden_TH.dtype
        logits = self._logits(hidden_TH, weight_CH, bias_C)
        self._kernels.gradient_(logits, chunk, coefficients)
        out_TC.copy_(logits)

    def _logits(self, hidden_TH, weight_CH, bias_C):
        logits = hidden_TH.float() @ weight_CH.float().t()
        return logits if bias_C is None else logits + bias_C.float()


@pytest.fixture
def torch_tiles(monkeypatch):
    tiles = TorchTiles(dispatch._load("generic"))
    monkeypatch.setattr("loongforge.call.tile_kernels", lambda *arguments: tiles)
    return tiles


@each_dtype
@pytest.mark.parametrize("budget", (0, "half", "all"))
def test_losses_are_those_of_unrounded_logits_beside_tile_kernels(torch_tiles, budget, dtype, monkeypatch):
    """As on Hopper, where without kept logits the option changes nothing."""
    subject = implementations.use(implementations.Subject("generic"), monkeypatch)
    test_losses_are_those_of_unrounded_logits(subject, "none", budget, dtype, monkeypatch)
    # Half of the memory of float32 logits holds all that are rounded.
    assert torch_tiles.calls == {0: 2, "half": 1, "all": 0}[budget]


@pytest.mark.parametrize("budget", (0, 67 * 300 * 4, "all"))
def test_beside_tile_kernels(torch_tiles, budget, monkeypatch):
    """Tiles never round: they take what is not kept, and what is kept is float32; lost logits are float32 again."""
    monkeypatch.setattr(budgets, "_MIB", 1)
    monkeypatch.setenv("LCE_BWD_VOCAB_SPLIT_SIZE", "100")
    inputs = make_inputs(67, 24, 611, torch.bfloat16, spread=3.0).leaves()
    truth = loss_and_gradients(oracle(LossOptions(reduction="none")), inputs.leaves(torch.float64))
    loss = linear_cross_entropy(
        *inputs.tensors, inputs.target, reduction="none", fp32_logits=True, logits_budget_mb=budget
    )
    assert relative(loss, truth[0]) < 1e-6 and torch_tiles.calls == (0 if budget == "all" else 1)
    baseline = loss_and_gradients(eager(LossOptions(reduction="none")), inputs.leaves())
    for retain in (True, False):
        grads = torch.autograd.grad(loss, inputs.tensors, upstream(loss.shape).to(loss), retain_graph=retain)
        assert_honest(grads, baseline[1:], truth[1:])


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU; test_losses_are_those_of_unrounded_logits is its twin"
)
@each_dtype
@pytest.mark.parametrize("budget", (0, 1, "all"))
def test_on_a_cuda_device(dtype, budget):
    inputs = make_inputs(515, 256, 5003, dtype, spread=3.0).leaves(device="cuda")
    truth = loss_and_gradients(oracle(LossOptions()), inputs.leaves(torch.float64))
    ours = loss_and_gradients(
        lambda hidden, weight, target: linear_cross_entropy(
            hidden, weight, target, fp32_logits=True, logits_budget_mb=budget
        ),
        inputs,
    )
    assert relative(ours[0], truth[0]) < 2e-6
    assert_honest(ours[1:], loss_and_gradients(eager(LossOptions()), inputs.leaves())[1:], truth[1:])
