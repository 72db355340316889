"""Vector instructions that move data between lanes: DPP, readlane, permlane, mbcnt."""

import numpy as np

from tests.amdgpu.errors import EmulatorError
from tests.amdgpu.numeric import I64, U32, U64, join64

ROW = 16  # lanes of a DPP row


class Dpp:
    """The data-parallel primitive of one instruction: which lane each lane reads, and which lanes are written."""

    def __init__(self, modifiers, machine) -> None:
        self.machine = machine
        lane = np.arange(machine.wave_size)
        self.source, self.exists = _dpp_source(modifiers, lane)
        self.source = np.clip(self.source, 0, machine.wave_size - 1)
        row, bank = lane // ROW % 4, lane % ROW // 4
        rows, banks = modifiers.get("row_mask", 15), modifiers.get("bank_mask", 15)
        self.enabled = ((rows >> row) & 1).astype(bool) & ((banks >> bank) & 1).astype(bool)
        self.bound_control = bool(modifiers.get("bound_ctrl", 0))
        self.fetch_inactive = bool(modifiers.get("fi", 0))

    def __call__(self, operand, waves, kind):
        """``(moved bits, lanes to write)``; a lane without a source reads 0, or is not written."""
        active = self.machine.active[waves]
        reads = self.exists[None] & (active[:, self.source] | self.fetch_inactive)
        read_from = np.zeros_like(active)
        np.logical_or.at(read_from, (slice(None), self.source), reads)
        bits = self.machine.read_vector(operand, waves, kind=kind, needed=read_from)
        bits = np.broadcast_to(bits, active.shape)
        moved = np.where(reads, bits[:, self.source], U32(0))
        return moved, active & self.enabled[None] & (reads | self.bound_control)


def _dpp_source(modifiers, lane):
    """``(source lane, whether it exists)`` of each lane."""
    row, place = lane // ROW * ROW, lane % ROW
    always = np.ones(len(lane), bool)
    if "quad_perm" in modifiers:
        return (lane & ~3) | np.array(modifiers["quad_perm"])[lane & 3], always
    if "row_shr" in modifiers:
        return lane - modifiers["row_shr"], place >= modifiers["row_shr"]
    if "row_shl" in modifiers:
        return lane + modifiers["row_shl"], place + modifiers["row_shl"] < ROW
    if "row_ror" in modifiers:
        return row + (place - modifiers["row_ror"]) % ROW, always
    if "row_mirror" in modifiers:
        return row + ROW - 1 - place, always
    if "row_half_mirror" in modifiers:
        return (lane & ~7) | (7 - (lane & 7)), always
    if "row_xmask" in modifiers:
        return row + (place ^ modifiers["row_xmask"]), always
    if "row_share" in modifiers:
        return row + modifiers["row_share"], always
    if modifiers.get("row_bcast") == 15:
        return row - 1, row > 0
    if modifiers.get("row_bcast") == 31:
        return np.full(len(lane), 31), lane >= 32
    if "wave_shr" in modifiers:
        return lane - 1, lane > 0
    raise EmulatorError(f"not implemented: DPP {modifiers}")


def decode(name, instruction, machine):
    """A function of the selected waves, or None for a name that is not of this family."""
    handlers = {
        "readlane_b32": _read_lane,
        "readfirstlane_b32": _read_first_lane,
        "writelane_b32": _write_lane,
        "permlane16_b32": _permute_row,
        "permlanex16_b32": _permute_row,
        "permlane16_swap_b32": _swap,
        "permlane32_swap_b32": _swap,
        "mbcnt_lo_u32_b32": _mask_count,
        "mbcnt_hi_u32_b32": _mask_count,
    }
    return handlers[name](name, instruction, machine) if name in handlers else None


