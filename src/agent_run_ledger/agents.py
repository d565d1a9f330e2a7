"""Face C: registered tools and agents. A tool called inside an agent is a durable step, an agent inside an agent a run of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from agent_run_ledger.drivers.context import caller, current_step, place_variable, step_variable
from agent_run_ledger.drivers.leases import HeldRun
from agent_run_ledger.drivers.sync import Suspended
from agent_run_ledger.engine import admission, runs, sharing
from agent_run_ledger.engine.call import Begun, Call, Options, declared
from agent_run_ledger.engine.waits import WATCH
from agent_run_ledger.errors import EffectConflict, InvalidArguments, LeaseLost, RunClosed, UnorderedStep
from agent_run_ledger.rules import canonical, checks, functions
from agent_run_ledger.rules.budget import Limits
from agent_run_ledger.rules.functions import Signature
from agent_run_ledger.rules.names import check_name, child_of
from agent_run_ledger.run import Place, Run, park, with_key
from agent_run_ledger.settle import asettle, settle
from agent_run_ledger.words import Effect, RunState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent_run_ledger.engine.log import Draft
    from agent_run_ledger.ledger import Ledger
    from agent_run_ledger.model import Budget, RetryPolicy

F = TypeVar("F", bound=Callable[..., Any])

_UNLIMITED = 2**31
"""Attempts of a step that is a run of its own: that run counts the attempts of its steps."""


class Registered:
    """A function under a name: what it takes, and what is declared about it."""

    def __init__(self, function: Callable[..., Any], name: str | None, what: str) -> None:
        self.function = function
        self.name = check_name(what, functions.name_of(function) if name is None else name)
        self.takes: Signature = functions.signature(function)
        if self.takes.is_generator:
            raise InvalidArguments(
                f"{self.name!r} is a generator function: calling it runs nothing of it. Return a list instead."
            )
        functions.check_takes_keywords(self.takes, self.name)
        self.hints = functions.hints(function)
        self.returns = self.hints.pop("return", None)

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, checked against the annotations. Raises `InvalidArguments`."""
        given = functions.bound(self.takes, args, kwargs, tool=self.name)
        for name, annotation in self.hints.items():
            if name in given and (misfit := checks.misfit(annotation, given[name])) is not None:
                where = (
                    name if misfit[0] in ".[" else f"{name}: "
                )  # a path into the value, or nothing but what is wrong
                from agent_run_ledger.rules.redaction import Redactor  # only who has gone wrong needs it

                said = Redactor().text(misfit)
                raise InvalidArguments(f"{self.name!r}: argument {where}{said}; nothing was dispatched")
        return given


class Tool(Registered):
    """A function whose calls inside a run are durable steps."""

    def __init__(self, function: Callable[..., Any], name: str | None, options: Options) -> None:
        super().__init__(function, name, "tool name")
        self.options = with_key(options) if self.takes.takes_key else options
        if self.options.step_key is not None:
            raise InvalidArguments(f"{self.name!r}: step_key= names one call; give it where the tool is called")
        if self.options.returns is None:
            self.options = self.options._replace(returns=self.returns)
        self.takes_step_key = "step_key" in self.takes.names

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it from wherever the caller is: as a step of the run whose program that is, else as what it is."""
        inside = step_variable.get()
        place: Place | None = place_variable.get()
        if inside is not None or place is None:
            if inside is not None and self.options.effect is Effect.MUTATE and inside.effect is Effect.READ:
                raise EffectConflict(inside.run_id, inside.tool_name, self.name)
            if not self.takes_step_key:
                kwargs.pop("step_key", None)
            return self.plain(args, kwargs)
        if self.takes.is_async and not place.run.is_async and type(caller()) is int:
            raise InvalidArguments(
                f"{self.name!r} is an async tool, and the program of run {place.run.run_id!r} is not async: nobody would await it; "
                "nothing was dispatched. Make the agent async, or the tool plain."
            )
        options = self.options
        if "step_key" in kwargs and not self.takes_step_key:
            key = kwargs.pop("step_key")
            if key is not None:
                options = options._replace(step_key=check_name("step_key", key))
        call = self.call(self.arguments(args, kwargs), options, place.run.payload_limit)
        return place.run.perform(call, is_async=self.takes.is_async)

    def plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call it where there is no step to make of the call: outside of a run, and inside of a step."""
        return self.function(*args, **kwargs)

    def call(self, arguments: dict[str, Any], options: Options, limit: int) -> Call:
        """A call of it that is not made yet."""
        takes = self.takes
        environment = functions.environment(options.version) if options.version else takes.environment
        return Call(
            self.name, arguments, self.function, options, environment, True, limit, self.hints,
            is_async=takes.is_async, takes_key=takes.takes_key,
        )  # fmt: skip


