"""``--cross-entropy-fusion-impl linear`` on Megatron's own command line (wheels from 0.17 bring its parser)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.megatron.launching import environment
from tests.megatron.matrix import UNPACKED

PARSE = """
import typing, warnings
warnings.filterwarnings("ignore")
typing.override = getattr(typing, "override", lambda function: function)  # Python 3.12 has it
import loongforge.megatron
from loongforge.megatron import cpu
cpu.apply()
loongforge.megatron.install()
from megatron.training.arguments import parse_args
arguments = parse_args(ignore_unknown_args=True)
print("PARSED", arguments.cross_entropy_loss_fusion, arguments.cross_entropy_fusion_impl)
loongforge.megatron.uninstall()
parse_args(ignore_unknown_args=True)
"""
FLAGS = ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "linear"]


@pytest.mark.parametrize("version", UNPACKED)
def test_the_parser_accepts_linear_while_hooked(version):
    command = [sys.executable, "-c", PARSE, *FLAGS]
    result = subprocess.run(command, env=environment(version), capture_output=True, text=True, timeout=120)
    assert "PARSED True linear" in result.stdout, result.stderr[-2000:]
    assert result.returncode == 2 and "invalid choice: 'linear'" in result.stderr, result.stderr[-2000:]
