"""The two tokenizers of `loongforge preprocess`; each is one JSON file beside the tokens it made.

A BPE is stored in the format of the `tokenizers` library, the byte tokenizer as a one-line marker.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from loongforge.train.errors import DataError, require_packages

END_OF_DOCUMENT = "<|endoftext|>"
_BYTES_MARKER = {"loongforge_tokenizer": "bytes"}


class Tokenizer(Protocol):
    """What preprocessing and megatron-core's GPTDataset ask of a tokenizer."""

    vocab_size: int
    eod: int
    unique_identifiers: dict[str, Any]
    """Part of the key of Megatron's sample-index cache."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without an end-of-document token."""

    def decode(self, ids: list[int]) -> str:
        """Text of ``ids``."""

    def save(self, path: Path) -> None:
        """Write what :func:`load_tokenizer` reads."""


class ByteTokenizer:
    """Every UTF-8 byte is a token, 256 ends a document."""

    vocab_size = 257
    eod = 256
    unique_identifiers = {"kind": "bytes"}

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of ``text``."""
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        """Text of ``ids``; ends of documents are left out, broken characters replaced."""
        return bytes(token for token in ids if token != self.eod).decode("utf-8", errors="replace")

    def save(self, path: Path) -> None:
        """Write the marker."""
        path.write_text(json.dumps(_BYTES_MARKER) + "\n", encoding="utf-8")


class BPETokenizer:
    """Byte-level BPE of the `tokenizers` library."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        eod = backend.token_to_id(END_OF_DOCUMENT)
        if eod is None:
            raise DataError(f"the tokenizer has no {END_OF_DOCUMENT} token to end documents with")
        self.eod: int = eod
        self.vocab_size: int = backend.get_vocab_size()
        self.unique_identifiers = {"kind": "bpe", "sha256": hashlib.sha256(backend.to_str().encode()).hexdigest()}

    @classmethod
    def train(cls, documents: Iterable[str], vocab_size: int) -> BPETokenizer:
        """Learn ``vocab_size`` tokens from ``documents``."""
        require_packages("tokenizers", extra="train")
        import tokenizers

        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(documents, trainer)
        return cls(backend)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Text of ``ids``; ends of documents are left out."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def save(self, path: Path) -> None:
        """Write the library's own JSON."""
        path.write_text(self._backend.to_str(pretty=True), encoding="utf-8")


def load_tokenizer(path: Path) -> Tokenizer:
    """Read what a tokenizer's ``save`` wrote; :class:`DataError` if it is missing or damaged."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except FileNotFoundError:
        raise DataError(
            f"tokenizer file {path} does not exist; `loongforge preprocess` writes it beside the tokens, "
            "or name another one with --tokenizer-model"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"tokenizer file {path} is damaged: {error}") from error
    if content == _BYTES_MARKER:
        return ByteTokenizer()
    require_packages("tokenizers", extra="train")
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"tokenizer file {path} is no file of the tokenizers library: {error}") from error
    return BPETokenizer(backend)
