"""What is needed of `typing` at run time, without its import and without reading annotations: a fresh process saves some 5 ms."""

from __future__ import annotations

from collections import namedtuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
    from typing import Protocol as Protocol
    from typing import TypedDict as TypedDict
    from typing import assert_never as assert_never
    from typing import cast as cast
else:

    def cast(kind, value):
        """The value, which type checkers are told is of this kind."""
        return value

    def assert_never(value):
        """Type checkers prove that nobody comes here."""
        raise AssertionError(f"nobody thought of {value!r}")

    class Protocol:
        """What an object has to have. Only type checkers hold it to that."""

    class TypedDict:
        """Which keys a dict may have. Only type checkers hold it to that."""

        def __init_subclass__(cls, total=True):
            pass

    class _Made(type):
        """Makes a named tuple of a class statement, as `typing.NamedTuple` does; annotations stay the texts that they are."""

        def __new__(cls, name, bases, namespace):
            fields = namespace.get("__annotations__", {})
            defaults = [namespace[field] for field in fields if field in namespace]
            made = namedtuple(name, fields, defaults=defaults, module=namespace["__module__"])
            made.__annotations__ = made.__new__.__annotations__ = dict(fields)
            for each, value in namespace.items():
                if each not in fields and each not in _MADE:
                    setattr(made, each, value)
            return made

    _MADE = frozenset({"__annotations__", "__module__"})

    NamedTuple = type.__new__(_Made, "NamedTuple", (), {})
