"""Calls that may be left behind: what they return, what is kept of them, who is told, and how threads come and go."""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger.drivers import workers
from agent_run_ledger.drivers.workers import Work, start
from support.processes import child, environment
from test_interrupts import Interrupts

LONG = 60.0
"""Seconds that no wait lasts unless something is broken."""


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test begins without threads, and all that it has started end."""
    before, count = set(threading.enumerate()), _thread._count()
    monkeypatch.setattr(workers, "_idle", [])
    yield
    monkeypatch.setattr(workers, "MOST_IDLE", -1)
    nothing = Work(int, {}, "nothing")
    nothing.take_back()
    while (threads := set(threading.enumerate()) - before) or _thread._count() > count:  # some only start others
        while (worker := workers._pop_idle()) is not None:
            worker.give(nothing)
        for thread in threads:
            if thread.ident is not None:
                thread.join(LONG)
                assert not thread.is_alive()
        os.sched_yield()
    assert workers._idle == []


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a function waits at until the test lets it on; open at the latest when the test ends."""
    gate = threading.Event()
    yield gate
    gate.set()


def done(function: Callable[..., Any], **arguments: Any) -> Any:
    """What the function returns in a thread of its own."""
    work = start(function, arguments, "a call")
    assert work.wait(LONG)
    value, error = work.result
    if error is not None:
        raise error
    return value


def started_and_awaited(work: Work) -> None:
    work.start()
    work.wait(None)


def passes(gate: threading.Event) -> threading.Thread:
    assert gate.wait(LONG)
    return threading.current_thread()


# --- one call ---------------------------------------------------------------------------------------------------------


def test_a_function_is_called_with_its_arguments_and_its_value_is_the_result() -> None:
    work = start(lambda **arguments: arguments, {"self": 1, "function": 2, "context": 3}, "a call")
    assert work.wait(LONG)
    assert work.is_over
    assert work.result == ({"self": 1, "function": 2, "context": 3}, None)


