"""An option that is off costs nothing: the machine code is that of kernels whose source does not know the options.

The source loses every branch that an option takes (a pointer that is not None, a transform, a second sum) and every
value that only options have; where one is used nevertheless, it does not compile.  It is compiled beside the kernels
as they are, with all options off, and has to be the same, instruction by instruction, registers included.  z-loss and
``ignore_index`` are coefficients of a row and no code at all; the outputs have kernels of their own.
"""

import ast
import importlib.util
import inspect
import sys

import pytest

triton = pytest.importorskip("triton", reason="needs triton (pip install 'loongforge[triton]')")

from loongforge.dispatch import why_not_gluon  # noqa: E402
from loongforge.kernels import triton_rows, triton_tiles, triton_tiles_finish  # noqa: E402
from tests.kernels import test_triton_compile as rows  # noqa: E402
from tests.kernels import test_triton_tiles_compile as tiles  # noqa: E402
from tests.kernels.test_triton_compile import instructions, pytestmark  # noqa: E402, F401

MODULES = [triton_rows, triton_tiles_finish, triton_tiles]
if why_not_gluon() is None:
    MODULES.append(importlib.import_module("loongforge.kernels.gluon_tiles"))
VALUES = {"factor", "softcap", "bias_ptr", "class_weight_ptr", "weighted_sum_ptr", "uniform_ptr", "uniform"}
VALUES |= {"lane_weighted", "weighted_sum"}
OFF = {f"{name} is not None" for name in VALUES} | {"TRANSFORM == SOFTCAP", "TRANSFORM == SCALE", "WEIGHTED_SUM"}
ON = {"TRANSFORM == IDENTITY"}


class WithoutOptions(ast.NodeTransformer):
    """Decides the branches of :data:`OFF` and :data:`ON` in kernels and gives None for :data:`VALUES`."""

    def __init__(self):
        self.num_branches = self.num_values = 0

    def visit_FunctionDef(self, node):
        is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        return self.generic_visit(node) if is_kernel else node

    def visit_If(self, node):
        condition = ast.unparse(node.test)
        self.generic_visit(node)
        if condition not in OFF | ON:
            return node
        self.num_branches += 1
        return node.body if condition in ON else node.orelse

    def visit_Assign(self, node):
        if {ast.unparse(target) for target in node.targets} <= VALUES:
            self.num_values += 1
            return None
        return self.generic_visit(node)

    def visit_Name(self, node):
        return ast.Constant(None) if node.id in VALUES and isinstance(node.ctx, ast.Load) else node


@pytest.fixture(scope="module")
def stripped(tmp_path_factory):
    """The modules without options, each of which takes helpers from those before it."""
    folder, modules, names = tmp_path_factory.mktemp("stripped"), {}, {}
    for module in MODULES:
        source = inspect.getsource(module)
        for original, name in names.items():
            source = source.replace(f"from {original} import", f"from {name} import")
        without = WithoutOptions()
        tree = without.visit(ast.parse(source))
        assert without.num_branches and without.num_values
        name = names[module.__name__] = f"stripped_{module.__name__.rpartition('.')[2]}"
        path = folder / f"{name}.py"
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
        modules[module] = sys.modules[name]
    yield modules
    for name in names.values():
        del sys.modules[name]


@pytest.mark.parametrize("target", ("sm_90", "gfx942"))
@pytest.mark.parametrize("name", rows.KERNELS)
def test_row_kernels(stripped, name, target, monkeypatch):
    kernel, config = rows.KERNELS[name]
    arguments = (name, rows.TARGETS[target], "bf16", "identity")
    ours, smoothed = (instructions(rows.compiled(*arguments, smoothing)) for smoothing in ("none", "plain"))
    monkeypatch.setitem(rows.KERNELS, name, (getattr(stripped[triton_rows], kernel.fn.__name__), config))
    bare = instructions(rows.compiled(*arguments, "none"))
    assert len(bare) > 100 and ours == bare
    assert smoothed != bare, "no option would show"


@pytest.mark.parametrize("name", ("statistics_kernel", "tile_gradient_kernel"))
@pytest.mark.parametrize("module", MODULES[2:], ids=lambda module: module.__name__.rpartition(".")[2])
def test_tile_kernels(stripped, module, name):
    compiled = tiles.compiled if module is triton_tiles else tiles.compiled_gluon
    ours = instructions(compiled(getattr(module, name), "bf16", "identity", "nothing"))
    bare = instructions(compiled(getattr(stripped[module], name), "bf16", "identity", "nothing"))
    assert len(bare) > 100 and ours == bare


@pytest.mark.parametrize("first", (True, False))
def test_what_follows_the_tiles(stripped, first):
    kernels = (module.finish_kernel for module in (triton_tiles_finish, stripped[triton_tiles_finish]))
    ours, bare = (
        instructions(tiles.compiled_finish(kernel, "sm_90", "bf16", "identity", "nothing", first)) for kernel in kernels
    )
    assert len(bare) > 100 and ours == bare
