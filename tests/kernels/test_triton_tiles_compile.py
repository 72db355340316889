"""The tile kernels compile, without a GPU, for the one architecture they ship for, within its resources."""

import os

import pytest

triton = pytest.importorskip("triton", reason="needs triton (pip install 'loongforge[triton]')")

from triton.compiler import ASTSource  # noqa: E402

from loongforge.kernels import triton_tiles  # noqa: E402
from tests.kernels.test_triton_compile import TARGETS, TRANSFORMS, nvidia_resources  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter replaces the compiler in this process"
)
CONFIG = triton_tiles.CONFIG
HOPPER_SHARED_BYTES = 227 * 1024
OPTIONS = [("bf16", "identity", False), ("fp16", "softcap", True)]  # the least and the most of the epilogue


def compiled(kernel, dtype, transform, everything):
    """``everything``: bias, class weights and label smoothing too."""
    blocks = {
        "hidden_desc": (CONFIG.block_t, CONFIG.block_h),
        "weight_desc": (CONFIG.block_c, CONFIG.block_h),
        "out_desc": (CONFIG.block_t, CONFIG.block_c // 2),
    }
    meta = CONFIG.meta()
    options = {name: meta.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    constants = meta | {"TRANSFORM": TRANSFORMS[transform], "WEIGHTED_SUM": everything}
    if not everything:
        constants |= {"bias_ptr": None, "class_weight_ptr": None, "uniform_ptr": None}
    types = {"bias_ptr": f"*{dtype}", "label_ptr": "*i64", "first_class": "i64"}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in blocks:
            signature[name] = f"tensordesc<{dtype}[{blocks[name][0]},{blocks[name][1]}]>"
        elif name.endswith("_bits"):
            signature[name] = "i64"
        else:
            signature[name] = types.get(name, "*fp32" if name.endswith("_ptr") else "i32")
    constants = {name: value for name, value in constants.items() if name in signature}
    return triton.compile(ASTSource(kernel, signature, constants), target=TARGETS["sm_90"], options=options)


@pytest.mark.parametrize("dtype, transform, everything", OPTIONS)
@pytest.mark.parametrize("kernel", (triton_tiles.statistics_kernel, triton_tiles.tile_gradient_kernel))
def test_products_run_on_the_tensor_cores_within_the_registers(kernel, dtype, transform, everything):
    binary = compiled(kernel, dtype, transform, everything)
    used = nvidia_resources(binary)
    assert used["registers"] <= 255 and used["shared"] <= HOPPER_SHARED_BYTES, used
    assert used["spills"] == 0 or everything, used
    assert "wgmma.mma_async" in binary.asm["ptx"]
    assert "cp.async.bulk.tensor" in binary.asm["ptx"]
    assert "atom" not in binary.asm["ptx"], "results must repeat bit for bit"
