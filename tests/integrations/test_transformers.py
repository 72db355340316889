"""Causal language models of transformers, tiny and randomly initialised: the fused loss against their own."""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
from types import SimpleNamespace

import pytest
import torch

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers (pip install 'loongforge[transformers]')", allow_module_level=True)

import transformers

from loongforge.integrations import transformers as integration
from loongforge.integrations.transformers import FAMILIES, fuse_loss, unfuse_loss
from tests.helpers import record_allocations, relative

VOCAB, HIDDEN = 99, 32
SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXTRA = {
    "GraniteForCausalLM": {"logits_scaling": 3.0},
    "CohereForCausalLM": {"logit_scale": 0.4},
    "Cohere2ForCausalLM": {"logit_scale": 0.3},
    "Gemma2ForCausalLM": {"final_logit_softcapping": 2.0},
    "Gemma3ForCausalLM": {"final_logit_softcapping": 3.0},
}
IDS = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(torch.arange(9) < 3, -100)


def tiny(name="LlamaForCausalLM", dtype=torch.float32, **changes):
    """A model whose logits are large enough for a scale or a softcap to matter."""
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**{**SIZES, **EXTRA.get(name, {}), **changes})).to(dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    return model


def step(model, **arguments):
    """Output, and the gradients by name."""
    model.zero_grad()
    output = model(**{"input_ids": IDS, "labels": LABELS, **arguments})
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(model, fused, tolerance=2e-6, **arguments):
    theirs, expected = step(model, **arguments)
    ours, gradients = step(fused, **arguments)
    assert ours.logits is None and ours.loss.dtype == theirs.loss.dtype == torch.float32
    assert relative(ours.loss, theirs.loss) < tolerance
    assert gradients.keys() == expected.keys() and len(expected) > 1
    for name, gradient in gradients.items():
        assert relative(gradient, expected[name]) < tolerance, name


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_of_every_family(name):
    assert_same_step(tiny(name), fuse_loss(tiny(name)))


@pytest.mark.parametrize("name", ("LlamaForCausalLM", "Gemma2ForCausalLM", "CohereForCausalLM"))
def test_scale_and_softcap_follow_the_model(name):
    """The same checks fail where another family's transform is used: the logits above are large enough."""
    fused = fuse_loss(tiny(name))
    fused._loongforge = integration._Settings(FAMILIES["GraniteForCausalLM"], {})
    fused.config.logits_scaling = 2.0
    with pytest.raises(AssertionError):
        assert_same_step(tiny(name), fused)


@pytest.mark.parametrize(
    "arguments",
    (
        {"num_items_in_batch": 5},
        {"num_items_in_batch": torch.tensor(7)},
        {"shift_labels": LABELS.roll(-2, 1)},
        {"labels": IDS.masked_fill(IDS % 3 == 0, 11), "ignore_index": 11},
        {"labels": IDS, "attention_mask": torch.ones(2, 9, dtype=torch.long)},
    ),
    ids=lambda arguments: next(iter(arguments)),
)
def test_arguments_of_the_loss(arguments):
    assert_same_step(tiny(), fuse_loss(tiny()), **arguments)


def test_logits_on_demand_and_without_labels():
    model = tiny("Gemma2ForCausalLM")
    expected = model(IDS, labels=LABELS)
    generated = model.generate(IDS, max_new_tokens=4, do_sample=False)
    fuse_loss(model)
    assert torch.equal(model(IDS, labels=LABELS, return_logits=True).logits, expected.logits)
    assert torch.equal(model(IDS).logits, expected.logits) and model(IDS).loss is None
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), generated)
    with torch.no_grad():
        assert relative(model.eval()(IDS, labels=LABELS).loss, expected.loss) < 1e-6
    assert torch.equal(unfuse_loss(model)(IDS, labels=LABELS).loss, expected.loss)


def test_tuples_and_positional_labels():
    model = tiny()
    expected = model(IDS, labels=LABELS).loss
    fuse_loss(model)
    (loss, *_) = model(IDS, labels=LABELS, return_dict=False)
    assert relative(loss, expected) < 1e-6
    place = list(inspect.signature(transformers.LlamaForCausalLM.forward).parameters).index("labels") - 1
    positional = [IDS, *[None] * (place - 1), LABELS]
    assert relative(model(*positional).loss, expected) < 1e-6


def test_no_logits_are_made():
    model = fuse_loss(tiny(vocab_size=20000, tie_word_embeddings=True))
    measured = record_allocations(lambda: model(IDS, labels=LABELS).loss.backward())
    unfused = record_allocations(lambda: unfuse_loss(model)(IDS, labels=LABELS).loss.backward())
    logits = IDS.numel() * 20000 * 4
    assert logits in unfused.events
    assert logits not in measured.events


