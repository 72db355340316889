"""Registers of all waves of a launch at once: ``[register, wave, lane]`` and ``[register, wave]`` arrays.

Instructions act on a selection of waves: ``slice(None)`` for all of them (no copies) or an index array.  What was
written is shadowed: reading a register that nothing wrote, in a lane that is active, is an error.
"""

from contextlib import contextmanager

import numpy as np

from tests.amdgpu.errors import EmulatorError
from tests.amdgpu.instruction import EXEC, NULL, Operand
from tests.amdgpu.numeric import TYPES, U32, U64, high32, join64, low32

NUM_SCALARS = 130
NO_LANE = np.zeros((1, 1), bool)
POISON = U32(0x7FC0DEAD)  # a NaN, so that unwritten data that escapes the shadow is seen too


class Machine:
    def __init__(self, wave_size: int, num_waves: int, num_vector_registers: int) -> None:
        self.wave_size, self.num_waves = wave_size, num_waves
        self.lanes = np.arange(wave_size, dtype=U64)[None]
        self.vector = np.full((num_vector_registers, num_waves, wave_size), POISON, U32)
        self.scalar = np.full((NUM_SCALARS, num_waves), POISON, U32)
        self.scc = np.zeros(num_waves, bool)
        self.active = np.zeros((num_waves, wave_size), bool)  # exec, one bool per lane
        self._vector_written = np.zeros(self.vector.shape, bool)
        self._scalar_written = np.zeros(self.scalar.shape, bool)
        # Registers written in every lane of every wave need no look at the shadow.
        self._vector_whole = np.zeros(num_vector_registers, bool)
        self._all_active = False
        self._deferred: list[tuple] | None = None
        self.scalar[EXEC : EXEC + 2] = 0
        self._scalar_written[EXEC : EXEC + 2] = True

    def count(self, waves) -> int:
        return self.num_waves if isinstance(waves, slice) else len(waves)

    # -- scalar registers ------------------------------------------------------------------------------------------

    def read_scalar(self, operand: Operand, waves, dword: int = 0):
        """uint32 [waves]."""
        if operand.kind == "s":
            if operand.register == NULL:
                return np.zeros(self.count(waves), U32)
            register = operand.register + dword
            if not self._scalar_written[register, waves].all():
                raise EmulatorError(f"reads {operand.text}, of which dword {dword} was never written")
            return self.scalar[register, waves]
        if operand.kind == "constant":
            sign = -1 if operand.value < 0 and not operand.is_float else 0
            return np.full(self.count(waves), (sign if dword else operand.value) & 0xFFFFFFFF, U32)
        if operand.kind == "scc":
            return self.scc[waves].astype(U32)
        raise EmulatorError(f"{operand.text} is not a scalar operand")

    def copy_scalar(self, target: Operand, source: Operand, waves, dword: int = 0) -> None:
        """A move: compilers move undefined registers about, so it passes on what was never written."""
        if source.kind != "s" or source.register == NULL:
            self.write_scalar(target, waves, self.read_scalar(source, waves, dword), dword)
            return
        register = source.register + dword
        written = self._scalar_written[register, waves].copy()
        self.write_scalar(target, waves, self.scalar[register, waves].copy(), dword)
        if target.register != NULL:
            self._scalar_written[target.register + dword, waves] = written

    def read_scalar64(self, operand: Operand, waves):
        return join64(self.read_scalar(operand, waves, 0), self.read_scalar(operand, waves, 1))

    def write_scalar(self, operand: Operand, waves, value, dword: int = 0) -> None:
        if operand.register == NULL and operand.kind == "s":
            return
        if operand.kind != "s":
            raise EmulatorError(f"{operand.text} is not a scalar destination")
        register = operand.register + dword
        self.scalar[register, waves] = value
        self._scalar_written[register, waves] = True
        if register in (EXEC, EXEC + 1):
            self.update_active(waves)

    def write_scalar64(self, operand: Operand, waves, value) -> None:
        self.write_scalar(operand, waves, low32(value), 0)
        self.write_scalar(operand, waves, high32(value), 1)

    def set_scalar(self, register: int, value) -> None:
        """Initial value of a scalar register, in all waves."""
        self.scalar[register] = value
        self._scalar_written[register] = True

    def update_active(self, waves) -> None:
        bits = self.scalar[EXEC, waves].astype(U64)
        if self.wave_size == 64:
            bits = join64(self.scalar[EXEC, waves], self.scalar[EXEC + 1, waves])
        self.active[waves] = self._lanes_of(bits)
        self._all_active = bool(self.active.all())

    # -- lane masks in scalar registers ----------------------------------------------------------------------------

    def _lanes_of(self, bits):
        return ((bits[:, None] >> self.lanes) & U64(1)).astype(bool)

    def read_mask(self, operand: Operand, waves):
        """bool [waves, lanes]."""
        if self.wave_size == 64:
            return self._lanes_of(self.read_scalar64(operand, waves))
        return self._lanes_of(self.read_scalar(operand, waves).astype(U64))

    def write_mask(self, operand: Operand, waves, mask) -> None:
        bits = (mask.astype(U64) << self.lanes).sum(-1, dtype=U64)
        if operand.register == NULL and operand.kind == "s":
            return
        if self.wave_size == 64:
            self.write_scalar64(operand, waves, bits)
        else:
            self.write_scalar(operand, waves, low32(bits))

    # -- vector registers ------------------------------------------------------------------------------------------

    def read_vector(self, operand: Operand, waves, dword: int = 0, kind: str = "u", *, needed=None):
        """uint32 [waves, lanes], or [waves, 1] of a scalar.  ``kind="f"`` applies the source modifiers.

        ``needed`` says which lanes must have been written; the active ones by default.
        """
        if operand.kind == "v":
            value = self._read_vector_register(operand, waves, operand.register + dword, needed)
        else:
            value = self.read_scalar(operand, waves, dword)[:, None]
        if operand.half:
            value = value >> U32(16) if operand.half == "h" else value & U32(0xFFFF)
        if kind == "f":
            if operand.absolute:
                value = value & U32(0x7FFFFFFF)
            if operand.negate:
                value = value ^ U32(0x80000000)
        elif operand.absolute or (operand.negate and operand.kind != "constant"):
            raise EmulatorError(f"source modifier of {operand.text} on an integer operand")
        return value

    def _read_vector_register(self, operand: Operand, waves, register: int, needed):
        if register >= len(self.vector):
            raise EmulatorError(f"reads v{register}, beyond the {len(self.vector)} allocated registers")
        if not self._vector_whole[register]:
            lanes = self.active[waves] if needed is None else needed
            if (lanes & ~self._vector_written[register, waves]).any():
                raise EmulatorError(f"reads {operand.text}, in which v{register} was never written")
        return self.vector[register, waves]

    def read_typed(self, operand: Operand, waves, kind: str):
        """The operand as uint32, int32 or float32."""
        return np.ascontiguousarray(self.read_vector(operand, waves, kind=kind)).view(TYPES[kind])

    def read_vector64(self, operand: Operand, waves):
        return join64(self.read_vector(operand, waves, 0), self.read_vector(operand, waves, 1))

    def copy_vector(self, target: Operand, source: Operand, waves, dword: int = 0, source_dword: int | None = None):
        """A move, for which the remark at :meth:`copy_scalar` holds too."""
        source_dword = dword if source_dword is None else source_dword
        register = source.register + source_dword
        defined = None
        if source.kind == "v" and register < len(self.vector) and not self._vector_whole[register]:
            defined = self._vector_written[register, waves].copy()
            value = self.read_vector(source, waves, source_dword, needed=NO_LANE)
        elif source.kind == "s" and source.register != NULL and not self._scalar_written[register, waves].all():
            defined = self._scalar_written[register, waves][:, None]
            value = self.scalar[register, waves][:, None]
        else:
            value = self.read_vector(source, waves, source_dword)
        self.write_vector(target, waves, value, dword, defined=defined)

    def write_vector(self, operand: Operand, waves, value, dword: int = 0, mask=None, defined=None) -> None:
        """Write where ``mask`` (the active lanes by default); a half operand keeps the other half.

        ``defined`` says in which lanes the value is one that something wrote; in all by default.
        """
        if operand.kind != "v":
            raise EmulatorError(f"{operand.text} is not a vector destination")
        register = operand.register + dword
        if register >= len(self.vector):
            raise EmulatorError(f"writes v{register}, beyond the {len(self.vector)} allocated registers")
        if self._deferred is not None:
            self._deferred.append((operand, waves, np.array(value), dword, mask, defined))
            return
        lanes = self.active[waves] if mask is None else mask
        value = np.broadcast_to(value, lanes.shape)
        if operand.half:
            old = self.vector[register, waves]
            if operand.half == "h":
                value = (old & U32(0xFFFF)) | (value << U32(16))
            else:
                value = (old & U32(0xFFFF0000)) | (value & U32(0xFFFF))
        if isinstance(waves, slice):
            np.copyto(self.vector[register], value, where=lanes)
        else:
            merged = self.vector[register, waves]
            np.copyto(merged, value, where=lanes)
            self.vector[register, waves] = merged
        self._note_written(register, waves, lanes, mask, defined)

    def _note_written(self, register: int, waves, lanes, mask, defined) -> None:
        if defined is None and isinstance(waves, slice) and mask is None and self._all_active:
            self._vector_whole[register] = True
        elif defined is not None:
            if self._vector_whole[register]:
                self._vector_written[register] = True
                self._vector_whole[register] = False
            self._vector_written[register, waves] = np.where(lanes, defined, self._vector_written[register, waves])
        elif not self._vector_whole[register]:
            self._vector_written[register, waves] |= lanes

    @contextmanager
    def deferred_writes(self):
        """Vector registers written inside change at the end, as the two instructions of a pair do."""
        self._deferred = []
        try:
            yield
            writes = self._deferred
        finally:
            self._deferred = None
        for write in writes:
            self.write_vector(*write)

    def write_vector64(self, operand: Operand, waves, value) -> None:
        value = np.array(np.broadcast_to(value, self.active[waves].shape))
        self.write_vector(operand, waves, low32(value), 0)
        self.write_vector(operand, waves, high32(value), 1)

    def set_vector(self, register: int, value) -> None:
        """Initial value of a vector register, in all lanes."""
        self.vector[register] = value
        self._vector_whole[register] = True
