import doctest
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_run_ledger.rules import failures
from agent_run_ledger.rules.canonical import decode, encode
from agent_run_ledger.rules.failures import describe, matches, revive, text


class InvoiceNotFound(Exception):
    def __init__(self, number: int, *, where: str) -> None:
        super().__init__(f"no invoice {number} in {where}")
        self.number = number


class NoSuchInvoice(InvoiceNotFound):
    pass


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        if cause is None:
            raise error
        raise error from cause
    except BaseException as caught:
        return caught


# --- describe ---------------------------------------------------------------------------------------------------------


def test_a_failure_is_described_by_type_module_message_bases_and_traceback() -> None:
    record = describe(raised(NoSuchInvoice(7, where="<acme>")))
    assert record["type"] == "NoSuchInvoice"
    assert record["module"] == __name__
    assert record["message"] == "no invoice 7 in <acme>"
    assert record["bases"] == [
        f"{__name__}.NoSuchInvoice",
        f"{__name__}.InvoiceNotFound",
        "builtins.Exception",
        "builtins.BaseException",
    ]
    assert "test_failures.py" in record["traceback"]
    assert record["cause"] is None
    assert decode(encode(record)) == record


def test_causes_are_nested_as_python_would_print_them() -> None:
    error = ValueError("while handling")
    error.__context__ = KeyError("k")
    assert describe(error)["cause"]["type"] == "KeyError"
    error.__suppress_context__ = True  # raise ... from None
    assert describe(error)["cause"] is None
    explicit = describe(raised(ValueError("a"), raised(OSError("b"), KeyError("c"))))
    assert [text(explicit), text(explicit["cause"]), text(explicit["cause"]["cause"])] == [
        "ValueError: a",
        "OSError: b",
        "KeyError: 'c'",
    ]


def test_a_long_chain_of_causes_is_cut_and_a_cycle_is_no_chain() -> None:
    error: BaseException = ValueError("0")
    for number in range(1, 20):
        error = raised(ValueError(str(number)), error)
    record, depth = describe(error), 0
    while record["cause"] is not None:
        record, depth = record["cause"], depth + 1
    assert depth == failures.MAX_CAUSES == 5

    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert describe(one)["cause"]["message"] == "other"
    assert describe(one)["cause"]["cause"] is None


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


class Silent(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]


class Sly(str):
    def __len__(self) -> int:
        return 0

    def __format__(self, *_: Any) -> str:
        raise RuntimeError("no")

    def encode(self, *_: Any) -> bytes:
        raise RuntimeError("no")


class Slippery(Exception):
    def __str__(self) -> str:
        return Sly("slippery \ud800")


class Endless(Exception):
    def __str__(self) -> str:
        return str(self)


class Hiding(type):
    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError("no")


class Hidden(Exception, metaclass=Hiding):
    pass


class Masked(Exception):
    @property
    def __cause__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no")

    @property
    def __traceback__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no")


def odd_name() -> BaseException:
    cls = type("Odd", (Exception,), {"__module__": 7, "__qualname__": "Od\ud800d" + "x" * 9000})
    made: BaseException = cls("m")
    return made


def sly_name() -> BaseException:
    made: BaseException = type("Odd", (Exception,), {"__module__": Sly("m"), "__qualname__": Sly("Odd")})("m")
    return made


def without_module() -> BaseException:
    """Made by code that runs in no module."""
    names: dict[str, Any] = {}
    exec("made = type('Odd', (Exception,), {})('m')", {}, names)
    error: BaseException = names["made"]
    return error


@pytest.mark.parametrize(
    "error",
    [
        Unprintable(), Silent(), Slippery(), Endless(), Hidden("h"), Masked("m"), odd_name(), sly_name(), without_module(),
        UnicodeDecodeError("utf8", b"\xff", 0, 1, "r"),
    ],
)  # fmt: skip
def test_a_hostile_exception_is_described_too(error: BaseException) -> None:
    record = describe(raised(error))
    assert decode(encode(record)) == record
    assert isinstance(text(record), str)


@given(st.text(st.characters()), st.integers(0, 100))
def test_any_message_is_made_storable_and_kept_within_its_limit(message: str, limit: int) -> None:
    record = describe(ValueError(message), message_limit=limit)
    assert len(record["message"]) <= limit
    assert decode(encode(record)) == record
    if len(message) <= limit:
        assert record["message"] == message.encode("utf-8", "replace").decode()