def pick(machine, operand, waves, source):
    """Bits of ``operand`` at lane ``source`` [waves, lanes]; 0 where that lane is inactive."""
    active = machine.active[waves]
    value = np.broadcast_to(machine.read_vector(operand, waves), active.shape)
    source = np.broadcast_to(source, active.shape)
    available = np.take_along_axis(active, source, 1)
    return np.where(available, np.take_along_axis(value, source, 1), U32(0)), available


def _lane_number(machine, operand, waves):
    return (machine.read_scalar(operand, waves) & U32(machine.wave_size - 1)).astype(I64)


def _read_lane(name, instruction, machine):
    target, source, lane = instruction.operands

    def run(waves):
        number = _lane_number(machine, lane, waves)[:, None]
        needed = np.arange(machine.wave_size)[None] == number
        value = machine.read_vector(source, waves, needed=needed)
        machine.write_scalar(target, waves, np.take_along_axis(value, number, 1)[:, 0])

    return run


def _read_first_lane(name, instruction, machine):
    target, source = instruction.operands

    def run(waves):
        active = machine.active[waves]
        first = active.argmax(1)[:, None]  # lane 0 where none is active
        needed = np.arange(machine.wave_size)[None] == first
        value = np.broadcast_to(machine.read_vector(source, waves, needed=needed), active.shape)
        machine.write_scalar(target, waves, np.take_along_axis(value, first, 1)[:, 0])

    return run


def _write_lane(name, instruction, machine):
    target, source, lane = instruction.operands

    def run(waves):
        mask = np.arange(machine.wave_size)[None] == _lane_number(machine, lane, waves)[:, None]
        machine.write_vector(target, waves, machine.read_scalar(source, waves)[:, None], mask=mask)

    return run


def _permute_row(name, instruction, machine):
    """v_permlane16: any lane of the own row; v_permlanex16: of the other row of the pair."""
    target, source, low, high = instruction.operands
    fetch_inactive, bound_control = instruction.modifiers.get("op_sel", [0, 0])[:2]
    lane = np.arange(machine.wave_size)
    row = (lane // ROW) ^ (1 if "x16" in name else 0)

    def run(waves):
        selectors = join64(machine.read_scalar(low, waves), machine.read_scalar(high, waves))
        place = ((selectors[:, None] >> ((lane % ROW) * 4).astype(U64)) & U64(15)).astype(I64)
        from_lane = row[None] * ROW + place
        active = machine.active[waves]
        readable = np.take_along_axis(active, from_lane, 1) | bool(fetch_inactive)
        needed = None if not fetch_inactive else np.ones_like(active)
        value = np.broadcast_to(machine.read_vector(source, waves, needed=needed), active.shape)
        moved = np.where(readable, np.take_along_axis(value, from_lane, 1), U32(0))
        machine.write_vector(target, waves, moved, mask=active & (readable | bool(bound_control)))

    return run


def _swap(name, instruction, machine):
    """gfx950: exchange the odd groups of 16 or 32 lanes of one register with the even groups of the other."""
    first, second = instruction.operands
    group = 32 if "permlane32" in name else 16
    lane = np.arange(machine.wave_size)
    is_odd = lane // group % 2 == 1

    def run(waves):
        a, b = (machine.read_vector(o, waves).copy() for o in (first, second))
        machine.write_vector(first, waves, np.where(is_odd, b[:, lane ^ group], a))
        machine.write_vector(second, waves, np.where(is_odd, b, a[:, lane ^ group]))

    return run


def _mask_count(name, instruction, machine):
    """Set bits of a mask below the own lane, in its low or high half, plus the last operand."""
    target, mask, base = instruction.operands
    lane = np.arange(machine.wave_size)
    below = np.clip(lane if "lo" in name else lane - 32, 0, 32).astype(U64)
    keep = (U64(1) << below) - U64(1)

    def run(waves):
        bits = np.broadcast_to(machine.read_vector(mask, waves), machine.active[waves].shape).astype(U64) & keep
        count = sum(((bits >> U64(k)) & U64(1)).astype(U32) for k in range(32))
        machine.write_vector(target, waves, count + machine.read_vector(base, waves))

    return run
