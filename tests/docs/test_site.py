"""The site builds without a warning, its links lead somewhere, and it loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import loongforge

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("material", "mkdocstrings", "latex2mathml")

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(part) for part in PARTS), reason="needs loongforge[docs]"
)


class Page(HTMLParser):
    """Names that can be jumped to, links, and what the browser would load by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []
        self._code = 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.names |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        loads_href = tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload")
        self.loads += [found["href"]] if loads_href else []
        self.loads += [found["src"]] if tag in ("img", "script", "iframe", "source") and found.get("src") else []
        self._code += tag in ("code", "pre", "script", "style")

    def handle_endtag(self, tag):
        self._code -= tag in ("code", "pre", "script", "style")

    def handle_data(self, data):
        if not self._code:
            self.text.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[Path, Page]:
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return {path: Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html") if path.name != "404.html"}


def test_every_link_leads_somewhere(site):
    for path, page in site.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path.name}: {link}"
            if parts.fragment and target in site:
                assert unquote(parts.fragment) in site[target].names | {"__skip"}, f"{path.name}: {link}"


def test_nothing_is_loaded_from_elsewhere(site):
    for path, page in site.items():
        assert not [load for load in page.loads if urlsplit(load).netloc], path.name
    folder = next(iter(site)).parent
    for sheet in folder.rglob("*.css"):
        assert not re.search(r"url\([\"']?https?:", sheet.read_text(encoding="utf-8")), sheet.name


def test_nothing_is_left_unrendered(site):
    for path, page in site.items():
        if "source" not in path.parts:
            text = " ".join(page.text)
            for mark in (
                "```",
                "\\frac",
                "\\(",
                ":func:",
                ":class:",
                ":meth:",
                ":mod:",
                ":data:",
                "<!--",
                "](",
                "| ---",
            ):
                assert mark not in text, f"{path.name} shows {mark}"


def test_the_api_reference_shows_docstrings_and_options(site):
    (page,) = (page for path, page in site.items() if path.name == "api.html")
    assert {"loongforge.LossOptions.softcap", "loongforge.megatron.install"} <= page.names
    for name in loongforge.__all__:  # cross_entropy is a module too
        assert page.names & {f"loongforge.{name}", f"loongforge.{name}.{name}"}, f"docs/api.md lacks {name}"
    assert "without ever holding the logits" in " ".join(page.text)
