"""What a crash changed: a trial held against a run without a crash, and what to advise."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from agent_run_ledger.rules.names import child_of
from agent_run_ledger.testing.notes import (
    Asked,
    Called,
    Diverged,
    Doubted,
    Ended,
    LeftRunning,
    Note,
    Passed,
    Stalled,
    Stood,
    TookKey,
)
from agent_run_ledger.testing.report import Report, Trouble
from agent_run_ledger.testing.witness import THE_NUMBER

N = TypeVar("N")

THE_RUN = "<the run>"


@dataclass(frozen=True)
class Trial:
    """A flow that was stopped once, or not at all, and run to its end: what its processes noted, and what the outside saw."""

    run_id: str
    notes: list[Note]
    saw: Counter[str] | None

    def of(self, kind: type[N]) -> list[N]:
        """The notes of one kind."""
        return [note for note in self.notes if isinstance(note, kind)]

    @property
    def boundaries(self) -> list[str]:
        return [note.where for note in self.of(Passed)]


class Told:
    """A trial in words that another trial has, too: what each has of its own, as keys and run ids, is named instead."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        stood = list({run.run_id: run for run in trial.of(Stood)}.values())  # the last word on each
        calls = trial.of(Called)
        children = {child_of(call.key) for call in calls}
        self._names = {trial.run_id: THE_RUN}
        """What each id and key of this trial stands for."""
        for run in stood:
            if run.run_id.startswith("run_") and run.run_id not in children:  # nobody gave it an id
                self._names[run.run_id] = f"<run {len(self._names)}>"
        for call in calls:  # a child's come after the one that began it
            parent = self._names.get(call.run_id, call.run_id)
            is_clear = parent == THE_RUN or parent.startswith("<run ")  # one like it does the same work
            where = f"{call.tool!r} at {call.position}" + ("" if is_clear else f" of {parent}")
            self._names.setdefault(child_of(call.key), f"<the run of {where}>")
            self._names.setdefault(call.key, f"<the key of {where}>")
        self.children = children & {run.run_id for run in stood}
        self.runs = {self.plain(run.run_id): run for run in stood}
        self.calls: dict[tuple[str, str], list[Called]] = defaultdict(list)
        for call in calls:
            self.calls[self.plain(call.run_id), call.position].append(call)
        self.saw: Counter[str] | None = None if trial.saw is None else Counter()
        for what, count in (trial.saw or {}).items():
            self.saw[self.plain(what)] += count  # type: ignore[index] # it is there, where anything was seen
        self.keys: dict[tuple[str, str], set[str]] = defaultdict(set)
        """The keys under which each call was made that changes something, by its tool and what stands for its arguments."""
        for call in calls:
            if call.effect != "READ":
                self.keys[call.tool, call.same].add(call.key)
        ends = trial.of(Ended)
        self.end = ends[-1] if ends else Ended(None, "")
        self.outcomes = {
            (name, position): (tool, self.plain(outcome))
            for name, run in self.runs.items()
            for position, tool, outcome in run.steps
        }

    def plain(self, text: str) -> str:
        """A text without what only this trial has."""
        for own, name in self._names.items():
            if own and own in text:
                text = text.replace(own, name)
        return text

    @property
    def result(self) -> str:
        results = [self.end.text, *(run.result for run in self.runs.values())]
        return "; ".join(self.plain(result) for result in results if result)


@dataclass(frozen=True)
class Again:
    """A call that was made more often than without a crash."""

    call: Called
    times: int
    keys: int
    """Under how many idempotency keys: more than one where each was a step of its own."""

    def __str__(self) -> str:
        if self.keys > 1:
            return f"{self.call.tool!r} was called with the same arguments under {self.keys} keys, each as a step of its own"
        declared = f"is {self.call.effect}" if self.call.effect else "declares no effect"
        return f"{self.call.step} {declared} and was called {_times(self.times)}"


@dataclass
class Findings:
    """What is found, trial after trial."""

    repeated: list[Trouble] = field(default_factory=list)
    doubled: list[Trouble] = field(default_factory=list)
    differing: list[Trouble] = field(default_factory=list)
    parked: list[Trouble] = field(default_factory=list)
    broken: list[Trouble] = field(default_factory=list)
    advice: dict[str, None] = field(default_factory=dict)

    def advise(self, sentence: str) -> None:
        self.advice[sentence] = None


