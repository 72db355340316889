"""What is planned: flags, a training config or a Hugging Face ``config.json`` -> :class:`Layer`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from loongforge.bench.run import DTYPES
from loongforge.bench.shapes import LARGEST, HeadShape
from loongforge.errors import UsageError
from loongforge.planning.predict import Layer

_UNITS = {"": 1, "B": 1, **{f"{letter}iB": 1 << 10 * power for power, letter in enumerate("KMGT", 1)}}
_UNITS |= {f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class Sizes:
    """What flags and files say; None where neither does."""

    tokens: int | None = None
    hidden: int | None = None
    vocab: int | None = None
    tp: int | None = None
    dtype: str | None = None
    sequence_parallel: bool | None = None


def layer_of(options: argparse.Namespace) -> tuple[Layer, int]:
    """The layer of one rank, and the global vocabulary.  A flag wins over the file."""
    sizes = Sizes()
    if options.config is not None:
        sizes = _of_training_config(options.config)
    elif options.hf is not None:
        sizes = _of_hugging_face(options.hf, options)
    given = {name: getattr(options, name) for name in vars(sizes)}
    sizes = replace(sizes, **{name: value for name, value in given.items() if value is not None})
    absent = [f"--{name}" for name in ("tokens", "hidden", "vocab") if getattr(sizes, name) is None]
    if absent:
        raise UsageError(
            f"{', '.join(absent)} not given: a plan needs --tokens, --hidden and --vocab; --config brings all of them, "
            "--hf brings --hidden and --vocab"
        )
    tp = sizes.tp or 1
    tokens, hidden, vocab = sizes.tokens, sizes.hidden, sizes.vocab
    assert tokens is not None and hidden is not None and vocab is not None
    if vocab % tp:
        raise UsageError(
            f"--vocab {vocab} must be a multiple of --tp {tp}, as every rank holds equally many rows: pad it to "
            f"{-(-vocab // (128 * tp)) * 128 * tp} as Megatron does"
        )
    sequence_parallel = bool(sizes.sequence_parallel)
    if sequence_parallel and (tp == 1 or tokens % tp):
        raise UsageError(f"--sequence-parallel splits --tokens {tokens} over --tp {tp}: tp must divide it, and be > 1")
    shape = HeadShape.of_sizes(tokens, hidden, vocab // tp)
    return Layer(shape, DTYPES[sizes.dtype or "bf16"], options.reduction, tp, sequence_parallel), vocab


def _of_training_config(path: Path) -> Sizes:
    from loongforge.train.config_io import load_config
    from loongforge.train.model import padded_vocab_size

    config = load_config(path, {})
    vocab = config.model.vocab_size
    return Sizes(
        tokens=config.training.micro_batch_size * config.model.seq_length,
        hidden=config.model.hidden_size,
        vocab=None if vocab is None else padded_vocab_size(config, vocab),
        tp=config.parallel.tensor_model_parallel_size,
        dtype="bf16" if config.training.bf16 else "fp32",
        sequence_parallel=config.parallel.sequence_parallel,
    )


def _of_hugging_face(path: Path, flags: argparse.Namespace) -> Sizes:
    """What the file says of what no flag does: the rest of it may be missing or unreadable."""
    if path.is_dir():
        path /= "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--hf {path} cannot be read as JSON: {error}") from error
    sources = [*_language_models(config)]

    def find(*names: str) -> Any:
        return next((source[name] for source in sources for name in names if source.get(name) is not None), None)

    hidden = find("word_embed_proj_dim", "hidden_size", "n_embd", "n_embed", "d_model")
    vocab = find("vocab_size", "padded_vocab_size")
    for flag, name, value in (("hidden", "hidden_size", hidden), ("vocab", "vocab_size", vocab)):
        if getattr(flags, flag) is None and (type(value) is not int or not 1 <= value < LARGEST):
            wanted = f"a whole number {name} from 1 to 2**31 - 1"
            raise UsageError(f"--hf {path} must hold {wanted}, got {value!r}: say --{flag}")
    names = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
    stored = find("dtype", "torch_dtype")
    if flags.dtype is None and stored is not None and stored not in [*names]:
        raise UsageError(f"--hf {path}: dtype {stored!r} is none of {', '.join(names)}: say --dtype")
    return Sizes(hidden=hidden, vocab=vocab, dtype=names[stored] if stored in [*names] else None)


def _language_models(config: Any) -> Iterator[dict[str, Any]]:
    """The parts of a multimodal model that may describe its output layer, innermost first."""
    if isinstance(config, dict):
        for name in ("text_config", "llm_config", "language_config", "thinker_config", "decoder"):
            yield from _language_models(config.get(name))
        yield config


def memory_size(text: str) -> int:
    """Type of a flag that takes bytes: ``20GiB``, ``512MiB``, ``16GB``."""
    number = text.rstrip("KMGTiB")
    unit = text[len(number) :]
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9 or unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"must be a size such as 20GiB, 512MiB or 16GB, got {text!r}")
    return int(value * _UNITS[unit])


def dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, one in DTYPES.items() if one == dtype)
