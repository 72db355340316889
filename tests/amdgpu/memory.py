"""Global memory: real host addresses, of which only registered buffers may be touched."""

import collections
import ctypes

import numpy as np

from tests.amdgpu.errors import EmulatorError

DWORD = 4


class GlobalMemory:
    """Buffers at their own host addresses.

    Hardware fetches whole dwords, so the last one of a buffer may be read to its end; a store must stay inside.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, tuple[int, np.ndarray, bool]] = {}  # address -> size, bytes to the last dword's end
        self._starts = np.empty(0, np.int64)
        self._kept: list = []
        self.traffic: collections.Counter[tuple[str, int]] = collections.Counter()  # bytes by action and buffer

    def add(self, address: int, size: int, writable: bool = True) -> None:
        if not size:
            return
        old_size, _, old_writable = self._buffers.get(address, (0, None, False))
        size, writable = max(size, old_size), writable or old_writable
        readable = -(-size // DWORD) * DWORD
        view = np.ctypeslib.as_array((ctypes.c_uint8 * readable).from_address(address))
        self._buffers[address] = (size, view, writable)
        self._starts = np.array(sorted(self._buffers), np.int64)

    def place(self, data: bytes, alignment: int = 256) -> int:
        """Copy ``data`` into a new read-only buffer; its address."""
        block = ctypes.create_string_buffer(len(data) + alignment)
        address = -(-ctypes.addressof(block) // alignment) * alignment
        ctypes.memmove(address, data, len(data))
        self._kept.append(block)
        self.add(address, len(data), writable=False)
        return address

    def remove(self, address: int) -> None:
        del self._buffers[address]
        self._starts = np.array(sorted(self._buffers), np.int64)

    def load(self, addresses, size: int):
        """uint8 [..., size]."""
        result = np.zeros((*addresses.shape, size), np.uint8)
        if addresses.size:
            for chosen, offsets, (_, view, _) in self._split(addresses, size, "load"):
                result[chosen] = view[offsets[..., None] + np.arange(size)]
        return result

    def store(self, addresses, data) -> None:
        if addresses.size:
            size = data.shape[-1]
            for chosen, offsets, (limit, view, writable) in self._split(addresses, size, "store"):
                if not writable:
                    raise EmulatorError("store to a read-only buffer")
                if int(offsets.max()) + size > limit:
                    raise EmulatorError(
                        f"out-of-bounds store at byte {int(offsets.max())} of a buffer of {limit} bytes"
                    )
                view[offsets[..., None] + np.arange(size)] = data[chosen]

    def _split(self, addresses, size: int, what: str):
        """Accesses by buffer: ``(selection, offsets in the buffer, buffer)``."""
        addresses = np.asarray(addresses).astype(np.int64)
        if not len(self._starts):
            raise EmulatorError(f"out-of-bounds {what}: no buffer is registered")
        owners = self._starts[np.maximum(np.searchsorted(self._starts, addresses, side="right") - 1, 0)]
        for start in np.unique(owners):
            buffer = self._buffers[int(start)]
            chosen = owners == start
            offsets = addresses[chosen] - start
            low, high = int(offsets.min()), int(offsets.max()) + size
            if low < 0 or high > len(buffer[1]):
                raise EmulatorError(
                    f"out-of-bounds {what}: bytes {low} to {high} relative to the nearest buffer, of {buffer[0]} bytes"
                )
            self.traffic[what, int(start)] += size * offsets.size
            yield chosen, offsets, buffer
