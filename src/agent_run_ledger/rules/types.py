"""Classes as plain data and back: what may be unwrapped, which classes an annotation names, how one is built again."""

from __future__ import annotations

import contextlib
import sys
import typing
import warnings
from types import FunctionType, UnionType
from typing import Any

from agent_run_ledger.errors import PlainDataWarning


class Opaque(ValueError):
    """An object of this class has no plain form; the message says what it is."""


class Misfit(ValueError):
    """Plain data does not fit the annotation."""


# --- objects to plain data --------------------------------------------------------------------------------------------

_BUILTIN_BASES = (str, int, float, bytes, bytearray, dict, list, tuple, set, frozenset)


def unwrapped(value: Any, lossless: bool) -> Any:
    """One layer of class taken off: the enum's value, the dataclass's fields, the model's dump, the plain base. Raises `Opaque`.

    `lossless`: the class is going to be built again, so a model is asked for what it can be validated from.
    """
    kind = type(value)
    if _is_enum(kind):
        return value.value
    if _is_model(kind):
        try:
            return _dumped(value, kind, lossless)
        except Exception as error:
            raise Opaque(f"an object of {_named(kind)} whose model_dump failed ({type(error).__name__})") from error
    if _is_dataclass(kind):
        try:
            return {name: getattr(value, name) for name in _field_names(kind)}
        except AttributeError as error:
            raise Opaque(f"an object of {_named(kind)} with an unset field ({error})") from error
    for base in _BUILTIN_BASES:
        if isinstance(value, base):
            return _base_value(value, base)
    if kind is FunctionType or kind.__name__ in ("coroutine", "generator", "async_generator"):
        raise Opaque(f"a {kind.__name__.replace('_', ' ')}, which is no data")
    raise Opaque(
        f"an object of {_named(kind)}, which is no plain data; return plain data, or register_type a class that has some"
    )


def _dumped(value: Any, kind: Any, lossless: bool) -> Any:
    """A model's data, without a word about values that are not as annotated: they are what there is to store."""
    if not lossless:
        return value.model_dump(mode="python", warnings=False)
    if not _is_wire_model(kind):
        return value.model_dump(mode="python", round_trip=True, warnings=False)
    whole, as_sent = _in_full(value), _as_sent(value)
    try:
        return as_sent if _in_full(kind.model_construct(**as_sent)) == whole else whole
    except Exception:  # it is the class's own code
        return whole


def _in_full(wire_model: Any) -> Any:
    return wire_model.model_dump(mode="python", round_trip=True, warnings=False, by_alias=True)


def _as_sent(wire_model: Any) -> Any:
    return wire_model.model_dump(mode="python", round_trip=True, warnings=False, by_alias=True, exclude_unset=True)


def _base_value(value: Any, base: Any) -> Any:
    # The unbound methods give the exact base value whatever the subclass overrides; containers are read as they show themselves.
    if base is str:
        return str.__str__(value)
    if base is int:
        return int.__int__(value)
    if base is float:
        return float.__float__(value)
    return base(value)


def _is_enum(kind: Any) -> bool:
    enum = sys.modules.get("enum")
    return enum is not None and issubclass(kind, enum.Enum)


def _is_model(kind: Any) -> bool:
    """A pydantic model, known by its methods so that pydantic is never imported."""
    return callable(getattr(kind, "model_dump", None)) and callable(getattr(kind, "model_validate", None))


def _is_wire_model(kind: Any) -> bool:
    """A model with a way of its own to be built without validation, as the clients of model providers have them.

    They make it of whatever the server sends, so it is stored as it was sent: by the server's names, without what was left out.
    """
    return any("model_construct" in vars(base) for base in kind.__mro__ if not base.__module__.startswith("pydantic."))


def _is_dataclass(kind: Any) -> bool:
    return hasattr(kind, "__dataclass_fields__")


def _is_named_tuple(kind: Any) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_typed_dict(kind: Any) -> bool:
    return issubclass(kind, dict) and hasattr(kind, "__total__")


def _field_names(kind: Any) -> list[str]:
    from dataclasses import fields

    return [field.name for field in fields(kind)]


