"""The same step on Absurd, for benchmarks/postgres.py, in an environment of its own: requirements/bench-absurd.txt.

    python benchmarks/absurd.py postgresql://...      # an empty database; then a count on each line of the input

One task of one worker, as Absurd documents it, makes as many steps as each line says and answers with the median microseconds of one.
A step is `ctx.step(name, function)`: a look whether the checkpoint is there, the function, and one commit that writes the checkpoint
and lengthens the claim. Nothing is written before the function is called.
"""

from __future__ import annotations

import statistics
import sys
import time
from importlib.metadata import version
from typing import Any

import absurdctl
import psycopg
from absurd_sdk import Absurd

QUEUE, TASK = "benchmark", "invoices"


def main(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(absurdctl.BUNDLED_SCHEMA_SQL)  # what `absurdctl init` runs
    app = Absurd(url, queue_name=QUEUE)
    app.create_queue()

    @app.register_task(TASK)
    def invoices(params: Any, ctx: Any) -> None:
        say(f"Absurd {version('absurd-sdk')}")
        number = 0
        for line in sys.stdin:
            times = []
            for _ in range(int(line)):
                number += 1
                begun = time.perf_counter()
                ctx.step(f"fetch_invoice {number}", lambda: {"ok": True, "total": 12})
                times.append(time.perf_counter() - begun)
            say(statistics.median(times) * 1e6)

    app.spawn(TASK, {"invoice_id": "INV-109"})
    app.work_batch()


def say(what: object) -> None:
    print(what, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
