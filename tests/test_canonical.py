import contextlib
import dataclasses
import doctest
import enum
import json
import subprocess
import sys
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal, localcontext
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, Optional, TypedDict, TypeVar
from zoneinfo import ZoneInfo

import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent_run_ledger.errors import PayloadTooLarge, PlainDataWarning
from agent_run_ledger.rules import canonical, types
from agent_run_ledger.rules.canonical import Undecodable, Unstorable, declared, decode, encode, rebuild
from agent_run_ledger.rules.difference import difference


@pytest.fixture(autouse=True)
def _a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings and registrations last for the process: each test gets its own."""
    for name in ("_warned", "_name_of", "_class_of"):
        monkeypatch.setattr(types, name, {})


def same(one: Any, other: Any) -> bool:
    """Equal in value *and* type, all the way down: 1, 1.0 and True differ, as do 0.0 and -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            any(same(key, k) and same(item, i) for k, i in other.items()) for key, item in one.items()
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (set, frozenset)):
        return len(one) == len(other) and all(any(same(item, i) for i in other) for item in one)
    if isinstance(one, (datetime, time)):
        return (
            one.replace(tzinfo=None) == other.replace(tzinfo=None)
            and one.fold == other.fold
            and type(one.tzinfo) is type(other.tzinfo)
            and getattr(one.tzinfo, "key", None) == getattr(other.tzinfo, "key", None)
            and one.tzname() == other.tzname()
            and one.utcoffset() == other.utcoffset()
        )
    return repr(one) == repr(other) if isinstance(one, (float, Decimal)) else one == other


