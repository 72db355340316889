"""Code that builds its own models, owns one, calls ``_postprocess`` itself or brings a ``linear`` of its own."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

import loongforge.megatron
from loongforge.megatron import counters
from tests.core.test_no_sync import Forbidden
from tests.megatron.matrix import Row
from tests.megatron.small import assert_same, batch, build, relative_error, run, upstream
from tests.megatron.training import LINEAR, SEQUENCE, VOCABULARY, build_model, configuration


@pytest.mark.usefixtures("hook")
def test_enable_sets_a_configuration_that_exists_already():
    config = configuration(Row(), torch.float32)
    assert config.cross_entropy_fusion_impl == "native"
    report = loongforge.megatron.enable(config)
    assert (config.cross_entropy_loss_fusion, config.cross_entropy_fusion_impl) == (True, "linear")
    assert_same(run(build_model(Row(), config)), run(build(linear=False)))
    assert counters.fused == 1 and "GPTModel" in report.models


@pytest.mark.usefixtures("hook")
def test_enable_refuses_what_is_no_configuration():
    with pytest.raises(TypeError, match="SimpleNamespace has no cross_entropy_loss_fusion: expected a Transformer"):
        loongforge.megatron.enable(types.SimpleNamespace())


class VisionLanguageModel(nn.Module):
    """Owns a language model and gives it embeddings of its own, as LLaVA does."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model
        generator = torch.Generator().manual_seed(3)
        self.projection = nn.Parameter(torch.randn(8, 32, generator=generator))

    def forward(self, images: torch.Tensor, **arguments: torch.Tensor) -> torch.Tensor:
        text = self.language_model.embedding(arguments["input_ids"], arguments["position_ids"])
        arguments |= {"input_ids": None, "decoder_input": torch.cat([images @ self.projection, text[4:]])}
        return self.language_model(**arguments)


@pytest.mark.usefixtures("hook")
def test_a_model_that_owns_a_language_model():
    images = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(4))
    results = []
    for linear in (False, True):
        model = VisionLanguageModel(build(linear=linear))
        loss = model(images, **batch())
        loss.backward(upstream())
        results.append((loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}))
    assert_same(results[1], results[0])
    assert counters.fused == 1 and counters.materialized == 0


@pytest.mark.usefixtures("hook")
def test_megatrons_own_llava_owns_a_fused_language_model():
    """The language model of LLaVAModel is GPTModel itself: built there, it is hooked like any other."""
    import inspect

    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.multimodal import llava_model

    assert llava_model.GPTModel is GPTModel and "labels=" in inspect.getsource(llava_model.LLaVAModel.forward)


@pytest.mark.usefixtures("hook")
def test_postprocess_called_directly_as_the_combined_schedule_does():
    """``overlap_moe_expert_parallel_comm`` runs the layers itself and calls ``_postprocess`` with keywords."""
    results = []
    for linear in (False, True):
        model = build(linear=linear)
        arguments = batch()
        hidden = model.decoder(
            hidden_states=model.embedding(arguments["input_ids"], arguments["position_ids"]),
            attention_mask=arguments["attention_mask"],
            rotary_pos_emb=model.rotary_pos_emb(SEQUENCE),
        )
        names = ("input_ids", "position_ids", "labels", "attention_mask")
        loss = model._postprocess(
            hidden_states=hidden, mtp_in_postprocess=False, loss_mask=None, rotary_pos_emb=None, rotary_pos_cos=None,
            rotary_pos_sin=None, **{name: arguments[name] for name in names},
        )  # fmt: skip
        loss.backward(upstream())
        results.append((loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}))
    assert_same(results[1], results[0])
    assert counters.fused == 1


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize("tied", [False, True])
def test_hooks_on_saved_tensors_that_strip_attributes(tied):
    """CPU offloading packs saved tensors and gives back bare ones, without ``main_grad``."""
    expected = run(build(Row(tied=tied), linear=False))
    bare = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor)
    model = build(Row(tied=tied))
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    with bare:
        assert_same(run(model), expected)
    model.output_layer.gradient_accumulation_fusion = True
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    weight.zero_out_wgrad = tied
    with bare:
        _, gradients = run(model)
    name = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
    total = weight.main_grad + (gradients[name] if tied else 0)
    assert weight.grad_added_to_main_grad and relative_error(total, expected[1][name]) <= 1e-5


