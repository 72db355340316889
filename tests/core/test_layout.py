"""The order of the files, who may read the environment, sizes, and what ``import loongforge`` needs and offers."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import loongforge
from loongforge import LinearCrossEntropy, LossOptions, linear_cross_entropy

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "loongforge"

# Each file imports only from rows above its own; the files of one package form one row without cycles.
ORDER = (
    "kernels.interface",
    "options",
    "env",
    "arch",
    "matmul",
    "kernels",
    "dispatch",
    "parallel",
    "plan",
    "budget",
    "out_of_memory",
    "formula",
    "sharded",
    "checks",
    "agreement",
    "chunks",
    "call",
    "per_token",
    "gradients_in_forward",
    "operators",
    "compact",
    "loss",
    "cross_entropy",
    "outputs",
    "__init__",
    "megatron",
    "integrations",
    "errors",
    "train",
    "bench",
    "planning",
    "doctor",
    "cli",
    "__main__",
)
CORE_REQUIRES = {"torch", "numpy"}
OPTIONAL = ("triton", "flydsl", "megatron", "transformer_engine", "yaml", "tokenizers", "tensorboard", "tqdm")


def module_name(path: Path) -> str:
    """``loongforge/kernels/generic.py`` -> ``kernels.generic``; the package's own file is ``__init__``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def row(module: str) -> int:
    """Place in :data:`ORDER` by the longest matching name."""
    matches = [name for name in ORDER if module == name or module.startswith(f"{name}.")]
    assert matches, f"loongforge/{module.replace('.', '/')}.py has no place in the order of the files: give it one"
    return ORDER.index(max(matches, key=len))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> list[tuple[str, ...]]:
    """Dotted names that the file imports anywhere, as tuples; ``from a import b`` gives (a, b)."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [(*node.module.split("."), alias.name) for alias in node.names]
    return found


def own_imports(path: Path) -> set[str]:
    """Modules of loongforge among the imports."""
    found = set()
    for name in imports_of(path):
        if name[0] == "loongforge":
            rest = name[1:]
            while rest and ".".join(rest) not in MODULES:
                rest = rest[:-1]
            found.add(".".join(rest) or "__init__")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_each_file_imports_only_from_rows_above(module):
    for imported in own_imports(MODULES[module]):
        same_package = row(imported) == row(module) and imported.split(".")[0] == module.split(".")[0]
        assert row(imported) < row(module) or same_package, f"{module} imports {imported}, which comes after it"


def test_no_import_cycles():
    graph = {module: own_imports(path) - {module} for module, path in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"import cycle: {' -> '.join((*trail, module))}"
        if module not in done:
            for imported in graph[module]:
                visit(imported, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_the_core_imports_torch_and_numpy_only():
    for module, path in MODULES.items():
        if row(module) <= ORDER.index("__init__") and not re.match(r"kernels\.(triton|gluon|flydsl|amd)", module):
            outside = {n[0] for n in imports_of(path)} - set(sys.stdlib_module_names) - {"loongforge"}
            assert outside <= CORE_REQUIRES, f"{module} imports {outside - CORE_REQUIRES}"


def test_kernels_know_nothing_of_groups_and_reductions():
    for module, path in MODULES.items():
        if module.startswith("kernels"):
            assert not any(name[:2] == ("torch", "distributed") for name in imports_of(path)), module
            assert not own_imports(path) & {"parallel", "loss", "call", "env"}, module


def is_environ(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def environment_keys_read(tree: ast.Module) -> list[str | None]:
    """Keys of ``os.environ[...]``, ``os.environ.get(...)`` and ``os.getenv(...)``; None where it is not a literal."""
    keys = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and is_environ(node.value) and isinstance(node.ctx, ast.Load):
            keys.append(node.slice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            of_environ = is_environ(node.func.value) and node.func.attr in ("get", "pop")
            keys += node.args[:1] if of_environ or node.func.attr == "getenv" else []
    return [key.value if isinstance(key, ast.Constant) else None for key in keys]


def names_lce_variables(tree: ast.Module) -> bool:
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return any(isinstance(value, str) and re.fullmatch(r"LCE_\w*", value) for value in constants)


def test_only_env_reads_lce_variables():
    readers = set()
    for module, path in MODULES.items():
        keys = environment_keys_read(tree_of(path))
        if any(key and key.startswith("LCE_") for key in keys) or (None in keys and names_lce_variables(tree_of(path))):
            readers.add(module)
    assert readers == {"env"}


SOURCES = sorted(
    path
    for folder in ("loongforge", "tests", "scripts")
    for path in (ROOT / folder).rglob("*.py")
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 400, f"{len(lines)} lines"
    assert max(map(len, lines), default=0) <= 120
    limit = 200 if "kernels" in path.parts else 60
    if path.is_relative_to(PACKAGE):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = node.end_lineno - node.lineno + 1
                assert length < limit, f"{node.name} has {length} lines"


BLOCKED_IMPORT = f"""
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
import torch
before = set(sys.modules)
import loongforge
hidden = torch.randn(5, 4, requires_grad=True)
weight = torch.randn(7, 4, requires_grad=True)
loongforge.linear_cross_entropy(hidden, weight, torch.arange(5)).backward()
assert weight.grad.isfinite().all()
assert not [name for name in sys.modules if name.split(".")[0] in {OPTIONAL!r}]
print(*sorted(name for name in set(sys.modules) - before if name.startswith("loongforge.")))
"""


def test_import_and_generic_path_without_optional_packages():
    result = subprocess.run(
        [sys.executable, "-c", BLOCKED_IMPORT], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    loaded = result.stdout.split()
    assert "loongforge.kernels.generic" in loaded
    for name in ("triton", "flydsl", "megatron", "train", "cli", "bench"):
        assert not any(name in module for module in loaded), f"import loongforge loads {name}"


def test_public_surface():
    assert loongforge.__all__ == [
        "LinearCrossEntropy",
        "LogProbs",
        "LossOptions",
        "TeacherHead",
        "TeacherTopK",
        "TopK",
        "cross_entropy",
        "linear_cross_entropy",
        "linear_distillation",
        "linear_logprobs",
        "linear_top_k",
    ]
    assert all(hasattr(loongforge, name) for name in loongforge.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", loongforge.__version__)


FIELDS = {
    "reduction": "mean",
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "label_smoothing_formula": "torch",
    "z_loss_weight": 0.0,
    "softcap": None,
    "logit_scale": 1.0,
    "vocab_size": None,
    "tp_group": None,
    "sequence_parallel": False,
    "compact_tokens": False,
    "fp32_logits": False,
    "fp32_grad_hidden": False,
    "impl": "auto",
    "logits_budget_mb": None,
}


def test_signatures_spell_the_options_out():
    tensors = {"hidden": inspect.Parameter.empty, "weight": inspect.Parameter.empty, "target": inspect.Parameter.empty}
    extra = {"bias": None, "normalizer": None, "class_weight": None, "token_weight": None, "adapter": None}

    def defaults(function):
        return {name: p.default for name, p in inspect.signature(function).parameters.items() if name != "self"}

    assert defaults(LossOptions) == FIELDS
    assert defaults(linear_cross_entropy) == {**tensors, **extra, **FIELDS}
    assert defaults(LinearCrossEntropy) == {"class_weight": None, **FIELDS}
    assert defaults(LinearCrossEntropy.forward) == {
        **tensors, "bias": None, "normalizer": None, "token_weight": None, "adapter": None
    }  # fmt: skip
    keyword_only = [p for p in inspect.signature(linear_cross_entropy).parameters.values() if p.name not in tensors]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in keyword_only)


def test_public_names_have_docstrings():
    for name in loongforge.__all__:
        assert len(inspect.getdoc(getattr(loongforge, name))) > 40
    for text in ("[..., H]", "NaN", "Raises", "IndexError"):
        assert text in linear_cross_entropy.__doc__
