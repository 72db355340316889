"""Causal language models of transformers, tiny and randomly initialised: the fused loss against their own."""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import pickle
import re
import threading
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers (pip install 'loongforge[transformers]')", allow_module_level=True)

import transformers
from transformers.loss.loss_utils import ForCausalLMLoss

from loongforge.integrations import transformers as integration
from loongforge.integrations.transformers import FAMILIES, fuse_loss, unfuse_loss
from tests.helpers import record_allocations, relative
from tests.integrations.tiny_models import HIDDEN, IDS, LABELS, VOCAB, assert_same_step, refusal, step, tiny


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_of_every_family(name):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    assert_same_step(tiny(name), fuse_loss(tiny(name)))


def test_the_documentation_names_every_family():
    text = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")
    table = text[text.index("| family |") : text.index("Every class is tested")]
    named = {name.removesuffix("LMHeadModel") for name in re.findall(r"`(\w+)`", table)} - {"output_router_logits"}
    assert named == {name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") for name in FAMILIES}


@pytest.mark.parametrize("name", ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "GraniteMoeForCausalLM"))
def test_the_routers_loss_is_added(name):
    without, fused = tiny(name, output_router_logits=False), fuse_loss(tiny(name, output_router_logits=False))
    arguments = {"attention_mask": torch.ones_like(IDS), "num_items_in_batch": 7}
    assert_same_step(without, fused, **arguments)
    assert_same_step(without, fused, output_router_logits=True, **arguments)
    with_router, plain = (step(fused, output_router_logits=value)[0].loss for value in (True, False))
    assert with_router > plain + 1e-3


@pytest.mark.parametrize("name", ("LlamaForCausalLM", "Gemma2ForCausalLM", "CohereForCausalLM"))
def test_scale_and_softcap_follow_the_model(name, monkeypatch):
    """The same checks fail where another family's transform is used: the logits above are large enough."""
    fused = fuse_loss(tiny(name))
    assert_same_step(tiny(name), fused)
    monkeypatch.setitem(FAMILIES, name, FAMILIES["GraniteForCausalLM"])
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
        {"num_items_in_batch": 5.0, "labels": LABELS},
        {"labels": IDS, "attention_mask": torch.ones(2, 9, dtype=torch.long)},
        {"logits_to_keep": 4, "shift_labels": LABELS[:, -4:].contiguous()},
        {"logits_to_keep": torch.arange(2, 7), "labels": LABELS[:, 2:7]},
        {"label_smoothing": 0.3, "labels": LABELS},  # which transformers ignores
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
    hidden = model(IDS, labels=LABELS, output_hidden_states=True).hidden_states
    assert [
        torch.equal(*pair) for pair in zip(hidden, model(IDS, output_hidden_states=True).hidden_states, strict=True)
    ]
    assert torch.equal(unfuse_loss(model)(IDS, labels=LABELS).loss, expected.loss)


def test_tuples_and_positional_labels():
    model = tiny()
    expected = model(IDS, labels=LABELS).loss
    fuse_loss(model)
    (loss, logits, *_) = model(IDS, labels=LABELS, return_dict=False)
    assert relative(loss, expected) < 1e-6 and logits is None
    (loss, logits, *_) = model(IDS, labels=LABELS, return_dict=False, return_logits=True)
    assert relative(loss, expected) < 1e-6 and logits.shape[-1] == VOCAB
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


def test_saved_as_an_object():
    model = fuse_loss(tiny(), z_loss_weight=0.1)
    for loaded in (pickle.loads(pickle.dumps(model)), copy.deepcopy(copy.deepcopy(model))):
        assert type(loaded) is type(model) and torch.equal(step(loaded)[0].loss, step(model)[0].loss)
        assert type(unfuse_loss(loaded)) is transformers.LlamaForCausalLM
        assert_same_step(loaded, fuse_loss(tiny()))
    assert isinstance(model, integration._FusedModel)


@pytest.mark.parametrize("use_reentrant", (True, False))
def test_gradient_checkpointing_and_autocast(use_reentrant):
    model, fused = tiny(), fuse_loss(tiny())
    for one in (model, fused):
        one.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        one.enable_input_require_grads()
        one.train()
    assert_same_step(model, fused)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_step(model, fused, tolerance=3e-2)


