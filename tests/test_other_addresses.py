"""What looks like an address and is none that is understood: no file is made of it, and its password is not shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_run_ledger import AgentRunLedger, StoreError


@pytest.mark.parametrize(
    "place",
    [
        "host=db.internal user=agents password=sEcr3t dbname=agents",
        "postgresql+psycopg://agents:sEcr3t@db.internal/agents",
        "POSTGRESQL://agents:sEcr3t@db.internal/agents",
        " postgresql://agents:sEcr3t@db.internal/agents",
        "postgresql:/agents:sEcr3t@db.internal",
    ],
)
def test_what_is_meant_as_an_address_is_no_file(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for act in (AgentRunLedger, AgentRunLedger.open_read_only, AgentRunLedger.diagnose):
        with pytest.raises(StoreError) as refused:
            act(place)
        assert "sEcr3t" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_may_be_called_as_it_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("./host=a", "host", "a:b", "C:agent.db"):
        AgentRunLedger(name).close()
        assert Path(name).exists()
