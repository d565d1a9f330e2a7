"""What a step does, in numbers that no clock is needed for: statements, commits, bytes hashed and written, objects that live and that pass."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from harness import Bench
from tables import Table

from agent_run_ledger import AgentRunLedger, Effect, merkle
from agent_run_ledger.engine import log
from agent_run_ledger.rules import canonical, digests

STEPS = 512
"""A power of two: so the tree closes as many subtrees a step as it does on average."""
ARGUMENTS, OUTPUT = {"invoice_id": "INV-109"}, {"ok": True, "total": 12}
COLUMNS = {
    "statements": 2, "hashes": 2, "bytes hashed": 0, "texts encoded": 2, "Python calls": 0, "objects kept": 1,
    "bytes kept": 0, "bytes in the log": 0,
}  # fmt: skip


def measure(bench: Bench) -> Iterator[Table]:
    """The tables of this part."""
    table = Table(
        "counts",
        "What a step does",
        f"Of one step of {STEPS}, on average, each of which answers with 23 bytes: SQL statements, each a transaction of its own; calls of SHA-256 and their bytes;"
        " values and entries that are made into JSON; frames of Python functions that are entered; blocks of memory that stay, and their bytes;"
        " bytes of the write-ahead log's pages.",
        COLUMNS,
    )
    bench.say(table.title)
    for name, durability, effect in (
        ("step", "full", None),
        ("READ step", "full", Effect.READ),
        ("step", "process", None),
    ):
        table.add(f"{name}, {durability}", counted(bench.disk, durability, effect))
    yield table


def counted(folder: Path, durability: Any, effect: Effect | None) -> dict[str, float]:
    """Each count of one step, on average."""
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        with AgentRunLedger(place / "counted.db", durability=durability, max_steps=10**9) as ledger:
            run_id = ledger.create_run("benchmark")
            number = 0

            def steps() -> None:
                nonlocal number
                for _ in range(STEPS):
                    number += 1
                    ledger.execute_step(
                        run_id, "fetch_invoice", ARGUMENTS | {"n": number}, lambda: OUTPUT, effect=effect
                    )

            steps()
            counts = Counter[str]()
            with in_the_log(place / "counted.db", counts):
                before = sys.getallocatedblocks()
                steps()
                counts["objects kept"] = sys.getallocatedblocks() - before
            with statements(ledger, counts), hashes(counts), texts(counts):
                steps()
            with frames(counts):
                steps()
            counts["bytes kept"] = kept(steps)
        return {name: counts[name] / STEPS for name in COLUMNS}
    finally:
        shutil.rmtree(place)


@contextmanager
def in_the_log(path: Path, counts: Counter[str]) -> Iterator[None]:
    """Counts what goes into the log, as the kernel counts it: bytes that this process has written."""
    before = _written()
    yield
    counts["bytes in the log"] = _written() - before


def _written() -> int:
    try:
        said = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return 0
    return int(dict(line.split(": ") for line in said.splitlines())["wchar"])


@contextmanager
def statements(ledger: AgentRunLedger, counts: Counter[str]) -> Iterator[None]:
    """Counts what SQLite is asked to do, without the emptying of the log, which belongs to no step."""
    writer = ledger._store.inner._files.writer if hasattr(ledger._store, "inner") else ledger._store._files.writer  # type: ignore[attr-defined]

    last = ""

    def said(statement: str) -> None:
        nonlocal last
        if statement != last and not statement.startswith(("PRAGMA", "BEGIN", "ROLLBACK")):
            counts["statements"] += 1  # a trigger says once more what it belongs to
        last = statement

    writer.set_trace_callback(said)
    try:
        yield
    finally:
        writer.set_trace_callback(None)


@contextmanager
def hashes(counts: Counter[str]) -> Iterator[None]:
    """Counts calls of SHA-256 and what they are given."""
    sha256 = merkle.sha256

    def counting(data: bytes = b"") -> Any:
        counts["hashes"] += 1
        counts["bytes hashed"] += len(data)
        return sha256(data)

    with ExitStack() as stack:
        for module in (merkle, digests):
            stack.enter_context(mock.patch.object(module, "sha256", counting))
        yield


@contextmanager
def texts(counts: Counter[str]) -> Iterator[None]:
    """Counts values and bodies that are made into JSON."""

    def counting(encode: Callable[..., Any]) -> Callable[..., Any]:
        def encoded(*given: Any) -> Any:
            counts["texts encoded"] += 1
            return encode(*given)

        return encoded

    with ExitStack() as stack:
        for module in (canonical, log):
            stack.enter_context(mock.patch.object(module, "_pieces", counting(module._pieces)))
        yield


@contextmanager
def frames(counts: Counter[str]) -> Iterator[None]:
    """Counts functions written in Python that are entered, and generators that are gone on with."""

    def entered(frame: Any, event: str, _: Any) -> None:
        counts["Python calls"] += event == "call"

    sys.setprofile(entered)
    try:
        yield
    finally:
        sys.setprofile(None)


def kept(steps: Callable[[], None]) -> int:
    """The bytes of memory that stay behind."""
    import gc
    import tracemalloc

    tracemalloc.start()
    try:
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        steps()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before
