"""Run one kernel of a code object: set up registers, then execute until every wave has ended.

All waves that stand at the same instruction execute it together.  The order of the others does not matter for a right
kernel; a ``seed`` shuffles it, so that a wrong one is caught in more ways.
"""

import collections
import hashlib
import struct

import numpy as np

from tests.amdgpu import lds, memory_instructions, scalar_alu, vector_alu
from tests.amdgpu.code_object import CodeObject, Kernel, pack_arguments
from tests.amdgpu.errors import EmulatorError
from tests.amdgpu.instruction import EXEC, TTMP, VCC, Instruction, parse_listing
from tests.amdgpu.machine import Machine
from tests.amdgpu.memory import GlobalMemory
from tests.amdgpu.numeric import I64, U64, high32, low32
from tests.amdgpu.toolchain import disassemble

WAVES_AT_ONCE = 2048
MAX_STEPS = 1_000_000  # of one run; a kernel that loops for ever is an error
NO_EFFECT = [
    "s_nop",
    "s_waitcnt",
    "s_clause",
    "s_delay_alu",
    "s_waitcnt_depctr",
    "s_waitcnt_vscnt",
    "s_waitcnt_vmcnt",
    "s_waitcnt_lgkmcnt",
    "s_sleep",
    "s_set_inst_prefetch_distance",
    "s_inst_prefetch",
    "s_setprio",
    "s_sendmsg",
    "s_code_end",
    "s_barrier_signal",
    "s_icache_inv",
    "s_dcache_inv",
    "s_setreg_imm32_b32",
    "buffer_gl0_inv",
    "buffer_gl1_inv",
    "global_inv",
    "global_wb",
    "buffer_inv",
    "buffer_wbl2",
]
BARRIERS = ("s_barrier", "s_barrier_wait")
VECTOR_GRANULE = 8  # vector registers are allocated in blocks


