"""Names, fields and signatures of the outputs: changed on purpose or not at all."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

import loongforge
from loongforge import LogProbs, LossOptions, TeacherHead, TeacherTopK, TopK

EMPTY = inspect.Parameter.empty
DEFAULTS = {field.name: field.default for field in fields(LossOptions)}
HEAD = ("softcap", "logit_scale", "vocab_size", "tp_group", "sequence_parallel", "fp32_logits", "impl")
SIGNATURES = {
    "linear_logprobs": (
        {"target": EMPTY, "bias": None, "temperature": 1.0, "entropy": False, "predictions": False},
        ("ignore_index", "z_loss_weight", *HEAD, "compact_tokens", "logits_budget_mb"),
    ),
    "linear_top_k": ({"k": EMPTY, "bias": None, "temperature": 1.0}, HEAD),
    "linear_distillation": (
        {
            "teacher": EMPTY,
            "divergence": "forward",
            "target": None,
            "bias": None,
            "temperature": 1.0,
            "normalizer": None,
        },
        ("reduction", "ignore_index", *HEAD, "logits_budget_mb"),
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_spell_the_options_out(name):
    own, options = SIGNATURES[name]
    parameters = inspect.signature(getattr(loongforge, name)).parameters
    expected = {"hidden": EMPTY, "weight": EMPTY, **own, **{option: DEFAULTS[option] for option in options}}
    assert {key: parameter.default for key, parameter in parameters.items()} == expected
    keyword_only = [key for key, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert set(keyword_only) == {key for key, default in expected.items() if default is not EMPTY}
    text = inspect.getdoc(getattr(loongforge, name))
    assert all(word in text for word in ("[..., H]", "Returns:", "Raises:", "NotImplementedError"))


def test_fields():
    assert LogProbs._fields == ("logprobs", "log_sum_exp", "entropy", "predictions", "accuracy", "z_loss")
    assert TopK._fields == ("logprobs", "ids", "log_sum_exp")
    assert [field.name for field in fields(TeacherHead)] == ["hidden", "weight", "bias", "logit_scale", "softcap"]
    assert [field.name for field in fields(TeacherTopK)] == ["logprobs", "ids", "rest"]
