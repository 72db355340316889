"""Scalar instructions (``s_*``) except loads, branches and barriers."""

import re

import numpy as np

from tests.amdgpu.errors import EmulatorError
from tests.amdgpu.instruction import Instruction, parse_operand
from tests.amdgpu.numeric import COMPARE, F32, I32, I64, INTEGER_COMPARE, U32, U64, fma
from tests.amdgpu.vector_tables import ONE, TWO

LOGIC = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
    "andn2": lambda a, b: a & ~b,
    "and_not1": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "or_not1": lambda a, b: a | ~b,
}
_LOGIC = re.compile(rf"({'|'.join(sorted(LOGIC, key=len, reverse=True))})_b(32|64)$")
_SAVE_EXEC = re.compile(rf"({'|'.join(sorted(LOGIC, key=len, reverse=True))})_(saveexec|wrexec)_b(32|64)$")
_SHIFT = re.compile(r"(lshl|lshr|ashr)_[bi](32|64)$")


def decode(instruction: Instruction, machine):
    """A function of the selected waves that executes ``instruction``."""
    name = instruction.mnemonic.removeprefix("s_")
    for family in (_moves, _compares, _logic, _shifts, _bit_fields, _sums, _products, _floats, _packs):
        run = family(name, instruction.operands, machine)
        if run is not None:
            return run
    raise EmulatorError(f"not implemented: {instruction.text}")


def _width(name: str, machine):
    """Readers and writers of the instruction's operand width."""
    if name.endswith("64"):
        return machine.read_scalar64, machine.write_scalar64
    return machine.read_scalar, machine.write_scalar


def _immediate16(operand) -> int:
    return ((operand.value & 0xFFFF) ^ 0x8000) - 0x8000


def _moves(name, operands, machine):
    read, write = _width(name, machine)
    if name in ("mov_b32", "mov_b64"):
        dwords = int(name[-2:]) // 32
        return lambda waves: [machine.copy_scalar(operands[0], operands[1], waves, k) for k in range(dwords)]
    if name == "movk_i32":
        value = U32(_immediate16(operands[1]) & 0xFFFFFFFF)
        return lambda waves: write(operands[0], waves, value)
    if name in ("cselect_b32", "cselect_b64"):
        return lambda waves: write(
            operands[0], waves, np.where(machine.scc[waves], read(operands[1], waves), read(operands[2], waves))
        )
    if name == "brev_b32":
        reverse = ONE["bfrev_b32"][1]
        return lambda waves: write(operands[0], waves, reverse(read(operands[1], waves)))
    if name in ("sext_i32_i16", "sext_i32_i8"):
        narrow = np.int16 if name.endswith("16") else np.int8
        return lambda waves: write(operands[0], waves, read(operands[1], waves).astype(narrow).astype(I32).view(U32))
    if name in ("not_b32", "not_b64"):

        def invert(waves):
            result = ~read(operands[1], waves)
            write(operands[0], waves, result)
            machine.scc[waves] = result != 0

        return invert
    return None


def _compares(name, operands, machine):
    match = re.match(r"cmp(k?)_([a-z]+)_([uif])(32|64)$", name)
    if match is None:
        return None
    short, relation, kind, bits = match.groups()
    compare = (COMPARE if kind == "f" else INTEGER_COMPARE)[relation]
    dtype = {"u32": U32, "u64": U64, "i32": I32, "f32": F32}[kind + bits]
    read, _ = _width(name, machine)

    def run(waves):
        if short:
            immediate = _immediate16(operands[1]) if kind == "i" else operands[1].value & 0xFFFF
            other = np.array(immediate).astype(I64)
            machine.scc[waves] = compare(read(operands[0], waves).view(dtype).astype(I64), other)
        else:
            machine.scc[waves] = compare(read(operands[0], waves).view(dtype), read(operands[1], waves).view(dtype))

    return run


