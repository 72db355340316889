"""Vector instructions (``v_*``) that stay within a lane."""

import re

import numpy as np

from tests.amdgpu import cross_lane
from tests.amdgpu.errors import EmulatorError
from tests.amdgpu.instruction import Instruction, parse_operand
from tests.amdgpu.machine import NO_LANE
from tests.amdgpu.numeric import (
    COMPARE,
    F32,
    F64,
    I32,
    I64,
    INTEGER_COMPARE,
    TYPES,
    U32,
    U64,
    as_bits,
    as_float,
    bf16_to_float,
    f16_to_float,
    float_to_f16,
    fma,
)
from tests.amdgpu.vector_tables import SIMPLE

CARRY = re.compile(r"(add|sub|subrev)(c|b|brev)?_co(_ci)?_u32$")
SIXTY_FOUR = ("lshl_add_u64", "lshlrev_b64", "lshrrev_b64", "ashrrev_i64", "mad_u64_u32", "mad_co_u64_u32")
FMA_WITH_CONSTANT = ("fmac_f32", "fmaak_f32", "fmamk_f32")


def decode(instruction: Instruction, machine):
    """A function of the selected waves that executes ``instruction``."""
    first = _decode_one(instruction, machine)
    if instruction.second is None:
        return first
    second = _decode_one(instruction.second, machine)
    return _in_parallel(first, second, machine)


def _in_parallel(first, second, machine):
    """A dual-issue pair: both read before either writes."""

    def run(waves):
        with machine.deferred_writes():
            first(waves)
            second(waves)

    return run


def _decode_one(instruction: Instruction, machine):
    name = instruction.mnemonic.removeprefix("v_")
    if instruction.mnemonic.startswith("v_cmp") and instruction.encoding != "sdwa":
        return _compare(instruction, machine)
    families = (_moves, _simple, _selects)  # these know every encoding, the others only the plain ones
    if instruction.encoding in ("", "e32", "e64"):
        families += (_carries, _wide, _packed, _mixed, _division, cross_lane.decode)
    for family in families:
        run = family(name, instruction, machine)
        if run is not None:
            return run
    raise EmulatorError(f"not implemented: {instruction.text}")


def evaluate(entry, arrays):
    """One table entry on arrays of its operand types, as bits."""
    _, function, kind = entry
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(function(*arrays), TYPES[kind]).view(U32)


def _moves(name, instruction, machine):
    if instruction.encoding in ("dpp", "e64_dpp", "sdwa"):
        return None
    if name in ("mov_b32", "mov_b64"):
        target, source = instruction.operands
        dwords = int(name[-2:]) // 32
        return lambda waves: [machine.copy_vector(target, source, waves, k) for k in range(dwords)]
    if name == "pk_mov_b32":  # one source per half of the result; op_sel says which dword of it
        target, *sources = instruction.operands
        select = instruction.modifiers.get("op_sel", [0, 0])

        def run(waves):
            with machine.deferred_writes():
                for half, source in enumerate(sources):
                    machine.copy_vector(target, source, waves, half, select[half] if source.dwords > 1 else 0)

        return run
    return None


def _simple(name, instruction, machine):
    scalar_result = name.startswith("s_")  # v_s_exp_f32: result in a scalar register
    entry = SIMPLE.get(name.removeprefix("s_") if scalar_result else name)
    if name in FMA_WITH_CONSTANT:
        entry = SIMPLE["fma_f32"]
    if name == "mov_b16":
        entry = ("u", lambda a: a & U32(0xFFFF), "u")
    if entry is None:
        return None
    target, *sources = instruction.operands
    if name == "fmac_f32":
        sources.append(target)
    kinds = entry[0]
    finish = _output_modifiers(instruction)
    first_source = _first_source(instruction, machine, kinds[0])
    selects = _subdword_selects(instruction)

    def run(waves):
        value, mask = first_source(sources[0], waves)
        bits = [value, *(machine.read_vector(o, waves, kind=k) for o, k in zip(sources[1:], kinds[1:], strict=False))]
        chosen = (select(b) for b, select in zip(bits, selects, strict=False))
        arrays = [np.ascontiguousarray(b).view(TYPES[k]) for b, k in zip(chosen, kinds, strict=True)]
        result = finish(evaluate(entry, arrays))
        if scalar_result:
            machine.write_scalar(target, waves, result[:, 0])
        else:
            machine.write_vector(target, waves, result, mask=mask)

    return run


def _first_source(instruction, machine, kind):
    """Reader of the first source: ``(bits, lanes to write or None)``; DPP moves it across lanes."""
    if not instruction.is_dpp:
        return lambda operand, waves: (machine.read_vector(operand, waves, kind=kind), None)
    move = cross_lane.Dpp(instruction.modifiers, machine)
    return lambda operand, waves: move(operand, waves, kind)


