"""Whether an argument fits the annotation of its parameter: what must pass, what must not, and that asking harms nothing."""

# ruff: noqa: UP006, UP007, UP045 - older spellings are annotations, too

from __future__ import annotations

import dataclasses
import doctest
import enum
import subprocess
import sys
import typing
import uuid
import warnings
from collections import OrderedDict, abc, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Optional,
    Protocol,
    Required,
    TypedDict,
    TypeVar,
    Union,
    runtime_checkable,
)

import pydantic
import pytest
import typing_extensions
from hypothesis import given
from hypothesis import strategies as st

from agent_run_ledger.rules import checks
from agent_run_ledger.rules.checks import misfit
from support.processes import environment

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Priority(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Line:
    text: str
    amount: int = 0
    box: tuple[int, int] | None = None


@dataclasses.dataclass
class Invoice:
    number: str
    lines: list[Line]
    color: Color = Color.RED


@dataclasses.dataclass
class Box(Generic[T]):
    content: T


@dataclasses.dataclass
class Positive:
    number: int

    def __post_init__(self) -> None:
        if self.number <= 0:
            raise ValueError("a positive number is wanted")


class Item(pydantic.BaseModel):
    name: str
    amount: int = 0
    tags: list[str] = []


class Point(NamedTuple):
    x: int
    y: int


class Message(TypedDict):
    role: Literal["user", "assistant"]
    content: str
    name: NotRequired[str]


class Loose(TypedDict, total=False):
    id: Required[int]
    note: str


class Node(TypedDict):
    value: int
    children: list[Node]
    parent: NotRequired[Node | None]


class Pair(TypedDict, Generic[T]):
    left: T
    right: T


class Unresolved(TypedDict):
    known: int
    unknown: NotRequired[NoSuchClass]  # noqa: F821


class Open(typing_extensions.TypedDict, closed=False):
    id: int


class Extra(typing_extensions.TypedDict, extra_items=int):
    id: str


class Closed(typing_extensions.TypedDict, closed=True):
    id: int


class UserId(str): ...


class Plain: ...


class Quacks(Protocol):
    def quack(self) -> None: ...


@runtime_checkable
class Closes(Protocol):
    def close(self) -> None: ...


class TypeAliasType:
    """What `type Json = ...` makes in newer Pythons: it may hold itself."""

    __value__: Any


Json, Tree, Knot = TypeAliasType(), TypeAliasType(), TypeAliasType()
Json.__value__ = dict[str, Json] | list[Json] | str | int | float | bool | None
Tree.__value__ = dict[str, Annotated[Tree, 1]] | int
Knot.__value__ = list[Annotated[Knot, []]] | dict[str, Annotated[Knot, []]]

CustomerId = NewType("CustomerId", int)
Tags = typing_extensions.TypeAliasType("Tags", list[T], type_params=(T,))

NOW = datetime(2026, 10, 1, tzinfo=UTC)
UUID = uuid.UUID(int=7)
FIT = [
    # nothing can be said
    (Any, object()), (object, 1), (T, "x"), ("NoSuchClass", 3), (typing.ForwardRef("X"), 3), (Callable[[int], str], len),
    (Callable, 3), (type[int], int), (type, int), (typing.TextIO, sys.stdout), (Quacks, object()), (3, "three"), (..., 1),
    (typing.Self, 3), (typing.Never, 3), (typing.ForwardRef("X") | None, 3), (list[typing.ForwardRef("X")], [1]),
    # None, unions, literals
    (None, None), (type(None), None), (Optional[int], None), (int | None, 3), (Union[int, str], "x"), (int | str, 1),
    (Optional[list[int]], [1]), (int | Any, object()), (Literal["a", 1, None], None), (Literal["a", 1], 1),
    (Literal[Color.RED], Color.RED), (Literal[Color.RED], "red"), (Literal[True], True), (Literal[b"x"], b"x"),
    # what is wrapped
    (Annotated[int, "euros"], 3), (Annotated[int, []], 3), (CustomerId, 3), (Required[int], 3), (Final[int], 3),
    (list[Annotated[CustomerId, []]], [1]), (Json, {"a": [1, None, {"b": 2.5}]}), (Tree, {"a": {"b": 1}}), (Tags[int], [1]),
    # scalars
    (int, 1), (int, Priority.LOW), (float, 1), (float, 1.5), (complex, 1), (bool, True), (str, "x"),
    (str, UserId("x")), (bytes, b"x"), (bytes, bytearray(b"x")), (date, NOW), (datetime, NOW), (Decimal, Decimal(1)),
    (uuid.UUID, UUID), (Path, Path("x")), (Plain, Plain()),
    # containers
    (list, [1]), (list[int], []), (list[int], [1, 2]), (typing.List, [1]), (typing.List[int], [1]), (list[Any], [object()]),
    (tuple, (1, "a")), (tuple[int, ...], (1, 2)), (tuple[int, ...], ()), (tuple[int, str], (1, "a")), (tuple[()], ()),
    (typing.Tuple, (1, 2)), (typing.Tuple[int, str], (1, "a")), (tuple[int, *tuple[str, ...]], (1, "a", "b")),
    (set[int], {1}), (frozenset[str], frozenset("ab")), (abc.Set[int], {1}), (dict, {}), (dict[str, int], {"a": 1}),
    (dict[str, Any], {"a": object()}), (dict[int, list[str]], {1: ["a"]}), (typing.Dict[str, int], {"a": 1}),
    (OrderedDict[str, int], OrderedDict(a=1)), (defaultdict[str, int], defaultdict(int)), (deque[int], deque([1])),
    (Sequence[int], [1]), (Sequence[int], (1,)), (Sequence[int], range(3)), (Sequence[str], "text"), (Sequence[str], ""),
    (Sequence[int], b"ab"), (Iterable[int], {1: "a"}), (Iterable[str], {"a": 1}.keys()), (Collection[int], {1}),
    (Mapping[str, int], {"a": 1}), (Mapping[str, int], OrderedDict(a=1)), (Iterator[int], iter(["not looked at"])),
    (abc.MutableSequence[int], [1]), (Sequence, [1]), (typing.Sequence, [1]), (typing.Mapping, {}),
    # a list is how JSON writes them
    (tuple[int, int], [1, 2]), (tuple[str, ...], ["a"]), (set[str], ["a"]), (frozenset[int], [1]), (abc.Set[int], [1]), (tuple, []),
    # classes: an object, or what one can be built from
    (Color, Color.RED), (Color, "red"), (Priority, 2), (list[Color], ["red", Color.BLUE]), (Color | None, "blue"),
    (Line, Line("a")), (Line, {"text": "a"}), (Line, {"text": "a", "box": [1, 2]}), (Line, {"text": "a", "box": (1, 2)}),
    (Invoice, {"number": "1", "lines": [{"text": "a", "amount": 2}], "color": "blue"}),
    (Invoice, {"number": "1", "lines": [Line("a")]}), (list[Line], [Line("a"), {"text": "b"}]), (Line | None, {"text": "a"}),
    (Box[int], {"content": 1}), (Box[int], Box(1)), (Positive, {"number": 1}),
    (Item, Item(name="a")), (Item, {"name": "a"}), (list[Item], [{"name": "a", "tags": ["x"]}]),
    (Point, Point(1, 2)), (Point, (1, 2)), (UserId, UserId("x")), (UserId, "x"), (Closes, sys.stdout),
    # TypedDicts
    (Message, {"role": "user", "content": "x"}), (Message, {"role": "user", "content": "x", "name": "n"}),
    (list[Message], [{"role": "user", "content": "x"}]), (Loose, {"id": 1}), (Loose, {"id": 1, "note": "x"}),
    (Node, {"value": 1, "children": [{"value": 2, "children": []}], "parent": None}), (Pair[int], {"left": 1, "right": 2}),
    (Unresolved, {"known": 1}), (Unresolved, {"known": 1, "unknown": object()}), (Open, {"id": 1, "other": 2}),
    (Extra, {"id": "a", "other": 2}), (Closed, {"id": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("annotation", "value"), FIT, ids=range(len(FIT)))
def test_what_a_correct_program_or_a_models_json_passes_fits(annotation: object, value: object) -> None:
    assert misfit(annotation, value) is None


MISFIT = [
    (None, 0, "expected None, found int"),
    (int, "1", "expected int, found str"),
    (int, True, "expected int, found bool"),
    (int, 1.0, "expected int, found float"),
    (int, None, "expected int, found None"),
    (float, True, "expected float, found bool"),
    (float, "1.5", "expected float, found str"),
    (complex, True, "expected complex, found bool"),
    (bool, 1, "expected bool, found int"),
    (str, 1, "expected str, found int"),
    (str, b"x", "expected str, found bytes"),
    (bytes, "x", "expected bytes, found str"),
    (Annotated[int, "euros"], "x", "expected int, found str"),
    (Annotated[int, []], "x", "expected int, found str"),
    (CustomerId, "x", "expected int, found str"),
    (int | None, "x", "expected int | None, found str"),
    (Optional[int], True, "expected int | None, found bool"),
    (Optional[list[int]], ["x"], "[0]: expected int, found str"),
    (list[int] | dict[str, int], ["x"], "[0]: expected int, found str"),
    (list[int] | list[str], [None], "[0]: expected int, found None, or [0]: expected str, found None"),
    (Message | Loose, {"role": "user", "id": 1}, "'content' is missing, or Loose has no key 'role'"),
    (Literal["a", "b"], "c", "expected one of 'a', 'b', found 'c'"),
    (Literal[1, 2], True, "expected one of 1, 2, found True"),
    (Literal[True], 1, "expected one of True, found 1"),
    (Literal["a"], "b" * 100, f"expected one of 'a', found '{'b' * 40}'…"),
    (Literal[Color.RED], "blue", "expected one of 'red', found 'blue'"),
    (Color, "green", "expected one of 'red', 'blue', found 'green'"),
    (Color, [], "expected one of 'red', 'blue', found list"),
    (Priority, 3, "expected one of 1, 2, found 3"),
    (date, "2026-10-01", "expected date, found str"),
    (Decimal, 1.5, "expected Decimal, found float"),
    (uuid.UUID, str(UUID), "expected UUID, found str"),
    (Path, "x", f"expected {Path.__name__}, found str"),
    (Plain, {}, "expected Plain, found dict"),
    (Closes, 3, "expected Closes, found int"),
    (list, (1,), "expected list, found tuple"),
    (list[int], "12", "expected list, found str"),
    (list[int], [1, True], "[1]: expected int, found bool"),
    (list[list[int]], [[1], [2, "3"]], "[1][1]: expected int, found str"),
    (typing.List[int], ["x"], "[0]: expected int, found str"),
    (tuple[int, ...], (1, "a"), "[1]: expected int, found str"),
    (tuple[int, str], (1, 2), "[1]: expected str, found int"),
    (tuple[int, str], (1,), "expected 2 items, found 1"),
    (tuple[int, int], [1, 2, 3], "expected 2 items, found 3"),
    (tuple[()], (1,), "expected 0 items, found 1"),
    (tuple[int, ...], "12", "expected tuple, found str"),
    (set[int], {"a"}, "[*]: expected int, found str"),
    (set[int], ["a"], "[0]: expected int, found str"),
    (set[int], {1: 2}, "expected set, found dict"),
    (dict[str, int], {"a": "b"}, ".a: expected int, found str"),
    (dict[str, int], {"two words": None}, '["two words"]: expected int, found None'),
    (dict[str, int], {1: 1}, "the key 1: expected str, found int"),
    (dict[int, str], {"1": "a"}, "the key '1': expected int, found str"),
    (dict[str, int], [1], "expected dict, found list"),
    (Mapping[str, list[int]], {"a": ["b"]}, ".a[0]: expected int, found str"),
    (Sequence[int], "12", "[0]: expected int, found str"),
    (Sequence[int], "", "[0]: expected int, found str"),
    (Sequence[str], b"12", "[0]: expected str, found int"),
    (Sequence[int], {1}, "expected Sequence, found set"),
    (Iterable[int], {"a": 1}, "[0]: expected int, found str"),
    (Iterable[int], 1, "expected Iterable, found int"),
    (Iterator[int], [1], "expected Iterator, found list"),
    (Json, {"a": [1, object()]}, ".a[1]: expected dict | list | str | int | float | bool | None, found object"),
    (Tree, {"a": {"b": "c"}}, ".a.b: expected dict | int, found str"),
    (Line, "a", "expected Line, found str"),
    (Line, {"text": 1}, ".text: expected str, found int"),
    (Line, {"text": "a", "box": [1]}, ".box: expected 2 items, found 1"),
    (list[Line], [{"text": "a"}, {"text": "a", "amount": "2"}], "[1].amount: expected int, found str"),
    (Invoice, {"number": "1", "lines": [{"text": 2}]}, ".lines[0].text: expected str, found int"),
    (Box[int], {"content": "x"}, ".content: expected int, found str"),
    (Item, {"name": "a", "tags": ["x", 1]}, ".tags[1]: Input should be a valid string"),
    (list[Item], [{"name": "a", "amount": None}], "[0].amount: Input should be a valid integer"),
    (Item, {}, ".name: Field required"),
    (Item, "a", "expected Item, found str"),
    (Point, (1, "a"), "expected Point, found tuple"),
    (Point, [1, 2], "expected Point, found list"),
    (UserId, 3, "expected UserId, found int"),
    (Message, {"role": "user"}, "'content' is missing"),
    (Message, {"role": "user", "content": "x", "extra": 1}, "Message has no key 'extra'"),
    (Message, {"role": "robot", "content": "x"}, ".role: expected one of 'user', 'assistant', found 'robot'"),
    (list[Message], [{"role": "user", "content": None}], "[0].content: expected str, found None"),
    (Message, "x", "expected Message, found str"),
    (Loose, {"note": "x"}, "'id' is missing"),
    (Node, {"value": 1, "children": [{"value": "x", "children": []}]}, ".children[0].value: expected int, found str"),
    (Node, {"value": 1, "children": [], "parent": {"value": 1}}, ".parent: 'children' is missing"),
    (Pair[int], {"left": 1, "right": "x"}, ".right: expected int, found str"),
    (Unresolved, {"known": "x"}, ".known: expected int, found str"),
    (Extra, {"id": "a", "other": "b"}, ".other: expected int, found str"),
    (Closed, {"id": 1, "other": 2}, "Closed has no key 'other'"),
]


@pytest.mark.parametrize(("annotation", "value", "says"), MISFIT, ids=range(len(MISFIT)))
def test_what_is_wrong_is_said_with_the_place_where_it_stands(annotation: object, value: object, says: str) -> None:
    assert misfit(annotation, value) == says


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({}, "missing 1 required positional argument: 'text'"),
        ({"text": "a", "colour": 1}, "has no field 'colour'"),
    ],
)
def test_a_dataclass_is_given_the_fields_that_it_has(value: object, says: str) -> None:
    assert says in str(misfit(Line, value))


def test_what_the_class_itself_refuses_is_refused_in_its_words() -> None:
    assert str(misfit(Positive, {"number": -1})).endswith("Positive: a positive number is wanted")


def test_numbers_too_long_for_text_are_numbers() -> None:
    number = 10**5000
    assert misfit(int, number) is None
    assert misfit(Literal[1], number) == "expected one of 1, found int"
    assert misfit(dict[int, str], {number: 1}) == "[int]: expected str, found int"


# --- a slow reference -------------------------------------------------------------------------------------------------

Fits = Callable[[Any], bool]
ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=6,
)
SCALARS: list[tuple[Any, Fits]] = [
    (int, lambda value: type(value) is int),
    (float, lambda value: type(value) in (int, float)),
    (str, lambda value: type(value) is str),
    (bool, lambda value: type(value) is bool),
    (None, lambda value: value is None),
    (Any, lambda value: True),
]