def another_model():
    """A language model with a loss path like GPTModel's, but no GPTModel."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class AnotherModel(LanguageModule):
        def __init__(self, config):
            super().__init__(config)
            self.pre_process = self.post_process = True
            self.share_embeddings_and_output_weights = False
            generator = torch.Generator().manual_seed(6)
            self.table = nn.Parameter(torch.randn(VOCABULARY, 32, generator=generator))
            self.output_layer = ColumnParallelLinear(
                32, VOCABULARY, config=config, init_method=torch.nn.init.zeros_, bias=False
            )
            with torch.no_grad():
                self.output_layer.weight.copy_(torch.randn(VOCABULARY, 32, generator=generator))

        def forward(self, input_ids, labels=None, **_):
            logits, _ = self.output_layer(self.table[input_ids.t()])
            return logits if labels is None else self.compute_language_model_loss(labels, logits)

    return AnotherModel


@pytest.mark.usefixtures("hook")
def test_a_language_model_of_ones_own_is_fused_once_it_is_named():
    cls = another_model()
    expected = run(cls(configuration(Row(), torch.float32)))
    config = configuration(Row(), torch.float32, **LINEAR)
    with pytest.raises(NotImplementedError, match=r"support AnotherModel.*name it in loongforge.megatron.install\("):
        cls(config)
    report = loongforge.megatron.install(models=[cls])
    assert report.models[-1] == "AnotherModel" and loongforge.megatron.install(models=[cls]) == report
    assert_same(run(cls(config)), expected)
    assert counters.fused == 1


def delegates(model, *args, **kwargs):
    return super(type(model), model)._postprocess(*args, **kwargs)


def computes_itself(model, hidden_states, *args, labels=None, **kwargs):
    logits, _ = model.output_layer(hidden_states)
    return model.compute_language_model_loss(labels, logits)


def calls_the_decoder_itself(model, input_ids, position_ids, attention_mask, labels=None):
    hidden = model.decoder(
        hidden_states=model.embedding(input_ids, position_ids),
        attention_mask=attention_mask,
        rotary_pos_emb=model.rotary_pos_emb(SEQUENCE),
    )
    return computes_itself(model, hidden, labels=labels)


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("method", "override"),
    [("_postprocess", delegates), ("_postprocess", computes_itself), ("forward", calls_the_decoder_itself)],
)
def test_a_subclass_with_a_method_of_its_own_does_not_train_unfused(named, method, override, monkeypatch):
    from tests.megatron import training

    expected = run(build(linear=False))
    cls = type("Derived", (training.GPTModel,), {method: override})
    if named:
        loongforge.megatron.install(models=[cls])
    monkeypatch.setattr(training, "GPTModel", cls)
    for _ in range(2):  # the second model of the class finds it hooked
        assert_same(run(build()), expected)
    assert counters.fused == 2 and counters.materialized == 0
    loongforge.megatron.uninstall()
    assert vars(cls)[method] is override
    assert_same(run(build(linear=False)), expected)


@pytest.mark.usefixtures("hook")
def test_a_mixin_with_a_forward_serves_other_classes_as_before(monkeypatch):
    from tests.megatron import training

    class Mixin:
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    expected = run(build(linear=False))
    monkeypatch.setattr(training, "GPTModel", type("Derived", (Mixin, training.GPTModel), {}))
    assert_same(run(build()), expected)
    other = type("Other", (Mixin, nn.Linear), {})(2, 3)
    assert other(torch.ones(2)).shape == (3,) and counters.fused == 1


@pytest.mark.usefixtures("hook")
def test_a_subclass_that_does_something_else_with_its_logits_raises(monkeypatch):
    from tests.megatron import training

    cls = type("Derived", (training.GPTModel,), {"forward": lambda model, labels=None, **others: model.output_layer(
        model.embedding(others["input_ids"], others["position_ids"]))[0]})  # fmt: skip
    monkeypatch.setattr(training, "GPTModel", cls)
    model = build()
    with pytest.raises(RuntimeError, match=r"Derived got DeferredLogits.*neither computed a loss"):
        model(**batch())


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize("when", ["before the model", "after the model", "twice"])
def test_the_order_of_enable_and_model_does_not_matter(when):
    expected = run(build(linear=False))
    config = configuration(Row(), torch.float32)
    if when != "after the model":
        loongforge.megatron.enable(config)
    model = build_model(Row(), config)
    if when != "before the model":
        loongforge.megatron.enable(config)
    assert_same(run(model), expected)
    assert counters.fused == 1


@pytest.mark.usefixtures("megatron")
def test_a_model_that_was_built_before_the_hook_is_fused_after_it():
    model = build()
    with pytest.raises(UnboundLocalError):  # Megatron's own answer to an implementation that it does not know
        model(**batch())
    loongforge.megatron.install()
    try:
        counters.__init__()
        assert_same(run(model), run(build(linear=False)))
        assert counters.fused == 1
    finally:
        loongforge.megatron.uninstall()


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize("wrong", [nn.Linear, "GPTModel"])
def test_what_is_no_language_model_cannot_be_named(wrong):
    with pytest.raises(TypeError, match="must be subclasses of megatron-core's LanguageModule"):
        loongforge.megatron.install(models=[wrong])


@pytest.mark.usefixtures("megatron")
def test_a_branch_with_a_linear_of_its_own_computes_its_loss_with_ours(monkeypatch):
    """Some branches' output layer computes the loss itself; that method, for Blackwell only, is replaced."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class LinearCrossEntropyModule(ColumnParallelLinear):
        def forward(
            self, input_, weight=None, runtime_gather_output=None, output_cross_entropy_loss=False, labels=None
        ):
            if output_cross_entropy_loss:
                weight = self.weight if weight is None else weight
                return self._compute_linear_and_cross_entropy_loss(hidden=input_, weight=weight, labels=labels)
            return super().forward(input_, weight, runtime_gather_output)

        def _compute_linear_and_cross_entropy_loss(self, hidden, weight, labels=None, reduction="none"):
            raise ValueError("Unsupported architecture: 9")

    module = types.ModuleType("megatron.core.transformer.linear_cross_entropy")
    module.LinearCrossEntropyModule = LinearCrossEntropyModule
    monkeypatch.setitem(sys.modules, module.__name__, module)
    loongforge.megatron.install()
    try:
        model = build()
        expected = run(build(linear=False))
        model.output_layer.__class__ = LinearCrossEntropyModule

        def fused_postprocess(labels, logits):
            raise AssertionError("the layer computes the loss")

        model.compute_language_model_loss = fused_postprocess
        hidden = {}
        model.decoder.register_forward_hook(lambda layer, args, output: hidden.update(last=output))
        logits = model(**batch(labels=None))
        assert relative_error(logits, build(linear=False)(**batch(labels=None))) < 1e-6
        loss = model.output_layer(hidden["last"], output_cross_entropy_loss=True, labels=batch()["labels"])
        loss.backward(upstream())
        found = (loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()})
        assert_same(found, expected)
        with pytest.raises(NotImplementedError, match="reduction='none'.*got 'mean' and -100"):
            model.output_layer._compute_linear_and_cross_entropy_loss(hidden["last"], None, None, reduction="mean")
        model.config.use_mup = True
        with pytest.raises(NotImplementedError, match="muP on this Megatron branch"):
            model(**batch())
    finally:
        loongforge.megatron.uninstall()


