"""Configuration -> megatron-core's GPTModel, wrapped for data parallelism, with optimizer and schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from loongforge.train.config import TrainConfig
from loongforge.train.errors import ConfigError, require_packages
from loongforge.train.local_layers import local_block_spec, local_layer_spec


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that changes while training, apart from the data position."""

    model: Any
    """DistributedDataParallel around the GPTModel (and Float16Module in bf16)."""
    config: Any
    """Its TransformerConfig."""
    optimizer: Any
    scheduler: Any


def padded_vocab_size(config: TrainConfig, vocab_size: int) -> int:
    """``vocab_size`` rounded up so that every tensor-parallel rank gets the same aligned number of rows."""
    multiple = config.model.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def parameter_dtype(config: TrainConfig) -> torch.dtype:
    """Dtype of weights and hidden states."""
    return torch.bfloat16 if config.training.bf16 else torch.float32


def transformer_config(config: TrainConfig, **extra: Any) -> Any:
    """megatron-core's TransformerConfig; what it refuses becomes a :class:`ConfigError`."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    model, parallel, training = config.model, config.parallel, config.training
    dtype = parameter_dtype(config)
    settings: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "normalization": model.normalization,
        "layernorm_epsilon": model.norm_epsilon,
        "gated_linear_unit": model.swiglu,
        "activation_func": torch.nn.functional.silu if model.swiglu else torch.nn.functional.gelu,
        "add_bias_linear": not model.disable_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "init_method_std": model.init_method_std,
        "mtp_num_layers": model.mtp_num_layers,
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": training.bf16,
        "recompute_granularity": training.recompute_granularity,
        "cross_entropy_loss_fusion": config.output_layer.cross_entropy_loss_fusion,
        "cross_entropy_fusion_impl": config.output_layer.cross_entropy_fusion_impl,
        # The fused kernels below are CUDA extensions that megatron-core's wheel does not bring.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
    }
    if training.recompute_granularity == "full":
        settings.update(recompute_method="uniform", recompute_num_layers=1)
    if not config.output_layer.cross_entropy_loss_fusion:
        settings["cross_entropy_fusion_impl"] = "native"  # not read, but the value must be one megatron-core knows
    settings.update(extra)
    try:
        return TransformerConfig(**settings)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"megatron-core refuses this model: {error}") from error


def build_gpt(config: TrainConfig, megatron_config: Any, vocab_size: int) -> torch.nn.Module:
    """This rank's part of the bare GPTModel, with megatron-core's parallel groups in place."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    model, use_te = config.model, config.training.transformer_impl == "transformer_engine"
    if use_te:
        require_packages("transformer_engine", extra="te")
        layer_spec = block_spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        layer_spec = local_layer_spec(model.normalization)
        block_spec = local_block_spec(megatron_config, layer_spec)
    mtp_spec = None
    if model.mtp_num_layers:
        mtp_spec = gpt_layer_specs.get_gpt_mtp_block_spec(megatron_config, layer_spec, use_transformer_engine=use_te)
    try:
        return GPTModel(
            config=megatron_config,
            transformer_layer_spec=block_spec,
            vocab_size=padded_vocab_size(config, vocab_size),
            max_sequence_length=model.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type=model.position_embedding_type,
            rotary_base=model.rotary_base,
            mtp_block_spec=mtp_spec,
        )
    except AssertionError as error:
        raise ConfigError(f"megatron-core cannot build this model: {error}") from error


def build_train_state(config: TrainConfig, vocab_size: int, device: torch.device) -> TrainState:
    """Model, optimizer and schedule at step 0; every random generator must be seeded."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module

    parallel = config.parallel
    megatron_config = transformer_config(config)
    model = build_gpt(config, megatron_config, vocab_size).to(device)
    if config.training.bf16:
        model = Float16Module(megatron_config, model)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
    )
    model = DistributedDataParallel(megatron_config, ddp_config, model)
    optimizer = _build_optimizer(config, model)
    megatron_config.finalize_model_grads_func = finalize_model_grads
    megatron_config.grad_scale_func = optimizer.scale_loss
    if parallel.overlap_grad_reduce:
        megatron_config.no_sync_func = model.no_sync
    return TrainState(
        model=model, config=megatron_config, optimizer=optimizer, scheduler=_build_scheduler(config, optimizer)
    )


def _build_optimizer(config: TrainConfig, model: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    training = config.training
    settings = OptimizerConfig(
        optimizer="adam",
        lr=training.lr,
        min_lr=training.min_lr,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_eps=training.adam_eps,
        clip_grad=training.clip_grad,
        bf16=training.bf16,
        params_dtype=parameter_dtype(config),
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )
    return get_megatron_optimizer(settings, [model])


def _build_scheduler(config: TrainConfig, optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    training = config.training
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=training.lr,
        min_lr=training.min_lr,
        lr_warmup_steps=training.lr_warmup_iters,
        lr_decay_steps=training.lr_decay_iters or training.train_iters,
        lr_decay_style=training.lr_decay_style,
        start_wd=training.weight_decay,
        end_wd=training.weight_decay,
        wd_incr_steps=training.train_iters,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
