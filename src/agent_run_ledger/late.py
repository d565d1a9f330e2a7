"""A list whose items are made when somebody looks at them: many programs that take a run over never do."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_filling = threading.RLock()
"""Held by who makes items: what was done to a list by another thread is not to be lost."""


class Late(list[T]):
    """A list in every respect. It is filled by `make` as soon as anything but its length is asked of it, or done to it."""

    def __init__(self, make: Callable[[], list[T]], length: int) -> None:
        super().__init__()
        self._make: Callable[[], list[T]] | None = make
        self._length = length

    def fill(self) -> None:
        """Make the items now, if they are not made yet."""
        if self._make is not None:
            with _filling:
                if self._make is not None:
                    list.__init__(self, self._make())
                    self._make = None

    def filling(self) -> Callable[[], None]:
        """What fills it, as long as somebody has it."""
        of = weakref.ref(self)

        def fill() -> None:
            if (late := of()) is not None:
                late.fill()

        return fill

    def __len__(self) -> int:
        return self._length if self._make is not None else super().__len__()

    def __radd__(self, other: list[T]) -> list[T]:
        self.fill()
        return other.__add__(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, (list(self),)


def _filled(name: str) -> Callable[..., Any]:
    method = getattr(list, name)

    def looks(self: Late[Any], *args: Any, **kwargs: Any) -> Any:
        self.fill()
        for other in args:  # whose items are read without asking it
            if isinstance(other, Late):
                other.fill()
        return method(self, *args, **kwargs)

    return looks


_COMPARED = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__", "__sizeof__"}
_OWN = set(vars(list)) - set(vars(object)) - {"__class_getitem__"}
for _name in (_OWN | _COMPARED) - set(vars(Late)):
    setattr(Late, _name, _filled(_name))
