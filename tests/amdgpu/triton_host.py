"""loongforge's Triton row kernels, compiled for an AMD GPU and run on the emulator with CPU tensors."""

import struct
from functools import cache
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loongforge.kernels import triton_losses, triton_rows
from tests.amdgpu.launch import Emulator
from tests.amdgpu.memory import GlobalMemory

TOKEN_LOSSES_KERNEL = triton_losses.token_losses_kernel
TYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class EmulatedTritonRowKernels(triton_rows.TritonRowKernels):
    """The product's kernels and argument preparation; compilation for ``arch`` and the launch are done here."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.launches: list[tuple[str, str]] = []

    def accumulate(self, *args, **kwargs) -> None:
        with mock.patch.object(triton_rows, "_launch", self._launch):
            super().accumulate(*args, **kwargs)

    def gradient_(self, *args, **kwargs) -> None:
        with mock.patch.object(triton_rows, "_launch", self._launch):
            super().gradient_(*args, **kwargs)

    def _launch(self, kernel, config, logits_TC, chunk, per_token) -> None:
        mode, factor, softcap = triton_rows._transform_arguments(chunk.transform)
        tensors = (logits_TC, *triton_rows._vectors(chunk, per_token))
        dtype = TYPE_NAMES[str(logits_TC.dtype).removeprefix("torch.")]
        absent = tuple(name for name, t in zip(kernel.arg_names, tensors, strict=False) if t is None)
        compiled = compile_kernel(kernel, config, self.arch, dtype, mode, absent)
        numbers = [struct.pack("<q", logits_TC.stride(0)), struct.pack("<i", logits_TC.shape[1])]
        numbers += [
            struct.pack("<q", number)
            for number in (chunk.first_class, triton_rows._bits(factor), triton_rows._bits(softcap))
        ]
        self._run(compiled, logits_TC.shape[0], [tensor for tensor in tensors if tensor is not None], numbers)

    def token_losses(self, *args):
        with mock.patch.object(triton_losses, "token_losses_kernel", _Launcher(self)):
            return triton_losses.token_losses(*args)

    def _run(self, compiled, num_programs, tensors, numbers) -> None:
        emulator = _emulator(compiled, self.arch)
        emulator.memory = GlobalMemory()
        for tensor in tensors:
            emulator.memory.add(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        arguments = [*(struct.pack("<Q", tensor.data_ptr()) for tensor in tensors), *numbers]
        explicit = emulator.code.kernels[compiled.metadata.name].explicit_arguments
        arguments += [bytes(a[".size"]) for a in explicit[len(arguments) :]]  # scratch pointers, unused
        threads = compiled.metadata.num_warps * emulator.wave_size
        name, grid = compiled.metadata.name, (num_programs, 1, 1)
        emulator.launch(name, grid, (threads, 1, 1), arguments, dynamic_lds=compiled.metadata.shared)
        self.launches.append((name, emulator.sha256))


class _Launcher:
    """In the place of ``token_losses_kernel``."""

    def __init__(self, kernels: EmulatedTritonRowKernels) -> None:
        self.kernels = kernels

    def __getitem__(self, grid):
        def launch(*arguments, BLOCK, enable_fp_fusion):
            tensors, numbers = arguments[:7], [struct.pack("<q", number) for number in arguments[7:]]
            self.kernels._run(compile_token_losses(self.kernels.arch, BLOCK), grid[0], tensors, numbers)

        return launch


@cache
def compile_token_losses(arch: str, block: int):
    kernel, wave = TOKEN_LOSSES_KERNEL, 64 if arch.startswith("gfx9") else 32
    types = {"target_ptr": "*i64", "ignored_ptr": "*i1", "no_class_ptr": "*i1", "BLOCK": "constexpr"}
    signature = {name: types.get(name, "*fp32" if name.endswith("_ptr") else "i64") for name in kernel.arg_names}
    return triton.compile(
        ASTSource(kernel, signature, {"BLOCK": block}),
        target=GPUTarget("hip", arch, wave),
        options={"enable_fp_fusion": True},
    )


@cache
def compile_kernel(kernel, config, arch: str, dtype: str, mode: int, absent: tuple[str, ...]):
    """What the launcher would compile: nothing is specialised on the value of an argument."""
    wave = 64 if arch.startswith("gfx9") else 32
    constants = {**config.meta(wave), "TRANSFORM": mode, **dict.fromkeys(absent)}
    num_warps = constants.pop("num_warps")
    types = {"logits_ptr": f"*{dtype}", "label_ptr": "*i64", "num_classes": "i32"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*fp32" if name.endswith("_ptr") else "i64")
        for name in kernel.arg_names
    }
    return triton.compile(
        ASTSource(kernel, signature, constants),
        target=GPUTarget("hip", arch, wave),
        options={"num_warps": num_warps, "enable_fp_fusion": True},
    )


@cache
def _emulator(compiled, arch: str) -> Emulator:
    return Emulator(compiled.asm["hsaco"], arch)
