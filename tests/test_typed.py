"""Named tuples that are made without `typing` are those that `typing` makes."""

from __future__ import annotations

import copy
import inspect
import typing

import pytest

from agent_run_ledger import typed


def made_by(base: typing.Any) -> typing.Any:
    class Made(base):  # type: ignore[misc]
        """What it is."""

        run_id: str
        at: float | None = None
        after: tuple[str, ...] = ()

        @property
        def name(self) -> str:
            return f"{self.run_id} at {self.at}"

        def later(self, seconds: float) -> typing.Any:
            return self._replace(at=(self.at or 0.0) + seconds)

        @classmethod
        def of(cls, run_id: str) -> typing.Any:
            return cls(run_id, 1.0)

    return Made


OURS, THEIRS = made_by(typed.NamedTuple), made_by(typing.NamedTuple)


@pytest.mark.parametrize(
    "look",
    [
        lambda made: made("run"),
        lambda made: made("run", at=2.0, after=("1",)),
        lambda made: made._make(["run", 1.0, ()]),
        lambda made: made.of("run").later(2.0),
        lambda made: made("run").name,
        lambda made: repr(made("run")),
        lambda made: made("run") == ("run", None, ()),
        lambda made: copy.deepcopy(made("run", 1.0)),
        lambda made: hash(made("run")),
        lambda made: (
            made._fields,
            made._field_defaults,
            made.__doc__,
            made.__name__,
            made.__module__,
            made.__mro__[1:],
        ),
        lambda made: made("run")._asdict(),
        lambda made: [parameter.default for parameter in inspect.signature(made).parameters.values()],
        lambda made: list(made.__annotations__),
        lambda made: hasattr(made("run"), "__dict__"),
    ],
    ids=range(14),
)
def test_a_named_tuple_is_as_that_of_typing(look: typing.Callable[[typing.Any], typing.Any]) -> None:
    assert look(OURS) == look(THEIRS)


def test_a_named_tuple_is_not_changed_and_not_made_of_too_little() -> None:
    with pytest.raises(AttributeError):
        OURS("run").run_id = "other"
    with pytest.raises(TypeError):
        OURS()
    with pytest.raises(TypeError):
        OURS("run", 1.0, (), 4)