def _named(kind: type) -> str:
    return f"class {kind.__module__}.{kind.__qualname__}"


_warned: dict[str, object] = {}


def warn_undeclared(kind: type) -> None:
    """Say once per class and process that its objects are stored and given back as plain data."""
    _warn_once(
        _named(kind),
        f"an object of {_named(kind)} was stored as plain data, and plain data is what you get, the first time and at every replay. "
        "To get the class back declare it: by a return annotation, by returns=, or with register_type.",
    )


def _warn_once(key: str, message: str) -> None:
    mine = object()
    if _warned.setdefault(key, mine) is mine:
        try:
            warnings.warn(message, PlainDataWarning, stacklevel=_frames_of_ours())
        except PlainDataWarning:  # made an error by the user's filters: so it is one each time
            _warned.pop(key, None)
            raise


def _frames_of_ours() -> int:
    """How far up the stack the user's own code stands."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("agent_run_ledger."):
        frame, level = frame.f_back, level + 1
    return level


def _note_once(key: str, message: str) -> None:
    """A warning about what is read. What is stored must stay readable, so it never becomes an error."""
    with contextlib.suppress(PlainDataWarning):
        _warn_once(key, message)


# --- registered classes -----------------------------------------------------------------------------------------------

_name_of: dict[type, str] = {}
_class_of: dict[str, type] = {}


def register(cls: type, name: str | None) -> None:
    """Bind a class and a name to each other, for good."""
    if not _is_buildable(cls):
        raise TypeError(
            f"register_type takes an enum, a dataclass, a pydantic model, a named tuple or a subclass of a built-in type, not {cls!r}"
        )
    name = cls.__name__ if name is None else name
    if cls in _name_of:
        raise ValueError(f"{_named(cls)} is registered already, as {_name_of[cls]!r}")
    if name in _class_of:
        raise ValueError(f"the name {name!r} is registered already, for {_named(_class_of[name])}; give another name=")
    _class_of[name] = cls
    _name_of[cls] = name


def registered_name(cls: type) -> str | None:
    """The name that stored data has for this class."""
    return _name_of.get(cls)


def rebuild_registered(name: str, plain: Any) -> Any:
    """The object that was stored under a registered name; plain data, with a warning, where nobody registered it here."""
    cls = _class_of.get(name)
    if cls is None:
        _note_once(
            f"name {name}",
            f"stored data names the class {name!r}, which is not registered here: it is read as plain data.",
        )
        return plain
    return rebuild(cls, plain)


def _is_buildable(cls: Any) -> bool:
    if not isinstance(cls, type) or cls.__module__ == "builtins":
        return False
    return (
        _is_enum(cls)
        or _is_model(cls)
        or _is_dataclass(cls)
        or (issubclass(cls, _BUILTIN_BASES) and not _is_typed_dict(cls))
    )


# --- annotations ------------------------------------------------------------------------------------------------------

_known: dict[object, frozenset[type]] = {}
_KNOWN_LIMIT = 1024


def classes(annotation: object) -> frozenset[type]:
    """The classes that an annotation names, at any depth, and that `rebuild` can build."""
    try:
        found = _known.get(annotation)
    except TypeError:  # unhashable, such as Annotated[int, []]
        return frozenset(_named_classes(annotation))
    if found is None:
        found = frozenset(_named_classes(annotation))
        if len(_known) >= _KNOWN_LIMIT:  # annotations made anew for every call
            _known.clear()
        _known[annotation] = found
    return found


def _named_classes(annotation: object) -> set[type]:
    found: set[type] = set()
    seen: list[object] = []
    waiting = [annotation]
    while waiting:
        one = _bare(waiting.pop())
        if one in seen:
            continue
        seen.append(one)
        if typing.get_origin(one) is typing.Literal:
            found.update(type(value) for value in typing.get_args(one) if _is_enum(type(value)))
            continue
        waiting += typing.get_args(one)
        cls = typing.get_origin(one) or one
        if _is_buildable(cls):
            found.add(cls)
        if isinstance(cls, type):
            waiting += _hints(cls).values()
    return found


def _bare(annotation: Any) -> Any:
    """The type that Annotated, Required, Final, NewType or a type alias wraps."""
    while True:
        if typing.get_origin(annotation) in (
            typing.Annotated,
            typing.Required,
            typing.NotRequired,
            typing.Final,
            typing.ClassVar,
        ):
            annotation = typing.get_args(annotation)[0]
        elif hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        elif hasattr(annotation, "__value__") and type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        else:
            return annotation


def _hints(cls: Any) -> dict[str, Any]:
    """The resolved annotations of a class's fields; Any where a name cannot be found (a class local to a function, say)."""
    if _is_model(cls):
        return {name: field.annotation for name, field in getattr(cls, "model_fields", {}).items()}
    if not _is_dataclass(cls) and not _is_named_tuple(cls) and not _is_typed_dict(cls):
        return {}
    try:
        return typing.get_type_hints(cls)
    except Exception:
        return {
            name: _resolved(hint, base) for base in reversed(cls.__mro__) for name, hint in _own_hints(base).items()
        }


