"""Write `stores/schema.sql`, the schema of a new file, from the migrations: to be run when there is a further one."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "src" / "agent_run_ledger" / "stores" / "schema.sql"
HEAD = "-- The schema of a new file: what the scripts in `migrations` make of an empty one. Made by tools/whole_schema.py.\n"


def whole(scripts: list[str]) -> str:
    """One script that makes what these scripts make of an empty file: every table, index, trigger and view, in the words of SQLite's own
    record of them, and the rows that stand in the tables."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.create_function("said_in", 2, lambda body, name: None, deterministic=True)
        for script in scripts:
            db.executescript(script)
        made = "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
        parts = []
        for kind, name, sql in db.execute(made).fetchall():
            parts.append(f"{sql};")
            for row in db.execute(f'SELECT * FROM "{name}"').fetchall() if kind == "table" else ():
                values = [db.execute("SELECT quote(?)", (value,)).fetchone()[0] for value in row]
                parts.append(f"INSERT INTO {name} VALUES ({', '.join(values)});")
    return "\n\n".join([HEAD, *parts]) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    from agent_run_ledger.stores.schema import load_migrations

    TARGET.write_text(whole(load_migrations()), encoding="utf-8")