def test_a_head_of_another_dtype():
    model, fused = (tiny(dtype=torch.bfloat16) for _ in range(2))
    fuse_loss(fused)
    for one in (model, fused):
        one.get_output_embeddings().float()
    with pytest.raises(TypeError, match="hidden is torch.bfloat16 and weight is torch.float32"):
        fused(IDS, labels=LABELS)
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
    other = compiled(input_ids=IDS.flip(0), labels=LABELS).loss
    assert relative(other, fused(IDS.flip(0), labels=LABELS).loss) < 1e-6 < relative(other, loss)
    for name, parameter in fused.named_parameters():
        assert relative(parameter.grad, gradients[name]) < 1e-5, name


# ---------------------------------------------------------------- refusals


def test_refused_models():
    sizes = {"num_layers": 1, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "vocab_size": 9}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    refusal(t5, NotImplementedError, "fuse_loss does not know .*T5ForConditionalGeneration: .* LlamaForCausalLM, ")
    classifier = transformers.LlamaForSequenceClassification(tiny().config)
    refusal(classifier, NotImplementedError, "does not know .*LlamaForSequenceClassification")
    refusal(torch.nn.Linear(2, 2), NotImplementedError, "does not know torch.nn.modules.linear.Linear")
    subclass = type("LlamaForCausalLM", (transformers.LlamaForCausalLM,), {})
    refusal(subclass(tiny().config), NotImplementedError, "does not know .*test_transformers.LlamaForCausalLM")
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
    model.loss_function = functools.wraps(ForCausalLMLoss)(lambda *args, **kwargs: None)
    refusal(
        model, NotImplementedError, "computes its loss with transformers.*ForCausalLMLoss, which is not transformers'"
    )
    shared = tiny()
    shared.set_output_embeddings(fuse_loss(tiny()).get_output_embeddings())
    refusal(shared, ValueError, "shared with a model that fuse_loss was called on")
    model = tiny()
    model.set_output_embeddings(type("Linear4bit", (torch.nn.Linear,), {"forward": lambda self, x: x})(HIDDEN, VOCAB))
    refusal(model, NotImplementedError, "must be a plain torch.nn.Linear.*Linear4bit")


def test_a_replaced_forward_is_refused(monkeypatch):
    fused = fuse_loss(tiny())
    output = fused(IDS)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", lambda self, *args, **kwargs: output)
    refusal(tiny(), NotImplementedError, "LlamaForCausalLM.forward was replaced by .*test_transformers")
    with pytest.raises(RuntimeError, match="LlamaForCausalLM.forward was replaced: it did not ask for the loss"):
        fused(IDS, labels=LABELS)


def test_a_loss_that_changes_after_fuse_loss_is_refused():
    fused = fuse_loss(tiny())
    fused.loss_function = lambda *args, **kwargs: None
    with pytest.raises(NotImplementedError, match="computes its loss with .*<lambda>"):
        fused(IDS, labels=LABELS)
    fused.loss_function = ForCausalLMLoss
    assert_same_step(tiny(), fused)


@pytest.mark.parametrize("change", ({"labels": LABELS.clone()}, {"num_items_in_batch": 3}, {"shift_labels": LABELS}))
def test_labels_and_arguments_that_a_forward_changes_are_refused(monkeypatch, change):
    """What the output layer computes must be what the model then asks for."""
    original = transformers.LlamaForCausalLM.forward
    monkeypatch.setattr(  # not on the way to the output layer, which has its own
        transformers.LlamaForCausalLM,
        "forward",
        lambda self, *args, **kwargs: original(self, *args, **{**kwargs, **change}),
    )
    monkeypatch.setattr(integration.inspect, "unwrap", lambda function: original)
    fused = fuse_loss(tiny())
    with pytest.raises(RuntimeError, match="changed labels or arguments of the loss on their way"):
        fused(IDS, labels=LABELS)


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


# ---------------------------------------------------------------- Trainer


accelerate_installed = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="needs accelerate (loongforge[transformers])"
)
ROWS = [{"input_ids": IDS[i % 2], "labels": IDS[i % 2].masked_fill(torch.arange(9) < i, -100)} for i in range(8)]


def trained(model, folder, compute_metrics=None, **changes):
    """Logged losses, evaluation and parameters after two steps."""
    arguments = transformers.TrainingArguments(**{
        "output_dir": str(folder), "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 2,
        "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, "per_device_eval_batch_size": 2, **changes,
    })  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=ROWS, eval_dataset=ROWS, compute_metrics=compute_metrics
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate(), dict(model.named_parameters())


