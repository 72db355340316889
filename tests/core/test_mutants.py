"""A test of the tests: each class of reported bug, seeded into the code, is caught by the cases named beside it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from loongforge import call, chunks, formula, loss, matmul, per_token
from loongforge.kernels import generic
from loongforge.kernels.interface import LogitTransform
from tests.core.implementations import CHUNK_WIDTH, Subject, use
from tests.core.report_cases import CASES

MUTANTS = {}


def mutant(*caught_by: str):
    """Register a patch under its function's name, with the cases that must fail under it."""

    def register(function):
        MUTANTS[function.__name__] = SimpleNamespace(patch=function, caught_by=caught_by)
        return function

    return register


def replace_coefficients(monkeypatch, change):
    """``change`` turns (grad_loss, coefficients) into other coefficients."""
    original = formula.Formula.coefficients
    monkeypatch.setattr(
        formula.Formula, "coefficients", lambda self, grad, *stats: change(grad, original(self, grad, *stats))
    )


@mutant("upstream_gradient_differs_per_token", "loss_is_squared", "upstream_gradient_is_expanded_or_strided")
def upstream_gradient_of_token_0_for_all(monkeypatch):
    original = formula.Formula.coefficients
    monkeypatch.setattr(
        formula.Formula, "coefficients", lambda self, grad, *stats: original(self, grad[:1].expand_as(grad), *stats)
    )


@mutant("upstream_gradient_differs_per_token", "loss_is_squared")
def upstream_gradient_taken_for_1(monkeypatch):
    original = formula.Formula.coefficients
    monkeypatch.setattr(
        formula.Formula, "coefficients", lambda self, grad, *stats: original(self, torch.ones_like(grad), *stats)
    )


@mutant("upstream_gradient_is_expanded_or_strided")
def upstream_gradient_asserted_contiguous(monkeypatch):
    original = per_token.LossPerToken.backward

    def backward(ctx, grad):
        assert grad.is_contiguous()
        return original(ctx, grad)

    monkeypatch.setattr(per_token.LossPerToken, "backward", staticmethod(backward))


@mutant("every_reduction", "ragged_vocabulary_under_low_logits", "odd_shapes", "softcap_changes_the_loss")
def ragged_chunk_padded_with_zero_logits(monkeypatch):
    original = generic.GenericRowKernels.accumulate

    def accumulate(self, logits, *args):
        padding = CHUNK_WIDTH - logits.shape[1]
        original(self, torch.nn.functional.pad(logits, (0, padding)) if padding > 0 else logits, *args)

    monkeypatch.setattr(generic.GenericRowKernels, "accumulate", accumulate)


@mutant("logits_near_two_thousand")
def loss_is_lse_minus_label(monkeypatch):
    monkeypatch.setattr(
        formula.Formula, "loss", lambda self, stats: stats.max_T + stats.sum_exp_T.log() - stats.label_logit_T
    )


@mutant("logits_near_two_thousand")
def probability_from_lse(monkeypatch):
    original = formula.Formula.coefficients

    def coefficients(self, grad, max_T, sum_exp_T):
        lse_T = max_T + sum_exp_T.log()
        return original(self, grad, lse_T, torch.ones_like(sum_exp_T))

    monkeypatch.setattr(formula.Formula, "coefficients", coefficients)


@mutant("every_reduction", "most_tokens_ignored")
def mean_over_all_tokens(monkeypatch):
    _mean_divides_by(monkeypatch, lambda target: torch.tensor(float(target.numel())))


@mutant("every_token_ignored")
def mean_divides_by_zero(monkeypatch):
    _mean_divides_by(monkeypatch, lambda target: (target != -100).sum())


def _mean_divides_by(monkeypatch, count):
    original = loss.denominator_of

    def denominator_of(target, *rest):
        return None if original(target, *rest) is None else count(target)

    monkeypatch.setattr(loss, "denominator_of", denominator_of)


@mutant("inputs_are_never_written")
def hidden_overwritten(monkeypatch):
    original = chunks.backward

    def backward(head, *args):
        gradients = original(head, *args)
        head.hidden_TH.data.zero_()
        return gradients

    monkeypatch.setattr(chunks, "backward", backward)


@mutant("grad_hidden_over_many_chunks_of_bf16")
def grad_hidden_accumulates_in_bf16(monkeypatch):
    original = chunks._HiddenGrad.__init__

    def init(self, head, *args):
        original(self, head, *args)
        self._sum_TH = self._sum_TH.to(head.tokens.dtype)

    monkeypatch.setattr(chunks._HiddenGrad, "__init__", init)


