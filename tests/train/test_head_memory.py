"""The peak that is read out of a profile, on profiles whose peak is known."""

from __future__ import annotations

import pytest
import torch

from loongforge.train.head_memory import HeadMemory, HeadMemoryProbe, head_memory

BEGIN = {"name": "loongforge: output layer begins"}
END = {"name": "loongforge: output layer's input has its gradient"}


def memory(num_bytes, device=0):
    return {"name": "[memory]", "args": {"Bytes": num_bytes, "Device Type": device}}


def profile(*events):
    """The events a microsecond apart, in another order than they happened in."""
    return [{**event, "ts": time} for time, event in enumerate(events)][::-1]


def test_only_what_happens_between_the_marks_counts():
    events = profile(memory(900), BEGIN, memory(100), memory(-60), memory(80), END, memory(500), {"name": "other"})
    assert head_memory(events, on_cpu=True) == HeadMemory(peak=120, largest_allocation=100)


def test_each_micro_batch_starts_from_zero_and_devices_are_told_apart():
    events = profile(BEGIN, memory(100), memory(5000, device=1), END, BEGIN, memory(70), memory(50), memory(-90), END)
    assert head_memory(events, on_cpu=True) == HeadMemory(peak=120, largest_allocation=100)
    assert head_memory(events, on_cpu=False) == HeadMemory(peak=5000, largest_allocation=5000)


@pytest.mark.parametrize("events", [(), (BEGIN, memory(5)), (memory(5), memory(6))])
def test_a_profile_without_both_marks_is_an_error(events):
    with pytest.raises(RuntimeError, match="does not hold"):
        head_memory(profile(*events), on_cpu=True)


def test_a_linear_layer_allocates_its_output_and_its_gradients():
    layer = torch.nn.Linear(64, 1000, bias=False)
    hidden = torch.randn(256, 64, requires_grad=True)
    probe = HeadMemoryProbe(layer, torch.device("cpu"))
    with probe.measure():
        # The loss and the expanded upstream gradient of sum are small; output, its contiguous gradient and grad_weight
        # are not.
        layer(hidden).sum().backward()
    output, grad_weight = 256 * 1000 * 4, 64 * 1000 * 4
    assert probe.result is not None
    assert output <= probe.result.largest_allocation < 1.1 * output
    assert output + grad_weight <= probe.result.peak < 2.1 * output + grad_weight
