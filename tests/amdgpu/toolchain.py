"""The LLVM tools that the emulator needs: a disassembler, an assembler and a linker that know gfx950 and gfx12."""

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

INSTALL = "apt-get install -y llvm-22 lld-22"
TOOLS = ("llvm-objdump-22", "llvm-mc-22", "ld.lld-22")


@cache
def missing() -> str | None:
    """None, or the reason to skip: what is not installed and the command that installs it."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"needs {', '.join(absent)} ({INSTALL})" if absent else None


def is_real_true16(arch: str) -> bool:
    """gfx11 and gfx12 name 16-bit halves of registers (``v0.l``); the disassembler must be told."""
    return arch.startswith(("gfx11", "gfx12"))


def disassemble(elf: bytes, arch: str) -> str:
    """The text of a code object, each line with its address and encoding."""
    attributes = ["--mattr=+real-true16"] if is_real_true16(arch) else []
    with tempfile.NamedTemporaryFile(suffix=".hsaco") as file:
        file.write(elf)
        file.flush()
        return _run(TOOLS[0], "-d", f"--mcpu={arch}", *attributes, file.name)


def assemble(source: str, arch: str) -> bytes:
    """A code object from assembly text."""
    attributes = ["-mattr=+real-true16"] if is_real_true16(arch) else []
    with tempfile.TemporaryDirectory() as folder:
        text, obj, elf = (Path(folder, name) for name in ("kernel.s", "kernel.o", "kernel.hsaco"))
        text.write_text(source)
        target = ["-triple=amdgcn-amd-amdhsa", f"-mcpu={arch}"]
        _run(TOOLS[1], *target, *attributes, "-filetype=obj", str(text), "-o", str(obj))
        _run(TOOLS[2], "-shared", str(obj), "-o", str(elf))
        return elf.read_bytes()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr}")
    return done.stdout


def prepare_flydsl() -> None:
    """FlyDSL links with ``$ROCM_PATH/llvm/bin/ld.lld``: where there is no ROCm, put Debian's linker there.

    Its cache on disk is left alone: tests compile what they test.
    """
    os.environ.setdefault("FLYDSL_RUNTIME_ENABLE_CACHE", "0")
    if "ROCM_PATH" not in os.environ and not Path("/opt/rocm/llvm/bin/ld.lld").exists():
        os.environ["ROCM_PATH"] = _rocm_shim()


@cache
def _rocm_shim() -> str:
    root = Path(tempfile.gettempdir(), f"loongforge-rocm-shim-{os.getuid()}")
    Path(root, "llvm", "bin").mkdir(parents=True, exist_ok=True)
    Path(root, "amdgcn", "bitcode").mkdir(parents=True, exist_ok=True)
    link = Path(root, "llvm", "bin", "ld.lld")
    if not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(shutil.which(TOOLS[2]) or TOOLS[2])
    return str(root)