def _own_hints(cls: type) -> dict[str, Any]:
    from inspect import get_annotations

    try:
        return dict(get_annotations(cls))
    except Exception:  # they are evaluated only now, in newer Pythons
        return {}


def _resolved(hint: object, owner: type) -> Any:
    module = sys.modules.get(owner.__module__)
    return _evaluated(hint, vars(module) if module else {}, {owner.__name__: owner})


def _evaluated(hint: object, global_names: dict[str, Any], local_names: dict[str, Any]) -> Any:
    """One annotation with its names resolved; Any where one is not to be found."""

    def holder() -> None: ...

    holder.__annotations__ = {"hint": hint}
    try:
        return typing.get_type_hints(holder, global_names, local_names, include_extras=True)["hint"]
    except Exception:
        return Any


# --- plain data to objects --------------------------------------------------------------------------------------------


def rebuild(annotation: object, plain: Any) -> Any:
    """See `canonical.rebuild`."""
    try:
        return _build_or_leave(annotation, plain, strict=False)
    except Exception as error:  # a class may raise anything: what is stored must stay readable
        _warn_left(annotation, error)
        return plain


def _warn_left(annotation: object, error: Exception) -> None:
    from agent_run_ledger.rules.redaction import Redactor  # only who has gone wrong needs it

    _note_once(
        f"left {annotation!r}",
        f"stored data could not be made into {annotation!r} and is given back as plain data: {Redactor().text(str(error))}",
    )


def _build_or_leave(annotation: Any, plain: Any, strict: bool) -> Any:
    """Build, or in a lenient pass leave this part plain: fields need not hold what their annotations say."""
    try:
        return _build(annotation, plain, strict)
    except Misfit as misfit:
        if strict:
            raise
        _warn_left(annotation, misfit)
        return plain


def _build(annotation: Any, plain: Any, strict: bool) -> Any:
    """The declared value; `Misfit` where a class cannot be built, and, if `strict`, where anything is not as declared."""
    annotation = _bare(annotation)
    if annotation is Any or annotation is object or isinstance(annotation, (str, typing.TypeVar)):
        return plain
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Union or origin is UnionType:
        return _build_union(args, plain, strict)
    if origin is typing.Literal:
        return _build_literal(args, plain, strict)
    cls = origin or annotation
    if cls is None or cls is type(None):
        return _as_is(plain, plain is None, "None", strict)
    if not isinstance(cls, type):
        return plain
    if _is_buildable(cls):
        return _build_object(cls, args, plain, strict)
    if _is_typed_dict(cls):
        return _build_typed_dict(cls, args, plain, strict)
    if args and isinstance(plain, (list, tuple, set, frozenset, dict)) and _is_instance(plain, cls):
        return _build_items(args, plain, strict)
    if cls is float or cls is int:
        fits = type(plain) is int or type(plain) is cls
    else:
        fits = _is_instance(plain, cls)
    return _as_is(plain, fits, cls.__name__, strict)


def _is_instance(plain: Any, cls: type) -> bool:
    try:
        return isinstance(plain, cls)
    except TypeError:  # a Protocol that is not checkable
        return False


def _as_is(plain: Any, fits: bool, what: str, strict: bool) -> Any:
    if strict and not fits:
        raise Misfit(f"expected {what}, found {type(plain).__name__}")
    return plain


