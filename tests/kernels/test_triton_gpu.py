"""What only a GPU can show of the Triton row kernels: one compilation for all sizes, graphs, no synchronisation.

Without one, ``test_triton_compile.py`` holds that nothing is specialised, and the interpreter runs the rest.
"""

import math

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton (pip install 'loongforge[triton]')")

from loongforge import LossOptions  # noqa: E402
from loongforge.kernels.interface import Chunk, LogitTransform, RowCoefficients, RowStats  # noqa: E402
from loongforge.kernels.triton_rows import accumulate_kernel, gradient_kernel  # noqa: E402
from loongforge.loss import fused_loss  # noqa: E402
from tests.kernels.triton_cases import (  # noqa: E402
    DEVICE,
    HAS_GPU,
    IDENTITY,
    KERNELS,
    ROUNDING,
    SOFTCAP,
    Rows,
    assert_close,
    new_stats,
    random_labels,
    random_logits,
    random_vector,
)

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: the interpreter has no streams, graphs or compilation")


@needs_gpu
def test_one_compilation_serves_every_size_stride_and_address():
    def run(num_tokens, num_classes, aligned, first_class):
        rows = Rows(random_logits(num_tokens, num_classes, torch.bfloat16), aligned)
        label_T = torch.zeros(num_tokens + 1, device=DEVICE, dtype=torch.int64)[1:]
        stats = new_stats(num_tokens, torch.bfloat16)
        transform = LogitTransform(logit_scale=first_class + 0.5)
        KERNELS.accumulate(rows.logits, Chunk(label_T, first_class, transform), stats)
        coefficients = RowCoefficients(stats.max_T, stats.sum_exp_T, stats.sum_exp_T, None)
        KERNELS.gradient_(rows.logits, Chunk(label_T, first_class, transform), coefficients)

    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **kwargs: compiled.append(kwargs["fn"].name)
    try:
        for kernel in (accumulate_kernel, gradient_kernel):
            kernel.device_caches.clear()
        run(4, 16, True, 0)
        assert len(compiled) == 2, "the hook must see both kernels"
        for arguments in ((1, 1, False, 1), (16, 4096, True, 16), (5, 9001, False, 2**33)):
            run(*arguments)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert len(compiled) == 2


@needs_gpu
def test_graph_capture_and_replay_with_other_inputs():
    first_TC, second_TC = (random_logits(8, 9001, torch.bfloat16, seed) for seed in (1, 2))
    labels = [random_labels(8, 9001, seed) for seed in (3, 4)]
    logits_TC, label_T = first_TC.clone(), labels[0].clone()
    stats = new_stats(8, torch.bfloat16)
    one_T = torch.ones(8, device=DEVICE)

    def step():
        stats.max_T.fill_(-math.inf), stats.sum_exp_T.zero_(), stats.label_logit_T.zero_()
        KERNELS.accumulate(logits_TC, Chunk(label_T, 0, IDENTITY), stats)
        coefficients = RowCoefficients(stats.max_T, one_T / stats.sum_exp_T, one_T, None)
        KERNELS.gradient_(logits_TC, Chunk(label_T, 0, IDENTITY), coefficients)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for values_TC, new_label_T in ((second_TC, labels[1]), (first_TC, labels[0])):
        logits_TC.copy_(values_TC)
        label_T.copy_(new_label_T)
        graph.replay()
        expected_TC = values_TC.double().softmax(1)
        here = new_label_T >= 0
        expected_TC[here.nonzero()[:, 0], new_label_T[here]] -= 1.0
        assert_close(logits_TC, expected_TC, ROUNDING[torch.bfloat16] + 5e-7)