def test_options_reach_the_loss():
    model = fuse_loss(tiny(), compact_tokens=True, z_loss_weight=0.1, logits_budget_mb="all")
    plain = tiny()
    logits = plain(IDS).logits[:, :-1].reshape(-1, VOCAB)
    target = LABELS[:, 1:].reshape(-1)
    kept = target != -100
    expected = torch.nn.functional.cross_entropy(logits, target) + 0.1 * logits[kept].logsumexp(1).square().mean()
    assert relative(step(model)[0].loss, expected) < 1e-6


def test_copies_and_saved_models(tmp_path):
    model = fuse_loss(tiny())
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_output_embeddings().weight.zero_()
    assert float(other(IDS, labels=LABELS).loss.detach()) == pytest.approx(torch.tensor(float(VOCAB)).log().item())
    assert float(model(IDS, labels=LABELS).loss.detach()) > 5
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM and loaded.config.architectures == ["LlamaForCausalLM"]
    assert relative(loaded(IDS, labels=LABELS).loss, model(IDS, labels=LABELS).loss) < 1e-6


def test_gradient_checkpointing_and_autocast():
    model, fused = tiny(), fuse_loss(tiny())
    for one in (model, fused):
        one.gradient_checkpointing_enable()
        one.train()
    assert_same_step(model, fused)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_step(model, fused, tolerance=3e-2)


def test_compiled_model_equals_eager():
    fused = fuse_loss(tiny())
    expected, gradients = step(fused)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    loss = compiled(input_ids=IDS, labels=LABELS).loss
    fused.zero_grad()
    loss.backward()
    assert relative(loss, expected.loss) < 1e-6
    for name, parameter in fused.named_parameters():
        assert relative(parameter.grad, gradients[name]) < 1e-5, name


# ---------------------------------------------------------------- refusals


def refusal(model, exception, text, **options):
    with pytest.raises(exception, match=text):
        fuse_loss(model, **options)


def test_refused_models():
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9))
    refusal(gpt2, NotImplementedError, "fuse_loss knows LlamaForCausalLM, .*got .*GPT2LMHeadModel")
    refusal(torch.nn.Linear(2, 2), NotImplementedError, "got torch.nn.modules.linear.Linear")
    refusal(tiny("GraniteForCausalLM", logits_scaling=0.0), ValueError, "no scale of its logits: float division")
    refusal(tiny("Gemma2ForCausalLM", final_logit_softcapping=-1.0), ValueError, "softcap must be a number")
    refusal(tiny(), ValueError, "reduction, softcap follow from the model", softcap=1.0, reduction="sum")
    refusal(tiny(), TypeError, "unknown option 'budget'", budget=1)
    refusal(fuse_loss(tiny()), ValueError, "called on this model before")
    with pytest.raises(ValueError, match="fuse_loss was not called"):
        unfuse_loss(tiny())
    model = tiny()
    model.config.vocab_size = VOCAB + 1
    refusal(model, ValueError, f"has {VOCAB} rows and the configuration a vocab_size of {VOCAB + 1}")
    model = tiny()
    model.loss_function = lambda *args, **kwargs: None
    refusal(model, NotImplementedError, "computes its loss with <lambda>")
    model = tiny()
    model.set_output_embeddings(type("Linear4bit", (torch.nn.Linear,), {"forward": lambda self, x: x})(HIDDEN, VOCAB))
    refusal(model, NotImplementedError, "must be a plain torch.nn.Linear.*Linear4bit")


def test_a_replaced_forward_is_refused(monkeypatch):
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", lambda self, *args, **kwargs: None)
    refusal(tiny(), NotImplementedError, "LlamaForCausalLM.forward was replaced by .*test_transformers")


@pytest.mark.parametrize("where", ("model", "output layer"))
def test_a_forward_replaced_on_the_object_is_refused(where):
    """As Liger's patch of one model and accelerate's hooks do it: our subclass would never be asked."""
    model = tiny()
    module = model if where == "model" else model.get_output_embeddings()
    module.forward = functools.partial(type(module).forward, module)
    refusal(model, NotImplementedError, "forward of this object was replaced by .*call fuse_loss before")
    del module.forward
    fuse_loss(model)
    module.forward = functools.partial(type(module).forward, module)  # afterwards, as Trainer does for mixed precision
    assert model(IDS, labels=LABELS).logits is None


