"""FlyDSL beside Triton's AMD code object (both on the emulator) and beside torch's own fused loss."""

import os

import pytest
import torch

pytest.importorskip("flydsl", reason="needs flydsl (pip install 'loongforge[flydsl]')")
pytest.importorskip("triton", reason="needs triton (pip install 'loongforge[triton]')")

from tests.amdgpu import toolchain  # noqa: E402

if toolchain.missing():
    pytest.skip(toolchain.missing(), allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler in this process", allow_module_level=True)

import loongforge  # noqa: E402
from tests.amdgpu.rows import EmulatedFlyDSLRowKernels  # noqa: E402
from tests.amdgpu.triton_host import EmulatedTritonRowKernels  # noqa: E402
from tests.helpers import loss_and_gradients, make_inputs, relative, upstream  # noqa: E402
from tests.kernels.flydsl_parallel_checks import use  # noqa: E402

CLASS_WEIGHT = torch.linspace(0.5, 1.5, 101)
TRITON_OPTIONS = {
    "none": {"reduction": "none"},
    "every option": {
        "label_smoothing": 0.1,
        "class_weight": CLASS_WEIGHT,
        "z_loss_weight": 0.01,
        "softcap": 3.0,
        "logit_scale": 1.7,
    },
}
TORCH_OPTIONS = {
    "mean": {"reduction": "mean"},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignore_index": {"ignore_index": 7},
    "label_smoothing": {"label_smoothing": 0.1, "reduction": "none"},
    "class_weight": {"class_weight": CLASS_WEIGHT},
    "all": {"ignore_index": 7, "label_smoothing": 0.1, "class_weight": CLASS_WEIGHT},
}


def inputs_for(dtype, **options):
    inputs = make_inputs(9, 16, 101, dtype, bias=True)
    inputs.target[inputs.target == -100] = options.get("ignore_index", -100)
    return inputs.leaves()


def ours(monkeypatch, kernels, dtype, **options):
    """Loss and gradients with these kernels."""
    use(monkeypatch, kernels)
    found = loss_and_gradients(
        lambda *t, **bias: loongforge.linear_cross_entropy(*t, **bias, **options), inputs_for(dtype, **options)
    )
    assert kernels.launches
    return found


@pytest.mark.parametrize("arch", ("gfx942", "gfx1201"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("name", TRITON_OPTIONS)
def test_with_the_triton_kernels(name, dtype, arch, monkeypatch):
    """Of bfloat16 gradients a few may fall on the other side of a rounding."""
    pairs = zip(
        ours(monkeypatch, EmulatedFlyDSLRowKernels(arch), dtype, **TRITON_OPTIONS[name]),
        ours(monkeypatch, EmulatedTritonRowKernels(arch), dtype, **TRITON_OPTIONS[name]),
        strict=True,
    )
    for number, (flydsl, triton) in enumerate(pairs):
        assert relative(flydsl, triton) < (2**-10 if number and dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("arch", ("gfx942", "gfx1201"))
def test_cross_entropy_of_existing_logits_with_the_triton_kernels(arch, monkeypatch):
    logits, target = torch.randn(6, 1003), torch.tensor([1002, -100, 0, 7, 8, 9])
    found = []
    for kernels, num_launches in ((EmulatedFlyDSLRowKernels(arch), 2), (EmulatedTritonRowKernels(arch), 3)):
        use(monkeypatch, kernels)
        leaf = logits.clone().requires_grad_()
        loss = loongforge.cross_entropy(leaf * 1.0, target, reduction="none", inplace_backward=True)
        found.append((loss, *torch.autograd.grad(loss, leaf, upstream(6).float())))
        assert len(kernels.launches) == num_launches, "Triton's losses of tokens are a kernel"
    for flydsl, triton in zip(*found, strict=True):
        assert relative(flydsl, triton) < 1e-6


@pytest.mark.parametrize("chunked", (False, True), ids=("whole", "chunked"))
@pytest.mark.parametrize("name", TORCH_OPTIONS)
def test_with_torch_linear_cross_entropy(name, chunked, monkeypatch):
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip(f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy (2.13 has)")
    options = TORCH_OPTIONS[name]
    if chunked and "label_smoothing" in options:
        pytest.skip("torch's chunked path has no label_smoothing")
    shared = {key: value for key, value in options.items() if key != "class_weight"}
    chunking = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=4) if chunked else None

    def theirs(hidden, weight, target, bias):
        return torch.nn.functional.linear_cross_entropy(
            hidden, weight, target, linear_bias=bias, weight=options.get("class_weight"), options=chunking, **shared
        )

    found = ours(monkeypatch, EmulatedFlyDSLRowKernels("gfx942"), torch.float32, **options)
    expected = loss_and_gradients(theirs, inputs_for(torch.float32, **options))
    for mine, torchs in zip(found, expected, strict=True):
        assert relative(mine, torchs) < 1e-6
