"""AMD code objects: ELF64, the metadata note (msgpack), kernel descriptors, and packing of kernel arguments.

Layouts: https://llvm.org/docs/AMDGPUUsage.html, "Code Object V5 Metadata" and "Kernel Descriptor".
"""

import struct
from dataclasses import dataclass
from typing import Any

LOAD, NOTE = 1, 4  # ELF program header types
METADATA_NOTE = 32  # NT_AMDGPU_METADATA
SYMBOL_SECTIONS = (2, 11)  # SHT_SYMTAB, SHT_DYNSYM
KERNEL_ARGUMENT_ALIGNMENT = 16


@dataclass(frozen=True)
class Kernel:
    """One kernel: the fields of its descriptor that a launch needs, and its metadata."""

    name: str
    metadata: dict[str, Any]
    entry: int
    rsrc2: int
    properties: int  # kernel_code_properties: which user SGPRs there are
    preload_dwords: int  # kernel arguments that arrive in SGPRs
    lds_bytes: int
    scratch_bytes: int
    argument_bytes: int

    @property
    def num_user_sgprs(self) -> int:
        return (self.rsrc2 >> 1) & 31

    @property
    def explicit_arguments(self) -> list[dict[str, Any]]:
        return [a for a in self.metadata[".args"] if not a[".value_kind"].startswith("hidden")]


class CodeObject:
    """A parsed code object: loaded ``image`` and ``kernels`` by name."""

    def __init__(self, elf: bytes) -> None:
        if elf[:4] != b"\x7fELF" or elf[4] != 2:
            raise ValueError("not an ELF64 file")
        self.elf = elf
        segments, metadata = self._program_headers()
        self.image = bytearray(max(address + size for address, _, _, size in segments))
        for address, offset, file_size, _ in segments:
            self.image[address : address + file_size] = elf[offset : offset + file_size]
        symbols = self._symbols()
        self.kernels = {m[".name"]: self._kernel(m, symbols[m[".symbol"]]) for m in metadata["amdhsa.kernels"]}

    def _program_headers(self):
        table, _, _, _, entry_size, count = struct.unpack_from("<QQIHHH", self.elf, 32)
        segments, metadata = [], None
        for k in range(count):
            kind, _, offset, address, _, file_size, size, _ = struct.unpack_from(
                "<IIQQQQQQ", self.elf, table + k * entry_size
            )
            if kind == LOAD:
                segments.append((address, offset, file_size, size))
            elif kind == NOTE:
                metadata = self._metadata(offset, offset + file_size) or metadata
        return segments, metadata

    def _metadata(self, position: int, end: int):
        while position < end:
            name_size, size, kind = struct.unpack_from("<III", self.elf, position)
            position += 12
            name = self.elf[position : position + name_size].rstrip(b"\0")
            position += -(-name_size // 4) * 4
            if name == b"AMDGPU" and kind == METADATA_NOTE:
                return MessagePack(self.elf[position : position + size]).value()
            position += -(-size // 4) * 4
        return None

    def _symbols(self) -> dict[str, int]:
        table, _, _, _, _, entry_size, count = struct.unpack_from("<QIHHHHH", self.elf, 40)
        sections = [struct.unpack_from("<IIQQQQIIQQ", self.elf, table + k * entry_size) for k in range(count)]
        symbols = {}
        for _, kind, _, _, offset, size, link, _, _, _ in sections:
            if kind in SYMBOL_SECTIONS:
                strings = sections[link][4]
                for k in range(size // 24):
                    name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", self.elf, offset + 24 * k)
                    end = self.elf.index(b"\0", strings + name)
                    symbols[self.elf[strings + name : end].decode()] = value
        return symbols

    def _kernel(self, metadata, address: int) -> Kernel:
        lds_bytes, scratch_bytes, argument_bytes = struct.unpack_from("<III", self.image, address)
        (entry,) = struct.unpack_from("<q", self.image, address + 16)
        (rsrc2,) = struct.unpack_from("<I", self.image, address + 52)
        properties, preload = struct.unpack_from("<HH", self.image, address + 56)
        return Kernel(
            name=metadata[".name"],
            metadata=metadata,
            entry=address + entry,
            rsrc2=rsrc2,
            properties=properties,
            preload_dwords=preload & 0x7F,
            lds_bytes=lds_bytes,
            scratch_bytes=scratch_bytes,
            argument_bytes=argument_bytes,
        )


def pack_arguments(kernel: Kernel, values: list[bytes], grid, block) -> bytes:
    """The kernel-argument segment: explicit ``values`` in order, and the hidden arguments that are known."""
    explicit = kernel.explicit_arguments
    if len(explicit) != len(values):
        raise ValueError(f"{kernel.name} takes {len(explicit)} arguments, got {len(values)}")
    # Compilers load whole aligned vectors, so the segment is padded as a runtime pads it.
    size = -(-kernel.argument_bytes // KERNEL_ARGUMENT_ALIGNMENT) * KERNEL_ARGUMENT_ALIGNMENT
    segment = bytearray(size)
    for argument, value in zip(explicit, values, strict=True):
        if argument[".size"] != len(value):
            raise ValueError(f"argument {argument} of {kernel.name} got {len(value)} bytes")
        segment[argument[".offset"] : argument[".offset"] + len(value)] = value
    for argument in kernel.metadata[".args"]:
        kind, axis = argument[".value_kind"][:-2], "xyz".find(argument[".value_kind"][-1])
        if kind == "hidden_block_count":
            struct.pack_into("<I", segment, argument[".offset"], grid[axis])
        elif kind == "hidden_group_size":
            struct.pack_into("<H", segment, argument[".offset"], block[axis])
    return bytes(segment)


class MessagePack:
    """Reader of the part of msgpack that the metadata note uses."""

    NUMBERS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
    CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
    SIZES = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I", 0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}

    def __init__(self, data: bytes) -> None:
        self.data, self.position = data, 0

    def _unpack(self, form: str) -> int:
        (number,) = struct.unpack_from(form, self.data, self.position)
        self.position += struct.calcsize(form)
        return number

    def value(self) -> Any:
        tag = self._unpack(">B")
        if tag <= 0x7F:
            return tag
        if tag >= 0xE0:
            return tag - 256
        if tag in self.CONSTANTS:
            return self.CONSTANTS[tag]
        if tag in self.NUMBERS:
            return self._unpack(self.NUMBERS[tag])
        if tag <= 0x8F or tag in (0xDE, 0xDF):
            size = tag & 15 if tag <= 0x8F else self._unpack(self.SIZES[tag])
            return {self.value(): self.value() for _ in range(size)}
        if tag <= 0x9F or tag in (0xDC, 0xDD):
            size = tag & 15 if tag <= 0x9F else self._unpack(self.SIZES[tag])
            return [self.value() for _ in range(size)]
        if tag <= 0xBF or tag in (0xD9, 0xDA, 0xDB):
            size = tag & 31 if tag <= 0xBF else self._unpack(self.SIZES[tag])
            text = self.data[self.position : self.position + size].decode()
            self.position += size
            return text
        raise ValueError(f"msgpack tag {tag:#x} in a metadata note")
