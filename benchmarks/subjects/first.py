"""The first durable step of a fresh process, by library: told are the seconds of its import and the most memory that the process had.

    first.py LIBRARY PLACE          # the library must be installed; `bare` is the interpreter alone

It imports nothing but what it must, for what it imports is what is measured.
"""

import sys
import time


def agent_run_ledger(place: str) -> None:
    begun = time.perf_counter()
    from agent_run_ledger import AgentRunLedger

    imported = time.perf_counter() - begun
    with AgentRunLedger(place) as ledger:
        run_id = ledger.create_run("benchmark")
        ledger.execute_step(run_id, "fetch_invoice", {"invoice_id": "INV-109"}, lambda: {"total": 12})
        tell(imported)


def front_door(place: str) -> None:
    """Our package alone, of which nothing is used."""
    begun = time.perf_counter()
    import agent_run_ledger  # noqa: F401

    tell(time.perf_counter() - begun)


def chowki(place: str) -> None:
    begun = time.perf_counter()
    import chowki

    imported = time.perf_counter() - begun

    @chowki.step
    def fetch_invoice(invoice_id: str) -> dict[str, object]:
        return {"total": 12}

    @chowki.workflow
    def agent() -> None:
        fetch_invoice("INV-109")
        tell(imported)

    chowki.configure(db_path=place, resume_secret=b"benchmark" * 4)
    agent(run_id="benchmark")


def langgraph(place: str) -> None:
    begun = time.perf_counter()
    from langgraph.checkpoint.sqlite import SqliteSaver
    from langgraph.graph import START, StateGraph

    imported = time.perf_counter() - begun
    from typing import TypedDict

    class State(TypedDict):
        invoice_id: str
        total: int

    builder = StateGraph(State)
    builder.add_node("fetch_invoice", lambda state: {"total": 12})
    builder.add_edge(START, "fetch_invoice")
    with SqliteSaver.from_conn_string(place) as saver:
        graph = builder.compile(checkpointer=saver)
        graph.invoke({"invoice_id": "INV-109"}, {"configurable": {"thread_id": "benchmark"}}, durability="sync")
        tell(imported)


def dbos(place: str) -> None:
    begun = time.perf_counter()
    from dbos import DBOS

    imported = time.perf_counter() - begun

    @DBOS.step()
    def fetch_invoice(invoice_id: str) -> dict[str, object]:
        return {"total": 12}

    @DBOS.workflow()
    def agent() -> None:
        fetch_invoice("INV-109")
        tell(imported)

    DBOS(config={"name": "benchmark", "system_database_url": f"sqlite:///{place}", "log_level": "CRITICAL"})
    DBOS.launch()
    agent()


def burr(place: str) -> None:
    begun = time.perf_counter()
    from burr.core import ApplicationBuilder, State, action
    from burr.core.persistence import SQLitePersister

    imported = time.perf_counter() - begun

    @action(reads=["invoice_id"], writes=["total"])
    def fetch_invoice(state: State) -> State:
        return state.update(total=12)

    persister = SQLitePersister(place)
    persister.initialize()
    builder = ApplicationBuilder().with_actions(fetch_invoice).with_transitions(("fetch_invoice", "fetch_invoice"))
    builder = builder.with_identifiers(app_id="benchmark").with_state(invoice_id="INV-109")
    builder.with_entrypoint("fetch_invoice").with_state_persister(persister).build().step()
    tell(imported)


def bare(place: str) -> None:
    tell(0.0)


def tell(imported: float) -> None:
    """The step is recorded: say so, and end here."""
    import os

    with open("/proc/self/status", encoding="ascii") as file:
        peak = next(line.split()[1] for line in file if line.startswith("VmHWM:"))
    print(imported, peak, flush=True)
    os._exit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
