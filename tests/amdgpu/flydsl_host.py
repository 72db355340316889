"""FlyDSL's own compiled launchers on the emulator.

FlyDSL turns a launcher into host code that calls ``mgpuModuleLoad``, ``mgpuLaunchKernel`` and so on.  Here its
execution engine is built with those symbols bound to Python callbacks: the host code, the packing of arguments and the
code object are FlyDSL's, only the device is not.
"""

import contextlib
import ctypes
import threading

from tests.amdgpu.errors import EmulatorError
from tests.amdgpu.launch import Emulator
from tests.amdgpu.memory import GlobalMemory
from tests.amdgpu.toolchain import prepare_flydsl

prepare_flydsl()


class Device:
    """One emulated device: its memory, the code objects loaded on it and what was launched."""

    def __init__(self, arch: str, seed: int | None = None) -> None:
        self.arch, self.seed, self.memory = arch, seed, GlobalMemory()
        self.launches: list[tuple[str, str]] = []  # (kernel, sha256 of its code object)
        self.error: BaseException | None = None

    def add_tensor(self, tensor) -> None:
        storage = tensor.untyped_storage()
        self.memory.add(storage.data_ptr(), storage.nbytes())

    def launch(self, emulator: Emulator, name: str, grid, block, dynamic_lds: int, parameters) -> None:
        sizes = [argument[".size"] for argument in emulator.code.kernels[name].explicit_arguments]
        pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        arguments = [ctypes.string_at(pointers[k], size) for k, size in enumerate(sizes)]
        emulator.memory = self.memory
        emulator.launch(name, grid, block, arguments, dynamic_lds)
        self.launches.append((name, emulator.sha256))


# The engines live in FlyDSL's compiled functions and outlive a device, so the callbacks are bound once per process and
# look up the device of the moment.
_devices: list[Device] = []
_modules: dict[int, bytes] = {}
_functions: dict[int, tuple[int, str]] = {}
_emulators: dict[tuple[int, str], Emulator] = {}
_lock = threading.RLock()


def _load_module(data, size) -> int:
    _modules[len(_modules) + 1] = ctypes.string_at(data, size)
    return len(_modules)


def _get_function(module, name) -> int:
    _functions[len(_functions) + 1] = (module, name.decode())
    return len(_functions)


def _launch_kernel(function, gx, gy, gz, bx, by, bz, dynamic_lds, stream, parameters, extra, count) -> None:
    device = _devices[-1]
    if device.error is not None:
        return
    try:
        module, name = _functions[function]
        key = (module, device.arch)
        if key not in _emulators:
            _emulators[key] = Emulator(_modules[module], device.arch, seed=device.seed)
        device.launch(_emulators[key], name, (gx, gy, gz), (bx, by, bz), dynamic_lds, parameters)
    except BaseException as error:  # cannot pass through compiled code: raised again by `device`
        device.error = error


def _callbacks():
    pointer, size, number = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int32
    launch = (None, pointer, *[size] * 6, number, pointer, pointer, pointer, ctypes.c_size_t)
    return {
        "mgpuModuleLoad": ctypes.CFUNCTYPE(pointer, pointer, ctypes.c_size_t)(_load_module),
        "mgpuModuleUnload": ctypes.CFUNCTYPE(None, pointer)(lambda module: None),
        "mgpuModuleGetFunction": ctypes.CFUNCTYPE(pointer, pointer, ctypes.c_char_p)(_get_function),
        "mgpuLaunchKernel": ctypes.CFUNCTYPE(*launch)(_launch_kernel),
        "mgpuStreamCreate": ctypes.CFUNCTYPE(pointer)(lambda: 1),
        "mgpuStreamDestroy": ctypes.CFUNCTYPE(None, pointer)(lambda stream: None),
        "mgpuStreamSynchronize": ctypes.CFUNCTYPE(None, pointer)(lambda stream: None),
    }


_CALLBACKS = _callbacks()


def _ensure_engine(artifact) -> None:
    """``CompiledArtifact._ensure_engine`` with the runtime's symbols bound to the emulator."""
    from flydsl._mlir import ir
    from flydsl._mlir.execution_engine import ExecutionEngine
    from flydsl.compiler.jit_function import _create_mlir_context

    if artifact._engine is not None:
        return
    context = _create_mlir_context()
    with context:
        module = ir.Module.parse(artifact._ir_text)
        engine = ExecutionEngine(module, opt_level=0)
        for name, callback in _CALLBACKS.items():
            engine.raw_register_runtime(name, ctypes.cast(callback, ctypes.c_void_p))
        engine.initialize()
    artifact._module, artifact._engine, artifact._jit_module, artifact._ctx = module, engine, None, context


@contextlib.contextmanager
def device(arch: str, tensors, seed: int | None = None):
    """Inside, a compiled FlyDSL launcher called with addresses of ``tensors`` (on the CPU) runs on the emulator."""
    from flydsl.compiler.jit_executor import CompiledArtifact

    emulated = Device(arch, seed)
    for tensor in tensors:
        emulated.add_tensor(tensor)
    with _lock:
        original = CompiledArtifact._ensure_engine
        CompiledArtifact._ensure_engine = _ensure_engine
        _devices.append(emulated)
        try:
            yield emulated
        finally:
            _devices.pop()
            CompiledArtifact._ensure_engine = original
    if emulated.error is not None:
        raise emulated.error


def code_object(compiled) -> bytes:
    """The ELF inside a compiled FlyDSL function: the object of the ``gpu.binary`` in its lowered module."""
    from flydsl._mlir import ir
    from flydsl._mlir.dialects import gpu
    from flydsl.compiler.jit_function import _create_mlir_context

    with _create_mlir_context():
        module = ir.Module.parse(compiled._keepalive._ir_text)
        for operation in module.body.operations:
            if operation.operation.name == "gpu.binary":
                return bytes(gpu.ObjectAttr(ir.ArrayAttr(operation.operation.attributes["objects"])[0]).object)
    raise EmulatorError("a compiled FlyDSL function without a gpu.binary")