@pytest.mark.usefixtures("hook")
def test_checked_labels_name_the_place_in_the_batch(monkeypatch):
    model, target = build(), batch()["labels"]
    target[1, 3] = VOCABULARY + 7
    assert model(**batch(labels=target)).isnan().nonzero().tolist() == [[1, 3]]
    monkeypatch.setenv("LCE_CHECK_LABELS", "1")
    with pytest.raises(IndexError, match=r"labels\[1, 3\] \(sample 1 of this rank's micro-batch, token 3\) is 519"):
        model(**batch(labels=target))
    target[1, 3] = -7
    model(**batch(labels=target))


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize("tied", [False, True])
def test_output_layer_and_loss_ask_the_host_for_nothing(tied):
    """What a CUDA graph of the full iteration needs; Megatron's local attention would not keep to it."""
    model, arguments, gradient = build(Row(tied=tied)), batch(), upstream()
    hidden = torch.randn(SEQUENCE, 2, 32, requires_grad=True)
    with Forbidden() as mode:
        loss = model._postprocess(
            hidden_states=hidden, mtp_in_postprocess=False, rotary_pos_emb=None, rotary_pos_cos=None,
            rotary_pos_sin=None, **arguments,
        )  # fmt: skip
        loss.backward(gradient)
    assert counters.fused == 1 and counters.materialized == 0 and hidden.grad.any() and "aten::mm" in mode.seen


def test_megatron_fsdp_marks_its_parameters_as_the_hook_expects():
    from importlib.util import find_spec
    from pathlib import Path

    package = find_spec("megatron.core").submodule_search_locations[0]
    source = Path(package) / "distributed" / "fsdp" / "src" / "megatron_fsdp" / "megatron_fsdp.py"
    assert "param.__fsdp_param__ = True" in source.read_text()