text = st.text(st.characters(exclude_categories=("Cs",)))
tag_like = st.sampled_from(["$", "$$", "$tuple", "$$tuple", "$type", "$map", "$bytes", "$no"])
zones = st.one_of(
    st.none(),
    st.timezones(),
    st.builds(timezone, st.timedeltas(-timedelta(hours=23), timedelta(hours=23))),
    st.builds(timezone, st.just(timedelta(hours=1)), text),
)
hashable_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    text,
    tag_like,
    st.binary(),
    st.datetimes(timezones=zones, allow_imaginary=True),
    st.times(timezones=zones),
    st.dates(),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.uuids(),
)
hashables = st.recursive(
    hashable_leaves,
    lambda inner: st.one_of(
        st.tuples(inner, inner), st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)
    ),
    max_leaves=4,
)
plain_json = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), text, tag_like
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(text, inner, max_size=4)),
    max_leaves=20,
)
values = st.recursive(
    hashables | st.decimals(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(text | tag_like, inner, max_size=4),
        st.dictionaries(hashables, inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(hashables, max_size=3),
    ),
    max_leaves=12,
)


# --- round trips ------------------------------------------------------------------------------------------------------


@given(values)
@example({"$tuple": [1]})
@example({"$$tuple": {"$": {"$type": ["int", 1]}}})
@example({True: 1, "1": 2})
@example(datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")))
@example([-0.0, 0, 0.0, False, 1e16, 1e-7])
def test_every_value_comes_back_with_its_type(value: Any) -> None:
    assert same(decode(encode(value)), value)


@given(values)
def test_what_was_decoded_encodes_to_the_same_bytes(value: Any) -> None:
    data = encode(value)
    assert encode(decode(data)) == data


@given(values)
def test_the_bytes_are_json_for_every_reader(value: Any) -> None:
    data = encode(value)
    assert json.dumps(json.loads(data), ensure_ascii=False, separators=(",", ":")).encode() == data


@pytest.mark.parametrize("digits", [639, 641, 4299, 4300, 4301, 20_000])
def test_an_integer_of_any_size_is_exact(digits: int) -> None:
    number = 10**digits - 7
    data = encode({"n": [number, -number]})
    assert data == b'{"n":[' + b"9" * (digits - 1) + b"3,-" + b"9" * (digits - 1) + b"3]}"
    assert decode(data) == {"n": [number, -number]}
    assert decode(encode((10**digits,))) == (10**digits,)


def test_the_users_limit_for_integer_texts_neither_bites_nor_moves() -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        number = 7**2000
        assert decode(encode(number)) == number
        assert sys.get_int_max_str_digits() == 640
    finally:
        sys.set_int_max_str_digits(before)


def test_a_bytearray_comes_back_as_bytes() -> None:
    assert decode(encode(bytearray(b"\x00\xff"))) == b"\x00\xff"
    assert type(decode(encode(bytearray()))) is bytes


@pytest.mark.parametrize("number", ["NaN", "sNaN12", "-Infinity", "1E+5", "1.50", "-0", "1E-999999"])
def test_a_decimal_keeps_its_exact_text(number: str) -> None:
    back = decode(encode(Decimal(number)))
    assert type(back) is Decimal
    assert str(back) == number


def test_a_decimal_has_the_same_bytes_in_every_decimal_context() -> None:
    with localcontext() as context:
        context.capitals, context.prec = 0, 2
        data = encode(Decimal("1.2345E+50"))
    assert data == encode(Decimal("1.2345E+50")) == b'{"$decimal":"1.2345E+50"}'


def test_a_zoned_time_is_stored_by_the_zones_name_and_not_by_its_offset() -> None:
    moment = datetime(2040, 7, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    assert encode(moment) == b'{"$datetime":["2040-07-01T12:00:00",0,"Europe/Berlin",null]}'
    assert encode(datetime(2040, 7, 1, 12, tzinfo=UTC)) == b'{"$datetime":"2040-07-01T12:00:00+00:00"}'


@pytest.mark.parametrize(
    "hostile",
    [
        "../../../etc/passwd",
        "..\\..\\windows\\system32",
        "<script>alert(1)</script>",
        "'; DROP TABLE entries; --",
        "{{7*7}} ${7*7} #{7*7} %s %n {0.__class__}",
        "a\x00b",
        "\x7fELF\x02\x01\x01\x00",
        "\x1b[2J\u202egnp.exe",
        '{"$tuple":[1]}',
        '\\"$',
        "\u2028\ud7ff\ue000\U0010ffff",
    ],
)
def test_hostile_text_is_data_and_stays_data(hostile: str) -> None:
    for value in (hostile, {hostile: hostile}, {"$" + hostile: [hostile]}, (hostile,), {1: hostile}):
        assert same(decode(encode(value)), value)
    assert decode(encode(hostile.encode())) == hostile.encode()


# --- one value, one sequence of bytes ---------------------------------------------------------------------------------


def reference(value: Any) -> str:
    """Plain JSON as the design page words it, slow and obvious."""
    if isinstance(value, dict):
        if len(value) == 1 and next(iter(value)).startswith("$"):
            value = {"$" + key: item for key, item in value.items()}
        return "{" + ",".join(f"{reference(key)}:{reference(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(reference(item) for item in value) + "]"
    if isinstance(value, str):
        short = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
        return '"' + "".join(short.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in value) + '"'
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else repr(value)
    )


@given(plain_json)
def test_plain_json_is_written_as_the_reference_writes_it(value: Any) -> None:
    assert encode(value) == reference(value).encode()


@given(plain_json)
def test_the_careful_writer_agrees_with_the_fast_one(value: Any) -> None:
    assert encode([value, 10**5000]) == b"[" + encode(value) + b",1" + b"0" * 5000 + b"]"


@given(st.dictionaries(text | tag_like, plain_json, min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_equal_dicts_have_equal_bytes_in_any_order(value: dict[str, Any], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert encode(dict(items)) == encode(value)


@given(st.sets(hashables, max_size=6), st.randoms(use_true_random=False))
def test_equal_sets_have_equal_bytes_in_any_order(value: set[Any], random: Any) -> None:
    members = list(value)
    random.shuffle(members)
    assert encode(set(members)) == encode(value)


def test_sets_have_the_same_bytes_in_every_process() -> None:
    program = "from agent_run_ledger.rules.canonical import encode; print(encode({'a', 'b', 'c', ('d', 1)}).decode())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert seen == {b'{"$set":["a","b","c",{"$tuple":["d",1]}]}\n'}


def test_a_dict_with_other_than_string_keys_keeps_its_order() -> None:
    assert list(decode(encode({2: "b", 1: "a", "x": 0}))) == [2, 1, "x"]


def test_nothing_of_the_value_is_changed() -> None:
    value = {"b": (1, {"$x": {2}}), "a": [[(1,)], {"k": b""}], 3: [4]}
    before = repr(value)
    encode(value)
    assert repr(value) == before


# --- what cannot be stored --------------------------------------------------------------------------------------------


def numbers() -> Iterator[int]:
    yield 1


class Opaque:
    pass


@dataclasses.dataclass
class Price:
    amount: Any


@pytest.mark.parametrize(
    ("value", "path", "reason"),
    [
        (float("nan"), "$", "nan"),
        ({"items": [1, 2, 3, {"price": float("nan")}]}, "$.items[3].price", "nan"),
        ({"a b": (0, float("inf"))}, '$["a b"][1]', "inf"),
        ({"x": {1: {"y": float("-inf")}}}, "$.x[1].y", "-inf"),
        ({"x": "ok \ud800"}, "$.x", "U+D800"),
        ({"x": {"\udc00": 1}}, "$.x", "U+DC00"),
        ({"x": {("\ud800",): 1}}, "$.x[key 0][0]", "U+D800"),
        ({"x": {"\ud800"}}, "$.x[*]", "U+D800"),
        ({"x": [numbers()]}, "$.x[0]", "generator"),
        ({"f": numbers}, "$.f", "function"),
        ({"x": Opaque()}, "$.x", "Opaque"),
        ({"x": Opaque}, "$.x", "type"),
        ({"x": 1j}, "$.x", "complex"),
        ({"x": ValueError("no")}, "$.x", "ValueError"),
        (Price(Price([float("nan")])), "$.amount.amount[0]", "nan"),
    ],
)
def test_what_cannot_be_stored_is_named_with_its_path(value: Any, path: str, reason: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlainDataWarning)
        with pytest.raises(Unstorable) as caught:
            encode(value, what="the output")
    assert caught.value.path == path
    assert path in str(caught.value)
    assert reason in str(caught.value)
    assert str(caught.value).startswith("the output")
    str(caught.value).encode()


def nested(levels: int, wrap: Any) -> Any:
    value: Any = wrap()
    for _ in range(levels - 1):
        value = wrap(value)
    return value


WRAPS = {
    "list": lambda *inner: list(inner),
    "tuple": lambda *inner: inner,
    "dict": lambda *inner: {"k": inner[0] if inner else 0},
    "map": lambda *inner: {7: inner[0] if inner else 0},
    "frozenset": lambda *inner: frozenset(inner),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS.keys())
def test_nesting_of_200_is_stored_and_of_201_is_refused(wrap: Any) -> None:
    deepest = nested(200, wrap)
    assert decode(encode(deepest)) == deepest
    with pytest.raises(Unstorable, match="nesting deeper than 200") as caught:
        encode(nested(201, wrap))
    assert len(caught.value.path) > 200
    assert len(str(caught.value)) < 400


def test_a_cycle_is_refused_and_named() -> None:
    value: dict[str, Any] = {"a": [1, {}]}
    value["a"][1]["back"] = value
    with pytest.raises(Unstorable, match=r"\$\.a\[1\]\.back is a cycle: it is the same object as \$"):
        encode(value)
    loop: list[Any] = []
    loop.append([loop, loop])
    with pytest.raises(Unstorable, match="cycle"):
        encode(loop)


def test_one_object_in_two_places_is_no_cycle() -> None:
    shared = {"k": [1]}
    assert decode(encode([shared, shared])) == [shared, shared]


def test_a_value_too_deep_for_the_stack_that_is_left_is_refused_by_name() -> None:
    def at_depth(levels: int) -> None:
        if levels:
            at_depth(levels - 1)
        else:
            encode(nested(190, WRAPS["list"]))

    with pytest.raises(Unstorable, match="stack"):
        at_depth(sys.getrecursionlimit() - 200)


def test_a_payload_over_the_limit_is_refused_in_canonical_bytes() -> None:
    assert encode("é", limit=4) == '"é"'.encode()
    with pytest.raises(PayloadTooLarge, match="the output: 4 bytes, and the limit is 3") as caught:
        encode("é", limit=3, what="the output")
    assert (caught.value.size, caught.value.limit) == (4, 3)
    with pytest.raises(PayloadTooLarge):
        encode(10**5000, limit=5000)


class Frozen(NamedTuple):
    x: int


@dataclasses.dataclass(frozen=True)
class Point:
    x: int


class Bag(set[int]):
    def __hash__(self) -> int:  # type: ignore[override]
        return 7


@pytest.mark.filterwarnings("ignore::agent_run_ledger.errors.PlainDataWarning")
@pytest.mark.parametrize("value", [{Bag({1}): 1}, {Bag({1})}, {(Bag({1}),): 1}])
def test_a_key_of_a_class_that_adds_a_hash_is_refused(value: Any) -> None:
    with pytest.raises(Unstorable, match="hashable"):
        encode(value)


@pytest.mark.filterwarnings("ignore::agent_run_ledger.errors.PlainDataWarning")
@pytest.mark.parametrize("value", [{Point(1): 1}, {Point(1)}, {(Point(1),): 1}, {frozenset({Point(1)})}])
def test_a_key_that_could_not_be_read_as_a_key_is_refused(value: Any) -> None:
    with pytest.raises(Unstorable, match="hashable"):
        encode(value)
    canonical.register_type(Point)
    assert decode(encode(value)) == value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"{",
        b"[1,]",
        b"1 2",
        b" 1",
        b"1\n",
        b"\xff",
        b"NaN",
        b"[Infinity]",
        b'{"a":-Infinity}',
        b"nul",
        b'{"$no":1}',
        b'{"$tuple":"ab"}',
        b'{"$tuple":1}',
        b'{"$map":[[1]]}',
        b'{"$map":[[[],1]]}',
        b'{"$set":[[]]}',
        b'{"$bytes":"a"}',
        b'{"$bytes":1}',
        b'{"$datetime":"never"}',
        b'{"$datetime":["2026-01-01T00:00:00",0,"No/Where",null]}',
        b'{"$datetime":["2026-01-01T00:00:00",0,"../../etc/passwd",null]}',
        b'{"$timedelta":[1e999]}',
        b'{"$decimal":"x"}',
        b'{"$decimal":{}}',
        b'{"$uuid":7}',
        b'{"$type":"x"}',
        b"[" * 100_000,
        b'[{"$tuple":' * 50_000,
    ],
)
def test_bytes_that_are_not_ours_are_undecodable(data: bytes) -> None:
    with pytest.raises(Undecodable):
        decode(data)


@given(
    st.binary()
    | text.map(str.encode)
    | st.builds(lambda t, v: b'{"' + t.encode() + b'":' + encode(v) + b"}", tag_like, plain_json)
)
@pytest.mark.filterwarnings("ignore::agent_run_ledger.errors.PlainDataWarning")
def test_no_bytes_raise_anything_but_undecodable(data: bytes) -> None:
    with contextlib.suppress(Undecodable):
        decode(data)


# --- classes as plain data --------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Bits(enum.Flag):
    A = 1
    B = 2


class Text(str):
    def __str__(self) -> str:
        return "never this"


class Whole(int):
    def __int__(self) -> int:
        return -1


class Real(float):
    pass


class Items(list[int]):
    pass


class Blob(bytes):
    pass


class Moment(datetime):
    pass


class Model(pydantic.BaseModel):
    n: int
    colour: Colour = Colour.RED
    when: date | None = None


CLASSES: list[tuple[Any, Any, type]] = [
    (Colour.RED, "red", Colour),
    (Level.LOW, 1, Level),
    (Word.YES, "yes", Word),
    (Bits.A | Bits.B, 3, Bits),
    (Text("t"), "t", Text),
    (Whole(3), 3, Whole),
    (Real(0.5), 0.5, Real),
    (Items([1]), [1], Items),
    (Blob(b"b"), b"b", Blob),
    (Frozen(1), (1,), Frozen),
    (Point(1), {"x": 1}, Point),
    (OrderedDict(b=1, a=2), {"a": 2, "b": 1}, OrderedDict),
    (Counter("aab"), {"a": 2, "b": 1}, Counter),
    (defaultdict(list, k=[1]), {"k": [1]}, defaultdict),
    (Moment(2026, 1, 2, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC), Moment),
]


@pytest.mark.parametrize(("value", "plain", "cls"), CLASSES, ids=[cls.__name__ for *_, cls in CLASSES])
def test_an_object_of_an_undeclared_class_is_plain_data_with_one_warning(value: Any, plain: Any, cls: type) -> None:
    with pytest.warns(PlainDataWarning, match=rf"{cls.__qualname__}.*returns=") as caught:
        data = encode([value, {"again": value}])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert same(decode(data), [plain, {"again": plain}])
    encode(value)  # a second warning would be an error


BUILDABLE = [row for row in CLASSES if row[2] is not Moment]


@pytest.mark.parametrize(("value", "plain", "cls"), BUILDABLE, ids=[cls.__name__ for *_, cls in BUILDABLE])
def test_a_declared_class_is_stored_as_the_same_bytes_without_a_warning(value: Any, plain: Any, cls: type) -> None:
    assert encode(value, declared=cls) == encode(plain)
    assert encode([value], declared=list[cls] | None) == encode([plain])  # type: ignore[valid-type]


def test_a_model_is_dumped_as_python_data() -> None:
    with pytest.warns(PlainDataWarning) as caught:
        data = encode(Model(n=1, when=date(2026, 1, 2)))
    assert decode(data) == {"n": 1, "colour": "red", "when": date(2026, 1, 2)}
    assert len(caught) == 2  # the model, and the enum in it
    assert encode(Model(n=1), declared=Model) == b'{"colour":"red","n":1,"when":null}'


def test_pydantic_is_never_imported() -> None:
    program = (
        "import sys; from agent_run_ledger.rules import canonical as c; c.encode({'a': [1, 2.5, None, 'x']}); "
        "c.decode(b'{\"a\":1}'); c.declared(dict); c.rebuild(None, 1); "
        "print(sorted({'pydantic', 'typing', 'dataclasses', 'decimal', 'datetime', 'uuid', 'zoneinfo', 'inspect'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, check=True
    )
    assert done.stdout == b"[]\n"


def test_a_warning_that_is_made_an_error_is_a_named_refusal_each_time() -> None:
    for _ in range(2):
        with pytest.raises(Unstorable, match="returns="):
            encode(Colour.RED)


def test_string_keys_of_a_class_are_string_keys() -> None:
    with pytest.warns(PlainDataWarning):
        assert encode({Word.YES: 1, "a": 2}) == b'{"a":2,"yes":1}'


def test_keys_that_become_one_are_refused() -> None:
    with pytest.warns(PlainDataWarning), pytest.raises(Unstorable, match="two keys"):
        encode({Colour.RED: 1, "red": 2})


class Broken(pydantic.BaseModel):
    def model_dump(self, **_: Any) -> Any:
        raise RuntimeError("no")


def test_whatever_a_class_raises_is_a_named_refusal() -> None:
    half = Point.__new__(Point)
    for value in (Broken(), half):
        with pytest.raises(Unstorable, match=type(value).__name__):
            encode({"x": value}, declared=Broken | Point)


# --- registered classes -----------------------------------------------------------------------------------------------


def test_a_registered_class_is_rebuilt_wherever_it_stands() -> None:
    for cls in (Colour, Point, Model, Frozen, Text):
        assert canonical.register_type(cls) is cls
    value = {"a": [Colour.RED, (Point(1), {"m": Model(n=1)})], Frozen(2): {Text("t")}}
    back = decode(encode(value))
    assert back == value
    assert type(next(iter(back[Frozen(2)]))) is Text
    assert encode(Colour.RED) == b'{"$type":["Colour","red"]}'


def test_a_class_may_be_registered_and_declared() -> None:
    canonical.register_type(Point)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        back = rebuild(list[Point], decode(encode([Point(1)], declared=list[Point])))
    assert back == [Point(1)]
    assert caught == []


def test_a_registered_name_that_is_unknown_here_is_plain_data_with_a_warning() -> None:
    with pytest.warns(PlainDataWarning, match=r"os\.system") as caught:
        assert decode(b'[{"$type":["os.system","ls"]},{"$type":["os.system",{"x":1}]}]') == ["ls", {"x": 1}]
    assert len(caught) == 1


def test_a_registered_class_that_no_longer_fits_is_plain_data_with_a_warning() -> None:
    canonical.register_type(Colour, "colour")
    with pytest.warns(PlainDataWarning, match="Colour"):
        assert decode(b'{"$type":["colour","green"]}') == "green"


def test_duplicate_registrations_and_opaque_classes_are_refused() -> None:
    canonical.register_type(Colour)
    with pytest.raises(ValueError, match="already"):
        canonical.register_type(Colour, "Other")
    with pytest.raises(ValueError, match="already"):
        canonical.register_type(Point, "Colour")
    for cls in (Opaque, int, dict, object, "Colour"):
        with pytest.raises(TypeError):
            canonical.register_type(cls)  # type: ignore[type-var]


# --- declared classes -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Line:
    sku: str
    colour: Colour = Colour.RED
    tags: set[Word] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True, slots=True)
class Invoice:
    id: str
    lines: list[Line]
    parent: "Invoice | None" = None
    total: Decimal | None = None
    doubled: int = dataclasses.field(init=False, default=0)


@dataclasses.dataclass
class Doubling:
    n: int
    made: str = dataclasses.field(init=False)
    seed: dataclasses.InitVar[int] = 0

    def __post_init__(self, seed: int) -> None:
        self.n *= 2
        self.made = str(uuid.uuid4())


T = TypeVar("T")


@dataclasses.dataclass
class Page(Generic[T]):
    items: list[T]
    first: T | None = None


class Row(TypedDict):
    colour: Colour
    n: int


class Pair(NamedTuple):
    colour: Colour
    n: int = 0


class Aliased(pydantic.BaseModel):
    number: int = pydantic.Field(alias="no")


class Computed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    colour: Colour
    at: datetime

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def shout(self) -> str:
        return self.colour.value.upper()


class Numbers(pydantic.RootModel[dict[str, int]]):
    pass


InvoiceId = NewType("InvoiceId", str)
TaggedColour = NewType("TaggedColour", Colour)  # type: ignore[valid-newtype]
line = Line("a", Colour.BLUE, {Word.YES})

DECLARED: list[tuple[Any, Any]] = [
    (Colour, Colour.BLUE),
    (Level, Level.LOW),
    (Bits, Bits.A | Bits.B),
    (Literal[Colour.RED, "x"], Colour.RED),
    (Literal[Colour.RED, "x"], "x"),
    (Colour | None, None),
    (Optional[Colour], Colour.RED),  # noqa: UP045
    (int | Colour | list[Colour], [Colour.RED]),
    (list[Colour], [Colour.RED, Colour.BLUE]),
    (Sequence[Colour], (Colour.RED,)),
    (dict[Colour, list[Line]], {Colour.RED: [line]}),
    (Mapping[str, Colour], {"k": Colour.RED}),
    (tuple[Colour, ...], (Colour.RED, Colour.BLUE)),
    (tuple[Colour, int], (Colour.RED, 1)),
    (set[Word], {Word.YES}),
    (frozenset[Level], frozenset({Level.LOW})),
    (Annotated[Colour, "meta", []], Colour.RED),
    (TaggedColour, Colour.RED),
    (Line, line),
    (Invoice, Invoice("i", [line], Invoice("p", []), Decimal("1.50"))),
    (Invoice | Line, line),
    (Line | Invoice, Invoice("i", [])),
    (Page[Colour], Page([Colour.RED], Colour.BLUE)),
    (Row, {"colour": Colour.RED, "n": 1}),
    (list[Row], [{"colour": Colour.RED, "n": 1}]),
    (Pair, Pair(Colour.RED, 1)),
    (Model, Model(n=1, colour=Colour.BLUE, when=date(2026, 1, 2))),
    (list[Model] | None, [Model(n=1)]),
    (Aliased, Aliased(no=3)),
    (Computed, Computed(colour=Colour.RED, at=datetime(2026, 1, 2, tzinfo=UTC))),
    (Numbers, Numbers({"a": 1, "b": 2})),
    (Text, Text("t")),
    (OrderedDict[str, int], OrderedDict(a=1, b=2)),
    (Counter, Counter("aab")),
]


@pytest.mark.parametrize(("annotation", "value"), DECLARED)
def test_a_declared_class_comes_back_as_it_was(annotation: Any, value: Any) -> None:
    assert declared(annotation)
    data = encode(value, declared=annotation)
    back = rebuild(annotation, decode(data))
    assert back == value
    assert type(back) is type(value)
    assert encode(back, declared=annotation) == data
    assert rebuild(annotation, decode(data)) == back


@pytest.mark.parametrize(
    "annotation",
    [None, type(None), Any, object, str, dict, list[dict[str, int]], int | None, InvoiceId, Annotated[int, []], "Colour", T, 7,
     Literal["a"], tuple[int, ...], datetime, Decimal | None],
    ids=str,
)  # fmt: skip
@given(value=plain_json)
def test_an_annotation_without_a_class_of_ours_changes_nothing(annotation: Any, value: Any) -> None:
    assert not declared(annotation)
    assert rebuild(annotation, value) is value


def test_the_first_member_of_a_union_that_fits_is_built() -> None:
    assert rebuild(Colour | str, "red") is Colour.RED
    assert rebuild(str | Colour, "red") == "red"
    assert type(rebuild(str | Colour, "red")) is str
    assert rebuild(Line | dict, {"other": 1}) == {"other": 1}


def test_what_the_constructor_derives_is_as_it_was_stored() -> None:
    value = Doubling(3)
    back = rebuild(Doubling, decode(encode(value, declared=Doubling)))
    assert (back.n, back.made) == (6, value.made)


def test_a_field_that_does_not_hold_what_it_says_stays_as_it_is() -> None:
    sloppy = Line(sku=None)  # type: ignore[arg-type]
    assert rebuild(Line, decode(encode(sloppy, declared=Line))) == sloppy


@dataclasses.dataclass
class Stamped:
    id: str = dataclasses.field(default_factory=lambda: str(uuid.uuid4()))


class StampedModel(pydantic.BaseModel):
    id: str = pydantic.Field(default_factory=lambda: str(uuid.uuid4()))


class Strange:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")


class Refusing(str):
    def __new__(cls, value: str) -> "Refusing":
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("annotation", "plain"),
    [
        (Colour, "green"),
        (Colour, ["red"]),
        (Line, {"colour": "red"}),
        (Line, {"sku": "a", "unknown": 1}),
        (Line, [1]),
        (Invoice | Line, {"neither": 1}),
        (Model, {"n": "many"}),
        (Model, {"n": 1, "of a subclass": 2}),
        (pydantic.BaseModel, {"n": 1}),
        (Pair, (1, 2, 3)),
        (Stamped, {}),
        (StampedModel, {}),
        (Refusing, "x"),
        (defaultdict, {"k": 1}),
    ],
    ids=str,
)
def test_what_cannot_be_built_stays_plain_with_one_warning(annotation: Any, plain: Any) -> None:
    with pytest.warns(PlainDataWarning, match="plain data") as caught:
        assert rebuild(annotation, plain) is plain
    assert len(caught) == 1
    assert rebuild(annotation, plain) is plain  # a second warning would be an error


def test_reading_never_raises_even_where_warnings_are_errors() -> None:
    assert rebuild(Colour, "green") == "green"
    assert decode(b'{"$type":["gone",1]}') == 1


def test_one_bad_item_leaves_the_others_built() -> None:
    with pytest.warns(PlainDataWarning):
        assert rebuild(list[Colour], ["red", "green"]) == [Colour.RED, "green"]


@given(values)
def test_rebuild_never_raises(value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlainDataWarning)
        for annotation, _ in DECLARED:
            rebuild(annotation, value)


def local_class() -> tuple[Any, Any]:
    @dataclasses.dataclass
    class Inner:
        n: int

    @dataclasses.dataclass
    class Outer:
        inner: "Inner"
        again: "Outer | None"
        colour: "Colour"

    return Outer, Outer(Inner(1), None, Colour.RED)


def test_classes_local_to_a_function_are_built_as_far_as_their_names_can_be_found() -> None:
    outer, value = local_class()
    with pytest.warns(PlainDataWarning, match="Inner") as caught:
        data = encode(value, declared=outer)
    assert len(caught) == 1
    back = rebuild(outer, decode(data))
    assert type(back) is outer
    assert back.inner == {"n": 1}
    assert back.colour is Colour.RED


# --- differences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "asked", "path"),
    [
        ({"a": 1}, {"a": 1}, None),
        (1, 2, "$"),
        (1, 1.0, "$"),
        (1, True, "$"),
        (0.0, -0.0, "$"),
        ({"a": 1, "b": 1}, {"a": 2, "b": 2}, "$.a"),
        ({"a": {"b c": [1, 2]}}, {"a": {"b c": [1, 3]}}, '$.a["b c"][1]'),
        ({"a": 1}, {"a": 1, "b": 2}, "$.b"),
        ([1, 2], [1], "$[1]"),
        ({"x": (1, {"y": 2})}, {"x": (1, {"y": 3})}, "$.x[1].y"),
        ({"x": (1,)}, {"x": [1]}, "$.x"),
        ({"x": {1: {"y": 2}}}, {"x": {1: {"y": 3}}}, "$.x[1].y"),
        ({"x": {1: 2}}, {"x": {3: 2}}, "$.x"),
        ({"x": {1, 2}}, {"x": {1, 3}}, "$.x"),
        ({"$x": 1}, {"$x": 2}, '$["$x"]'),
        ({"t": date(2026, 1, 1)}, {"t": date(2026, 1, 2)}, "$.t"),
        ({"n": 10**5000}, {"n": 10**5000 + 1}, "$.n"),
    ],
)  # fmt: skip
def test_the_first_difference_is_named_by_its_path(stored: Any, asked: Any, path: str | None) -> None:
    assert difference(encode(stored), encode(asked)) == path
    assert difference(encode(asked), encode(stored)) == path


@given(values, values)
def test_there_is_a_difference_exactly_where_the_bytes_differ(one: Any, other: Any) -> None:
    assert (difference(encode(one), encode(other)) is None) == (encode(one) == encode(other))


def test_documents_that_are_not_ours_differ_as_a_whole() -> None:
    assert difference(b"{", b"1") == "$"
    assert difference(b'{"$map":1}', b'{"$map":2}') == "$"
    assert difference(b'{"$type":[]}', b'{"$type":[1]}') == "$"


@pytest.mark.parametrize("module", [canonical])
def test_the_examples_in_the_docstrings_run(module: Any) -> None:
    assert doctest.testmod(module).failed == 0
    assert doctest.testmod(module).attempted > 0
