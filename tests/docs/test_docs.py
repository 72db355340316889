"""The documents agree with the code, with each other, and with the files they point at."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path

import pytest

from loongforge import LossOptions, env
from tests.helpers import environment_of_checkout

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
READMES = ("README.md", "README_zh.md")
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~$}\]])/[a-z][\w.-]*/[\w./-]*")
COMMAND_STARTS = ("loongforge/", "scripts/", "tests/", "configs/", "docs/")
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """GitHub's names of the headings."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def rows(text: str) -> list[list[str]]:
    """Cells of every table row, headers and rules left out."""
    found, lines = [], without_blocks(text).splitlines()
    for number, line in enumerate(lines):
        is_header = number + 1 < len(lines) and lines[number + 1].startswith("| ---")
        if line.startswith("|") and not line.startswith("| ---") and not is_header:
            found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def option_rows(text: str, names: set[str]) -> dict[str, str]:
    """name -> default of the rows that describe one of ``names``."""
    return {cells[0].strip("`"): cells[1].strip("`") for cells in rows(text) if cells[0].strip("`") in names}


# ---------------------------------------------------------------- links and words


@each_document
def test_links_resolve(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(text_of(document))):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path) if path else document
        assert file.exists(), f"{target} does not exist"
        assert file.resolve().is_relative_to(ROOT), f"{target} leaves the repository"
        if anchor:
            assert anchor in anchors(text_of(file)), f"{target}: no such heading"


@each_document
def test_files_named_in_commands_and_prose_exist(document):
    """Words like ``scripts/train.sh`` in code spans and in shell blocks."""
    text = text_of(document)
    code = [*re.findall(r"`([^`\n]+)`", without_blocks(text)), *blocks(text, "bash")]
    for word in re.split(r"[\s'\"=,:]+", " ".join(code)):
        if word.startswith(COMMAND_STARTS) and not set(word) & set("<>*{}()") and "benchmarks/" not in word:
            assert (ROOT / word.split("::")[0].split("#")[0]).exists(), f"{word} does not exist"


@each_document
def test_no_path_leaves_the_repository(document):
    text = text_of(document)
    assert ABSOLUTE_PATH.findall(text) == []
    for path in re.findall(r"\.\./[\w./-]+", text):
        assert (document.parent / path).exists(), f"{path} does not exist"


def test_every_document_is_linked_from_the_readme():
    readmes = {language: text_of(ROOT / name) for language, name in zip(("en", "zh"), READMES, strict=True)}
    for document in DOCUMENTS:
        if document.name != "README.md" and "benchmarks" not in document.parts:
            language = "zh" if "zh" in document.parts else "en"
            assert f"]({document.relative_to(ROOT).as_posix()})" in readmes[language], document.name


# ---------------------------------------------------------------- tables and the code


@pytest.mark.parametrize("name", READMES)
def test_environment_table_is_the_list_of_variables(name):
    listed = [variable for cells in rows(text_of(ROOT / name)) for variable in re.findall(r"LCE_[A-Z_]+", cells[0])]
    assert sorted(listed) == sorted(env.VARIABLES)


@pytest.mark.parametrize("name", READMES)
def test_option_table_is_the_list_of_options(name):
    expected = {field.name: field.default for field in fields(LossOptions)}
    listed = option_rows(text_of(ROOT / name), set(expected))
    assert {option: ast.literal_eval(default) for option, default in listed.items()} == expected


def test_training_guide_lists_every_key():
    from loongforge.train.config_io import SECTIONS

    chapters = re.split(r"^### `", text_of(ROOT / "docs/training.md"), flags=re.MULTILINE)[1:]
    listed = {chapter.split("`")[0]: chapter for chapter in chapters}
    assert list(listed) == list(SECTIONS)
    for section, section_class in SECTIONS.items():
        expected = {
            field.name: "required" if field.default is MISSING else str(field.default)
            for field in fields(section_class)
        }
        table = {cells[0].strip("`"): cells[1].strip("`") for cells in rows(listed[section])}
        assert table == expected, section


def test_training_guide_lists_every_config():
    text = text_of(ROOT / "docs/training.md")
    for config in (ROOT / "configs").glob("*.yaml"):
        assert f"(../configs/{config.name})" in text


def test_extras_are_those_of_setup():
    setup = text_of(ROOT / "setup.py")
    extras = set(re.findall(r'^    "(\w+)": \[', setup, re.MULTILINE)) | set(re.findall(r'EXTRAS\["(\w+)"\] =', setup))
    assert {"triton", "dev", "all"} <= extras
    for name in READMES:
        assert extras <= {cells[0].strip("`") for cells in rows(text_of(ROOT / name))}


