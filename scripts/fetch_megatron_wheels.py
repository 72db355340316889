"""Unpack the megatron-core wheels that the tests run the hook against, beside the installed one.

    python scripts/fetch_megatron_wheels.py [VERSION ...]

Newer megatron-core declares Python 3.12; its pure-Python parts, which the tests use, import under 3.10 and 3.11 too.
They go to ~/.cache/loongforge/megatron/VERSION, or below $LOONGFORGE_MEGATRON_WHEELS.  What is there is kept.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

VERSIONS = ("0.17.1", "0.18.2", "0.19.2")


def wheel_folder(version: str) -> Path:
    """Folder to put on PYTHONPATH for this version of megatron-core, whether or not it is there yet."""
    root = os.environ.get("LOONGFORGE_MEGATRON_WHEELS") or Path.home() / ".cache" / "loongforge" / "megatron"
    return Path(root) / version


def is_unpacked(version: str) -> bool:
    """Whether the wheel of this version has been unpacked completely."""
    return (wheel_folder(version) / "megatron" / "core" / "package_info.py").is_file()


def fetch(version: str) -> Path:
    """Download and unpack one wheel; an interrupted download leaves nothing behind."""
    folder = wheel_folder(version)
    if is_unpacked(version):
        return folder
    unfinished = folder.with_name(f"{folder.name}.part{os.getpid()}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(unfinished), "--no-deps"]
    command += ["--ignore-requires-python", "--python-version", "3.12", "--only-binary=:all:"]
    try:
        subprocess.run([*command, f"megatron-core=={version}"], check=True)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def main() -> None:
    """Fetch every version named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION")
    for version in parser.parse_args().versions:
        print(f"megatron-core {version}: {fetch(version)}")


if __name__ == "__main__":
    main()
