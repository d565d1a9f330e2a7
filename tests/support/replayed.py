"""A program as a machine: asked again from its first line with all that it has heard, until it asks for something new.

So it can be left and taken up at any moment, as often as one likes, without threads: where it stands is known by what it knows.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    NoneType,
    TracebackType,
)
from typing import Any, Literal, NamedTuple

import pytest

from agent_run_ledger import AgentRunLedger, LeaseLost, LedgerError, current_step
from agent_run_ledger.drivers.sync import SyncDriver
from agent_run_ledger.engine.effects import Commit, Invoke, Wait
from agent_run_ledger.stores.memory import MemoryStore

RUN, GOAL = "run", "reconcile"
ME = "me"
LEASE_SECONDS = 3600.0
WALL = 1_700_000_000.0
ELAPSED = 100_000_000.0
"""What a program's clock of leases shows at first: so far from every other number that its times are known by their size."""
SECRET = bytes(32)
CONSTANT = {"first_token": 1, "secret": SECRET}
"""The verbs that nobody's deeds change: it does not matter when they are asked."""
PATIENCE = 6
"""How often a program tries again. A lease can be lost twice at most: by the clock, and by a crash of whoever took it."""


# --- what programs ask, and what they hear ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verb:
    """The program's ledger asks the store."""

    name: str
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Pause:
    """The driver is about to perform an effect that looks at the clock: a place at which time may pass."""

    effect: str


@dataclass(frozen=True, slots=True)
class Called:
    """A step's function was entered. Its effect on the outside world comes with the answer."""

    tool: str
    position: str
    attempt: int
    key: str
    token: int
    given: str
    """What it was given, as JSON."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """The program waits, and the world's time passes."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The program is over: it returned `value` (as JSON), or raised an error of this name."""

    how: str
    value: str = ""


Ask = Verb | Pause | Called | Sleep | Ended


@dataclass(frozen=True)
class Raised:
    """The answer of a verb that raised. Two of one kind are one answer to a program."""

    name: str
    error: LedgerError = field(compare=False)

    def again(self) -> LedgerError:
        """The error without what an earlier raise has left in it."""
        fresh = type(self.error).__new__(type(self.error), *self.error.args)
        fresh.__dict__.update(self.error.__dict__)
        return fresh


class Beat:
    """No answer: the heartbeat's thread has its turn while the program stands where it stands."""


BEAT = Beat()


class Heard(NamedTuple):
    """What a program hears when it goes on: the answer, how many seconds it stood there, and the wall clock."""

    answer: Any
    elapsed: float
    wall: float


class Parted(BaseException):
    """The program has asked for something new. It is left here, and begun again once there is an answer."""


# --- a program, being played ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Script:
    """A program, what its ledger is opened with, and what it may come to."""

    play: Callable[[Life], Any]
    returns: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    on_loss: Literal["calls again", "begins again"] = "calls again"
    """What the program does where its lease was lost: makes the call again, or begins at its first line."""
    starts_again: tuple[str, ...] = ("RunOwned",)
    """The errors upon which a new process begins: programs are started until they get the run."""
    may_end: tuple[str, ...] = ("returned",)
    """How it may end, if not by one of those."""
    must_not_repeat: tuple[str, ...] = ()
    """The tools that may be called once at most."""
    attempts: dict[str, int] = field(default_factory=dict)
    """How often a tool may be dispatched for one step, where that is not four times."""
    max_steps: int = 3

    def max_attempts(self, tool: str) -> int:
        return self.attempts.get(tool, 4)


