"""What crashtest found, for a person and for an assertion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that went otherwise because the process died: where it died, and what was seen."""

    boundary: str
    """Behind what the process died, like `after the call of step 2 'charge', before its outcome`."""
    text: str
    step_number: int | None = None
    tool_name: str | None = None

    def __str__(self) -> str:
        return f"{self.boundary}: {self.text}"


@dataclass(frozen=True, slots=True)
class Report:
    """What happened when a flow was stopped at its durable boundaries and started again. `str(report)` is for people."""

    ok: bool
    """Nothing was repeated, doubled, differing or broken. What parked is no failure."""
    repeated: list[Trouble] = field(default_factory=list)
    """Calls that were made again although their outcome was recorded."""
    doubled: list[Trouble] = field(default_factory=list)
    """Effects that the outside saw more often than without a crash, or, without a witness, may have seen."""
    differing: list[Trouble] = field(default_factory=list)
    """Results and outcomes of steps that are not those of a run without a crash."""
    advice: list[str] = field(default_factory=list)
    """What to declare or to change, a sentence each."""
    parked: list[Trouble] = field(default_factory=list)
    """Runs that stand in doubt after the crash until a person says what happened."""
    broken: list[Trouble] = field(default_factory=list)
    """Promises of the ledger itself that were seen broken; please report them."""
    flow: str = ""
    boundaries: int = 0
    """How many durable boundaries a run without a crash has."""
    stopped_at: int = 0
    """At how many of them the flow was stopped: fewer where `limit` is less."""
    calls: int = 0
    """Calls of functions in a run without a crash."""
    kill: bool = False
    """Whether the processes were real, and died of SIGKILL."""

    def check(self) -> None:
        """Raises `AssertionError` with the whole report where it is not `ok`."""
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        how = "killed" if self.kill else "stopped"
        counted = f"{self.stopped_at} of {self.boundaries}"
        if self.stopped_at < self.boundaries:
            counted += ", evenly spread,"
        lines = [
            f"crashtest of {self.flow!r}: {'passed' if self.ok else 'FAILED'}",
            f"  {how} at {counted} durable boundaries and started again; {self.calls} call{'s' if self.calls != 1 else ''} "
            "without a crash",
        ]
        for name, found in (
            ("called again although the outcome was recorded", self.repeated),
            ("doubled", self.doubled),
            ("differing", self.differing),
            ("broken promises of the ledger", self.broken),
            ("parked until a person says what happened", self.parked),
        ):
            lines += _described(name, found)
        if self.advice:
            lines.append("  advice:")
            lines += [f"    - {sentence}" for sentence in self.advice]
        return "\n".join(lines)


def _described(name: str, found: Sequence[Trouble]) -> list[str]:
    """What was found, each text once, with the boundaries at which it was."""
    if not found:
        return []
    where: dict[str, list[str]] = {}
    for trouble in found:
        where.setdefault(trouble.text, []).append(trouble.boundary)
    lines = [f"  {name}:"]
    for text, boundaries in where.items():
        more = f" (and at {len(boundaries) - 1} more)" if len(boundaries) > 1 else ""
        lines.append(f"    {boundaries[0]}{more}: {text}")
    return lines