@each_document
def test_installing_and_the_commands_fit_together(document):
    """`pip install` fills the reader's environment: a page that then runs `.venv` says where that comes from."""
    shell = "".join(blocks(text_of(document), "bash"))
    if "pip install -e" in shell and ".venv/bin/loongforge" in shell:
        assert "scripts/install.sh" in without_blocks(text_of(document))
    assert not re.search(r"pip install [\"']?loongforge", shell), "from a checkout: pip install -e '.[extra]'"


# ---------------------------------------------------------------- the two languages


TRANSLATIONS = {"README.md": "README_zh.md"} | {
    f"docs/{path.name}": f"docs/zh/{path.name}" for path in sorted((ROOT / "docs/zh").glob("*.md"))
}


def test_what_is_translated():
    assert set(TRANSLATIONS) == {"README.md", "docs/quickstart.md", "docs/megatron.md", "docs/tuning.md"}


@pytest.mark.parametrize(("original", "translation"), TRANSLATIONS.items(), ids=TRANSLATIONS)
def test_a_translation_shows_the_same(original, translation):
    """The same code, headings, lists and tables; in every row the same code spans, numbers and names of errors."""
    english, chinese = (text_of(ROOT / name) for name in (original, translation))
    for language in ("bash", "python", "text"):
        assert blocks(english, language) == blocks(chinese, language)
    outlines = [re.findall(r"^#+(?= )", without_blocks(text), re.MULTILINE) for text in (english, chinese)]
    assert outlines[0] == outlines[1]
    items = [len(re.findall(r"^(?:- |\d+\. )", without_blocks(text), re.MULTILINE)) for text in (english, chinese)]
    assert items[0] == items[1]

    def facts(text):
        """What needs no translation: code spans, names of formulas and numbers of every row."""
        return [
            sorted(re.findall(r"`[^`]+`|[0-9][0-9.]*|[A-Z][A-Za-z]*Error", " ".join(cells))) for cells in rows(text)
        ]

    assert facts(english) == facts(chinese)

    def links(name, text):
        """Files that the page links to, a translation counted as its original; not what links the two to each other."""
        folder, originals = (ROOT / name).parent, {there: here for here, there in TRANSLATIONS.items()}
        found = []
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            path = target if "://" in target else (folder / target).resolve().relative_to(ROOT).as_posix()
            found.append(originals.get(path, path))
        return sorted(path for path in found if path != original)

    assert links(original, english) == links(translation, chinese)

    def pages(text):
        """The lists of pages, in the order shown."""
        return [Path(path).name for path in re.findall(r"^- \[[^]]*\]\(([^)#]+\.md)\)", text, re.MULTILINE)]

    assert pages(english) == pages(chinese)


@pytest.mark.parametrize("document", TRANSLATIONS.values())
def test_chinese_is_chinese(document):
    """Prose is translated, punctuation is full-width, and no line ends where HTML would show a space in a sentence."""
    prose = re.sub(r"`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", "", without_blocks(text_of(ROOT / document)))
    assert len(re.findall(r"[\u4e00-\u9fff]", prose)) > 300
    assert not re.findall(r"[\u4e00-\u9fff] ?[,;:?!](?:\s|$)|[\u4e00-\u9fff]\.(?:\s|$)", prose)
    assert not re.findall(r"[\u4e00-\u9fff]\n[\u4e00-\u9fff]", prose), "break lines after punctuation only"


# ---------------------------------------------------------------- examples with figures; the others: test_examples.py


def run(code: str) -> str:
    given = environment_of_checkout(CUDA_VISIBLE_DEVICES="")
    environment = {key: value for key, value in given.items() if not key.startswith("LCE_")}
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_the_readme_example_is_short():
    example = blocks(text_of(ROOT / "README.md"), "python")[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 15


def test_the_numbers_of_the_mathematics():
    """The printed figures hold to a factor of two on any machine."""
    text = text_of(ROOT / "docs/math.md")
    (code,), (shown,) = blocks(text, "python"), blocks(text, "text")
    printed, number = run(code), re.compile(r"\d\.\d+e-\d\d")
    assert number.sub("N", printed) == number.sub("N", shown)
    for actual, expected in zip(number.findall(printed), number.findall(shown), strict=True):
        assert 0.5 < float(actual) / float(expected) < 2, (actual, expected)


@pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="needs megatron-core (loongforge[megatron])")
def test_the_megatron_example_runs():
    text = text_of(ROOT / "docs/megatron.md")
    printed, (shown,) = run(blocks(text, "python")[0]), blocks(text, "text")
    assert printed.splitlines()[-1] == shown.splitlines()[-1]
    assert printed.startswith("fused linear cross-entropy in GPTModel, ")
