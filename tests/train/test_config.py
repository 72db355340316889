"""Config files and flags: what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from loongforge import cli
from loongforge.train.config import ConfigError
from loongforge.train.config_io import load_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def load(tmp_path, config_file):
    """Load the test config after one replacement in its text, with overrides."""

    def from_text(old: str = "", new: str = "", **overrides):
        text = config_file.read_text()
        assert old in text
        path = tmp_path / "changed.yaml"
        path.write_text(text.replace(old, new, 1))
        return load_config(path, overrides)

    return from_text


def test_a_flag_wins_over_the_file(config_file, monkeypatch):
    seen = []
    monkeypatch.setattr("loongforge.train.loop.train", seen.append)
    flags = ["--lr", "2e-3", "--hidden-size", "64", "--sequence-parallel", "--tensor-model-parallel-size", "2"]
    assert cli.main(["train", "--config", str(config_file), *flags, "--data-path", "0.3", "a", "0.7", "b"]) == 0
    (config,) = seen
    assert config.training.lr == 2e-3
    assert config.training.train_iters == 8
    assert config.model.hidden_size == 64
    assert config.parallel.sequence_parallel is True
    assert config.data.data_path == ["0.3", "a", "0.7", "b"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("hidden_size:", "hiden_size:", ["'hiden_size'", "section model", "did you mean 'hidden_size'"]),
        ("training:", "trainign:", ["unknown section 'trainign'", "did you mean 'training'"]),
        ("  num_layers: 2", "  num_layers: 2\n  lr: 1.0", ["'lr'", "belongs in section training"]),
        ("num_layers: 2", "num_layers: two", ["num_layers must be a whole number, got 'two'"]),
        ("num_layers: 2", "num_layers: 2.5", ["num_layers must be a whole number, got 2.5"]),
        ("num_layers: 2", "num_layers: true", ["num_layers must be a whole number, got True"]),
        ("num_layers: 2", "num_layers: 0", ["num_layers must be at least 1, got 0"]),
        ("  num_layers: 2\n", "", ["section model must set num_layers"]),
        ("lr: 1e-3", "lr: .nan", ["lr must be finite"]),
        ("lr: 1e-3", "lr: fast", ["lr must be a number, got 'fast'"]),
        ("hidden_dropout: 0.1", "hidden_dropout: 1.0", ["hidden_dropout must be in [0, 1), got 1.0"]),
        ("hidden_dropout: 0.1", "normalization: BatchNorm", ["one of LayerNorm, RMSNorm, got 'BatchNorm'"]),
        ("model:", "model: [", ["cannot be read as YAML"]),
        ("model:", "model: !!python/object/apply:os.getcwd []", ["cannot be read as YAML"]),
    ],
)
def test_a_bad_file_is_refused(load, old, new, words):
    with pytest.raises(ConfigError) as error:
        load(old, new)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"sequence_parallel": True}, "sequence_parallel needs tensor_model_parallel_size of at least 2"),
        ({"tensor_model_parallel_size": 3}, "num_attention_heads=4 must be a multiple"),
        ({"pipeline_model_parallel_size": 4}, "num_layers=2 must be a multiple"),
        ({"overlap_param_gather": True}, "needs use_distributed_optimizer"),
        ({"micro_batch_size": 3}, "global_batch_size=4 must be a multiple of micro_batch_size=3"),
        ({"min_lr": 1.0}, "min_lr=1.0 must not exceed lr"),
        ({"lr_warmup_iters": 8}, "lr_warmup_iters=8 must be less than"),
        ({"finetune": True}, "finetune need load"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(load, overrides, words):
    with pytest.raises(ConfigError, match=words):
        load(**overrides)


def test_missing_config_file_is_one_line(tmp_path, capsys):
    assert cli.main(["train", "--config", str(tmp_path / "none.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("loongforge: error: config file") and error.count("\n") == 1


def test_help_holds_the_sentence_under_each_field(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    words = capsys.readouterr().out.split()
    assert "--tensor-model-parallel-size" in words
    assert "Processes that share each layer's weights." in " ".join(words)


def test_missing_package_names_the_extra(config_file, monkeypatch, capsys):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "psutil" else real(name))
    assert cli.main(["train", "--config", str(config_file), "--data-path", "none"]) == 2
    assert "psutil not installed; run: pip install 'loongforge[train]'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tiny", "llama3_8b", "qwen2_5_7b", "deepseek_v3_head"])
def test_every_config_of_the_repository_is_valid(name):
    config = load_config(ROOT / "configs" / f"{name}.yaml", {})
    assert config.output_layer.cross_entropy_fusion_impl == "linear"
