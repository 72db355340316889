"""A model with process groups of its own, whose loss runs over them, and one that torch's FSDP2 shards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional

import loongforge.megatron
from loongforge.megatron import cpu
from tests.core.worlds import registry

CHECKS, check = registry()


def collection(world):
    """Megatron's groups, but tensor-parallel pairs [0, 2] and [1, 3] where Megatron's own are [0, 1] and [2, 3]."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.tp = world.groups["strided"][0]
    return groups


def gathered(tensor: torch.Tensor, group) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    return torch.cat(parts)


@check
def the_models_own_tensor_parallel_group(world):
    with cpu.stand_ins():
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        from tests.megatron.matrix import Row
        from tests.megatron.training import HIDDEN, LINEAR, SEQUENCE, VOCABULARY, batches, configuration

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        loongforge.megatron.install()
        group = world.groups["strided"][0]
        batch = dict(next(batches()))
        del batch["loss_mask"]
        for value in batch.values():  # data parallel replicas have other batches
            if value is not None:
                dist.broadcast(value, 0)
        batch["labels"].clamp_(min=0)
        for sp in (False, True):
            model = GPTModel(
                configuration(Row(tp=2, sp=sp), torch.float32, **LINEAR),
                get_gpt_layer_local_spec(),
                VOCABULARY,
                SEQUENCE,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
                pg_collection=collection(world),
            )
            assert model.output_layer.tp_group is group
            seen = []
            model.output_layer.register_forward_pre_hook(lambda layer, inputs, seen=seen: seen.append(inputs[0]))
            torch.nn.init.normal_(model.output_layer.weight, generator=torch.Generator().manual_seed(world.rank // 2))
            before = loongforge.megatron.counters.fused
            loss = model(**batch)
            assert loongforge.megatron.counters.fused == before + 1
            hidden = gathered(seen[0], group) if sp else seen[0].detach()
            weight = gathered(model.output_layer.weight, group)
            assert hidden.shape[-1] == HIDDEN and len(weight) == VOCABULARY
            logits = (hidden.double() @ weight.double().t()).transpose(0, 1)
            truth = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
            assert torch.allclose(loss.flatten().double(), truth, rtol=1e-5), (sp, loss.flatten()[:4], truth[:4])
            loss.sum().backward()
            assert model.output_layer.weight.grad.isfinite().all()
        loongforge.megatron.uninstall()
        parallel_state.destroy_model_parallel()


@check
def a_root_that_fsdp2_shards(world):
    """The output layer belongs to the root: whole in forward, a shard between forward and backward, whole again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with cpu.stand_ins():
        from megatron.core import parallel_state, tensor_parallel

        from tests.megatron.matrix import Row
        from tests.megatron.small import batch, build, relative_error, run, upstream

        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        loongforge.megatron.install()
        mesh = init_device_mesh("cpu", (world.size,))
        arguments = batch()
        for value in arguments.values():
            dist.broadcast(value, 0)  # the mean of the ranks' gradients is then that of each
        for tied in (False, True):
            expected = run(build(Row(tied=tied), linear=False), **arguments)
            model = build(Row(tied=tied))
            for module in (*model.decoder.layers, model):
                fully_shard(module, mesh=mesh, reshard_after_forward=True)
            before = loongforge.megatron.counters.fused
            loss = model(**arguments)
            assert loongforge.megatron.counters.fused == before + 1
            sharded = [parameter.to_local() for parameter in model.parameters()]
            assert sum(shard.numel() for shard in sharded) < 0.3 * sum(p.numel() for p in model.parameters())
            loss.backward(upstream())
            assert relative_error(loss, expected[0]) <= 1e-6
            for name, parameter in model.named_parameters():
                error = relative_error(parameter.grad.full_tensor(), expected[1][name])
                assert error <= 1e-5, (tied, name, error)
        model = build()
        fully_shard(model.output_layer, mesh=mesh)  # as Megatron does with Transformer Engine's layers
        try:
            model(**arguments)
        except NotImplementedError as error:
            assert "FSDPColumnParallelLinear" in str(error)
        else:
            raise AssertionError("an output layer that is sharded by itself must be refused")
        loongforge.megatron.uninstall()
        parallel_state.destroy_model_parallel()
