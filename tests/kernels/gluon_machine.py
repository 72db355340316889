"""A small model of the machine that Gluon programs: it runs the Gluon kernels' own Python on a CPU.

Groups of warps are threads.  What is asynchronous happens as late as the program allows, and shared memory starts as
NaN and becomes NaN when a load into it is issued, so that a missing wait shows in the results:

* a load lands some time after it was issued, then completes its barrier's bytes;
* a product reads its operands when it is waited for;
* a store reads the staging buffer when it is waited for.

A barrier that is never completed fails the run after ``PATIENCE_S``.
"""

import struct
import threading
import time
import types

import torch

PATIENCE_S = 20.0
_here = threading.local()


class Barrier:
    """An mbarrier: a phase ends when its arrivals and its bytes are all there."""

    def __init__(self):
        self._changed = threading.Condition()
        self._count = None

    def init(self, count):
        self._count = self._arrivals = count
        self._bytes = self._completed = 0

    def _update(self, arrivals=0, num_bytes=0):
        with self._changed:
            self._arrivals -= arrivals
            self._bytes += num_bytes
            assert self._arrivals >= 0, "more arrivals than the barrier was initialised for"
            if self._arrivals == 0 and self._bytes == 0:
                self._arrivals = self._count
                self._completed += 1
                self._changed.notify_all()

    def expect(self, num_bytes):
        self._update(arrivals=1, num_bytes=num_bytes)

    def arrive(self, count):
        self._update(arrivals=count)

    def land(self, num_bytes):
        self._update(num_bytes=-num_bytes)

    def wait(self, phase):
        assert phase in (0, 1)
        with self._changed:
            done = self._changed.wait_for(lambda: self._completed % 2 != phase, PATIENCE_S)
        assert done, "deadlock: a barrier was never completed"


class Shared:
    """A shared-memory buffer; ``index`` and ``permute`` are views."""

    def __init__(self, tensor):
        self.tensor = tensor

    def index(self, i):
        assert 0 <= i < len(self.tensor)
        return Shared(self.tensor[i])

    def permute(self, order):
        return Shared(self.tensor.permute(order))

    def store(self, value):
        assert value.dtype == self.tensor.dtype
        self.tensor.copy_(value)


class Barriers(list):
    def index(self, i):
        return self[i]


class Pointer:
    def __init__(self, tensor, offset=0):
        assert tensor.is_contiguous()
        self.flat, self.offset = tensor.view(-1), offset

    def __add__(self, offset):
        return Pointer(self.flat, self.offset + offset)


class Descriptor:
    """A tensor descriptor: blocks of a matrix, zeros past its end."""

    def __init__(self, host):
        self.matrix, self.block, self.dtype = host.base, host.block_shape, host.base.dtype

    def _clip(self, corner):
        row, column = (int(number) for number in corner)
        part = self.matrix[row : row + self.block[0], column : column + self.block[1]]
        return part, tuple(slice(0, size) for size in part.shape)

    def read(self, corner, into):
        part, clipped = self._clip(corner)
        into.zero_()
        into[clipped] = part

    def write(self, corner, value):
        part, clipped = self._clip(corner)
        part.copy_(value[clipped])


def _load(pointer, mask=None, other=None):
    index = torch.as_tensor(pointer.offset)
    if mask is None:
        return pointer.flat[index]
    values = torch.full(index.shape, other, dtype=pointer.flat.dtype)
    values[mask] = pointer.flat[index[mask]]
    return values


def _store(pointer, value, mask):
    pointer.flat[pointer.offset[mask]] = value[mask]


def _warp_specialize(functions_and_arguments, worker_num_warps, worker_num_regs):
    assert len(functions_and_arguments) == len(worker_num_warps) + 1 == len(worker_num_regs) + 1
    failures, program = [], _here.program

    def run(function, arguments):
        _here.program = program
        _here.products, _here.stores = [], []
        try:
            with torch.no_grad():
                function(*arguments)
            assert not _here.products and not _here.stores, "left without waiting for a product or a store"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in functions_and_arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _allocate(dtype, shape, layout):
    if dtype == torch.int64:
        return Barriers(Barrier() for _ in range(shape[0]))
    return Shared(torch.full(shape, torch.nan, dtype=dtype))


def _copy_in(descriptor, corner, barrier, result):
    result.tensor.fill_(torch.nan)
    assert list(result.tensor.shape) == list(descriptor.block)

    def land():
        time.sleep(1e-4)
        with torch.no_grad():
            descriptor.read(corner, result.tensor)
        barrier.land(result.tensor.numel() * result.tensor.element_size())

    threading.Thread(target=land).start()


def _copy_out(descriptor, corner, source):
    _here.stores.append(lambda: descriptor.write(corner, source.tensor))


