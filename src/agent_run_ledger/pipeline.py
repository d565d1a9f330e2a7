"""Face A: one pipeline, one run. A typed graph of steps; running the script again resumes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from agent_run_ledger.contract import Clock, Store
from agent_run_ledger.drivers.context import step_variable
from agent_run_ledger.drivers.leases import HeldRun
from agent_run_ledger.drivers.workers import Work
from agent_run_ledger.engine import runs
from agent_run_ledger.engine.call import Call, StepOptions, declared
from agent_run_ledger.engine.effects import Flow, Result
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.errors import InvalidArguments, InvalidPipeline
from agent_run_ledger.ledger import OUTAGE_SECONDS, PAYLOAD_LIMIT, Durability, Ledger
from agent_run_ledger.model import Budget
from agent_run_ledger.rules import canonical, functions
from agent_run_ledger.rules.budget import Limits, shared
from agent_run_ledger.rules.names import check_name
from agent_run_ledger.run import park, perform, with_key
from agent_run_ledger.words import RunState

if TYPE_CHECKING:
    from agent_run_ledger.heads import HeadLog
    from agent_run_ledger.prices import Prices
    from agent_run_ledger.rules.loops.policy import LoopDetectorPolicy
    from agent_run_ledger.stores.encryption import Encryption

F = TypeVar("F", bound=Callable[..., Any])


class Step:
    """One step of a pipeline: a name, a function, sync or async, and the names of the steps whose outputs it takes.

    The options are those of `AgentRunLedger.execute_step`, but for `step_key`. The function's return annotation stands in for
    `returns=`, and a parameter `idempotency_key` is given the step's key.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        depends_on: Iterable[str] = (),
        **options: Unpack[StepOptions],
    ) -> None:
        self.name = check_name("step name", name)
        self.fn = fn
        if isinstance(depends_on, str):
            raise InvalidPipeline(
                f"step {name!r}: depends_on takes a list of step names, not the string {depends_on!r}"
            )
        self.depends_on = tuple(depends_on)
        self.takes = functions.signature(fn)
        if self.takes.is_generator:
            raise InvalidPipeline(
                f"step {name!r} is a generator function: calling it runs nothing of it. Return a list."
            )
        hints = functions.hints(fn)
        returned = hints.pop("return", None)
        self.parameters = hints
        self.options = declared(options)
        if self.options.step_key is not None:
            raise InvalidPipeline(f"step {name!r} takes no step_key=: its name is its place in the run")
        if self.takes.takes_key:
            self.options = with_key(self.options)
        if self.options.returns is None:
            self.options = self.options._replace(returns=returned)

    def bind(self, given: dict[str, Any], outputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """The step's arguments, and which of them are the outputs of which dependencies.

        A parameter named after a dependency takes its output; one named in `given` takes that; those that are left take the outputs
        that are left, in the order of `depends_on`. Raises `InvalidArguments` where a required one gets nothing.
        """
        sources = {name: name for name in self.takes.names if name in self.depends_on}
        named = {name: given[name] for name in self.takes.names if name in given and name not in sources}
        left = [name for name in self.takes.names if name not in sources and name not in named]
        remaining = [dependency for dependency in self.depends_on if dependency not in sources]
        sources |= zip(left, remaining, strict=False)
        arguments = named | {name: outputs[dependency] for name, dependency in sources.items()}
        missing = [name for name in self.takes.required if name not in arguments]
        if missing:
            raise InvalidArguments(
                f"step {self.name!r}: nothing gives its parameter {', '.join(map(repr, missing))} a value. Name it in execute(), "
                "or make it take the output of a dependency. Nothing was run."
            )
        return arguments, sources


class Schedule:
    """Which steps of a pipeline may begin, and how those that have ended did. It only decides: calls are made by whoever asks it.

    A step may begin when all that it depends on is done; of the synchronous ones at most `at_once` are under way together.
    Where one has failed nothing new begins.
    """

    def __init__(self, order: Sequence[Step], at_once: int) -> None:
        self._order = order
        self._numbers = {step.name: number for number, step in enumerate(order)}
        self._graph = _graph(order)
        self._free = at_once
        self._ready: dict[bool, list[int]] = {True: [], False: []}
        """Heaps of the steps that may begin, the async ones and the others."""
        self._errors: dict[int, BaseException] = {}
        self.outputs: dict[str, Any] = {}

    def begin(self) -> list[Step]:
        """The steps that begin now, in the pipeline's order."""
        if self._errors:
            return []
        for name in self._graph.get_ready():
            number = self._numbers[name]
            heappush(self._ready[self._order[number].takes.is_async], number)
        begun, self._ready[True] = self._ready[True], []
        while self._free and self._ready[False]:
            begun.append(heappop(self._ready[False]))
            self._free -= 1
        return [self._order[number] for number in sorted(begun)]

    def ended(self, step: Step, result: Result) -> None:
        """A step that was begun is over."""
        if not step.takes.is_async:
            self._free += 1
        if result.error is not None:
            self._errors[self._numbers[step.name]] = result.error
        else:
            self.outputs[step.name] = result.value
            self._graph.done(step.name)

    @property
    def error(self) -> BaseException | None:
        """The error that ends the execution: the first in the pipeline's order, whichever came first; an interruption before all."""
        interruptions = [number for number, error in self._errors.items() if not isinstance(error, Exception)]
        return self._errors[min(interruptions or self._errors)] if self._errors else None


def _graph(steps: Iterable[Step]) -> TopologicalSorter[str]:
    """What has to be done before what. Raises `InvalidPipeline` for a circle."""
    graph = TopologicalSorter({step.name: step.depends_on for step in steps})
    try:
        graph.prepare()
    except CycleError as error:
        circle = ", ".join(map(repr, error.args[1][1:]))
        raise InvalidPipeline(f"the steps {circle} depend on each other in a circle. Nothing was run.") from None
    return graph


class Execution:
    """One execution of a pipeline: everything about it but the waiting, which the two faces do each in its way."""

    def __init__(self, order: list[Step], draft: Draft, run: HeldRun, *, at_once: int, limit: int) -> None:
        self.run = run
        self._order = order
        self._given = canonical.decode(draft.payload or b"")["input"]
        self._limit = limit
        self._returns = {step.name: step.options.returns for step in order}
        self._schedule = Schedule(order, at_once)
        self.ended = self._schedule.ended
        run.allow(run.given._replace(steps=len(order)))

    def wiring(self) -> Flow[None]:
        """Make sure that this is the pipeline that is recorded."""
        return runs.check_wiring(self.run, {step.name: step.depends_on for step in self._order})

    @property
    def is_completed(self) -> bool:
        return self.run.history.state is RunState.COMPLETED

    def begin(self) -> list[Step]:
        """The steps that begin now; none where one of those under way is about to end the run."""
        return [] if self.run.closing else self._schedule.begin()

    def call(self, step: Step) -> Call:
        """What the run is asked for, with the outputs of the steps before."""
        arguments, sources = step.bind(self._given, self._schedule.outputs)
        version = step.options.version
        environment = functions.environment(version) if version else step.takes.environment
        # A parameter without an annotation takes an output as what it was returned as.
        types = {name: self._returns[source] for name, source in sources.items()}
        returned = {name: kind for name, kind in types.items() if kind is not None}
        return Call(
            step.name, arguments, step.fn, step.options, environment, True, self._limit, returned | step.parameters,
            is_async=step.takes.is_async, takes_key=step.takes.takes_key, branch=self.run.root, place=step.name,
            after=step.depends_on,
        )  # fmt: skip

    def finished(self) -> bytes:
        """The result, as it is stored. Raises the error of a step where there is one."""
        if (error := self._schedule.error) is not None:
            raise error
        sinks, outputs = _sinks(self._order), self._schedule.outputs
        result = outputs[sinks[0].name] if len(sinks) == 1 else {sink.name: outputs[sink.name] for sink in sinks}
        returned = functions.together(self._returns[sink.name] for sink in sinks)
        return runs.stored(result, "the result", self._limit, returned)

    def result(self, payload: bytes) -> Any:
        """The result as it is returned, now and ever after."""
        return _rebuilt(payload, _sinks(self._order))

    def recorded(self) -> Any:
        """The result of a completed run. Raises `PayloadErased`."""
        history = self.run.history
        ran = [step for step in self._order if step.name in history.positions]  # the others were added since
        return _rebuilt(runs.result_of(history), _sinks(ran))


def _sinks(order: list[Step]) -> list[Step]:
    needed = {dependency for step in order for dependency in step.depends_on}
    return [step for step in order if step.name not in needed]


def _rebuilt(payload: bytes, sinks: list[Step]) -> Any:
    plain = canonical.decode(payload)
    if len(sinks) == 1:
        return canonical.rebuild(sinks[0].options.returns, plain)
    return {sink.name: canonical.rebuild(sink.options.returns, plain[sink.name]) for sink in sinks}


class RunLedger(Ledger):
    """A pipeline of steps that runs once, however often it is started.

    Of its synchronous steps at most `max_parallel` run side by side, of its async ones all that can.

    >>> ledger = RunLedger("audit-2026", "audit.db")
    >>> @ledger.step(name="fetch")
    ... def fetch(company_id: str) -> dict:
    ...     return {"company": company_id, "revenue": 12}
    >>> @ledger.step(name="report", depends_on=["fetch"])
    ... def report(data: dict) -> str:
    ...     return f"{data['company']}: {data['revenue']}"
    >>> ledger.execute(company_id="acme")
    'acme: 12'
    >>> ledger.close()
    """

    def __init__(
        self,
        run_id: str,
        db_path: str | os.PathLike[str] | Store = "runs.db",
        policy: LoopDetectorPolicy | None = None,
        *,
        steps: Iterable[Step] = (),
        max_parallel: int = 1,
        budget: Budget | None = None,
        prices: Prices | None = None,
        unknown_price: str = "charge_reservation",
        durability: Durability = "full",
        lease_seconds: float = 30.0,
        heartbeat_seconds: float = 3.0,
        undeclared: str = "dispatch",
        owner: str | None = None,
        payload_limit: int = PAYLOAD_LIMIT,
        min_free_bytes: int | None = None,
        outage_seconds: float = OUTAGE_SECONDS,
        heads: HeadLog | None = None,
        encryption: Encryption | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.run_id = check_name("run_id", run_id)
        if type(max_parallel) is not int or max_parallel < 1:
            raise ValueError(f"max_parallel is a whole number of at least 1, not {max_parallel!r}")
        self._max_parallel = max_parallel
        self._steps: dict[str, Step] = {}
        for each in steps:
            self._add(each)
        super().__init__(
            db_path,
            shared_limits=shared(budget),
            limits=Limits.of(budget)._replace(steps=1),  # each execution sets the number of its steps
            prices=prices,
            unknown_price=unknown_price,
            policy=policy,
            durability=durability,
            lease_seconds=lease_seconds,
            heartbeat_seconds=heartbeat_seconds,
            undeclared=undeclared,
            owner=owner,
            payload_limit=payload_limit,
            min_free_bytes=min_free_bytes,
            outage_seconds=outage_seconds,
            heads=heads,
            encryption=encryption,
            clock=clock,
        )

    def step(
        self, name: str | None = None, *, depends_on: Iterable[str] = (), **options: Unpack[StepOptions]
    ) -> Callable[[F], F]:
        """Register the function below as a step. It stays a plain function for whoever calls it outside the pipeline."""
        if callable(name):
            raise InvalidPipeline("@ledger.step takes parentheses: @ledger.step() or @ledger.step(name=...)")

        def register(fn: F) -> F:
            self._add(Step(fn.__name__ if name is None else name, fn, depends_on, **options))
            return fn

        return register

    def _add(self, step: Step) -> None:
        if step.name in self._steps:
            raise InvalidPipeline(f"there is a step {step.name!r} already; a step's name is its place in the run")
        self._steps[step.name] = step

    def execute(self, **given: Any) -> Any:
        """Run the pipeline, or go on where it stopped, and return the output of its last step.

        Where several steps have nobody after them: `{name: output}`. A completed run returns its result without a call or a write.
        Everything that can be checked is checked before anything runs. After an error nothing new is begun; what runs comes to its
        end and is recorded, and then the first error in the pipeline's order parks the run and is raised. Executing it again goes
        on there.

        Steps run in the calling thread, one after the other, or with `max_parallel` above 1 each in a thread of its own. Where
        there are async steps it is `aexecute` in an event loop of its own; in a thread that has one already `InvalidArguments`.
        """
        order, draft = self._checked(given)
        if any(step.takes.is_async for step in order):
            return self._asynchronous.run(lambda: self._aexecute(order, draft), "aexecute")
        held = self._start(self.run_id, draft, None, waits_for_itself=not self._is_inside())
        try:
            execution = Execution(order, draft, held, at_once=self._max_parallel, limit=self._payload_limit)
            self._driver.obey(execution.wiring())
            if execution.is_completed:
                return execution.recorded()
            if self._max_parallel == 1:
                self._one_after_the_other(execution)
            else:
                self._in_threads(execution)
            payload = execution.finished()
            self._driver.obey(runs.finish(held, payload))
            return execution.result(payload)
        except BaseException as error:
            park(self, held, error)
            raise
        finally:
            held.__exit__(None, None, None)

    async def aexecute(self, **given: Any) -> Any:
        """`execute` in an event loop: async steps run as soon as what they depend on is there, each in a task of its own.

        Synchronous steps run in threads, at most `max_parallel` at once, so that the loop goes on. Where this is cancelled the steps
        under way are cancelled and left in doubt, and the run is parked; a function in a thread goes on, and the next execution
        in this process takes what it returns.
        """
        order, draft = self._checked(given)
        return await self._aexecute(order, draft)

    async def _aexecute(self, order: list[Step], draft: Draft) -> Any:
        driver, waits = self._asynchronous, not self._is_inside()
        held = await driver.start(lambda: self._start(self.run_id, draft, None), None, waits_for_itself=waits)
        try:
            execution = Execution(order, draft, held, at_once=self._max_parallel, limit=self._payload_limit)
            await driver.obey(execution.wiring())
            if execution.is_completed:
                return execution.recorded()

            async def work(step: Step) -> Any:
                call = execution.call(step)
                if not step.takes.is_async:
                    call.function, call.is_async = driver.in_a_thread(held, step.fn, step.name), True
                return await driver.call(held, call)

            await driver.side_by_side(execution.begin, work, execution.ended)
            payload = execution.finished()
            await driver.finish(held, payload)
            return execution.result(payload)
        except BaseException as error:
            await driver.park(held, error)
            raise
        finally:
            held.__exit__(None, None, None)

    def _one_after_the_other(self, execution: Execution) -> None:
        while steps := execution.begin():
            for step in steps:
                execution.ended(step, Result(self._perform(execution, step), None))

    def _in_threads(self, execution: Execution) -> None:
        """Each step in a thread of its own. An interrupt waits for what is under way, and a second one leaves it to itself."""
        running: dict[str, Work] = {}
        over: SimpleQueue[Step] = SimpleQueue()
        try:
            while (steps := execution.begin()) or running:
                for step in steps:
                    work = Work(self._perform, {"execution": execution, "step": step}, step.name)
                    work.when_over(lambda step=step: over.put(step))  # type: ignore[misc]
                    running[step.name] = work
                    work.start()
                ended = over.get()
                execution.ended(ended, running.pop(ended.name).result)
        except BaseException:
            for work in running.values():
                if not work.take_back():
                    work.wait(None)
            raise

    def _perform(self, execution: Execution, step: Step) -> Any:
        return perform(self, execution.run, execution.call(step), is_async=False)

    def _is_inside(self) -> bool:
        """Whether a step of this very run asks: it would wait for itself."""
        inside = step_variable.get()
        return inside is not None and inside.run_id == self.run_id

    def _checked(self, given: dict[str, Any]) -> tuple[list[Step], Draft]:
        """The steps in their order, and the run's first entry. Raises where anything is wrong with the pipeline or its input."""
        order = self._order()
        self._check(order, given)
        hints = functions.together(hint for step in order for hint in step.parameters.values())
        goal = f"pipeline {self.run_id}"
        return order, runs.created(
            goal, given, pipeline=True, limit=self._payload_limit, limits=self._limits, declared=hints
        )

    def _order(self) -> list[Step]:
        """The steps, each after those it depends on, else as they were registered."""
        if not self._steps:
            raise InvalidPipeline(
                "the pipeline has no steps: register functions with @ledger.step() or give steps=[...]"
            )
        for each in self._steps.values():
            for dependency in each.depends_on:
                if dependency not in self._steps:
                    raise InvalidPipeline(
                        f"step {each.name!r} depends on {dependency!r}, which is no step. Nothing was run."
                    )
        graph, steps = _graph(self._steps.values()), list(self._steps.values())
        numbers = {step.name: number for number, step in enumerate(steps)}
        ready: list[int] = []
        order: list[Step] = []
        while graph.is_active():
            for name in graph.get_ready():
                heappush(ready, numbers[name])
            order.append(steps[heappop(ready)])
            graph.done(order[-1].name)
        return order

    def _check(self, order: list[Step], given: dict[str, Any]) -> None:
        """Bind everything once without values: what is missing or left over is refused before anything runs."""
        used: set[str] = set()
        for each in order:
            arguments, sources = each.bind(given, dict.fromkeys(each.depends_on))
            used |= arguments.keys() - sources.keys()
        extra = [name for name in given if name not in used]
        if extra:
            raise InvalidArguments(f"no step takes {', '.join(map(repr, extra))} of execute(). Nothing was run.")


__all__ = ["RunLedger", "Schedule", "Step"]
