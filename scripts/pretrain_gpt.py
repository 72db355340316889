"""Train a GPT with ``megatron.training.pretrain`` of megatron-core 0.17 or newer, on synthetic text.

    python -m loongforge.megatron.launch scripts/pretrain_gpt.py --cross-entropy-loss-fusion \\
        --cross-entropy-fusion-impl linear --tokenizer-type NullTokenizer --vocab-size 32000 ...

Every flag is Megatron's own.  The script knows nothing of loongforge except on a machine without CUDA, where it asks
for the stand-ins.  After training it prints one line, ``PEAK MEMORY BYTES n``.  With TIMED_STEPS=n in the environment
its last n steps wait until no other process of its group runs (side_by_side.py).
"""

import inspect
import itertools
import os
import sys
from functools import partial
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    from loongforge.megatron import cpu_training

    cpu_training.apply()

import megatron.core.datasets.utils  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.training import arguments, get_args, pretrain, training  # noqa: E402
from side_by_side import end_turn, wait_for_turn  # noqa: E402

# Start-up runs make in a folder where the wheel ships the compiled helpers and no Makefile.
megatron.core.datasets.utils.compile_helpers = lambda: None


class SyntheticText(torch.utils.data.Dataset):
    """Tokens as unevenly frequent as words, p(rank) ~ 1 / (rank + 8); the same for the same seed."""

    def __init__(self, num_samples: int, sequence: int, vocab_size: int, seed: int) -> None:
        self.num_samples, self.sequence, self.seed = num_samples, sequence, seed
        weights = 1.0 / (torch.arange(vocab_size, dtype=torch.float64) + 8)
        self.cumulative = (weights.cumsum(0) / weights.sum()).float()

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator(device="cpu").manual_seed(self.seed * 1_000_003 + index)
        uniform = torch.rand(self.sequence + 1, generator=generator, device="cpu")
        tokens = torch.searchsorted(self.cumulative, uniform).clamp_max(len(self.cumulative) - 1)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(self.sequence),
            "position_ids": torch.arange(self.sequence),
        }


def datasets(num_samples, vp_stage=None):
    """Training, validation and test samples."""
    args = get_args()
    return [
        SyntheticText(count, args.seq_length, args.vocab_size, args.seed + number) if count else None
        for number, count in enumerate(num_samples)
    ]


datasets.is_distributed = True  # every rank makes its own


def forward_step(data_iterator, model, return_schedule_plan=False):
    """One micro-batch: (loss of each token or the plan that the combined schedule asks for, what to do with it)."""
    batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(data_iterator).items()}
    extra = {"loss_mask": batch["loss_mask"]} if get_args().mtp_num_layers else {}
    forward = model.build_schedule_plan if return_schedule_plan else model
    losses = forward(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], **extra)
    return losses, partial(loss_sum, batch["loss_mask"])


def loss_sum(loss_mask, losses):
    """(sum, number of tokens, report), from which Megatron takes the mean."""
    mask = loss_mask.view(-1).float()
    total, count = (losses.float().view(-1) * mask).sum(), mask.sum()
    return total, count.to(torch.int), {"lm loss": torch.stack([total.detach(), count])}


def build_model(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """GPTModel as the arguments describe it, for versions that take a function."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    args = get_args()
    config = config or arguments.core_transformer_config_from_args(args)
    local = args.transformer_impl == "local"
    layers = (
        gpt_layer_specs.get_gpt_layer_local_spec(normalization=config.normalization)
        if local
        else gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    )
    heads = None
    if args.mtp_num_layers:
        heads = gpt_layer_specs.get_gpt_mtp_block_spec(config, layers, use_transformer_engine=not local)
    return GPTModel(
        config,
        layers,
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        mtp_block_spec=heads,
        vp_stage=vp_stage,
    )


def time_last_steps_alone(count: int) -> None:
    """Let the last ``count`` steps run while other processes of the group wait."""
    original, numbers = training.train_step, itertools.count(1)

    def train_step(*args, **kwargs):
        number = next(numbers)
        if number == get_args().train_iters - count + 1:
            torch.cuda.synchronize()
            wait_for_turn()
            print(f"ALONE FROM STEP {number}", flush=True)
        return original(*args, **kwargs)

    training.train_step = train_step


def warm_up_beside_the_seed() -> None:
    """Without CUDA, Megatron's warm-up draws from the generator of the weights, the more the larger a micro-batch."""
    original = training.set_jit_fusion_options

    def set_jit_fusion_options(*args, **kwargs):
        with torch.random.fork_rng(devices=[]):
            return original(*args, **kwargs)

    training.set_jit_fusion_options = set_jit_fusion_options


def main() -> None:
    """``pretrain()`` took the model as a function first, then a container of settings, then both in one."""
    if "TIMED_STEPS" in os.environ:
        time_last_steps_alone(int(os.environ["TIMED_STEPS"]))
    if not ON_GPU:
        warm_up_beside_the_seed()
    parameters = inspect.signature(pretrain).parameters
    if "cfg_container" not in parameters:  # 0.17
        pretrain(datasets, build_model, ModelType.encoder_or_decoder, forward_step)
    else:
        from megatron.training import argument_utils

        args = arguments.parse_and_validate_args()
        if list(parameters).index("model_type") < list(parameters).index("model_provider"):  # 0.19
            settings = argument_utils.pretrain_cfg_container_from_args(args, argument_utils.gpt_config_from_args(args))
            pretrain(settings, datasets, ModelType.encoder_or_decoder, forward_step)
        else:  # 0.18
            settings = argument_utils.pretrain_cfg_container_from_args(args)
            pretrain(settings, datasets, build_model, ModelType.encoder_or_decoder, forward_step)
    end_turn()
    print(f"PEAK MEMORY BYTES {torch.cuda.max_memory_allocated()}", flush=True)


if __name__ == "__main__":
    main()
