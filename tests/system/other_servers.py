"""Run the tests that take a PostgreSQL server on the oldest one that is promised, 15, behind PgBouncer in transaction mode, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.databases import OTHER_SERVER
from support.pgbouncer import PgBouncer
from support.postgres import Server

ROOT = Path(__file__).resolve().parent.parent.parent
STORE = (
    "tests/test_postgres_outages.py",
    "tests/test_postgres_schema.py",
    "tests/test_postgres_store.py",
    "tests/test_stores.py",
)


def tried(name: str, url: str, *selection: str, but: str = "system or slow") -> bool:
    """Whether the tests hold with this server under them."""
    print(f"--- {name}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-k", "postgres", "-m", f"not ({but})", *sys.argv[1:], *selection]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {OTHER_SERVER: url}).returncode == 0


def main() -> int:
    with Server("distribution") as server, PgBouncer(server.start()) as pooler:
        alone = tried("the store on PostgreSQL 15", server.dsn(), *STORE)
        pooled = tried("everything on PostgreSQL 15 behind PgBouncer", pooler.dsn(), but="system or slow or unpooled")
    return 0 if alone and pooled else 1


if __name__ == "__main__":
    sys.exit(main())
