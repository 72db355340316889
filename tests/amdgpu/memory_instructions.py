"""Loads and stores: scalar (``s_load``), global and buffer; atomics on global memory."""

import re

import numpy as np

from tests.amdgpu.errors import EmulatorError
from tests.amdgpu.instruction import Instruction
from tests.amdgpu.machine import NO_LANE
from tests.amdgpu.numeric import F32, I32, I64, U32, U64, join64

WORDS = re.compile(r"(?:dword|b)(x?)(\d*)$")
SCALAR_SIZES = {"dword": 4, "b32": 4, "u8": 1, "u16": 2, "i8": 1, "i16": 2}
SIZES = {
    **dict.fromkeys(("dword", "b32"), 4),
    **dict.fromkeys(("dwordx2", "b64"), 8),
    **dict.fromkeys(("dwordx3", "b96"), 12),
    **dict.fromkeys(("dwordx4", "b128"), 16),
    **dict.fromkeys(("ushort", "short", "sshort", "u16", "i16", "b16"), 2),
    **dict.fromkeys(("short_d16", "short_d16_hi", "d16_b16", "d16_hi_b16"), 2),
    **dict.fromkeys(("ubyte", "byte", "sbyte", "u8", "i8", "b8"), 1),
}
SIGNED = ("sshort", "i16", "sbyte", "i8")
BASE_MASK = U64(0xFFFFFFFFFFFF)  # a buffer descriptor holds 48 address bits


def decode(instruction: Instruction, machine, memory):
    """A function of the selected waves that executes ``instruction``."""
    name = instruction.mnemonic
    if name.startswith("s_"):
        return _scalar_load(instruction, machine, memory)
    match = re.match(r"(global|buffer)_(load|store|atomic)_(.+)$", name)
    if match is None or instruction.modifiers.get("lds"):
        raise EmulatorError(f"not implemented: {instruction.text}")
    space, action, kind = match.groups()
    if action == "atomic":
        return _atomic(instruction, kind, machine, memory)
    if kind not in SIZES:
        raise EmulatorError(f"not implemented: {instruction.text}")
    return (_global if space == "global" else _buffer)(instruction, action, kind, machine, memory)


# -- registers <-> bytes -------------------------------------------------------------------------------------------


def to_registers(machine, waves, operand, data, kind: str, dword: int = 0) -> None:
    """Scatter the bytes loaded by the active lanes, uint8 [lanes, size], into registers from ``dword`` on."""
    active = machine.active[waves]
    size = data.shape[1]
    if size >= 4:
        words = np.ascontiguousarray(data).view(U32)
    elif size == 2:
        words = np.ascontiguousarray(data).view(np.int16 if kind in SIGNED else np.uint16).astype(I32).view(U32)
    else:
        words = data.view(np.int8 if kind in SIGNED else np.uint8).astype(I32).view(U32)
    for k in range(words.shape[1]):
        value = np.zeros(active.shape, U32)
        value[active] = words[:, k]
        if "d16" in kind and not operand.half:
            old = machine.read_vector(operand, waves, needed=NO_LANE)
            value = (old & U32(0xFFFF)) | (value << U32(16)) if "hi" in kind else (old & U32(0xFFFF0000)) | value
        machine.write_vector(operand, waves, value, dword + k)


