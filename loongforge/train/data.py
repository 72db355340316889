"""Token files -> batches, through megatron-core's GPTDataset and BlendedMegatronDatasetBuilder."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loongforge.train.config import TrainConfig
from loongforge.train.errors import ConfigError, DataError
from loongforge.train.preprocess import tokenizer_path
from loongforge.train.tokenizer import Tokenizer, load_tokenizer

_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEADER = struct.Struct("<QBQQ")  # version, dtype code, sequences, document boundaries


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """Training and validation samples; ``valid`` is None where validation is off."""

    train: Any
    valid: Any | None


def parse_blend(data_path: list[str]) -> tuple[list[str], list[float] | None]:
    """``["a", "b"]`` -> (["a", "b"], None); ``["0.3", "a", "0.7", "b"]`` -> (["a", "b"], [0.3, 0.7])."""
    weights = [_number(item) for item in data_path[::2]]
    if weights[0] is None:
        return data_path, None
    prefixes = data_path[1::2]
    if None in weights or len(weights) != len(prefixes):
        raise ConfigError(f"data_path must be prefixes, or weights and prefixes in turn, got {' '.join(data_path)}")
    return prefixes, [float(weight) for weight in weights if weight is not None]


def load_run_tokenizer(config: TrainConfig) -> Tokenizer:
    """The tokenizer that ``tokenizer_model`` names, or the one beside the first token file."""
    if not config.data.data_path:
        raise ConfigError("data_path is not set; write token files with `loongforge preprocess` and pass --data-path")
    prefixes, _ = parse_blend(config.data.data_path)
    for prefix in prefixes:
        check_token_files(prefix)
    return load_tokenizer(Path(config.data.tokenizer_model or tokenizer_path(prefixes[0])))


def build_datasets(config: TrainConfig, tokenizer: Tokenizer) -> Datasets:
    """Samples for the whole run, on every rank; rank 0 writes the index cache, the others wait for it."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    assert config.data.data_path is not None
    training = config.training
    prefixes, _ = parse_blend(config.data.data_path)
    sizes = [training.train_iters * training.global_batch_size, training.eval_iters * training.global_batch_size, 0]
    try:
        megatron_config = GPTDatasetConfig(
            random_seed=training.seed,
            sequence_length=config.model.seq_length,
            blend=parse_blend(config.data.data_path),
            split=config.data.split,
            path_to_cache=config.data.data_cache_path,
            tokenizer=_DatasetTokenizer(tokenizer, prefixes),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, megatron_config).build()
    except (AssertionError, EOFError, ValueError, IndexError) as error:
        cache = config.data.data_cache_path or "the folder named like the token files"
        raise DataError(
            f"megatron-core cannot build samples from {' '.join(config.data.data_path)} with split "
            f"{config.data.split}: {error or type(error).__name__}; if a run was killed while it wrote its index, "
            f"delete {cache}"
        ) from error
    for name, dataset, needed in (("training", train, sizes[0]), ("validation", valid, sizes[1])):
        if needed and (dataset is None or len(dataset) < needed):
            raise DataError(
                f"the {name} share of split {config.data.split} holds no full sample of seq_length="
                f"{config.model.seq_length}; give more text, another --split or a smaller --seq-length"
            )
    return Datasets(train=train, valid=valid if training.eval_iters else None)


def check_token_files(prefix: str) -> None:
    """Raise :class:`DataError` unless ``prefix``.bin/.idx exist, are whole and agree with each other."""
    from megatron.core.datasets.indexed_dataset import DType

    idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (idx, bin_):
        if not path.is_file():
            raise DataError(f"token file {path} does not exist; write it with `loongforge preprocess`")
    with idx.open("rb") as stream:
        magic, header = stream.read(len(_INDEX_MAGIC)), stream.read(_INDEX_HEADER.size)
        if magic != _INDEX_MAGIC or len(header) < _INDEX_HEADER.size:
            raise DataError(f"{idx} is no Megatron index: it starts with {magic!r}, expected {_INDEX_MAGIC!r}")
        _, dtype_code, num_sequences, num_boundaries = _INDEX_HEADER.unpack(header)
        expected = len(magic) + len(header) + num_sequences * (4 + 8) + num_boundaries * 8
        if idx.stat().st_size != expected:
            raise DataError(f"{idx} is damaged: {expected} bytes expected, {idx.stat().st_size} found; write it anew")
        lengths = np.frombuffer(stream.read(num_sequences * 4), dtype=np.int32)
    if dtype_code not in {member.value for member in DType}:
        raise DataError(f"{idx} is damaged: unknown dtype code {dtype_code}; write it anew")
    expected = int(lengths.sum(dtype=np.int64)) * DType.size(dtype_code)
    if bin_.stat().st_size != expected:
        raise DataError(f"{bin_} is damaged: {expected} bytes expected, {bin_.stat().st_size} found; write it anew")


class _DatasetTokenizer:
    """What GPTDataset asks of a tokenizer; its identifiers are part of the key of Megatron's sample-index cache.

    The key otherwise holds names and numbers only, so token files written anew would meet a stale index.
    """

    def __init__(self, tokenizer: Tokenizer, prefixes: list[str]) -> None:
        self.vocab_size, self.eod = tokenizer.vocab_size, tokenizer.eod
        digest = hashlib.sha256()
        for prefix in prefixes:
            idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
            with idx.open("rb") as stream:
                digest.update(stream.read(1 << 20))
            digest.update(f"{idx.stat().st_size} {bin_.stat().st_size}".encode())
        self.unique_identifiers = {**tokenizer.unique_identifiers, "token_files": digest.hexdigest()}


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """Which samples this data-parallel rank sees: micro-batches in order from ``consumed_samples`` on."""

    consumed_samples: int
    total_samples: int
    micro_batch_size: int
    rank: int
    size: int

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(self.consumed_samples, self.total_samples, self.micro_batch_size * self.size):
            first = start + self.rank * self.micro_batch_size
            yield list(range(first, first + self.micro_batch_size))


def batches(
    dataset: Any, micro_batches: MicroBatches, num_workers: int, vocab_size: int, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches on ``device``; a token beyond ``vocab_size`` is a :class:`DataError`."""
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=micro_batches,
        num_workers=num_workers,
        pin_memory=device.type == "cuda",
        # Its own generator: the loader draws a seed, which must not touch the run's random state.
        generator=torch.Generator().manual_seed(0),
    )
    for batch in loader:
        for name in ("tokens", "labels"):
            largest = int(batch[name].max())
            if largest >= vocab_size:
                raise DataError(
                    f"the data holds token {largest}, but the vocabulary has {vocab_size}: "
                    "another tokenizer made these token files"
                )
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
