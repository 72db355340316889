#!/usr/bin/env python3
"""Build wheel and sdist in isolation and try them in empty environments.

    python scripts/check_packaging.py [EXTRA ...]

Builds with `python -m build`, checks what the archives hold, and installs the wheel with no extra and with each EXTRA
(all but `te`, which compiles) into an environment of its own.  There every module whose packages are there imports, the
extra's packages import, packages of other extras are absent, and `loongforge doctor` computes rightly.
Each other Python among 3.10 to 3.13 that is found builds the wheel itself, installs it without dependencies and
byte-compiles it: their torch is gigabytes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "scripts/constraints.txt"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# What must import with an extra; whatever is listed only for others must be absent.
IMPORTS = {
    "": (),
    "triton": ("triton",),
    "flydsl": ("flydsl",),
    "megatron": ("megatron.core", "psutil"),
    "train": ("megatron.core", "psutil", "yaml", "tensorboard", "tokenizers", "tqdm"),
    "plot": ("matplotlib",),
    "transformers": ("transformers", "accelerate", "peft", "tokenizers"),
    "docs": ("mkdocs", "mkdocstrings", "latex2mathml", "material"),
    "dev": ("build", "hypothesis", "mypy", "pytest", "pytest_timeout", "xdist"),
    "all": ("triton", "flydsl", "megatron.core", "yaml", "tokenizers", "matplotlib"),
}
OPTIONAL = (
    "triton",
    "flydsl",
    "megatron",
    "transformer_engine",
    "tokenizers",
    "tensorboard",
    "matplotlib",
    "mkdocs",
    "peft",
)

PROBE = """
import importlib, importlib.util, json, pkgutil
import loongforge
present = [name for name in %r if importlib.util.find_spec(name)]
for module in pkgutil.walk_packages(loongforge.__path__, "loongforge."):
    try:
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    except ImportError as error:  # allowed where it names an absent package, or the extra that brings it
        absent = (error.name or "loongforge").split(".")[0]
        assert absent not in ["loongforge", *present] or "'loongforge[" in str(error), (module.name, error)
for name in %r:
    importlib.import_module(name)
print(json.dumps({"file": loongforge.__file__, "present": present}))
"""


def say(text: str) -> None:
    print(text, flush=True)


def run(*command: object, cwd: Path | None = None) -> str:
    """Output of a command, which has to succeed; LCE_* and PYTHON* variables do not reach it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LCE_", "PYTHON"))}
    result = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stdout[-3000:]}{result.stderr[-3000:]}")
    return result.stdout


def source_files(*folders: str) -> set[str]:
    """Files below ``folders`` that git does not ignore, or all that are there where the tree is no repository."""
    if (ROOT / ".git").exists():
        return set(run("git", "ls-files", "-co", "--exclude-standard", *folders, cwd=ROOT).split())
    return {p.relative_to(ROOT).as_posix() for f in folders for p in (ROOT / f).rglob("*") if p.is_file()}


