"""The same steps on LangGraph: super-steps of a graph that loops, or tasks of its functional API, with a checkpointer.

A super-step is timed from the call of its node to the next one: the node's writes, the checkpoint with the whole state and the choice
of the next node, all committed before the next node is called (`durability="sync"`). A task is timed from its call to its result, which
a thread writes to the checkpoint meanwhile or soon after; completed tasks are not called again when the run is resumed.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from typing import Any, TypedDict

import aiosqlite
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from talk import INVOICE, OUTPUT, SYNCED, answer, conversation, introduce, level_of, requests, serve, timed


class State(TypedDict):
    invoice_id: str
    n: int
    left: int
    output: dict[str, object]


def saver_for(place: str, synchronous: str | None) -> tuple[Any, str]:
    """A checkpointer for this place, and what it promises there."""
    if "://" in place:
        import psycopg
        from langgraph.checkpoint.postgres import PostgresSaver
        from psycopg.rows import dict_row

        saver = PostgresSaver(psycopg.connect(place, autocommit=True, prepare_threshold=0, row_factory=dict_row))
        saver.setup()
        return saver, SYNCED
    connection = sqlite3.connect(place, check_same_thread=False)
    if synchronous is not None:
        connection.execute(f"PRAGMA synchronous={synchronous}")
    saver = SqliteSaver(connection)
    saver.setup()
    return saver, level_of(connection)


def looping(node: Callable[[State], Any], saver: Any) -> Any:
    """A graph of one node that is called until nothing is left."""
    builder = StateGraph(State)
    builder.add_node("fetch_invoice", node)
    builder.add_edge(START, "fetch_invoice")
    builder.add_conditional_edges("fetch_invoice", lambda state: "fetch_invoice" if state["left"] else END)
    return builder.compile(checkpointer=saver)


def super_steps(saver: Any) -> Callable[[int], list[float]]:
    """Super-steps of one thread."""
    called: list[float] = []

    def fetch_invoice(state: State) -> dict[str, object]:
        called.append(time.perf_counter())
        return {"n": state["n"] + 1, "left": state["left"] - 1, "output": OUTPUT}

    graph = looping(fetch_invoice, saver)

    def steps(count: int) -> list[float]:
        called.clear()
        config: Any = {"configurable": {"thread_id": "benchmark"}, "recursion_limit": count + 10}
        graph.invoke({"invoice_id": INVOICE, "n": 0, "left": count + 1, "output": {}}, config, durability="sync")
        return [(after - before) * 1e6 for before, after in pairwise(called)]

    return steps


def tasks(saver: Any) -> None:
    """Tasks of one run, until nothing is asked any more."""

    @task
    def fetch_invoice(invoice_id: str, n: int) -> dict[str, object]:
        return OUTPUT

    @entrypoint(checkpointer=saver)
    def agent(invoice_id: str) -> str:
        number = 0

        def step() -> None:
            nonlocal number
            number += 1
            fetch_invoice(invoice_id, number).result()

        for _, (count,) in requests():
            answer(timed(step, count))
        return "done"

    agent.invoke(INVOICE, {"configurable": {"thread_id": "benchmark"}}, durability="sync")


def conversing(saver: Any) -> Callable[..., None]:
    """A chat whose state is its list of messages: one call of the graph for each turn, or a loop where nobody asks anything."""
    replies: list[str] = []

    def model(state: MessagesState) -> dict[str, object]:
        return {"messages": [AIMessage(replies.pop())]}

    builder = StateGraph(MessagesState)
    builder.add_node("model", model)
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", lambda _: "model" if replies else END)
    graph = builder.compile(checkpointer=saver)

    def turns(count: int, asked: int, answered: int, kind: str) -> None:
        config: Any = {"configurable": {"thread_id": "conversation"}, "recursion_limit": count + 10}
        said = list(conversation(count, asked, answered, kind))
        if not asked:
            replies[:] = [reply for _, reply in reversed(said)]
            graph.invoke({"messages": []}, config, durability="sync")
            return
        for question, reply in said:
            replies.append(reply)
            graph.invoke({"messages": [HumanMessage(question)]}, config, durability="sync")

    return turns


async def side_by_side(place: str, synchronous: str, runs: int, count: int) -> float:
    """Super-steps a second of so many threads in one event loop, of so many each."""

    async def fetch_invoice(state: State) -> dict[str, object]:
        return {"n": state["n"] + 1, "left": state["left"] - 1, "output": OUTPUT}

    async with aiosqlite.connect(place) as connection:
        await connection.execute(f"PRAGMA synchronous={synchronous}")
        graph = looping(fetch_invoice, AsyncSqliteSaver(connection))

        async def one(run: str) -> None:
            config: Any = {"configurable": {"thread_id": run}, "recursion_limit": count + 10}
            await graph.ainvoke({"invoice_id": INVOICE, "n": 0, "left": count, "output": {}}, config, durability="sync")

        begun = time.perf_counter()
        await asyncio.gather(*(one(f"{runs} {begun} {number}") for number in range(runs)))
        return runs * count / (time.perf_counter() - begun)


def main(place: str, synchronous: str | None = None, *options: str) -> None:
    saver, promise = saver_for(place, synchronous)
    names = ("langgraph", f"langgraph-checkpoint-{'postgres' if '://' in place else 'sqlite'}")
    if "task" in options:
        promise += ", once a thread has written it: the result does not wait"
    introduce(" with ".join(f"{name} {version(name)}" for name in names), promise)
    if "task" in options:
        tasks(saver)
    elif "async" in options:
        serve({"throughput": lambda runs, count: asyncio.run(side_by_side(place, synchronous or "FULL", runs, count))})
    else:
        serve({"steps": super_steps(saver), "turns": conversing(saver)})


if __name__ == "__main__":
    main(*sys.argv[1:])
