"""The tile kernels, plain Triton and Gluon, compile without a GPU for the one architecture they ship for."""

import os
import re

import pytest

triton = pytest.importorskip("triton", reason="needs triton (pip install 'loongforge[triton]')")

from triton.compiler import ASTSource  # noqa: E402

from loongforge.dispatch import why_not_gluon  # noqa: E402
from loongforge.kernels import triton_tiles  # noqa: E402
from loongforge.kernels.triton_tiles_finish import FINISH, finish_kernel  # noqa: E402
from tests.kernels.test_triton_compile import TARGETS, TRANSFORMS, instructions, nvidia_resources  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter replaces the compiler in this process"
)
CONFIG = triton_tiles.CONFIG
HOPPER_SHARED_BYTES = 227 * 1024
FEW_SPILLED_BYTES, SEVERAL_SPILLED_BYTES = 32, 64  # of one option, of several in Gluon: accumulators would be hundreds
PLAIN_SPILLED_BYTES = 512  # of all options together in plain Triton
WITHOUT = {
    "nothing": {"bias_ptr", "class_weight_ptr", "uniform_ptr", "weighted_sum_ptr"},
    "label smoothing": {"bias_ptr", "class_weight_ptr"},
    "everything": set(),
}
OPTIONS = [("bf16", "identity", "nothing"), ("fp16", "softcap", "everything")]  # the least and the most of the epilogue
BETWEEN = [
    ("bf16", "softcap", "nothing"), ("bf16", "identity", "label smoothing"), ("bf16", "softcap", "label smoothing"),
    ("bf16", "identity", "everything"),
]  # fmt: skip
BARRIER = re.compile(r"\bbar(?:rier)?(?:\.cta)?\.(?:sync|arrive|red)[.\w]*\s+(\w+|%\w+)(?:,\s*(\w+))?\s*;")
gluon = pytest.mark.skipif(why_not_gluon() is not None, reason=f"dispatch does not use them: {why_not_gluon()}")


