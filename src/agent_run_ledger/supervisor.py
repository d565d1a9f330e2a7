"""Keeps a program running: starts it again when it dies, ends it in good order, and watches the disk that its ledger lies on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from agent_run_ledger.model import RetryPolicy
from agent_run_ledger.rules.backoff import delay
from agent_run_ledger.stores import room
from agent_run_ledger.words import MIN_FREE

GAVE_UP, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127
"""Exit statuses of the supervisor's own: a crash loop, and a program that could not be started the first time."""
MEBIBYTE = 1024 * 1024

_BACKOFF = RetryPolicy(base=1.0, cap=30.0)
_FOREVER = float("inf")
_LONGEST_WAIT = 3600.0  # the kernel takes no infinity
_DEATH_SECONDS = 10.0  # how long SIGKILL may take
_PASSED_ON = frozenset({signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGWINCH})
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>


@dataclass(frozen=True, slots=True)
class Program:
    """What is started: its words, and what the log calls it. Arguments may hold secrets, so they are not logged."""

    name: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """What is kept running, and how.

    ``before`` is run before each start, in this order, each for at most ``before_seconds``. A program that ends with status 0 is
    done, unless ``always``. Told to end, it has ``grace_seconds`` before it is killed. Waits between starts follow ``backoff``
    (``max_attempts`` is not read) and begin anew when the program has lived ``healthy_seconds``; ``most_deaths`` within
    ``within_seconds`` are a crash loop. ``database`` is the file whose disk and log are looked at; None looks at nothing. A second
    request to end that comes within ``echo_seconds`` is the first one once more: `timeout` and some shells send each signal twice.
    """

    program: Program
    before: tuple[Program, ...] = ()
    before_seconds: float = 600.0
    always: bool = False
    grace_seconds: float = 25.0
    backoff: RetryPolicy = _BACKOFF
    healthy_seconds: float = 60.0
    most_deaths: int = 10
    within_seconds: float = 300.0
    database: str | None = None
    least_free_bytes: int = 64 * MEBIBYTE
    longest_log_bytes: int = 64 * MEBIBYTE
    look_seconds: float = 5.0
    echo_seconds: float = 0.5


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the supervisor's log: which event, a sentence for people, and the facts for programs."""

    event: str
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


def supervise(settings: Settings, tell: Callable[[Line], None], *, draw: Callable[[], float] = random.random) -> int:
    """Keep the program running until it is done, this process is told to end, or a crash loop is seen. Returns the exit status.

    Linux only, and for the main thread of a process that does nothing else: while it lasts, signals are taken from everybody
    else in the process, and all children of the process are waited for. `draw` gives numbers of [0, 1) for the back-off.
    """
    return _Supervisor(settings, tell, draw).run()


# --- rules ------------------------------------------------------------------------------------------------------------


def exit_status(code: int) -> int:
    """What a shell says of a program that ended so: its status, or 128 plus the number of the signal (given as `-number`)."""
    return code if code >= 0 else 128 - code


class Deaths:
    """What follows on each death of a program: another start after a wait, or none, because it dies again and again."""

    def __init__(self, policy: RetryPolicy, healthy_seconds: float, most: int, within_seconds: float) -> None:
        self._policy = policy
        self._healthy_seconds = healthy_seconds
        self._within_seconds = within_seconds
        self._times: deque[float] = deque(maxlen=most)
        self._in_a_row = 0

    def wait_after(self, now: float, lived_seconds: float, draw: float) -> float | None:
        """Seconds to wait after a death at `now`; None if it is the last of `most` within `within_seconds`."""
        self._times.append(now)
        if len(self._times) == self._times.maxlen and now - self._times[0] <= self._within_seconds:
            return None
        if lived_seconds >= self._healthy_seconds:
            self._in_a_row = 0
        self._in_a_row += 1
        return delay(self._in_a_row - 1, self._policy, draw)


