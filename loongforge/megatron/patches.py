"""Attributes replaced in someone else's modules and classes, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MISSING = object()


class Patches:
    """Remembers what it replaced; :meth:`undo` restores it in reverse order."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._when_undone: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``, which may so far be inherited or missing; each name once."""
        self._replaced.append((owner, name, _own(owner, name), value))
        setattr(owner, name, value)

    @property
    def in_place(self) -> bool:
        """Whether anything is replaced."""
        return bool(self._replaced)

    def when_undone(self, call: Callable[[], None]) -> None:
        """Something that :meth:`undo` does too."""
        self._when_undone.append(call)

    def undo(self) -> None:
        """Restore everything; ``RuntimeError``, changing nothing, where someone else patched on top."""
        for owner, name, _, value in self._replaced:
            if _own(owner, name) is not value:
                where = getattr(owner, "__name__", repr(owner))
                raise RuntimeError(f"{where}.{name} was replaced again after loongforge did: undo that first")
        while self._when_undone:
            self._when_undone.pop()()
        while self._replaced:
            owner, name, original, _ = self._replaced.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _own(owner: Any, name: str) -> Any:
    """``owner.name`` where owner itself holds it; static methods and the like stay wrapped."""
    try:
        return vars(owner).get(name, _MISSING)
    except TypeError:  # __slots__
        return getattr(owner, name, _MISSING)