def _build_union(members: tuple[Any, ...], plain: Any, strict: bool) -> Any:
    for pass_is_strict in (True,) if strict else (True, False):
        for member in members if pass_is_strict else sorted(members, key=lambda member: not _is_tagged(member, plain)):
            try:
                built = _build(member, plain, pass_is_strict)
            except Misfit:
                continue
            if pass_is_strict or classes(member):
                return built
    if strict or (type(plain) is dict and any(map(classes, members))):
        raise Misfit(f"no member of the union fits {type(plain).__name__}")
    return plain


def _is_tagged(member: Any, plain: Any) -> bool:
    """Whether the data says of itself that it is of this model: by fields that hold one of few values, such as `type`."""
    if type(plain) is not dict or not _is_model(_bare(member)):
        return False
    hints = _hints(_bare(member))
    tags = [name for name, hint in hints.items() if typing.get_origin(_bare(hint)) is typing.Literal and name in plain]
    return bool(tags) and all(plain[name] in typing.get_args(_bare(hints[name])) for name in tags)


def _build_literal(values: tuple[Any, ...], plain: Any, strict: bool) -> Any:
    for value in values:
        inner = value.value if _is_enum(type(value)) else value
        if type(inner) is type(plain) and inner == plain:
            return value
    return _as_is(plain, plain in values, f"one of {values!r}", strict)


def _build_items(args: tuple[Any, ...], plain: Any, strict: bool) -> Any:
    if isinstance(plain, dict):
        keys, items = (*args, Any)[:2]
        return {_build_or_leave(keys, key, strict): _build_or_leave(items, item, strict) for key, item in plain.items()}
    if isinstance(plain, tuple) and args[-1] is not Ellipsis and len(args) == len(plain):
        return tuple(_build_or_leave(arg, item, strict) for arg, item in zip(args, plain, strict=True))
    if isinstance(plain, tuple) and strict and len(args) > 1 and args[-1] is not Ellipsis:
        raise Misfit(f"expected {len(args)} items, found {len(plain)}")
    return type(plain)(_build_or_leave(args[0], item, strict) for item in plain)


def _build_object(cls: Any, args: tuple[Any, ...], plain: Any, strict: bool) -> Any:
    if isinstance(plain, cls):  # a registered class was built while its bytes were read
        return plain
    try:
        if _is_enum(cls):
            return cls(plain)
        if _is_wire_model(cls):
            return _build_wire_model(cls, plain, strict)
        if _is_model(cls):
            return _build_model(cls, plain)
        if _is_dataclass(cls):
            return _build_dataclass(cls, _substituted(cls, args), plain, strict)
        if _is_named_tuple(cls):
            return _build_named_tuple(cls, plain, strict)
        built = cls(plain)
    except Misfit:
        raise
    except Exception as error:
        raise Misfit(f"{_named(cls)}: {error}") from error
    if built != plain:
        raise Misfit(f"{_named(cls)} made another value of it")
    return built


def _build_typed_dict(cls: Any, args: tuple[Any, ...], plain: Any, strict: bool) -> Any:
    if type(plain) is not dict:
        return _as_is(plain, False, cls.__name__, strict)
    hints = _substituted(cls, args)
    if strict and not cls.__required_keys__ <= plain.keys() <= hints.keys():
        raise Misfit(f"{_named(cls)} has other keys")
    return {key: _build_or_leave(hints.get(key, Any), item, strict) for key, item in plain.items()}


_STABLE_FACTORIES = (list, dict, set, tuple, frozenset, str, int, float, bool, bytes)


def _build_model(cls: Any, plain: Any) -> Any:
    is_fields = type(plain) is dict and not getattr(cls, "__pydantic_root_model__", False)
    if is_fields:
        missing = {
            name: field for name, field in cls.model_fields.items() if plain.keys().isdisjoint(_keys_of(name, field))
        }
        _refuse_fresh_defaults(cls, {name: field.default_factory for name, field in missing.items()})
    try:
        built = cls.model_validate(plain, strict=False)
    except ValueError:
        built = cls.model_validate(
            plain, strict=False, by_alias=True, by_name=True
        )  # dumped by name, declared by alias
    if is_fields:  # a model ignores what it does not know, and a subclass's fields with it
        known = {key for name, field in cls.model_fields.items() for key in _keys_of(name, field)}
        if lost := plain.keys() - known - (built.model_extra or {}).keys():
            raise Misfit(f"{_named(cls)} has no field {min(lost, key=str)!r}")
    return built


