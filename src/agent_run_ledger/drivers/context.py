"""Which step the calling code is in."""

from __future__ import annotations

from contextvars import ContextVar

from agent_run_ledger.drivers.leases import HeldRun, Leases
from agent_run_ledger.engine.history import StepHistory


class StepContext:
    """The step that is being executed, as its function sees it through `current_step()`."""

    def __init__(self, leases: Leases, run: HeldRun, step: StepHistory) -> None:
        self._leases = leases
        self._run = run
        self.run_id = run.run_id
        self.step_number = step.number
        self.position = step.position
        self.tool_name = step.tool
        self.idempotency_key = step.key
        """The same for every attempt of this step, after any crash: give it to the receiver."""
        self.attempt = step.attempts
        self.fencing_token = run.token

    def heartbeat(self) -> None:
        """Renew the lease now. Raises `LeaseLost` where the run was taken over: stop what you are doing then."""
        self._leases.renew(self._run, self.fencing_token)


step_variable: ContextVar[StepContext | None] = ContextVar("agent_run_ledger_step", default=None)


def current_step() -> StepContext:
    """The step that the calling code runs in. Raises `RuntimeError` outside of one."""
    context = step_variable.get()
    if context is None:
        raise RuntimeError("current_step() was called outside of a step: it is known only inside the function of a step")
    return context
