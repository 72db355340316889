"""`--dry-run` of every config: the model that a run would build, without data, memory or processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import environment_of_checkout

ROOT = Path(__file__).resolve().parents[2]
# Processes, and the parameters that the model's authors publish over all of them, in billions.
PUBLISHED = {"llama3_8b": (8, 8.03), "qwen2_5_7b": (4, 7.62)}
DRIVER = """
import sys
from loongforge.cli import main
for name in sys.argv[1:]:
    print("CONFIG", name)
    assert main(["train", "--config", f"configs/{name}.yaml", "--dry-run"]) == 0
"""


@pytest.fixture(scope="module")
def plans():
    """Config name -> what its dry run printed."""
    names = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    environment = environment_of_checkout()
    command = [sys.executable, "-c", DRIVER, *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {part.split()[0]: part for part in done.stdout.split("CONFIG ")[1:]}


def test_every_config_has_a_plan(plans):
    assert set(plans) == {"tiny", "llama3_8b", "qwen2_5_7b", "deepseek_v3_head"}
    for plan in plans.values():
        for words in ("implementation: ", "vocabulary rows kept", "in chunks of", "saved against one copy", "valid"):
            assert words in plan


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(plans, name):
    processes, billions = PUBLISHED[name]
    assert f"processes: {processes} " in plans[name]
    (parameters,) = re.findall(r"model: ([0-9,]+) parameters", plans[name])
    total = int(parameters.replace(",", "")) * processes
    assert total / 1e9 == pytest.approx(billions, rel=2e-3)
