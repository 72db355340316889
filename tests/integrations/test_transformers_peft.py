"""PEFT around a fused model: adapters on the output layer and elsewhere, and copies of the layer that train."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch

from loongforge.integrations.transformers import fuse_loss, unfuse_loss
from tests.helpers import relative
from tests.integrations.tiny_models import IDS, LABELS, assert_same_step, refusal, tiny, with_lora

if importlib.util.find_spec("peft") is None:
    pytest.skip("needs peft (pip install peft)", allow_module_level=True)

import peft


def test_lora_on_the_output_layer():
    model, fused = with_lora(tiny()), fuse_loss(with_lora(tiny()))
    assert_same_step(model, fused)
    names = [name for name, p in fused.named_parameters() if p.grad is not None]
    assert any("lm_head.lora_A" in name for name in names) and any("lm_head.lora_B" in name for name in names)
    assert not any("base_layer" in name for name in names)
    assert torch.equal(fused(IDS).logits, model(IDS).logits)
    with fused.disable_adapter(), model.disable_adapter():
        assert relative(fused(IDS, labels=LABELS).loss, model(IDS, labels=LABELS).loss) < 1e-6


def test_lora_elsewhere_and_dropout():
    assert_same_step(
        with_lora(tiny(), target_modules=["q_proj"]), fuse_loss(with_lora(tiny(), target_modules=["q_proj"]))
    )
    losses = []
    for model in (with_lora(tiny(), lora_dropout=0.5), fuse_loss(with_lora(tiny(), lora_dropout=0.5))):
        torch.manual_seed(2)
        losses.append(model.train()(input_ids=IDS, labels=LABELS).loss)
    assert relative(losses[1], losses[0]) < 1e-6


def test_lora_that_is_refused():
    model = fuse_loss(tiny())
    wrapped = with_lora(model)
    with pytest.raises(NotImplementedError, match="replaced by a Linear after fuse_loss"):
        wrapped(input_ids=IDS, labels=LABELS)
    dora = fuse_loss(with_lora(tiny(), use_dora=True))
    with pytest.raises(NotImplementedError, match="one plain LoRA adapter .* without DoRA"):
        dora(input_ids=IDS, labels=LABELS)
    for config in (
        peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]),
        peft.VeraConfig(target_modules=["lm_head"], r=4),
        peft.LoHaConfig(target_modules=["lm_head"], r=4),
    ):
        name = rf"plain torch.nn.Linear .* got peft.tuners.{config.peft_type.value.lower()}.layer"
        refusal(peft.get_peft_model(tiny(), config), NotImplementedError, name)
    tokens = {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]}
    refusal(with_lora(tiny(tie_word_embeddings=True), **tokens), NotImplementedError, "TrainableTokensWrapper")
    assert_same_step(with_lora(tiny(), **tokens), fuse_loss(with_lora(tiny(), **tokens)))


def test_adapters_chosen_per_sample_are_refused():
    """PEFT hands ``adapter_names`` to the LoRA layers themselves."""
    model = with_lora(tiny()).eval()
    names = ["__base__", "default"]
    expected = model(input_ids=IDS, adapter_names=names).logits
    fuse_loss(model)
    assert torch.equal(model(input_ids=IDS, adapter_names=names).logits, expected)
    with pytest.raises(NotImplementedError, match=r"more than its hidden states \(adapter_names\).*unfuse_loss"):
        model(input_ids=IDS, labels=LABELS, adapter_names=names)


def pairs(prepare, **config):
    """A model with an adapter and a fused one, each after ``prepare``."""
    models = [with_lora(tiny(), **config), fuse_loss(with_lora(tiny(), **config))]
    for model in models:
        torch.manual_seed(3)
        prepare(model)
    return models


def output_layer(model):
    return model.get_base_model().get_output_embeddings()


SAVED = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}


@pytest.mark.parametrize("when", ("before", "after"))
def test_a_trained_copy_of_the_output_layer(when):
    """``modules_to_save``: the copy trains where the adapter is on, the original answers where it is off."""
    model = with_lora(tiny(), **SAVED)
    fused = fuse_loss(with_lora(tiny(), **SAVED)) if when == "before" else with_lora(fuse_loss(tiny()), **SAVED)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_same_step(model, fused)
    for one in (model, fused):
        assert output_layer(one).modules_to_save["default"].weight.grad is not None
        with torch.no_grad():
            output_layer(one).modules_to_save["default"].weight.mul_(0.5)
    on = fused(input_ids=IDS, labels=LABELS).loss
    assert relative(on, model(input_ids=IDS, labels=LABELS).loss) < 1e-6
    with fused.disable_adapter(), model.disable_adapter():
        off = fused(input_ids=IDS, labels=LABELS).loss
        assert relative(off, model(input_ids=IDS, labels=LABELS).loss) < 1e-6 < relative(off, on)
    unfuse_loss(fused)
    assert torch.equal(fused(input_ids=IDS, labels=LABELS).logits, model(input_ids=IDS, labels=LABELS).logits)


def test_hooks_on_a_trained_copy_are_in_force():
    for part in ("wrapper", "copy"):

        def halve(model, part=part):
            layer = output_layer(model)
            layer = layer if part == "wrapper" else layer.modules_to_save["default"]
            layer.register_forward_hook(lambda module, args, output: 0.5 * output)

        with pytest.warns(UserWarning, match="since the forward hook .*halve"):
            assert_same_step(*pairs(halve, **SAVED))


@pytest.mark.parametrize("part", ("base_layer", "lora_A", "lora_B", "lora_dropout"))
@pytest.mark.parametrize("kind", ("forward hook", "forward pre-hook"))
def test_hooks_on_the_parts_of_an_adapter_are_in_force(part, kind):
    def halve(model):
        module = getattr(output_layer(model), part)
        module = module if part == "base_layer" else module["default"]
        if kind == "forward hook":
            module.register_forward_hook(lambda module, args, output: 0.5 * output)
        else:
            module.register_forward_pre_hook(lambda module, args: (0.5 * args[0],))

    models = pairs(halve, lora_dropout=1e-9)
    if part in ("lora_A", "lora_dropout"):  # which run
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert_same_step(*models)
    else:
        with pytest.warns(UserWarning, match=f"since the {kind} .*halve.*acts on the output layer"):
            assert_same_step(*models)


def test_merged_and_then_disabled():
    """PEFT takes the adapter out of a merged weight when it is switched off."""
    model, fused = pairs(lambda model: model.merge_adapter())
    merged = fused(input_ids=IDS, labels=LABELS).loss
    assert relative(merged, model(input_ids=IDS, labels=LABELS).loss) < 1e-6
    with fused.disable_adapter(), model.disable_adapter():
        off = fused(input_ids=IDS, labels=LABELS).loss
        assert relative(off, model(input_ids=IDS, labels=LABELS).loss) < 1e-6 < 1e-3 < relative(off, merged)


@pytest.mark.parametrize("target", ("q_proj", "lm_head"))
def test_the_second_of_two_adapters(target):
    """On the output layer or not: the first one's is then not in force."""

    def add(model):
        model.add_adapter("b", peft.LoraConfig(target_modules=[target], init_lora_weights=False))
        model.set_adapter("b")

    assert_same_step(*pairs(add))


def test_dropout_is_drawn_once_for_loss_and_logits():
    results = []
    for model, more in zip(
        pairs(lambda model: model.train(), lora_dropout=0.5), ({}, {"return_logits": True}), strict=True
    ):
        torch.manual_seed(2)
        results.append(model(input_ids=IDS, labels=LABELS, **more))
    assert relative(results[1].loss, results[0].loss) < 1e-6 and torch.equal(results[1].logits, results[0].logits)


@pytest.mark.parametrize("config", (peft.PromptTuningConfig, peft.PrefixTuningConfig))
def test_virtual_tokens(config):
    models = []
    for model in (tiny(), fuse_loss(tiny())):
        torch.manual_seed(1)
        models.append(peft.get_peft_model(model, config(task_type="CAUSAL_LM", num_virtual_tokens=3)))
    theirs, ours = (model(input_ids=IDS, labels=LABELS) for model in models)
    theirs.loss.backward(), ours.loss.backward()
    assert ours.logits is None and relative(ours.loss, theirs.loss) < 1e-6
    for mine, other in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        assert mine.grad is None or relative(mine.grad, other.grad) < 2e-6
