"""What came after a model was built is refused when it is wrapped for data parallelism."""

from __future__ import annotations

import sys

import pytest
from torch import nn
from torch.distributed import DeviceMesh

import loongforge.megatron
from loongforge.megatron import counters
from tests.megatron.small import assert_same, batch, build, run

REFUSED = "does not support Megatron-FSDP .* use the distributed optimizer instead of --use-megatron-fsdp"


class Owner(nn.Module):
    """As a VLM owns a language model, inside Megatron's Float16Module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = nn.ModuleDict({"vision": nn.Linear(2, 2), "language": model})


def adapt(model: nn.Module) -> nn.Module:
    """Another class around the output layer, as LoRA and PEFT put it there."""
    model.output_layer = nn.Sequential(model.output_layer)
    return model


def data_parallel(model: nn.Module) -> nn.Module:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


@pytest.fixture
def fsdp(megatron, monkeypatch):
    """Megatron-FSDP's two constructors by name, which need CUDA: in place of their own code, they note the model."""
    from megatron.core.distributed import FullyShardedDataParallel
    from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP

    def adapter(self, config, ddp_config, module, fsdp_unit_modules=None):
        wrapped.append(module)

    def inner(self, module, dist_index, ddp_config=None):
        wrapped.append(module)

    wrapped: list[nn.Module] = []
    monkeypatch.setattr(FullyShardedDataParallel, "__init__", adapter)
    monkeypatch.setattr(MegatronFSDP, "__init__", inner)
    loongforge.megatron.install()
    calls = (
        lambda module: FullyShardedDataParallel(None, None, module),
        lambda module: FullyShardedDataParallel(config=None, ddp_config=None, module=module),
        lambda module: MegatronFSDP(module, None),
        lambda module: MegatronFSDP(dist_index=None, module=module),
    )
    yield calls, wrapped
    loongforge.megatron.uninstall()


def test_megatron_fsdp_is_refused_when_the_model_is_wrapped(fsdp):
    calls, wrapped = fsdp
    first_stage = build()
    first_stage.post_process, first_stage.output_layer = False, None
    for wrap in calls:
        for module in (build(), Owner(build()), first_stage):
            with pytest.raises(NotImplementedError, match=REFUSED):
                wrap(module)
    assert wrapped == []


def test_megatron_fsdp_takes_what_is_not_to_be_fused(fsdp):
    calls, wrapped = fsdp
    others = [
        build(linear=False),
        Owner(build(linear=False)),
        build(linear=False, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native"),
        build(linear=False, cross_entropy_fusion_impl="linear"),
        nn.Linear(2, 2),
    ]
    for wrap in calls:
        for module in others:
            wrap(module)
    assert [id(module) for module in wrapped] == [id(module) for module in others] * len(calls)
    fused = build()
    loongforge.megatron.uninstall()
    calls[0](fused)
    assert wrapped[-1] is fused


@pytest.mark.usefixtures("megatron")
def test_what_was_not_imported_is_neither_guarded_nor_imported(monkeypatch):
    """Megatron-FSDP may fail to import; Megatron's wrapper around it is there all the same."""
    from megatron.core.distributed.fsdp.src import megatron_fsdp

    original = megatron_fsdp.MegatronFSDP.__init__
    monkeypatch.delitem(sys.modules, megatron_fsdp.MegatronFSDP.__module__)
    loongforge.megatron.install()
    try:
        assert megatron_fsdp.MegatronFSDP.__init__ is original
        assert megatron_fsdp.MegatronFSDP.__module__ not in sys.modules
    finally:
        loongforge.megatron.uninstall()


@pytest.mark.usefixtures("hook")
def test_megatron_fsdp_that_came_by_other_means_is_refused_at_the_first_forward():
    model = build()
    model.output_layer.weight.__fsdp_param__ = True  # as Megatron-FSDP marks its parameters
    with pytest.raises(NotImplementedError, match=REFUSED):
        model(**batch())


@pytest.mark.usefixtures("hook")
def test_an_adapter_around_the_output_layer_is_refused_when_the_model_is_wrapped():
    for module in (adapt(build()), Owner(adapt(build()))):
        module.config = build().config
        with pytest.raises(NotImplementedError, match="GPTModel's output layer of class .*Sequential"):
            data_parallel(module)
    assert data_parallel(adapt(build(linear=False))).module.output_layer is not None
    first_stage = build()
    first_stage.post_process, first_stage.output_layer = False, None
    data_parallel(first_stage)
    model = build()
    data_parallel(model)
    assert counters.fused == 0
    model(**batch())
    assert counters.fused == 1


@pytest.mark.usefixtures("megatron")
def test_a_constructor_that_others_replaced_without_its_signature_is_guarded(monkeypatch):
    from megatron.core.distributed import DistributedDataParallel

    original = DistributedDataParallel.__init__
    monkeypatch.setattr(DistributedDataParallel, "__init__", lambda *args, **kwargs: original(*args, **kwargs))
    loongforge.megatron.install()
    try:
        assert data_parallel(build(linear=False)).module.output_layer is not None
        with pytest.raises(NotImplementedError, match="output layer of class .*Sequential"):
            data_parallel(adapt(build()))
    finally:
        loongforge.megatron.uninstall()


@pytest.mark.usefixtures("hook")
def test_torch_fsdp2_around_the_output_layer_is_refused_when_the_model_is_wrapped(monkeypatch):
    """Megatron shards the output layer by itself with Transformer Engine's layers, with the root with local ones."""
    from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel
    from megatron.core.distributed import torch_fully_sharded_data_parallel as wrapping
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class Mesh:
        from_group = staticmethod(lambda group, device: DeviceMesh.from_group(group, "cpu"))

    def shard(model: nn.Module, layers: str) -> nn.Module:
        model.config.transformer_impl = layers
        settings = DistributedDataParallelConfig()
        return TorchFullyShardedDataParallel(model.config, settings, model, {ColumnParallelLinear}).module

    monkeypatch.setattr(wrapping, "DeviceMesh", Mesh)
    with pytest.raises(NotImplementedError, match="output layer of class .*FSDPColumnParallelLinear"):
        shard(build(), "transformer_engine")
    shard(build(linear=False), "transformer_engine")
    expected = run(build(linear=False))
    loss, gradients = run(shard(build(), "local"))
    assert_same((loss, {name: gradient.full_tensor() for name, gradient in gradients.items()}), expected)
    assert counters.fused == 1