@pytest.mark.parametrize("kind", [ValueError, StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_a_function_raises_is_a_result_and_nothing_is_printed(
    kind: type[BaseException], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    raised = kind("no")

    def fails() -> None:
        raise raised

    work = start(fails, {}, "a call")
    assert work.wait(LONG)
    assert work.result == (None, raised)
    thread = done(threading.current_thread)
    assert done(threading.current_thread) is thread  # it has survived
    assert capfd.readouterr() == ("", "")
    assert seen == []


def test_arguments_that_do_not_fit_are_a_result_too() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'x'"):
        done(lambda: None, x=1)


def test_the_thread_is_a_daemon_that_bears_the_calls_name() -> None:
    def look() -> tuple[str, bool, bool]:
        me = threading.current_thread()
        return me.name, me.daemon, me in threading.enumerate()

    for name in ("fetch", "post"):
        work = start(look, {}, name)
        assert work.wait(LONG)
        assert work.result.value == (name, True, True)


def test_debuggers_and_coverage_see_the_thread() -> None:
    seen: list[str] = []

    def trace(frame: Any, event: str, argument: object) -> None:
        seen.append(frame.f_code.co_name)

    def traced() -> None:
        pass

    before = threading.gettrace()
    threading.settrace(trace)
    try:
        done(traced)
    finally:
        threading.settrace(before)
    assert "traced" in seen


def test_a_call_sees_its_makers_context_and_changes_nobodys() -> None:
    variable = contextvars.ContextVar("variable", default="unset")

    def look_and_set() -> tuple[str, threading.Thread]:
        seen = variable.get()
        variable.set("set in a call")
        return seen, threading.current_thread()

    token = variable.set("set by the maker")
    work = Work(look_and_set, {}, "a call")
    variable.reset(token)
    work.start()
    assert work.wait(LONG)
    seen, thread = work.result.value
    assert seen == "set by the maker"
    assert variable.get() == "unset"
    assert done(look_and_set) == ("unset", thread)


def test_a_result_is_there_only_once_the_call_is_over(gate: threading.Event) -> None:
    work = start(passes, {"gate": gate}, "fetch")
    assert not work.is_over
    with pytest.raises(RuntimeError, match="'fetch' is not over"):
        work.result  # noqa: B018 # a property
    gate.set()
    assert work.wait(LONG)
    assert work.result.error is None


def test_however_often_it_is_started_it_is_called_once(gate: threading.Event) -> None:
    calls: list[None] = []

    def called() -> None:
        calls.append(None)
        passes(gate)

    work = Work(called, {}, "a call")
    for _ in range(100):  # the first ones perhaps before it has begun
        work.start()
    gate.set()
    assert work.wait(LONG)
    work.start()
    done(int)
    assert calls == [None]
    assert work.result == (None, None)


def test_what_is_taken_back_before_it_begins_is_never_called() -> None:
    calls: list[None] = []
    told: list[None] = []
    work = Work(lambda: calls.append(None), {}, "fetch")
    work.when_over(lambda: told.append(None))
    assert work.take_back()
    assert work.take_back()
    assert work.wait(None)
    assert isinstance(work.result.error, RuntimeError)
    assert str(work.result.error) == "'fetch' was not called"
    work.start()
    done(int)  # in the same thread
    assert (calls, told) == ([], [None])


def test_what_has_begun_is_not_taken_back(gate: threading.Event) -> None:
    has_begun = threading.Event()

    def begins() -> str:
        has_begun.set()
        passes(gate)
        return "done"

    work = start(begins, {}, "a call")
    assert has_begun.wait(LONG)
    assert not work.take_back()
    assert not work.is_over
    gate.set()
    assert work.wait(LONG)
    assert not work.take_back()
    assert work.result == ("done", None)


# --- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0, 0.0, 1e-9, -1, -0.5, float("-inf")])
def test_a_wait_ends_with_its_seconds_and_leaves_nothing(gate: threading.Event, seconds: float) -> None:
    work = start(passes, {"gate": gate}, "a call")
    for _ in range(100):
        assert not work.wait(seconds)
    assert work._to_tell == {}
    gate.set()
    assert work.wait(LONG)
    assert work.wait(seconds)


@pytest.mark.parametrize("seconds", [None, LONG, 1e300, float("inf")])
def test_a_wait_ends_with_the_call(gate: threading.Event, seconds: float | None) -> None:
    work = start(passes, {"gate": gate}, "a call")
    work.when_over(lambda: None)
    opener = threading.Timer(0.0, gate.set)
    opener.start()
    assert work.wait(seconds)
    opener.join()


def test_every_waiting_thread_is_woken(gate: threading.Event) -> None:
    work = start(passes, {"gate": gate}, "a call")
    waits = [start(work.wait, {"seconds": LONG}, "a wait") for _ in range(20)]
    gate.set()
    assert all(each.wait(LONG) and each.result == (True, None) for each in waits)


INTERRUPTED = """
import threading
from agent_run_ledger.drivers import workers
gate = threading.Event()
def waits():
    tell("in the call")
    gate.wait()
    return "done"
work = workers.Work(waits, {}, "a call")
try:
    work.start()
    work.wait(None)
except KeyboardInterrupt:
    tell(["interrupted", work.is_over, len(work._to_tell)])
hear()
gate.set()
tell([work.wait(None), *work.result])
"""


def test_ctrl_c_ends_a_wait_and_leaves_the_call_alone() -> None:
    with child(INTERRUPTED) as process:
        assert process.hear() == "in the call"
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            os.sched_yield()  # Python does not hear a signal that comes just before it falls asleep
        process.send(signal.SIGINT)
        assert process.hear() == ["interrupted", False, 0]
        process.tell("go on")
        assert process.hear() == [True, "done", None]
        assert process.ends() == 0


def interrupted(interrupts: Interrupts) -> None:
    """Start a call and wait for it, interrupted: it is made once or known never to be made, and threads are as good as before."""
    calls: list[str] = []
    work = Work(lambda what: calls.append(what), {"what": "called"}, "note")
    interrupts.run(lambda: started_and_awaited(work))
    if work.take_back():
        assert not interrupts.has_returned
        assert str(work.result.error) == "'note' was not called"
        expected = []
    else:
        assert work.wait(LONG)
        assert work.result == (None, None)
        assert not hasattr(interrupts.error, "__notes__")
        expected = ["called"]
    assert done(lambda: "as before") == "as before"
    assert calls == expected


@pytest.fixture(params=[0, 32])
def _few_or_many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls find no thread, or the one that made the call before. A thread that an interrupt has cut off ends soon."""
    monkeypatch.setattr(workers, "MOST_IDLE", request.param)
    monkeypatch.setattr(workers, "IDLE_SECONDS", 0.2)


@pytest.mark.usefixtures("_few_or_many")
def test_an_interrupt_anywhere_loses_no_call_and_no_thread() -> None:
    for place in range(1, 1000):
        interrupts = Interrupts(place)
        interrupted(interrupts)
        if interrupts.is_over:
            break
    assert interrupts.has_returned
    assert place > 10


@pytest.mark.usefixtures("_few_or_many")
def test_a_second_interrupt_while_the_first_is_cleaned_up_loses_none_either() -> None:
    first, second = 1, 1
    while True:
        interrupts = Interrupts(first, first + second, in_hooks=False)
        interrupted(interrupts)
        if interrupts.error is None:
            break
        first, second = (first + 1, 1) if interrupts.is_over else (first, second + 1)
    assert first > 10


# --- being told -------------------------------------------------------------------------------------------------------


def test_who_asked_is_told_once_in_the_calls_thread_and_at_once_where_it_is_over(gate: threading.Event) -> None:
    told: list[tuple[str, threading.Thread]] = []
    work = start(passes, {"gate": gate}, "a call")
    for who in ("first", "second"):
        work.when_over(lambda who=who: told.append((who, threading.current_thread())))  # type: ignore[misc]
    assert told == []
    gate.set()
    assert work.wait(LONG)
    thread = work.result.value
    assert told == [("first", thread), ("second", thread)]  # in the order in which they asked, like the wait above
    work.when_over(lambda: told.append(("late", threading.current_thread())))
    done(int)
    assert told == [("first", thread), ("second", thread), ("late", threading.current_thread())]


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_what_a_listener_raises_is_dropped_and_the_others_are_told(
    gate: threading.Event, kind: type[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    def fails() -> None:
        told.append("fails")
        raise kind("no")

    work = start(passes, {"gate": gate}, "a call")
    work.when_over(fails)
    work.when_over(lambda: told.append("told"))
    gate.set()
    assert work.wait(LONG)
    assert told == ["fails", "told"]
    assert done(threading.current_thread) is work.result.value
    assert capfd.readouterr() == ("", "")


def test_a_closed_event_loop_may_be_told(gate: threading.Event) -> None:
    loop = asyncio.new_event_loop()
    work = start(passes, {"gate": gate}, "a call")
    work.when_over(lambda: loop.call_soon_threadsafe(print))
    loop.close()
    gate.set()
    assert work.wait(LONG)
    work.when_over(lambda: loop.call_soon_threadsafe(print))
    assert done(threading.current_thread) is work.result.value


def test_an_event_loop_waits_without_a_thread_that_waits_for_it() -> None:
    async def main() -> tuple[str, int]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()
        work = start(lambda: "value", {}, "a call")
        work.when_over(lambda: loop.call_soon_threadsafe(lambda: answer.set_result(work.result.value)))
        return await asyncio.wait_for(answer, LONG), len(workers._idle)

    assert asyncio.run(main()) == ("value", 1)


class Pausing(dict[object, Callable[[], object]]):
    """Whoever puts something in goes on only when it is gone again."""

    is_gone = threading.Event()

    def __setitem__(self, key: object, value: Callable[[], object]) -> None:
        super().__setitem__(key, value)
        assert self.is_gone.wait(LONG)


def test_whoever_asks_just_before_the_call_ends_is_told_once(gate: threading.Event) -> None:
    work = start(passes, {"gate": gate}, "a call")
    work._to_tell = Pausing()
    told: list[threading.Thread] = []

    def tell() -> None:
        told.append(threading.current_thread())
        Pausing.is_gone.set()

    asking = start(work.when_over, {"tell": tell}, "asks")
    while not work._to_tell:
        os.sched_yield()
    gate.set()
    assert asking.wait(LONG)
    assert asking.result == (None, None)
    assert told == [work.result.value]


def test_whoever_asks_while_calls_end_is_told_once() -> None:
    for _ in range(2000):
        told: list[None] = []
        bell = threading.Semaphore(0)

        def tell(told: list[None] = told, bell: threading.Semaphore = bell) -> None:
            told.append(None)
            bell.release()

        work = start(int, {}, "a call")
        work.when_over(tell)
        assert bell.acquire(timeout=LONG)
        assert work.wait(LONG)
        done(int)
        assert told == [None]


# --- what is kept -----------------------------------------------------------------------------------------------------


class Thing:
    """Something that can be seen to be gone."""


class Farewell:
    """Waits until something is gone, without the garbage collector's help."""

    def __init__(self, thing: object) -> None:
        self._is_gone = threading.Semaphore(0)
        weakref.finalize(thing, self._is_gone.release).atexit = False

    def comes(self) -> bool:
        return self._is_gone.acquire(timeout=LONG)


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("fails", [False, True])
def test_a_finished_call_keeps_its_result_and_nothing_else(gate: threading.Event, fails: bool) -> None:
    variable: contextvars.ContextVar[Thing] = contextvars.ContextVar("variable")

    def function(thing: Thing) -> Thing:
        passes(gate)
        del thing  # else a traceback keeps it, rightly
        value = Thing()
        if fails:
            raise ValueError(value)
        return value

    def begun() -> tuple[Work, Farewell, Farewell]:
        argument, ambient = Thing(), Thing()
        token = variable.set(ambient)
        work = start(function, {"thing": argument}, "a call")
        variable.reset(token)
        return work, Farewell(argument), Farewell(ambient)

    work, argument, ambient = begun()
    gate.set()
    assert work.wait(LONG)
    assert argument.comes()
    assert ambient.comes()
    got: weakref.ref[Any] = weakref.ref(work.result.error.args[0] if work.result.error else work.result.value)
    assert isinstance(got(), Thing)
    made = Farewell(work)
    del work
    assert made.comes()  # although its thread is still there, and waits
    assert len(workers._idle) == 1
    assert got() is None


@pytest.mark.usefixtures("_no_collector")
def test_an_abandoned_call_is_gone_when_it_is_over(gate: threading.Event) -> None:
    def abandoned() -> tuple[Farewell, Farewell]:
        argument = Thing()
        work = start(lambda gate, argument: (passes(gate), argument), {"gate": gate, "argument": argument}, "a call")
        assert not work.wait(0)
        return Farewell(work), Farewell(argument)

    work, argument = abandoned()
    gate.set()
    assert work.comes()
    assert argument.comes()


def test_nothing_of_an_exception_is_seen_by_the_next_call_of_the_thread() -> None:
    def fails() -> None:
        raise ValueError(threading.current_thread())

    def looks() -> tuple[object, object, threading.Thread]:
        try:
            raise KeyError
        except KeyError as error:
            return sys.exc_info()[1], error.__context__, threading.current_thread()

    with pytest.raises(ValueError, match="Thread") as raised:
        done(fails)
    error, context, thread = done(looks)
    assert type(error) is KeyError
    assert context is None
    assert raised.value.args == (thread,)
    assert done(sys.exc_info) == (None, None, None)


# --- threads ----------------------------------------------------------------------------------------------------------


def test_ten_thousand_calls_one_after_the_other_need_one_thread() -> None:
    before = threading.active_count()
    threads = {done(threading.current_thread) for _ in range(10_000)}
    assert len(threads) == 1
    assert threading.active_count() <= before + 1


def test_an_abandoned_thread_is_replaced_and_is_used_again_once_it_is_over(gate: threading.Event) -> None:
    first = done(threading.current_thread)
    abandoned = start(passes, {"gate": gate}, "stuck")
    assert not abandoned.wait(0)
    second = done(threading.current_thread)
    assert second is not first
    assert done(threading.current_thread) is second
    gate.set()
    assert abandoned.wait(LONG)
    assert abandoned.result.value is first
    assert done(threading.current_thread) is first


def test_two_hundred_calls_are_made_at_once_and_their_threads_end(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "IDLE_SECONDS", 0.0)
    barrier = threading.Barrier(201)

    def meets() -> threading.Thread:
        barrier.wait(LONG)
        return passes(gate)

    works = [start(meets, {}, f"call {number}") for number in range(200)]
    barrier.wait(LONG)
    assert not any(work.wait(0) for work in works)
    gate.set()
    assert all(work.wait(LONG) for work in works)
    threads = [work.result.value for work in works]
    assert len(set(threads)) == 200
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    assert workers._idle == []
    assert done(threading.current_thread) not in threads


def test_only_so_many_threads_stay_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MOST_IDLE", 2)
    gates = [threading.Event() for _ in range(3)]
    works = [start(passes, {"gate": gate}, "a call") for gate in gates]
    for gate, work in zip(gates, works, strict=True):
        gate.set()
        assert work.wait(LONG)
    first, second, third = (work.result.value for work in works)
    third.join(LONG)
    assert not third.is_alive()
    assert first.is_alive()
    assert second.is_alive()
    assert {done(threading.current_thread) for _ in range(10)} == {second}


def test_a_thread_that_has_ended_under_the_starters_hands_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "IDLE_SECONDS", 0.0)
    found: list[workers._Worker] = []
    gate = threading.Event()
    work = start(passes, {"gate": gate}, "a call")
    work.when_over(lambda: found.append(workers._idle[-1]))
    gate.set()
    assert work.wait(LONG)
    work.result.value.join(LONG)
    workers._idle.extend(found)
    assert done(threading.current_thread) is not work.result.value
    assert found[0] not in workers._idle


def test_a_thread_that_is_given_a_call_as_it_ends_makes_it_and_goes_on(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Work] = []

    def give() -> None:
        given.append(start(threading.current_thread, {}, "at the last moment"))
        given[0].when_over(lambda: monkeypatch.setattr(workers, "MOST_IDLE", 1))

    monkeypatch.setattr(workers, "MOST_IDLE", -1)
    work = start(passes, {"gate": gate}, "a call")
    work.when_over(give)
    gate.set()
    assert work.wait(LONG)
    thread = work.result.value
    assert given[0].wait(LONG)
    assert given[0].result.value is thread
    for _ in range(10):
        assert done(threading.current_thread) is thread


@pytest.mark.parametrize("idle_seconds", [0.0, 1e-6, 5e-5, 1e-4])
def test_no_call_is_lost_to_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch, idle_seconds: float) -> None:
    monkeypatch.setattr(workers, "IDLE_SECONDS", idle_seconds)
    for number in range(500):
        assert done(lambda number: number, number=number) == number


# --- processes --------------------------------------------------------------------------------------------------------


def runs(script: str, *options: str) -> tuple[int, str, str]:
    """A process of its own: its exit code, and what it has written."""
    script = "import os, sys, threading, time\nfrom agent_run_ledger.drivers import workers\n" + script
    command = [sys.executable, "-X", "dev", "-W", "error", *options, "-c", script]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LONG, check=False)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    "function",
    [
        "lambda: threading.Event().wait()",
        "lambda: time.sleep(3600)",
        "lambda: [None for number in iter(int, 1)]",
        "lambda: workers.start(threading.Event().wait, {}, 'inner').wait(None)",
    ],
)
def test_an_abandoned_thread_keeps_no_process_from_ending_and_prints_nothing(function: str) -> None:
    script = f"work = workers.start({function}, {{}}, 'abandoned')\nassert not work.wait(0)\n"
    assert runs(script) == (0, "", "")
    assert runs("workers.start(int, {}, 'idle').wait(None)\n" + script + "sys.exit(3)") == (3, "", "")


