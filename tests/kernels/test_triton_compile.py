"""Every Triton row kernel compiles, without a GPU, for every architecture it ships for, within its resources.

Triton's wheel brings both compilers and ``cuobjdump``.  Nothing is launched.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="needs triton (pip install 'loongforge[triton]')")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from loongforge.kernels import triton_losses, triton_rows  # noqa: E402
from loongforge.kernels.triton_rows import IDENTITY, SCALE, SOFTCAP  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter replaces the compiler in this process"
)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
    "gfx1201": GPUTarget("hip", "gfx1201", 32),
}
DTYPES = ("bf16", "fp16", "fp32", "fp64")
TRANSFORMS = {"identity": IDENTITY.value, "scale": SCALE.value, "softcap": SOFTCAP.value}
SMOOTHING = ("none", "plain", "class_weight")
EVERYTHING = [(d, t, s) for d in DTYPES for t in TRANSFORMS for s in SMOOTHING]

KERNELS = {
    "accumulate": (triton_rows.accumulate_kernel, triton_rows.ACCUMULATE_CONFIG),
    "gradient": (triton_rows.gradient_kernel, triton_rows.GRADIENT_CONFIG),
}
MAX_REGISTERS = {"cuda": 128, "hip": 160}  # at least two programs of 256 threads on each SM, three waves on each SIMD
MAX_SPILLED_BYTES = 16  # a pointer that ptxas parks before the loops; never inside them
MAX_SHARED_BYTES = 1024  # only the reductions use any


def compiled(kernel_name, target, dtype, transform, smoothing):
    """Compile exactly what the launcher would: no argument is specialised on its value."""
    kernel, config = KERNELS[kernel_name]
    statistic = "*fp64" if dtype == "fp64" else "*fp32"
    types = {"logits_ptr": f"*{dtype}", "label_ptr": "*i64", "num_classes": "i32"}
    meta = config.meta(target.warp_size)
    options = {"num_warps": meta.pop("num_warps"), "enable_fp_fusion": True}
    constants = meta | {"TRANSFORM": TRANSFORMS[transform]}
    if smoothing == "none":
        constants["weighted_sum_ptr"] = constants["uniform_ptr"] = None
    if smoothing != "class_weight":
        constants["class_weight_ptr"] = None
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = types.get(name, statistic if name.endswith("_ptr") else "i64")
    source = ASTSource(kernel, signature, {name: value for name, value in constants.items() if name in signature})
    return triton.compile(source, target=target, options=options)


def nvidia_resources(binary):
    """Registers, spilled or stack bytes and shared memory from the machine code itself."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": usage["REG"], "spills": usage["STACK"] + usage["LOCAL"], "shared": binary.metadata.shared}


def instructions(binary):
    """Of the machine code, without what names lines of the source."""
    if "amdgcn" in binary.asm:
        text, _, _ = binary.asm["amdgcn"].partition(".section\t.debug")
        return re.findall(r"^\t([sv]_.*|global_.*|buffer_.*|ds_.*|flat_.*)$", text, re.MULTILINE)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*)$", text, re.MULTILINE)


def amd_resources(binary):
    """The same from the kernel's metadata (what the code object's notes hold)."""
    usage = {name: int(value) for name, value in re.findall(r"\.(\w+):\s+(\d+)$", binary.asm["amdgcn"], re.MULTILINE)}
    return {
        "registers": usage["vgpr_count"],
        # Scalar registers spill into lanes of vector registers: no memory while the private segment is empty.
        "spills": usage["vgpr_spill_count"] + usage["private_segment_fixed_size"],
        "shared": max(usage["group_segment_fixed_size"], binary.metadata.shared),
    }


@pytest.mark.parametrize("kernel_name", KERNELS)
@pytest.mark.parametrize("target_name", TARGETS)
def test_compiles_without_spills(target_name, kernel_name):
    target = TARGETS[target_name]
    for case in EVERYTHING:
        binary = compiled(kernel_name, target, *case)
        used = nvidia_resources(binary) if target.backend == "cuda" else amd_resources(binary)
        where = f"{kernel_name} on {target_name}, {case}: {used}"
        assert used["spills"] <= MAX_SPILLED_BYTES, where
        assert 0 < used["registers"] <= MAX_REGISTERS[target.backend], where
        assert used["shared"] <= MAX_SHARED_BYTES, where


@pytest.mark.parametrize("target_name", TARGETS)
def test_losses_of_tokens_compile_without_spills(target_name):
    kernel, target = triton_losses.token_losses_kernel, TARGETS[target_name]
    for statistic in ("*fp32", "*fp64"):
        types = {"target_ptr": "*i64", "ignored_ptr": "*i1", "no_class_ptr": "*i1", "BLOCK": "constexpr"}
        pointers = {name: statistic for name in kernel.arg_names if name.endswith("_ptr")}
        signature = {name: (pointers | types).get(name, "i64") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, {"BLOCK": triton_losses._BLOCK})
        binary = triton.compile(source, target=target, options={"enable_fp_fusion": True})
        used = nvidia_resources(binary) if target.backend == "cuda" else amd_resources(binary)
        assert used["spills"] == 0 and 0 < used["registers"] <= 64 and used["shared"] == 0, (statistic, used)


@pytest.mark.parametrize("kernel_name", KERNELS)
@pytest.mark.parametrize("target_name", ("sm_80", "sm_90", "gfx942", "gfx1100"))
@pytest.mark.parametrize("dtype", ("bf16", "fp32"))
def test_the_body_moves_16_bytes_per_access(dtype, target_name, kernel_name):
    target = TARGETS[target_name]
    binary = compiled(kernel_name, target, dtype, "identity", "none")
    vectors = KERNELS[kernel_name][1].vectors
    if target.backend == "cuda":
        loads = len(re.findall(r"ld\.global\S*\.v4\.b32", binary.asm["ptx"]))
        stores = len(re.findall(r"st\.global\S*\.v4\.b32", binary.asm["ptx"]))
    else:
        loads = len(re.findall(r"(?:global|buffer)_load_(?:dwordx4|b128)", binary.asm["amdgcn"]))
        stores = len(re.findall(r"(?:global|buffer)_store_(?:dwordx4|b128)", binary.asm["amdgcn"]))
    assert loads >= 2 * vectors  # the loop over full tiles, and the last tile; AMD's compiler may copy the loop
    assert stores >= (2 * vectors if kernel_name == "gradient" else 0)


@pytest.mark.parametrize("kernel_name", KERNELS)
def test_no_argument_is_specialised_on_its_value(kernel_name):
    """So that one compilation serves every vocabulary, stride and address."""
    kernel, _ = KERNELS[kernel_name]
    specialised = [param.name for param in kernel.params if not (param.is_constexpr or param.do_not_specialize)]
    assert specialised == []


@pytest.mark.parametrize("warp_size", (32, 64))
@pytest.mark.parametrize("kernel_name", KERNELS)
def test_at_most_1024_threads(kernel_name, warp_size):
    config = KERNELS[kernel_name][1]
    meta = config.meta(warp_size)
    assert meta["num_warps"] * warp_size == config.threads <= 1024
    assert meta["LANES"] == config.threads * config.vectors
