"""Sizes of output layers: by name, as TOKENSxHIDDENxVOCAB, or as three numbers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from loongforge.errors import UsageError

LARGEST = 1 << 31
"""Sizes are below it."""


@dataclass(frozen=True)
class HeadShape:
    """One output layer: tokens, hidden size, vocabulary rows."""

    name: str
    tokens: int
    hidden: int
    vocab: int

    @classmethod
    def of_sizes(cls, tokens: int, hidden: int, vocab: int) -> HeadShape:
        """A shape that has no name of its own."""
        return cls(f"{tokens}x{hidden}x{vocab}", tokens, hidden, vocab)

    def __str__(self) -> str:
        return f"T={self.tokens} H={self.hidden} V={self.vocab}"


SHAPES = {
    shape.name: shape
    for shape in (
        HeadShape("llama3-8b", 8192, 4096, 128256),
        HeadShape("seed-pr", 8192, 2048, 128256),
        HeadShape("dsv3", 16384, 7168, 129280),
        HeadShape("dsv3-tp8", 16384, 7168, 16160),
        HeadShape("llama2", 8192, 4096, 32000),
    )
}


def parse_shape(text: str) -> HeadShape:
    """A name of :data:`SHAPES` or ``TOKENSxHIDDENxVOCAB``."""
    if text in SHAPES:
        return SHAPES[text]
    sizes = text.split("x")
    if len(sizes) == 3 and all(size.isdecimal() and int(size) > 0 for size in sizes):
        return HeadShape.of_sizes(*map(int, sizes))
    known = ", ".join(SHAPES)
    raise UsageError(f"a shape is one of {known} or TOKENSxHIDDENxVOCAB such as 4096x2048x32000, got {text!r}")


def positive(text: str) -> int:
    """Type of a flag that takes a whole number from 1 to 2**31 - 1."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) < LARGEST):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 2**31 - 1, got {text!r}")
    return int(text)


def add_size_flags(parser: argparse.ArgumentParser, tokens: str = "tokens that the layer sees") -> None:
    """``--tokens``, ``--hidden`` and ``--vocab``."""
    parser.add_argument("--tokens", type=positive, metavar="T", help=tokens)
    parser.add_argument("--hidden", type=positive, metavar="H", help="width of the hidden states")
    parser.add_argument("--vocab", type=positive, metavar="V", help="size of the vocabulary")


def shapes_of(options: argparse.Namespace, default: str) -> list[HeadShape]:
    """Shapes by name and the one of the three flags, together; ``default`` where none is given."""
    sizes = {name: getattr(options, name) for name in ("tokens", "hidden", "vocab")}
    absent = [f"--{name}" for name, size in sizes.items() if size is None]
    if 0 < len(absent) < len(sizes):
        raise UsageError(f"--tokens, --hidden and --vocab belong together: {' and '.join(absent)} not given")
    named = [parse_shape(text) for text in options.shapes]
    if not absent:
        named.append(HeadShape.of_sizes(**sizes))
    return named or [parse_shape(default)]