class Agent(Registered):
    """A function whose calls of tools are the steps of one run."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None,
        budget: Budget | None,
        returns: Any,
        retry: RetryPolicy | None,
        fatal: Any,
    ) -> None:
        super().__init__(function, name, "agent name")
        terms = declared({"retry": retry, "fatal": fatal})
        self.retry, self.fatal = terms.retry, terms.fatal
        if budget is not None:
            from agent_run_ledger.model import Budget

            if not isinstance(budget, Budget):
                raise InvalidArguments(f"budget= is a Budget, not {budget!r}")
        self.limits = Limits.of(budget)
        self.returns = self.returns if returns is None else returns
        # It may be imported for type checkers only, so that its name is all there is.
        given = functions.as_written(function) | self.hints
        self.asks_run = [name for name, annotation in given.items() if annotation is Run or _names_run(annotation)]
        for asked in self.asks_run:
            self.hints.pop(asked, None)
        self.takes = self.takes.without(self.asks_run)

    def created(
        self,
        given: dict[str, Any],
        ledger: Ledger,
        parent: str | None,
        queue: str | None = None,
        priority: int = 0,
        key: str | None = None,
        within: HeldRun | None = None,
    ) -> Draft:
        """The first entry of its run. `within` is the run that begins it: its calls draw on the same accounts."""
        limits = self.limits.over(ledger._limits)
        if within is not None and (shared := sharing.accounts(within)):
            limits = limits._replace(within=tuple(sorted({*shared, *(limits.within or ())})))
        return runs.created(
            self.name, given, pipeline=False, limit=ledger._payload_limit, limits=limits,
            declared=functions.together(self.hints.values()), agent=self.name, parent=parent, queue=queue, priority=priority, key=key,
        )  # fmt: skip

    def given(self, draft: Draft) -> dict[str, Any]:
        """The arguments as a replay gets them."""
        given = canonical.decode(draft.payload or b"")["input"]
        for name, annotation in self.hints.items():
            if name in given:
                given[name] = canonical.rebuild(annotation, given[name])
        return cast(dict[str, Any], given)

    def apply(self, held: HeldRun) -> None:
        """Give the run the limits of its agent."""
        held.retry, held.fatal = self.retry, self.fatal
        held.allow(self.limits.over(held.given))

    def call(self, run: Run, arguments: dict[str, Any]) -> Any:
        """Its function, as the program of this run."""
        return self.function(**arguments, **dict.fromkeys(self.asks_run, run))

    def result(self, payload: bytes) -> Any:
        """What the run returned, built as it is declared."""
        return canonical.rebuild(self.returns, canonical.decode(payload))

    def child(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Its call inside another agent: a step there, a run of its own here, which an attempt after a crash goes on with."""
        ledger = place.run.ledger
        arguments = self.arguments(args, kwargs)
        parent = place.run.run_id

        def begin(**given: Any) -> Any:
            held = place.run._held
            begun = Start(self, given, child_of(current_step().idempotency_key), None, parent, held.suspends, held)
            if held.is_worked:
                return hand_over(ledger, begun, held, is_async=place.run.is_async)
            return abegin(ledger, begun) if self.takes.is_async else run_to_its_end(ledger, begun)

        options = Options(effect=Effect.IDEMPOTENT, returns=self.returns)
        return Call(
            self.name, arguments, begin, options, self.takes.environment, True, ledger._payload_limit, self.hints,
            is_async=self.takes.is_async, attempts=_UNLIMITED, begins_run=True,
        )  # fmt: skip


