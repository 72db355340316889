"""The memory timeline: blocks out of an allocator's events, known peaks, and the picture drawn from the file."""

import json

import pytest
import torch

from loongforge import cli
from loongforge.bench import memory
from loongforge.bench.shapes import HeadShape
from loongforge.bench.timeline import MARK_BYTES, Block, Event, gpu_events_of, record, timeline_of

CPU = torch.device("cpu")
SIZES = ("512x16x9001", "--dtype", "fp32", "--device", "cpu")


def test_blocks_lie_between_the_marks():
    events = [
        Event(0.0, 1, 100),  # before the first mark: not counted, nor its release
        Event(1.0, 9, MARK_BYTES),
        Event(1.0, 9, 0),
        Event(2.0, 2, 50),
        Event(3.0, 1, 0),
        Event(4.0, 9, MARK_BYTES),
        Event(4.5, 9, 0),
        Event(5.0, 9, 70),  # the address of a mark again
        Event(6.0, 2, 0),
        Event(7.0, 2, 30),
        Event(8.0, 3, MARK_BYTES),
        Event(8.0, 3, 0),
        Event(9.0, 4, 999),  # after the last mark
    ]
    timeline = timeline_of(events)
    assert timeline.blocks == (Block(50, 1.0, 5.0), Block(70, 4.0, None), Block(30, 6.0, None))
    assert (timeline.backward_ms, timeline.end_ms, timeline.peak_bytes) == (3.0, 7.0, 120)


def test_a_record_without_marks_is_refused():
    with pytest.raises(RuntimeError, match="1 of 3 marks"):
        timeline_of([Event(0.0, 1, MARK_BYTES)])


def test_events_of_the_caching_allocator():
    trace = [
        {"action": "segment_alloc", "addr": 0, "size": 4096, "time_us": 500},
        {"action": "alloc", "addr": 16, "size": 1000, "time_us": 1500},
        {"action": "free_requested", "addr": 16, "size": 1000, "time_us": 2500},
        {"action": "free_completed", "addr": 16, "size": 1000, "time_us": 2500},
    ]
    assert gpu_events_of(trace) == [Event(1.5, 16, 1000), Event(2.5, 16, 0)]


def test_a_known_sequence_on_the_cpu():
    leaf = torch.ones(5000, requires_grad=True)

    def forward():
        first = torch.empty(20_000, dtype=torch.uint8)
        del first
        return (leaf * leaf).sum()  # one product of 20000 bytes alive at a time

    timeline = record(CPU, forward, lambda loss: loss.backward())
    assert 20_000 <= timeline.peak_bytes < 70_000
    large = [block for block in timeline.blocks if block.num_bytes == 20_000]
    assert large[0].stop_ms <= large[1].start_ms < timeline.backward_ms
    assert large[-1].stop_ms is None, "the gradient stays"
    assert timeline.end_ms >= timeline.backward_ms > 0


def test_each_size_has_its_kind():
    shape = HeadShape("s", 6, 10, 100)
    for num_bytes, kind in (
        (100 * 10 * 2, "gradient of weight"),
        (6 * 10 * 2, "gradient of hidden"),
        (6 * 10 * 4, "gradient of hidden, float32 sum"),
        (6 * 100 * 2, "logits or their gradient"),
        (6 * 100 * 4, "logits or their gradient in float32"),
        (77, "one chunk, and the rest"),
    ):
        assert memory.kind_of(num_bytes, shape, 2) == kind
    assert memory.kind_of(6 * 100 * 4, shape, 4) == "logits or their gradient"
    assert {memory.kind_of(n, shape, 2) for n in range(3000)} == set(memory.KINDS)


def test_a_chunk_as_large_as_the_float32_sum_is_told_from_it():
    spans = ((1.0, 9.0), (2.0, 8.0), (0.0, 3.0))  # the sum is rounded after the last chunk
    blocks = [{"bytes": 6 * 10 * 4, "start_ms": start, "stop_ms": stop} for start, stop in spans]
    kinds = memory.kinds_of({"blocks": blocks, "end_ms": 9.5}, HeadShape("s", 6, 10, 100), 2)
    assert kinds == [memory.SUM_HIDDEN, memory.REST, memory.REST]