def test_a_huge_message_keeps_its_beginning_and_a_huge_traceback_its_end() -> None:
    record = describe(ValueError("start" + "x" * 10**7), message_limit=2000)
    assert len(record["message"]) == 2000
    assert record["message"].startswith("start")
    assert "10000005 characters" in record["message"]

    def even(levels: int) -> None:
        odd(levels - 1)

    def odd(levels: int) -> None:  # two, because a traceback folds calls of one function
        if levels > 0:
            even(levels - 1)
        raise ValueError("the end")

    try:
        even(300)
    except ValueError as error:
        record = describe(error, traceback_limit=500)
    assert len(record["traceback"]) == 500
    assert record["traceback"].endswith('raise ValueError("the end")\n')


def test_text_is_type_and_message_or_just_the_type() -> None:
    assert text(describe(ValueError("bad"))) == "ValueError: bad"
    assert text(describe(TimeoutError())) == "TimeoutError"
    assert text({}) == "Exception"


# --- revive -----------------------------------------------------------------------------------------------------------


class NeedsItsConstructor(Exception):
    def __init__(self, number: int) -> None:
        self.number = number

    def __str__(self) -> str:
        return f"invoice {self.number} is gone"


class OwnNew(ValueError):
    def __new__(cls, a: int, b: int) -> "OwnNew":
        return super().__new__(cls, f"{a} {b}")

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class OwnOSError(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "gone", path)


class Slotted(Exception):
    __slots__ = ("n",)

    def __init__(self, n: int) -> None:
        self.n = n
        super().__init__(f"n is {n}")


ERRORS: list[BaseException] = [
    InvoiceNotFound(7, where="acme"),
    NeedsItsConstructor(3),
    OwnNew(1, 2),
    OwnOSError("/x"),
    Slotted(4),
    KeyError("id"),
    KeyError(),
    OSError(2, "No such file", "a"),
    TimeoutError(),
    UnicodeDecodeError("utf8", b"\xff", 0, 1, "reason"),
    SyntaxError("bad", ("f", 1, 2, "x")),
    ImportError("no", name="n"),
    json.JSONDecodeError("msg", "doc", 0),
    ExceptionGroup("several", [ValueError("a"), KeyError("b")]),
    StopIteration(3),
    SystemExit(2),
]


@pytest.mark.parametrize("error", ERRORS)
def test_a_declared_exception_is_revived_with_its_text_and_without_its_constructor(error: BaseException) -> None:
    record, cause = decode(encode(describe(error))), RuntimeError("the record")
    revived = revive(type(error), record, cause)
    assert isinstance(revived, type(error))
    assert type(revived).__qualname__ == type(error).__qualname__
    assert str(revived) == str(error)
    assert revived.__cause__ is cause
    assert matches(describe(revived), type(error))
    with pytest.raises(type(error)):
        raise revived


@pytest.mark.parametrize("error", [InvoiceNotFound(7, where="acme"), OwnNew(1, 2), KeyError("id")])
def test_the_class_itself_is_revived_where_its_text_allows(error: BaseException) -> None:
    assert type(revive(type(error), describe(error), None)) is type(error)


def test_no_constructor_of_the_user_runs() -> None:
    class Explosive(Exception):
        def __new__(cls, *_: Any) -> "Explosive":
            raise AssertionError("constructed")

        def __init__(self, *_: Any) -> None:
            raise AssertionError("initialised")

        def __init_subclass__(cls) -> None:
            raise AssertionError("subclassed")

    revived = revive(Explosive, {"message": "kept"}, None)
    assert type(revived) is Explosive
    assert str(revived) == "kept"
    assert revived.args == ("kept",)


def test_a_class_that_cannot_be_printed_is_revived_all_the_same() -> None:
    class Sealed(Unprintable):
        def __init_subclass__(cls) -> None:
            raise RuntimeError("no subclasses")

    assert type(revive(Sealed, {"message": "m"}, None)) is Sealed
    assert str(revive(Unprintable, {"message": "m"}, None)) == "m"


def test_a_description_matches_its_class_and_those_above_it_by_qualified_name() -> None:
    record = describe(NoSuchInvoice(1, where="x"))
    assert all(matches(record, cls) for cls in (NoSuchInvoice, InvoiceNotFound, Exception))
    assert not any(
        matches(record, cls) for cls in (ValueError, type("NoSuchInvoice", (Exception,), {"__module__": "m"}))
    )
    assert not matches({}, Exception)
    assert not matches({"bases": "builtins.Exception"}, Exception)


def test_describing_without_a_traceback_imports_nothing() -> None:
    program = (
        "import sys; from agent_run_ledger.rules import failures as f; f.text(f.describe(ValueError('x'))); "
        "print(sorted({'traceback', 'typing', 'socket', 'json'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, check=True
    )
    assert done.stdout == b"[]\n"


def test_the_examples_in_the_docstrings_run() -> None:
    result = doctest.testmod(failures)
    assert (result.failed, result.attempted > 0) == (0, True)
