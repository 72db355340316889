"""Figures of a compiled kernel, read from its machine code and metadata.

The inner loop is the one with the most 128-bit loads; its elements are what those loads bring.  Counted is its common
path: what a wave executes when it branches around the blocks that none of its lanes enters (the label's, of which
there is one in a row).
"""

import collections
import re
from dataclasses import dataclass

from tests.amdgpu.code_object import CodeObject
from tests.amdgpu.instruction import Instruction, parse_listing
from tests.amdgpu.toolchain import disassemble

WIDE = re.compile(r"(buffer|global)_(load|store)_(dwordx4|b128)$")
MEMORY = re.compile(r"(buffer|global|flat|scratch)_(load|store|atomic)")
TRANSCENDENTAL = re.compile(r"v_(s_)?(exp|log|rcp|rsq|sqrt|sin|cos)_")
WAIT_FOR_LOADS = re.compile(r"s_waitcnt|s_wait_loadcnt")
VECTOR_BYTES = 16


@dataclass(frozen=True)
class Simd:
    """What limits the waves of one SIMD; LLVM's AMDGPUBaseInfo has these numbers."""

    registers: int  # per lane, of all waves
    granule: int
    most_waves: int
    wave: int
    lds_bytes: int  # per compute unit
    simds: int  # per compute unit that share the LDS


CDNA3 = Simd(registers=512, granule=8, most_waves=8, wave=64, lds_bytes=65536, simds=4)
CDNA4 = Simd(registers=512, granule=8, most_waves=8, wave=64, lds_bytes=163840, simds=4)
RDNA_SMALL = Simd(registers=1024, granule=16, most_waves=16, wave=32, lds_bytes=65536, simds=2)
RDNA_LARGE = Simd(registers=1536, granule=24, most_waves=16, wave=32, lds_bytes=65536, simds=2)
SIMDS = {
    "gfx942": CDNA3,
    "gfx950": CDNA4,
    "gfx1100": RDNA_LARGE,
    "gfx1150": RDNA_SMALL,
    "gfx1151": RDNA_LARGE,
    "gfx1200": RDNA_LARGE,
    "gfx1201": RDNA_LARGE,
}


@dataclass(frozen=True)
class Figures:
    """One kernel; "per element" counts the vector instructions of the inner loop, a dual-issue pair as one."""

    vector_registers: int
    scalar_registers: int
    spills: int
    scratch_bytes: int
    lds_bytes: int
    flat_accesses: int
    loop_accesses: int
    wide_loop_accesses: int
    loads_in_flight: int
    elements: int
    vector_instructions: int
    transcendental: int
    waves: int
    most_waves: int

    @property
    def wide_share(self) -> float:
        return self.wide_loop_accesses / self.loop_accesses

    @property
    def instructions_per_element(self) -> float:
        return self.vector_instructions / self.elements

    @property
    def transcendental_per_element(self) -> float:
        return self.transcendental / self.elements


def measure(elf: bytes, arch: str, element_bytes: int, threads: int, dynamic_lds: int = 0) -> Figures:
    """Figures of the only kernel in ``elf``, launched with ``threads`` per workgroup."""
    (kernel,) = CodeObject(elf).kernels.values()
    program = list(parse_listing(disassemble(elf, arch)).values())
    loop = inner_loop(program)
    accesses = [i.mnemonic for i in loop if MEMORY.match(i.mnemonic)]
    wide = [name for name in accesses if WIDE.match(name)]
    vector = [i for i in loop if i.mnemonic.startswith("v_")]
    lds_bytes, simd = kernel.lds_bytes + dynamic_lds, SIMDS[arch]
    meta = kernel.metadata
    return Figures(
        vector_registers=meta[".vgpr_count"],
        scalar_registers=meta[".sgpr_count"],
        spills=meta[".vgpr_spill_count"] + meta[".sgpr_spill_count"],
        scratch_bytes=kernel.scratch_bytes,
        lds_bytes=lds_bytes,
        flat_accesses=sum(i.mnemonic.startswith(("flat_", "scratch_")) for i in program),
        loop_accesses=len(accesses),
        wide_loop_accesses=len(wide),
        loads_in_flight=loads_before_first_use(loop),
        elements=sum("load" in name for name in wide) * VECTOR_BYTES // element_bytes,
        vector_instructions=len(vector),
        transcendental=sum(bool(TRANSCENDENTAL.match(i.mnemonic)) for i in vector),
        waves=occupancy(simd, meta[".vgpr_count"], lds_bytes, threads),
        most_waves=simd.most_waves,
    )


def inner_loop(program: list[Instruction]) -> list[Instruction]:
    """The common path through the loop with the most 128-bit loads."""
    by_address = {i.address: i for i in program}
    following = {i.address: [s for s in successors(i) if s in by_address] for i in program}
    best, most_loads = [], -1
    for branch in program:
        for header in following[branch.address]:
            if header > branch.address:
                continue
            path = [by_address[address] for address in shortest_path(header, branch.address, following)]
            loads = sum(bool(WIDE.match(i.mnemonic)) and "load" in i.mnemonic for i in path)
            if loads > most_loads or (loads == most_loads and len(path) < len(best)):
                best, most_loads = path, loads
    return best


def successors(instruction: Instruction) -> list[int]:
    after = instruction.address + instruction.size
    if instruction.mnemonic == "s_endpgm":
        return []
    if instruction.mnemonic == "s_branch":
        return [instruction.branch_target]
    return [after, instruction.branch_target] if instruction.mnemonic.startswith("s_cbranch") else [after]


def shortest_path(start: int, end: int, following) -> list[int]:
    """Addresses from ``start`` to ``end`` with the fewest instructions; empty where there is no path."""
    before, queue = {start: None}, collections.deque([start])
    while queue and end not in before:
        address = queue.popleft()
        for target in following[address]:
            if target not in before:
                before[target] = address
                queue.append(target)
    path = [end] if end in before else []
    while path and before[path[-1]] is not None:
        path.append(before[path[-1]])
    return path[::-1]


def loads_before_first_use(loop: list[Instruction]) -> int:
    """128-bit loads issued before the loop first waits for one."""
    count = 0
    for instruction in loop:
        if WIDE.match(instruction.mnemonic) and "load" in instruction.mnemonic:
            count += 1
        elif count and WAIT_FOR_LOADS.match(instruction.mnemonic):
            break
    return count


def occupancy(simd: Simd, registers: int, lds_bytes: int, threads: int) -> int:
    """Waves per SIMD that registers and LDS allow."""
    allocated = -(-max(registers, 1) // simd.granule) * simd.granule
    by_registers = simd.registers // allocated
    waves_per_group = threads // simd.wave
    groups = simd.lds_bytes // max(lds_bytes, 1)
    return min(simd.most_waves, by_registers, groups * waves_per_group // simd.simds)
