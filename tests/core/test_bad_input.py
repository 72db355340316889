"""Bad input: one clear error saying what was expected, what came and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import loongforge
from loongforge import LinearCrossEntropy, LossOptions, linear_cross_entropy
from tests.helpers import make_inputs

HIDDEN, WEIGHT, TARGET = torch.randn(6, 8), torch.randn(11, 8), torch.arange(6)


def quantised(module):
    """A weight of a class such as other packages have: its dtype says float32, its data are something else."""
    return torch.randn(11, 8).as_subclass(type("Quantised", (torch.Tensor,), {"__module__": module}))


# name: (arguments that replace good ones, options, exception, what the message must contain)
TABLE = {
    "ZeRO-3 shard": ({"weight": torch.empty(0)}, {}, ValueError, ("shape [0]", "not gathered", "GatheredParameters")),
    "weight without rows": ({"weight": WEIGHT[:0]}, {}, ValueError, ("[0, 8]", "was not gathered", "FSDP")),
    "flat FSDP parameter": ({"weight": WEIGHT.flatten()}, {}, ValueError, ("[88]", "was not gathered")),
    "other H": ({"weight": WEIGHT[:, :7]}, {}, ValueError, ("H = 7", "[11, 7]", "got [6, 8]")),
    "hidden without tokens": ({"hidden": HIDDEN[0]}, {}, ValueError, ("[..., H]", "got [8]")),
    "fewer labels": ({"target": TARGET[:5]}, {}, ValueError, ("[6]", "got [5]", "6 hidden rows, 5 labels")),
    "labels of another shape": ({"target": TARGET.view(2, 3)}, {}, ValueError, ("shape [6]", "got [2, 3]")),
    "class probabilities": ({"target": torch.rand(6, 11)}, {}, TypeError, ("integer", "float32", "not supported")),
    "float labels": ({"target": TARGET.float()}, {}, TypeError, ("integer class indices", "float32")),
    "bool labels": ({"target": TARGET > 2}, {}, TypeError, ("integer class indices", "bool", "int64")),
    "mixed dtypes": ({"hidden": HIDDEN.bfloat16()}, {}, TypeError, ("bfloat16", "weight is torch.float32", "autocast")),
    "bias of another dtype": ({"bias": torch.ones(11).half()}, {}, TypeError, ("bias is torch.float16", "autocast")),
    "integer weight": ({"weight": WEIGHT.to(torch.int8)}, {}, TypeError, ("weight must be", "int8", "dequantise")),
    "fp8 weight": ({"weight": WEIGHT.to(torch.float8_e4m3fn)}, {}, TypeError, ("float8_e4m3fn", "dequantise")),
    "complex hidden": ({"hidden": HIDDEN.to(torch.complex64)}, {}, TypeError, ("hidden must be", "complex64")),
    "weight on another device": ({"weight": WEIGHT.to("meta")}, {}, ValueError, ("weight is on meta", "hidden on cpu")),
    "labels on another device": ({"target": TARGET.to("meta")}, {}, ValueError, ("target is on meta", "one device")),
    "a list": ({"target": [1, 2]}, {}, TypeError, ("target must be a torch.Tensor", "got list")),
    "a module": ({"weight": nn.Linear(8, 11)}, {}, TypeError, ("weight must be a torch.Tensor", "got Linear")),
    "short bias": ({"bias": torch.ones(10)}, {}, ValueError, ("shape [11]", "got [10]")),
    "short class_weight": ({"class_weight": torch.ones(10)}, {}, ValueError, ("[11]", "global vocabulary", "got [10]")),
    "integer class_weight": ({"class_weight": torch.ones(11, dtype=torch.long)}, {}, ValueError, ("float", "int64")),
    "normalizer with sum": ({"normalizer": 3}, {"reduction": "sum"}, ValueError, ("reduction='mean'", "'sum'")),
    "normalizer per token": ({"normalizer": torch.ones(6)}, {}, ValueError, ("one real element", "[6]")),
    "normalizer complex": ({"normalizer": torch.tensor(1j)}, {}, ValueError, ("one real element", "torch.complex64")),
    "normalizer of 400 digits": ({"normalizer": 10**400}, {}, ValueError, ("fit torch.float32", "3.4e+38")),
    "normalizer for float64": ({"normalizer": -1e300}, {}, ValueError, ("fit torch.float32", "3.4e+38")),
    "normalizer elsewhere": ({"normalizer": torch.ones((), device="meta")}, {}, ValueError, ("on cpu", "on meta")),
    "normalizer text": ({"normalizer": "6"}, {}, TypeError, ("a number or a scalar tensor", "str")),
    "unknown reduction": ({}, {"reduction": "avg"}, ValueError, ("'mean', 'sum', 'none'", "'avg'")),
    "unknown impl": ({}, {"impl": "cuda"}, ValueError, ("'auto', 'flydsl', 'triton', 'generic'", "'cuda'")),
    "impl without a device": ({}, {"impl": "flydsl"}, RuntimeError, ("'flydsl'", "the device is cpu", "impl='auto'")),
    "unknown formula": ({}, {"label_smoothing_formula": "x"}, ValueError, ("'torch', 'megatron'", "'x'")),
    "misspelled option": ({}, {"ignore_idx": 1}, TypeError, ("'ignore_idx'", "did you mean ignore_index?", "softcap")),
    "token weight number": ({"token_weight": 1}, {}, TypeError, ("token_weight must be a torch.Tensor", "int")),
    "token weight shape": ({"token_weight": torch.ones(4)}, {}, ValueError, ("token_weight", "shape [6]", "[4]")),
    "bound of 0": ({}, {"compact_tokens": 0}, ValueError, ("compact_tokens", "at least 1", "0")),
    "bound of text": ({}, {"compact_tokens": "all"}, TypeError, ("compact_tokens must be an int", "'all'")),
    "fp32_grad_hidden None": ({}, {"fp32_grad_hidden": None}, TypeError, ("fp32_grad_hidden must be True or False",)),
    "nothing to sum": ({}, {"fp32_grad_hidden": True}, ValueError, ("fp32_grad_hidden=True needs tp_group=",)),
    "fp32_logits 1": ({}, {"fp32_logits": 1}, TypeError, ("fp32_logits must be True or False", "1")),
    "adapter alone": ({"adapter": torch.ones(6, 2)}, {}, TypeError, ("adapter must be a pair", "Tensor")),
    "adapter rows": (
        {"adapter": (torch.ones(6, 2), torch.ones(10, 2))},
        {},
        ValueError,
        ("[11, R] like weight's rows", "[10, 2]"),
    ),
    "adapter dtype": (
        {"adapter": (torch.ones(6, 2).half(), torch.ones(11, 2))},
        {},
        TypeError,
        ("adapter torch.float16", "cast"),
    ),
    "trained base": (
        {"weight": torch.ones(11, 8).requires_grad_(), "adapter": (torch.ones(6, 2), torch.ones(11, 2))},
        {},
        ValueError,
        ("weight requires a gradient beside an adapter", "weight.detach()"),
    ),
    "torchao weight": ({"weight": quantised("torchao.dtypes")}, {}, TypeError, ("torchao", "weight.dequantize()")),
    "bitsandbytes weight": (
        {"weight": quantised("bitsandbytes.nn")},
        {},
        TypeError,
        ("bitsandbytes.nn.Quantised", "dequantize_4bit(weight"),
    ),
    "TE weight": (
        {"weight": quantised("transformer_engine.pytorch")},
        {},
        TypeError,
        ("transformer_engine", "keep it out of"),
    ),
    "smoothing of 1": ({}, {"label_smoothing": 1.0}, ValueError, ("in [0, 1)", "1.0")),
    "negative smoothing": ({}, {"label_smoothing": -0.1}, ValueError, ("in [0, 1)", "-0.1")),
    "smoothing text": ({}, {"label_smoothing": "0.1"}, TypeError, ("label_smoothing", "'0.1' of type str")),
    "NaN z-loss": ({}, {"z_loss_weight": float("nan")}, ValueError, ("z_loss_weight", "finite", "nan")),
    "negative z-loss": ({}, {"z_loss_weight": -1.0}, ValueError, ("z_loss_weight", ">= 0", "-1.0")),
    "softcap 0": ({}, {"softcap": 0.0}, ValueError, ("softcap", "> 0", "0.0")),
    "softcap True": ({}, {"softcap": True}, TypeError, ("softcap", "True of type bool")),
    "scale 0": ({}, {"logit_scale": 0}, ValueError, ("logit_scale", "not 0")),
    "infinite scale": ({}, {"logit_scale": float("inf")}, ValueError, ("logit_scale", "finite", "inf")),
    "float ignore_index": ({}, {"ignore_index": 1.0}, TypeError, ("ignore_index must be an int", "float")),
    "vocab_size 0": ({}, {"vocab_size": 0}, ValueError, ("vocab_size must be None or at least 1", "0")),
    "vocab_size too large": ({}, {"vocab_size": 12}, ValueError, ("11 rows", "vocab_size = 12")),
    "sequence_parallel alone": ({}, {"sequence_parallel": True}, ValueError, ("needs tp_group=",)),
    "sequence_parallel 1": ({}, {"sequence_parallel": 1}, TypeError, ("True or False", "got 1")),
    "negative budget": ({}, {"logits_budget_mb": -1}, ValueError, ('or "all"', "-1")),
    "budget text": ({}, {"logits_budget_mb": "12"}, TypeError, ('or "all"', "'12'")),
    "float budget": ({}, {"logits_budget_mb": 1.5}, TypeError, ("whole number of MiB", "1.5")),
    "one class": (
        {"weight": WEIGHT[:1]},
        {"label_smoothing": 0.1, "label_smoothing_formula": "megatron"},
        ValueError,
        ("V - 1", "at least 2"),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_bad_input(name):
    changes, options, exception, facts = TABLE[name]
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "target": TARGET, **changes}
    with pytest.raises(exception) as caught:
        linear_cross_entropy(**arguments, **options)
    assert type(caught.value) is exception
    for fact in facts:
        assert fact in str(caught.value), str(caught.value)


def test_the_arguments_of_the_table_are_good_without_its_changes():
    assert linear_cross_entropy(HIDDEN, WEIGHT, TARGET).isfinite()


def test_module_refuses_when_it_is_built():
    for options, exception in (({"reduction": "avg"}, ValueError), ({"ignoreindex": 1}, TypeError)):
        with pytest.raises(exception):
            LinearCrossEntropy(**options)


def test_options_are_frozen_and_keyword_only():
    with pytest.raises(TypeError):
        LossOptions("sum")
    with pytest.raises(AttributeError):
        LossOptions().reduction = "sum"


def test_dtensor(tmp_path):
    """Refused with its placements before a kernel could read a shard as if it were the whole (Automodel #1087)."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        weight = nn.Parameter(distribute_tensor(WEIGHT, init_device_mesh("cpu", (1,)), [Shard(0)]))
        with pytest.raises(TypeError, match=r"weight is a DTensor with placements .*Shard.*to_local\(\).*full_tensor"):
            linear_cross_entropy(HIDDEN, weight, TARGET)
        assert linear_cross_entropy(HIDDEN, weight.to_local(), TARGET).isfinite()
    finally:
        dist.destroy_process_group()


def test_torch_func_is_refused():
    inputs = make_inputs()
    with pytest.raises(RuntimeError, match="torch.func|functorch|setup_context"):
        torch.func.grad(loongforge.linear_cross_entropy)(inputs.hidden, inputs.weight, inputs.target)