def _logic(name, operands, machine):
    save, plain = _SAVE_EXEC.match(name), _LOGIC.match(name)
    read, write = _width(name, machine)
    if save:
        function, form = LOGIC[save[1]], save[2]
        exec_mask = parse_operand("exec" if save[3] == "64" else "exec_lo")

        def save_exec(waves):
            source, old = read(operands[1], waves).copy(), read(exec_mask, waves).copy()
            result = function(source, old)
            write(operands[0], waves, old if form == "saveexec" else result)
            write(exec_mask, waves, result)
            machine.scc[waves] = result != 0

        return save_exec
    if plain:
        function = LOGIC[plain[1]]

        def run(waves):
            result = function(read(operands[1], waves), read(operands[2], waves))
            write(operands[0], waves, result)
            machine.scc[waves] = result != 0

        return run
    return None


def _shifts(name, operands, machine):
    match = _SHIFT.match(name)
    if match is None:
        return None
    direction, bits = match[1], int(match[2])
    unsigned, signed = (U64, I64) if bits == 64 else (U32, I32)
    read, write = _width(name, machine)

    def run(waves):
        value = read(operands[1], waves)
        by = (machine.read_scalar(operands[2], waves) & U32(bits - 1)).astype(unsigned)
        if direction == "lshl":
            result = value << by
        elif direction == "lshr":
            result = value >> by
        else:
            result = (value.view(signed) >> by.view(signed)).view(unsigned)
        write(operands[0], waves, result)
        machine.scc[waves] = result != 0

    return run


def _bit_fields(name, operands, machine):
    read, write = _width(name, machine)
    if name in ("bfe_u32", "bfe_u64", "bfe_i32"):
        bits = 64 if name.endswith("64") else 32

        def extract(waves):
            value, control = read(operands[1], waves), machine.read_scalar(operands[2], waves)
            unsigned = value.dtype.type
            width = np.minimum((control >> U32(16)) & U32(127), bits).astype(I64)
            field = value >> (control & U32(bits - 1)).astype(unsigned)
            keep = np.where(
                width == bits, unsigned(2**bits - 1), (unsigned(1) << (width % bits).astype(unsigned)) - unsigned(1)
            )
            result = field & keep.astype(unsigned)
            if name == "bfe_i32":
                is_negative = (width > 0) & ((result >> np.maximum(width - 1, 0).astype(U32)) & U32(1) == 1)
                result = np.where(is_negative, result | ~keep.astype(U32), result)
            write(operands[0], waves, result)
            machine.scc[waves] = result != 0

        return extract
    if name == "bitcmp1_b32":

        def test(waves):
            by = machine.read_scalar(operands[1], waves) & U32(31)
            machine.scc[waves] = (machine.read_scalar(operands[0], waves) >> by) & U32(1) == 1

        return test
    return None


def _sums(name, operands, machine):
    """Additions and subtractions, minima and maxima; the carry or overflow goes to SCC where the hardware sets it."""
    plain = name.replace("_co_ci_", "c_").replace("_co_", "_")
    shifted = re.match(r"lshl([1-4])_add_u32$", name)
    if name in ("add_nc_u64", "sub_nc_u64"):
        read, write = machine.read_scalar64, machine.write_scalar64
        sign = 1 if name.startswith("add") else -1
        return lambda waves: write(
            operands[0], waves, read(operands[1], waves) + U64(sign % 2**64) * read(operands[2], waves)
        )
    if plain not in _SUMS and not shifted:
        return None
    signed = plain.endswith("i32")

    def run(waves):
        a, b = (machine.read_scalar(operand, waves) for operand in operands[1:3])
        a, b = ((x.view(I32) if signed else x).astype(I64) for x in (a, b))
        if shifted:
            result = (a << int(shifted[1])) + b
            machine.scc[waves], result = result >> 32 != 0, result & 0xFFFFFFFF
        else:
            result, flag = _SUMS[plain](a, b, machine.scc[waves].astype(I64))
            if signed and plain[:3] in ("add", "sub"):
                flag = (result > 2**31 - 1) | (result < -(2**31))
            machine.scc[waves] = flag
        machine.write_scalar(operands[0], waves, (result & 0xFFFFFFFF).astype(U32))

    return run