def list_of(item: tuple[Any, Fits]) -> tuple[Any, Fits]:
    return list[item[0]], lambda value: type(value) is list and all(map(item[1], value))


def tuple_of(items: list[tuple[Any, Fits]]) -> tuple[Any, Fits]:
    return (
        tuple[tuple(hint for hint, _ in items)],
        lambda value: (
            type(value) in (list, tuple)
            and len(value) == len(items)
            and all(fits(item) for (_, fits), item in zip(items, value, strict=True))
        ),
    )


def dict_of(pair: tuple[tuple[Any, Fits], tuple[Any, Fits]]) -> tuple[Any, Fits]:
    (key, key_fits), (item, item_fits) = pair
    return dict[
        key, item
    ], lambda value: type(value) is dict and all(map(key_fits, value)) and all(map(item_fits, value.values()))


def either(members: list[tuple[Any, Fits]]) -> tuple[Any, Fits]:
    return Union[tuple(hint for hint, _ in members)], lambda value: any(fits(value) for _, fits in members)


ANNOTATIONS = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: (
        inner.map(list_of)
        | st.lists(inner, max_size=3).map(tuple_of)
        | st.tuples(st.sampled_from(SCALARS), inner).map(dict_of)
        | st.lists(inner, min_size=1, max_size=3).map(either)
    ),
    max_leaves=6,
)