def test_an_uncaught_error_beside_an_abandoned_thread_is_all_that_is_printed() -> None:
    code, output, errors = runs("workers.start(threading.Event().wait, {}, 'abandoned').wait(0)\nraise ValueError('x')")
    assert (code, output) == (1, "")
    assert errors.startswith("Traceback")
    assert errors.endswith("ValueError: x\n")


FORKS = """
gate = threading.Event()
abandoned = workers.start(gate.wait, {}, "abandoned")
assert workers.start(int, {}, "idle").wait(None)
parents = list(workers._idle)
pid = os.fork()
if pid == 0:
    assert workers._idle == []
    threads = {work.result.value for work in (workers.start(threading.current_thread, {}, "x") for _ in range(100)) if work.wait(None)}
    assert len(threads) == 1
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert workers._idle == parents
gate.set()
assert abandoned.wait(None)
work = workers.start(os.getpid, {}, "x")
assert work.wait(None) and work.result.value == os.getpid()
"""


def test_a_forked_child_has_threads_of_its_own_and_the_parent_keeps_its_own() -> None:
    # From 3.12 on Python warns of every fork beside threads.
    assert runs(FORKS, "-W", "ignore::DeprecationWarning") == (0, "", "")


FORKS_IN_A_CALL = """
def forks():
    pid = os.fork()
    if pid == 0:
        work = workers.start(lambda: 7, {}, "in the child")
        os._exit(work.result.value if work.wait(None) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
work = workers.start(forks, {}, "forks")
assert work.wait(None)
assert work.result == (7, None), work.result
"""


