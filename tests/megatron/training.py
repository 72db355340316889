"""A small model of megatron-core on CPU: built, trained and measured, once per configuration of a row.

Imported by worker.py after the stand-ins and the hook are in place.  T = sequence * micro batch tokens.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.megatron.matrix import Row

try:
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
except ImportError:  # up to 0.17
    from megatron.core.models.mamba.mamba_model import MambaModel as HybridModel
    from megatron.core.ssm.mamba_block import MambaStack as HybridStack
    from megatron.core.ssm.mamba_block import MambaStackSubmodules as HybridStackSubmodules

SEQUENCE, MICRO_BATCH, MICRO_BATCHES = 32, 2, 2
VOCABULARY, HIDDEN = 512, 32
STEPS = 20
LOSS_SCALE = 2.0**12  # of fp16 runs
LINEAR = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}


@dataclass
class Run:
    """What one training run left behind on this rank."""

    losses: list[float] = field(default_factory=list)  # one a step, last stage only
    grads: dict[str, torch.Tensor] = field(default_factory=dict)  # of step 1
    logits_sized: list[str] = field(default_factory=list)  # allocations of T * V elements or more in step 1
    eval_loss: torch.Tensor | None = None
    eval_logits_sized: list[str] = field(default_factory=list)
    logits: torch.Tensor | None = None  # of a forward without labels
    unlabelled_grads: dict[str, torch.Tensor] = field(default_factory=dict)  # of MTP that derives its labels


class AllocationWatch(TorchDispatchMode):
    """Lists operations whose result is new memory of at least ``limit`` elements."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.numel() >= self.limit and _storage(leaf) not in known:
                self.found.append(f"{func} -> {list(leaf.shape)}")
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def configuration(row: Row, dtype: torch.dtype, **fusion) -> TransformerConfig:
    """Megatron's configuration of one row; ``fusion`` is empty or LINEAR."""
    mup = {"use_mup": True, "mup_base_hidden_size": 8} if row.mup else {}
    experts = {}
    if row.experts:
        dispatcher = "alltoall" if row.overlap else "allgather"
        experts = {"num_moe_experts": row.experts, "moe_router_topk": 2, "moe_token_dispatcher_type": dispatcher}
        experts["overlap_moe_expert_parallel_comm"] = row.overlap and dtype != torch.float32  # it refuses fp32
    config = TransformerConfig(
        num_layers=2 * row.vpp if row.model == "gpt" else 4,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        tensor_model_parallel_size=row.tp,
        pipeline_model_parallel_size=row.pp,
        virtual_pipeline_model_parallel_size=row.vpp if row.vpp > 1 else None,
        context_parallel_size=row.cp,
        expert_model_parallel_size=row.ep,
        sequence_parallel=row.sp,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_softmax_in_fp32=True,
        gradient_accumulation_fusion=row.accumulation_fusion,
        calculate_per_token_loss=row.per_token,
        mtp_num_layers=row.mtp or None,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        add_bias_linear=not row.experts,
        recompute_granularity="full" if row.recompute else None,
        recompute_method="uniform" if row.recompute else None,
        recompute_num_layers=1 if row.recompute else None,
        **({"mtp_detach_heads": True} if row.detach else {}),
        **experts,
        **mup,
        **fusion,
    )
    config.finalize_model_grads_func = finalize_model_grads
    return config