def check_archives(folder: Path) -> tuple[Path, Path]:
    """The wheel is the package with py.typed and its metadata; the sdist has what tests and documents need too."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    version = re.fullmatch(r"loongforge-(\d+\.\d+\.\d+)-py3-none-any\.whl", wheel.name)
    assert version, f"{wheel.name} is no pure wheel with a semantic version"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = f"loongforge-{version[1]}.dist-info/"
        assert "License-Expression: Apache-2.0" in archive.read(f"{metadata}METADATA").decode()
    package = {name for name in names if not name.startswith(metadata)}
    expected = source_files("loongforge")
    assert package == expected, f"wheel and loongforge/ differ in {sorted(package ^ expected)}"
    assert {"loongforge/py.typed", f"{metadata}licenses/LICENSE", f"{metadata}entry_points.txt"} <= names
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames() if not name.endswith("/")}
    expected = source_files("loongforge", "tests", "configs", "docs", "scripts")
    expected |= {
        "README.md",
        "README_zh.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "pyproject.toml",
        "setup.py",
    }
    assert expected <= held, f"the sdist lacks {sorted(expected - held)}"
    return wheel, sdist


def build(python: Path | str, folder: Path, *arguments: str) -> None:
    """Wheel and sdist, each in an isolated environment, from a copy of the sources so that the tree stays as it is."""
    copy = folder.with_name(f"{folder.name}-sources")
    for name in source_files("."):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    run(python, "-m", "build", *arguments, "--outdir", folder, copy)


def environment(python: Path | str, folder: Path) -> Path:
    """An empty virtual environment; returns its interpreter."""
    run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def environment_with_torch(python: Path | str, folder: Path) -> None:
    """An environment that holds torch of scripts/constraints.txt and what torch needs, nothing else."""
    torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    venv = environment(python, folder)
    run(venv, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--constraint", CONSTRAINTS, torch)


def try_extra(with_torch: Path, wheel: Path, extra: str, folder: Path) -> None:
    """Install the wheel with one extra (or none) into a copy of the environment ``with_torch`` and use it."""
    shutil.copytree(with_torch, folder, symlinks=True, copy_function=os.link)  # torch is a gigabyte
    venv = folder / "bin" / "python"
    pip = (venv, "-m", "pip", "--disable-pip-version-check")
    requirement = f"{wheel}[{extra}]" if extra else wheel
    run(*pip, "install", "--quiet", "--constraint", CONSTRAINTS, requirement)
    run(*pip, "check")
    *_, last = run(venv, "-c", PROBE % (OPTIONAL, IMPORTS[extra]), cwd=folder).splitlines()  # some modules say a line
    found = json.loads(last)
    wanted = {name.split(".")[0] for name in IMPORTS[extra]}
    allowed = wanted | ({"tensorboard"} if extra == "all" else set())
    assert Path(found["file"]).is_relative_to(folder), f"loongforge came from elsewhere: {found['file']}"
    present = set(found["present"])
    assert present <= allowed, f"[{extra}] brings {present - allowed}"
    doctor = run(venv, folder / "bin/loongforge", "doctor", cwd=folder)
    assert doctor.rstrip().endswith("healthy"), doctor
    say(f"  [{extra}]: imports, self-test; {', '.join(sorted(present)) or 'no optional package'}")


def find_python(version: str) -> Path | str | None:
    """An interpreter of this version: on the PATH, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"versions/{version}.*/bin/python"))]
    for python in filter(None, found):
        result = subprocess.run([python, "-c", "import sys, venv; print(sys.version)"], capture_output=True, text=True)
        if result.returncode == 0 and result.stdout.startswith(f"{version}."):
            return python
    return None


def byte_compile(version: str, python: Path | str, folder: Path) -> None:
    """Build, install without dependencies and compile every file with one interpreter."""
    venv = environment(python, folder / "venv")
    pip = (venv, "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "install", "build")
    build(venv, folder / "dist", "--wheel")
    (wheel,) = (folder / "dist").glob("*.whl")
    run(*pip, "install", "--no-deps", "--no-compile", wheel)
    run(venv, "-W", "error", "-m", "compileall", "-q", "-f", *(folder / "venv").glob("lib/*/site-packages/loongforge"))
    say(f"  Python {version}: built {wheel.name}, installed it without dependencies, byte-compiled it")


def main() -> None:
    """Run everything; any failure ends with its message and status 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"among {', '.join(filter(None, IMPORTS))}")
    extras = parser.parse_args().extras or list(IMPORTS)
    if unknown := set(extras) - set(IMPORTS):
        parser.error(f"unknown extras {', '.join(unknown)}; known are {', '.join(filter(None, IMPORTS))}")
    with tempfile.TemporaryDirectory(prefix="loongforge-packaging-") as name:
        folder = Path(name)
        say("wheel and sdist")
        build(sys.executable, folder / "dist")
        wheel, sdist = check_archives(folder / "dist")
        say(f"  {wheel.name}, {sdist.name}: contents as expected")
        say(f"extras, each in an empty environment of Python {sys.version_info.major}.{sys.version_info.minor}")
        environment_with_torch(sys.executable, folder / "torch")
        for extra in extras:
            try_extra(folder / "torch", wheel, extra, folder / f"extra-{extra}")
        say("other interpreters")
        for version in PYTHONS:
            if version != f"{sys.version_info.major}.{sys.version_info.minor}":
                python = find_python(version)
                if python is None:
                    say(f"  Python {version}: NOT CHECKED, no such interpreter found")
                else:
                    byte_compile(version, python, folder / version)
    say("packaging is sound")


if __name__ == "__main__":
    main()
