"""``LCE_*`` variables: each one has an effect, both spellings work, and nothing wrong passes in silence."""

from __future__ import annotations

import warnings

import pytest
import torch

from loongforge import chunks, env, linear_cross_entropy
from loongforge.budget import logits_budget
from loongforge.plan import plan_chunks
from tests.helpers import make_inputs

SPLITS = [name for name in env.VARIABLES if name.endswith("_VOCAB_SPLIT_SIZE")]


def call(budget=None, **options):
    inputs = make_inputs(512, 16, 1024).leaves()
    loss = linear_cross_entropy(*inputs.tensors, inputs.target, reduction="none", logits_budget_mb=budget, **options)
    return loss


@pytest.mark.parametrize("value", ("abc", "0", "-1", "1.5", "3k"))
@pytest.mark.parametrize("name", SPLITS)
def test_bad_chunk_width(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    impl = next((i for i in ("triton", "flydsl") if i.upper() in name), "generic")
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got .*{value}"):
        plan_chunks(impl, 10, 8, 100, 4)


@pytest.mark.parametrize("value", ("abc", "-1", "1.5", "ALL"))
def test_bad_budget(value, monkeypatch):
    monkeypatch.setenv("LCE_LOGITS_BUDGET_MB", value)
    with pytest.raises(ValueError, match=f'LCE_LOGITS_BUDGET_MB must be a whole number of MiB >= 0, or "all".*{value}'):
        call()


@pytest.mark.parametrize("name", ("LCE_FORCE_GENERIC", "LCE_CHECK_LABELS", "LCE_CHECK_RANKS"))
@pytest.mark.parametrize("value", ("yes", "2", "-1", "true"))
def test_bad_flag(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} must be 0 or 1, got '{value}'"):
        call()


def test_bad_implementation(monkeypatch):
    monkeypatch.setenv("LCE_IMPL", "cuda")
    with pytest.raises(ValueError, match="LCE_IMPL must be one of auto, flydsl, triton, generic, got 'cuda'"):
        call()


def test_contradicting_variables(monkeypatch):
    monkeypatch.setenv("LCE_IMPL", "triton")
    monkeypatch.setenv("LCE_FORCE_GENERIC", "1")
    with pytest.raises(ValueError, match="LCE_FORCE_GENERIC=1 contradicts LCE_IMPL=triton"):
        call()


def widths_used(monkeypatch) -> dict[str, int]:
    """The widest chunk that each direction really computes."""
    seen = {"FWD": 0, "BWD": 0}
    accumulate, gradient = chunks._accumulate, chunks._to_gradient

    def spy(direction, original):
        def wrapper(head, logits_TC, *rest):
            seen[direction] = max(seen[direction], logits_TC.shape[1])
            return original(head, logits_TC, *rest)

        return wrapper

    with monkeypatch.context() as patch:
        patch.setattr(chunks, "_accumulate", spy("FWD", accumulate))
        patch.setattr(chunks, "_to_gradient", spy("BWD", gradient))
        call(0).sum().backward()
    return seen


def test_both_spellings_of_the_chunk_width_take_effect(monkeypatch):
    assert widths_used(monkeypatch) == {"FWD": 1024, "BWD": 1024}
    monkeypatch.setenv("LCE_FWD_VOCAB_SPLIT_SIZE", "100")
    assert widths_used(monkeypatch) == {"FWD": 100, "BWD": 1024}
    monkeypatch.setenv("LCE_BWD_VOCAB_SPLIT_SIZE", "200")
    assert widths_used(monkeypatch) == {"FWD": 100, "BWD": 200}
    monkeypatch.setenv("LCE_GENERIC_FWD_VOCAB_SPLIT_SIZE", "300")
    monkeypatch.setenv("LCE_GENERIC_BWD_VOCAB_SPLIT_SIZE", "50")
    monkeypatch.setenv("LCE_TRITON_FWD_VOCAB_SPLIT_SIZE", "7")
    assert widths_used(monkeypatch) == {"FWD": 300, "BWD": 50}
    monkeypatch.setenv("LCE_GENERIC_BWD_VOCAB_SPLIT_SIZE", " ")
    assert widths_used(monkeypatch) == {"FWD": 300, "BWD": 200}, "an empty variable counts as unset"


@pytest.mark.parametrize("impl", ("generic", "triton", "flydsl"))
def test_each_implementation_has_its_own_width(impl, monkeypatch):
    unset = plan_chunks(impl, 100, 8, 200000, 2)
    assert (unset.forward_width == 3072) == (impl == "generic")
    monkeypatch.setenv(f"LCE_{impl.upper()}_FWD_VOCAB_SPLIT_SIZE", "123")
    monkeypatch.setenv(f"LCE_{impl.upper()}_BWD_VOCAB_SPLIT_SIZE", "456")
    plan = plan_chunks(impl, 100, 8, 200000, 2)
    assert (plan.forward_width, plan.backward_width) == (123, 456)


def test_budget_variable_takes_effect_and_the_argument_outranks_it(monkeypatch):
    monkeypatch.setenv("LCE_LOGITS_BUDGET_MB", "1")
    loss = call()
    assert logits_budget.bytes_in_use == 1 << 20
    del loss
    loss = call(0)
    assert logits_budget.bytes_in_use == 0
    del loss


def test_label_check_names_row_and_value(monkeypatch):
    inputs = make_inputs(12)
    hidden, target = inputs.hidden.view(3, 4, 24), inputs.target.view(3, 4).clone()
    target[1, 2], target[2, 3] = 101, -4
    assert linear_cross_entropy(hidden, inputs.weight, target, reduction="none").isnan().sum() == 2
    monkeypatch.setenv("LCE_CHECK_LABELS", "1")
    with pytest.raises(IndexError, match=r"target\[1, 2\] is 101: labels must be in \[0, 101\) .* \(2 such"):
        linear_cross_entropy(hidden, inputs.weight, target)
    with pytest.raises(IndexError, match=r"labels must be in \[0, 90\)"):
        linear_cross_entropy(hidden, inputs.weight, target, vocab_size=90)
    linear_cross_entropy(hidden, inputs.weight, inputs.target.view(3, 4))
    ignored = target.masked_fill(target == -100, 101)
    with pytest.raises(IndexError, match=r"target\[2, 3\] is -4: .* \(1 such"):
        linear_cross_entropy(hidden, inputs.weight, ignored, ignore_index=101)
    monkeypatch.setenv("LCE_CHECK_LABELS", "0")
    linear_cross_entropy(hidden, inputs.weight, target)


@pytest.mark.parametrize("check", ("LCE_CHECK_LABELS", "LCE_CHECK_RANKS"))
def test_checks_are_refused_under_graph_capture(check, monkeypatch):
    from loongforge.checks import refuse_under_graph_capture

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=f"{check}=1 synchronises with the host"):
        refuse_under_graph_capture(f"{check}=1", torch.device("cuda"))
    refuse_under_graph_capture(f"{check}=1", torch.device("cpu"))


def test_an_unknown_variable_is_named_with_the_nearest_known(monkeypatch):
    monkeypatch.setenv("LCE_GENERIC_FWD_VOCAB_SPLIT", "3072")
    env._warn_of_unknown_names.cache_clear()
    with pytest.warns(
        UserWarning, match="LCE_GENERIC_FWD_VOCAB_SPLIT is not .* did you mean LCE_GENERIC_FWD_VOCAB_SPLIT_SIZE"
    ):
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()  # once
    env._warn_of_unknown_names.cache_clear()


def test_in_force_lists_what_is_set(monkeypatch):
    assert env.in_force() == {}
    monkeypatch.setenv("LCE_IMPL", "generic")
    monkeypatch.setenv("LCE_FWD_VOCAB_SPLIT_SIZE", "64")
    assert env.in_force() == {"LCE_IMPL": "generic", "LCE_FWD_VOCAB_SPLIT_SIZE": "64"}
