"""The benchmark of the breaker counts what it says that it counts."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.processes import environment

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "loops.py"


def step(tool: str, result: str, **arguments: Any) -> dict[str, Any]:
    return {"tool": tool, "args": arguments, "result": result, "error": None}


def recorded(name: str, steps: list[dict[str, Any]], **label: Any) -> dict[str, Any]:
    return {"id": name, "source": "invented", "set": "natural", "success": None, "gold": None, "steps": steps} | label


def test_recall_and_false_trips_are_shares_of_the_labelled_recordings(tmp_path: Path) -> None:
    full, found = step("berth", "full", pier=4), step("find", "a boat", name="Anna")
    loop = {"label": "loop", "by": "eye", "start": 1, "end": 5}
    healthy = {"label": "healthy", "by": "eye", "start": 0, "end": 2}
    recordings = [
        recorded("a loop", [found, *[full] * 5], gold=loop),
        recorded("a loop that is named too early", [*[full] * 5, found], gold=loop | {"start": 4}),
        recorded("a loop that is not seen", [step("find", f"page {at}", text=f"word {at}") for at in range(6)], gold=loop),
        recorded("healthy", [found, full, found], gold=healthy, success=True),
        recorded("halted for nothing", [full] * 4, success=True),
        recorded("said for nothing, and went on", [full, full, full, found], success=True),
        recorded("nobody knows", [full] * 4, gold={"label": "ambiguous", "by": "eye"}, success=True),
        recorded(
            "polls", [full] * 6, set="hard_negative", kind="polling_constant", label="healthy", start=0, end=5, host_source="x"
        ),
    ]  # fmt: skip
    data = tmp_path / "recordings.jsonl.gz"
    with gzip.open(data, "wt") as file:
        file.writelines(json.dumps(recording) + "\n" for recording in recordings)
    ran = subprocess.run(
        [sys.executable, BENCHMARK, "--data", data, "--json"],
        env=environment(), capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    told = json.loads(ran.stdout)
    said, refused = (told["default policy"][how]["shares"] for how in ("said", "refused"))
    assert said["recall, natural loops: eye"] == {"percent": 100 / 3, "of": 3}
    assert said["false, successful runs"] == {"percent": 200 / 3, "of": 3}
    assert refused["false, successful runs"] == {"percent": 100 / 3, "of": 3}
    assert said["false, read by eye"] == {"percent": 0, "of": 1}
    assert said["false, injected: polling_constant"] == {"percent": 0, "of": 1}
    assert told["default policy"]["said"]["loop_steps"] == (3 + 2 + 5) / 3
    assert set(told) == {
        "data",
        "default policy",
        "identical calls, N=3",
        "cosine of inputs, 0.92",
        "cosine of steps, 0.92",
    }
