"""Text -> Megatron's .bin/.idx token files and the tokenizer beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loongforge.errors import require_folder
from loongforge.train.errors import DataError, require_packages
from loongforge.train.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer

MIN_DOCUMENT_CHARS = 2000
"""Plain text is cut at the first blank line after this many characters."""


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """What :func:`preprocess` wrote."""

    documents: int
    characters: int
    tokens: int
    vocab_size: int


def tokenizer_path(prefix: str) -> Path:
    """Where the tokenizer of the token files ``prefix``.bin/.idx lies."""
    return Path(f"{prefix}.tokenizer.json")


def preprocess(inputs: list[str], prefix: str, tokenizer: str = "bpe", vocab_size: int = 8192) -> TokenCounts:
    """Write ``prefix``.bin, .idx and .tokenizer.json from text files.

    ``tokenizer`` is ``bytes``, ``bpe`` (trained on the inputs with ``vocab_size`` tokens) or the path of a tokenizer
    file.  The files get their names only when they are complete.
    """
    require_packages("megatron.core", extra="train")
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    require_folder(Path(prefix).parent)
    chosen = _tokenizer(tokenizer, inputs, vocab_size)
    unfinished = f"{prefix}.unfinished"
    dtype = DType.optimal_dtype(chosen.vocab_size)
    builder = IndexedDatasetBuilder(f"{unfinished}.bin", dtype=dtype)
    documents = characters = tokens = 0
    for document in read_documents(inputs):
        ids = [*chosen.encode(document), chosen.eod]
        builder.add_document(np.asarray(ids, dtype=dtype), [len(ids)])
        documents, characters, tokens = documents + 1, characters + len(document), tokens + len(ids)
    if documents == 0:
        builder.data_file.close()
        os.unlink(f"{unfinished}.bin")
        raise DataError(f"no text in {', '.join(inputs)}: every document is empty")
    builder.finalize(f"{unfinished}.idx")
    chosen.save(tokenizer_path(unfinished))
    for suffix in (".tokenizer.json", ".bin", ".idx"):
        os.replace(unfinished + suffix, prefix + suffix)
    return TokenCounts(documents=documents, characters=characters, tokens=tokens, vocab_size=chosen.vocab_size)


def read_documents(inputs: list[str]) -> Iterator[str]:
    """Documents that are not empty: of a .jsonl file each line's "text", of any other file the pieces that
    :func:`split_text` cuts."""
    for name in inputs:
        path = Path(name)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise DataError(f"input file {path} does not exist") from None
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"input file {path} cannot be read as UTF-8 text: {error}") from error
        documents = _json_lines(path, text) if path.suffix == ".jsonl" else split_text(text)
        yield from (document for document in documents if document.strip())


def split_text(text: str, min_chars: int = MIN_DOCUMENT_CHARS) -> Iterator[str]:
    """Cut ``text`` at blank lines into documents of at least ``min_chars`` characters (the last may be shorter)."""
    document: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        document.append(line)
        length += len(line)
        if not line.strip() and length >= min_chars:
            yield "".join(document)
            document, length = [], 0
    if document:
        yield "".join(document)


def _json_lines(path: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f'{path}, line {number}: expected {{"text": "..."}}, got {line[:80]!r}') from error
        if not isinstance(document, str):
            raise DataError(f'{path}, line {number}: "text" must be a string, got {document!r}')
        yield document


def _tokenizer(tokenizer: str, inputs: list[str], vocab_size: int) -> Tokenizer:
    if tokenizer == "bytes":
        return ByteTokenizer()
    if tokenizer != "bpe":
        return load_tokenizer(Path(tokenizer))
    if vocab_size < 257:
        raise DataError(f"vocab_size must be at least 257 (every byte and the end of a document), got {vocab_size}")
    return BPETokenizer.train(read_documents(inputs), vocab_size)