def _subdword_selects(instruction):
    """SDWA source selects (``src0_sel:WORD_1``), identity elsewhere."""
    if instruction.encoding != "sdwa":
        return [lambda bits: bits] * 3
    if instruction.modifiers.get("dst_sel", "DWORD") != "DWORD":
        raise EmulatorError(f"not implemented: {instruction.text}")

    def select(how):
        if how in (None, "DWORD"):
            return lambda bits: bits
        unit, number = str(how).split("_")
        size = {"WORD": 16, "BYTE": 8}[unit]
        return lambda bits: (bits >> U32(size * int(number))) & U32(2**size - 1)

    return [select(instruction.modifiers.get(f"src{k}_sel")) for k in range(2)] + [select(None)]


def _output_modifiers(instruction):
    """``mul:2``, ``div:2`` and ``clamp`` on float results."""
    multiplier = instruction.modifiers.get("mul", 1) / instruction.modifiers.get("div", 1)
    clamp = instruction.modifiers.get("clamp")

    def finish(bits):
        if multiplier != 1:
            bits = as_bits(as_float(bits) * F32(multiplier))
        if clamp:
            bits = as_bits(np.clip(np.nan_to_num(as_float(bits)), 0, 1))
        return bits

    return finish


def _compare(instruction, machine):
    match = re.match(r"v_cmp(x?)_([a-z]+)_([fui])(32|64)$", instruction.mnemonic)
    if match is None:
        raise EmulatorError(f"not implemented: {instruction.text}")
    writes_exec, relation, kind, bits = match.groups()
    compare = (COMPARE if kind == "f" else INTEGER_COMPARE)[relation]
    operands = instruction.operands
    has_target = len(operands) == 3
    target = operands[0] if has_target else parse_operand("exec" if writes_exec else "vcc")
    left, right = operands[-2:]
    dtype = {"u32": U32, "i32": I32, "f32": F32, "u64": U64, "i64": I64, "f64": F64}[kind + bits]
    first_source = _first_source(instruction, machine, kind)

    def run(waves):
        if bits == "64":
            a, b = (np.ascontiguousarray(machine.read_vector64(o, waves)).view(dtype) for o in (left, right))
        else:
            a = np.ascontiguousarray(first_source(left, waves)[0]).view(dtype)
            b = np.ascontiguousarray(machine.read_vector(right, waves, kind=kind)).view(dtype)
        active = machine.active[waves]
        machine.write_mask(target, waves, np.broadcast_to(compare(a, b), active.shape) & active)

    return run


def _selects(name, instruction, machine):
    if name not in ("cndmask_b32", "cndmask_b16"):
        return None
    kind = "f" if name == "cndmask_b32" else "u"
    target, if_false, if_true, *rest = instruction.operands
    condition = rest[0] if rest else parse_operand("vcc")
    first_source = _first_source(instruction, machine, kind)
    select_false, select_true, _ = _subdword_selects(instruction)

    def run(waves):
        otherwise, mask = first_source(if_false, waves)
        value = select_true(machine.read_vector(if_true, waves, kind=kind))
        value = np.where(machine.read_mask(condition, waves), value, select_false(otherwise))
        machine.write_vector(target, waves, value, mask=mask)

    return run


def _carries(name, instruction, machine):
    match = CARRY.match(name)
    if match is None:
        return None
    kind, with_carry = match[1], bool(match[2] or match[3])
    if match[2] == "brev":
        kind = "subrev"
    target, carry_out, *sources = instruction.operands

    def run(waves):
        a, b = (machine.read_vector(o, waves).astype(I64) for o in sources[:2])
        carry = machine.read_mask(sources[2], waves).astype(I64) if with_carry else 0
        if kind == "subrev":
            a, b = b, a
        active = machine.active[waves]
        result = np.broadcast_to(a + b + carry if kind == "add" else a - b - carry, active.shape)
        machine.write_vector(target, waves, (result & 0xFFFFFFFF).astype(U32))
        machine.write_mask(carry_out, waves, ((result >> 32) != 0) & active)

    return run


def _wide(name, instruction, machine):
    """64-bit integers in register pairs."""
    target, *sources = instruction.operands
    if name == "cvt_f32_f64":

        def narrow(waves):
            with np.errstate(over="ignore"):
                value = np.ascontiguousarray(machine.read_vector64(sources[0], waves)).view(F64).astype(F32)
            machine.write_vector(target, waves, as_bits(value))

        return narrow
    if name not in SIXTY_FOUR:
        return None

    def shift(operand, waves):
        return (machine.read_vector(operand, waves) & U32(63)).astype(U64)

    def run(waves):
        wide = lambda operand: machine.read_vector64(operand, waves)  # noqa: E731
        if name == "lshl_add_u64":
            result = (wide(sources[0]) << shift(sources[1], waves)) + wide(sources[2])
        elif name == "lshlrev_b64":
            result = wide(sources[1]) << shift(sources[0], waves)
        elif name == "lshrrev_b64":
            result = wide(sources[1]) >> shift(sources[0], waves)
        elif name == "ashrrev_i64":
            result = (wide(sources[1]).view(I64) >> shift(sources[0], waves).astype(I64)).view(U64)
        else:  # mad: the first operand is a carry that kernels ignore
            a, b = (machine.read_vector(o, waves).astype(U64) for o in sources[1:3])
            result = a * b + wide(sources[3])
        machine.write_vector64(target, waves, result)

    return run


