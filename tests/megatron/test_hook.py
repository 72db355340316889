"""install and uninstall, what is fused and what is not, and every refusal by name."""

from __future__ import annotations

import inspect
import types

import pytest
import torch
from torch import nn

import loongforge.megatron
from loongforge.megatron import counters, hook, support, versions
from tests.megatron.matrix import Row
from tests.megatron.small import assert_same, batch, build, relative_error, run, upstream
from tests.megatron.training import AllocationWatch

LOGITS = 32 * 2 * 512


# ---------------------------------------------------------------- install and uninstall


def hooked_functions() -> dict[str, object]:
    from megatron.core import distributed
    from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel import ColumnParallelLinear

    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel", "TorchFullyShardedDataParallel")
    classes = (*hook._model_classes(), LanguageModule, ColumnParallelLinear, MegatronFSDP)
    classes += tuple(getattr(distributed, name) for name in wrappers)
    names = ("__init__", "forward", "_postprocess", "compute_language_model_loss")
    found = {f"{cls.__name__}.{name}": vars(cls).get(name) for cls in classes for name in names}
    return {**found, "choices": ModelParallelConfig.__dataclass_fields__["cross_entropy_fusion_impl"].type}


@pytest.mark.usefixtures("megatron")
def test_install_twice_is_install_once_and_uninstall_restores_everything():
    before = hooked_functions()
    report = loongforge.megatron.install()
    hooked = hooked_functions()
    assert loongforge.megatron.install() == report and hooked_functions() == hooked
    changed = {name for name in before if before[name] is not hooked[name]}
    assert len(changed) == 12 and "linear" in str(hooked["choices"]) and "linear" not in str(before["choices"])
    assert str(report).startswith("fused linear cross-entropy in GPTModel, ") and report.megatron_version in str(report)
    assert inspect.signature(hooked["GPTModel.__init__"]) == inspect.signature(before["GPTModel.__init__"])
    assert loongforge.megatron.is_installed()
    loongforge.megatron.uninstall()
    loongforge.megatron.uninstall()
    assert hooked_functions() == before and not loongforge.megatron.is_installed()


@pytest.mark.usefixtures("hook")
def test_uninstall_refuses_to_drop_someone_elses_patch(monkeypatch):
    from megatron.core.models.gpt.gpt_model import GPTModel

    with monkeypatch.context() as patch:
        patch.setattr(GPTModel, "_postprocess", lambda *args, **kwargs: None)
        with pytest.raises(RuntimeError, match=r"GPTModel._postprocess was replaced again"):
            loongforge.megatron.uninstall()
    assert loongforge.megatron.is_installed()


@pytest.mark.parametrize("version", ["0.15.3", "0.10.0rc0", "0.20.0", "0.20.0rc1", "1.0", "main"])
def test_unknown_versions_are_refused(version):
    with pytest.raises(RuntimeError, match=f"from 0.16.0 up to, but not including, 0.20.0; this is {version}"):
        versions.check_supported(version)


@pytest.mark.parametrize("version", ["0.16.0rc0", "0.16.1", "0.17.0", "0.18.2", "0.19.2", "0.19.0rc2"])
def test_known_versions(version):
    versions.check_supported(version)


def test_missing_megatron_names_the_cause_and_the_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "megatron.core", None)
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(ImportError, match=r"\(.*megatron.*\): pip install 'loongforge\[megatron\]'"):
        versions.megatron_version()


# ---------------------------------------------------------------- what is fused


