"""loongforge's Triton row kernels, compiled for an AMD GPU and run on the emulator with CPU tensors."""

import struct
from functools import cache
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loongforge.kernels import triton_rows
from tests.amdgpu.launch import Emulator
from tests.amdgpu.memory import GlobalMemory

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
        present = [tensor for tensor in tensors if tensor is not None]
        memory = GlobalMemory()
        for tensor in present:
            memory.add(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        numbers = (chunk.first_class, triton_rows._bits(factor), triton_rows._bits(softcap))
        arguments = [struct.pack("<Q", tensor.data_ptr()) for tensor in present]
        arguments += [struct.pack("<q", logits_TC.stride(0)), struct.pack("<i", logits_TC.shape[1])]
        arguments += [struct.pack("<q", number) for number in numbers]
        emulator = _emulator(compiled, self.arch)
        emulator.memory = memory
        explicit = emulator.code.kernels[compiled.metadata.name].explicit_arguments
        arguments += [bytes(a[".size"]) for a in explicit[len(arguments) :]]  # scratch pointers, unused
        threads = compiled.metadata.num_warps * emulator.wave_size
        grid = (logits_TC.shape[0], 1, 1)
        emulator.launch(compiled.metadata.name, grid, (threads, 1, 1), arguments, dynamic_lds=compiled.metadata.shared)
        self.launches.append((compiled.metadata.name, emulator.sha256))


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