def _names_run(annotation: object) -> bool:
    return isinstance(annotation, str) and annotation in ("Run", "agent_run_ledger.Run")


class Start(NamedTuple):
    """One start of an agent."""

    agent: Agent
    given: dict[str, Any]
    run_id: str | None
    wait: float | None
    parent: str | None = None
    suspends: bool = False
    """Whether its program ends where it would have to wait for what has not come."""
    within: HeldRun | None = None
    """The run whose program has called it."""
    is_worked: bool = False
    """Whether a worker drives it."""


@contextmanager
def program_of(run: Run, held: HeldRun) -> Iterator[None]:
    """The calling code is the run's program, and in no step."""
    place, inside = place_variable.set(Place(run, held.root)), step_variable.set(None)
    held.strands = {caller()}
    try:
        yield
    finally:
        held.strands = set()
        run.over()
        with suppress(ValueError):  # closed from elsewhere, as a coroutine may be whose loop is closed
            place_variable.reset(place)
            step_variable.reset(inside)


def refuse_itself(run_id: str | None) -> None:
    """Raises `UnorderedStep` where the program of this very run asks to run it: it would wait for itself."""
    place: Place | None = place_variable.get()
    if place is not None and run_id == place.run.run_id:
        raise UnorderedStep(run_id, "run", "its own program")


def hand_over(ledger: Ledger, start: Start, parent: HeldRun, *, is_async: bool) -> Any:
    """Leave a child to the workers of its parent's queue. Returns `Begun`, or what it returned where it has ended before.

    In an async program what is returned has to be awaited: the store may take its time.
    """
    if is_async:
        return ledger._asynchronous.in_thread(lambda: hand_over(ledger, start, parent, is_async=False))
    agent, history, run_id = start.agent, parent.history, start.run_id or ""
    draft = agent.created(start.given, ledger, start.parent, history.queue, history.priority, within=parent)
    if ledger._leases.enqueue(run_id, [draft], 0.0):
        return Begun(run_id)
    summary = ledger._summary(run_id)
    if summary.head.listing.queue is None:  # it was begun by a program of its own, which has died
        return run_to_its_end(ledger, start)
    if ledger._record(summary).parent_run_id != start.parent:  # it is the child of the run that this one was made from
        by = f"run {start.parent}"
        said = {"name": WATCH, "value": start.parent, "by": by}
        ledger._store.post(run_id, "signal", canonical.encode(said), by, ledger._clock.now())
    record = ledger.get_run(run_id)
    if record.status == RunState.COMPLETED:
        return record.result
    if RunState(record.status).is_terminal:
        raise RunClosed(run_id, RunState(record.status), record.cause)
    return Begun(run_id)


def run_to_its_end(ledger: Ledger, start: Start) -> Any:
    """Run an agent, or go on with its run, in the calling thread, and return its result."""
    agent = start.agent
    refuse_itself(start.run_id)
    draft = agent.created(start.given, ledger, start.parent, within=start.within)
    held = ledger._start(start.run_id, draft, start.wait, waits_for_itself=True)
    token = held.token
    try:
        agent.apply(held)
        if held.history.state is RunState.COMPLETED:
            return agent.result(runs.result_of(held.history))
        held.suspends, held.is_worked = start.suspends, start.is_worked
        if held.history.is_in_doubt and not held.history.state.is_terminal:
            settle(ledger, held, ledger._tools)
        ledger._driver.obey(runs.give_up(held))
        if (refusal := admission.refusal(held, pipeline=False)) is not None:
            raise refusal
        run = Run(ledger, held)
        with program_of(run, held):
            value = agent.call(run, agent.given(draft))
        _suspend(held)
        payload = runs.stored(value, f"the result of {agent.name!r}", ledger._payload_limit, agent.returns)
        ledger._driver.obey(runs.finish(held, payload))
        return agent.result(payload)
    except BaseException as error:
        told = _told(held, start, token, error)
        park(ledger, held, told)
        if told is not error:
            raise told from error
        raise
    finally:
        held.__exit__(None, None, None)


