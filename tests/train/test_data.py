"""Text -> token files -> samples, and token files that are missing or damaged."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from loongforge import cli
from loongforge.errors import UsageError
from loongforge.train import preprocess as preprocess_module
from loongforge.train.checkpoint import check_save_folder
from loongforge.train.data import ConfigError, MicroBatches, batches, check_token_files, parse_blend
from loongforge.train.errors import DataError
from loongforge.train.metrics import _tensorboard_writer
from loongforge.train.preprocess import preprocess, read_documents, split_text, tokenizer_path
from loongforge.train.tokenizer import load_tokenizer


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_tokens_decode_to_the_text(tmp_path, text_file, tokenizer):
    prefix = str(tmp_path / "folder" / "tokens")
    command = ["preprocess", "--input", str(text_file), "--output-prefix", prefix, "--tokenizer", tokenizer]
    assert cli.main([*command, "--vocab-size", "500"]) == 0
    stored, loaded = IndexedDataset(prefix), load_tokenizer(tokenizer_path(prefix))
    assert loaded.vocab_size == {"bytes": 257, "bpe": 500}[tokenizer]
    documents = [np.asarray(stored[index]) for index in range(len(stored))]
    assert all(document[-1] == loaded.eod and (document[:-1] != loaded.eod).all() for document in documents)
    assert [loaded.decode(document.tolist()) for document in documents] == list(read_documents([str(text_file)]))
    assert len(documents) > 10
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == [
        "tokens.bin",
        "tokens.idx",
        "tokens.tokenizer.json",
    ]


def test_a_saved_tokenizer_makes_the_same_tokens(tmp_path, text_file):
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    preprocess([str(text_file)], first, "bpe", 400)
    preprocess([str(text_file)], second, str(tokenizer_path(first)))
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()


def test_a_folder_that_cannot_be_is_refused_before_the_work(tmp_path, text_file, capsys, monkeypatch):
    """Of token files, checkpoints and curves."""
    file = tmp_path / "file"
    file.write_text("here already")
    monkeypatch.setattr(preprocess_module, "_tokenizer", lambda *given: pytest.fail("trained a tokenizer first"))
    assert cli.main(["preprocess", "--input", str(text_file), "--output-prefix", f"{file}/x"]) == 2
    message = f"results go to a folder that can be written to, {file} is none"
    assert message in capsys.readouterr().err
    checkpoint, logging = SimpleNamespace(save=str(file)), SimpleNamespace(tensorboard_dir=str(file))
    config = SimpleNamespace(checkpoint=checkpoint, logging=logging)
    with pytest.raises(UsageError, match=message):
        check_save_folder(config)
    with pytest.raises(UsageError, match=message):
        _tensorboard_writer(config, SimpleNamespace(rank=0), 0)


def test_json_lines_are_documents_and_text_is_cut_at_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("one\n\ntwo", " ", "drei ü")) + "\n")
    assert list(read_documents([str(path)])) == ["one\n\ntwo", "drei ü"]
    assert list(split_text("a\nb\n\nc\n\n\nd", min_chars=3)) == ["a\nb\n\n", "c\n\n", "\nd"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', 'line 2: expected {"text"'),
        ("a.jsonl", b"not json\n", "line 1"),
        ("a.txt", b"\xff\xfe", "cannot be read as UTF-8"),
        ("a.txt", b" \n\n", "every document is empty"),
        ("a.txt", None, "does not exist"),
    ],
)
def test_bad_text_is_refused_and_leaves_nothing(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        preprocess([str(tmp_path / name)], str(tmp_path / "out"), "bytes")
    assert not (tmp_path / "out.bin").exists() and not (tmp_path / "out.idx").exists()


@pytest.fixture
def copy(tmp_path, tokens):
    """Prefix of a private copy of the token files."""
    for suffix in (".bin", ".idx", ".tokenizer.json"):
        shutil.copy(tokens + suffix, tmp_path / f"copy{suffix}")
    return tmp_path / "copy"


@pytest.mark.parametrize(
    ("suffix", "damage", "words"),
    [
        (".bin", None, "copy.bin does not exist"),
        (".idx", None, "copy.idx does not exist"),
        (".bin", lambda data: data[:-1], "copy.bin is damaged: .* bytes expected"),
        (".bin", lambda data: b"", "copy.bin is damaged: .* 0 found"),
        (".idx", lambda data: b"", "no Megatron index"),
        (".idx", lambda data: data[:20], "no Megatron index|is damaged"),
        (".idx", lambda data: data[:-8], "copy.idx is damaged"),
        (".idx", lambda data: b"MMIDIDY" + data[7:], "no Megatron index"),
        (".idx", lambda data: data[:17] + b"\x63" + data[18:], "unknown dtype code 99"),
    ],
)
def test_damaged_token_files_are_refused(copy, suffix, damage, words):
    check_token_files(str(copy))
    path = copy.with_name(copy.name + suffix)
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=words):
        check_token_files(str(copy))


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_damaged_tokenizer_is_refused(copy, content):
    path = tokenizer_path(str(copy))
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(DataError, match="tokenizer file"):
        load_tokenizer(path)


def test_blend_is_prefixes_or_weights_and_prefixes():
    assert parse_blend(["a"]) == (["a"], None)
    assert parse_blend(["0.3", "a", "0.7", "b"]) == (["a", "b"], [0.3, 0.7])
    for bad in (["0.3", "a", "b"], ["0.3", "a", "0.7"], ["0.3"]):
        with pytest.raises(ConfigError, match="weights and prefixes in turn"):
            parse_blend(bad)


def test_ranks_share_each_micro_batch_and_a_resumed_order_continues():
    def order(rank, consumed=0):
        return list(MicroBatches(consumed_samples=consumed, total_samples=12, micro_batch_size=2, rank=rank, size=2))

    assert order(0) == [[0, 1], [4, 5], [8, 9]]
    assert order(1) == [[2, 3], [6, 7], [10, 11]]
    assert order(1, consumed=8) == order(1)[2:]


def test_a_token_beyond_the_vocabulary_is_refused():
    samples = [{"tokens": torch.tensor([1, 2]), "labels": torch.tensor([2, 300])}]
    order = MicroBatches(consumed_samples=0, total_samples=1, micro_batch_size=1, rank=0, size=1)
    with pytest.raises(DataError, match="token 300, but the vocabulary has 257"):
        next(batches(samples, order, 0, 257, torch.device("cpu")))


def test_loading_batches_leaves_the_random_state_alone():
    samples = [{"tokens": torch.tensor([1]), "labels": torch.tensor([1])}]
    order = MicroBatches(consumed_samples=0, total_samples=1, micro_batch_size=1, rank=0, size=1)
    before = torch.get_rng_state()
    next(batches(samples, order, 0, 257, torch.device("cpu")))
    assert torch.equal(before, torch.get_rng_state())
