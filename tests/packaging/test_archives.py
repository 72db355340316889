"""Wheel and sdist of this tree hold what they should; ``scripts/check_packaging.py`` goes on to install them."""

from __future__ import annotations

import importlib.util
import re
import sys
import zipfile
from pathlib import Path

import pytest

import loongforge

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("build") is None, reason="needs build (loongforge[dev])")

spec = importlib.util.spec_from_file_location("check_packaging", ROOT / "scripts/check_packaging.py")
check_packaging = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_packaging)


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archives") / "dist"
    check_packaging.build(sys.executable, folder)
    return check_packaging.check_archives(folder)


def test_contents_and_version(archives):
    wheel, sdist = archives
    assert wheel.name.split("-")[1] == loongforge.__version__ == sdist.name.removesuffix(".tar.gz").split("-")[1]


def test_metadata(archives):
    with zipfile.ZipFile(archives[0]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
        metadata = wheel.read(name).decode()
    assert "Requires-Python: >=3.10" in metadata
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert sorted(re.findall(r"Requires-Dist: (\w+)", "\n".join(needed))) == ["numpy", "torch"]
    extras = set(re.findall(r"^Provides-Extra: (\S+)$", metadata, re.MULTILINE))
    assert set(check_packaging.IMPORTS) - {""} | {"te"} == extras, "scripts/check_packaging.py tries every extra but te"


def test_a_changed_wheel_is_found(archives, tmp_path):
    wheel, sdist = archives
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(tmp_path / wheel.name, "w") as copy:
        for name in source.namelist():
            if name != "loongforge/py.typed":
                copy.writestr(name, source.read(name))
    (tmp_path / sdist.name).write_bytes(sdist.read_bytes())
    with pytest.raises(AssertionError, match=r"differ in \['loongforge/py.typed'\]"):
        check_packaging.check_archives(tmp_path)


def test_the_version_has_an_entry_in_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## (.+)$", changelog, re.MULTILINE)[1] in (loongforge.__version__, "Unreleased")
