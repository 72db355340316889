"""The model of docs/scaling.md: its arithmetic, its fit, and that the page shows what it says."""

from __future__ import annotations

import json

import pytest

from loongforge.bench import scaling
from loongforge.bench.scaling import STATED, Machine, Step, machine_of, text_of
from loongforge.bench.shapes import HeadShape

SHAPE = HeadShape("head", 16384, 7168, 129280)


def step(ranks=2, sequence_parallel=True, kept=True, shape=SHAPE) -> Step:
    return Step(shape, ranks, sequence_parallel, kept)


def test_the_page_shows_the_tables():
    page = scaling.PAGE.read_text(encoding="utf-8")
    text = text_of(scaling.read(scaling.RESULTS))
    assert scaling.in_page(page, text) == page, "python3 -m loongforge.bench.scaling --write"


def test_bytes_and_floor():
    one = Machine(1e12, 0.0, 1e9, 0.0, 1e9, 0.0, "")
    assert step().floor(one) == pytest.approx(6 * 16384 * 7168 * 129280 / 2 / 1e12)
    gather = {name: seconds for name, seconds, _ in step().collectives(one)}["gather"]
    assert gather == pytest.approx(16384 * 7168 * 2 / 2 / 1e9)
    without = {name: seconds for name, seconds, _ in step(sequence_parallel=False).collectives(one)}
    assert without["all-reduce"] == pytest.approx(2 * gather) and "gather" not in without


def test_what_is_covered_and_what_is_not():
    """Fast products cover nothing; slow ones everything but the statistics; contention takes its share."""
    infinitely_fast = Machine(1e30, 0.0, 1e9, 0.0, 1e9, 0.0, "")
    assert step().exposed(infinitely_fast) == pytest.approx(step().alone(infinitely_fast))
    slow = Machine(1e9, 0.0, 1e9, 0.0, 1e9, 0.0, "")
    exchange = step().collectives(slow)[0][1]
    assert step().exposed(slow) == pytest.approx(exchange)
    contended = Machine(1e9, 0.0, 1e9, 0.0, 1e9, 0.5, "")
    assert step().exposed(contended) == pytest.approx(exchange + (step().alone(slow) - exchange) / 2)


def test_a_ring_that_leaves_the_node():
    inside, outside = STATED.collective(1e9, 8), STATED.collective(1e9, 16)
    assert outside - STATED.latency - STATED.node_latency == pytest.approx(1e9 * 15 / 16 / (8 * STATED.node_bandwidth))
    assert inside - STATED.latency == pytest.approx(1e9 * 7 / 8 / STATED.bandwidth)


def recorded(machine: Machine) -> dict:
    """What two GPUs that obey the model would have measured."""
    links = [
        {"collective": "all_gather", "bytes": size, "ms": 1e3 * machine.collective(size, 2)}
        for size in (2**20, 2**24, 2**28)
    ]
    results = []
    for sequence_parallel in (True, False):
        for kept in (True, False):
            one = step(sequence_parallel=sequence_parallel, kept=kept)
            floor, exposed = 1e3 * one.floor(machine), 1e3 * one.exposed(machine)
            name = f"TP{' + SP' if sequence_parallel else ''}, {'all' if kept else 'none'} kept"
            results.append(
                {"variant": name, "floor_ms": floor, "step_ms": floor + exposed, "exposed_ms": exposed,
                 "ratio": 1 + exposed / floor, "series_ms": floor, "collectives_ms": 1e3 * one.alone(machine),
                 "hidden_share": 0.5, "peak_mib": 100.0, "held_mib": None}
            )  # fmt: skip
    environment = {"device": "GPU", "ranks": 2, "date": "today", "versions": {"torch": "2"}}
    head = {"name": "head", "tokens": 16384, "hidden": 7168, "vocab": 129280, "results": results}
    return json.loads(json.dumps({"environment": environment, "links": links, "shapes": [head]}))


def test_the_fit_finds_the_rates_again():
    truth = Machine(500e12, 15e-6, 300e9, STATED.node_latency, STATED.node_bandwidth, 0.2, "")
    found = machine_of(recorded(truth))
    for name in ("flops", "latency", "bandwidth", "contention"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-6), name
    lines = text_of(recorded(truth)).splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| head | TP")]
    assert len(rows) == 4 and all(row[6] == row[7] for row in rows), rows  # exposed and the model's
