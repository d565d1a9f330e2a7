"""Face C for many workers: what a ledger lets programs do with runs that workers go on with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from agent_run_ledger.engine.history import parse
from agent_run_ledger.errors import IllegalTransition, InvalidArguments
from agent_run_ledger.words import RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from agent_run_ledger.agents import Agent
    from agent_run_ledger.contract import QueueTerms, Store, Summary
    from agent_run_ledger.drivers.asynchronous import AsyncDriver
    from agent_run_ledger.drivers.leases import Leases
    from agent_run_ledger.fleet.handle import Handle
    from agent_run_ledger.fleet.submitting import Order
    from agent_run_ledger.fleet.worker import Worker
    from agent_run_ledger.ledger import AgentRunLedger
    from agent_run_ledger.model import StuckRun, WorkerRecord


class Fleet:
    """Submitting runs of agents to queues, working on them, and seeing how workers and runs stand."""

    _store: Store
    _leases: Leases
    _payload_limit: int
    _agents: dict[str, Agent]
    _queues: dict[str, QueueTerms]
    """What was declared about queues, by name."""
    _workers: set[Worker]
    """Those that have not ended."""

    if TYPE_CHECKING:

        @property
        def _asynchronous(self) -> AsyncDriver: ...
        @staticmethod
        def _registered(function: Callable[..., Any]) -> Agent: ...
        def _summary(self, run_id: str) -> Summary: ...

    def submit(
        self,
        agent: Callable[..., Any],
        /,
        *args: Any,
        run_id: str | None = None,
        queue: str = "default",
        priority: int = 0,
        delay: float = 0,
        key: str | None = None,
        **kwargs: Any,
    ) -> Handle:
        """Leave a run of an agent to the workers of a queue, and return a handle of it. It is on stable storage then.

        It is due in `delay` seconds. Runs with a larger `priority` are begun first; a queue may limit how many with one `key` are worked on
        at once. A `run_id` that exists with the same arguments is attached to, and nothing is written, but that a run which was laid aside
        is due again. Raises `RunInputMismatch` for other arguments, `InvalidArguments` and `InvalidName` for what cannot be.
        """
        from agent_run_ledger.fleet import submitting

        return submitting.place(self._itself(), self._order(agent, args, kwargs, run_id, queue, priority, delay, key))

    def asubmit(
        self,
        agent: Callable[..., Any],
        /,
        *args: Any,
        run_id: str | None = None,
        queue: str = "default",
        priority: int = 0,
        delay: float = 0,
        key: str | None = None,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, Handle]:
        """`submit` in an event loop, which does not wait for the disk or the server then."""
        from agent_run_ledger.fleet import submitting

        asked = self._order(agent, args, kwargs, run_id, queue, priority, delay, key)
        return self._asynchronous.in_thread(lambda: submitting.place(self._itself(), asked))

    def handle(self, run_id: str) -> Handle:
        """A handle of a run that exists, as `submit` returned one. Raises `RunNotFound`."""
        from agent_run_ledger.fleet.handle import Handle

        summary = self._summary(run_id)
        return Handle(self._itself(), run_id, self._agents.get(summary.head.listing.agent or ""))

    def wake(self, run_id: str) -> None:
        """Let a worker take a run of a queue now: one that was redriven or forked, that is parked, or that has a delay.

        Nothing is written in its log. Raises `RunOwned` while somebody works on it, `IllegalTransition` where it has ended or is in
        quarantine, `InvalidArguments` where it is in no queue.
        """
        summary = self._summary(run_id)
        if summary.head.listing.queue is None:
            raise InvalidArguments(
                f"run {run_id!r} is in no queue, so no worker looks for it; nothing was done. Start its program with that run id."
            )
        state = RunState(parse(summary.last.body)["state"])
        if state.is_terminal or state is RunState.QUARANTINE:
            raise IllegalTransition(state, "WAKE", run_id)
        self._leases.wake(self._leases.run(run_id))

    def queue(self, name: str, concurrency: int | None = None, per_key: int | None = None) -> None:
        """Declare how many runs of a queue may be worked on at once, by all workers together, and how many of those with one key.

        Each program that works for the queue declares the same. A queue that nobody declares has no limits but the slots of its workers.
        """
        from agent_run_ledger.fleet import submitting

        declared = submitting.terms(name, concurrency, per_key)
        known = self._queues.setdefault(name, declared)
        if known != declared:
            raise InvalidArguments(
                f"queue {name!r} is declared with concurrency={known.concurrency}, per_key={known.per_key} already; it cannot have "
                f"concurrency={concurrency}, per_key={per_key} as well"
            )

    def worker(
        self,
        concurrency: int = 8,
        queues: Sequence[str] = ("default",),
        *,
        poll_seconds: float = 1.0,
        name: str | None = None,
        health: tuple[str, int] | None = None,
        drain_seconds: float | None = None,
    ) -> Worker:
        """Start a worker, which goes on with up to `concurrency` runs of these queues at once, in threads of its own, until it is stopped.

        Sync agents run in a thread each, async ones side by side in one event loop. It takes runs of agents that are registered here, and
        those of dead workers. `poll_seconds` is how long it may not see what is due where nobody tells it. `health` is an address, like
        `("127.0.0.1", 8080)`, at which it says how it is. `drain_seconds` bounds how long it waits for steps in flight when it is told to
        end; None: for ever. The first SIGTERM drains it, where this is the main thread and nobody else handles that signal.
        """
        from agent_run_ledger.fleet.worker import Worker

        return Worker(self._itself(), concurrency, queues, poll_seconds, name, health, drain_seconds)

    def workers(self) -> list[WorkerRecord]:
        """What the workers of this ledger's store said last, in all processes; one that died is there for a day."""
        from agent_run_ledger.fleet import watching

        return watching.workers(self._store)

    def stuck(self, after_seconds: float = 300.0) -> list[StuckRun]:
        """The runs that somebody should go on with and that have not got on for so long, each with the reason."""
        from agent_run_ledger.fleet import watching

        return watching.stuck(self._itself(), after_seconds)

    def _order(
        self,
        agent: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        run_id: str | None,
        queue: str,
        priority: int,
        delay: float,
        key: str | None,
    ) -> Order:
        from agent_run_ledger.fleet import submitting

        return submitting.order(
            self._registered(agent), args, kwargs,
            run_id=run_id, queue=queue, priority=priority, delay=delay, key=key, ledger=self._itself(),
        )  # fmt: skip

    def _itself(self) -> AgentRunLedger:
        return cast("AgentRunLedger", self)
