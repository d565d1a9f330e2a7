"""A storm over workers on a server that crashes behind a network that fails, and workers whose clocks are wrong.

They need a machine to themselves for a minute or two, so they are no part of `make test`. For a longer one: `python tests/system/chaos.py`.
"""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

import pytest

from support.chaos.arenas import ServerArena
from support.chaos.storm import Plan, blow

SEED = "AGENT_RUN_LEDGER_CHAOS_SEED"
"""The environment variable with another seed than the usual one."""


@pytest.mark.system
def test_workers_on_a_server_keep_every_promise_whatever_dies_hangs_or_lies(tmp_path: Path) -> None:
    faulthandler.dump_traceback_later(280, exit=True)  # it may take longer than others
    report = blow(Plan(seed=int(os.environ.get(SEED, "1"))), ServerArena(), tmp_path)
    assert report.problems == [], "\n".join(report.summary)
    assert report.replaced > 0