class Judge:
    """Holds trials against one without a crash. `again` makes another of those, for what may differ by itself."""

    def __init__(self, reference: Trial, again: Callable[[], Trial]) -> None:
        self.found = Findings()
        self._reference = Told(reference)
        self._again = again
        self._control: Told | None = None
        self._look_for_broken_promises("without any crash", self._reference)
        end = self._reference.end
        if end.error is not None:
            self.found.advise(f"the flow ends with an error without any crash, too: {end.text}")

    def report(self, flow: str, stopped_at: int, *, kill: bool) -> Report:
        """All that was found."""
        found = self.found
        is_ok = not (found.repeated or found.doubled or found.differing or found.broken)
        return Report(
            is_ok, found.repeated, found.doubled, found.differing, list(found.advice), found.parked, found.broken,
            flow, len(self._reference.trial.boundaries), stopped_at, len(self._reference.trial.of(Called)), kill,
        )  # fmt: skip

    def judge(self, boundary: str, trial: Trial) -> None:
        """What the crash at this boundary changed."""
        told = Told(trial)
        self._look_for_broken_promises(boundary, told)
        again = self._called_more_often(told)
        is_parked = self._look_at_the_end(boundary, told)
        if told.saw is None:
            self._suspect(boundary, told, again)
        else:
            self._compare_what_was_seen(boundary, told, again, is_parked=is_parked)
        for each in again:
            if each.keys == 1:
                self._advise_about(told, each.call, each.times)

    # --- promises of the ledger ---------------------------------------------------------------------------------------

    def _look_for_broken_promises(self, boundary: str, told: Told) -> None:
        for call in told.trial.of(Called):
            if call.is_settled:
                said = f"{call.step} was called again although its outcome was recorded"
                self.found.repeated.append(Trouble(boundary, said, call.number, call.tool))
            if not call.is_intended:
                said = f"{call.step} was called, and its intent was not in the store"
                self.found.broken.append(Trouble(boundary, said, call.number, call.tool))
        for _ in told.trial.of(Stalled):
            self.found.advise(
                "calls that go on side by side are not made the same way each time: a replay waited for one that was not made, and went "
                "on in another order"
            )
        for left in told.trial.of(LeftRunning):
            self.found.advise(
                f"{left.number} functions went on in threads after their process had ended: what they did later may be counted "
                "for another trial"
            )

    # --- calls --------------------------------------------------------------------------------------------------------

    def _called_more_often(self, told: Told) -> list[Again]:
        """The calls that were made more often than without a crash: of one step, or each as a step of its own, with another key."""
        again = []
        for place, calls in told.calls.items():
            if len(calls) > max(1, len(self._reference.calls.get(place, ()))):
                again.append(Again(calls[-1], len(calls), 1))
        for same, keys in told.keys.items():
            if len(keys) > max(1, len(self._reference.keys.get(same, ()))):
                calls = [call for call in told.trial.of(Called) if (call.tool, call.same) == same]
                again.append(Again(calls[-1], len(calls), len(keys)))
        return again

    def _suspect(self, boundary: str, told: Told, again: list[Again]) -> None:
        """Without a witness: what nobody deduplicates may have happened twice."""
        asked = {(note.run_id, note.position) for note in told.trial.of(Asked)}
        for each in again:
            call = each.call
            is_asked = (call.run_id, call.position) in asked
            if each.keys > 1 or call.effect is None or (call.effect == "MUTATE" and not is_asked):
                self.found.doubled.append(Trouble(boundary, str(each), call.number, call.tool))

    def _advise_about(self, told: Told, call: Called, times: int) -> None:
        tool = repr(call.tool)
        if call.effect is None:
            self.found.advise(
                f"{tool} declares no effect and was dispatched {_times(times)}: declare effect=Effect.IDEMPOTENT and send "
                "current_step().idempotency_key to the receiver, or effect=Effect.MUTATE with receipt=, or effect=Effect.READ if it "
                "changes nothing"
            )
        elif call.effect == "IDEMPOTENT" and not _takes_key(told, call):
            self.found.advise(
                f"{tool} is IDEMPOTENT and never took its key: send current_step().idempotency_key to the receiver, or take a "
                "parameter idempotency_key. It is right as it is only if the same call twice does the same as once"
            )

    # --- the witness --------------------------------------------------------------------------------------------------

    def _compare_what_was_seen(self, boundary: str, told: Told, again: list[Again], *, is_parked: bool) -> None:
        assert told.saw is not None
        assert self._reference.saw is not None
        more, less = told.saw - self._reference.saw, self._reference.saw - told.saw
        if more and less and self._differs_by_itself():
            balance = told.saw.total() - self._reference.saw.total()
            more, less = (Counter({THE_NUMBER: abs(balance)}) if balance * sign > 0 else Counter() for sign in (1, -1))
        if more:
            self._blame(boundary, told, more, again)
        if less and not is_parked:
            self.found.differing.append(Trouble(boundary, self._seen(told, less)))

    def _seen(self, told: Told, what: Counter[str]) -> str:
        """What the outside saw, and what it saw without a crash."""
        assert told.saw is not None
        assert self._reference.saw is not None
        if THE_NUMBER in what:
            return f"the outside saw {told.saw.total()} effects instead of {self._reference.saw.total()}"
        pairs = ((each, told.saw[each], self._reference.saw[each]) for each in what)
        return "the outside saw " + ", ".join(
            f"{_cut(each)} {_times(now)} instead of {_times(usual)}" for each, now, usual in pairs
        )

    def _differs_by_itself(self) -> bool:
        return self.control.saw != self._reference.saw

    def _blame(self, boundary: str, told: Told, more: Counter[str], again: list[Again]) -> None:
        """The outside saw something too often: say which steps may have done it."""
        assert told.saw is not None
        assert self._reference.saw is not None
        said = self._seen(told, more)
        suspects = [each for each in again if child_of(each.call.key) not in told.children]
        suspects = [each for each in suspects if each.call.effect != "READ"] or suspects
        if not suspects:
            self.found.doubled.append(Trouble(boundary, f"{said}; no step was called twice"))
            self.found.advise(
                "the outside saw something twice although no step was called twice: an effect takes place in the flow's own code, "
                "which runs again after a crash. Make it a step"
            )
        for each in suspects:
            call = each.call
            self.found.doubled.append(Trouble(boundary, f"{said}; {each}", call.number, call.tool))
            if each.keys > 1:
                continue
            if call.effect == "READ":
                self.found.advise(
                    f"{call.tool!r} is READ, or a model, and the outside sees what it does: declare effect=Effect.IDEMPOTENT and send "
                    "current_step().idempotency_key, or effect=Effect.MUTATE with receipt="
                )
            elif call.effect == "IDEMPOTENT" and _takes_key(told, call):
                self.found.advise(
                    f"{call.tool!r} is IDEMPOTENT and took the same key each time, and the outside did it twice: is the key sent, and "
                    "does the receiver deduplicate on it? If not, declare effect=Effect.MUTATE with receipt="
                )
            elif call.effect == "MUTATE":
                self.found.advise(
                    f"{call.tool!r} is MUTATE and was dispatched again although it had taken effect: does its receipt= answer absent "
                    "only where the receiver has never seen the key?"
                )

    # --- the end ------------------------------------------------------------------------------------------------------

    def _look_at_the_end(self, boundary: str, told: Told) -> bool:
        """How the flow ended after the crash. Returns whether it stands in doubt, so that it did not come to its end."""
        diverged, doubted = told.trial.of(Diverged), told.trial.of(Doubted)
        if diverged:
            self._tell_divergence(boundary, diverged[0])
            return True
        if doubted and not self._reference.trial.of(Doubted):
            for each in doubted[:1]:
                said = f"step {each.number} {each.tool!r} is in doubt: nobody knows whether it took effect"
                self.found.parked.append(Trouble(boundary, said, each.number, each.tool))
                self.found.advise(
                    f"{each.tool!r} is parked after a crash until a person resolves it: give it receipt= if the receiver can be asked, "
                    "or declare effect=Effect.IDEMPOTENT if it deduplicates on the key"
                )
            return True
        expected = self._reference
        if told.end.error != expected.end.error:
            if self.control.end.error == expected.end.error:
                self._tell_other_end(boundary, told)
            return told.end.error is not None
        if told.runs.keys() != expected.runs.keys():
            self._tell_other_runs(boundary, told)
            return False
        if told.result != expected.result and self.control.result == expected.result:
            said = f"the result is {_cut(told.result)} instead of {_cut(expected.result)}"
            self.found.differing.append(Trouble(boundary, said))
        for place in expected.outcomes.keys() | told.outcomes.keys():
            mine, other = told.outcomes.get(place), expected.outcomes.get(place)
            if (
                mine != other
                and not (_is_interrupted(mine) or _is_interrupted(other))
                and self.control.outcomes.get(place) == other
            ):
                self._tell_other_outcome(boundary, place, mine, other)
        for name, run in told.runs.items():
            usual = expected.runs[name].state
            if run.state != usual and name in self.control.runs and self.control.runs[name].state == usual:
                self.found.differing.append(Trouble(boundary, f"{name} is {run.state} instead of {usual}"))
        return False

    def _tell_divergence(self, boundary: str, each: Diverged) -> None:
        said = f"at position {each.position} is recorded {each.recorded}, and the flow then asks for {each.asked}"
        said += f", first difference at {each.path}" if each.path else ""
        self.found.differing.append(Trouble(boundary, said, None, each.asked.strip("'")))
        what = f"its argument {each.path} is" if each.path else "the call there is"
        self.found.advise(
            f"the flow is not deterministic: at position {each.position} is recorded {each.recorded}, and {what} another one when "
            "the flow runs again. Take times, ids and chance from run.now(), run.uuid4() and run.random(), or make what decides it a "
            "step"
        )

    def _tell_other_end(self, boundary: str, told: Told) -> None:
        expected = self._reference.end
        usually = "returns" if expected.error is None else f"ends with {expected.text}"
        now = "it returned" if told.end.error is None else f"it ended with {told.plain(told.end.text)}"
        self.found.differing.append(Trouble(boundary, f"{now}; without a crash it {usually}"))
        if told.end.error == "agent_run_ledger.errors.AttemptsExhausted":
            self.found.advise(
                "a step has no attempt left after one crash: a crash counts as an attempt, so give its RetryPolicy max_attempts of 2 "
                "or more"
            )

    def _tell_other_outcome(
        self, boundary: str, place: tuple[str, str], mine: tuple[str, str] | None, other: tuple[str, str] | None
    ) -> None:
        run, position = place
        where = f"position {position}" if run == THE_RUN else f"position {position} of {run}"
        said = f"at {where} stands {_stands(mine)} instead of {_stands(other)}"
        self.found.differing.append(Trouble(boundary, said, None, (mine or other or ("", ""))[0]))

    def _tell_other_runs(self, boundary: str, told: Told) -> None:
        """The flow has made other runs than without a crash: it did not know again the one that it was to go on with."""
        if self.control.runs.keys() != self._reference.runs.keys():
            return
        left = [run.state for run in told.runs.values() if not run.is_over]
        said = f"there are {len(told.runs)} runs instead of {len(self._reference.runs)}"
        self.found.differing.append(Trouble(boundary, said + (f", and one is left {left[0]}" if left else "")))
        self.found.advise(
            "the flow makes another run after a crash, which does the work again: give each run an id that the program knows again, "
            "with run_id="
        )

    @property
    def control(self) -> Told:
        """Another trial without a crash: what it has otherwise differs by itself, and no crash is to blame."""
        if self._control is None:
            self._control = Told(self._again())
        return self._control


def _takes_key(told: Told, call: Called) -> bool:
    return any(note.tool == call.tool for note in told.trial.of(TookKey))


def _times(number: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(number, f"{number} times")


def _is_interrupted(outcome: tuple[str, str] | None) -> bool:
    """Whether its program let go of the call: that is a matter of time, and may be otherwise after a crash."""
    return outcome is not None and outcome[1].startswith("cancelled")


def _stands(outcome: tuple[str, str] | None) -> str:
    return "nothing" if outcome is None else f"{outcome[0]!r} ({_cut(outcome[1])})"


def _cut(text: str) -> str:
    return text if len(text) <= 120 else text[:119] + "…"
