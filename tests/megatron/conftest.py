"""The hook's tests: ``pytest tests/megatron`` runs the fast tier, ``--full-matrix`` every row of every version."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is missing: pip install 'loongforge[megatron]'")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Seen when the path tests/megatron is on the command line."""
    parser.addoption("--full-matrix", action="store_true", help="every row of the Megatron hook's matrix (an hour)")


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """megatron-core ready to build a model in this process: CPU stand-ins and a group of one process."""
    import torch
    import torch.distributed as dist

    from loongforge.megatron import cpu

    if torch.cuda.is_available():
        pytest.skip("the CPU stand-ins are for machines without CUDA")
    assert not dist.is_initialized(), "an earlier test left its process group behind"
    store = tmp_path_factory.mktemp("store") / "store"
    with cpu.stand_ins():
        from megatron.core import parallel_state, tensor_parallel

        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            tensor_parallel.model_parallel_cuda_manual_seed(1)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


@pytest.fixture
def hook(megatron: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hook in place for one test, with its counters at zero and chunks that do not divide the vocabulary."""
    import loongforge.megatron

    for direction in ("FWD", "BWD"):
        monkeypatch.setenv(f"LCE_GENERIC_{direction}_VOCAB_SPLIT_SIZE", "48")

    loongforge.megatron.install()
    loongforge.megatron.counters.__init__()
    try:
        yield
    finally:
        loongforge.megatron.uninstall()