def _build_wire_model(cls: Any, plain: Any, strict: bool) -> Any:
    """The model that is stored as exactly this data: validated where that changes nothing, else built as its client builds it."""
    validated = None
    try:
        validated = _build_model(cls, plain)
        if _is_stored_as(validated, plain):
            return validated
    except Misfit:
        raise
    except ValueError:
        if strict or type(plain) is not dict:
            raise
    if strict:
        raise Misfit(f"{_named(cls)} makes another value of it")
    constructed = cls.model_construct(**plain)
    if _is_stored_as(constructed, plain):
        return constructed
    if validated is None:
        raise Misfit(f"{_named(cls)} makes another value of it")
    return validated


def _is_stored_as(built: Any, plain: Any) -> bool:
    from agent_run_ledger.rules import canonical  # it imports this module only where a class is met

    stored = canonical.encode(plain)
    return any(canonical.encode(form(built), declared=type(built)) == stored for form in (_as_sent, _in_full))


def _keys_of(name: str, field: Any) -> tuple[Any, ...]:
    return (name, field.alias, field.validation_alias if isinstance(field.validation_alias, str) else name)


def _refuse_fresh_defaults(cls: type, factories: dict[str, Any]) -> None:
    for name, factory in factories.items():
        if not _is_stable(factory):
            raise Misfit(f"{_named(cls)}: {name!r} is missing, and its default is made anew each time")


def _is_stable(factory: object) -> bool:
    """Whether a default would be the same at every replay."""
    return factory is None or factory in _STABLE_FACTORIES


def _build_dataclass(cls: Any, hints: dict[str, Any], plain: Any, strict: bool) -> Any:
    from dataclasses import MISSING, InitVar, fields

    if type(plain) is not dict:
        raise Misfit(f"{_named(cls)} needs a dict, found {type(plain).__name__}")
    known = {field.name: field for field in fields(cls)}
    if strange := plain.keys() - known.keys():
        raise Misfit(f"{_named(cls)} has no field {min(strange, key=str)!r}")
    missing = {name: field.default_factory for name, field in known.items() if name not in plain}
    _refuse_fresh_defaults(cls, {name: factory for name, factory in missing.items() if factory is not MISSING})
    values = {name: _build_or_leave(hints.get(name, Any), item, strict) for name, item in plain.items()}
    if any(isinstance(hint, InitVar) for hint in hints.values()):
        built = cls.__new__(cls)  # the constructor wants what was never stored
    else:
        built = cls(**{name: value for name, value in values.items() if known[name].init})
    for name, value in values.items():  # what the constructor derived or changed is as it was stored
        if getattr(built, name, MISSING) is not value:
            object.__setattr__(built, name, value)
    return built


def _build_named_tuple(cls: Any, plain: Any, strict: bool) -> Any:
    if not isinstance(plain, tuple) or len(plain) != len(cls._fields):
        raise Misfit(f"{_named(cls)} needs {len(cls._fields)} items")
    hints = _hints(cls)
    return cls._make(
        _build_or_leave(hints.get(name, Any), item, strict) for name, item in zip(cls._fields, plain, strict=True)
    )


def _substituted(cls: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """The hints of a generic class with its parameters filled in."""
    hints = _hints(cls)
    if not args:
        return hints
    meaning = dict(zip(getattr(cls, "__parameters__", ()), args, strict=False))
    filled = {}
    for name, hint in hints.items():
        parameters = getattr(hint, "__parameters__", ())
        if isinstance(hint, typing.TypeVar):
            hint = meaning.get(hint, Any)
        elif parameters and not isinstance(hint, type):
            hint = hint[tuple(meaning.get(parameter, Any) for parameter in parameters)]
        filled[name] = hint
    return filled
