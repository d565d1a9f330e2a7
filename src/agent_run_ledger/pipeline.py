"""Face A: one pipeline, one run. A typed graph of steps; running the script again resumes it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, Unpack

from agent_run_ledger.contract import Clock, Store
from agent_run_ledger.drivers.leases import HeldRun
from agent_run_ledger.engine import runs
from agent_run_ledger.engine.call import Call, StepOptions, declared
from agent_run_ledger.errors import InvalidArguments, InvalidPipeline
from agent_run_ledger.ledger import PAYLOAD_LIMIT, Durability, Ledger
from agent_run_ledger.model import RunState
from agent_run_ledger.rules import canonical, functions
from agent_run_ledger.rules.loops import LoopDetectorPolicy
from agent_run_ledger.rules.names import check_name
from agent_run_ledger.run import park, perform

F = TypeVar("F", bound=Callable[..., Any])


class Step:
    """One step of a pipeline: a name, a function, and the names of the steps whose outputs it takes.

    The options are those of `AgentRunLedger.execute_step`. The function's return annotation stands in for `returns=`.
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
        if self.takes.is_async:
            raise InvalidPipeline(f"step {name!r} is an async function: this version runs synchronous steps only")
        if self.takes.is_generator:
            raise InvalidPipeline(
                f"step {name!r} is a generator function: calling it runs nothing of it. Return a list."
            )
        hints = functions.hints(fn)
        returned = hints.pop("return", None)
        self.parameters = hints
        self.options = declared(options)
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


class RunLedger(Ledger):
    """A pipeline of steps that runs once, however often it is started.

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
        durability: Durability = "full",
        lease_seconds: float = 30.0,
        heartbeat_seconds: float = 3.0,
        undeclared: str = "dispatch",
        owner: str | None = None,
        payload_limit: int = PAYLOAD_LIMIT,
        clock: Clock | None = None,
    ) -> None:
        self.run_id = check_name("run_id", run_id)
        if max_parallel != 1:
            raise ValueError(
                f"max_parallel is 1 in this version, not {max_parallel!r}: a pipeline runs one step at a time"
            )
        self._steps: dict[str, Step] = {}
        for each in steps:
            self._add(each)
        self._executing = threading.RLock()
        super().__init__(
            db_path,
            limit=1,  # each execution sets the number of its steps
            policy=policy or LoopDetectorPolicy(),
            durability=durability,
            lease_seconds=lease_seconds,
            heartbeat_seconds=heartbeat_seconds,
            undeclared=undeclared,
            owner=owner,
            payload_limit=payload_limit,
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
        Everything that can be checked is checked before anything runs. An exception parks the run and is raised; executing it again
        goes on there.
        """
        order = self._order()
        self._check(order, given)
        with self._executing:
            hints = functions.together(hint for each in order for hint in each.parameters.values())
            goal = f"pipeline {self.run_id}"
            draft = runs.created(goal, given, pipeline=True, limit=self._payload_limit, declared=hints)
            run = self._start(self.run_id, draft, None)
            try:
                return self._execute(run, order, canonical.decode(draft.payload or b"")["input"])
            finally:
                run.__exit__(None, None, None)

    def _execute(self, run: HeldRun, order: list[Step], given: dict[str, Any]) -> Any:
        try:
            run.limit = len(order)
            self._driver.obey(runs.check_wiring(run, {each.name: each.depends_on for each in order}))
            if run.history.state is not RunState.COMPLETED:
                outputs: dict[str, Any] = {}
                for each in order:
                    arguments, sources = each.bind(given, outputs)
                    outputs[each.name] = perform(self, run, self._call(each, arguments, sources), is_async=False)
                sinks = self._sinks(order)
                result = (
                    outputs[sinks[0].name] if len(sinks) == 1 else {sink.name: outputs[sink.name] for sink in sinks}
                )
                returned = functions.together(sink.options.returns for sink in sinks)
                finished = runs.stored(result, "the result", self._payload_limit, returned)
                self._driver.obey(runs.finish(run, finished))
                return self._result(finished, sinks)
            payload = run.history.result
            ran = [each for each in order if each.name in run.history.positions]  # the others were added since
            return self._result(payload, self._sinks(ran)) if payload is not None else None
        except BaseException as error:
            park(self, run, error)
            raise

    def _call(self, each: Step, arguments: dict[str, Any], sources: dict[str, str]) -> Call:
        version = each.options.version
        environment = functions.environment(version) if version else each.takes.environment
        # A parameter without an annotation takes an output as what it was returned as.
        types = {name: self._steps[source].options.returns for name, source in sources.items()}
        returned = {name: kind for name, kind in types.items() if kind is not None}
        return Call(
            each.name, arguments, each.fn, each.options, environment, True, self._payload_limit, returned | each.parameters,
            place=each.name, after=each.depends_on,
        )  # fmt: skip

    @staticmethod
    def _result(payload: bytes, sinks: list[Step]) -> Any:
        plain = canonical.decode(payload)
        if len(sinks) == 1:
            return canonical.rebuild(sinks[0].options.returns, plain)
        return {sink.name: canonical.rebuild(sink.options.returns, plain[sink.name]) for sink in sinks}

    def _sinks(self, order: list[Step]) -> list[Step]:
        needed = {dependency for each in order for dependency in each.depends_on}
        return [each for each in order if each.name not in needed]

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
        order: dict[str, Step] = {}
        waiting = list(self._steps.values())
        while waiting:
            ready = [each for each in waiting if all(dependency in order for dependency in each.depends_on)]
            if not ready:
                circle = ", ".join(repr(each.name) for each in waiting)
                raise InvalidPipeline(f"the steps {circle} depend on each other in a circle. Nothing was run.")
            order[ready[0].name] = ready[0]
            waiting.remove(ready[0])
        return list(order.values())

    def _check(self, order: list[Step], given: dict[str, Any]) -> None:
        """Bind everything once without values: what is missing or left over is refused before anything runs."""
        used: set[str] = set()
        for each in order:
            arguments, sources = each.bind(given, dict.fromkeys(each.depends_on))
            used |= arguments.keys() - sources.keys()
        extra = [name for name in given if name not in used]
        if extra:
            raise InvalidArguments(f"no step takes {', '.join(map(repr, extra))} of execute(). Nothing was run.")


__all__ = ["RunLedger", "Step"]