def test_a_call_may_fork() -> None:
    assert runs(FORKS_IN_A_CALL, "-W", "ignore::DeprecationWarning") == (0, "", "")


AT_THE_END = """
class Last:
    def __del__(self, os=os, sys=sys, workers=workers):
        assert sys.is_finalizing()
        work = workers.Work(lambda: os.write(1, b"called"), {}, "late")
        try:
            work.start()
        except RuntimeError as error:
            os.write(1, f"{error}. {error.__notes__[0]} {work.is_over} {work.result.error}. ".encode())
        os.write(1, str(self.abandoned.wait(None)).encode())
last = Last()
last.abandoned = workers.start(threading.Event().wait, {}, "abandoned")
workers.start(int, {}, "idle").wait(None)
"""


def test_at_the_interpreters_end_a_start_is_refused_and_a_wait_does_not_hang() -> None:
    said = (
        "cannot start a thread: the interpreter is shutting down. 'late' was not called. True 'late' was not called. "
    )
    assert runs(AT_THE_END) == (0, said + "False", "")


AT_EXIT = """
import atexit
def at_exit():
    for _ in range(2):
        try:
            work = workers.start(lambda: "called", {}, "late")
            said.append(work.result.value if work.wait(10) else "lost")
        except RuntimeError as error:
            said.append(f"{error}. {error.__notes__[0]}")
    print(said)
said = []
atexit.register(at_exit)
"""


