"""How a user's program looks to a type checker: read by mypy and basedpyright, both strict, and never run."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, assert_type

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    AttemptsExhausted,
    Budget,
    BudgetExceededException,
    ConsistencyProof,
    Effect,
    Event,
    Finding,
    GenaiPrices,
    Handle,
    HeadLog,
    InclusionProof,
    IntentDrift,
    LeaseLost,
    LedgerError,
    LoopDetectorPolicy,
    PayloadTooLarge,
    Price,
    PriceBook,
    Prices,
    ReplayDivergence,
    RetryPolicy,
    Run,
    RunawayLoopDetectedException,
    RunawayLoopException,
    RunClosed,
    RunInputMismatch,
    RunLedger,
    RunNotFound,
    RunOwned,
    RunRecord,
    RunState,
    Signer,
    Step,
    StepCancelled,
    StepContext,
    StepFailed,
    StepInDoubt,
    StepRecord,
    StepState,
    StoreError,
    StoreFull,
    TreeHead,
    UnserialisableArguments,
    Usage,
    Verdict,
    VerificationReport,
    Verifier,
    Worker,
    WorkerRecord,
    compute_fingerprint,
    current_run,
    current_step,
    merkle,
    register_type,
)
from agent_run_ledger.contract import Clock, Row, Store
from agent_run_ledger.stores.memory import MemoryStore
from agent_run_ledger.testing import FakeClock, StoreContract


def fetch_invoice(invoice_id: str) -> dict[str, int]:
    key: str = current_step().idempotency_key
    return {invoice_id: len(key)}


# --- face B -----------------------------------------------------------------------------------------------------------


def step_by_step(path: Path) -> None:
    with AgentRunLedger(path, 30, 3, durability="process", budget=Budget(steps=40), owner="worker") as ledger:
        assert_type(ledger, AgentRunLedger)
        run_id = ledger.create_run(goal="Reconcile October invoices", run_id=None, wait=2.5)
        assert_type(run_id, str)
        output = ledger.execute_step(
            run_id=run_id,
            tool_name="fetch_invoice",
            arguments={"invoice_id": "INV-109"},
            execution_fn=lambda: fetch_invoice("INV-109"),
            effect=Effect.READ,
            retry=RetryPolicy(max_attempts=4, base=0.5, cap=30, jitter="decorrelated"),
            returns=dict[str, int],
            raises=(LookupError,),
            fatal=(PermissionError,),
            may_repeat=True,
            version="2",
        )
        assert_type(output, Any)
        assert_type(ledger.resume_run(run_id, wait=None), list[StepRecord])
        ledger.detach(run_id)
        ledger.cancel(run_id, by="ann", reason="enough")
        ledger.abort_run(run_id, "it makes no sense")
        ledger.finish_run(run_id, result={"total": 120})
        ledger.close()


def as_a_context_manager(ledger: AgentRunLedger) -> object:
    with ledger.open_run("Reconcile", run_id="october") as run:
        assert_type(run, Run)
        assert_type(run.run_id, str)
        assert_type(run.now(), float)
        assert_type(run.random(), float)
        assert_type(run.uuid4(), uuid.UUID)
        run.result = run.step("fetch_invoice", {"invoice_id": "INV-109"}, fetch_invoice, effect=Effect.READ)
    return run.result


# --- face A -----------------------------------------------------------------------------------------------------------


def pipeline(path: str) -> None:
    ledger = RunLedger(
        run_id="audit-2026", db_path=path, policy=LoopDetectorPolicy(max_repetitions=3, threshold=0.92), steps=()
    )

    @ledger.step(name="fetch", effect=Effect.READ)
    def fetch(company_id: str) -> dict[str, int]:
        return {company_id: 12}

    @ledger.step(name="report", depends_on=["fetch"], retry=RetryPolicy())
    def report(data: dict[str, int]) -> str:
        return str(data)

    # a decorated function keeps its type
    assert_type(fetch("acme"), dict[str, int])
    as_it_was: Callable[[dict[str, int]], str] = report
    assert_type(as_it_was({}), str)
    assert_type(ledger.execute(company_id="acme"), Any)
    assert_type(ledger.run_id, str)
    with ledger as entered:
        assert_type(entered, RunLedger)


def without_a_decorator() -> RunLedger:
    steps = [Step("fetch", fetch_invoice), Step("sum", sum, depends_on=["fetch"], effect=Effect.IDEMPOTENT)]
    assert_type(steps[0].name, str)
    assert_type(steps[1].depends_on, tuple[str, ...])
    return RunLedger("audit-2026", steps=steps)


# --- looking ----------------------------------------------------------------------------------------------------------


def looking(ledger: AgentRunLedger | RunLedger) -> None:
    run = ledger.get_run("october")
    assert_type(run, RunRecord)
    assert_type(run.status, str)
    assert_type(run.goal, str | None)
    assert_type(run.owner, str | None)
    assert_type(run.result, object)
    assert_type(run.cause, str | None)
    assert_type(run.spent_usd, Decimal)
    assert_type(RunState(run.status).is_terminal, bool)
    assert_type(ledger.runs(status="BLOCKED"), list[RunRecord])
    for step in ledger.steps("october"):
        assert_type(step, StepRecord)
        assert_type(step.step_number, int)
        assert_type(step.arguments_json, str | None)
        assert_type(step.completed_at, float | None)
        assert_type(step.replayed, bool)
        assert_type(StepState(step.state), StepState)
    report = ledger.verify("october")
    assert_type(report, VerificationReport)
    assert_type(report.ok, bool)
    assert_type(report.findings, list[Finding])
    assert_type([finding.seq for finding in report.findings], list[int | None])
    head = ledger.tree_head("october")
    assert_type(head, TreeHead)
    assert_type((head.size, head.root), tuple[int, bytes])
    signer = Signer.generate("billing-host")
    assert_type(head.note(signer), str)
    assert_type(TreeHead.read(head.note()), TreeHead)
    assert_type(Verifier(signer.verifier).text_of(head.note(signer)), str)
    assert_type(ledger.verify(against=[head, head.note(signer)]).heads, int)
    assert_type(ledger.verify("october", head.note(signer), key=signer.verifier), VerificationReport)
    proved = ledger.prove("october", 3, head.size)
    assert_type(proved, InclusionProof)
    ok = merkle.verify_inclusion(proved.leaf_hash, proved.index, proved.size, proved.proof, head.root)
    assert_type(ok, bool)
    grown = ledger.prove_consistency("october", 3)
    assert_type(grown, ConsistencyProof)
    assert_type(merkle.verify_consistency(grown.size1, grown.size2, grown.proof, head.root, head.root), bool)
    log = HeadLog("heads.log", signer, every=100)
    assert_type(log.add(ledger, "october"), str | None)
    assert_type(AgentRunLedger("agent.db", heads=log), AgentRunLedger)


def inside_a_step() -> None:
    step = current_step()
    assert_type(step, StepContext)
    assert_type(step.run_id, str)
    assert_type(step.step_number, int)
    assert_type(step.position, str)
    assert_type(step.tool_name, str)
    assert_type(step.attempt, int)
    assert_type(step.fencing_token, int)
    step.heartbeat()


def takes_a_string(value: str) -> None: ...


def takes_a_timeout(error: TimeoutError) -> None: ...


def takes_a_value_error(error: ValueError) -> None: ...


def takes_a_store_error(error: StoreError) -> None: ...


# --- errors -----------------------------------------------------------------------------------------------------------


def errors(ledger: AgentRunLedger) -> None:
    try:
        ledger.execute_step("october", "fetch_invoice", {}, fetch_invoice)
    except StepCancelled as error:
        takes_a_timeout(error)
    except StepFailed as error:
        assert_type(error.original_type, str)
        assert_type(error.is_a("builtins.LookupError"), bool)
        assert_type(error.error, dict[str, object])
        assert_type(error.step_number, int | None)
    except StepInDoubt as error:
        assert_type(error.position, str)
    except AttemptsExhausted as error:
        assert_type(error.attempts, int)
    except RunClosed as error:
        assert_type((error.status, error.cause), tuple[str, str | None])
    except RunawayLoopException as error:
        assert_type(error, RunawayLoopDetectedException)
        assert_type(error.evidence, tuple[int, ...])
    except BudgetExceededException as error:
        assert_type(error.reason, str)
    except IntentDrift as error:
        assert_type(error.stored_arguments, str)
    except ReplayDivergence as error:
        assert_type(error.path, str | None)
    except RunOwned as error:
        assert_type((error.owner, error.idle_seconds), tuple[str, float])
    except LeaseLost as error:
        assert_type(error.token, int)
    except RunInputMismatch as error:
        assert_type(error.what, str)
    except RunNotFound as error:
        takes_a_value_error(error)
    except UnserialisableArguments as error:
        assert_type(error.path, str)
    except PayloadTooLarge as error:
        assert_type((error.size, error.limit), tuple[int, int])
    except StoreFull as error:
        takes_a_store_error(error)
    except LedgerError as error:
        assert_type(error, LedgerError)


# --- agents -----------------------------------------------------------------------------------------------------------


def agents_and_tools(ledger: AgentRunLedger) -> None:
    @ledger.tool(kind="model", timeout=30, step_key=None)
    async def ask(prompt: str) -> str:
        return prompt

    @ledger.tool(effect=Effect.MUTATE)
    def post(amount: int) -> int:
        return amount

    @ledger.agent(name="count", budget=Budget(steps=9))
    async def count(words: list[str], run: Run) -> int:
        assert_type(await ask("how many?"), str)
        assert_type(post(1), int)
        assert_type(current_run(), Run)
        assert_type(run.now(), float)
        with run.branch("left"):
            await run.gather(lambda: ask("one"), lambda: ask("two"))
        return len(words)

    ledger.run(count, ["a"], run_id="count")


def workers(ledger: AgentRunLedger) -> None:
    @ledger.agent(retry=RetryPolicy(), fatal=(KeyError,))
    def count(words: list[str]) -> int:
        return len(words)

    handle = ledger.submit(count, ["a"], run_id="count", queue="books", priority=1, delay=0.5, key="acme")
    assert_type(handle, Handle)
    takes_a_string(handle.run_id)
    takes_a_string(handle.status)
    handle.result(timeout=1)
    ledger.queue("books", concurrency=2, per_key=1)
    with ledger.worker(concurrency=2, queues=("books",), health=("127.0.0.1", 0), drain_seconds=5) as worker:
        assert_type(worker, Worker)
        assert_type(worker.health_address, tuple[str, int] | None)
    assert_type(worker.stop(1.0), bool)
    assert_type(ledger.workers(), list[WorkerRecord])
    assert_type([each.reason for each in ledger.stuck(60)], list[str])
    ledger.wake("count")


async def in_an_event_loop(ledger: AgentRunLedger, pipeline: RunLedger) -> None:
    async with ledger.open_run("goal") as run:
        assert_type(run, Run)
    await ledger.aexecute_step("october", "fetch", {}, lambda: 1)
    await pipeline.aexecute(company_id="acme")
    handle = await ledger.asubmit(in_an_event_loop, ledger, pipeline)
    assert_type(handle, Handle)
    await handle.aresult()


# --- the rest ---------------------------------------------------------------------------------------------------------


@register_type
class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents


def the_rest() -> None:
    assert_type(register_type(Path, name="Path"), type[Path])
    assert_type(Money(3).cents, int)
    assert_type(compute_fingerprint("fetch", {"id": 1}), str)
    verdict = LoopDetectorPolicy(max_repetitions=2).detector().observe("fetch", {"id": 7}, error=TimeoutError("slow"))
    assert_type(verdict, Verdict)
    assert_type(verdict.evidence, tuple[int, ...])
    takes_a_string(Event.START_STEP)
    clock: Clock = FakeClock()
    store: Store = MemoryStore(clock=clock)
    ledger = AgentRunLedger(store, clock=clock, undeclared="block", payload_limit=1_000_000)
    assert_type(ledger, AgentRunLedger)
    assert_type(store.read("october"), list[Row])


class FlatPrice:
    def cost(self, usage: Usage, model: str) -> Decimal | None:
        return Decimal(usage.total_tokens) if model else None


def usage_and_prices() -> None:
    usage = Usage(input_tokens=1, usd=Decimal("0.1")) + Usage()
    assert_type(usage, Usage)
    assert_type(usage.usd, Decimal | None)
    assert_type(Usage.read({"usage": None}), Usage | None)
    lists: list[Prices] = [PriceBook({"m": Price(input="2.50", output=10)}), GenaiPrices("openai"), FlatPrice()]
    for prices in lists:
        assert_type(prices.cost(usage, "m"), Decimal | None)


class TestMyStore(StoreContract):
    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def store(self, clock: FakeClock) -> Iterator[Store]:
        store = MemoryStore(clock=clock)
        yield store
        store.close()