async def abegin(ledger: Ledger, start: Start) -> Any:
    """Run an async agent, or go on with its run, in the calling task, and return its result."""
    agent, driver = start.agent, ledger._asynchronous
    refuse_itself(start.run_id)
    draft = agent.created(start.given, ledger, start.parent, within=start.within)
    held = await driver.start(lambda: ledger._start(start.run_id, draft, None), start.wait, waits_for_itself=True)
    token = held.token
    try:
        agent.apply(held)
        if held.history.state is RunState.COMPLETED:
            return agent.result(runs.result_of(held.history))
        held.suspends, held.is_worked = start.suspends, start.is_worked
        if held.history.is_in_doubt and not held.history.state.is_terminal:
            await asettle(ledger, held, ledger._tools)
        await driver.obey(runs.give_up(held))
        if (refusal := admission.refusal(held, pipeline=False)) is not None:
            raise refusal
        run = Run(ledger, held, is_async=True)
        with program_of(run, held):
            value = await agent.call(run, agent.given(draft))
        _suspend(held)
        payload = runs.stored(value, f"the result of {agent.name!r}", ledger._payload_limit, agent.returns)
        await driver.finish(held, payload)
        return agent.result(payload)
    except BaseException as error:
        told = _told(held, start, token, error)
        await driver.park(held, told)
        if told is not error:
            raise told from error
        raise
    finally:
        held.__exit__(None, None, None)


def _suspend(held: HeldRun) -> None:
    """A program that swallowed that it is to end has no result."""
    if held.is_suspended:
        raise Suspended


def _told(held: HeldRun, start: Start, token: int, error: BaseException) -> BaseException:
    """What ended a program that began under this token: whatever its own code made of it.

    Where it is to be begun anew later that is all; and where it has lost its run meanwhile, which its worker has again, its error is not the run's.
    """
    if start.is_worked and held.token not in (0, token) and isinstance(error, Exception):
        return error if isinstance(error, LeaseLost) else LeaseLost(held.run_id, token)
    if not (held.is_suspended or isinstance(error, Suspended)):
        return error
    if start.within is not None:  # it waits for what its child waits for
        start.within.is_suspended = True
    return error if isinstance(error, Suspended) else Suspended()


def as_tool(function: F, tool: Tool) -> F:
    """The function as it is called in programs: plain outside of a run, a step inside of one."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return tool(args, kwargs)

    return cast(F, _awaited(wrapper, tool))


def as_agent(function: F, agent: Agent, ledger: Ledger) -> F:
    """The function as it is called in programs: plain outside of a run, a run of its own inside of another."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        place: Place | None = place_variable.get()
        if place is None or step_variable.get() is not None:
            return function(*args, **kwargs)
        return place.run.perform(agent.child(place, args, kwargs), is_async=agent.takes.is_async)

    wrapper.ledger = ledger  # type: ignore[attr-defined] # the one it is registered with: `testing.crashtest` makes another like it
    return cast(F, _awaited(wrapper, agent))


def _awaited(wrapper: Callable[..., Any], registered: Registered) -> Callable[..., Any]:
    wrapper.registered = registered  # type: ignore[attr-defined]
    if registered.takes.is_async:
        from agent_run_ledger.drivers.asynchronous import mark_as_coroutine_function

        mark_as_coroutine_function(wrapper)
    return wrapper
