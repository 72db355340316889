"""A fused model in two processes over gloo, beside the same model unfused (run by ``test_transformers_sharded.py``)."""

from __future__ import annotations

import warnings

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from loongforge.integrations.transformers import fuse_loss
from tests.core.worlds import registry
from tests.helpers import relative, worst
from tests.integrations.tiny_models import IDS, LABELS, tiny

CHECKS, check = registry()


def two_steps(model, rank):
    """Losses and gradients of two steps, with other tokens on each rank."""
    results = []
    for _ in range(2):
        model.zero_grad()
        loss = model(input_ids=IDS.roll(rank, 1), labels=LABELS.roll(rank, 1)).loss
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results += [loss.detach(), *(grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads)]
    return results


def same(world, wrap, name="LlamaForCausalLM", tolerance=2e-6, warning="", **changes):
    expected = two_steps(wrap(tiny(name, **changes)), world.rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = two_steps(wrap(fuse_loss(tiny(name, **changes))), world.rank)
    told = [str(one.message) for one in caught if "computed from logits" in str(one.message)]
    assert bool(told) == bool(warning) and all(warning in one for one in told), told
    assert len(actual) == len(expected) > 4
    assert world.largest(worst(relative(a, b) for a, b in zip(actual, expected, strict=True))) < tolerance


def sharded(*parts, **options):
    """``fully_shard`` of parts of a model by name, and of what is left."""

    def wrap(model):
        for name in parts:
            fully_shard(model.get_submodule(name), **options)
        return fully_shard(model, **options)

    return wrap


@check
def data_parallel(world):
    same(world, DistributedDataParallel)
    same(world, lambda model: DistributedDataParallel(model, find_unused_parameters=True), "MixtralForCausalLM")


@check
def fully_sharded(world):
    """The output layer alone, with the rest, beside the norm before it, kept after forward, and tied."""
    same(world, sharded("lm_head"))
    same(world, sharded("model.layers.0"), "Gemma2ForCausalLM")
    same(world, sharded("lm_head", reshard_after_forward=False))
    same(world, sharded("model.layers.0"), tie_word_embeddings=True)
    same(world, lambda model: (fully_shard([model.model.norm, model.lm_head]), fully_shard(model))[1])


@check
def fully_sharded_in_bfloat16(world):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    same(world, sharded("lm_head", mp_policy=policy), tolerance=3e-2)


@check
def tensor_parallel(world):
    """The plan's hook gathers the logits, so they are made."""
    mesh = init_device_mesh("cpu", (world.size,))

    def wrap(model):
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
        return model

    same(world, wrap, warning="torch.distributed.tensor")


@check
def sharded_before(world):
    try:
        fuse_loss(fully_shard(tiny()))
    except NotImplementedError as error:
        assert "FSDPLlamaForCausalLM" in str(error) and "before DDP, fully_shard" in str(error)
    else:
        raise AssertionError("a sharded model was taken")
