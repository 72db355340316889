"""Time loongforge's implementations on an AMD GPU; replaces the model of docs/amd_kernels.md by measurements.

Forward plus backward in milliseconds, median of --repeats after a warm-up, and for cross_entropy the bandwidth of its
two reads and one write of the logits.
"""

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import loongforge  # noqa: E402

LOGITS_SHAPES = ((4096, 32768), (4096, 32000), (2048, 128256), (2048, 152064), (2048, 2048))
FUSED_SHAPE = (8192, 2048, 128256)
IMPLEMENTATIONS = ("flydsl", "triton", "generic")


def milliseconds(step, repeats: int) -> float:
    """Median device time of ``step()``."""
    step()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def cross_entropy_step(logits, target, impl: str) -> None:
    loongforge.cross_entropy(logits, target, impl=impl).backward()
    logits.grad = None


def fused_step(hidden, weight, target, impl: str) -> None:
    loongforge.linear_cross_entropy(hidden, weight, target, impl=impl).backward()
    hidden.grad = weight.grad = None


def report(label: str, step, repeats: int, num_bytes: int | None = None) -> None:
    try:
        time = milliseconds(step, repeats)
    except (RuntimeError, NotImplementedError) as error:
        print(f"{label:40s} not run: {error}")
        return
    bandwidth = "" if num_bytes is None else f"  {num_bytes / time / 1e9:6.2f} TB/s"
    print(f"{label:40s} {time:9.3f} ms{bandwidth}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="timed repetitions of each case (default 20)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    arguments = parser.parse_args()
    if not torch.version.hip or not torch.cuda.is_available():
        parser.error("needs an AMD GPU and a torch built for ROCm; this torch has no usable ROCm device")
    dtype = getattr(torch, arguments.dtype)
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name} ({properties.gcnArchName}), torch {torch.__version__}, {arguments.dtype}")
    for tokens, vocab in LOGITS_SHAPES:
        logits = torch.randn(tokens, vocab, device="cuda", dtype=dtype).requires_grad_()
        target = torch.randint(0, vocab, (tokens,), device="cuda")
        for impl in IMPLEMENTATIONS:
            step = partial(cross_entropy_step, logits, target, impl)
            report(f"cross_entropy {tokens} x {vocab} {impl}", step, arguments.repeats, 3 * logits.nbytes)
    tokens, hidden_size, vocab = FUSED_SHAPE
    hidden = torch.randn(tokens, hidden_size, device="cuda", dtype=dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden_size, device="cuda", dtype=dtype) / hidden_size**0.5).requires_grad_()
    target = torch.randint(0, vocab, (tokens,), device="cuda")
    for impl in IMPLEMENTATIONS:
        step = partial(fused_step, hidden, weight, target, impl)
        report(f"fused {tokens} x {hidden_size} x {vocab} {impl}", step, arguments.repeats)


if __name__ == "__main__":
    main()