class Alarm:
    """Says once that something has begun, and once that it is over."""

    def __init__(self) -> None:
        self.is_on = False

    def turns(self, *, on: bool, off: bool) -> bool:
        """Whether it changes, now that there is reason to turn it `on` or `off`. With neither it stays as it is."""
        if (on and not self.is_on) or (off and self.is_on):
            self.is_on = not self.is_on
            return True
        return False


# --- the disk ---------------------------------------------------------------------------------------------------------


def free_bytes(path: str) -> int | None:
    """Bytes that this user may still write beside `path`, which need not exist yet; None where nobody can tell."""
    with suppress(OSError):
        folder = os.path.dirname(os.path.realpath(path))
        while not os.path.exists(folder):
            folder = os.path.dirname(folder)
        return room.free_bytes(folder)
    return None


def log_bytes(path: str) -> int:
    """The length of the database's write-ahead log; 0 where there is none."""
    try:
        return os.stat(os.path.realpath(path) + "-wal").st_size
    except OSError:
        return 0


class Disk:
    """The disk under a ledger, and the ledger's log, seen from outside: the database is not opened, which would drop SQLite's locks."""

    def __init__(
        self,
        path: str,
        least_free_bytes: int,
        longest_log_bytes: int,
        *,
        free: Callable[[str], int | None] = free_bytes,
        log: Callable[[str], int] = log_bytes,
    ) -> None:
        self._path = os.path.abspath(path)  # the current folder may be deleted, by a deploy for instance
        self._least_free, self._longest_log = least_free_bytes, longest_log_bytes
        self._free, self._log = free, log
        self._is_low, self._is_long = Alarm(), Alarm()

    def look(self) -> Iterator[Line]:
        """A line for what has changed since the last look. There is room again with a tenth more than the limit, so that nothing flaps."""
        free, log = self._free(self._path), self._log(self._path)
        facts = {"path": self._path, "free_bytes": free, "limit_bytes": self._least_free}
        if free is not None and self._is_low.turns(
            on=free < self._least_free, off=free >= self._least_free + self._least_free // 10
        ):
            if self._is_low.is_on:
                said = f"{_mebibytes(free)} free beside {self._path}, less than {_mebibytes(self._least_free)}: ledgers begin no new step"
                yield Line("disk_low", said, facts)
            else:
                said = f"{_mebibytes(free)} free beside {self._path}: there is room again, and ledgers go on"
                yield Line("disk_ok", said, facts)
        if self._is_long.turns(on=log > self._longest_log, off=log <= self._longest_log):
            facts = {"path": self._path + "-wal", "log_bytes": log, "limit_bytes": self._longest_log}
            said = f"the log {self._path}-wal has {_mebibytes(log)}"
            if self._is_long.is_on:
                yield Line("wal_long", f"{said}: some reader holds a transaction open, so it cannot be emptied", facts)
            else:
                yield Line("wal_ok", said, facts)


def _mebibytes(count: int) -> str:
    return f"{count / MEBIBYTE:.1f} MiB"


# --- processes --------------------------------------------------------------------------------------------------------


class _Child:
    """A program that was started. `code` is None while it lives, then its status, or minus the signal that killed it."""

    def __init__(self, program: Program, process: subprocess.Popen[bytes]) -> None:
        self.program = program
        self.name = program.name
        self.pid = process.pid
        self.code: int | None = None
        self.was_told = False
        self._process = process
        self._began = time.monotonic()
        self.lived_seconds = 0.0

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    def has_ended(self) -> bool:
        """Whether its end has been noted."""
        return self.code is not None

    def ended(self, code: int) -> None:
        """Note its end; the supervisor waits for all children at once, so `Popen` has to be told."""
        self.code = self._process.returncode = code
        self.lived_seconds = time.monotonic() - self._began

    def send(self, number: int) -> None:
        """Send it a signal, if it lives: until it is waited for, its number is nobody else's."""
        if self.code is None:
            _send(self.pid, number)

    @property
    def status(self) -> int:
        """Its exit status, as a shell says it."""
        assert self.code is not None
        return exit_status(self.code)

    @property
    def end(self) -> Line:
        """How it ended."""
        assert self.code is not None
        facts = {"program": self.name, "pid": self.pid, "seconds": round(self.lived_seconds, 3)}
        how = f"ended with status {self.code}" if self.code >= 0 else f"was killed by {_name_of(-self.code)}"
        facts |= {"status": self.code} if self.code >= 0 else {"signal": _name_of(-self.code)}
        said = f"{self} {how} after {self.lived_seconds:.1f} s"
        return Line("died" if self.code else "ended", said, facts)