def assert_trained_alike(model, fused, folder, **changes):
    losses, evaluated, parameters = trained(model, folder, **changes)
    ours, our_evaluated, our_parameters = trained(fused, folder, **changes)
    assert len(losses) == 2 and ours == pytest.approx(losses, rel=1e-4)
    for name in {"eval_loss", "eval_score"} & set(evaluated):
        assert our_evaluated[name] == pytest.approx(evaluated[name], rel=1e-4)
    for name, parameter in our_parameters.items():
        assert relative(parameter, parameters[name]) < 1e-4, name
    return our_evaluated


@accelerate_installed
@pytest.mark.parametrize(
    "changes",
    ({}, {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}, {"label_smoothing_factor": 0.1}),
    ids=("4 batches", "3 batches of 2", "label smoothing"),
)
def test_trainer_with_gradient_accumulation(tmp_path, changes):
    """Batches of unlike numbers of labels: only ``num_items_in_batch`` makes the accumulated mean right."""
    assert_trained_alike(tiny(), fuse_loss(tiny()), tmp_path, **changes)


@accelerate_installed
@pytest.mark.parametrize("name", ("LlamaForCausalLM", "MixtralForCausalLM"))
def test_trainer_evaluates_on_logits(tmp_path, name):
    """A mixture's outputs hold more than logits."""

    def score(prediction):
        logits = prediction.predictions[1] if name.startswith("Mixtral") else prediction.predictions
        assert logits.shape == (8, 9, VOCAB)
        return {"score": float(abs(logits).mean())}

    changes = {"compute_metrics": score, "eval_strategy": "steps", "eval_steps": 1}
    evaluated = assert_trained_alike(tiny(name), fuse_loss(tiny(name), eval_logits=True), tmp_path, **changes)
    assert evaluated["eval_score"] > 0.1


# ---------------------------------------------------------------- calls inside and beside a labelled one


def test_replicas():
    """What torch.nn.DataParallel makes of a model in each of its threads."""
    fused = fuse_loss(tiny())
    replica, head = fused._replicate_for_data_parallel(), fused.lm_head._replicate_for_data_parallel()
    replica._modules["lm_head"], head.weight, head.bias = head, fused.lm_head.weight, None
    assert replica(IDS, labels=LABELS).logits is None
    assert relative(replica(IDS, labels=LABELS).loss, tiny()(IDS, labels=LABELS).loss) < 1e-6


def test_threads_do_not_see_each_others_labels():
    """While one is between embedding and output layer, another asks for logits and for the loss of other labels."""
    fused, results = fuse_loss(tiny()), []

    def other():
        results.append((fused(IDS).logits, fused(IDS.flip(0), labels=IDS).loss))

    def run_other(module, args, output):
        handle.remove()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    handle = fused.model.norm.register_forward_hook(run_other)
    loss, plain = fused(IDS, labels=LABELS).loss, tiny()
    ((logits, others_loss),) = results
    assert relative(loss, plain(IDS, labels=LABELS).loss) < 1e-6
    assert torch.equal(logits, plain(IDS).logits)
    assert relative(others_loss, plain(IDS.flip(0), labels=IDS).loss) < 1e-6


def test_a_hook_that_calls_the_model():
    fused, results = fuse_loss(tiny()), []

    def call(module, args, output):
        handle.remove()
        results.extend((fused(IDS).logits, fused(IDS.flip(0), labels=IDS).loss))

    handle = fused.model.norm.register_forward_hook(call)
    loss, plain = fused(IDS, labels=LABELS).loss, tiny()
    assert relative(loss, plain(IDS, labels=LABELS).loss) < 1e-6
    assert torch.equal(results[0], plain(IDS).logits)
    assert relative(results[1], plain(IDS.flip(0), labels=IDS).loss) < 1e-6


def test_a_hook_that_calls_the_output_layer_is_refused():
    """A logit lens: which of the calls is the model's is not known."""
    fused = fuse_loss(tiny())

    def look(module, args, output):
        fused.lm_head(output)

    lens = fused.model.norm.register_forward_hook(look)
    with pytest.raises(NotImplementedError, match="output layer was called more than once in a forward with labels"):
        fused(IDS, labels=LABELS)
    lens.remove()
    assert_same_step(tiny(), fused)
