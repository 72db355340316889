"""Checkpoints that cannot be used are refused in one line; publishing survives a kill at any point."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loongforge.train import checkpoint
from loongforge.train.checkpoint import MARKER, iteration_folder, latest_iteration
from loongforge.train.errors import CheckpointError
from tests.helpers import environment_of_checkout

ROOT = Path(__file__).resolve().parents[2]
# Runs each command line in turn and prints [exit status, what it wrote to stderr] for each.
_DRIVER = """
import contextlib, io, json, sys
from loongforge.cli import main
for run in json.loads(sys.argv[1]):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = main(run)
    print("RESULT", json.dumps([status, errors.getvalue()]))
"""


def results(runs: list[list[str]]) -> list[tuple[int, str]]:
    """(exit status, stderr) of each command line."""
    command = [sys.executable, "-c", _DRIVER, json.dumps(runs)]
    environment = environment_of_checkout()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return [tuple(json.loads(line.removeprefix("RESULT "))) for line in lines]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, config_file, tokens):
    """Folder with checkpoints of steps 1 and 2, and the command line that wrote them."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    command = ["train", "--config", str(config_file), "--data-path", tokens, "--eval-iters", "0"]
    save = ["--save", str(folder), "--save-interval", "1", "--exit-interval", "2"]
    assert results([[*command, *save]]) == [(0, "")]
    return folder, command


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "tensors cut": (lambda run: _cut(next(run.glob("iter_0000002/*.distcp"))), "cannot be read"),
    "common part cut": (lambda run: _cut(run / "iter_0000002" / "common.pt"), "cannot be read"),
    "metadata missing": (lambda run: (run / "iter_0000002" / "metadata.json").unlink(), "cannot be read"),
    "marker is no number": (lambda run: (run / MARKER).write_text("two"), "must hold the number of a step, got 'two'"),
    "marker without folder": (
        lambda run: shutil.rmtree(run / "iter_0000002"),
        "iter_0000002 does not exist; .* holds iter_0000001",
    ),
    "empty folder": (lambda run: (shutil.rmtree(run), run.mkdir()), "holds no checkpoint"),
    "no folder": (shutil.rmtree, "holds no checkpoint"),
}
OTHER_RUNS = {
    "another width": (["--hidden-size", "64"], "another model: hidden_size is 32 there and 64 here"),
    "another vocabulary": (["--vocab-size", "300"], "vocab_size is 257 there and 300 here"),
    "another optimizer": (["--use-distributed-optimizer"], "another optimizer: use_distributed_optimizer is False"),
    "another schedule": (["--lr", "2e-3"], "another schedule: max_lr is 0.001 there and 0.002 here; .*--override"),
    "no such step": (["--ckpt-step", "7"], "iter_0000007 does not exist; .* holds iter_0000001, iter_0000002"),
}


def test_unusable_checkpoints_are_refused_in_one_line(saved, tmp_path):
    folder, command = saved
    runs, expected = [], []
    for number, (damage, words) in enumerate(DAMAGE.values()):
        run = tmp_path / str(number)
        shutil.copytree(folder, run)
        damage(run)
        runs.append([*command, "--load", str(run)])
        expected.append(words)
    for flags, words in OTHER_RUNS.values():
        runs.append([*command, "--load", str(folder), *flags])
        expected.append(words)
    runs.append([*command, "--save", str(folder)])
    expected.append("already holds a run at step 2; continue it with --load")
    outcome = results(runs)
    assert len(outcome) == len(expected)
    for run, words, (status, error) in zip(runs, expected, outcome, strict=True):
        assert status == 2 and error.startswith("loongforge: error: ") and error.count("\n") == 1, (run, error)
        with pytest.raises(CheckpointError, match=words):
            raise CheckpointError(error)


def test_what_may_differ_and_what_a_killed_save_left_do_not_matter(saved, tmp_path):
    folder, command = saved
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    (run / "unfinished_iter_0000003").mkdir()
    (run / "unfinished_iter_0000003" / "common.pt").write_bytes(b"half")
    again = [*command, "--load", str(run), "--exit-interval", "1"]
    other = ["--finetune", "--use-distributed-optimizer", "--lr", "2e-3"]
    outcome = results(
        [
            [*again, "--save", str(run)],
            [*again, "--lr", "2e-3", "--override-opt-param-scheduler"],
            [*again, *other],
            # Where a new run saves, it may also look for something to continue.
            [*command, "--save", str(tmp_path / "new"), "--load", str(tmp_path / "new"), "--exit-interval", "1"],
        ]
    )
    assert [status for status, _ in outcome] == [0] * 4, outcome
    assert latest_iteration(str(run)) == 3 and latest_iteration(str(tmp_path / "new")) == 1
    assert not list(run.glob("unfinished_*"))


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("survived_calls", range(8))
def test_a_kill_while_publishing_leaves_the_marker_on_a_complete_checkpoint(
    tmp_path, monkeypatch, survived_calls, same_step
):
    for step in (10, 20):
        iteration_folder(str(tmp_path), step).mkdir()
        (iteration_folder(str(tmp_path), step) / "complete").touch()
    (tmp_path / MARKER).write_text("20")
    final = iteration_folder(str(tmp_path), 20 if same_step else 30)
    unfinished = final.with_name(f"unfinished_{final.name}")
    unfinished.mkdir()
    (unfinished / "complete").touch()
    calls = []

    def dying(real):
        def call(*args, **kwargs):
            if len(calls) == survived_calls:
                raise KeyboardInterrupt
            calls.append(real)
            return real(*args, **kwargs)

        return call

    for owner, name in ((Path, "rename"), (Path, "replace"), (Path, "open"), (shutil, "rmtree")):
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))
    try:
        checkpoint._publish(unfinished, final)
        finished = True
    except KeyboardInterrupt:
        finished = False
    monkeypatch.undo()
    step = latest_iteration(str(tmp_path))
    assert step in (10, 20, 30)
    assert (iteration_folder(str(tmp_path), step) / "complete").exists()
    if finished:
        assert step == (20 if same_step else 30)
        assert not list(tmp_path.glob("unfinished_*"))
