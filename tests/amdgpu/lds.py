"""Local data share: loads and stores with bounds, unwritten-byte and race detection; ``ds_swizzle``, ``ds_bpermute``.

A race is two accesses of one byte by different waves of a workgroup between two barriers, at least one a store.
"""

import re

import numpy as np

from tests.amdgpu.cross_lane import pick
from tests.amdgpu.errors import EmulatorError
from tests.amdgpu.instruction import Instruction
from tests.amdgpu.memory_instructions import from_registers, to_registers
from tests.amdgpu.numeric import I32, I64, U32

ACCESS = re.compile(
    r"(load|read|store|write)(_2addr|2)?(_stride64|st64)?_(b8|b16|b32|b64|b96|b128|u8|u16|i8|i16|u16_d16|u16_d16_hi)$"
)
SIZES = {"b8": 1, "u8": 1, "i8": 1, "b32": 4, "b64": 8, "b96": 12, "b128": 16}
NOBODY, SEVERAL = -1, -2  # instead of a wave's number


class LocalMemory:
    """The LDS of every workgroup of a launch, byte by byte, with who touched each byte since the last barrier."""

    def __init__(self, size: int, workgroup_of_wave, num_workgroups: int, detect_races: bool = True) -> None:
        self.size, self.workgroup_of_wave, self.detect_races = size, workgroup_of_wave, detect_races
        shape = (num_workgroups, max(size, 1))
        self.bytes = np.zeros(shape, np.uint8)
        self.written = np.zeros(shape, bool)
        self._epoch = np.zeros(num_workgroups, I32)
        self._writer, self._reader = np.full(shape, NOBODY, I32), np.full(shape, NOBODY, I32)
        self._write_epoch, self._read_epoch = np.full(shape, NOBODY, I32), np.full(shape, NOBODY, I32)

    def pass_barrier(self, workgroups) -> None:
        self._epoch[workgroups] += 1

    def places(self, wave, offsets, size: int):
        """Index arrays ``(workgroup, byte)`` for accesses of ``size`` bytes, checked against the LDS size."""
        if offsets.size and (offsets.min() < 0 or offsets.max() + size > self.size):
            raise EmulatorError(f"LDS out of bounds: byte {int(offsets.max())} + {size} of {self.size}")
        return self.workgroup_of_wave[wave][:, None], offsets[:, None] + np.arange(size)

    def load(self, wave, offsets, size: int):
        group, place = self.places(wave, offsets, size)
        if not self.written[group, place].all():
            raise EmulatorError("reads LDS that was never written")
        if self.detect_races:
            self._check(self._writer, self._write_epoch, group, place, wave, "read after write")
            self._note_readers(group, place, wave[:, None])
        return self.bytes[group, place]

    def store(self, wave, offsets, data) -> None:
        group, place = self.places(wave, offsets, data.shape[1])
        if self.detect_races:
            self._check(self._writer, self._write_epoch, group, place, wave, "write after write")
            self._check(self._reader, self._read_epoch, group, place, wave, "write after read")
            self._writer[group, place], self._write_epoch[group, place] = wave[:, None], self._epoch[group]
            # Two waves of one step: only one of them is left as the writer.
            self._check(self._writer, self._write_epoch, group, place, wave, "write after write")
        self.bytes[group, place] = data
        self.written[group, place] = True

    def _note_readers(self, group, place, wave) -> None:
        is_recent = self._read_epoch[group, place] == self._epoch[group]
        before = np.where(is_recent, self._reader[group, place], NOBODY)
        reader = np.where((before != NOBODY) & (before != wave), SEVERAL, wave)
        self._reader[group, place], self._read_epoch[group, place] = reader, self._epoch[group]
        differs = self._reader[group, place] != reader
        self._reader[np.broadcast_to(group, place.shape)[differs], place[differs]] = SEVERAL

    def _check(self, owner, epoch, group, place, wave, what: str) -> None:
        before = owner[group, place]
        if ((epoch[group, place] == self._epoch[group]) & (before != wave[:, None]) & (before != NOBODY)).any():
            raise EmulatorError(f"LDS race: {what} by another wave without a barrier between")