@pytest.mark.usefixtures("hook")
def test_the_flags_decide():
    unfused = run(build(linear=False))
    assert counters.fused == 0
    native = build(linear=False, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native")
    only_impl = build(linear=False, cross_entropy_fusion_impl="linear")
    assert relative_error(run(native)[0], unfused[0]) < 1e-5
    assert torch.equal(run(only_impl)[0], unfused[0])
    assert counters.fused == 0
    assert_same(run(build()), unfused)
    assert counters.fused == 1 and counters.materialized == 0


@pytest.mark.usefixtures("megatron")
def test_megatron_without_the_flags_is_unchanged():
    before = run(build(linear=False))
    loongforge.megatron.install()
    try:
        after = run(build(linear=False))
    finally:
        loongforge.megatron.uninstall()
    assert torch.equal(before[0], after[0]) and all(torch.equal(before[1][name], after[1][name]) for name in before[1])


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize("tied", [False, True])
def test_the_right_weight_is_used(tied):
    model = build(Row(tied=tied))
    first = model(**batch()).detach()
    weight = model.embedding.word_embeddings.weight if tied else model.output_layer.weight
    with torch.no_grad():
        weight[5] += 1.0
    unfused = build(Row(tied=tied), linear=False)
    unfused.load_state_dict(model.state_dict())
    expected = unfused(**batch())
    assert relative_error(model(**batch()), expected) < 1e-6 < relative_error(first, expected)


@pytest.mark.usefixtures("hook")
def test_evaluation_is_fused_too():
    expected = build(linear=False).eval()(**batch())
    model = build().eval()
    for grad in (True, False):
        with torch.set_grad_enabled(grad), AllocationWatch(LOGITS) as watch:
            loss = model(**batch())
        assert loss.requires_grad is grad and watch.found == []
        assert relative_error(loss, expected) < 1e-6
    assert counters.fused == 2


@pytest.mark.usefixtures("hook")
def test_without_labels_real_logits_flow(caplog):
    hook._warn_once.cache_clear()
    model, unfused = build(), build(linear=False)
    logits = model(**batch(labels=None))
    expected = unfused(**batch(labels=None))
    assert type(logits) is torch.Tensor and logits.shape == (2, 32, 512) and torch.equal(logits, expected)
    # A loss that the caller computes from them is Megatron's, and not silently so.
    assert "real logits" not in caplog.text
    target = batch()["labels"]
    loss = model.compute_language_model_loss(target, logits.transpose(0, 1).contiguous())
    assert torch.equal(loss, unfused.compute_language_model_loss(target, expected.transpose(0, 1).contiguous()))
    assert model.config.cross_entropy_loss_fusion is True
    assert counters.fused == 0 and "outside a labelled forward: it is computed from real logits" in caplog.text


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize("name", ["inference_context", "inference_params", "output_processor"])
def test_inference_and_output_processors_get_real_logits(name):
    model, wants = build(), hook._only_loss_is_wanted
    assert wants(model, {"labels": 1, name: None}) and not wants(model, {"labels": 1, name: object()})


@pytest.mark.usefixtures("hook")
def test_the_config_logger_gets_real_logits(tmp_path, caplog):
    expected = build(linear=False)(**batch())
    model = build()
    model.config.config_logger_dir = str(tmp_path)
    hook._warn_once.cache_clear()
    assert relative_error(model(**batch()), expected) < 1e-6
    (saved,) = tmp_path.glob("input_and_logits*.pth")
    assert torch.load(saved, weights_only=False)["logits"].shape == (32, 2, 512)
    assert counters.fused == 0 and "config_logger_dir" in caplog.text


@pytest.mark.usefixtures("hook")
def test_a_frozen_head_gets_no_gradient_and_the_rest_does():
    unfused, model = build(linear=False), build()
    for each in (unfused, model):
        each.output_layer.weight.requires_grad_(False)
    expected, found = run(unfused), run(model)
    assert found[1].pop("output_layer.weight") is None and expected[1].pop("output_layer.weight") is None
    assert_same(found, expected)


@pytest.mark.usefixtures("hook")
def test_gathered_output_is_fused_too():
    expected = run(build(linear=False))
    assert_same(run(build(), runtime_gather_output=True), expected)
    assert counters.fused == 1


@pytest.mark.usefixtures("hook")
def test_the_layer_keeps_its_class_and_its_checkpoint():
    from megatron.core.tensor_parallel import ColumnParallelLinear

    model, unfused = build(), build(linear=False)
    model(**batch())
    assert type(model.output_layer) is ColumnParallelLinear
    assert model.state_dict().keys() == unfused.state_dict().keys()
    assert vars(model.output_layer).keys() == vars(unfused.output_layer).keys()


@pytest.mark.usefixtures("hook")
def test_an_error_inside_the_forward_leaves_the_layer_as_it_was():
    model = build()
    with pytest.raises(ValueError, match="target must have shape"):
        model(**batch(labels=torch.zeros(2, 5, dtype=torch.long)))
    assert not hasattr(model.output_layer, hook._MARK)
    assert_same(run(model), run(build(linear=False)))


# ---------------------------------------------------------------- what touches the logits


class Adapter(nn.Module):
    """A low-rank addition to the logits, as LoRA computes it."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.down = nn.Parameter(torch.randn(4, 32, generator=generator) * 0.1)
        self.up = nn.Parameter(torch.randn(512, 4, generator=generator) * 0.1)

    def forward(self, layer, args, output):
        return output[0] + args[0] @ self.down.t() @ self.up.t(), output[1]


@pytest.mark.usefixtures("hook")
def test_a_hook_that_adds_to_the_logits_trains_on_real_ones(caplog):
    hook._warn_once.cache_clear()
    results = []
    for linear in (False, True):
        model, adapter = build(linear=linear), Adapter()
        model.output_layer.register_forward_hook(adapter)
        loss, gradients = run(model)
        results.append((loss, {**gradients, "down": adapter.down.grad, "up": adapter.up.grad}))
    assert_same(results[1], results[0])
    assert counters.fused == 0 and counters.materialized == 1
    assert "computed from real logits" in caplog.text


@pytest.mark.usefixtures("hook")
def test_a_hook_that_only_reads_them_leaves_the_loss_fused():
    model, seen = build(), []
    model.output_layer.register_forward_hook(lambda layer, args, output: seen.append(output[0].detach().abs().mean()))
    assert_same(run(model), run(build(linear=False)))
    assert counters.fused == 1 and counters.materialized == 1 and seen[0] > 0


@pytest.mark.usefixtures("hook")
def test_logits_that_reach_no_loss_raise():
    model = build()
    model.compute_language_model_loss = lambda labels, logits: torch.zeros(2, 32)
    with pytest.raises(
        RuntimeError, match=r"GPTModel got DeferredLogits\(shape=\[32, 2, 512\].*neither computed a loss"
    ):
        model(**batch())


@pytest.mark.usefixtures("hook")
def test_a_loss_outside_the_graph_raises_rather_than_training_wrong():
    """An autograd Function gets the object without a tensor operation and reads it where no graph is recorded."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    model = build()
    model.compute_language_model_loss = lambda labels, logits: vocab_parallel_cross_entropy(
        logits, labels.t().contiguous()
    )
    with pytest.raises(RuntimeError, match="nor used it as a differentiable tensor"):
        model(**batch())
    with torch.no_grad():  # there is nothing to differentiate here
        assert model(**batch()).shape == (32, 2)


# ---------------------------------------------------------------- refusals


@pytest.mark.usefixtures("hook")
def test_a_wrapper_that_comes_later_is_refused_at_the_first_forward():
    class LoRALinear(nn.Module):
        def __init__(self, wrapped):
            super().__init__()
            self.wrapped = wrapped

        def forward(self, *args, **kwargs):
            return self.wrapped(*args, **kwargs)

    model = build()
    model.output_layer = LoRALinear(model.output_layer)
    with pytest.raises(NotImplementedError, match="GPTModel's output layer of class .*LoRALinear"):
        model(**batch())
    model.output_layer = model.output_layer.wrapped
    model(**batch())


@pytest.mark.usefixtures("hook")
def test_a_replaced_forward_is_refused_instead_of_training_unfused():
    model = build()
    weight = model.output_layer.weight
    model.output_layer.forward = lambda input_, **_: (input_ @ weight.t(), None)
    with pytest.raises(RuntimeError, match="did not come from its output layer's own forward"):
        model(**batch())


@pytest.mark.usefixtures("hook")
def test_an_unknown_output_layer_class_is_refused_when_the_model_is_built(monkeypatch):
    from megatron.core import tensor_parallel

    class OtherLinear(tensor_parallel.ColumnParallelLinear):
        pass

    monkeypatch.setattr(tensor_parallel, "ColumnParallelLinear", OtherLinear)
    with pytest.raises(NotImplementedError, match="OtherLinear; it knows megatron.core.tensor_parallel.ColumnParallel"):
        build()


@pytest.mark.usefixtures("hook")
def test_a_model_with_another_loss_path_is_refused_when_it_is_built():
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    from tests.megatron.training import LINEAR, configuration

    config = configuration(Row(), torch.float32, **LINEAR)
    with pytest.raises(NotImplementedError, match="does not support BertModel; it knows GPTModel and"):
        BertModel(config, 2, bert_layer_local_spec, 512, 32)


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gtp_remat_size", 2, "does not support gtp_remat_size = 2 > 1"),
        ("bias", nn.Parameter(torch.zeros(512)), "does not support an output layer with a bias"),
        ("disable_grad_reduce", True, "does not support disable_grad_reduce=True"),
    ],
)
def test_refused_settings_of_the_output_layer(name, value, message):
    model = build()
    setattr(model.output_layer, name, value)
    for check in (lambda: support.check_output_layer(model), lambda: model(**batch())):
        with pytest.raises(NotImplementedError, match=message):
            check()


