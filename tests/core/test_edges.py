"""Edges that ordinary shapes and tensors do not reach."""

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from loongforge import LossOptions, call, linear_cross_entropy
from loongforge import budget as budgets
from loongforge.budget import logits_budget
from loongforge.call import Labels
from tests.helpers import poison_memory

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("reduction", ("none", "sum", "mean"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_tokens_give_zero_gradients(dtype, reduction):
    hidden = torch.randn(0, 5).to(dtype).requires_grad_()
    weight = torch.randn(31, 5).to(dtype).requires_grad_()
    bias = torch.zeros(31, dtype=dtype, requires_grad=True)
    target = torch.zeros(0, dtype=torch.long)
    linear_cross_entropy(hidden, weight, target, bias=bias, reduction=reduction).sum().backward()
    assert hidden.grad.shape == (0, 5)
    assert torch.equal(weight.grad, torch.zeros_like(weight)) and torch.equal(bias.grad, torch.zeros_like(bias))


@pytest.mark.parametrize("budget", (0, "all"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_that_nobody_wrote_is_never_used(monkeypatch, dtype, budget):
    monkeypatch.setenv("LCE_GENERIC_BWD_VOCAB_SPLIT_SIZE", "40")
    hidden, weight = torch.randn(9, 8).to(dtype).requires_grad_(), torch.randn(100, 8).to(dtype).requires_grad_()
    options = {"vocab_size": 90, "label_smoothing": 0.1, "logits_budget_mb": budget}
    results = []
    for poison in (False, True):
        with monkeypatch.context() as patches:
            if poison:
                poison_memory(patches)
            loss = linear_cross_entropy(hidden, weight, torch.arange(9) * 10, **options)
            results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)


def test_torch_without_the_function_that_tells_hooks(monkeypatch):
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks", raising=False)
    monkeypatch.setattr(call, "_is_called_by_checkpoint", lambda: "asked")
    assert call._will_be_run_again() == "asked"


@pytest.mark.parametrize("torch_tells_hooks", (True, False), ids=("", "torch 2.6"))
@pytest.mark.parametrize("reentrant", (True, False))
@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("budget_copies", (0.0, 0.5, 0.9, 1.0, 1.5, "all"))
def test_activation_checkpointing_at_every_budget(monkeypatch, budget_copies, reduction, reentrant, torch_tells_hooks):
    """The second run of a checkpointed forward must choose as the first did, and the first must keep no logits."""
    monkeypatch.setattr(budgets, "_MIB", 1)
    if not torch_tells_hooks:
        monkeypatch.setattr(call, "_will_be_run_again", call._is_called_by_checkpoint)
    num_tokens, num_classes = 300, 2111
    copy = num_tokens * num_classes * 4
    budget = "all" if budget_copies == "all" else int(copy * budget_copies)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 8, generator=generator).requires_grad_()
    weight = torch.randn(num_classes, 8, generator=generator).requires_grad_()
    target = torch.randint(0, num_classes, (num_tokens,), generator=generator)

    def head(hidden, weight):
        return linear_cross_entropy(hidden * 1, weight, target, reduction=reduction, logits_budget_mb=budget)

    loss = checkpoint(head, hidden, weight, use_reentrant=reentrant)
    gc.collect()
    assert logits_budget.bytes_in_use == 0, "logits outlive a forward that is going to run again"
    grads = torch.autograd.grad(loss.sum(), (hidden, weight)) if not reentrant else None
    if reentrant:
        loss.sum().backward()
        grads = hidden.grad, weight.grad
    loss = head(hidden, weight)
    assert bool(logits_budget.bytes_in_use) == (budget != 0), "no forward but this one runs once only"
    plain = torch.autograd.grad(loss.sum(), (hidden, weight))
    for actual, expected in zip(grads, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    assert logits_budget.bytes_in_use == 0


def test_the_budget_remembers_nothing_of_past_steps():
    hidden, weight = torch.randn(8, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    for _ in range(20):
        linear_cross_entropy(hidden, weight, torch.arange(8), logits_budget_mb="all").backward()
    assert len(logits_budget._returned) <= 1


@pytest.mark.parametrize("name", ("hidden", "weight", "target"))
def test_none_is_named(name):
    tensors = {"hidden": torch.ones(2, 3), "weight": torch.ones(4, 3), "target": torch.ones(2, dtype=torch.long)}
    tensors[name] = None
    with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got NoneType"):
        linear_cross_entropy(**tensors)


@pytest.mark.parametrize("make", (lambda x: x.to("meta"), lambda x: x.to_sparse()), ids=("meta", "sparse"))
def test_tensors_without_dense_data_are_refused(make):
    hidden = make(torch.ones(2, 3))
    with pytest.raises(TypeError, match="hidden must be a dense tensor with data"):
        linear_cross_entropy(hidden, torch.ones(4, 3), torch.ones(2, dtype=torch.long))


def test_a_group_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="tp_group must be a torch.distributed.ProcessGroup, got str"):
        linear_cross_entropy(torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, dtype=torch.long), tp_group="tp")


@pytest.mark.parametrize(
    "option",
    (
        {"softcap": 1e300},
        {"softcap": 1e-300},
        {"logit_scale": 1e300},
        {"logit_scale": -1e-300},
        {"ignore_index": 2**70},
    ),
    ids=str,
)
def test_numbers_that_the_statistics_cannot_hold_are_refused(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        LossOptions(**option)


@pytest.mark.parametrize("ignore_index", (-100, -1, 0, 3, 5, 2**40))
def test_labels_that_are_ignored_and_that_are_no_class(ignore_index):
    """Of five classes.  An ignored row is 0 whether or not its label is a class, a mistake NaN, whatever was there."""
    labels = [0, 3, 4, 5, 9, -1, -7, -100, 2**40, -(2**40)]
    mistakes = [not 0 <= label < 5 and label != ignore_index for label in labels]
    found = Labels.among(torch.tensor(labels), 5, ignore_index)
    assert found.ignored_T.tolist() == [label == ignore_index for label in labels]
    assert found.out_of_range_T.tolist() == mistakes
    for before in (2.0, torch.nan, torch.inf):
        marked = found.mark_(torch.full((len(labels),), before))
        expected = [0.0 if label == ignore_index else before for label in labels]
        expected = torch.tensor(expected).masked_fill(torch.tensor(mistakes), torch.nan)
        torch.testing.assert_close(marked, expected, equal_nan=True, rtol=0, atol=0)