def _packed(name, instruction, machine):
    """Two float32 per lane in a register pair; ``op_sel`` says which half each result half reads."""
    if name not in ("pk_add_f32", "pk_mul_f32", "pk_fma_f32"):
        return None
    target, *sources = instruction.operands
    count, modifiers = len(sources), instruction.modifiers
    select = (modifiers.get("op_sel", [0] * count), modifiers.get("op_sel_hi", [1] * count))
    negate = (modifiers.get("neg_lo", [0] * count), modifiers.get("neg_hi", [0] * count))
    function = {"pk_add_f32": np.add, "pk_mul_f32": np.multiply, "pk_fma_f32": fma}[name]

    def source(k, half, waves):
        dword = half if sources[k].dwords > 1 else 0
        return np.ascontiguousarray(machine.read_vector(sources[k], waves, dword))

    def run(waves):
        shape = machine.active[waves].shape
        results = []
        for half in range(2):
            values = [
                as_float(source(k, select[half][k], waves) ^ U32(0x80000000 if negate[half][k] else 0))
                for k in range(count)
            ]
            with np.errstate(all="ignore"):
                results.append(as_bits(function(*values)))
        for half, result in enumerate([np.array(np.broadcast_to(r, shape)) for r in results]):
            machine.write_vector(target, waves, result, half)

    return run


def _mixed(name, instruction, machine):
    """v_fma_mix*: each source is float32, or a half of a register where ``op_sel_hi`` says so."""
    if name not in ("fma_mix_f32", "fma_mixlo_f16", "fma_mixhi_f16", "fma_mix_f32_bf16"):
        return None
    target, *sources = instruction.operands
    use_high = instruction.modifiers.get("op_sel", [0] * 3)
    is_half = instruction.modifiers.get("op_sel_hi", [0] * 3)
    widen = bf16_to_float if name.endswith("bf16") else f16_to_float
    finish = _output_modifiers(instruction)

    def source(k, waves):
        operand = sources[k]
        plain = parse_operand(operand.text.replace("-", "").replace("|", "")) if operand.kind != "constant" else operand
        bits = np.ascontiguousarray(machine.read_vector(plain, waves))
        # An inline float constant has the operand's own type: 1.0 is 1.0 in float16 too.
        if is_half[k] and not operand.is_float:
            value = widen(bits >> U32(16) if use_high[k] else bits & U32(0xFFFF))
        else:
            value = as_float(bits)
        value = np.abs(value) if operand.absolute else value
        return -value if operand.negate else value

    def run(waves):
        a, b, c = (source(k, waves) for k in range(3))
        with np.errstate(all="ignore"):
            exact = a.astype(F64) * b + c
        exact = np.array(np.broadcast_to(exact, machine.active[waves].shape))
        if name.startswith("fma_mix_f32"):
            machine.write_vector(target, waves, finish(as_bits(exact.astype(F32))))
            return
        half = float_to_f16(exact)
        high = name == "fma_mixhi_f16"
        old = machine.read_vector(target, waves, needed=NO_LANE)
        kept = old & U32(0xFFFF if high else 0xFFFF0000)
        machine.write_vector(target, waves, kept | (half << U32(16) if high else half))

    return run


def _division(name, instruction, machine):
    """The three steps of an IEEE division, for numbers that need no scaling."""
    if name == "div_scale_f32":
        target, flag, *sources = instruction.operands

        def scale(waves):
            value, below, above = (machine.read_typed(o, waves, "f") for o in sources)
            value, below, above = np.broadcast_arrays(value, below, above)
            exponents = np.frexp(below)[1], np.frexp(above)[1]
            is_normal = np.isfinite(below) & np.isfinite(above) & (below != 0) & (above != 0)
            is_far = (np.abs(exponents[1] - exponents[0]) > 90) | (np.abs(exponents).max(0) > 120)
            if (is_normal & is_far & machine.active[waves]).any():
                raise EmulatorError("v_div_scale_f32: the scaling of very large and small numbers is not implemented")
            machine.write_vector(target, waves, as_bits(value))
            machine.write_mask(flag, waves, np.zeros(machine.active[waves].shape, bool))

        return scale
    if name == "div_fmas_f32":
        target, *sources = instruction.operands
        return lambda waves: machine.write_vector(
            target, waves, as_bits(fma(*(machine.read_typed(o, waves, "f") for o in sources)))
        )
    if name == "div_fixup_f32":
        target, *sources = instruction.operands

        def fix(waves):
            quotient, below, above = (machine.read_typed(o, waves, "f") for o in sources)
            special = (below == 0) | (above == 0) | ~np.isfinite(below) | ~np.isfinite(above)
            with np.errstate(all="ignore"):
                machine.write_vector(target, waves, as_bits(np.where(special, above / below, quotient)))

        return fix
    return None
