"""What a call reserves before it is dispatched, and what is charged for it once it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from agent_run_ledger.engine import sharing
from agent_run_ledger.engine.call import Call
from agent_run_ledger.engine.effects import Draw
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.rules import budget
from agent_run_ledger.rules.budget import NOTHING, Amount, Most
from agent_run_ledger.words import TELLS_USAGE

if TYPE_CHECKING:
    from decimal import Decimal

    from agent_run_ledger.usage import Usage


class Metered(NamedTuple):
    """What one use of a model was, as a function has said or as what it returned tells."""

    usage: Usage | None
    usd: Decimal | None
    model: str | None


def reserve(run: LiveRun, call: Call, at_work: float, attempt: int) -> Amount | str | Draw | None:
    """What a dispatch reserves; None where it has to reserve nothing; `budget.WAITS`; why it may not begin; or whom to ask first.

    What earlier attempts of the same step have reserved is spent, for all that is known. So is what a call has reserved for whose
    outcome nobody waits here.
    """
    limits, history = run.limits, run.history
    spent, held = history.account.spent, NOTHING
    for position, amount in history.account.held.items() if history.account.held else ():
        if position in run.in_flight and position != call.position:
            held = held.plus(amount)
        else:
            spent = spent.plus(amount)
    if (reason := budget.overspent(limits, spent) or budget.ran_for(limits, at_work)) is not None:
        return reason
    shared = sharing.accounts(run)
    if not ((limits.are_of_calls or shared) and may_cost(call)):
        return None
    most = _most(run, call)
    if limits.usd is not None and most.usd is None and run.refuses_unknown_prices:
        return (
            f"nothing says what a call of {call.tool!r} may cost: its model has no known price, or its request no bound"
        )
    reserved = budget.reserve(limits, spent, held.plus(run.reserved_ahead), most)
    if isinstance(reserved, str) or not shared:
        return reserved
    if call.drawn is None or call.drawn[:2] != (attempt, shared):
        tokens = reserved.tokens if limits.tokens is not None else most.tokens
        usd = reserved.usd if limits.usd is not None else most.usd
        return Draw(run, call, attempt, shared, Most(tokens, usd, most.is_declared))
    granted = call.drawn[2]
    if isinstance(granted, str):
        return granted
    return Amount(
        min(granted.tokens or 0, reserved.tokens) if limits.tokens is not None else granted.tokens or 0,
        min(granted.usd or NOTHING.usd, reserved.usd) if limits.usd is not None else granted.usd or NOTHING.usd,
    )


def may_cost(call: Call) -> bool:
    """Whether a call has to be paid for, as far as is declared."""
    options = call.options
    return options.kind == "model" or options.max_tokens is not None or options.max_usd is not None


def _most(run: LiveRun, call: Call) -> Most:
    """What a call may use at the most. One limit alone may be declared; of the other nothing is known then, but a tool that is no model and
    declares no tokens uses none."""
    options = call.options
    if options.max_tokens is not None or options.max_usd is not None:
        tokens = options.max_tokens if options.kind == "model" else options.max_tokens or 0
        return Most(tokens, options.max_usd, is_declared=True)
    from agent_run_ledger.rules.estimates import estimate

    estimated = estimate(call.arguments, run.prices)
    return Most(estimated.tokens, estimated.usd) if estimated is not None else Most()


def charged(run: LiveRun, position: str, value: object, *, was_executed: bool = True) -> dict[str, Any]:
    """The fields of an outcome that say what its attempt has used: as its function has said, or as what it returned tells.

    What is not known is charged as it was reserved, and that is said: `unmetered` where nothing tells of tokens, `unpriced` where
    nothing tells what they cost. An attempt that was surely never carried out costs nothing.
    """
    if not run.metered and type(value) is dict and not run.history.account.held and TELLS_USAGE.isdisjoint(value):
        return {}  # the usual case of a tool that calls no model, in one look
    held = run.history.account.held.get(position, NOTHING)
    metered: Sequence[Metered] | None = run.metered.get(position) if run.metered else None
    if not metered:
        call = run.made.get(position)
        metered = _told_by(value, call.arguments if call is not None else None)
    if not metered:
        if held is NOTHING or held == NOTHING or not was_executed:
            return {}
        return {"charges": held.written(), "unmetered": True}
    from agent_run_ledger.prices import cost_of

    uses: list[dict[str, Any]] = []
    fields: dict[str, Any] = {"usage": uses}
    charges = NOTHING
    for usage, usd, model in metered:
        if usage is None:
            cost = usd
        else:
            charges = charges.plus(Amount(usage.total_tokens))
            cost = usd if usd is not None else cost_of(usage, model, run.prices)
        uses.append(_written(usage, cost, model))
        if cost is None:
            fields["unpriced"] = True
        else:
            charges = charges.plus(Amount(0, cost))
    if all(usage is None for usage, _, _ in metered):
        fields["unmetered"] = True
        charges = charges._replace(tokens=held.tokens)
    if "unpriced" in fields and held.usd > charges.usd:
        charges = charges._replace(usd=held.usd)
    if charges != NOTHING:
        fields["charges"] = charges.written()
    if (held.tokens and charges.tokens > held.tokens) or (held.usd and charges.usd > held.usd):
        fields["overran"] = True
    return fields


def _told_by(value: object, arguments: object) -> Sequence[Metered]:
    """What a response tells. Some providers name the model in the request only."""
    if value is None or isinstance(value, _SAYS_NOTHING):
        return ()
    from agent_run_ledger.usage import Usage, model_of

    usage = Usage.read(value)
    return (Metered(usage, None, model_of(value) or model_of(arguments)),) if usage is not None else ()


_SAYS_NOTHING = (str, bytes, int, float, list, tuple)
_BUCKETS = (
    "input_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "long_cache_write_tokens",
    "output_tokens",
    "reasoning_tokens",
)


def _written(usage: Usage | None, usd: Decimal | None, model: str | None) -> dict[str, Any]:
    """One use as it stands in an entry: its model, buckets that are not empty, and what it cost, where that is known."""
    named: dict[str, Any] = {"model": model} if model is not None else {}
    if usage is not None:
        named |= {name: count for name in _BUCKETS if (count := getattr(usage, name))}
    return named | ({"usd": format(usd, "f")} if usd is not None else {})