@needs_gpu
def test_neither_kernel_synchronises_with_the_host():
    rows_TC = random_logits(8, 9001, torch.bfloat16)
    label_T = random_labels(8, 9001)
    class_weight_C = random_vector(9001, torch.float32, 7)
    stats = new_stats(8, torch.bfloat16, weighted=True)
    one_T = torch.ones(8, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        KERNELS.accumulate(rows_TC, Chunk(label_T, 0, SOFTCAP, class_weight_C), stats)
        KERNELS.gradient_(
            rows_TC, Chunk(label_T, 0, SOFTCAP, class_weight_C), RowCoefficients(stats.max_T, *[one_T] * 3)
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not HAS_GPU or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one():
    rows_TC = random_logits(8, 9001, torch.bfloat16).to("cuda:1")
    label_T = random_labels(8, 9001).to("cuda:1")
    stats = RowStats(*(torch.full((8,), value, device="cuda:1") for value in (-math.inf, 0.0, 0.0)), None)
    with torch.cuda.device(0):
        KERNELS.accumulate(rows_TC, Chunk(label_T, 0, IDENTITY), stats)
        assert torch.cuda.current_device() == 0
    assert_close(stats.max_T.double() + stats.sum_exp_T.double().log(), rows_TC.double().logsumexp(1), 1e-6)


class MainGrad:
    """A float32 gradient that the products add into, as Megatron's fusion has it; ``tests/core`` has its CPU twin."""

    def __init__(self, weight):
        self.buffer_VH = torch.zeros_like(weight, dtype=torch.float32)

    def open(self):
        return self.buffer_VH, True

    def close(self):
        return None


@needs_gpu
def test_peak_with_main_grad_on_the_llama3_8b_head():
    """At most 500 MiB above the inputs, and above the 64 MiB of grad_hidden little more than a chunk."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(8192, 4096, device=DEVICE, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(128256, 4096, device=DEVICE, generator=generator) / 64).bfloat16().requires_grad_()
    target = torch.randint(0, 128256, (8192,), device=DEVICE, generator=generator)
    upstream = torch.rand(8192, device=DEVICE, generator=generator)
    sink = MainGrad(weight)
    for _ in range(2):
        hidden.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fused_loss(hidden, weight, target, LossOptions(reduction="none"), weight_grad_sink=sink).backward(upstream)
        peak_mib = (torch.cuda.max_memory_allocated() - before) / 2**20
    assert peak_mib <= 500, peak_mib
    print(f"peak above the inputs with main_grad: {peak_mib:.0f} MiB")
    chosen = torch.arange(0, 128256, 997, device=DEVICE)
    rows = hidden.detach().float() @ weight.detach().float().t()
    grad_TV = (rows.softmax(1).index_put((torch.arange(8192, device=DEVICE), target), torch.tensor(-1.0, device=DEVICE),
                                         accumulate=True) * upstream[:, None])[:, chosen]  # fmt: skip
    assert_close(sink.buffer_VH[chosen] / 2, grad_TV.t() @ hidden.detach().float(), 4e-3)


@needs_gpu
@pytest.mark.parametrize("budget", (0, "all"))
def test_the_gradient_of_a_bias_costs_no_memory(budget):
    """Beside the logits' gradient, of which it is the sum; ``tests/core/test_memory.py`` has a CPU twin."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    tensors = [
        torch.randn(*size, device=DEVICE, generator=generator) / 8 for size in ((8192, 256), (32000, 256), (32000,))
    ]
    hidden, weight, bias = (tensor.bfloat16().requires_grad_() for tensor in tensors)
    target = torch.randint(0, 32000, (8192,), device=DEVICE, generator=generator)
    peaks = []
    for given in (None, bias, None, bias):  # the library's workspace belongs to nobody after the first two
        hidden.grad = weight.grad = bias.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fused_loss(hidden, weight, target, LossOptions(logits_budget_mb=budget), bias=given).backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[3] - peaks[2] < 4 << 20, [peak / 2**20 for peak in peaks]
    logits = hidden.detach().float() @ weight.detach().float().t() + bias.detach().float()
    grad_V = (logits.softmax(1).sum(0) - torch.bincount(target, minlength=32000)) / 8192
    assert_close(bias.grad, grad_V, 2**-8)
