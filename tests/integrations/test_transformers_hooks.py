"""What others put on an output layer, before or after ``fuse_loss``: in force in the loss, or refused by name."""

from __future__ import annotations

import functools
import importlib.util
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm
from torch.utils.flop_counter import FlopCounterMode

from loongforge.integrations.transformers import fuse_loss, unfuse_loss
from tests.helpers import relative
from tests.integrations.tiny_models import HIDDEN, IDS, LABELS, VOCAB, assert_same_step, refusal, step, tiny


class Stretched(nn.Module):
    """A parametrization: another weight than the parameter."""

    def forward(self, weight):
        return weight * weight.abs().sqrt()


def output_layer(model):
    return model.get_output_embeddings()


def double(module, *given):
    """Twice the gradients that a backward hook or pre-hook is given first."""
    return tuple(2 * grad for grad in given[0])


def with_half_the_norm(head, how):
    how(head)
    magnitude = head.weight_g if how is weight_norm else head.parametrizations.weight.original0
    with torch.no_grad():
        magnitude.mul_(0.5)


def with_replaced_forward(head):
    forward = head.forward
    head.forward = lambda hidden: 0.5 * forward(hidden)


NEED_LOGITS = {
    "forward hook": lambda head: head.register_forward_hook(lambda module, args, output: 0.5 * output),
    "forward hook with kwargs": lambda head: head.register_forward_hook(
        lambda module, args, kwargs, output: output + torch.arange(VOCAB) / 9, with_kwargs=True
    ),
    "forward hook that only looks": lambda head: head.register_forward_hook(functools.partial(lambda a, *b: None, 1)),
    "backward hook": lambda head: head.register_full_backward_hook(double),
    "backward hook of the old kind": lambda head: head.register_backward_hook(lambda module, inputs, outputs: None),
    "backward pre-hook": lambda head: head.register_full_backward_pre_hook(double),
    "forward": with_replaced_forward,
}
NEED_NONE = {
    "pre-hook": lambda head: head.register_forward_pre_hook(lambda module, args: (0.5 * args[0],)),
    "pre-hook with kwargs": lambda head: head.register_forward_pre_hook(
        lambda module, args, kwargs: ((0.5 * args[0],), kwargs), with_kwargs=True
    ),
    "parametrization": lambda head: parametrize.register_parametrization(head, "weight", Stretched()),
    "weight norm": lambda head: with_half_the_norm(head, parametrizations.weight_norm),
    "spectral norm": lambda head: parametrizations.spectral_norm(head),
    "weight norm of the old kind": lambda head: with_half_the_norm(head, weight_norm),
    "pruning": lambda head: prune.l1_unstructured(head, "weight", 0.3),
    "hook on the weight's gradient": lambda head: head.weight.register_hook(lambda grad: 0.5 * grad),
}


def both(name, act, when):
    """The same done to a model and to a fused one."""
    models = [tiny(name), tiny(name)]
    for i, model in enumerate(models):
        if i == 1 and when == "after":
            fuse_loss(model)
        torch.manual_seed(5)
        act(output_layer(model))
        if i == 1 and when == "before":
            fuse_loss(model)
    return models


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*weight_norm")
@pytest.mark.parametrize("when", ("before", "after"))
@pytest.mark.parametrize("kind", NEED_NONE)
def test_what_works_on_hidden_states_or_weight_is_fused(kind, when):
    model, fused = both("LlamaForCausalLM", NEED_NONE[kind], when)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*logits")
        assert_same_step(model, fused)
    untouched = step(tiny())
    assert relative(step(model)[0].loss, untouched[0].loss) > 1e-3 or "gradient" in kind


@pytest.mark.parametrize("when", ("before", "after"))
@pytest.mark.parametrize("name", ("LlamaForCausalLM", "Gemma2ForCausalLM", "CohereForCausalLM", "MixtralForCausalLM"))
@pytest.mark.parametrize("kind", NEED_LOGITS)
def test_what_sees_logits_is_in_force_and_named(kind, name, when):
    if kind == "forward" and when == "before":
        model = tiny(name)
        with_replaced_forward(output_layer(model))
        refusal(model, NotImplementedError, "Linear.forward of this object was replaced by .*with_replaced_forward")
        return
    model, fused = both(name, NEED_LOGITS[kind], when)
    kind = kind.split(" with")[0].split(" that")[0].split(" of")[0]
    with pytest.warns(UserWarning, match=f"computed from logits and not fused, since the {kind} .*(test_tr|partial)"):
        assert_same_step(model, fused)
    assert fused(IDS, labels=LABELS, return_logits=True).logits.shape[-1] == VOCAB


def test_a_hook_on_every_module_is_in_force():
    def halve(module, args, output):
        return 0.5 * output if getattr(module, "out_features", None) == VOCAB else None

    model, fused = tiny(), fuse_loss(tiny())
    handle = nn.modules.module.register_module_forward_hook(halve)
    try:
        with pytest.warns(UserWarning, match="global forward hook .*halve"):
            assert_same_step(model, fused)
    finally:
        handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_same_step(model, fused)


def test_hooks_elsewhere_are_in_force_and_cost_nothing():
    models = [tiny(), fuse_loss(tiny())]
    for model in models:
        model.register_forward_hook(lambda module, args, output: None)
        model.model.norm.register_forward_hook(lambda module, args, output: 0.5 * output)
        model.model.norm.register_full_backward_hook(double)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_same_step(*models)
    with FlopCounterMode(display=False) as counter:
        assert_same_step(tiny(), fuse_loss(tiny()))
    assert counter.get_total_flops() > 0