@mutant("every_reduction", "frozen_hidden_or_weight")
def softmax_term_dropped(monkeypatch):
    replace_coefficients(
        monkeypatch,
        lambda grad, c: dataclasses.replace(c, softmax_over_sum_T=torch.zeros_like(c.softmax_over_sum_T)),
    )


@mutant("label_out_of_range_is_nan_in_its_row")
def labels_unchecked(monkeypatch):
    original = call.Labels.of

    def of(target_T, one_call):
        labels = original(target_T, one_call)
        return dataclasses.replace(labels, no_class_T=torch.zeros_like(labels.no_class_T))

    monkeypatch.setattr(call.Labels, "of", of)


@mutant("every_reduction", "odd_shapes")
def label_lost_at_the_first_column_of_a_chunk(monkeypatch):
    original = generic._label_column

    def label_column(label_B, first_class, width):
        here_B, column_B = original(label_B, first_class, width)
        return here_B & (column_B > 0), column_B

    monkeypatch.setattr(generic, "_label_column", label_column)


@mutant("bias_and_its_gradient")
def bias_added_twice(monkeypatch):
    monkeypatch.setattr(
        chunks, "project_", lambda out, h, w, b: matmul.project_(out, h, w, None if b is None else 2 * b)
    )


@mutant("bias_and_its_gradient")
def bias_gradient_of_the_first_chunk_only(monkeypatch):
    original = per_token._with_padded_rows

    def with_padded_rows(grad_bias, bias):
        grad_bias[CHUNK_WIDTH:] = 0
        return original(grad_bias, bias)

    monkeypatch.setattr(per_token, "_with_padded_rows", with_padded_rows)


@mutant("logit_scale", "softcap_changes_the_loss")
def logit_transform_dropped(monkeypatch):
    monkeypatch.setattr(loss.LossOptions, "transform", LogitTransform())


@mutant("softcap_changes_the_loss")
def derivative_of_the_softcap_dropped(monkeypatch):
    original = generic.GenericRowKernels.gradient_

    def gradient_(self, logits, chunk, coefficients):
        logits.copy_(generic.transformed(logits, chunk.transform))
        original(self, logits, dataclasses.replace(chunk, transform=LogitTransform()), coefficients)

    monkeypatch.setattr(generic.GenericRowKernels, "gradient_", gradient_)


@mutant("z_loss")
def gradient_of_the_z_loss_dropped(monkeypatch):
    original = formula.Formula.coefficients
    monkeypatch.setattr(
        formula.Formula,
        "coefficients",
        lambda self, *args: original(dataclasses.replace(self, z_loss_weight=0.0), *args),
    )


@mutant("label_smoothing_with_class_weights")
def smoothing_ignores_class_weights(monkeypatch):
    original = formula.Formula.of

    def of(options, num_classes, target_T, class_weight):
        made = original(options, num_classes, target_T, class_weight)
        return dataclasses.replace(made, total_weight=float(num_classes))

    monkeypatch.setattr(formula.Formula, "of", of)


@mutant("several_losses_on_one_weight", "every_reduction")
def weight_gradient_of_one_chunk_repeated(monkeypatch):
    original = chunks._weight_rows_grad
    monkeypatch.setattr(
        chunks,
        "_weight_rows_grad",
        lambda grad, logits, hidden, start, stop, scale: original(grad, logits, hidden, 0, stop - start, scale),
    )


@mutant("float16_with_widely_spread_logits")
def float16_logit_gradients_unscaled(monkeypatch):
    """Underflows only once a mean over many tokens makes the coefficients small."""

    def tiny(coefficients, sum_exp_T, class_weight, logit_scale):
        scale = torch.tensor(2.0**-14)
        scaled = {name: getattr(coefficients, name) * scale for name in ("softmax_over_sum_T", "onehot_T")}
        return dataclasses.replace(coefficients, **scaled), scale

    monkeypatch.setattr(per_token, "scaled_for_float16", tiny)


@mutant("empty_micro_batch", "every_token_ignored")
def loss_is_detached(monkeypatch):
    original = per_token.LossPerToken.apply
    monkeypatch.setattr(per_token.LossPerToken, "apply", lambda *args: original(*args).detach())


@mutant("results_repeat_bit_for_bit")
def results_depend_on_a_random_number(monkeypatch):
    replace_coefficients(
        monkeypatch, lambda grad, c: dataclasses.replace(c, onehot_T=c.onehot_T * (1 + 1e-2 * torch.rand(())))
    )


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, monkeypatch):
    subject = use(Subject("generic"), monkeypatch)
    MUTANTS[name].patch(monkeypatch)
    for case in MUTANTS[name].caught_by:
        with pytest.raises((AssertionError, RuntimeError, IndexError)):
            CASES[case].run(subject)
            pytest.fail(f"{case} passed")