def decode(instruction: Instruction, machine, lds: LocalMemory):
    """A function of the selected waves that executes ``instruction``."""
    name = instruction.mnemonic.removeprefix("ds_")
    if name == "swizzle_b32":
        return _swizzle(instruction, machine)
    if name == "bpermute_b32":
        return _permute(instruction, machine)
    match = ACCESS.match(name)
    if match is None or instruction.modifiers.get("gds"):
        raise EmulatorError(f"not implemented: {instruction.text}")
    return _access(instruction, match, machine, lds)


def _access(instruction, match, machine, lds):
    is_load, is_pair, kind = match[1] in ("load", "read"), bool(match[2]), match[4]
    size = SIZES.get(kind, 2)
    modifiers = instruction.modifiers
    offsets = [modifiers.get("offset", 0)]
    if is_pair:
        unit = size * (64 if match[3] else 1)
        offsets = [modifiers.get(f"offset{k}", 0) * unit for k in range(2)]
    address = instruction.operands[1 if is_load else 0]

    def run(waves):
        active = machine.active[waves]
        numbers = np.arange(machine.num_waves) if isinstance(waves, slice) else waves
        wave = np.broadcast_to(numbers[:, None], active.shape)[active]
        base = np.broadcast_to(machine.read_vector(address, waves), active.shape)[active].astype(I64)
        loaded = []  # all addresses are read before a register is written
        for k, offset in enumerate(offsets):
            if is_load:
                loaded.append(lds.load(wave, base + offset, size))
            else:
                data = from_registers(machine, waves, instruction.operands[1 + k], size, kind)
                lds.store(wave, base + offset, data)
        for k, data in enumerate(loaded):
            to_registers(machine, waves, instruction.operands[0], data, kind, k * (size // 4))

    return run


def _permute(instruction, machine):
    target, address, source = instruction.operands
    offset = U32(instruction.modifiers.get("offset", 0))

    def run(waves):
        lane = ((machine.read_vector(address, waves) + offset) >> U32(2)).astype(I64) % machine.wave_size
        machine.write_vector(target, waves, pick(machine, source, waves, lane)[0])

    return run


def _swizzle(instruction, machine):
    target, source = instruction.operands
    lane = np.arange(machine.wave_size)
    from_lane = swizzle_source(instruction.modifiers.get("offset", 0), lane)[None]
    return lambda waves: machine.write_vector(target, waves, pick(machine, source, waves, from_lane)[0])


def swizzle_source(pattern, lane):
    """The lane that each lane reads, for a numeric pattern or its symbolic form."""
    if isinstance(pattern, int):
        if pattern & 0x8000:
            return (lane & ~3) | np.array([(pattern >> (2 * k)) & 3 for k in range(4)])[lane & 3]
        low = ((lane & 31 & pattern) | ((pattern >> 5) & 31)) ^ ((pattern >> 10) & 31)
        return (lane & 32) | low
    kind, arguments = re.match(r"swizzle\(([A-Z_]+),(.*)\)$", pattern).groups()
    if kind == "BITMASK_PERM":
        source = np.zeros_like(lane)
        for bit, rule in zip((16, 8, 4, 2, 1), arguments.strip().strip('"'), strict=True):
            source |= {"0": 0 * lane, "1": bit + 0 * lane, "p": lane & bit, "i": (lane & bit) ^ bit}[rule]
        return (lane & 32) | source
    numbers = [int(number) for number in arguments.split(",")]
    if kind == "SWAP":
        return lane ^ numbers[0]
    if kind == "QUAD_PERM":
        return (lane & ~3) | np.array(numbers)[lane & 3]
    if kind == "BROADCAST":
        return lane // numbers[0] * numbers[0] + numbers[1]
    if kind == "REVERSE":
        return lane // numbers[0] * numbers[0] + numbers[0] - 1 - lane % numbers[0]
    raise EmulatorError(f"not implemented: ds_swizzle {pattern}")
