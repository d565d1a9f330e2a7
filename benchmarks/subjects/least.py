"""The least that Python can do for a step of ours: the same bytes, the same hashes, the same two rows under the same lock, and nothing else.

No arguments are checked, no lease is kept, no loop is looked for, no budget, and no program could be resumed by it. What a step of ours costs
beyond this is what the promises cost.
"""

from __future__ import annotations

import fcntl
import json
import sys
import time
from hashlib import sha256

from talk import INVOICE, OUTPUT, introduce, serve, timed

from agent_run_ledger import AgentRunLedger, merkle
from agent_run_ledger.contract import Row
from agent_run_ledger.rules import compact
from agent_run_ledger.stores.clock import SystemClock
from agent_run_ledger.stores.sqlite import SqliteStore
from agent_run_ledger.stores.sqlite_log import APPEND

TOOL = "fetch_invoice"


def main(path: str) -> None:
    with AgentRunLedger(path, durability="process") as ledger:
        run_id = ledger.create_run("benchmark")
    store = SqliteStore(path, clock=SystemClock())
    lease = store.claim(run_id, "benchmark", 3600.0)
    secret, token = lease.secret, lease.token
    (first,) = store.read(run_id)
    frontier, size = [first.roots], 1
    db = store._files.ready()
    db.execute("PRAGMA synchronous=NORMAL")
    lock = open(path + ".lock", "rb")  # noqa: SIM115 - as long as the process
    sorted_pieces, pieces = compact.encoder(sort_keys=True), compact.encoder(sort_keys=False)
    decode = json.JSONDecoder().raw_decode
    number = 0

    def write(kind: str, position: str, said: dict[str, object], payload: bytes, fingerprint: bytes | None) -> None:
        nonlocal frontier, size
        head = {"run": run_id, "seq": size + 1, "kind": kind, "at": time.time(), "token": token}
        body = "".join(pieces(head | said | {"payload": sha256(secret + payload).hexdigest()}, 0)).encode()
        frontier, roots = merkle.append(frontier, size, sha256(b"\x00" + body).digest())
        size += 1
        row = Row(size, kind, position, 1, body, roots, payload, sha256(payload).digest(), fingerprint)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        db.execute(APPEND, (run_id, token, 0, *row))
        fcntl.flock(lock, fcntl.LOCK_UN)

    def step() -> object:
        nonlocal number
        number += 1
        position = f"{number}"
        stored = "".join(sorted_pieces({"invoice_id": INVOICE, "n": number}, 0)).encode()
        key = sha256(b"\x00".join((secret, run_id.encode(), position.encode(), TOOL.encode(), stored))).hexdigest()
        intent = {
            "state": "RUNNING", "steps": number, "position": position, "attempt": 1, "step": number, "tool": TOOL, "key": key,
            "environment": "0123456789abcdef 0.1.0 python 3.11", "left": 3, "step_state": "RUNNING",
        }  # fmt: skip
        write("intent", position, intent, stored, sha256(TOOL.encode() + b"\x00" + sha256(stored).digest()).digest())
        output = "".join(sorted_pieces(OUTPUT, 0)).encode()
        outcome = {
            "state": "CHECKPOINTED", "steps": number, "position": position, "attempt": 1, "step": number, "ok": "completed", "left": 3,
            "step_state": "COMPLETED",
        }  # fmt: skip
        write("outcome", position, outcome, output, None)
        return decode(output.decode())[0]

    introduce("the least for our bytes", "WAL, synchronous=NORMAL: survives the process")
    serve({"steps": lambda count: timed(step, count)})


if __name__ == "__main__":
    main(sys.argv[1])