@pytest.mark.usefixtures("hook")
def test_defer_embedding_wgrad_compute_is_refused_when_the_model_is_built():
    with pytest.raises(NotImplementedError, match="does not support defer_embedding_wgrad_compute"):
        build(defer_embedding_wgrad_compute=True)


@pytest.mark.usefixtures("hook")
def test_the_mxfp8_head_is_refused():
    model = build()
    model.output_layer.__class__ = type("TELMHeadColumnParallelLinear", (type(model.output_layer),), {})
    with pytest.raises(
        NotImplementedError, match="does not support TELMHeadColumnParallelLinear.*fp8_output_proj=False"
    ):
        model(**batch())


def tensor_parallel_layer(**attributes) -> tuple[types.SimpleNamespace, nn.Parameter]:
    layer = types.SimpleNamespace(output_size=512, output_size_per_partition=256, input_size=32, weight=None)
    weight = nn.Parameter(torch.zeros(256, 32))
    for name, value in attributes.items():
        setattr(weight, name, value)
    return layer, weight


def test_a_weight_that_is_not_sharded_is_refused():
    layer, weight = tensor_parallel_layer(tensor_model_parallel=True, partition_dim=0)
    assert support.check_weight(layer, weight) is weight
    assert support.check_weight(layer, weight.detach()).shape == weight.shape
    with pytest.raises(ValueError, match=r"this rank's shard \[256, 32\] of a vocabulary of 512 over 2 .* \[512, 32\]"):
        support.check_weight(layer, nn.Parameter(torch.zeros(512, 32)))
    with pytest.raises(ValueError, match=r"got \[0\]"):
        support.check_weight(layer, nn.Parameter(torch.zeros(0)))
    with pytest.raises(ValueError, match="tensor_model_parallel=False"):
        support.check_weight(*tensor_parallel_layer(tensor_model_parallel=False))
    with pytest.raises(ValueError, match="partition_dim=1"):
        support.check_weight(*tensor_parallel_layer(tensor_model_parallel=True, partition_dim=1))
    with pytest.raises(RuntimeError, match="no weight of its own"):
        support.check_weight(layer, None)


@pytest.mark.usefixtures("hook")
def test_a_label_beyond_the_vocabulary_never_gives_a_plausible_loss(monkeypatch):
    model, target = build(), batch()["labels"]
    target[1, 3] = 512
    loss = model(**batch(labels=target))
    assert loss.isnan().nonzero().tolist() == [[1, 3]]
    (loss * (loss == loss)).nan_to_num().backward(upstream())
    assert model.output_layer.weight.grad.isnan().all()
    monkeypatch.setenv("LCE_CHECK_LABELS", "1")
    with pytest.raises(IndexError, match="512"):
        model(**batch(labels=target))