def _with_flag(function, flag):
    return lambda a, b, carry: (function(a, b, carry), flag(function(a, b, carry), a, b))


_carry = lambda result, a, b: result >> 32 != 0  # noqa: E731
_borrow = lambda result, a, b: result < 0  # noqa: E731
_SUMS = {
    "add_u32": _with_flag(lambda a, b, carry: a + b, _carry),
    "add_i32": _with_flag(lambda a, b, carry: a + b, _carry),
    "addc_u32": _with_flag(lambda a, b, carry: a + b + carry, _carry),
    "sub_u32": _with_flag(lambda a, b, carry: a - b, _borrow),
    "sub_i32": _with_flag(lambda a, b, carry: a - b, _borrow),
    "subb_u32": _with_flag(lambda a, b, carry: a - b - carry, _borrow),
    "subc_u32": _with_flag(lambda a, b, carry: a - b - carry, _borrow),
    **{f"min_{t}": (lambda a, b, carry: (np.minimum(a, b), a < b)) for t in ("i32", "u32")},
    **{f"max_{t}": (lambda a, b, carry: (np.maximum(a, b), a > b)) for t in ("i32", "u32")},
}


def _products(name, operands, machine):
    if name == "mul_u64":
        read, write = machine.read_scalar64, machine.write_scalar64
        return lambda waves: write(operands[0], waves, read(operands[1], waves) * read(operands[2], waves))
    if name in ("addk_i32", "addk_co_i32", "mulk_i32"):
        immediate = _immediate16(operands[1])

        def with_immediate(waves):
            value = machine.read_scalar(operands[0], waves).view(I32).astype(I64)
            result = value * immediate if name == "mulk_i32" else value + immediate
            if name != "mulk_i32":
                machine.scc[waves] = (result > 2**31 - 1) | (result < -(2**31))
            machine.write_scalar(operands[0], waves, (result & 0xFFFFFFFF).astype(U32))

        return with_immediate
    table = {"mul_i32": "mul_lo_u32", "mul_hi_u32": "mul_hi_u32", "mul_hi_i32": "mul_hi_i32"}
    if name not in table:
        return None
    kinds, function, _ = TWO[table[name]]
    dtype = I32 if kinds[0] == "i" else U32
    return lambda waves: machine.write_scalar(
        operands[0], waves, function(*(machine.read_scalar(o, waves).view(dtype) for o in operands[1:3])).view(U32)
    )


def _floats(name, operands, machine):
    """Float instructions of gfx11.5 and gfx12."""

    def read(operand, waves):
        value = machine.read_scalar(operand, waves)
        if operand.absolute:
            value = value & U32(0x7FFFFFFF)
        return (value ^ U32(0x80000000) if operand.negate and operand.kind == "s" else value).view(F32)

    if name in ("fmac_f32", "fmaak_f32", "fmamk_f32"):
        sources = (operands[1], operands[2], operands[0] if name == "fmac_f32" else operands[3])
        if name == "fmamk_f32":
            sources = (operands[1], operands[2], operands[3])
        return lambda waves: machine.write_scalar(operands[0], waves, fma(*(read(o, waves) for o in sources)).view(U32))
    kinds, function, _ = {**ONE, **TWO}.get(name, ("", None, ""))
    if not name.endswith("_f32") or set(kinds) != {"f"}:
        return None

    def run(waves):
        with np.errstate(all="ignore"):
            result = function(*(read(o, waves) for o in operands[1 : 1 + len(kinds)]))
        machine.write_scalar(operands[0], waves, np.ascontiguousarray(result, F32).view(U32))

    return run


def _packs(name, operands, machine):
    match = re.match(r"pack_([lh])([lh])_b32_b16$", name)
    if match is None:
        return None
    first, second = (U32(0 if half == "l" else 16) for half in match.groups())

    def run(waves):
        low = (machine.read_scalar(operands[1], waves) >> first) & U32(0xFFFF)
        high = (machine.read_scalar(operands[2], waves) >> second) & U32(0xFFFF)
        machine.write_scalar(operands[0], waves, low | (high << U32(16)))

    return run