def _send(pid: int, number: int) -> None:
    with suppress(OSError):  # it has just gone, or has become another user's
        os.kill(pid, number)


def _pids(numbers: list[int]) -> str:
    return f"pid {', '.join(map(str, numbers))}"


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # the real-time signals have no names
        return f"signal {number}"


def _children() -> set[int]:
    """The living children of this process; none where /proc does not show this process's own namespace."""
    me, found = str(os.getpid()), set()
    with suppress(OSError):
        if os.readlink("/proc/self") != me:
            return set()
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
                state, parent = stat.read().rpartition(")")[2].split()[:2]  # the name before that may hold anything
                if parent == me and state not in "ZX":
                    found.add(int(name))
    return found


def _terminal() -> tuple[bool, bool]:
    """Whether this process has a controlling terminal, and whether it is in the terminal's foreground."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False, False
    try:
        return True, os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return True, False
    finally:
        os.close(terminal)


def _prctl() -> Callable[[int, int], int]:
    """The kernel's prctl(2), or, where it cannot be called, something that does nothing."""
    try:
        import ctypes

        call = ctypes.CDLL(None).prctl
        return lambda option, value: int(call(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3))
    except (ImportError, OSError, AttributeError):
        return lambda option, value: -1


# --- the supervisor ---------------------------------------------------------------------------------------------------


