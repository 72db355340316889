"""Runs rows of the matrix in this process (one rank of several) and writes what it measured as JSON.

python worker.py TASK.json     with RANK, WORLD_SIZE and PYTHONPATH set by test_matrix.py
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import loongforge.megatron  # noqa: E402
from loongforge.megatron import cpu  # noqa: E402
from tests.megatron.matrix import Row  # noqa: E402


def main(task_path: Path) -> None:
    """Run every row of the task; one row's failure does not stop the others."""
    task = json.loads(task_path.read_text())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    cpu.apply()
    report = loongforge.megatron.install()
    dist.init_process_group("gloo", init_method=f"file://{task_path}.store", rank=rank, world_size=world)
    results = []
    for fields in task["rows"]:
        row, start = Row(**fields), time.perf_counter()
        try:
            result = measure(row)
        except Exception:  # reported by name; the ranks of a row fail together or run into the caller's timeout
            result = {"error": traceback.format_exc()}
        results.append({"row": row.name, "seconds": time.perf_counter() - start, **result})
        task_path.with_suffix(f".rank{rank}").write_text(
            json.dumps({"version": report.megatron_version, "results": results})
        )
        if "error" in result and world > 1:
            break  # the other rank waits in a collective that this one left
    dist.destroy_process_group()


def measure(row: Row) -> dict:
    """Unfused against fused: every number that test_matrix.py judges."""
    from megatron.core import parallel_state

    from tests.megatron.training import LINEAR, train

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=row.tp,
        pipeline_model_parallel_size=row.pp,
        virtual_pipeline_model_parallel_size=row.vpp if row.vpp > 1 else None,
        context_parallel_size=row.cp,
        expert_model_parallel_size=row.ep,
    )
    try:
        truth = train(row, torch.float32)
        dtype = torch.bfloat16 if row.bf16 else torch.float16 if row.fp16 else torch.float32
        baseline = train(row, dtype) if row.low else truth
        counters = loongforge.megatron.counters
        before = counters.fused, counters.materialized
        fused = train(row, dtype, **LINEAR)
        return {
            "last_stage": parallel_state.is_pipeline_last_stage(),
            "fused": counters.fused - before[0],
            "materialized": counters.materialized - before[1],
            "unfused_logits_sized": baseline.logits_sized,
            "logits_sized": fused.logits_sized,
            "eval_unfused_logits_sized": baseline.eval_logits_sized,
            "eval_logits_sized": fused.eval_logits_sized,
            "losses": {"truth": truth.losses, "unfused": baseline.losses, "fused": fused.losses},
            "grad_errors": {
                name: {"unfused": error(baseline.grads[name], grad), "fused": error(fused.grads[name], grad)}
                for name, grad in truth.grads.items()
            },
            "zero_grads": [name for name, grad in truth.grads.items() if not grad.any()],
            "eval_loss_error": compare(fused.eval_loss, baseline.eval_loss),
            "unlabelled_logits_error": compare(fused.logits, baseline.logits),
            "unlabelled_grad_errors": {
                name: error(fused.unlabelled_grads[name], grad) for name, grad in baseline.unlabelled_grads.items()
            },
        }
    finally:
        parallel_state.destroy_model_parallel()


def error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative norm; NaN or a missing gradient never passes for a small one."""
    return float((value.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30))


def compare(value: torch.Tensor | None, truth: torch.Tensor | None) -> float | None:
    """As :func:`error`, None where both are missing."""
    return None if value is None and truth is None else error(value, truth)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
