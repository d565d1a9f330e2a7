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
CONFORMANCE = ["tests/test_postgres_store.py", "tests/test_servers.py"]


def tried(name: str, url: str, *selection: str) -> bool:
    """Whether these tests hold with this server under them."""
    print(f"--- {name}", flush=True)
    options = ["-q", "-m", "not system and not slow", "-k", "postgres", *sys.argv[1:]]
    there = os.environ | {OTHER_SERVER: url}
    return subprocess.run([sys.executable, "-m", "pytest", *options, *selection], cwd=ROOT, env=there).returncode == 0


def main() -> int:
    with Server("distribution") as server, PgBouncer(server.start()) as pooler:
        alone = tried("the store on PostgreSQL 15", server.dsn(), *CONFORMANCE)
        pooled = tried("everything on PostgreSQL 15 behind PgBouncer", pooler.dsn())
    return 0 if alone and pooled else 1


if __name__ == "__main__":
    sys.exit(main())
