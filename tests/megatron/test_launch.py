"""``python -m loongforge.megatron.launch``: an unmodified script runs hooked, or does not run at all."""

import os
import subprocess
import sys

import pytest

from loongforge.env import VARIABLES
from loongforge.megatron import is_installed, launch
from loongforge.megatron.launch import FLAGS, split_flags
from tests.helpers import environment_of_checkout

pytest.importorskip("megatron.core", reason="needs megatron-core (pip install 'loongforge[megatron]')")

SCRIPT = """
import os, sys
from neighbour import VALUE
from megatron.core.transformer.transformer_config import TransformerConfig
import loongforge.megatron
print("ARGUMENTS", sys.argv[1:], __name__, VALUE)
print("HOOKED", loongforge.megatron.is_installed())
print("BUDGET", os.environ.get("LCE_LOGITS_BUDGET_MB"))
TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, cross_entropy_fusion_impl="linear")
"""


def run_launch(folder, *arguments, **environment):
    (folder / "script.py").write_text(SCRIPT)
    (folder / "neighbour.py").write_text("VALUE = 'beside'\n")
    command = [sys.executable, "-W", "ignore", "-m", "loongforge.megatron.launch", *arguments]
    variables = {name: text for name, text in environment_of_checkout().items() if not name.startswith("LCE_")}
    variables |= environment
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=120)


def test_the_script_runs_hooked_with_its_own_arguments(tmp_path):
    result = run_launch(
        tmp_path, "--lce-impl", "generic", "script.py", "--lr", "1", "--lce-logits-budget-mb=64",
        "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "linear",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert (
        "ARGUMENTS ['--lr', '1', '--cross-entropy-loss-fusion', '--cross-entropy-fusion-impl', 'linear'] "
        "__main__ beside" in result.stdout
    )
    assert "HOOKED True" in result.stdout and "BUDGET 64" in result.stdout
    assert "GPTModel" in result.stdout and "implementation generic (asked for" in result.stdout
    assert "0 fused losses" in result.stdout and "the command line has no" not in result.stdout


def test_a_module_runs_too_and_missing_flags_are_pointed_out(tmp_path):
    result = run_launch(tmp_path, "-m", "script", "--lr", "1")
    assert result.returncode == 0, result.stderr
    assert "ARGUMENTS ['--lr', '1'] __main__ beside" in result.stdout
    assert "the command line has no --cross-entropy-loss-fusion and no --cross-entropy-fusion-impl" in result.stdout


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear", ""),
        ("--cross-entropy-fusion-impl=linear --lr 1 --cross-entropy-loss-fusion", ""),
        ("--cross-entropy-fusion-impl linear", "--cross-entropy-loss-fusion"),
        ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl linear"),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "--cross-entropy-fusion-impl linear"),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear2", "--cross-entropy-fusion-impl linear"),
        ("linear", "--cross-entropy-loss-fusion and no --cross-entropy-fusion-impl linear"),
    ],
)
def test_half_the_flags_are_told_from_both(flags, missing):
    assert launch.missing_flags(["script.py", *flags.split(" ")]) == missing


def test_one_rank_speaks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    launch.say("hello")
    launch.say("counts of the last stage", rank=1)
    monkeypatch.setenv("RANK", "0")
    launch.say("hello again")
    assert capsys.readouterr().out == "loongforge: counts of the last stage\nloongforge: hello again\n"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_last_rank_counts_even_where_the_script_ends_with_sys_exit(rank, tmp_path):
    """Under pipeline parallelism the first ranks have no output layer."""
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(0)\n")
    result = run_launch(tmp_path, "ends.py", RANK=rank, WORLD_SIZE="2")
    assert result.returncode == 0, result.stderr
    assert ("0 fused losses" in result.stdout) is (rank == "1")
    assert ("fused linear cross-entropy in" in result.stdout) is (rank == "0")


def test_the_megatron_beside_the_script_is_the_one_that_is_hooked(tmp_path):
    """A checkout's own script run from elsewhere: the installed megatron-core must not be hooked in its place."""
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    (checkout / "megatron" / "core").mkdir(parents=True)
    (checkout / "megatron" / "core" / "__init__.py").write_text("__version__ = '0.99.0'\n")
    (checkout / "pretrain.py").write_text("print('IT RAN')\n")
    elsewhere.mkdir()
    (elsewhere / "megatron").mkdir()
    (elsewhere / "megatron" / "__init__.py").write_text("raise RuntimeError('python SCRIPT would not look here')\n")
    result = run_launch(elsewhere, "../checkout/pretrain.py")
    assert result.returncode == 1 and "this is 0.99.0" in result.stderr, result.stderr
    assert "IT RAN" not in result.stdout


