"""A storm on demand, as long as you like: `python tests/system/chaos.py --seed 7 --minutes 10 --runs 3000`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent / "src"), str(TESTS)]

from support.chaos.arenas import Arena, FileArena, ServerArena  # noqa: E402 # they are found by the line above
from support.chaos.storm import Plan, blow  # noqa: E402


def main() -> int:
    usual = Plan()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", choices=["postgres", "sqlite"], default="postgres", help="whose ledger it is")
    parser.add_argument("--pooled", action="store_true", help="through PgBouncer in transaction mode")
    parser.add_argument("--partitions", type=int, help="into so many PostgreSQL's tables are divided")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--minutes", type=float, default=usual.seconds / 60, help="for how long things go wrong")
    parser.add_argument("--runs", type=int, default=usual.runs, help="besides their children")
    parser.add_argument("--workers", type=int, default=usual.workers)
    parser.add_argument("--fault-every", type=float, default=usual.fault_every, help="seconds, on the average")
    parser.add_argument("--lease", type=float, default=usual.lease_seconds, help="seconds")
    parser.add_argument("--keep", type=Path, help="an empty folder for the journals")
    asked = parser.parse_args()
    plan = Plan(
        seed=asked.seed,
        workers=asked.workers,
        runs=asked.runs,
        seconds=60 * asked.minutes,
        fault_every=asked.fault_every,
        lease_seconds=asked.lease,
    )
    folder = asked.keep or Path(tempfile.mkdtemp(prefix="storm-"))
    arena: Arena = FileArena(folder)
    if asked.on == "postgres":
        arena = ServerArena(pooled=asked.pooled, partitions=asked.partitions)
    report = blow(plan, arena, folder, lambda line: print(line, file=sys.stderr, flush=True))
    print("\n".join([*report.summary, *report.problems, f"all journals are in {folder}"]))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