@given(ANNOTATIONS, ARGUMENTS)
def test_an_argument_fits_exactly_where_a_slow_reference_says_so(known: tuple[Any, Fits], value: object) -> None:
    annotation, fits = known
    assert (misfit(annotation, value) is None) == fits(value)


@pytest.mark.parametrize(
    "annotation", [list[int], dict[str, list[int]], Optional[float], Color, Line, Invoice, Message, Point]
)
@given(data=st.data())
def test_whatever_is_made_after_an_annotation_fits_it(annotation: Any, data: st.DataObject) -> None:
    assert misfit(annotation, data.draw(st.from_type(annotation))) is None


# --- asking harms nothing ---------------------------------------------------------------------------------------------


def test_an_iterator_is_not_consumed() -> None:
    numbers = iter([1, 2, 3])
    assert misfit(Iterable[str], numbers) is None
    assert misfit(Iterator[str], numbers) is None
    assert list(numbers) == [1, 2, 3]


class Evil:
    """Raises whatever it is asked."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("==")

    def __hash__(self) -> int:
        raise RuntimeError("hash")

    def __repr__(self) -> str:
        raise RuntimeError("repr")

    def __bool__(self) -> bool:
        raise RuntimeError("bool")


class EvilMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        raise RuntimeError("isinstance")


class Unaskable(metaclass=EvilMeta): ...


@pytest.mark.parametrize("annotation", [annotation for annotation, _ in FIT], ids=range(len(FIT)))
def test_a_value_whose_methods_raise_makes_no_trouble(annotation: object) -> None:
    misfit(annotation, Evil())
    misfit(annotation, [Evil()])
    misfit(annotation, {"id": Evil(), "text": Evil(), "name": Evil(), "role": Evil(), "content": Evil()})


def test_an_annotation_that_cannot_be_asked_takes_anything() -> None:
    for annotation in (Evil(), Unaskable, list[Unaskable], Unaskable | None, Annotated[Unaskable, []]):
        assert misfit(annotation, [3]) is None


def test_a_value_that_holds_itself_is_left_to_others() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert misfit(Json, circle) is None


def test_an_alias_that_holds_itself_in_a_way_that_cannot_be_followed_takes_anything() -> None:
    assert misfit(Knot, object()) is None


def test_asking_warns_of_nothing_and_leaves_nothing_behind() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = {"text": "a", "box": [1, 2]}
        assert misfit(Line, data) is None
        assert misfit(Line | Message | Item, {"text": 1}) is not None
    assert data == {"text": "a", "box": [1, 2]}


def test_checks_are_made_once_and_remembered_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_seen", "_known"):
        monkeypatch.setattr(checks, name, {})
    made: list[object] = []
    make = checks._made
    monkeypatch.setattr(checks, "_made", lambda annotation: made.append(annotation) or make(annotation))
    unhashable = Annotated[int, []]
    for _ in range(3):
        assert misfit(list[int], ["x"]) == "[0]: expected int, found str"
        assert misfit(int | None, 1) is None
        assert misfit(unhashable, 1) is None
    assert len(made) == 3
    for number in range(3000):
        misfit(Literal[number], number)
    assert max(len(checks._seen), len(checks._known)) <= 1024


def test_a_bool_and_an_int_are_told_apart_by_remembered_checks_too() -> None:
    assert misfit(Literal[1], 1) is None
    assert misfit(Literal[True], 1) is not None
    assert misfit(list[Literal[0]], [0]) is None
    assert misfit(list[Literal[False]], [0]) is not None


def test_a_thousand_plain_messages_are_told_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "x"}] * 1000
    item = checks._check(list[dict])
    monkeypatch.setattr(checks._Check, "ask", None)  # no item is asked by a call of its own
    assert item.look(messages) is None


def test_the_examples_run() -> None:
    assert doctest.testmod(checks).failed == 0


def test_checks_load_neither_pydantic_nor_inspect_for_plain_annotations() -> None:
    script = (
        "import sys; from agent_run_ledger.rules.checks import misfit; misfit(list[dict[str, int]], [{'a': 1}])\n"
        "print(sorted({'pydantic', 'inspect', 'dataclasses', 'asyncio'} & set(sys.modules)))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60, env=environment()
    ).stdout
    assert printed == "[]\n"