def build_model(row: Row, config: TransformerConfig, vp_stage: int | None = None) -> torch.nn.Module:
    """GPTModel, or HybridModel of attention and MLP layers, with the same weights for every configuration."""
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    torch.manual_seed(7)
    common = {
        "config": config,
        "vocab_size": VOCABULARY,
        "max_sequence_length": SEQUENCE * row.cp,
        "pre_process": parallel_state.is_pipeline_first_stage() and not vp_stage,
        "post_process": parallel_state.is_pipeline_last_stage() and vp_stage in (None, row.vpp - 1),
        "share_embeddings_and_output_weights": row.tied,
        "position_embedding_type": "rope",
    }
    spec = get_gpt_layer_local_spec(num_experts=row.experts or None, moe_grouped_gemm=False)
    if row.model == "hybrid":
        names = inspect.signature(HybridModel.__init__).parameters
        prefix = "hybrid" if "hybrid_stack_spec" in names else "mamba"
        pattern = "hybrid_layer_pattern" if "hybrid_layer_pattern" in names else "hybrid_override_pattern"
        layers = "----" if row.cp > 1 else "*-*-" if row.pp == 1 or pattern == "hybrid_override_pattern" else "*-|*-"
        layers += "/*-" * row.mtp
        stack = _hybrid_spec(spec, with_mtp=bool(row.mtp))
        model = HybridModel(**common, **{f"{prefix}_stack_spec": stack, pattern: layers})
    else:
        mtp_spec = None
        if row.mtp:
            mtp_spec = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage)
        model = GPTModel(transformer_layer_spec=spec, mtp_block_spec=mtp_spec, vp_stage=vp_stage, **common)
    with torch.no_grad():  # bf16 and fp32 runs of a row start from the same numbers, and norms are not all ones
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
            parameter.copy_(parameter.bfloat16())
    return model