class _Supervisor:
    """One thread that sleeps in the kernel until a signal comes or a time is up. Signals are blocked, so none is lost between two waits."""

    def __init__(self, settings: Settings, tell: Callable[[Line], None], draw: Callable[[], float]) -> None:
        self._settings = settings
        self._tell = tell
        self._draw = draw
        self._pid = os.getpid()
        self._prctl = _prctl()
        self._environment = os.environ | {MIN_FREE: str(settings.least_free_bytes)}
        self._has_terminal, self._is_in_foreground = _terminal()
        self._ends = {signal.SIGTERM, signal.SIGINT}
        if self._has_terminal:  # a service has none, and there SIGHUP means "read your settings anew"
            self._ends.add(signal.SIGHUP)
        self._strangers = _children()  # whoever has become this process may have started them
        self._child: _Child | None = None
        self._why_not_started = NOT_EXECUTABLE
        self._told: signal.Signals | None = None
        self._told_at = 0.0
        self._is_hurried = False
        self._disk: Disk | None = None
        self._look_at = _FOREVER
        if settings.database is not None:
            self._disk = Disk(settings.database, settings.least_free_bytes, settings.longest_log_bytes)
            self._look_at = 0.0

    def run(self) -> int:
        """See `supervise`."""
        with self._holding_signals(), self._adopting_orphans():
            return self._keep_running()

    def _keep_running(self) -> int:
        settings = self._settings
        deaths = Deaths(settings.backoff, settings.healthy_seconds, settings.most_deaths, settings.within_seconds)
        has_started = False
        while True:
            for program in settings.before:
                self._live(program, settings.before_seconds)
                if self._is_told():
                    return self._status_between()
            child = self._live(settings.program)
            if child is not None and (child.was_told or (child.code == 0 and not settings.always)):
                return child.status
            if self._is_told():
                return self._status_between()
            if child is None and not has_started:
                return self._why_not_started
            has_started = True
            lived = child.lived_seconds if child is not None else 0.0
            wait = deaths.wait_after(time.monotonic(), lived, self._draw())
            if wait is None:
                said = f"{settings.most_deaths} deaths within {settings.within_seconds:g} s: giving up"
                self._say("crash_loop", said, deaths=settings.most_deaths, within_seconds=settings.within_seconds)
                return GAVE_UP
            self._say("backoff", f"starting {settings.program.name} again in {wait:.1f} s", seconds=round(wait, 3))
            self._wait(self._is_told, time.monotonic() + wait)
            if self._is_told():
                return self._status_between()

    def _live(self, program: Program, seconds: float = _FOREVER) -> _Child | None:
        """Start a program and wait until it has ended, by itself or told to, and what it leaves behind too; None if it cannot start."""
        if (child := self._start(program)) is None:
            return None
        self._wait(lambda: child.has_ended() or self._is_told(), time.monotonic() + seconds)
        if not child.has_ended() and not self._is_told():
            said = f"{child} has not ended after {seconds:g} s: SIGTERM"
            self._say("overdue", said, program=child.name, pid=child.pid, seconds=seconds)
            child.send(signal.SIGTERM)
        until = time.monotonic() + self._settings.grace_seconds
        if not child.has_ended():
            child.send(signal.SIGCONT)  # a stopped program hears nothing
            self._wait(lambda: child.has_ended() or self._is_hurried, until)
        if not child.has_ended():
            self._kill(child)
        self._child = None
        self._tell(child.end)
        self._end_orphans(until)
        return child

    def _is_told(self) -> bool:
        """Whether this process has been told to end."""
        return self._told is not None

    def _status_between(self) -> int:
        """The exit status of a supervisor that is told to end while its program does not run."""
        return exit_status(-(self._told or 0))

    def _kill(self, child: _Child) -> None:
        self._say("killed", f"{child} has not ended: SIGKILL", program=child.name, pid=child.pid)
        child.send(signal.SIGKILL)
        self._wait(lambda: child.has_ended(), time.monotonic() + _DEATH_SECONDS)
        if not child.has_ended():
            self._give_up_on({child.pid})
            child.ended(-signal.SIGKILL)

    def _start(self, program: Program) -> _Child | None:
        """Start a program. In the foreground of a terminal it stays there and may read from it; else it has a group of its own."""
        try:
            process = subprocess.Popen(
                program.words,
                env=self._environment,
                close_fds=False,  # what the caller lets through; Python's own files are not inherited
                process_group=None if self._is_in_foreground else 0,
                preexec_fn=self._prepare_child,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._why_not_started = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            self._say("cannot_start", f"{program.name} cannot be started: {error}", program=program.name)
            return None
        self._child = _Child(program, process)
        self._say("started", f"started {program.name} (pid {process.pid})", program=program.name, pid=process.pid)
        return self._child

    def _prepare_child(self) -> None:
        """In the child, before it becomes the program: it gets SIGTERM if the supervisor dies, and the signals that are blocked here."""
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != self._pid:  # it died before that call
            os._exit(exit_status(-signal.SIGTERM))
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _end_orphans(self, until: float) -> None:
        """End what a program has left behind: SIGTERM once for each, SIGKILL from `until` on. Their children come here as they die."""
        told: set[int] = set()

        def are_gone() -> bool:
            left = _children() - self._strangers
            if fresh := sorted(left - told):
                self._say("left_behind", f"ending what was left behind: {_pids(fresh)}", pids=fresh)
            for pid in fresh:
                _send(pid, signal.SIGTERM)
            told.update(left)
            return not left or self._is_hurried

        def are_killed() -> bool:
            left = _children() - self._strangers
            for pid in left:
                _send(pid, signal.SIGKILL)
            return not left

        self._wait(are_gone, until)
        self._wait(are_killed, time.monotonic() + _DEATH_SECONDS)
        if left := _children() - self._strangers:
            self._give_up_on(left)

    def _give_up_on(self, pids: set[int]) -> None:
        """Wait no longer for processes that cannot be killed: they hang in the kernel, or have become another user's."""
        numbers = sorted(pids)
        self._say("not_killed", f"SIGKILL does not end {_pids(numbers)}", pids=numbers)
        self._strangers |= pids

    def _say(self, event: str, text: str, **facts: Any) -> None:
        self._tell(Line(event, text, facts))

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, is_over: Callable[[], bool], until: float = _FOREVER) -> None:
        """Obey signals and look at the disk until something is so, or that time has come."""
        while not is_over():
            now = time.monotonic()
            if self._disk is not None and now >= self._look_at:
                self._look_at = now + self._settings.look_seconds
                for line in self._disk.look():
                    self._tell(line)
            seconds = min(max(0.0, min(until, self._look_at) - now), _LONGEST_WAIT)
            received = signal.sigtimedwait(self._held, seconds)
            if received is not None:
                self._obey(received)
            if time.monotonic() >= until:
                return

    def _obey(self, received: signal.struct_siginfo) -> None:
        number = signal.Signals(received.si_signo)
        if number is signal.SIGCHLD:
            self._reap()
            return
        child = self._child
        if number in self._ends:
            if not self._is_first_request(number):
                return
        elif child is not None and child.program is not self._settings.program:
            return  # SIGHUP and SIGUSR1 are not meant for it, and would kill who does not expect them
        # What a terminal sends (sigaction(2): the kernel's codes are above 0) goes to its whole foreground, so the program has it; but
        # that it is closed is told to the first process of the session alone.
        has_it = self._is_in_foreground and received.si_code > 0 and number is not signal.SIGHUP
        if child is not None and not has_it:
            child.send(number)

    def _is_first_request(self, number: signal.Signals) -> bool:
        """Whether this is the first request to end. A later one means at once."""
        now, child = time.monotonic(), self._child
        if self._told is None:
            self._told, self._told_at = number, now
            if child is None:
                self._say("draining", f"{number.name}: nothing is running", signal=number.name)
            else:
                child.was_told = True
                said = f"{number.name}: {child} has {self._settings.grace_seconds:g} s to end"
                self._say("draining", said, signal=number.name, program=child.name, pid=child.pid)
            return True
        if not self._is_hurried and now - self._told_at >= self._settings.echo_seconds:
            self._is_hurried = True
            self._say("hurried", f"{number.name} once more: at once", signal=number.name)
        return False

    def _reap(self) -> None:
        """Take the status of every child that has ended, adopted ones too. One signal may stand for several."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._strangers.discard(pid)
                if self._child is not None and pid == self._child.pid:
                    self._child.ended(os.waitstatus_to_exitcode(status))

    # --- what changes for the whole process ---------------------------------------------------------------------------

    @contextmanager
    def _holding_signals(self) -> Iterator[None]:
        """Block the signals that are waited for. What the caller ignores (nohup, `&` in a script) stays ignored, but for SIGTERM."""
        self._held = {signal.SIGTERM, signal.SIGCHLD}
        self._held |= {each for each in self._ends | _PASSED_ON if signal.getsignal(each) != signal.SIG_IGN}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._held)
        # An ignored SIGCHLD would throw statuses away; Python's SIGINT would be lost in a child that is about to become a program.
        before = {each: signal.signal(each, signal.SIG_DFL) for each in self._held if _is_to_be_reset(each)}
        try:
            yield
        finally:
            while signal.sigtimedwait(self._held, 0) is not None:
                pass
            for each, handler in before.items():
                signal.signal(each, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    @contextmanager
    def _adopting_orphans(self) -> Iterator[None]:
        """Become the parent of what a program leaves behind, as process 1 is of everything."""
        if self._pid == 1 or self._prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
            yield
            return
        try:
            yield
        finally:
            self._prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _is_to_be_reset(number: int) -> bool:
    handler = signal.getsignal(number)
    return handler is not None and handler != signal.SIG_DFL
