"""The acceptance counts of MTP heads, which 0.19 takes from the logits of every training step."""

from __future__ import annotations

import subprocess
import sys

from tests.megatron.launching import environment

COUNT = """
import warnings; warnings.filterwarnings("ignore")
import os, torch, torch.distributed as dist
import loongforge.megatron
from loongforge.megatron import DeferredLogits, counters, cpu
cpu.apply()
loongforge.megatron.install()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from megatron.core import parallel_state
from megatron.core.transformer import multi_token_prediction as mtp
parallel_state.initialize_model_parallel()
from tests.megatron.matrix import Row
from tests.megatron.training import LINEAR, batches, build_model, configuration

original, seen = mtp._compute_mtp_acceptance_counts, []

def count(logits, labels, mask, *others):
    assert isinstance(logits, DeferredLogits)
    before = counters.materialized
    correct, total = original(logits, labels, mask, *others)
    assert counters.materialized == before, "the counts need no logits"
    with torch.no_grad():
        predicted = logits.materialize().argmax(-1).t().contiguous()
    half = torch.arange(predicted.numel()).view_as(predicted) % 2 == 0
    guesses = torch.where(half, predicted, (predicted + 1) % 512)
    right, valid = original(logits, guesses, mask, *others)
    assert valid == total == mask.sum() and right == (half & mask.bool()).sum() and 0 < right < valid
    seen.append(correct)
    return correct, total

mtp._compute_mtp_acceptance_counts = count
row = Row(mtp=2)
model = build_model(row, configuration(row, torch.float32, **LINEAR))
mtp.MTPLossAutoScaler.set_loss_scale(torch.ones(1))
model(**next(batches())).sum().backward()
assert len(seen) == 2 and counters.fused == 3
print("COUNTED")
"""


def test_acceptance_counts_are_right_and_need_no_logits():
    command = [sys.executable, "-c", COUNT]
    result = subprocess.run(command, env=environment("0.19.2"), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "COUNTED" in result.stdout, result.stdout + result.stderr[-3000:]
