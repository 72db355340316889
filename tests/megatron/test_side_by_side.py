"""Processes beside each other: turns do not overlap, the time limit ends what still runs, results stay written."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.megatron.scripts import ROOT, script

side_by_side = script("side_by_side")

TIMED = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "scripts")!r})
from side_by_side import end_turn, wait_for_turn
time.sleep(float(sys.argv[1]))
print("READY", time.monotonic(), flush=True)
assert wait_for_turn()
print("FROM", time.monotonic(), flush=True)
time.sleep(0.2)
print("TO", time.monotonic(), flush=True)
end_turn()
time.sleep(0.2)
"""


def job(folder, name, code, *arguments):
    return side_by_side.Job(name, [sys.executable, "-c", code, *arguments], folder / f"{name}.log", dict(os.environ))


def test_timed_parts_run_one_after_another_and_after_all_untimed_ones(tmp_path):
    ended = []
    jobs = [job(tmp_path, f"job{number}", TIMED, str(0.3 * number)) for number in range(3)]
    side_by_side.run_together(jobs, time.monotonic() + 60, ended.append)
    assert [one.status for one in ended] == [0, 0, 0], [one.text for one in ended]
    times = [{line.split()[0]: float(line.split()[1]) for line in one.text.splitlines()} for one in ended]
    assert min(one["FROM"] for one in times) >= max(one["READY"] for one in times)
    turns = sorted((one["FROM"], one["TO"]) for one in times)
    assert all(to <= start for (_, to), (start, _) in zip(turns[:-1], turns[1:], strict=True))


def test_one_that_dies_before_its_turn_does_not_hold_the_others(tmp_path):
    ended = []
    jobs = [job(tmp_path, "dies", "raise SystemExit(3)"), job(tmp_path, "waits", TIMED, "0")]
    side_by_side.run_together(jobs, time.monotonic() + 60, ended.append)
    assert {one.job.name: one.status for one in ended} == {"dies": 3, "waits": 0}


STUBBORN = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("CHILD", child.pid, flush=True)
time.sleep(60)
"""


def has_ended(pid: int) -> bool:
    """Also where nobody reaps orphans, which then stay behind as zombies."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def test_the_time_limit_ends_processes_and_their_children_and_keeps_the_logs(tmp_path):
    ended = []
    jobs = [job(tmp_path, "stubborn", STUBBORN), job(tmp_path, "quick", "print('done')")]
    side_by_side.run_together(jobs, time.monotonic() + 6, ended.append, patience=0.5)
    assert {one.job.name: one.status for one in ended} == {"stubborn": None, "quick": 0}
    child = int(jobs[0].log.read_text().split()[1])
    for _ in range(100):  # a killed process may take a moment
        if has_ended(child):
            break
        time.sleep(0.05)
    assert has_ended(child)
    side_by_side.pack(tmp_path, tmp_path / "logs.tar.gz")
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["quick.log", "stubborn.log"]
        assert archive.extractfile("quick.log").read() == b"done\n"


ENDS_ITSELF = """
import os, pathlib, signal, sys, threading, time
sys.path.insert(0, {scripts!r})
from side_by_side import Job, run_together, stop_on_sigterm
stop_on_sigterm()
log = pathlib.Path(sys.argv[1], "sleeper.log")
sleeps = "import time; print('up', flush=True); time.sleep(600)"
job = Job("sleeper", [sys.executable, "-c", sleeps], log, dict(os.environ))
def end_once_it_is_up():
    while not (log.exists() and "up" in log.read_text()):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=end_once_it_is_up, daemon=True).start()
run_together([job], time.monotonic() + 600, lambda ended: print("STOPPED", ended.status, ended.text))
"""


def test_told_to_end_it_ends_what_it_started_and_says_so(tmp_path):
    code = ENDS_ITSELF.format(scripts=str(ROOT / "scripts"))
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 143 and result.stdout.startswith("STOPPED None up"), result.stdout + result.stderr


STAGES = ["compare", "tests", "training"]


@pytest.fixture
def on_gpu(tmp_path, monkeypatch):
    """The script, its stages replaced by short programs; gives (run it, what was started with which limit)."""
    module, started, now = script("megatron_on_gpu"), [], time.monotonic()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))  # stages take no time

    def run(*flags, code="import sys; print('ran', sys.argv[1:])"):
        names = [module.Stage(name, (sys.executable, "-c", code, name), 100, name != "tests") for name in STAGES]
        monkeypatch.setattr(module, "stages", lambda arguments: names)
        monkeypatch.setattr(sys, "argv", ["megatron_on_gpu.py", "--output-dir", str(tmp_path), *flags])
        original = module.run
        monkeypatch.setattr(
            module, "run", lambda stage, limit, *more: started.append(limit) or original(stage, limit, *more)
        )
        monkeypatch.setattr(module, "stop_on_sigterm", lambda: None)
        return module.main()

    return run, started


def test_every_stage_gets_what_the_later_ones_leave(on_gpu, tmp_path):
    run, limits = on_gpu
    assert run("--time-limit", "570") == 0
    assert limits == [355, 455, 555]
    text = (tmp_path / "summary.md").read_text()
    assert all(f"## {name}: exit status 0" in text for name in STAGES)
    assert "ran ['compare', '--time-limit', '3" in text and "ran ['tests']" in text


def test_a_time_limit_is_not_among_megatrons_flags(tmp_path):
    module = script("megatron_on_gpu")
    arguments = module.parse(["--output-dir", str(tmp_path), "--compare", "--jobs 2 -- --mtp-num-layers 1"])
    parsed = script("compare_megatron").parse([*module.limited(module.stages(arguments)[0].command, 99)[4:]])
    assert parsed.time_limit == 99 and parsed.jobs == 2 and parsed.megatron == ["--mtp-num-layers", "1"]


def test_a_stage_without_time_is_said_and_failed(on_gpu, tmp_path):
    run, _ = on_gpu
    assert run("--time-limit", "20") == 1
    assert (tmp_path / "summary.md").read_text().count("not run, the time limit left too little") == 3
    assert run("--time-limit", "570", code="raise SystemExit(2)") == 1
    assert "## tests: exit status 2" in (tmp_path / "summary.md").read_text()


def test_the_commands_are_ones_that_the_scripts_take(tmp_path):
    """Every flag of every stage, parsed by the script that it is for."""
    module = script("megatron_on_gpu")
    arguments = module.parse(["--output-dir", str(tmp_path), "--compare", "--num-layers 2", "--training", "--seeds 1"])
    compare, tests, training = module.stages(arguments)
    rows = script("compare_megatron")
    parsed = rows.parse([*compare.command[4:], "--time-limit", "300"])
    assert parsed.output_dir == tmp_path / "compare" and parsed.num_layers == 2 and parsed.time_limit == 300
    assert [row.name for row in rows.rows(parsed)][-2:] == ["te graph, linear", "te graph, linear, all kept"]
    assert script("compare_training").parse([*training.command[4:], "--time-limit", "9"]).seeds == [1]
    collected = subprocess.run(
        [*tests.command, "--collect-only"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert "24/" in collected.stdout, collected.stdout[-500:]
