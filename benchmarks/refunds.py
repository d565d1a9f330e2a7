"""Refunds whose process is killed when the money has moved and nobody has noted it yet: how many are made twice on resuming.

    PYTHONPATH=src:tests python benchmarks/refunds.py
    PYTHONPATH=src:tests python benchmarks/refunds.py --count 20 --json

Each refund is a run in a process of its own: a model chooses the amount, a tool refunds it, and SIGKILL comes as soon as the receiver
has made the refund. Then fresh processes resume all of them, as each subject documents it. What counts is the receiver's own log.

LangGraph is no dependency of this project. Where it can be imported the same agent runs on its `ToolNode` with a `SqliteSaver`, and is
resumed by `graph.invoke(None, config)`. To try it, in an environment of its own:

    pip install langgraph langgraph-checkpoint-sqlite
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

from agent_run_ledger import AgentRunLedger, Effect, Receipt, current_step
from support.payments import Service, service
from support.wire import BEFORE_REPLY, ask, request

COUNT = 209


class Subject(Protocol):
    """Something an agent runs on. Whatever begins or resumes is called in a process of its own."""

    name: str

    def begin(self, number: int) -> None:
        """Run the agent for one refund."""

    def resume(self, count: int) -> None:
        """Go on with all of them."""

    def finished(self, count: int) -> int:
        """How many of the agents came to their end."""


class World:
    """What the agent talks to, and the process's death."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.is_doomed = False
        """Whether this process is killed as soon as money has moved."""

    def choose(self, customer: str) -> dict[str, Any]:
        """Ask the model, which chooses another amount each time."""
        return {"customer": customer, "amount": self._post("/model", customer.encode())["amount"]}

    def refund(self, path: str, customer: str, amount: int, key: str) -> Any:
        return self._post(path, json.dumps({"customer": customer, "amount": amount}).encode(), key)

    def look_up(self, key: str, arguments: dict[str, Any]) -> Receipt:
        """What the receiver's status endpoint says about a key."""
        answer = ask(self._port, request("GET", f"/by-key/{key}"))
        return Receipt.absent() if answer.status == 404 else Receipt.found(answer.value())

    def _post(self, path: str, body: bytes, key: str | None = None) -> Any:
        headers = {"Idempotency_Key": key} if key else {}
        passed = self._passed if key else lambda moment: None
        return ask(self._port, request("POST", path, body, **headers), passed).value()

    def _passed(self, moment: str) -> None:
        if self.is_doomed and moment == BEFORE_REPLY:
            os.kill(os.getpid(), signal.SIGKILL)


# --- subjects ---------------------------------------------------------------------------------------------------------


class OnLedger:
    """Registered tools and an agent; resumed by `recover()`."""

    def __init__(self, declared: str, path: str, **options: Any) -> None:
        self.name = f"agent-run-ledger, {declared}"
        self._path, self._options = path, options
        self.world: World
        self.folder: Path

    def _open(self) -> tuple[AgentRunLedger, Callable[[str], Any]]:
        ledger, world = AgentRunLedger(self.folder / "agent.db"), self.world
        options = self._options | ({"receipt": world.look_up} if self._options.get("receipt") else {})

        @ledger.tool(kind="model")
        def choose(customer: str) -> dict[str, Any]:
            return world.choose(customer)

        @ledger.tool(**options)
        def refund(customer: str, amount: int) -> Any:
            return world.refund(self._path, customer, amount, current_step().idempotency_key)

        @ledger.agent()
        def agent(customer: str) -> Any:
            return refund(**choose(customer))

        return ledger, agent

    def begin(self, number: int) -> None:
        ledger, agent = self._open()
        ledger.run(agent, f"customer-{number}", run_id=f"refund-{number}")

    def resume(self, count: int) -> None:
        ledger, _ = self._open()
        ledger.recover()
        ledger.close()

    def finished(self, count: int) -> int:
        with AgentRunLedger.open_read_only(self.folder / "agent.db") as ledger:
            return len(ledger.runs(status="COMPLETED"))


