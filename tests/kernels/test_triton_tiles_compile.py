"""The tile kernels, plain Triton and Gluon, compile without a GPU for the one architecture they ship for."""

import os

import pytest

triton = pytest.importorskip("triton", reason="needs triton (pip install 'loongforge[triton]')")

from triton.compiler import ASTSource  # noqa: E402

from loongforge.dispatch import NEWEST_GLUON, OLDEST_GLUON  # noqa: E402
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
        "hidden_desc": f"{CONFIG.block_t},{CONFIG.block_h}]",
        "weight_desc": f"{CONFIG.block_c},{CONFIG.block_h}]",
        "out_desc": f"{CONFIG.block_t},{CONFIG.block_c // 2}]",
    }
    meta = CONFIG.meta()
    options = {name: meta.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    signature, constants = signature_of(kernel, dtype, transform, everything, blocks, meta)
    return triton.compile(ASTSource(kernel, signature, constants), target=TARGETS["sm_90"], options=options)


def compiled_gluon(kernel, dtype, transform, everything):
    from triton.experimental.gluon._runtime import GluonASTSource

    from loongforge.kernels import gluon_tiles as tiles

    depth, operand = tiles.BLOCK_H.value, tiles.OPERAND.value
    blocks = {
        "hidden_desc": f"{tiles.ROWS.value},{depth}],{operand!r}",
        "weight_desc": f"{tiles.COLUMNS.value},{depth}],{operand!r}",
        "out_desc": f"{tiles.ROWS.value},{tiles.COLUMNS.value}],{tiles.STAGING.value!r}",
    }
    signature, constants = signature_of(kernel, dtype, transform, everything, blocks, {})
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return triton.compile(GluonASTSource(kernel, signature, constants), target=TARGETS["sm_90"], options=options)


def signature_of(kernel, dtype, transform, everything, blocks, meta):
    constants = meta | {"TRANSFORM": TRANSFORMS[transform], "WEIGHTED_SUM": everything}
    if not everything:
        constants |= {"bias_ptr": None, "class_weight_ptr": None, "uniform_ptr": None}
    types = {"bias_ptr": f"*{dtype}", "label_ptr": "*i64", "first_class": "i64"}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in blocks:
            signature[name] = f"tensordesc<{dtype}[{blocks[name]}>"
        elif name.endswith("_bits"):
            signature[name] = "i64"
        else:
            signature[name] = types.get(name, "*fp32" if name.endswith("_ptr") else "i32")
    return signature, {name: value for name, value in constants.items() if name in signature}


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


@pytest.mark.parametrize("dtype, transform, everything", OPTIONS)
@pytest.mark.parametrize("target", ("sm_90", "sm_100"))
def test_what_follows_the_tiles(target, dtype, transform, everything):
    kernel = triton_tiles.finish_kernel
    signature, constants = signature_of(kernel, dtype, transform, everything, {}, triton_tiles._FINISH)
    for name in signature.keys() & {"hidden_ptr", "weight_ptr"}:
        signature[name] = f"*{dtype}"
    for name in signature.keys() & {"hidden_stride", "weight_stride"}:
        signature[name] = "i64"
    if not everything:
        signature["weighted_sum_ptr"], constants["weighted_sum_ptr"] = "constexpr", None
    binary = triton.compile(ASTSource(kernel, signature, constants), target=TARGETS[target])
    used = nvidia_resources(binary)
    assert used["spills"] == 0 and used["registers"] <= 128, used
    assert "atom" not in binary.asm["ptx"], "results must repeat bit for bit"


@pytest.mark.skipif(
    not OLDEST_GLUON <= tuple(map(int, triton.__version__.split(".")[:2])) <= NEWEST_GLUON,
    reason="dispatch does not use the Gluon kernels with this Triton",
)
@pytest.mark.parametrize("dtype, transform, everything", OPTIONS)
@pytest.mark.parametrize("name", ("statistics_kernel", "tile_gradient_kernel"))
def test_gluon_kernels_give_registers_to_the_warps_that_multiply(name, dtype, transform, everything):
    from loongforge.kernels import gluon_tiles

    binary = compiled_gluon(getattr(gluon_tiles, name), dtype, transform, everything)
    used = nvidia_resources(binary)
    assert used["registers"] <= 168 and used["shared"] <= HOPPER_SHARED_BYTES, used  # 3 * 128 threads at launch
    assert used["spills"] == 0 or everything, used
    ptx = binary.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n256k16" in ptx and "cp.async.bulk.tensor" in ptx
    assert "setmaxnreg.inc" in ptx
    assert "atom" not in ptx, "results must repeat bit for bit"
