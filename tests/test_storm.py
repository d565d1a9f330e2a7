"""A storm over workers of one host that share a file: killed, stopped and continued, told to end; judged by what everybody saw."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.chaos.arenas import FileArena
from support.chaos.storm import Plan, blow


@pytest.mark.slow
def test_processes_of_one_host_go_on_with_each_others_runs_and_keep_every_promise(tmp_path: Path) -> None:
    plan = Plan(workers=3, runs=60, seconds=12.0, fault_every=0.6, lease_seconds=1.5)
    report = blow(plan, FileArena(tmp_path), tmp_path)
    assert report.problems == [], "\n".join(report.summary)
    assert report.replaced > 0