def _store_wait(pendings):
    while len(_here.stores) > pendings:
        _here.stores.pop(0)()


def _zeros(shape, dtype, layout):
    zeros = torch.zeros(shape, dtype=dtype)
    zeros.is_constant = True  # several products may start from the same zeros
    return zeros


def _product(hidden, weight, acc, is_async):
    assert is_async
    if hasattr(acc, "is_constant"):
        acc = acc.clone()
    _here.products.append(lambda: acc.add_(hidden.tensor.float() @ weight.tensor.float()))
    return acc


def _product_wait(num_outstanding, deps):
    while len(_here.products) > num_outstanding:
        time.sleep(1e-3)  # slower than the loads, which therefore fill the ring
        _here.products.pop(0)()
    return deps[0] if len(deps) == 1 else deps


def _shared_functions():
    return {
        "where": torch.where, "exp2": torch.exp2, "abs": torch.abs, "load": _load, "store": _store,
        "max": lambda x, axis: x.amax(axis), "sum": lambda x, axis: x.sum(axis), "minimum": min,
        "maximum": torch.maximum,
        "cdiv": lambda a, b: (a + b - 1) // b,
        "float32": torch.float32, "int32": torch.int32, "int64": torch.int64,
    }  # fmt: skip


def _fma(x, y, z):
    """Rounded once: a float64 product of float32 numbers is exact."""
    return (x.double() * y + z.double()).float()


def _static_assert(condition, message):
    assert condition, message


def _language():
    return types.SimpleNamespace(
        **_shared_functions(), fma=_fma, static_range=range, static_assert=_static_assert,
        SliceLayout=lambda axis, layout: None,
        arange=lambda start, stop, layout: torch.arange(start, stop), zeros=_zeros,
        program_id=lambda axis: _here.program[0], num_programs=lambda axis: _here.program[1],
        allocate_shared_memory=_allocate, warp_specialize=_warp_specialize,
    )  # fmt: skip


class Kernel:
    """``kernel[grid](...)`` runs the kernel's Python function once per program."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, enable_fp_fusion, **constants):
            names = self.function.__code__.co_varnames
            values = [_argument(name, value) for name, value in zip(names, arguments, strict=False)]
            for program in range(grid[0]):
                _here.program = (program, grid[0])
                self.function(*values, **constants)

        return launch


def _argument(name, value):
    if hasattr(value, "block_shape"):
        return Descriptor(value)
    if isinstance(value, torch.Tensor):
        return Pointer(value)
    if name.endswith("_bits"):
        return struct.unpack("<d", struct.pack("<q", value))[0]
    return value if value is None else torch.tensor(value)


def install(monkeypatch, gluon_ring, gluon_tiles, triton_rows, triton_tiles):
    """Put the machine in the place of the hardware for the kernels of ``gluon_tiles``."""
    plain = {"tl": types.SimpleNamespace(**_shared_functions()), "LOG2_E": triton_rows.LOG2_E.value}
    plain |= {name: getattr(triton_rows, name).value for name in ("IDENTITY", "SCALE", "SOFTCAP")}
    for module in (triton_rows, triton_tiles):
        for name in ("_tanh", "_transform", "_offset", "_gradient", "_tile_position", "_weighted_tile"):
            if hasattr(getattr(module, name, None), "fn"):
                plain[name] = types.FunctionType(getattr(module, name).fn.__code__, plain, name)
    hardware = plain | {
        "gl": _language(),
        "_float_from_bits": lambda bits, dtype: bits,
        "mbarrier": types.SimpleNamespace(
            init=lambda barrier, count: barrier.init(count), expect=lambda barrier, size: barrier.expect(size),
            arrive=lambda barrier, count, pred=True: barrier.arrive(count) if pred else None,
            wait=lambda barrier, phase: barrier.wait(phase),
        ),
        "_copy_in": _copy_in, "_copy_out": _copy_out, "tma": types.SimpleNamespace(store_wait=_store_wait),
        "warpgroup_mma": _product, "warpgroup_mma_wait": _product_wait,
        "fence_async_shared": lambda: None,
    }  # fmt: skip
    for module in (gluon_ring, gluon_tiles):
        for name, value in list(vars(module).items()):
            if name in hardware:
                monkeypatch.setattr(module, name, hardware[name])
            elif hasattr(value, "fn"):
                monkeypatch.setattr(module, name, Kernel(value.fn) if name.endswith("_kernel") else value.fn)
            elif isinstance(getattr(value, "value", None), int):
                monkeypatch.setattr(module, name, Number(value.value))


class Number(int):
    """A compile-time integer, which host code asks for its ``value``."""

    @property
    def value(self):
        return int(self)