class OnLangGraph:
    """A model node and a `ToolNode` on a `SqliteSaver`; resumed by `invoke(None, config)`."""

    def __init__(self, declared: str, *, sends_call_id: bool, **options: Any) -> None:
        import langgraph.checkpoint.sqlite
        import langgraph.prebuilt  # noqa: F401 - here, so that it is there in every process that is forked

        self.name = f"LangGraph ToolNode, {declared}"
        self._sends_call_id, self._options = sends_call_id, options
        self.world: World
        self.folder: Path

    @contextmanager
    def _graph(self) -> Iterator[Any]:
        from langchain_core.messages import AIMessage, ToolMessage
        from langchain_core.tools import InjectedToolCallId, tool
        from langgraph.checkpoint.sqlite import SqliteSaver
        from langgraph.graph import START, MessagesState, StateGraph
        from langgraph.prebuilt import ToolNode, tools_condition

        world = self.world

        def refund(customer: str, amount: int, call_id: Any) -> str:
            """Refund a customer."""
            key = call_id if self._sends_call_id else str(uuid.uuid4())
            return json.dumps(world.refund("/keyed", customer, amount, key))

        refund.__annotations__["call_id"] = Annotated[str, InjectedToolCallId]  # known here only

        def model(state: Any) -> Any:
            last = state["messages"][-1]
            if isinstance(last, ToolMessage):
                return {"messages": [AIMessage("done")]}
            call = {"name": "refund", "args": world.choose(last.content), "id": f"call_{uuid.uuid4().hex}"}
            return {"messages": [AIMessage("", tool_calls=[call])]}

        builder = StateGraph(MessagesState)
        builder.add_node("model", model)
        builder.add_node("tools", ToolNode([tool(refund)]))
        builder.add_edge(START, "model")
        builder.add_conditional_edges("model", tools_condition)
        builder.add_edge("tools", "model")
        with SqliteSaver.from_conn_string(str(self.folder / "graph.db")) as saver:
            yield builder.compile(checkpointer=saver)

    def begin(self, number: int) -> None:
        with self._graph() as graph:
            graph.invoke({"messages": [("user", f"customer-{number}")]}, _thread(number), **self._options)

    def resume(self, count: int) -> None:
        with self._graph() as graph:
            for number in range(count):
                graph.invoke(None, _thread(number), **self._options)

    def finished(self, count: int) -> int:
        with self._graph() as graph:
            return sum(not graph.get_state(_thread(number)).next for number in range(count))


def _thread(number: int) -> Any:
    return {"configurable": {"thread_id": f"refund-{number}"}}


def subjects(peers: bool) -> list[Any]:
    """What is compared: the ledger by what the tool declares, and what else is installed."""
    known: list[Any] = [
        OnLedger("IDEMPOTENT, a key", "/keyed", effect=Effect.IDEMPOTENT),
        OnLedger("MUTATE, a receipt", "/unkeyed", effect=Effect.MUTATE, receipt=True),
        OnLedger("MUTATE, neither", "/unkeyed", effect=Effect.MUTATE),
    ]
    names = ("langgraph", "langgraph.checkpoint.sqlite")
    if peers and importlib.util.find_spec("langgraph") and all(map(importlib.util.find_spec, names)):
        known.append(OnLangGraph("a key made in the tool", sends_call_id=False))
        known.append(OnLangGraph("tool_call_id as the key", sends_call_id=True))
        known.append(OnLangGraph('tool_call_id as the key, durability="sync"', sends_call_id=True, durability="sync"))
    return known


# --- the play ---------------------------------------------------------------------------------------------------------


def in_a_process(function: Callable[[], None]) -> int:
    """Call it in a process of its own; how that ended, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def play(subject: Any, count: int, payments: Service, folder: Path) -> dict[str, Any]:
    """Kill each refund when the money has moved, resume them all, and read the receiver's log."""
    folder.mkdir()
    subject.folder, subject.world = folder, World(payments.port)
    payments.begin(f"{folder.name}-requests")

    def doomed(number: int) -> None:
        subject.world.is_doomed = True
        subject.begin(number)

    killed = sum(in_a_process(partial(doomed, number)) == -signal.SIGKILL for number in range(count))
    assert len(payments.resources()) == killed == count
    assert in_a_process(lambda: subject.resume(count)) == 0
    made = Counter(json.loads(resource.body)["customer"] for resource in payments.resources())
    finished = subject.finished(count)
    return {
        "subject": subject.name,
        "killed": killed,
        "requests": len(payments.requests("/keyed", "/unkeyed")),
        "refunds": made.total(),
        "duplicates": made.total() - len(made),
        "finished": finished,
        "parked": count - finished,
        "model calls": len(payments.requests("/model")),
    }


def versions() -> str:
    """What was tried."""
    names = ("langgraph", "langgraph-checkpoint-sqlite", "langchain-core")
    found = [f"{name} {importlib.metadata.version(name)}" for name in names if importlib.util.find_spec("langgraph")]
    return ", ".join([f"Python {platform.python_version()}", *found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT, help="how many refunds (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--no-peers", action="store_true", help="the ledger alone, whatever is installed")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as payments:
        for number, subject in enumerate(subjects(not given.no_peers)):
            rows.append(play(subject, given.count, payments, Path(folder) / f"subject-{number}"))
    if given.json:
        print(json.dumps(rows))
        return
    print(f"{given.count} refunds, each killed when it was made. {versions()}")
    columns = [name for name in rows[0] if name != "subject"]
    width = max(len(row["subject"]) for row in rows)
    print(f"{'':{width}}  " + "  ".join(columns))
    for row in rows:
        print(f"{row['subject']:{width}}  " + "  ".join(f"{row[name]:>{len(name)}}" for name in columns))


if __name__ == "__main__":
    main()
