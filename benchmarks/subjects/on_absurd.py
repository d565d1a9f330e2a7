"""The same steps on Absurd, on PostgreSQL: one task of one worker, as Absurd documents it.

A step is `ctx.step(name, function)`: a look whether the checkpoint is there, the function, and one commit that writes the checkpoint
and lengthens the claim. Nothing is written before the function is called.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import absurdctl
import psycopg
from absurd_sdk import Absurd
from talk import INVOICE, OUTPUT, SYNCED, introduce, serve, timed

QUEUE, TASK = "benchmark", "invoices"


def main(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(absurdctl.BUNDLED_SCHEMA_SQL)  # what `absurdctl init` runs
    app = Absurd(url, queue_name=QUEUE)
    app.create_queue()

    @app.register_task(TASK)
    def invoices(params: Any, ctx: Any) -> None:
        number = 0

        def step() -> None:
            nonlocal number
            number += 1
            ctx.step(f"fetch_invoice {number}", lambda: OUTPUT)

        introduce(f"absurd-sdk {version('absurd-sdk')}", SYNCED)
        serve({"steps": lambda count: timed(step, count)})

    app.spawn(TASK, {"invoice_id": INVOICE})
    app.work_batch()


if __name__ == "__main__":
    main(sys.argv[1])
