"""Text of ``llvm-objdump`` -> :class:`Instruction`."""

import re
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from tests.amdgpu.errors import EmulatorError

VCC, TTMP, M0, NULL, EXEC = 106, 108, 124, 125, 126  # places in the scalar register file
NAMED = {
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
    "m0": (M0, 1),
    "null": (NULL, 1),
}
REGISTER = re.compile(r"(?P<file>[vs]|ttmp)(?:(?P<one>\d+)|\[(?P<first>\d+):(?P<last>\d+)\])(?:\.(?P<half>[lh]))?$")
FLOAT = re.compile(r"-?\d+\.\d*(e-?\d+)?$")
INTEGER = re.compile(r"-?(0x[0-9a-fA-F]+|\d+)$")
LINE = re.compile(
    r"^\s+(?P<mnemonic>[a-z_0-9.]+)\s*(?P<operands>[^/]*?)\s*"
    r"// (?P<address>[0-9A-F]+): (?P<encoding>[0-9A-F ]+?)(?:\s*<.*>)?$"
)
ENCODING = re.compile(r"_(e32|e64|e64_dpp|dpp|sdwa)$")


@dataclass(frozen=True)
class Operand:
    """``kind``: ``v`` or ``s`` register, ``constant``, ``scc``, ``off``, or ``other`` text."""

    kind: str
    text: str
    register: int = 0
    dwords: int = 1
    negate: bool = False
    absolute: bool = False
    half: str | None = None  # "l" or "h" of a 16-bit operand
    value: int = 0  # of a constant, as an integer or as float32 bits
    is_float: bool = False


@dataclass(frozen=True)
class Instruction:
    address: int
    size: int
    mnemonic: str  # without the encoding suffix
    operands: tuple[Operand, ...]
    modifiers: dict[str, object] = field(default_factory=dict)
    encoding: str = ""  # e32, e64, dpp, e64_dpp, sdwa
    second: "Instruction | None" = None  # of a dual-issue pair
    text: str = ""
    word: int = 0  # the first dword of the encoding

    @property
    def branch_target(self) -> int:
        """Address that a branch goes to: the disassembler may print a label instead of the distance."""
        return self.address + self.size + 4 * (((self.word & 0xFFFF) ^ 0x8000) - 0x8000)

    @property
    def is_dpp(self) -> bool:
        return self.encoding.endswith("dpp")


def parse_listing(text: str) -> dict[int, Instruction]:
    """All instructions of a disassembly, by address."""
    program = {}
    for line in text.splitlines():
        match = LINE.match(line)
        if match:
            address, words = int(match["address"], 16), match["encoding"].split()
            place = {"address": address, "size": 4 * len(words), "word": int(words[0], 16)}
            program[address] = replace(parse(match["mnemonic"], match["operands"].strip()), **place)
        elif line.startswith("\t"):
            raise EmulatorError(f"cannot parse the disassembly line {line!r}")
    return program


def parse(mnemonic: str, operands: str) -> Instruction:
    """An instruction without its place in the program."""
    text = f"{mnemonic} {operands}".strip()
    second = None
    if "::" in operands:
        operands, other = (part.strip() for part in operands.split("::"))
        second = parse(*other.split(maxsplit=1))
    suffix = ENCODING.search(mnemonic)
    base = mnemonic[: suffix.start()] if suffix else mnemonic
    parts, modifiers = split(operands)
    parsed = tuple(parse_operand(part) for part in parts)
    encoding = suffix[1] if suffix else ""
    return Instruction(0, 0, base.replace("v_dual_", "v_"), parsed, modifiers, encoding, second, text)


def split(text: str) -> tuple[list[str], dict[str, object]]:
    """Operands, and the modifiers that follow the last of them."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "[(") - (character in "])")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    if current.strip():
        parts.append(current.strip())
    if not parts:
        return [], {}
    last, *words = parts[-1].split()
    modifiers = dict(_modifier(word) for word in words)
    if re.match(r"[a-z_0-9]+:", last):  # an instruction with modifiers only
        name, value = _modifier(last)
        return parts[:-1], {name: value, **modifiers}
    return [*parts[:-1], last], modifiers


def _modifier(word: str) -> tuple[str, object]:
    name, _, value = word.partition(":")
    if not value:
        return name, 1
    if value.startswith("["):
        return name, [int(number, 0) for number in value.strip("[]").split(",")]
    return name, int(value, 0) if INTEGER.match(value) else value


@cache
def parse_operand(text: str) -> Operand:
    bare, negate, absolute = _source_modifiers(text)
    if bare in NAMED:
        register, dwords = NAMED[bare]
        return Operand("s", text, register, dwords, negate, absolute)
    match = REGISTER.match(bare)
    if match:
        first = int(match["one"] or match["first"])
        dwords = 1 if match["one"] else int(match["last"]) - first + 1
        kind, offset = {"v": ("v", 0), "s": ("s", 0), "ttmp": ("s", TTMP)}[match["file"]]
        return Operand(kind, text, first + offset, dwords, negate, absolute, match["half"])
    is_modified = text.startswith("neg(")  # of a constant; elsewhere a minus sign belongs to the number
    number = bare if is_modified else text
    if FLOAT.match(number):
        bits = int(np.float32(number).view(np.uint32))
        return Operand("constant", text, negate=is_modified, value=bits, is_float=True)
    if INTEGER.match(number):
        return Operand("constant", text, negate=is_modified, value=int(number, 0))
    kind = {"off": "off", "src_scc": "scc", "scc": "scc"}.get(text, "other")
    return Operand(kind, text)


def _source_modifiers(text: str) -> tuple[str, bool, bool]:
    """``-|v1|`` -> ``("v1", True, True)``."""
    negate = text.startswith("-")
    bare = text[1:] if negate else text
    if bare.startswith("neg("):
        negate, bare = True, bare[4:-1]
    absolute = bare.startswith(("|", "abs("))
    if absolute:
        bare = bare.strip("|").removeprefix("abs(").removesuffix(")")
    return bare, negate, absolute