def test_stack_adds_up():
    blocks = [
        {"bytes": 2**20, "start_ms": 1.0, "stop_ms": None},
        {"bytes": 2**21, "start_ms": 1.0, "stop_ms": 2.0},
        {"bytes": 2**22, "start_ms": 2.0, "stop_ms": 3.0},
    ]
    kinds = [memory.KINDS[number] for number in (0, 3, 3)]
    times, heights = memory.stack({"end_ms": 4.0, "blocks": blocks}, kinds)
    assert times == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert heights[memory.KINDS[0]] == [0, 1, 1, 1, 1] and heights[memory.KINDS[3]] == [0, 2, 4, 0, 0]


def test_unfused_beside_fused(tmp_path, capsys):
    output = tmp_path / "new/memory.json"
    assert cli.main(["memory", *SIZES, "--output", str(output)]) == 0
    unfused, recomputed, kept = json.loads(output.read_text())["timelines"]
    logits, grad_weight = 512 * 9001 * 4 / 2**20, 9001 * 16 * 4 / 2**20
    assert unfused["peak_mib"] == pytest.approx(3 * logits, rel=0.05)
    assert recomputed["peak_mib"] < kept["peak_mib"] < unfused["peak_mib"]
    assert recomputed["peak_mib"] < logits < kept["peak_mib"]
    names = [entry["name"] for entry in (unfused, recomputed, kept)]
    assert names == ["unfused: torch eager fp32 loss", "loongforge, nothing kept", "loongforge, all logits kept"]
    whole = [sum(block["bytes"] == 512 * 9001 * 4 for block in entry["blocks"]) for entry in (unfused, kept)]
    assert whole == [4, 1]
    for entry in (unfused, recomputed, kept):
        final = [b["bytes"] / 2**20 for b in entry["blocks"] if b["stop_ms"] is None]
        assert grad_weight in final, "the weight gradient outlives backward"
    assert f"{unfused['peak_mib']:.1f} MiB" in capsys.readouterr().out


def test_picture_from_the_file(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install 'loongforge[plot]')")
    picture = tmp_path / "memory.png"
    assert cli.main(["memory", *SIZES, "--budgets", "0", "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    assert cli.main(["memory", "--redraw", str(tmp_path / "memory.json")]) == 0
    assert picture.exists() and capsys.readouterr().out.endswith("memory.png\n")


@pytest.mark.parametrize(
    ("words", "message"),
    (
        ([*SIZES], "--output must name a .png or a .json file"),
        ([*SIZES, "--output", "a.pdf"], "--output must name a .png or a .json file"),
        (["llama2", *SIZES, "--output", "a.json"], "a picture shows one shape"),
        ([*SIZES, "--output", "a.json", "--budgets", "some"], "whole numbers of MiB or all"),
        (["--redraw", "nowhere.json"], "--redraw needs a file that loongforge memory wrote"),
    ),
)
def test_bad_input(words, message, capsys):
    assert cli.main(["memory", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ("", "[]", "{}", "null", "3", '{"environment": {"device": "cpu"}, "shape": {}, "timelines": []}')
)
def test_a_file_that_holds_something_else_is_not_drawn(text, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install 'loongforge[plot]')")
    file = tmp_path / "memory.json"
    file.write_text(text)
    assert cli.main(["memory", "--redraw", str(file)]) == 2
    assert f"needs a file that loongforge memory wrote, {file} is none" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


def test_without_matplotlib_nothing_is_recorded(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(memory.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["memory", *SIZES, "--output", str(tmp_path / "a.png")]) == 2
    assert "pip install 'loongforge[plot]'" in capsys.readouterr().err and not list(tmp_path.iterdir())