def compiled(kernel, dtype, transform, options):
    """``options``: a key of :data:`WITHOUT`."""
    blocks = {
        "hidden_desc": f"{CONFIG.block_t},{CONFIG.block_h}]",
        "weight_desc": f"{CONFIG.block_c},{CONFIG.block_h}]",
        "out_desc": f"{CONFIG.block_t},{CONFIG.block_c // 2}]",
    }
    meta = CONFIG.meta()
    launch = {name: meta.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    signature, constants = signature_of(kernel, dtype, transform, options, blocks, meta)
    return triton.compile(ASTSource(kernel, signature, constants), target=TARGETS["sm_90"], options=launch)


def compiled_gluon(kernel, dtype, transform, options):
    from triton.experimental.gluon._runtime import GluonASTSource

    from loongforge.kernels import gluon_tiles as tiles

    depth, operand = tiles.BLOCK_H.value, tiles.OPERAND.value
    blocks = {
        "hidden_desc": f"{tiles.ROWS.value},{depth}],{operand!r}",
        "weight_desc": f"{tiles.COLUMNS.value},{depth}],{operand!r}",
        "out_desc": f"{tiles.ROWS.value},{tiles.COLUMNS.value}],{tiles.STAGING.value!r}",
    }
    kernels, is_plain = tiles.GluonTileKernels(), (transform, options) == ("identity", "nothing")
    launch = dict(kernels._gradient()[1] if "out_desc" in kernel.arg_names else kernels._statistics(is_plain)[2])
    meta = {"UNITS": launch.pop("UNITS"), "FIRST": True} if "UNITS" in launch else {}
    signature, constants = signature_of(kernel, dtype, transform, options, blocks, meta)
    return triton.compile(GluonASTSource(kernel, signature, constants), target=TARGETS["sm_90"], options=launch)


def compiled_finish(kernel, target, dtype, transform, options, first):
    signature, constants = signature_of(kernel, dtype, transform, options, {}, FINISH | {"FIRST": first})
    return triton.compile(ASTSource(kernel, signature, constants), target=TARGETS[target])


def signature_of(kernel, dtype, transform, options, blocks, meta):
    constants = meta | {"TRANSFORM": TRANSFORMS[transform], "WEIGHTED_SUM": options != "nothing"}
    constants |= dict.fromkeys(WITHOUT[options])
    types = {"label_ptr": "*i64", "first_class": "i64", "hidden_stride": "i64", "weight_stride": "i64"}
    types |= dict.fromkeys(("bias_ptr", "hidden_ptr", "weight_ptr"), f"*{dtype}")
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


@pytest.mark.parametrize("dtype, transform, options", [*OPTIONS, *BETWEEN])
@pytest.mark.parametrize("kernel", (triton_tiles.statistics_kernel, triton_tiles.tile_gradient_kernel))
def test_products_run_on_the_tensor_cores_within_the_registers(kernel, dtype, transform, options):
    binary = compiled(kernel, dtype, transform, options)
    used = nvidia_resources(binary)
    assert used["registers"] <= 255 and used["shared"] <= HOPPER_SHARED_BYTES, used
    assert used["spills"] <= (PLAIN_SPILLED_BYTES if options == "everything" else 0), used
    assert "wgmma.mma_async" in binary.asm["ptx"]
    assert "cp.async.bulk.tensor" in binary.asm["ptx"]
    assert "atom" not in binary.asm["ptx"], "results must repeat bit for bit"


@pytest.mark.parametrize("dtype, transform, options", OPTIONS)
@pytest.mark.parametrize("target", ("sm_90", "sm_100"))
def test_what_follows_the_tiles(target, dtype, transform, options):
    """With ``FIRST`` it does not read what it overwrites: the maximum and one sum or two."""
    num_loads = {}
    for first in (True, False):
        binary = compiled_finish(finish_kernel, target, dtype, transform, options, first)
        used = nvidia_resources(binary)
        assert used["spills"] == 0 and used["registers"] <= 128, used
        assert "atom" not in binary.asm["ptx"], "results must repeat bit for bit"
        num_loads[first] = binary.asm["ptx"].count("ld.global")
    assert num_loads[False] - num_loads[True] == (2 if options == "nothing" else 3)


@gluon
@pytest.mark.parametrize("dtype, transform, options", [*OPTIONS, *BETWEEN])
@pytest.mark.parametrize("name", ("statistics_kernel", "tile_gradient_kernel"))
def test_gluon_kernels_give_registers_to_the_warps_that_multiply(name, dtype, transform, options):
    from loongforge.kernels import gluon_tiles

    binary = compiled_gluon(getattr(gluon_tiles, name), dtype, transform, options)
    used = nvidia_resources(binary)
    assert used["registers"] <= 128 and used["shared"] <= HOPPER_SHARED_BYTES, used  # 4 * 128 threads at launch
    number = (transform != "identity") + ("nothing", "label smoothing", "everything").index(options)
    assert used["spills"] <= (0, FEW_SPILLED_BYTES, SEVERAL_SPILLED_BYTES, SEVERAL_SPILLED_BYTES)[number], used
    ptx = binary.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n128k16" in ptx and "cp.async.bulk.tensor" in ptx
    assert "setmaxnreg.inc" in ptx
    assert "atom" not in ptx, "results must repeat bit for bit"


@gluon
def test_a_logit_costs_gluon_statistics_four_instructions():
    """A maximum, a fused multiply-add, an exponential and a sum, in the code of each of the two warpgroups."""
    from loongforge.kernels import gluon_tiles as tiles

    binary = compiled_gluon(tiles.statistics_kernel, "bf16", "identity", "nothing")
    names = [re.sub(r"^@!?U?P\w+\s+", "", line).split()[0] for line in instructions(binary)]
    of_a_thread = tiles.WARPGROUPS.value * tiles.ROWS.value * tiles.COLUMNS.value * tiles.WIDE.value // 128
    used = {start: sum(name.startswith(start) for name in names) for start in ("FMNMX", "FFMA", "MUFU.EX2", "FADD")}
    assert all(of_a_thread <= count <= 1.1 * of_a_thread for count in used.values()), (of_a_thread, used)
    assert sum(name.startswith("FMUL") for name in names) < of_a_thread / 10


@gluon
@pytest.mark.parametrize("name", ("statistics_kernel", "tile_gradient_kernel"))
def test_the_first_warps_of_a_block_do_not_wait_for_each_other_while_others_work(name):
    """Their barrier would be number 0 with 128 threads, which racecheck takes for one of all threads.

    Triton 3.7 and 3.8 put one between set-up and work, when no other warp runs; 3.6 and 3.9 none.  Barrier 1 is of all
    threads: Triton hands out work by it, with three for the first job.
    """
    from loongforge.kernels import gluon_tiles

    ptx = compiled_gluon(getattr(gluon_tiles, name), "bf16", "identity", "nothing").asm["ptx"]
    barriers = [f"{number} {threads}".strip() for number, threads in BARRIER.findall(ptx)]
    assert {"1", "2 128", "3 128"} <= set(barriers), "barriers are written in another way"
    places = [place for place, barrier in enumerate(barriers) if barrier.startswith("0")]
    assert places in ([], [3] if triton.__version__.startswith(("3.7.", "3.8.")) else []), barriers
