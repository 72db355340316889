"""An emulator of AMD GPUs for tests: it executes the code objects that FlyDSL and Triton compile, on a CPU.

What runs is the real ELF code object with its real kernel descriptor and arguments, instruction by instruction
(decoded by ``llvm-objdump``), vectorised with numpy over all waves of a launch.  gfx942 and gfx950 run in wave64, gfx11
and gfx12 in wave32.  Errors, all raised as :class:`tests.amdgpu.errors.EmulatorError`: access outside a registered
buffer, write to a read-only one, LDS out of bounds, LDS race between waves, read of LDS or of a register that nothing
wrote, waves that meet at different barriers, a kernel without an end, an instruction that is not implemented.

It does not model: time, missing wait instructions, races in global memory, alignment faults, denormal modes, the last
bit of hardware exp, log and rcp (numpy's are used), double rounding of fused multiply-add (2**-29 of results differ in
the last bit).  Matrix instructions, scratch and flat accesses to LDS are not implemented.

    errors, toolchain      the exception; llvm-22 tools and what to install
    code_object            ELF, metadata, kernel descriptor, kernel arguments
    instruction            a line of llvm-objdump -> Instruction
    numeric, vector_tables arithmetic on numpy arrays; one-result vector instructions as tables
    machine                registers, exec mask, what was written
    scalar_alu, vector_alu, cross_lane, memory, memory_instructions, lds
                           instruction -> function that executes it
    launch                 the loop over program counters, barriers, workgroups
    flydsl_host, triton_host, rows
                           run FlyDSL's own launchers, Triton kernels, and loongforge's row kernels on it
"""