def test_refused_calls():
    model = fuse_loss(tiny())
    with pytest.raises(
        ValueError, match=r"positions \[2, 4\] that reach the output layer, got \[2, 9\].*logits_to_keep"
    ):
        model(IDS, labels=LABELS, logits_to_keep=4)
    model.set_output_embeddings(torch.nn.Linear(HIDDEN, VOCAB))
    with pytest.raises(NotImplementedError, match="replaced by a Linear after fuse_loss"):
        model(IDS, labels=LABELS)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'loongforge\[transformers\]'"):
        importlib.reload(integration)


# ---------------------------------------------------------------- Trainer and PEFT


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="needs accelerate (loongforge[transformers])"
)
def test_trainer_with_gradient_accumulation(tmp_path):
    """Batches of unlike numbers of labels: only ``num_items_in_batch`` makes the accumulated mean right."""
    rows = [{"input_ids": IDS[i % 2], "labels": IDS[i % 2].masked_fill(torch.arange(9) < i, -100)} for i in range(8)]

    def train(model):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=2,
            learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
            per_device_eval_batch_size=2,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, trainer.evaluate()["eval_loss"], dict(model.named_parameters())

    losses, evaluated, parameters = train(tiny())
    ours, our_evaluated, our_parameters = train(fuse_loss(tiny()))
    assert len(losses) == 2 and ours == pytest.approx(losses, rel=1e-4)
    assert our_evaluated == pytest.approx(evaluated, rel=1e-4)
    for name, parameter in our_parameters.items():
        assert relative(parameter, parameters[name]) < 1e-4, name


peft_installed = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft (pip install peft)")


def with_lora(model, **changes):
    import peft

    config = {"r": 4, "lora_alpha": 8, "target_modules": ["lm_head", "q_proj"], "init_lora_weights": False, **changes}
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**config))


@peft_installed
def test_lora_on_the_output_layer():
    model, fused = with_lora(tiny()), fuse_loss(with_lora(tiny()))
    assert_same_step(model, fused)
    names = [name for name, p in fused.named_parameters() if p.grad is not None]
    assert any("lm_head.lora_A" in name for name in names) and any("lm_head.lora_B" in name for name in names)
    assert not any("base_layer" in name for name in names)
    assert torch.equal(fused(IDS).logits, model(IDS).logits)
    with fused.disable_adapter(), model.disable_adapter():
        assert relative(fused(IDS, labels=LABELS).loss, model(IDS, labels=LABELS).loss) < 1e-6


@peft_installed
def test_lora_elsewhere_and_dropout():
    assert_same_step(
        with_lora(tiny(), target_modules=["q_proj"]), fuse_loss(with_lora(tiny(), target_modules=["q_proj"]))
    )
    losses = []
    for model in (with_lora(tiny(), lora_dropout=0.5), fuse_loss(with_lora(tiny(), lora_dropout=0.5))):
        torch.manual_seed(2)
        losses.append(model.train()(input_ids=IDS, labels=LABELS).loss)
    assert relative(losses[1], losses[0]) < 1e-6


@peft_installed
def test_lora_that_is_refused():
    model = fuse_loss(tiny())
    wrapped = with_lora(model)
    with pytest.raises(NotImplementedError, match="replaced by a Linear after fuse_loss"):
        wrapped(input_ids=IDS, labels=LABELS)
    dora = fuse_loss(with_lora(tiny(), use_dora=True))
    with pytest.raises(NotImplementedError, match="one plain LoRA adapter .* without DoRA"):
        dora(input_ids=IDS, labels=LABELS)
    refusal(
        with_lora(tiny(), target_modules=["q_proj"], modules_to_save=["lm_head"]), NotImplementedError, "ModulesToSave"
    )


@peft_installed
def test_adapters_chosen_per_sample_are_refused():
    """PEFT hands ``adapter_names`` to the LoRA layers themselves."""
    model = with_lora(tiny()).eval()
    names = ["__base__", "default"]
    expected = model(input_ids=IDS, adapter_names=names).logits
    fuse_loss(model)
    assert torch.equal(model(input_ids=IDS, adapter_names=names).logits, expected)
    with pytest.raises(NotImplementedError, match=r"more than its hidden states \(adapter_names\).*unfuse_loss"):
        model(input_ids=IDS, labels=LABELS, adapter_names=names)


def test_replicas_have_their_own_request():
    """torch.nn.DataParallel copies the attributes of every module: what a call stores is on the replica alone."""
    model = fuse_loss(tiny())
    head = model.get_output_embeddings()
    replica = head._replicate_for_data_parallel()
    replica._request = SimpleNamespace()
    assert head._request is None
