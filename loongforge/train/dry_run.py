"""Check a config to the end without data, memory or processes: the real model is built without storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from loongforge.train.config import TrainConfig
from loongforge.train.data import load_run_tokenizer
from loongforge.train.distributed import check_world_size, use_cpu_stand_ins, world_from_environment
from loongforge.train.errors import require_packages
from loongforge.train.loop import install_output_layer
from loongforge.train.model import build_gpt, transformer_config
from loongforge.train.output_layer import describe_output_layer


def dry_run(config: TrainConfig) -> str:
    """What the run would be: sizes, parameters per process, plan of the output layer."""
    require_packages("megatron.core", extra="train")
    use_cpu_stand_ins()
    parallel, training = config.parallel, config.training
    model_parallel = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    world_size = max(model_parallel, world_from_environment()[1])
    check_world_size(config, world_size)
    vocab_size = config.model.vocab_size or load_run_tokenizer(config).vocab_size
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    install_output_layer(config)
    with _pretended_processes(config, world_size):
        megatron_config = transformer_config(config, perform_initialization=False, use_cpu_initialization=False)
        with torch.device("meta"), _EverythingOnMeta():
            model = build_gpt(config, megatron_config, vocab_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = training.global_batch_size * config.model.seq_length
    return (
        f"processes: {world_size} (tensor {parallel.tensor_model_parallel_size} x pipeline "
        f"{parallel.pipeline_model_parallel_size} x data {world_size // model_parallel})\n"
        f"model: {parameters:,} parameters on the first process, vocabulary {vocab_size}\n"
        f"training: {training.train_iters} steps of {tokens:,} tokens\n"
        f"{describe_output_layer(config, vocab_size, device)}\n"
        "dry run: the config is valid, nothing was trained"
    )


@contextmanager
def _pretended_processes(config: TrainConfig, world_size: int) -> Iterator[None]:
    """Megatron's groups as rank 0 of ``world_size`` sees them, without any other process."""
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.parallel.pipeline_model_parallel_size,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(config.training.seed, force_reset_rng=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class _EverythingOnMeta(torch.overrides.TorchFunctionMode):
    """megatron-core names the GPU when it allocates; here that becomes the meta device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