def test_a_start_from_an_exit_handler_either_works_or_says_why_not() -> None:
    code, output, errors = runs(AT_EXIT)
    assert (code, errors) == (0, "")
    if output != "['called', 'called']\n":  # some versions of Python allow no new thread from then on
        assert output.count("at interpreter shutdown. 'late' was not called.") == 2
    assert runs(AT_EXIT + "workers.start(int, {}, 'idle').wait(None)") == (0, "['called', 'called']\n", "")


NO_MORE_THREADS = """
import resource
has_begun, gate = threading.Event(), threading.Event()
blocked = workers.start(lambda: (has_begun.set(), gate.wait()), {}, "blocked")
has_begun.wait()
with open("/proc/self/statm") as pages:
    size = int(pages.read().split()[0]) * resource.getpagesize()
room = 256 << 20
threading.stack_size(room)
resource.setrlimit(resource.RLIMIT_AS, (size + room * (2 * THREADS + 1) // 2, resource.RLIM_INFINITY))
work = workers.Work(int, {}, "one too many")
try:
    work.start()
except RuntimeError as error:
    print(error, error.__notes__, work.take_back())
assert work.wait(None)
print(work.result.error)
gate.set()
assert blocked.wait(None)
again = workers.start(threading.current_thread, {}, "again")
assert again.wait(None) and again.result.error is None
"""


def test_where_the_machine_has_no_more_threads_a_start_says_so_and_later_ones_work() -> None:
    said = "can't start new thread [\"'one too many' was not called.\"] True\n'one too many' was not called\n"
    assert runs("THREADS = 0" + NO_MORE_THREADS) == (0, said, "")


def test_where_the_machine_has_no_more_threads_a_little_later_the_result_says_so() -> None:
    said = "'one too many' was not called: can't start new thread\n"
    assert runs("THREADS = 1" + NO_MORE_THREADS) == (0, said, "")