def test_options_hold_where_a_hook_takes_the_logits():
    options = {"label_smoothing": 0.1, "z_loss_weight": 0.01, "compact_tokens": True, "logits_budget_mb": 1}
    fused, hooked = fuse_loss(tiny("Gemma2ForCausalLM"), **options), fuse_loss(tiny("Gemma2ForCausalLM"), **options)
    output_layer(hooked).register_forward_hook(lambda module, args, output: output.clone())
    with pytest.warns(UserWarning, match="computed from logits"):
        loss, gradients = step(hooked)
    expected, truth = step(fused)
    assert relative(loss.loss, expected.loss) < 1e-6
    assert all(relative(gradients[name], gradient) < 2e-6 for name, gradient in truth.items())
    exact = fuse_loss(tiny(), fp32_logits=True)
    with pytest.raises(ValueError, match="fp32_logits has no meaning for logits that exist"):
        exact(IDS, labels=LABELS, return_logits=True)


def test_returned_logits_are_those_of_the_loss():
    """A spectral norm moves with each reading of the weight: it is read once."""
    model, fused = both("LlamaForCausalLM", NEED_NONE["spectral norm"], "before")
    expected, output = model(IDS, labels=LABELS), fused(IDS, labels=LABELS, return_logits=True)
    assert torch.equal(output.logits, expected.logits)
    (output.loss + output.logits.square().mean()).backward()
    (expected.loss + expected.logits.square().mean()).backward()
    for ours, theirs in zip(fused.parameters(), model.parameters(), strict=True):
        assert relative(ours.grad, theirs.grad) < 2e-6


def test_a_parametrization_and_unfuse_loss():
    fused = fuse_loss(tiny())
    parametrizations.weight_norm(output_layer(fused))
    with pytest.raises(ValueError, match="ParametrizedLinear, or it was wrapped since"):
        unfuse_loss(fused)
    assert fused(IDS, labels=LABELS).logits is None
    parametrize.remove_parametrizations(output_layer(fused), "weight")
    assert type(output_layer(unfuse_loss(fused))) is nn.Linear
    model = tiny()
    parametrizations.weight_norm(output_layer(model))
    unfuse_loss(fuse_loss(model))
    parametrize.remove_parametrizations(output_layer(model), "weight")
    assert type(output_layer(model)) is nn.Linear


# ---------------------------------------------------------------- forwards on the object, and accelerate


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


accelerate_installed = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="needs accelerate (loongforge[transformers])"
)


@accelerate_installed
@pytest.mark.parametrize("when", ("before", "after"))
def test_weights_that_accelerate_moves(when):
    """``device_map`` wraps the forward of every module, the output layer's and the model's included."""
    import accelerate

    fused = tiny()
    if when == "after":
        fuse_loss(fused)
    accelerate.cpu_offload(fused, execution_device=torch.device("cpu"))
    if when == "before":
        fuse_loss(fused)
    assert output_layer(fused).weight.is_meta
    with torch.no_grad():
        output, expected = fused(IDS, labels=LABELS), tiny()(IDS, labels=LABELS)
        assert output.logits is None and relative(output.loss, expected.loss) < 1e-6
        assert torch.equal(unfuse_loss(fused)(IDS, labels=LABELS).logits, expected.logits)


@accelerate_installed
@pytest.mark.parametrize("when", ("before", "after"))
def test_another_hook_of_accelerate(when):
    from accelerate import hooks

    class Half(hooks.ModelHook):
        def post_forward(self, module, output):
            return 0.5 * output

    def act(head):
        hooks.add_hook_to_module(head, hooks.AlignDevicesHook())
        hooks.add_hook_to_module(head, Half(), append=True)

    if when == "before":
        model = tiny()
        act(output_layer(model))
        refusal(model, NotImplementedError, "Linear.forward of this object was replaced by accelerate.hooks.add_hook")
        return
    with pytest.warns(UserWarning, match="since the forward accelerate.hooks.add_hook_to_module"):
        assert_same_step(*both("LlamaForCausalLM", act, when))


@accelerate_installed
def test_a_removed_hook_of_accelerate():
    from accelerate import hooks

    model = tiny()
    hooks.add_hook_to_module(output_layer(model), hooks.AlignDevicesHook())
    fuse_loss(model)
    hooks.remove_hook_from_module(output_layer(model))
    assert_same_step(tiny(), model)
    expected = tiny()(IDS, labels=LABELS)
    assert torch.equal(unfuse_loss(model)(IDS, labels=LABELS).logits, expected.logits)


@accelerate_installed
def test_mixed_precision_of_accelerate():
    """It keeps a forward on the model's object, which is ours after ``unfuse_loss`` too."""
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # there is one for all of a process
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model, fused = accelerator.prepare(tiny()), accelerator.prepare(fuse_loss(tiny()))
    assert_same_step(model, fused, tolerance=3e-2)
    unfused = unfuse_loss(accelerator.unwrap_model(fused))
    assert torch.equal(unfused(IDS, labels=LABELS).logits, model(IDS, labels=LABELS).logits)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_layers_that_are_no_plain_linear_layer_are_refused():
    class Doubled(nn.Linear):
        def forward(self, hidden):
            return 2 * super().forward(hidden)

    quantised = torch.ao.nn.quantized.dynamic.Linear(HIDDEN, VOCAB)
    for head in (Doubled(HIDDEN, VOCAB), nn.Sequential(nn.Linear(HIDDEN, VOCAB)), quantised):
        model = tiny()
        model.set_output_embeddings(head)
        refusal(model, NotImplementedError, f"must be a plain torch.nn.Linear .* got .*{type(head).__name__}")
