"""Who is calling: which step, which run and which branch the calling code is in, and in which task or thread."""

from __future__ import annotations

import sys
from _thread import get_ident
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from agent_run_ledger.drivers.leases import HeldRun, Leases
from agent_run_ledger.engine.charging import Metered
from agent_run_ledger.engine.history import StepHistory
from agent_run_ledger.errors import InvalidArguments
from agent_run_ledger.rules.money import exact_usd
from agent_run_ledger.rules.names import check_name
from agent_run_ledger.words import Effect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from decimal import Decimal


class StepContext:
    """The step that is being executed, as its function sees it through `current_step()`."""

    __slots__ = ("_leases", "_run", "_step", "fencing_token")

    def __init__(self, leases: Leases, run: HeldRun, step: StepHistory) -> None:
        self._leases = leases
        self._run = run
        self._step = step
        self.fencing_token = run.token

    @property
    def run_id(self) -> str:
        return self._run.run_id

    @property
    def step_number(self) -> int:
        return self._step.number

    @property
    def position(self) -> str:
        return self._step.position

    @property
    def tool_name(self) -> str:
        return self._step.tool

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of this step, after any crash: give it to the receiver."""
        return self._step.key

    @property
    def attempt(self) -> int:
        """Which dispatch of the step this is, from 1."""
        return self._step.attempts

    @property
    def effect(self) -> Effect | None:
        """What the step's tool declares."""
        return self._step.declared

    def record_usage(
        self, usage: object = None, *, usd: Decimal | int | str | float | None = None, model: str | None = None
    ) -> None:
        """Say what the step has used: a provider's usage object or response, a `Usage`, or dollars alone. Several times: it adds up.

        Without it, usage is read from what the step returns, where that is a provider's response. `model` names the model, for its price,
        where the response does not; `usd` is what it cost, where that is known better than by a list of prices. It is written with the
        outcome. Raises `InvalidArguments` where nothing can be read of it, for usage that is not understood is not nothing, and where the step
        has ended; `InvalidName` for a model that has none.
        """
        from agent_run_ledger.usage import Usage, model_of

        if self._step.position not in self._run.in_flight and self._step.position not in self._run.late:
            raise InvalidArguments(
                f"record_usage() was called when step {self._step.number} had ended: its outcome is written, and nothing was recorded"
            )
        read = Usage.read(usage) if usage is not None else None
        if (usage is None and usd is None) or (usage is not None and read is None):
            raise InvalidArguments(
                f"record_usage() is given a usage, or usd=, and reads nothing from {type(usage).__name__}; nothing was recorded"
            )
        if model is not None:
            check_name("model", model)
        try:
            cost = exact_usd(usd) if usd is not None else None
        except (TypeError, ValueError) as error:
            raise InvalidArguments(f"usd={usd!r}: {error}; nothing was recorded") from None
        metered = Metered(read, cost, model or model_of(usage))
        self._run.metered.setdefault(self._step.position, []).append(metered)

    def heartbeat(self) -> None:
        """Renew the lease now. Raises `LeaseLost` where the run was taken over: stop what you are doing then."""
        self._leases.renew(self._run, self.fencing_token)


step_variable: ContextVar[StepContext | None] = ContextVar("agent_run_ledger_step", default=None)


def current_step() -> StepContext:
    """The step that the calling code runs in. Raises `RuntimeError` outside of one."""
    context = step_variable.get()
    if context is None:
        raise RuntimeError(
            "current_step() was called outside of a step: it is known only inside the function of a step"
        )
    return context


place_variable: ContextVar[Any] = ContextVar("agent_run_ledger_place", default=None)
"""The `faces.Place` of the run and the branch whose program the calling code is; None: of no run."""


class _Callers:
    task: Callable[[], object] | None = None
    """The running task of an event loop, or None outside of one; known as soon as somebody uses one."""


callers = _Callers()


def caller() -> object:
    """The task or thread that is calling: calls of two of them in one branch have no order that could be replayed."""
    if callers.task is not None and (task := callers.task()) is not None:
        return task
    return get_ident()


def is_in_an_event_loop() -> bool:
    """Whether an event loop runs in the calling thread, which must not wait then."""
    asyncio: Any = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


def refuse_in_an_event_loop(asked: str) -> None:
    """Raises `InvalidArguments` in a thread that runs an event loop: programs that are async get one of their own."""
    if is_in_an_event_loop():
        raise InvalidArguments(
            f"{asked} starts event loops of its own, and one runs in this thread: call it from plain code; nothing was run"
        )
