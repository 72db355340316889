"""loongforge's FlyDSL row kernels with CPU tensors, on an emulated AMD GPU."""

import hashlib
from functools import cache

from loongforge.arch import Arch
from loongforge.kernels.amd_flydsl import FlyDSLRowKernels, addresses
from loongforge.kernels.flydsl.compile import launcher
from tests.amdgpu import flydsl_host


class EmulatedFlyDSLRowKernels(FlyDSLRowKernels):
    """Everything is the product's but the last step: the launch goes to the emulator.

    Every launch asserts that the code object which ran is the one that was compiled.
    """

    def __init__(self, arch: str, seed: int | None = None, compile_variant=launcher) -> None:
        self.arch, self.seed, self.compile_variant = arch, seed, compile_variant
        self.launches: list[tuple[str, str]] = []
        self.traffic: list[tuple[int, int]] = []  # bytes of logits read and written by each launch

    def _arch(self, device) -> Arch:
        return Arch("amd", self.arch)

    def _launcher(self, variant):
        return self.compile_variant(variant)

    def _launch(self, launch, device, tensors, numbers) -> None:
        present = [tensor for tensor in tensors if tensor is not None]
        with flydsl_host.device(self.arch, present, self.seed) as emulated:
            launch(*addresses(tensors), *numbers, 0)
        assert [sha256 for _, sha256 in emulated.launches] == [_sha256(launch)], "another code object ran"
        self.launches += emulated.launches
        logits = tensors[0].untyped_storage().data_ptr()
        self.traffic.append(tuple(emulated.memory.traffic[action, logits] for action in ("load", "store")))


@cache
def _sha256(compiled) -> str:
    return hashlib.sha256(flydsl_host.code_object(compiled)).hexdigest()
