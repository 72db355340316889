"""What a run is: one keyword-only dataclass per section, fields named as Megatron names its flags.

The sentence under each field is its help text.  A YAML file holds the sections, a flag overrides one field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from loongforge.train.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The transformer, by megatron-core's names."""

    num_layers: int
    """Number of transformer layers."""

    hidden_size: int
    """Width of the residual stream."""

    num_attention_heads: int
    """Number of query heads."""

    seq_length: int
    """Tokens per sample."""

    ffn_hidden_size: int | None = None
    """Width of the feed-forward layer; unset: 4 * hidden_size."""

    num_query_groups: int | None = None
    """Number of key and value heads (grouped-query attention); unset: as many as query heads."""

    kv_channels: int | None = None
    """Width of one attention head; unset: hidden_size / num_attention_heads."""

    vocab_size: int | None = None
    """Vocabulary before padding; unset: the tokenizer's."""

    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times tensor_model_parallel_size."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of normalization."""

    norm_epsilon: float = 1e-5
    """Added to the variance in a normalization."""

    swiglu: bool = False
    """Gated feed-forward layer with SiLU instead of GELU."""

    disable_bias_linear: bool = False
    """Leave the bias out of every linear layer."""

    add_qkv_bias: bool = False
    """Keep the bias of the query, key and value projection though disable_bias_linear is set."""

    position_embedding_type: Literal["rope", "learned_absolute"] = "rope"
    """Rotary or learned positions."""

    rotary_base: int = 10000
    """Base of the rotary frequencies."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer a weight of its own instead of the embedding's."""

    mtp_num_layers: int | None = None
    """Number of multi-token-prediction layers, each with a loss through the same output layer."""

    attention_dropout: float = 0.0
    """Dropout of attention probabilities."""

    hidden_dropout: float = 0.0
    """Dropout of the residual branches."""

    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the run is spread over processes; what is left of the world size is data parallelism."""

    tensor_model_parallel_size: int = 1
    """Processes that share each layer's weights."""

    pipeline_model_parallel_size: int = 1
    """Processes that share the stack of layers."""

    sequence_parallel: bool = False
    """Split activations between tensor-parallel regions along the sequence."""

    use_distributed_optimizer: bool = False
    """Shard the optimizer's state over data-parallel processes."""

    overlap_grad_reduce: bool = False
    """Reduce gradients while backward still runs."""

    overlap_param_gather: bool = False
    """Gather updated parameters while forward already runs (needs use_distributed_optimizer)."""

    distributed_timeout_minutes: int = 10
    """After this long without an answer from another process the run ends with an error."""


