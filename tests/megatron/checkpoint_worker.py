"""One rank that saves a model's checkpoint, or loads one and reports the loss.

python checkpoint_worker.py FOLDER save|load linear|unfused TP      with RANK and WORLD_SIZE set; prints one JSON line
"""

from __future__ import annotations

import json
import os
import sys
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import loongforge.megatron  # noqa: E402
from loongforge.megatron import cpu  # noqa: E402
from tests.megatron.matrix import Row  # noqa: E402


def main(folder: str, what: str, loss: str, tp: int) -> None:
    """Prints the loss of the first batch and the names stored in the checkpoint."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    cpu.apply()
    version = loongforge.megatron.install().megatron_version
    dist.init_process_group("gloo", init_method=f"file://{folder}.{what}.store", rank=rank, world_size=world)
    from megatron.core import dist_checkpointing, parallel_state
    from torch.distributed.checkpoint import FileSystemReader

    from tests.megatron.training import LINEAR, batches, build_model, configuration

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    row = Row(tp=tp, sp=tp > 1)
    model = build_model(row, configuration(row, torch.float32, **(LINEAR if loss == "linear" else {})))
    if what == "save":
        generator = torch.Generator().manual_seed(11 + rank)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
                if not getattr(parameter, "tensor_model_parallel", False):
                    dist.broadcast(parameter, 0)
        dist_checkpointing.save({"model": model.sharded_state_dict()}, folder)
    else:
        loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, folder)
        model.load_state_dict(loaded["model"])
    batch = dict(next(batches()))
    mask = batch.pop("loss_mask")
    losses = model(**batch) * mask
    names = sorted(FileSystemReader(folder).read_metadata().state_dict_metadata)
    fused = loongforge.megatron.counters.fused
    print("RESULT " + json.dumps({"version": version, "loss": float(losses.sum()), "names": names, "fused": fused}))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":  # saving starts a process of its own, which imports this file
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