class Emulator:
    """A code object on an emulated device; ``memory`` holds the buffers that its kernels may touch."""

    def __init__(self, elf: bytes, arch: str, memory: GlobalMemory | None = None, seed: int | None = None) -> None:
        self.code, self.arch = CodeObject(elf), arch
        self.sha256 = hashlib.sha256(elf).hexdigest()
        self.memory = memory or GlobalMemory()
        self.wave_size = 64 if arch.startswith("gfx9") else 32
        self.program = parse_listing(disassemble(elf, arch))
        self.random = np.random.default_rng(seed) if seed is not None else None
        self.executed: collections.Counter[str] = collections.Counter()  # instructions, once per group of waves

    def launch(self, name: str, grid, block, arguments: list[bytes], dynamic_lds: int = 0, detect_races=True) -> None:
        """Execute kernel ``name``; ``arguments`` are the explicit ones, packed, in order."""
        kernel = self.code.kernels[name]
        if kernel.scratch_bytes:
            raise EmulatorError(f"{name} needs scratch memory, which is not implemented")
        segment = pack_arguments(kernel, arguments, grid, block)
        address = self.memory.place(segment)
        num_threads = block[0] * block[1] * block[2]
        waves_per_group = -(-num_threads // self.wave_size)
        groups = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
        step = max(1, WAVES_AT_ONCE // waves_per_group)
        for start in range(0, len(groups), step):
            run = _Run(self, kernel, np.array(groups[start : start + step]), block, waves_per_group)
            run.set_registers(address, segment)
            run.lds = lds.LocalMemory(kernel.lds_bytes + dynamic_lds, run.group_of_wave, len(run.groups), detect_races)
            run.execute()
        self.memory.remove(address)


class _Run:
    """Some workgroups of a launch, executed together."""

    def __init__(self, emulator: Emulator, kernel: Kernel, groups, block, waves_per_group: int) -> None:
        self.emulator, self.kernel, self.groups, self.block = emulator, kernel, groups, block
        num_vector = kernel.metadata[".vgpr_count"] + VECTOR_GRANULE - 1
        num_vector -= num_vector % VECTOR_GRANULE
        self.group_of_wave = np.repeat(np.arange(len(groups)), waves_per_group)
        self.wave_in_group = np.tile(np.arange(waves_per_group), len(groups))
        self.machine = Machine(emulator.wave_size, len(self.group_of_wave), num_vector)
        self.functions: dict[int, object] = {}
        self.lds: lds.LocalMemory | None = None

    # -- start -----------------------------------------------------------------------------------------------------

    def set_registers(self, argument_address: int, segment: bytes) -> None:
        """https://llvm.org/docs/AMDGPUUsage.html, "Initial Kernel Execution State"."""
        machine, kernel, wave_size = self.machine, self.kernel, self.emulator.wave_size
        x, y, z = self.block
        thread = self.wave_in_group[:, None] * wave_size + np.arange(wave_size)[None]
        exists = thread < x * y * z
        work_item = (thread % x) | (thread // x % y << 10) | (thread // (x * y) << 20)
        machine.set_vector(0, np.where(exists, work_item, 0))
        mask = (exists.astype(U64) << machine.lanes).sum(1, dtype=U64)
        machine.set_scalar(EXEC, low32(mask))
        machine.set_scalar(EXEC + 1, high32(mask))
        machine.update_active(slice(None))
        register = 0
        if kernel.properties & 1:
            raise EmulatorError("a private segment buffer is not implemented")
        for bit, size in ((1, 2), (2, 2), (3, 2), (4, 2), (5, 2), (6, 1)):
            if kernel.properties & (1 << bit):
                if bit == 3:  # kernarg segment pointer
                    machine.set_scalar(register, argument_address & 0xFFFFFFFF)
                    machine.set_scalar(register + 1, argument_address >> 32)
                register += size
        for k in range(kernel.preload_dwords):
            (value,) = struct.unpack_from("<I", segment, 4 * k)
            machine.set_scalar(register + k, value)
        self._set_workgroup_ids(max(register + kernel.preload_dwords, kernel.num_user_sgprs))

    def _set_workgroup_ids(self, register: int) -> None:
        ids = self.groups[self.group_of_wave]
        if self.emulator.arch.startswith("gfx12"):
            self.machine.set_scalar(TTMP + 8, self.wave_in_group << 25)
            self.machine.set_scalar(TTMP + 9, ids[:, 0])
            self.machine.set_scalar(TTMP + 7, (ids[:, 1] & 0xFFFF) | (ids[:, 2] << 16))
            return
        for axis in range(3):
            if self.kernel.rsrc2 & (1 << (7 + axis)):
                self.machine.set_scalar(register, ids[:, axis])
                register += 1

    # -- execution -------------------------------------------------------------------------------------------------

    def execute(self) -> None:
        num_waves = self.machine.num_waves
        # With preloaded arguments the entry jumps over a prologue that loads them for older firmware: 256 bytes.
        entry = self.kernel.entry + (256 if self.kernel.preload_dwords else 0)
        self.counter = np.full(num_waves, entry, I64)
        self.steps = 0
        self.ended, self.waiting = np.zeros(num_waves, bool), np.zeros(num_waves, bool)
        while not self.ended.all():
            self._run_together(*self._choose(~self.ended & ~self.waiting))
            if self.waiting.any():
                self._release_barriers()

    def _choose(self, ready):
        """``(address, waves there)``: the lowest address, or a random one of a random part of its waves."""
        addresses = np.unique(self.counter[ready])
        random = self.emulator.random
        address = int(addresses[0] if random is None else random.choice(addresses))
        chosen = ready & (self.counter == address)
        if random is not None and chosen.sum() > 1 and random.random() < 0.5:
            part = chosen & (random.random(len(chosen)) < 0.5)
            chosen = part if part.any() else chosen
        return address, slice(None) if chosen.all() else np.nonzero(chosen)[0]

    def _run_together(self, address: int, waves) -> None:
        """Execute from ``address`` until the waves end, wait or part ways."""
        while True:
            instruction = self.emulator.program.get(address)
            if instruction is None:
                raise EmulatorError(f"program counter {address:#x} outside the program")
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise EmulatorError(f"no end after {MAX_STEPS} instructions")
            name, following = instruction.mnemonic, address + instruction.size
            self.emulator.executed[name] += 1
            if name == "s_endpgm":
                self.ended[waves] = True
                return
            if name in BARRIERS:
                self.counter[waves], self.waiting[waves] = following, True
                return
            if name == "s_branch" or name.startswith("s_cbranch"):
                target = instruction.branch_target
                taken = self._is_taken(name, waves)
                self.counter[waves] = np.where(taken, target, following)
                if self.emulator.random is not None or taken.any() != taken.all() or not isinstance(waves, slice):
                    return
                address = target if taken.all() else following
                continue
            self._step(instruction, waves)
            address = following

    def _is_taken(self, name: str, waves):
        machine = self.machine
        if name == "s_branch":
            return np.ones(machine.count(waves), bool)
        condition = name.removeprefix("s_cbranch_")
        if condition in ("scc0", "scc1"):
            return machine.scc[waves] == (condition == "scc1")
        register = {"vcc": VCC, "exec": EXEC}[condition.rstrip("nz")]
        is_zero = machine.scalar[register, waves] == 0
        if self.emulator.wave_size == 64:
            is_zero &= machine.scalar[register + 1, waves] == 0
        return ~is_zero if condition.endswith("nz") else is_zero

    def _step(self, instruction: Instruction, waves) -> None:
        if instruction.address not in self.functions:
            self.functions[instruction.address] = self._decode(instruction)
        function = self.functions[instruction.address]
        if function is None:
            return
        try:
            function(waves)
        except EmulatorError as error:
            raise EmulatorError(f"{instruction.address:#x} `{instruction.text}`: {error}") from None

    def _decode(self, instruction: Instruction):
        name = instruction.mnemonic
        if name in NO_EFFECT or name.startswith("s_wait_"):
            return None
        if name.startswith(("s_load", "s_buffer_load", "global_", "buffer_")):
            return memory_instructions.decode(instruction, self.machine, self.emulator.memory)
        if name.startswith("ds_"):
            return lds.decode(instruction, self.machine, self.lds)
        if name.startswith("s_"):
            return scalar_alu.decode(instruction, self.machine)
        if name.startswith("v_"):
            return vector_alu.decode(instruction, self.machine)
        raise EmulatorError(f"not implemented: {instruction.text}")

    def _release_barriers(self) -> None:
        groups = len(self.groups)
        waiting = np.bincount(self.group_of_wave, weights=self.waiting, minlength=groups)
        alive = np.bincount(self.group_of_wave, weights=~self.ended, minlength=groups)
        complete = (waiting > 0) & (waiting == alive)
        for group in np.nonzero(complete)[0]:
            if len(np.unique(self.counter[self.waiting & (self.group_of_wave == group)])) > 1:
                raise EmulatorError("waves of one workgroup meet at different barriers")
        self.lds.pass_barrier(complete)
        self.waiting &= ~complete[self.group_of_wave]
