"""The output kernels compile, without a GPU, for every architecture they ship for, within their resources."""

import re

import pytest

pytest.importorskip("triton", reason="needs triton (pip install 'loongforge[triton]')")

import torch  # noqa: E402
import triton  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from loongforge.kernels import triton_output_kernels, triton_outputs, triton_rows, triton_top_k  # noqa: E402
from loongforge.kernels.interface import Chunk, LogitTransform, RowCoefficients, RowStats  # noqa: E402
from tests.kernels.test_triton_compile import (  # noqa: E402
    MAX_REGISTERS,
    MAX_SHARED_BYTES,
    MAX_SPILLED_BYTES,
    TARGETS,
    TRANSFORMS,
    amd_resources,
    nvidia_resources,
    pytestmark,  # noqa: F401
)

KERNELS = {
    "accumulate": (triton_outputs.accumulate_outputs_kernel, triton_outputs.ACCUMULATE_CONFIG),
    "gradient": (triton_outputs.gradient_outputs_kernel, triton_outputs.GRADIENT_CONFIG),
}
ENTROPY = ("b_ptr", "b_max_ptr", "b_sum_exp_ptr", "b_over_sum_ptr")
PAIR = ("label_ptr", "label_logit_ptr", "argmax_ptr", "onehot_ptr")
ABSENT = {
    "predictions": (*ENTROPY, "relative_ptr", "relative_over_sum_ptr"),
    "entropy": (*ENTROPY, "argmax_ptr"),
    "both": ENTROPY,
    "forward": (*PAIR, "relative_over_sum_ptr"),
    "reverse": (*PAIR, "b_over_sum_ptr"),
}
DTYPES = ("bf16", "fp32", "fp64")
CASES = [
    ("bf16", "identity", "both"), ("fp32", "scale", "forward"), ("fp64", "softcap", "reverse"),
    ("bf16", "softcap", "reverse"), ("fp16", "identity", "forward"), ("fp32", "softcap", "both"),
]  # fmt: skip


def compiled(kernel_name, target, dtype, transform, output, b_aligned=True):
    """What the launcher would compile: no argument is specialised on its value."""
    kernel, config = KERNELS[kernel_name]
    statistic = "*fp64" if dtype == "fp64" else "*fp32"
    types = {"label_ptr": "*i64", "argmax_ptr": "*i64", "num_classes": "i32"}
    types |= dict.fromkeys(("logits_ptr", "b_ptr"), f"*{dtype}")
    meta = config.meta(target.warp_size)
    options = {"num_warps": meta.pop("num_warps"), "enable_fp_fusion": True}
    mode = TRANSFORMS[transform]
    constants = meta | {"TRANSFORM": mode, "B_TRANSFORM": mode, "B_ALIGNED": b_aligned}
    constants |= {name: None for name in ABSENT[output] if name in kernel.arg_names}
    signature = {
        name: "constexpr" if name in constants else types.get(name, statistic if name.endswith("_ptr") else "i64")
        for name in kernel.arg_names
    }
    return triton.compile(ASTSource(kernel, signature, constants), target=target, options=options)


def resources(binary, target):
    return nvidia_resources(binary) if target.backend == "cuda" else amd_resources(binary)


@pytest.mark.parametrize("kernel_name", KERNELS)
@pytest.mark.parametrize("target_name", TARGETS)
def test_compiles_without_spills(target_name, kernel_name):
    target = TARGETS[target_name]
    for case in CASES:
        used = resources(compiled(kernel_name, target, *case), target)
        where = f"{kernel_name} on {target_name}, {case}: {used}"
        assert used["spills"] <= MAX_SPILLED_BYTES, where
        assert 0 < used["registers"] <= MAX_REGISTERS[target.backend], where
        assert used["shared"] <= MAX_SHARED_BYTES, where


@pytest.mark.parametrize("kernel_name", KERNELS)
def test_the_body_moves_16_bytes_per_access(kernel_name):
    """Of both heads, unless their rows start at different places of a 16-byte vector."""
    counts = []
    for output, aligned in (("entropy", True), ("forward", True), ("forward", False)):
        binary = compiled(kernel_name, TARGETS["sm_90"], "bf16", "identity", output, aligned)
        counts.append(len(re.findall(r"ld\.global\S*\.v4\.b32", binary.asm["ptx"])))
    assert counts[0] == counts[2] >= 1 and counts[1] == 2 * counts[0]


@pytest.mark.parametrize("kernel_name", KERNELS)
def test_outputs_that_are_off_cost_nothing(kernel_name):
    growing = ("predictions", "both") if kernel_name == "accumulate" else ("predictions", "entropy")
    sizes = [
        len(compiled(kernel_name, TARGETS["sm_90"], "bf16", "identity", output).asm["ptx"].splitlines())
        for output in growing
    ]
    assert sizes[0] < sizes[1]


def test_without_outputs_the_kernels_of_the_loss_run(monkeypatch):
    """Launches are looked at, not made: the same kernels that test_triton_compile.py compiles."""
    launched = []
    for module in (triton_rows, triton_output_kernels):
        monkeypatch.setattr(module, "_launch", lambda kernel, *rest: launched.append(kernel.__name__))
    zero_T, label_T, logits_TC = torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3)
    kernels, identity = triton_output_kernels.TritonOutputKernels(), LogitTransform()
    for relative_T in (None, zero_T):
        kernels.accumulate(logits_TC, Chunk(label_T, 0, identity), RowStats(*[zero_T] * 3, None, relative_T))
        kernels.gradient_(logits_TC, Chunk(label_T, 0, identity), RowCoefficients(*[zero_T] * 3, None, relative_T))
    assert launched == [
        "accumulate_kernel", "gradient_kernel", "accumulate_outputs_kernel", "gradient_outputs_kernel"
    ]  # fmt: skip


@pytest.mark.parametrize("kernel", [*(kernel for kernel, _ in KERNELS.values()), triton_top_k.top_k_kernel])
def test_no_argument_is_specialised_on_its_value(kernel):
    assert [param.name for param in kernel.params if not (param.is_constexpr or param.do_not_specialize)] == []


@pytest.mark.parametrize(
    "target_name, k, block", [*((name, 1, triton_top_k.BLOCK) for name in TARGETS), ("sm_90", 5, 64)]
)
def test_top_k_compiles_without_spills(target_name, k, block, monkeypatch):
    """Several classes in tiles of 64: the sorting network of the real ones takes the compiler 20 seconds."""
    monkeypatch.setattr(triton_top_k, "BLOCK", block)
    target, kernel = TARGETS[target_name], triton_top_k.top_k_kernel
    types = {"logits_ptr": "*bf16", "values_ptr": "*fp32", "classes_ptr": "*i64", "num_classes": "i32", "k": "i32"}
    meta = triton_top_k.top_k_meta(k, target.warp_size)
    options = {"num_warps": meta.pop("num_warps"), "enable_fp_fusion": True}
    constants = meta | {"TRANSFORM": TRANSFORMS["identity"]}
    signature = {name: "constexpr" if name in constants else types.get(name, "i64") for name in kernel.arg_names}
    used = resources(triton.compile(ASTSource(kernel, signature, constants), target=target, options=options), target)
    assert used["spills"] <= MAX_SPILLED_BYTES and used["registers"] <= MAX_REGISTERS[target.backend], used
    assert used["shared"] <= MAX_SHARED_BYTES, used
