"""Hooks of the documentation site (``mkdocs.yml``): what GitHub shows by itself and MkDocs does not.

- README, CONTRIBUTING and CHANGELOG become pages, and so does every source file that a page links to.
- Links are written for the repository; here they are pointed at the pages.
- Formulas become MathML when the site is built, so that it loads nothing from elsewhere.
"""

from __future__ import annotations

import html
import os
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "README_zh.md": "zh/index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml", ".json": "json"}


def page_of(path: str) -> str:
    """Page of a file of the repository: ``docs/math.md`` -> ``math.md``, ``loongforge/env.py`` -> ``source/...``."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}.md"


def path_of(page: str) -> str:
    """The inverse, for documents."""
    return next((path for path, name in PAGES.items() if name == page), f"docs/{page}")


def targets(text: str, path: str) -> set[str]:
    """Files and folders of the repository that a document links to."""
    found = set()
    for code, prose in _code_and_prose(text):
        for _, target, _ in LINK.findall("" if code else prose):
            if "://" not in target:
                found.add(posixpath.normpath(posixpath.join(posixpath.dirname(path), target)))
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    documents = [file for file in files if file.src_uri.endswith(".md")]
    linked = set().union(*(targets(file.content_string, path_of(file.src_uri)) for file in documents))
    for path in sorted(linked):
        if page_of(path).startswith("source/") and (ROOT / path).exists():
            files.append(File.generated(config, page_of(path), content=_source_page(ROOT / path, path)))
    return files


def _source_page(file: Path, path: str) -> str:
    # Without the search's attention: it is for the documents.
    head = f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n# {path}\n\n"
    if file.is_dir():
        names = sorted(entry.name + "/" * entry.is_dir() for entry in file.iterdir() if entry.name != "__pycache__")
        return head + "".join(f"- `{name}`\n" for name in names)
    text = file.read_text(encoding="utf-8")
    fence = "`" * (3 + max(map(len, re.findall(r"`{3,}", text)), default=0))
    return f'{head}{fence}{LANGUAGES.get(file.suffix, "text")} linenums="1"\n{text}{fence}\n'


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links at pages; join lines of Chinese text, between which HTML would show a space."""
    source = page.file.src_uri
    if source.startswith("source/"):
        return markdown
    path, is_chinese = path_of(source), source.startswith("zh/")

    def relink(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if "://" in target:
            return match[0]
        page_name = page_of(posixpath.normpath(posixpath.join(posixpath.dirname(path), target)))
        return before + os.path.relpath(page_name, posixpath.dirname(source) or ".") + after

    parts = []
    for code, text in _code_and_prose(markdown):
        if not code:
            text = LINK.sub(relink, text)
            if is_chinese:
                text = re.sub(r"(?<=[\u3000-\u9fff\uff00-\uffef])\n *(?=[\u3000-\u9fff\uff00-\uffef])", "", text)
        parts.append(text)
    return "".join(parts)


def _code_and_prose(text: str) -> list[tuple[bool, str]]:
    return [(part.startswith("```"), part) for part in FENCE.split(text)]


def on_page_content(content: str, page: Page, **_: object) -> str:
    """Formulas and the roles of docstrings."""

    def formula(match: re.Match[str]) -> str:
        tag = match["tag"]
        try:
            mathml = convert(html.unescape(match["tex"]), display="block" if tag == "div" else "inline")
            # A function's name stands apart from its neighbours; inside <msup> the number of children must stay.
            space = '<mspace width="0.17em" />'
            mathml = re.sub(r"(?<!<msup>)<mi>(log|tanh)</mi>", rf"{space}\g<0>{space}", mathml)
            return f'<{tag} class="formula">{mathml}</{tag}>'
        except Exception as error:
            raise PluginError(f"{page.file.src_uri}: {match['tex']}: {error}") from error

    pattern = r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>'
    content = re.sub(pattern, formula, content, flags=re.DOTALL)
    return re.sub(r":(?:func|class|meth|mod|data|attr):(?=<code>)", "", content)


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Say which language a page is in, by which browsers choose fonts, and translate the words around the text."""
    if page.file.src_uri.startswith("zh/"):
        output = output.replace('<html lang="en"', '<html lang="zh-CN"', 1)
        for english, chinese in (("Table of contents", "目录"), ("Back to top", "返回顶部"), ("Search", "搜索")):
            output = re.sub(rf'(>\s*|placeholder="){english}(\s*<|")', rf"\g<1>{chinese}\g<2>", output)
    return output
