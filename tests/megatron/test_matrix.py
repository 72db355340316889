"""Fused against unfused, over model, layout and version: the rows of matrix.py.

The reference is Megatron's unfused loss; its native fused one rounds the logits' gradient to bf16 even in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import pytest

from tests.helpers import worst
from tests.megatron.launching import run_rows
from tests.megatron.matrix import INSTALLED, UNPACKED, Row, fast, full

STEP_1_LOSS, STEP_1_GRADIENT, LATER_LOSS = 1e-6, 1e-5, 1e-5
ROWS_PER_LAUNCH = 32
pytestmark = pytest.mark.timeout(1800)  # the first row of a launch waits for all of them
HEAD_EMBEDDING_FIRST_LAYER = ("output_layer.", "embedding.", "decoder.layers.0.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    tier = full if metafunc.config.getoption("full_matrix", default=False) else fast
    cases = [(version, row) for version in (INSTALLED, *UNPACKED) for row in tier(version)]
    metafunc.parametrize("version, row", cases, ids=[f"{version}-{row.name}" for version, row in cases])


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> Callable[[str, Row], list[dict]]:
    """Results of one row from every rank; rows of one version and size are measured together, in few processes."""
    wanted = [item.callspec.params for item in request.session.items if item.path == request.path]
    cache: dict[tuple[str, Row], list[dict]] = {}

    def get(version: str, row: Row) -> list[dict]:
        if (version, row) not in cache:
            group = [p["row"] for p in wanted if p["version"] == version and p["row"].world == row.world]
            start = group.index(row)
            group = group[start : start + ROWS_PER_LAUNCH]
            results = run_rows(version, group)
            cache.update({(version, other): results.get(other.name, []) for other in group})
        return cache[version, row]

    return get


def test_fused_equals_unfused(version: str, row: Row, measured: Callable[[str, Row], list[dict]]) -> None:
    ranks = measured(version, row)
    errors = [rank["error"] for rank in ranks if "error" in rank]
    assert not errors, errors[0]
    assert len(ranks) == row.world, "a rank did not get to this row"
    for rank in ranks:
        check_that_it_was_fused(row, rank)
        check_gradients(row, rank)
        check_losses(version, row, rank)


def check_that_it_was_fused(row: Row, rank: dict) -> None:
    """The operation ran for every head of every micro batch, and nothing as large as the logits was allocated."""
    assert rank["materialized"] == 0
    assert rank["logits_sized"] == [] and rank["eval_logits_sized"] == []
    heads, last = 1 + row.mtp, rank["last_stage"]
    evaluations = 1 if row.pp == 1 else 0
    assert rank["fused"] == (heads * (20 * 2 + evaluations) if last else 0)
    if last:
        # The same watch sees the unfused run's logits.
        assert len(rank["unfused_logits_sized"]) >= 2 * heads
        assert len(rank["eval_unfused_logits_sized"]) >= heads * evaluations


def check_gradients(row: Row, rank: dict) -> None:
    # A gradient of zeros would prove nothing; here the embedding's copy on the last stage is the head's weight.
    unused = ["output_layer.weight"] if row.tied and row.mtp and row.pp > 1 and rank["last_stage"] else []
    assert rank["zero_grads"] == unused
    for name, error in rank["grad_errors"].items():
        if not row.low:
            assert error["fused"] <= STEP_1_GRADIENT, name
        elif name.startswith(HEAD_EMBEDDING_FIRST_LAYER):
            assert error["unfused"] > 0, name
            assert error["fused"] <= 2 * error["unfused"], name


def check_losses(version: str, row: Row, rank: dict) -> None:
    if row.pp == 1:
        assert rank["eval_loss_error"] <= STEP_1_LOSS
        # Without labels nothing is fused, MTP's own loss included.
        derives = version == "0.19.2" and not row.accumulation_fusion
        assert rank["unlabelled_logits_error"] == (None if row.mtp and not derives else 0)
        assert bool(rank["unlabelled_grad_errors"]) == bool(row.mtp and derives)
        assert all(error == 0 for error in rank["unlabelled_grad_errors"].values())
    if not rank["last_stage"]:
        return
    truth, unfused, fused = (rank["losses"][name] for name in ("truth", "unfused", "fused"))
    assert len(fused) == len(unfused) == len(truth) == 20
    assert truth[-1] < truth[0] - 0.3, "nothing was learnt"
    if row.low:
        off = [fmean(abs(a - b) / b for a, b in zip(losses, truth, strict=True)) for losses in (fused, unfused)]
        assert off[0] <= 2 * off[1]
        return
    relative = [abs(a - b) / b for a, b in zip(fused, unfused, strict=True)]
    assert relative[0] <= STEP_1_LOSS
    assert worst(relative) <= LATER_LOSS