@pytest.fixture
def beside_a_script(tmp_path, monkeypatch):
    (tmp_path / "script.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    "arguments, environment, complaint",
    [
        ([], {}, "usage:"),
        (["-m"], {}, "usage:"),
        (["--lr", "1", "script.py"], {}, "usage:"),
        (["no_script.py"], {}, "there is no script no_script.py"),
        (["script.py", "--lce-imp", "generic"], {}, "unknown flag --lce-imp"),
        (["script.py", "--lce_impl", "generic"], {}, "unknown flag --lce_impl"),
        (["script.py", "--lce-impl"], {}, "--lce-impl needs a value"),
        (["script.py", "--lce-impl", "flydsl"], {}, "impl='flydsl' was asked for"),
        (["script.py", "--lce-impl", "cuda"], {}, "LCE_IMPL must be one of"),
        (["script.py", "--lce-logits-budget-mb", "many"], {}, "LCE_LOGITS_BUDGET_MB must be"),
        (["script.py", "--lce-fwd-vocab-split-size", "0"], {}, "at least 1"),
        (["script.py", "--lce-impl", "generic"], {"LCE_IMPL": "triton"}, "drop one of them"),
        (["script.py"], {"LCE_CHECK_LABELS": "yes"}, "LCE_CHECK_LABELS must be 0 or 1"),
        (["script.py"], {"LCE_LOGITS_BUDGET_MB": "many"}, "LCE_LOGITS_BUDGET_MB must be"),
        (["script.py"], {"LCE_TRITON_BWD_VOCAB_SPLIT_SIZE": "-3"}, "LCE_TRITON_BWD_VOCAB_SPLIT_SIZE must be"),
        (["script.py", "--lce-impl", "megatron"], {}, "this Megatron has no linear cross-entropy of its own"),
    ],
)
@pytest.mark.usefixtures("beside_a_script")
def test_what_cannot_be_met_stops_before_the_script(monkeypatch, arguments, environment, complaint):
    monkeypatch.setattr(launch, "_run", lambda command: pytest.fail("the script ran"))
    with pytest.MonkeyPatch.context() as variables:
        for name in VARIABLES:
            variables.delenv(name, raising=False)
        for name, text in environment.items():
            variables.setenv(name, text)
        variables.setattr(launch.env.os, "environ", dict(os.environ))
        with pytest.raises(SystemExit) as stopped:
            launch.main(arguments)
    assert complaint in str(stopped.value) and not is_installed()


def test_flags_are_taken_off_wherever_they_stand():
    variables, rest = split_flags(["a", "--lce-bwd-vocab-split-size=7", "--x", "--lce-impl", "auto", "b"])
    assert variables == {"LCE_BWD_VOCAB_SPLIT_SIZE": "7", "LCE_IMPL": "auto"} and rest == ["a", "--x", "b"]
    with pytest.raises(ValueError, match="given twice"):
        split_flags(["--lce-impl", "auto", "--lce-impl", "generic"])
    assert set(FLAGS.values()) <= set(VARIABLES)


def test_importing_auto_installs(tmp_path):
    (tmp_path / "one_line.py").write_text(
        "import loongforge.megatron.auto as auto\nimport loongforge.megatron\n"
        "print(loongforge.megatron.is_installed(), auto.report)\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(tmp_path / "one_line.py")],
        env=environment_of_checkout(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    said, printed = result.stdout.splitlines()
    assert said.startswith("loongforge: fused linear cross-entropy in GPTModel, ") and "implementation generic" in said
    assert printed.startswith("True fused linear cross-entropy in GPTModel")


@pytest.mark.usefixtures("beside_a_script")
def test_megatrons_own_linear_runs_unhooked_where_its_gpu_is(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(launch, "_run", ran.append)
    monkeypatch.setattr(launch.support, "own_linear_layer", lambda: object)
    with pytest.raises(SystemExit, match=r"runs on compute capability 10.x; there is no CUDA device"):
        launch.main(["script.py", "--lce-impl", "megatron"])
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch.torch.cuda, "get_device_capability", lambda: (10, 0))
    launch.main(["script.py", "--lce-impl", "megatron"])
    assert ran == [["script.py"]] and not is_installed()
    assert "nothing is hooked: Megatron's own" in capsys.readouterr().out