class Life:
    """One process that plays a script. To its own ledger it is the store and the clock; `answers` answers all that it asks."""

    def __init__(self, script: Script, answers: Callable[[Ask], Heard | None]) -> None:
        self.script = script
        self._answers = answers
        self._elapsed = ELAPSED
        self._wall = WALL
        self.asked: Ask | None = None
        """The first thing that nobody answered."""
        self._broken: AssertionError | None = None
        """A promise that was seen broken inside a step, where it would pass for the step's own failure."""
        self.memory = Memory(0, waits=False)
        """What the program and its ledger know as they ask that."""
        lease = {"lease_seconds": LEASE_SECONDS, "heartbeat_seconds": LEASE_SECONDS / 2}
        this: Any = self
        self.ledger = AgentRunLedger(this, clock=this, owner=ME, **(lease | script.options))
        self.ledger._driver = PausingDriver(self.ledger._driver, self)
        self.ledger._leases._heart = threading.Lock()  # no heartbeat comes on its own: time is the test's

    def live(self) -> Ask:
        """Play until the script is over or asks what nobody answers. Returns that, and raises what `answers` found broken."""
        ended = Ended("parted")
        try:
            ended = Ended("returned", json.dumps(self._play()))
        except LedgerError as error:
            ended = Ended(type(error).__name__)
        except Parted:
            pass
        finally:
            with suppress(Parted):
                self.ledger.close()
        if self._broken is not None:
            raise self._broken
        return self.asked or ended

    def _play(self) -> Any:
        return self._patiently("begins again", lambda: self.script.play(self))

    def step(
        self,
        tool: str,
        given: Any,
        does: Callable[[Any, int], Any] | None = None,
        *,
        beats: bool = False,
        **options: Any,
    ) -> Any:
        """One step. Its function returns what `does` makes of its argument and of the attempt's number."""

        def call(given: Any) -> Any:
            step = current_step()
            if beats:
                step.heartbeat()
            said = json.dumps(given)
            self.ask(Called(tool, step.position, step.attempt, step.idempotency_key, step.fencing_token, said))
            return does(given, step.attempt) if does is not None else [tool, given]

        ledger = self.ledger
        return self._patiently("calls again", lambda: ledger.execute_step(RUN, tool, {"given": given}, call, **options))

    def finish(self, result: Any) -> Any:
        """Complete the run, and say with what."""
        self._patiently("calls again", lambda: self.ledger.finish_run(RUN, result))
        return result

    def _patiently(self, on_loss: str, do: Callable[[], Any]) -> Any:
        """Do it, and do it again where the lease was lost, if that is what this script does then."""
        for _ in range(PATIENCE):
            try:
                return do()
            except LeaseLost:
                if self.script.on_loss != on_loss:
                    raise
        raise AssertionError("the lease was lost more often than anybody could take it")

    def ask(self, ask: Ask) -> Any:
        """Ask the world. Raises `Parted` where there is no answer yet."""
        while True:
            heard = None
            if self.asked is None:
                try:
                    heard = self._answers(ask)
                except AssertionError as broken:
                    self._broken = broken
            if heard is None:
                if self.asked is None:
                    self.asked = ask
                    self.memory = remembered(self, sys._getframe(1))
                raise Parted
            self._elapsed += heard.elapsed
            self._wall = heard.wall
            if heard.answer is not BEAT:
                break
            self.ledger._leases.beat()
        if isinstance(heard.answer, Raised):
            raise heard.answer.again()
        return heard.answer

    # --- the clock and the store of its ledger ------------------------------------------------------------------------

    def now(self) -> float:
        return self._wall

    def elapsed(self) -> float:
        return self._elapsed

    def sleep(self, seconds: float) -> None:
        self.ask(Sleep(seconds))

    def close(self) -> None:
        """What the process shares with others outlives it."""

    def __getattr__(self, verb: str) -> Any:
        if verb.startswith("_") or not hasattr(MemoryStore, verb):
            raise AttributeError(verb)

        def perform(*arguments: Any, **options: Any) -> Any:
            if verb in CONSTANT:
                return CONSTANT[verb]
            asked = tuple(tuple(each) if type(each) is list else each for each in arguments)
            answer = self.ask(Verb(verb, asked, tuple(sorted(options.items()))))
            return list(answer) if type(answer) is tuple else answer

        return perform


class PausingDriver(SyncDriver):
    """The driver of a life: it can be stopped before every effect that looks at a clock. What asks the store is stopped there."""

    def __init__(self, driver: SyncDriver, life: Life) -> None:
        self.__dict__.update(driver.__dict__)
        self._life = life

    def perform(self, effect: Any) -> Any:
        if isinstance(effect, Commit | Invoke | Wait):
            self._life.ask(Pause(type(effect).__name__))
        return super().perform(effect)


class Place:
    """Where a program stands: what it has heard since its first line, what it asked, and what it asks now."""

    def __init__(
        self, number: int, script: Script, heard: tuple[Heard, ...], asked: tuple[Ask, ...], *, waits: bool
    ) -> None:
        self.number = number
        self.script = script
        self.heard = heard
        self.asked = asked
        self.asks = asked[-1]
        self.is_fresh = not heard
        self.waits = waits
        """Whether it knows of a time that is still to come; else it cannot tell how much time has passed."""
        self.next: dict[tuple[int, float, float], Place] = {}
        """Where it stands after it has heard an answer: the answer's number, the seconds it stood here, the wall clock."""

    @property
    def may_beat(self) -> bool:
        """Whether the heartbeat's thread can have its turn: the run's lock is free here."""
        return isinstance(self.asks, Pause | Called | Sleep)


def begin_again(script: Script, heard: tuple[Heard, ...], asked: tuple[Ask, ...]) -> tuple[Ask, Memory]:
    """What a script asks next after it has heard all this, as it heard it before, and what it knows by then."""
    answers, expected = iter(heard), iter(asked)

    def answer(ask: Ask) -> Heard | None:
        told = next(answers, None)
        if told is not None:
            assert ask == next(expected), "the program is not deterministic, so nothing can be said about it"
        return told

    life = Life(script, answer)
    return life.live(), life.memory


