"""What became of the figures from one JSON of the benchmarks to another: each of both, and the second by the first.

    python benchmarks/compare.py before.json after.json
    python benchmarks/compare.py before.json after.json --beyond 10        # what differs by more than 10 %

Ratios to the floor (`of F`) can be compared between days; microseconds only where the machine had as little else to do.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tables import SHAPE, compared


def read(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if told.get("shape") != SHAPE:
        raise SystemExit(f"{path} has shape {told.get('shape')}, this program reads shape {SHAPE}")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--beyond", type=float, default=0.0, help="tell only what differs by more than so many percent")
    given = parser.parse_args()
    before, after = read(given.before), read(given.after)
    for path, told in ((given.before, before), (given.after, after)):
        print(f"{path}: {told['commit']}, {told['when']}, {told['machine']['processor']}")
    seen = None
    for table, row, column, first, second in compared(before, after):
        ratio = second / first if first else float("nan")
        if abs(ratio - 1) * 100 <= given.beyond:
            continue
        if table != seen:
            print(f"\n{table}")
            seen = table
        print(f"  {row:<44} {column:<18} {first:>14,.2f} {second:>14,.2f} {ratio:>8.2f}")


if __name__ == "__main__":
    main()