@dataclass(frozen=True, kw_only=True)
class OutputLayerConfig:
    """How logits and loss are computed."""

    cross_entropy_loss_fusion: bool = True
    """Fuse the loss; off: Megatron's plain loss over materialised logits."""

    cross_entropy_fusion_impl: Literal["linear", "native"] = "linear"
    """linear: loongforge's fused output layer.  native: Megatron's fused loss over materialised logits."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Token files written by `loongforge preprocess`, or by Megatron's own tool."""

    data_path: list[str] | None = None
    """Prefixes of .bin/.idx files, or weights and prefixes in turn: 0.3 data/a 0.7 data/b."""

    tokenizer_model: str | None = None
    """Tokenizer file; unset: <first prefix>.tokenizer.json."""

    split: str = "969,30,1"
    """Shares of documents for training, validation and test."""

    data_cache_path: str | None = None
    """Folder of the sample index; unset: beside the data."""

    num_workers: int = 0
    """Processes that load batches ahead of the training process."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Optimizer, schedule and validation."""

    train_iters: int
    """Number of optimizer steps."""

    micro_batch_size: int
    """Samples per forward pass of one process."""

    global_batch_size: int
    """Samples per optimizer step over all processes."""

    lr: float
    """Peak learning rate."""

    min_lr: float = 0.0
    """Learning rate at the end of the decay."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "cosine"
    """Shape of the decay."""

    lr_decay_iters: int | None = None
    """Steps until min_lr is reached; unset: train_iters."""

    lr_warmup_iters: int = 0
    """Steps over which the learning rate rises from 0 to its peak."""

    weight_decay: float = 0.01
    """Decoupled weight decay; Megatron exempts biases and normalizations."""

    clip_grad: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""

    adam_beta1: float = 0.9
    """Decay of Adam's first moment."""

    adam_beta2: float = 0.999
    """Decay of Adam's second moment."""

    adam_eps: float = 1e-8
    """Added to the denominator of Adam's update."""

    bf16: bool = False
    """Train in bfloat16 with fp32 optimizer state; off: fp32."""

    seed: int = 1234
    """Seed of initial weights, dropout and sample order."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations of whole layers, or of attention, in backward."""

    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Layers from megatron-core itself or from Transformer Engine."""

    eval_interval: int = 1000
    """Steps between validations."""

    eval_iters: int = 10
    """Global batches per validation, the same ones each time; 0 turns validation off."""

    exit_interval: int | None = None
    """Save and stop at the first step that is a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints go and come from."""

    save: str | None = None
    """Folder for checkpoints; unset: none are written."""

    load: str | None = None
    """Folder to continue from; where it equals `save` and holds no checkpoint yet the run starts anew."""

    ckpt_step: int | None = None
    """Step to load; unset: the latest."""

    save_interval: int | None = None
    """Steps between checkpoints; unset: only at the end."""

    finetune: bool = False
    """Take only the weights of `load`: step, optimizer, schedule, data position and random state start anew."""

    override_opt_param_scheduler: bool = False
    """Continue with this run's learning-rate and weight-decay schedule though the checkpoint has another."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is reported."""

    log_interval: int = 10
    """Steps between log lines and TensorBoard scalars."""

    tensorboard_dir: str | None = None
    """Folder for TensorBoard events; unset: none are written."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run."""

    model: ModelConfig
    training: TrainingConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    output_layer: OutputLayerConfig = field(default_factory=OutputLayerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        """Refuse what no section can see alone; megatron-core checks the rest when the model is built."""
        _check_numbers(self)
        model, parallel, training = self.model, self.parallel, self.training
        tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        for name, value in (
            ("num_attention_heads", model.num_attention_heads),
            ("num_query_groups", model.num_query_groups or model.num_attention_heads),
            ("seq_length", model.seq_length if parallel.sequence_parallel else tp),
        ):
            _require(value % tp == 0, f"{name}={value} must be a multiple of tensor_model_parallel_size={tp}")
        _require(
            model.num_layers % pp == 0,
            f"num_layers={model.num_layers} must be a multiple of pipeline_model_parallel_size={pp}",
        )
        _require(
            not parallel.sequence_parallel or tp > 1,
            "sequence_parallel needs tensor_model_parallel_size of at least 2, got 1",
        )
        _require(
            not parallel.overlap_param_gather or parallel.use_distributed_optimizer,
            "overlap_param_gather needs use_distributed_optimizer",
        )
        _require(
            training.global_batch_size % training.micro_batch_size == 0,
            f"global_batch_size={training.global_batch_size} must be a multiple of "
            f"micro_batch_size={training.micro_batch_size}",
        )
        _require(training.min_lr <= training.lr, f"min_lr={training.min_lr} must not exceed lr={training.lr}")
        decay = training.lr_decay_iters or training.train_iters
        _require(
            training.lr_warmup_iters < decay,
            f"lr_warmup_iters={training.lr_warmup_iters} must be less than lr_decay_iters={decay}",
        )
        needs_load = [name for name in ("ckpt_step", "finetune") if getattr(self.checkpoint, name)]
        _require(self.checkpoint.load is not None or not needs_load, f"{' and '.join(needs_load)} need load")


_MAY_BE_ZERO = {"lr_warmup_iters", "eval_iters", "num_workers", "seed", "ckpt_step"}
_FRACTIONS = {"attention_dropout", "hidden_dropout", "adam_beta1", "adam_beta2"}


def _check_numbers(config: TrainConfig) -> None:
    for section in vars(config).values():
        for name, value in vars(section).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if isinstance(value, int):
                least = 0 if name in _MAY_BE_ZERO else 1
                _require(value >= least, f"{name} must be at least {least}, got {value}")
            elif name in _FRACTIONS:
                _require(0.0 <= value < 1.0, f"{name} must be in [0, 1), got {value}")
            else:
                _require(0.0 <= value < float("inf"), f"{name} must be finite and not negative, got {value}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
