"""Every example of the documents runs, or says in a comment before it why not.

The Python blocks of a page run in order in one process, its shell blocks in one shell at the root of a copy of the
repository.  A `text` block right after a block is what it prints.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from tests.helpers import environment_of_checkout

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>.+?) -->\n\n?)?"
    r"^```(?P<language>\w*)\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<shown>.*?)^```)?",
    re.MULTILINE | re.DOTALL,
)
SHOWN_LANGUAGES = {"python", "bash", "text", "math", "yaml", "json"}
# Figures that differ from machine to machine; tests/docs/test_docs.py compares what can be compared.
COMPARED_ELSEWHERE = ("docs/math.md", "docs/megatron.md")
MARK = "-- next block --"


@dataclass(frozen=True)
class Block:
    """One fenced block: ``why`` it is not run, and the output that the page shows right after it."""

    language: str
    code: str
    why: str | None
    shown: str | None


@cache
def blocks_of(document: Path) -> tuple[Block, ...]:
    found = BLOCK.finditer(document.read_text(encoding="utf-8"))
    return tuple(Block(match["language"], match["code"], match["why"], match["shown"]) for match in found)


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def to_run(document: Path, language: str) -> list[Block]:
    return [block for block in blocks_of(document) if block.language == language and not block.why]


def uses_megatron(document: Path) -> bool:
    return any("megatron" in block.code for block in to_run(document, "python") + to_run(document, "bash"))


def pages_with(language: str) -> list[Path]:
    """Pages with blocks to run; those of a translation are the original's (test_translations.py)."""
    originals = (page for page in DOCUMENTS if "zh" not in page.parts and not page.stem.endswith("_zh"))
    return [page for page in originals if to_run(page, language) and name_of(page) not in COMPARED_ELSEWHERE]


def parameters(pages: list[Path]) -> list:
    absent = importlib.util.find_spec("megatron") is None
    skip = pytest.mark.skipif(absent, reason="needs megatron-core (loongforge[megatron])")
    hub = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs loongforge[transformers]")

    def marks(page: Path) -> tuple:
        return (*([skip] if uses_megatron(page) else []), *([hub] if page.stem == "transformers" else []))

    return [pytest.param(page, id=name_of(page), marks=marks(page)) for page in pages]


def environment() -> dict[str, str]:
    given = environment_of_checkout(CUDA_VISIBLE_DEVICES="", MPLBACKEND="agg")
    return {key: value for key, value in given.items() if not key.startswith("LCE_")}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_languages_and_reasons(document):
    """Every block has a language of the list, so that no command hides in another one; reasons are sentences."""
    for block in blocks_of(document):
        assert block.language in SHOWN_LANGUAGES, f"a block of {document.name} is {block.language!r}"
        assert block.why is None or len(block.why) > 10
        if block.language == "python":
            ast.parse(block.code)


RUN_PAGES = """
import contextlib, io, json, sys, traceback
results = {}
for name, blocks in json.load(sys.stdin).items():
    scope, printed, error = {"__name__": "__main__"}, [], None
    for number, code in enumerate(blocks):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                exec(compile(code, f"{name}, block {number}", "exec"), scope)
            except BaseException:
                error = traceback.format_exc()
        printed.append(out.getvalue())
        if error:
            break
    results[name] = (printed, error)
print(json.dumps(results))
"""


def run_python(pages: list[Path]) -> dict[str, tuple[list[str], str | None]]:
    """What each block of each page printed, and the error that stopped the page, all from one process."""
    code = {name_of(page): [block.code for block in to_run(page, "python")] for page in pages}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN_PAGES],
        env=environment(), input=json.dumps(code), capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@cache
def results_without_megatron() -> dict[str, tuple[list[str], str | None]]:
    return run_python([page for page in pages_with("python") if not uses_megatron(page)])


@pytest.mark.parametrize("document", parameters(pages_with("python")))
def test_python(document):
    # The hook changes megatron-core for the whole process, so those pages have one each.
    results = run_python([document]) if uses_megatron(document) else results_without_megatron()
    printed, error = results[name_of(document)]
    assert error is None, error
    for block, text in zip(to_run(document, "python"), printed, strict=True):
        assert block.shown in (None, text)


def shell_blocks() -> dict[Path, list[Block]]:
    """What runs on each page; a one-line command that several pages show runs on the first."""
    found: dict[Path, list[Block]] = {}
    seen: set[str] = set()
    for page in pages_with("bash"):
        blocks = [block for block in to_run(page, "bash") if block.code not in seen]
        seen |= {block.code for block in blocks if block.code.count("\n") == 1}
        if blocks:
            found[page] = blocks
    return found


def copy_of_the_repository(folder: Path) -> None:
    """Links to the sources, this interpreter as that of .venv, and the text that the demo leaves."""
    for name in ("loongforge", "configs", "scripts", "tests", "docs/benchmarks", "setup.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(ROOT / name)
    (folder / "docs/assets").mkdir()
    (folder / ".venv").symlink_to(sys.prefix)
    text = folder / "data/demo/python_topics.txt"
    text.parent.mkdir(parents=True)
    text.write_text("\n\n".join(topics.values()), encoding="utf-8")


@pytest.mark.parametrize("document", parameters(list(shell_blocks())))
def test_shell(document, tmp_path):
    copy_of_the_repository(tmp_path)
    blocks = shell_blocks()[document]
    code = f"echo '{MARK}'\n".join(block.code for block in blocks)
    if not Path(sys.prefix, "bin/loongforge").exists():  # a checkout that was not installed
        code = code.replace(".venv/bin/loongforge ", ".venv/bin/python -m loongforge.cli ")
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=550,
    )  # fmt: skip
    assert result.returncode == 0, f"{result.stdout[-2000:]}{result.stderr[-3000:]}"
    for block, printed in zip(blocks, result.stdout.split(f"{MARK}\n"), strict=True):
        assert block.shown in (None, printed)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_named_tests_exist(document):
    """`tests/FILE.py::NAME` in prose is a function of that file."""
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", document.read_text(encoding="utf-8")):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{file} has no {name}"