def _hybrid_spec(gpt_spec: ModuleSpec, with_mtp: bool) -> ModuleSpec:
    mtp = {}
    if with_mtp:  # only the norms and the projection: its layers come from the pattern
        names = multi_token_prediction
        head = names.MultiTokenPredictionLayerSubmodules(
            enorm=WrappedTorchNorm,
            hnorm=WrappedTorchNorm,
            layer_norm=WrappedTorchNorm,
            eh_proj=tensor_parallel.ColumnParallelLinear,
            mtp_model_layer=None,
        )
        heads = [ModuleSpec(module=names.MultiTokenPredictionLayer, submodules=head)]
        block = names.MultiTokenPredictionBlockSubmodules(layer_specs=heads)
        mtp["mtp_block_spec"] = ModuleSpec(module=names.MultiTokenPredictionBlock, submodules=block)
    parts = gpt_spec.submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm, self_attention=parts.self_attention, self_attn_bda=get_bias_dropout_add
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=WrappedTorchNorm, mlp=parts.mlp, mlp_bda=get_bias_dropout_add)
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=TransformerLayer, submodules=mlp),
            **mtp,
        ),
    )


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Endless micro batches of a language that can be learnt, with some tokens masked out of the loss."""
    table = torch.randint(0, VOCABULARY, (VOCABULARY,), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(42 + parallel_state.get_data_parallel_rank())
    sequence = SEQUENCE * parallel_state.get_context_parallel_world_size()
    while True:
        tokens = torch.empty(MICRO_BATCH, sequence + 1, dtype=torch.long)
        tokens[:, 0] = torch.randint(0, VOCABULARY, (MICRO_BATCH,), generator=generator)
        for position in range(sequence):
            tokens[:, position + 1] = table[tokens[:, position]]
        labels = tokens[:, 1:].contiguous()
        mask = (torch.rand(MICRO_BATCH, sequence, generator=generator) > 0.2).float()
        batch = {
            "input_ids": tokens[:, :-1].contiguous(),
            "position_ids": torch.arange(sequence)[None].expand(MICRO_BATCH, -1).contiguous(),
            "attention_mask": torch.triu(torch.ones(sequence, sequence, dtype=torch.bool), 1)[None, None],
            # As Megatron's datasets pad: negative labels, which the loss mask takes out later.
            "labels": torch.where((mask == 0) & (torch.arange(sequence) > sequence // 2), -1, labels),
            "loss_mask": mask,
        }
        yield _slice_of_this_context_rank(batch)


def _slice_of_this_context_rank(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if size == 1:
        return batch
    shares = {name: tensor.chunk(size, dim=1)[rank].contiguous() for name, tensor in batch.items() if tensor.dim() == 2}
    return {**shares, "attention_mask": None}  # there is no attention


def _loss(per_token: bool, mask: torch.Tensor, output: torch.Tensor) -> tuple:
    total, count = (output.float().view(-1) * mask.view(-1)).sum(), mask.sum()
    if per_token:
        return total, count.to(torch.int), {"loss": total.detach() / count}
    return total / count, {"loss": total.detach() / count}


def _forward_step(
    row: Row, iterator: Iterator[dict], model: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple:
    batch = dict(next(iterator))
    mask = batch.pop("loss_mask")
    if row.mtp:
        batch["loss_mask"] = mask
    forward = model.build_schedule_plan if return_schedule_plan else model
    return forward(**batch), partial(_loss, row.per_token, mask)


def train(row: Row, dtype: torch.dtype, **fusion) -> Run:
    """STEPS steps; ``fusion`` is empty or LINEAR."""
    run = Run()
    config = configuration(row, dtype, **fusion)
    bare = [build_model(row, config, stage if row.vpp > 1 else None) for stage in range(row.vpp)]
    if row.pp == 1:
        _evaluate(bare[0], row, run)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not row.low_grads,
        overlap_grad_reduce=row.dist_opt,
        use_distributed_optimizer=row.dist_opt,
        overlap_param_gather=row.dist_opt,
    )
    models = [Float16Module(config, model) if dtype != torch.float32 else model for model in bare]
    models = [DistributedDataParallel(config, ddp, model) for model in models]
    settings = OptimizerConfig(
        optimizer="adam",
        lr=3e-3,
        weight_decay=0.0,
        clip_grad=1.0,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        initial_loss_scale=LOSS_SCALE,
        params_dtype=dtype,
        use_distributed_optimizer=row.dist_opt,
        overlap_param_gather=row.dist_opt,
    )
    optimizer = get_megatron_optimizer(settings, models)
    config.grad_scale_func = optimizer.scale_loss if dtype == torch.float16 else None
    scale = LOSS_SCALE if dtype == torch.float16 else 1.0
    schedule, iterators = get_forward_backward_func(), [batches() for _ in models]
    for step in range(STEPS):
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        watch = AllocationWatch(_logits_per_rank(row))
        with watch if step == 0 else contextlib.nullcontext():
            results = schedule(
                forward_step_func=partial(_forward_step, row),
                data_iterator=iterators if row.vpp > 1 else iterators[0],
                model=models,
                num_microbatches=MICRO_BATCHES,
                seq_length=SEQUENCE * row.cp,
                micro_batch_size=MICRO_BATCH,
                forward_only=False,
            )
        if step == 0:
            run.logits_sized = watch.found
            run.grads = {
                f"{stage}.{name}" if stage else name: parameter.main_grad.float() / scale
                for stage, model in enumerate(bare)
                for name, parameter in model.named_parameters()
            }
        optimizer.step()
        if results:
            run.losses.append(sum(float(result["loss"]) for result in results) / len(results))
    return run


def _evaluate(model: torch.nn.Module, row: Row, run: Run) -> None:
    batch = dict(next(batches()))
    mask = batch.pop("loss_mask")
    extra = {"loss_mask": mask} if row.mtp else {}
    model.eval()
    with torch.no_grad():
        with AllocationWatch(_logits_per_rank(row)) as watch:
            run.eval_loss = model(**batch, **extra) * mask
        run.eval_logits_sized = watch.found
        batch.pop("labels")
        if not row.mtp:
            run.logits = model(**batch)
    model.train()
    if row.mtp and _derives_labels() and not row.accumulation_fusion:  # that one needs DDP's buffers
        multi_token_prediction.MTPLossAutoScaler.set_loss_scale(torch.ones(1))  # an earlier run left its own
        run.logits = model(**batch, **extra)
        run.logits.float().square().mean().backward()
        run.unlabelled_grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        run.logits = run.logits.detach()
        model.zero_grad(set_to_none=True)


def _derives_labels() -> bool:
    """Whether MTP makes labels of its own from the tokens where none are given."""
    process = getattr(multi_token_prediction, "process_mtp_loss", None)
    return process is not None and "input_ids" in inspect.signature(process).parameters


def _logits_per_rank(row: Row) -> int:
    return SEQUENCE * MICRO_BATCH * VOCABULARY // row.tp
