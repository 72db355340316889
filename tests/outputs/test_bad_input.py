"""Bad tensors and numbers at every output: one clear error that names what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loongforge import TeacherHead, TeacherTopK, linear_distillation, linear_logprobs, linear_top_k

HIDDEN, WEIGHT, TARGET = torch.randn(6, 8), torch.randn(11, 8), torch.arange(6)
HEAD = TeacherHead(torch.randn(6, 5), torch.randn(11, 5), torch.randn(11))
KNOWN = TeacherTopK(torch.full((6, 3), -2.0), torch.arange(3).expand(6, 3))
INF, NAN = float("inf"), float("nan")


def distilled(teacher):
    def run(hidden, weight, target, **options):
        return linear_distillation(hidden, weight, teacher, target=target, **options)

    return run


def without_target(function, *arguments):
    return lambda hidden, weight, target, **options: function(hidden, weight, *arguments, **options)


FUNCTIONS = {
    "logprobs": linear_logprobs,
    "top_k": without_target(linear_top_k, 3),
    "head": distilled(HEAD),
    "head without labels": without_target(linear_distillation, HEAD),
    "known": distilled(KNOWN),
    "known without labels": without_target(linear_distillation, KNOWN),
}
# name: (arguments that replace good ones, exception, what the message must contain)
EVERYWHERE = {
    "hidden of one dimension": ({"hidden": HIDDEN[0]}, ValueError, ("hidden must be [..., H]", "two dim", "got [8]")),
    "hidden of none": ({"hidden": HIDDEN[0, 0]}, ValueError, ("hidden must be [..., H]", "got []")),
    "hidden of text": ({"hidden": "h"}, TypeError, ("hidden must be a torch.Tensor, got str",)),
    "no hidden": ({"hidden": None}, TypeError, ("hidden must be a torch.Tensor, got NoneType",)),
    "integer hidden": ({"hidden": HIDDEN.long()}, TypeError, ("hidden must be bfloat16", "got torch.int64")),
    "complex hidden": ({"hidden": HIDDEN.cfloat()}, TypeError, ("hidden must be bfloat16", "complex64")),
    "wide hidden": ({"hidden": HIDDEN.double()}, TypeError, ("hidden is torch.float64", "is torch.float32", "cast")),
    "sparse hidden": ({"hidden": HIDDEN.to_sparse()}, TypeError, ("hidden must be a dense tensor", "sparse")),
    "other H": ({"hidden": HIDDEN[:, :7]}, ValueError, ("H = 8", "[11, 8]", "got [6, 7]")),
    "flat weight": ({"weight": WEIGHT.flatten()}, ValueError, ("weight must be [V, H]", "[88]")),
    "weight without rows": ({"weight": WEIGHT[:0]}, ValueError, ("weight must be [V, H]", "[0, 8]", "not gathered")),
    "weight of three dimensions": ({"weight": WEIGHT[None]}, ValueError, ("weight must be [V, H]", "[1, 11, 8]")),
    "weight of another dtype": ({"weight": WEIGHT.half()}, TypeError, ("weight is torch.float16", "autocast")),
    "fp8 weight": ({"weight": WEIGHT.to(torch.float8_e4m3fn)}, TypeError, ("weight must be", "float8", "dequantise")),
    "weight elsewhere": (
        {"weight": WEIGHT.to("meta")},
        ValueError,
        ("weight is on meta", "hidden on cpu", "one device"),
    ),
    "a module": ({"weight": torch.nn.Linear(8, 11)}, TypeError, ("weight must be a torch.Tensor, got Linear",)),
    "short bias": ({"bias": torch.ones(10)}, ValueError, ("bias must have shape [11]", "got [10]")),
    "bias of two dimensions": ({"bias": torch.ones(1, 11)}, ValueError, ("bias must have shape [11]", "got [1, 11]")),
    "bias of another dtype": ({"bias": torch.ones(11).half()}, TypeError, ("bias is torch.float16", "cast")),
    "bias elsewhere": ({"bias": torch.ones(11, device="meta")}, ValueError, ("bias is on meta", "one device")),
    "bias number": ({"bias": 1.0}, TypeError, ("bias must be a torch.Tensor, got float",)),
    "temperature 0": ({"temperature": 0}, ValueError, ("temperature must be finite and between", "got 0")),
    "infinite temperature": ({"temperature": INF}, ValueError, ("temperature must be finite", "got inf")),
    "NaN temperature": ({"temperature": NAN}, ValueError, ("temperature must be finite", "got nan")),
    "temperature text": ({"temperature": "1"}, TypeError, ("temperature must be a number", "'1' of type str")),
    "temperature True": ({"temperature": True}, TypeError, ("temperature must be a number", "of type bool")),
    "softcap 0": ({"softcap": 0.0}, ValueError, ("softcap must be a number, finite and > 0", "got 0.0")),
    "negative softcap": ({"softcap": -1}, ValueError, ("softcap must be a number, finite and > 0", "got -1")),
    "softcap tensor": ({"softcap": torch.ones(())}, TypeError, ("softcap must be a number", "of type Tensor")),
    "scale 0": ({"logit_scale": 0.0}, ValueError, ("logit_scale must be a number, finite and not 0", "got 0.0")),
    "NaN scale": ({"logit_scale": NAN}, ValueError, ("logit_scale must be a number, finite", "got nan")),
    "scale None": ({"logit_scale": None}, TypeError, ("logit_scale must be a number", "None of type NoneType")),
    "vocab_size 0": ({"vocab_size": 0}, ValueError, ("vocab_size must be None or at least 1", "got 0")),
    "vocab_size too large": ({"vocab_size": 12}, ValueError, ("11 rows", "vocab_size = 12")),
    "float vocab_size": ({"vocab_size": 9.0}, TypeError, ("vocab_size must be an int", "9.0 of type float")),
    "no group": ({"tp_group": "world"}, TypeError, ("tp_group must be a torch.distributed.ProcessGroup", "got str")),
    "sequence_parallel alone": ({"sequence_parallel": True}, ValueError, ("sequence_parallel=True needs tp_group=",)),
    "fp32_logits 1": ({"fp32_logits": 1}, TypeError, ("fp32_logits must be True or False", "got 1")),
    "unknown impl": ({"impl": "cuda"}, ValueError, ("impl must be one of 'auto'", "got 'cuda'")),
    "misspelled option": ({"soft_cap": 1.0}, TypeError, ("unknown option 'soft_cap'", "did you mean softcap?")),
    "another function's option": ({"label_smoothing": 0.1}, NotImplementedError, ("has no option label_smoothing",)),
}
LABELS = {
    "float labels": ({"target": TARGET.float()}, TypeError, ("integer class indices", "float32")),
    "bool labels": ({"target": TARGET > 2}, TypeError, ("integer class indices", "bool", "int64")),
    "fewer labels": ({"target": TARGET[:5]}, ValueError, ("target must have shape [6]", "got [5]")),
    "labels of another shape": ({"target": TARGET.view(2, 3)}, ValueError, ("target must have shape [6]", "[2, 3]")),
    "labels elsewhere": ({"target": TARGET.to("meta")}, ValueError, ("target is on meta", "one device")),
    "a list of labels": ({"target": [1, 2]}, TypeError, ("target must be a torch.Tensor, got list",)),
    "float ignore_index": ({"ignore_index": 1.0}, TypeError, ("ignore_index must be an int", "float")),
    "negative budget": ({"logits_budget_mb": -1}, ValueError, ("logits_budget_mb", 'or "all"', "-1")),
}
ONE = {
    "logprobs": {
        "negative z-loss": ({"z_loss_weight": -1.0}, ValueError, ("z_loss_weight", ">= 0", "-1.0")),
        "bound of 0": ({"compact_tokens": 0}, ValueError, ("compact_tokens", "at least 1", "0")),
    },
    "head": {
        "unknown reduction": ({"reduction": "avg"}, ValueError, ("reduction must be one of 'mean'", "'avg'")),
        "normalizer per token": (
            {"normalizer": torch.ones(6)},
            ValueError,
            ("normalizer must be", "one real element", "[6]"),
        ),
        "normalizer text": ({"normalizer": "6"}, TypeError, ("normalizer must be a number or a scalar", "str")),
    },
}
CASES = [(function, name, row) for function in FUNCTIONS for name, row in EVERYWHERE.items()]
CASES += [(function, name, row) for function in ("logprobs", "head", "known") for name, row in LABELS.items()]
CASES += [(function, name, row) for function, rows in ONE.items() for name, row in rows.items()]


def refused(exception, facts, run):
    with pytest.raises(exception) as caught:
        run()
    assert type(caught.value) is exception
    for fact in facts:
        assert fact in str(caught.value), str(caught.value)


@pytest.mark.parametrize(("function", "row"), [pytest.param(f, row, id=f"{f}: {name}") for f, name, row in CASES])
def test_bad_input(function, row):
    changes, exception, facts = row
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "target": TARGET, **changes}
    refused(exception, facts, lambda: FUNCTIONS[function](**arguments))


# name: (teacher, exception, what the message must contain)
TEACHERS = {
    "softcap -1": (replace(HEAD, softcap=-1), ValueError, ("teacher.softcap must be", "finite and > 0", "got -1")),
    "softcap text": (replace(HEAD, softcap="5"), TypeError, ("teacher.softcap must be a number", "'5' of type str")),
    "NaN softcap": (replace(HEAD, softcap=NAN), ValueError, ("teacher.softcap must be a number, finite", "nan")),
    "scale 0": (replace(HEAD, logit_scale=0), ValueError, ("teacher.logit_scale must be a number", "not 0", "got 0")),
    "scale None": (replace(HEAD, logit_scale=None), TypeError, ("teacher.logit_scale must be a number", "NoneType")),
    "scale True": (replace(HEAD, logit_scale=True), TypeError, ("teacher.logit_scale must be a number", "bool")),
    "no hidden": (replace(HEAD, hidden=None), TypeError, ("teacher.hidden must be a torch.Tensor, got NoneType",)),
    "hidden of one dimension": (
        replace(HEAD, hidden=HEAD.hidden[0]), ValueError, ("teacher.hidden must be [6] + [H_teacher]", "got [5]"),
    ),
    "hidden of none": (replace(HEAD, hidden=torch.ones(())), ValueError, ("teacher.hidden must be [6] + [H", "got []")),
    "fewer tokens": (replace(HEAD, hidden=HEAD.hidden[:5]), ValueError, ("teacher.hidden must be [6]", "got [5, 5]")),
    "integer hidden": (replace(HEAD, hidden=HEAD.hidden.long()), TypeError, ("teacher.hidden must be bf", "int64")),
    "hidden of another dtype": (
        replace(HEAD, hidden=HEAD.hidden.half()), TypeError, ("teacher.hidden is torch.float16",),
    ),
    "hidden elsewhere": (replace(HEAD, hidden=HEAD.hidden.to("meta")), ValueError, ("teacher.hidden is on meta",)),
    "sparse hidden": (replace(HEAD, hidden=HEAD.hidden.to_sparse()), TypeError, ("teacher.hidden must be a dense",)),
    "flat weight": (replace(HEAD, weight=HEAD.weight[0]), ValueError, ("teacher.weight must be [V, 5]", "got [5]")),
    "other width": (replace(HEAD, weight=HEAD.weight[:, :4]), ValueError, ("teacher.weight must be [V, 5]", "[11, 4]")),
    "other rows": (replace(HEAD, weight=HEAD.weight[:9]), ValueError, ("teacher.weight has 9 rows and weight 11",)),
    "int8 weight": (replace(HEAD, weight=HEAD.weight.to(torch.int8)), TypeError, ("teacher.weight must be bf", "int8")),
    "weight elsewhere": (replace(HEAD, weight=HEAD.weight.to("meta")), ValueError, ("teacher.weight is on meta",)),
    "short bias": (replace(HEAD, bias=torch.ones(3)), ValueError, ("teacher.bias must have shape [11]", "got [3]")),
    "bias number": (replace(HEAD, bias=1.0), TypeError, ("teacher.bias must be a torch.Tensor, got float",)),
    "integer logprobs": (
        replace(KNOWN, logprobs=KNOWN.logprobs.long()), TypeError, ("teacher.logprobs must be floats", "torch.int64"),
    ),
    "fp8 logprobs": (
        replace(KNOWN, logprobs=KNOWN.logprobs.to(torch.float8_e4m3fn)), TypeError, ("teacher.logprobs must", "float8"),
    ),
    "logprobs of one dimension": (
        replace(KNOWN, logprobs=KNOWN.logprobs[0]), ValueError, ("teacher.logprobs", "must be [6] + [k]", "[3]"),
    ),
    "no logprobs": (replace(KNOWN, logprobs=None), TypeError, ("teacher.logprobs must be a torch.Tensor",)),
    "logprobs elsewhere": (
        replace(KNOWN, logprobs=KNOWN.logprobs.to("meta")), ValueError, ("teacher.logprobs is on meta", "one device"),
    ),
    "float ids": (replace(KNOWN, ids=KNOWN.ids.float()), TypeError, ("teacher.ids int64 or int32", "torch.float32")),
    "ids of no dimension": (replace(KNOWN, ids=torch.tensor(1)), ValueError, ("must be [6] + [k]", "[]")),
    "no class": (
        replace(KNOWN, ids=KNOWN.ids[:, :0], logprobs=KNOWN.logprobs[:, :0]), ValueError, ("k from 1 to 128", "[6, 0]"),
    ),
    "more classes than there are": (
        TeacherTopK(torch.full((6, 12), -9.0), torch.arange(12).expand(6, 12)), ValueError, ("vocabulary of 11",),
    ),
    "ids elsewhere": (replace(KNOWN, ids=KNOWN.ids.to("meta")), ValueError, ("teacher.ids is on meta", "one device")),
    "unknown rest": (replace(KNOWN, rest="drop"), ValueError, ("rest must be one of 'bucket'", "'drop'")),
    "a tuple": ((KNOWN.logprobs, KNOWN.ids), TypeError, ("teacher must be a TeacherHead or a TeacherTopK, got tuple",)),
    "the class": (TeacherHead, TypeError, ("teacher must be a TeacherHead or a TeacherTopK, got type",)),
}  # fmt: skip


@pytest.mark.parametrize("autocast", (False, True))
@pytest.mark.parametrize("name", TEACHERS)
def test_bad_teacher(name, autocast):
    """Autocast takes any float, and nothing else."""
    teacher, exception, facts = TEACHERS[name]
    autocast = autocast and name != "hidden of another dtype"
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        refused(exception, facts, lambda: linear_distillation(HIDDEN, WEIGHT, teacher))


def test_the_arguments_of_the_tables_are_good_without_their_changes():
    for name, function in FUNCTIONS.items():
        out = function(HIDDEN, WEIGHT, TARGET)
        assert (out if isinstance(out, torch.Tensor) else out[0]).isfinite().all(), name


def test_numbers_of_a_teacher_out_of_range_at_the_temperature_of_the_call():
    refused(
        ValueError,
        ("teacher.softcap must be a number",),
        lambda: linear_distillation(HIDDEN, WEIGHT, replace(HEAD, softcap=1e-28), temperature=1e4),
    )