def from_registers(machine, waves, operand, size: int, kind: str):
    """The bytes that the active lanes store, uint8 [lanes, size]."""
    active = machine.active[waves]
    if size >= 4:
        words = [
            np.broadcast_to(machine.read_vector(operand, waves, k), active.shape)[active] for k in range(size // 4)
        ]
        return np.ascontiguousarray(np.stack(words, -1)).view(np.uint8).reshape(-1, size)
    value = np.broadcast_to(machine.read_vector(operand, waves), active.shape)[active]
    if "hi" in kind:
        value = value >> U32(16)
    return np.ascontiguousarray(value).view(np.uint8).reshape(-1, 4)[:, :size]


# -- instructions --------------------------------------------------------------------------------------------------


def _scalar_load(instruction, machine, memory):
    suffix = instruction.mnemonic.rsplit("_", 1)[1]
    match = WORDS.match(suffix)
    size = SCALAR_SIZES.get(suffix)
    if size is None:
        if match is None or not instruction.mnemonic.startswith("s_load"):
            raise EmulatorError(f"not implemented: {instruction.text}")
        size = 4 * int(match[2]) if match[1] else int(match[2]) // 8
    target, base, *offsets = instruction.operands
    fixed = instruction.modifiers.get("offset", 0) + sum(o.value for o in offsets if o.kind == "constant")

    def run(waves):
        address = (machine.read_scalar64(base, waves) & BASE_MASK) + U64(fixed % 2**64)
        for operand in offsets:
            if operand.kind == "s":
                address = address + machine.read_scalar(operand, waves).astype(U64)
        if size >= 4:
            address = address & ~U64(3)
        data = memory.load(address, size)
        if size < 4:
            sign = suffix.startswith("i")
            words = np.ascontiguousarray(data).view(f"<{'i' if sign else 'u'}{size}").astype(I32).view(U32)
        else:
            words = np.ascontiguousarray(data).view(U32)
        for k in range(words.shape[1]):
            machine.write_scalar(target, waves, words[:, k], k)

    return run


def _global_address(instruction, operands, machine):
    """Reader of the addresses of the active lanes: ``(vector address, scalar base or off)``."""
    address, base = operands
    offset = U64(instruction.modifiers.get("offset", 0) % 2**64)

    def read(waves):
        active = machine.active[waves]
        if base.kind == "s":
            value = machine.read_scalar64(base, waves)[:, None] + machine.read_vector(address, waves).astype(U64)
        else:
            value = join64(machine.read_vector(address, waves, 0), machine.read_vector(address, waves, 1))
        return np.broadcast_to(value + offset, active.shape)[active]

    return read


def _global(instruction, action, kind, machine, memory):
    size, operands = SIZES[kind], instruction.operands
    if action == "load":
        target, *place = operands
        read = _global_address(instruction, place, machine)
        return lambda waves: to_registers(machine, waves, target, memory.load(read(waves), size), kind)
    address, data, base = operands
    read = _global_address(instruction, (address, base), machine)
    return lambda waves: memory.store(read(waves), from_registers(machine, waves, data, size, kind))


def _buffer(instruction, action, kind, machine, memory):
    """Raw buffers: each dword beyond ``num_records`` reads as 0 and is not stored."""
    if instruction.modifiers.get("idxen"):
        raise EmulatorError(f"not implemented: {instruction.text}")
    size = SIZES[kind]
    data, offset, descriptor, scalar_offset = instruction.operands
    fixed = instruction.modifiers.get("offset", 0)
    uses_offset = bool(instruction.modifiers.get("offen"))
    step = min(size, 4)
    pieces = np.arange(0, size, step)

    def places(waves):
        """Addresses and validity of the pieces, [active lanes, pieces]."""
        active = machine.active[waves]
        low, high, num_records, flags = (machine.read_scalar(descriptor, waves, k) for k in range(4))
        if ((high >> U32(16)) & U32(0x3FFF)).any():
            raise EmulatorError("a strided buffer descriptor is not implemented")
        if machine.wave_size == 32 and (((flags >> U32(28)) & U32(3)) != 3).any():
            raise EmulatorError("a buffer descriptor without bounds checking (OOB_SELECT is not 3)")
        base = join64(low, high & U32(0xFFFF))
        place = np.full(active.shape, fixed, I64)
        if uses_offset:
            place = place + machine.read_vector(offset, waves).astype(I64)
        if scalar_offset.kind != "off":
            place = place + machine.read_scalar(scalar_offset, waves)[:, None].astype(I64)
        place = place[active][:, None] + pieces
        limit = np.broadcast_to(num_records[:, None], active.shape)[active][:, None].astype(I64)
        if ((place < limit) & (place + step > limit)).any():
            raise EmulatorError("an access straddles num_records: what hardware does there differs")
        addresses = np.broadcast_to(base[:, None], active.shape)[active][:, None] + place.astype(U64)
        return addresses, place + step <= limit

    def load(waves):
        addresses, valid = places(waves)
        loaded = np.zeros((*addresses.shape, step), np.uint8)
        loaded[valid] = memory.load(addresses[valid], step)
        to_registers(machine, waves, data, loaded.reshape(len(addresses), size), kind)

    def store(waves):
        addresses, valid = places(waves)
        values = from_registers(machine, waves, data, size, kind).reshape(len(addresses), len(pieces), step)
        memory.store(addresses[valid], values[valid])

    return load if action == "load" else store


ATOMICS = {
    "add_u32": lambda old, new: U32((int(old) + int(new)) & 0xFFFFFFFF),
    "add_f32": lambda old, new: F32(old.view(F32) + new.view(F32)).view(U32),
    "max_i32": lambda old, new: max(old.view(I32), new.view(I32)).view(U32),
    "min_u32": min,
}
OLD_ATOMIC_NAMES = {"add": "add_u32", "smax": "max_i32", "umin": "min_u32"}


def _atomic(instruction, kind, machine, memory):
    """Atomics on one dword, one lane after the other."""
    combine = ATOMICS.get(OLD_ATOMIC_NAMES.get(kind, kind))
    if combine is None or not instruction.mnemonic.startswith("global"):
        raise EmulatorError(f"not implemented: {instruction.text}")
    *result, address, data, base = instruction.operands
    read = _global_address(instruction, (address, base), machine)

    def run(waves):
        addresses, active = read(waves), machine.active[waves]
        values = np.broadcast_to(machine.read_vector(data, waves), active.shape)[active]
        old = np.zeros(len(addresses), U32)
        for k in range(len(addresses)):
            old[k] = memory.load(addresses[k : k + 1], 4).view(U32)[0, 0]
            memory.store(addresses[k : k + 1], np.array([[combine(old[k], values[k])]], U32).view(np.uint8))
        if result:
            before = np.zeros(active.shape, U32)
            before[active] = old
            machine.write_vector(result[0], waves, before)

    return run