@contextmanager
def nothing_random() -> Iterator[None]:
    """The same secrets and the same waits each time that a program begins again; and no word about undeclared steps."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(os, "urandom", bytes)
        patch.setattr(random, "random", lambda: 0.5)
        yield


# --- what a program knows ---------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """All that a program and its ledger know. Two programs of one script that know the same do the same from here on."""

    hashed: int
    waits: bool
    """Whether there is a time in it that is still to come."""


def remembered(life: Life, frame: FrameType | None) -> Memory:
    """A life's whole memory: the frames in which it stands, and whatever can be reached from them and from its ledger.

    It names no class of the engine, so nothing is overlooked as the engine changes; what is not looked into stands in `_OPAQUE`.
    """
    walk = _Walk(life)
    while frame is not None and frame.f_code is not Life.live.__code__:
        walk.frame(frame)
        frame = frame.f_back
    walk.value(life.ledger)
    return Memory(hash(tuple(walk.said)), walk.waits)


_OPAQUE = (
    type, ModuleType, CodeType, FrameType, TracebackType, BuiltinFunctionType, threading.Event, type(threading.Lock()),
    type(threading.RLock()), weakref.ref, ContextVar, Token,
)  # fmt: skip
"""What these hold is no part of what a program knows: their kind and name say enough."""


class _Walk:
    """Says all that can be reached from some values as plain data, each object once, always in the same order."""

    def __init__(self, life: Life) -> None:
        self.said: list[Any] = []
        self.waits = False
        self._life = life
        self._met: dict[int, int] = {}
        self._kept: list[Any] = []

    def frame(self, frame: FrameType) -> None:
        self.said += (frame.f_code, frame.f_lasti)
        for name, value in frame.f_locals.items():
            self.said.append(name)
            self.value(value)

    def value(self, value: Any) -> None:
        kind: Any = type(value)
        manner = _manner(kind)
        if manner == "plain":
            self.said += (kind, value)
        elif manner == "float":
            if abs(value - ELAPSED) < ELAPSED / 2:  # what is past is past, however long ago
                left = max(0.0, value - self._life.elapsed())
                self.waits = self.waits or left > 0
                self.said += ("seconds left", left)
            else:
                self.said += (kind, value)
        elif manner == "opaque":
            self.said += (kind, getattr(value, "__qualname__", ""))
        elif value is self._life:
            self.said += ("life", self._life.now())
        elif id(value) in self._met:
            self.said += ("met", self._met[id(value)])
        else:
            self._met[id(value)] = len(self._met)
            self._kept.append(value)  # or another object would be met at its address
            self.said.append(kind)
            self._inside(value, manner)

    def _inside(self, value: Any, manner: str) -> None:
        if manner == "sequence":
            self._each(value)
        elif manner == "mapping":
            self._each(value)
            self._each(value.values())
        elif manner == "set":
            self._each(sorted(value, key=repr))
        elif manner == "function":
            self.said.append(value.__code__)
            self._each(cell.cell_contents for cell in value.__closure__ or ())
        elif manner == "method":
            self._each((value.__func__, value.__self__))
        elif manner == "partial":
            self._each((value.func, value.args, value.keywords))
        elif manner == "generator":
            if value.gi_frame is not None:
                self.frame(value.gi_frame)
            self.value(value.gi_yieldfrom)
        else:
            if isinstance(value, BaseException):
                self._each((value.args, value.__cause__))
            self._each(vars(value).values() if hasattr(value, "__dict__") else ())
            self._each([getattr(value, name, None) for name in _slots(value.__class__)])

    def _each(self, values: Iterable[Any]) -> None:
        number = 0
        for value in values:
            self.value(value)
            number += 1
        self.said.append(number)


_MANNERS: dict[str, tuple[type, ...]] = {
    "opaque": _OPAQUE,
    "float": (float,),
    "plain": (int, str, bytes, NoneType, Enum),
    "mapping": (Mapping,),
    "sequence": (tuple, list, deque),
    "set": (Set,),
    "function": (FunctionType,),
    "method": (MethodType,),
    "partial": (partial,),
    "generator": (GeneratorType,),
}


@cache
def _manner(kind: Any) -> str:
    """How an object of this kind is looked into."""
    return next((manner for manner, kinds in _MANNERS.items() if issubclass(kind, kinds)), "object")


@cache
def _slots(kind: type) -> tuple[str, ...]:
    return tuple(name for base in kind.__mro__ for name in getattr(base, "__slots__", ()) if not name.startswith("__"))
