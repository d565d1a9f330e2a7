"""The demo's figures as a page for people."""

from __future__ import annotations

import shlex
from typing import Any

from agent_run_ledger.cli.terminal import plain, took


def page(figures: dict[str, Any]) -> str:
    """What the outside saw, which promises held, and where to look further."""
    crash, postings, tokens, recovery = (figures[key] for key in ("crash", "postings", "tokens", "recovery"))
    model, tools, runaway, verified = (figures[key] for key in ("model_calls", "tool_calls", "runaway", "verification"))
    repeats = postings["requests"] - postings["keys"]
    about = "about " if tokens["is_estimate"] else ""
    rows = [
        ("steps", f"{figures['run']['steps']}, killed in step {crash['step']}, then {figures['steps_replayed']} handed out by the ledger"),
        ("model calls", f"{model['made']} made, {model['repeated']} repeated"),
        ("tool calls", f"{tools['made']} made, {tools['repeated']} repeated: {_repeats(tools['repeated'], crash)}"),
        ("postings", f"{postings['requests']} requests, {postings['booked']} entries; {repeats} sent twice, booked once"),
        ("duplicate postings", str(postings["duplicates"])),
        ("recovery", f"{took(recovery['seconds_from_process_start'])} from process start to the next call, "
                     f"{took(recovery['seconds_from_first_line_of_main'])} of it without Python's start-up"),
        ("tokens saved", f"{about}{tokens['saved']:,} of {tokens['paid']:,} were not paid again"),
        ("runaway loop", f"{runaway['calls_asked_for']} calls asked for, {runaway['calls_dispatched']} reached the service; "
                         f"the run is {runaway['status']}"),
        ("ledger", f"{verified['entries']} entries of {verified['runs']} runs verified, {len(verified['findings'])} findings"),
    ]  # fmt: skip
    width = max(len(name) for name, _ in rows)
    lines = ["", "What the agent reported:"]
    lines += [f"  {plain(line)}" for line in str(figures["run"]["result"]).splitlines()]
    lines += ["", "What the outside saw (the service's own log and a file that each call writes to):"]
    lines += [f"  {name:<{width}}  {plain(text)}" for name, text in rows]
    if postings["booked_again_by_the_model"]:
        lines.append(
            f"  (the model itself asked to book {postings['booked_again_by_the_model']} invoices again, in other steps)"
        )
    if tokens["is_estimate"]:
        lines.append("  (tokens are a rough count here: one for four characters of JSON)")
    lines += ["", "Promises:"]
    lines += [f"  {'held  ' if each['held'] else 'BROKEN'}  {each['promise']}" for each in figures["promises"]]
    if figures["ledger"] is not None:
        path = plain(shlex.quote(figures["ledger"]))
        lines += ["", f"Look at it: python -m agent_run_ledger --db {path} show {figures['run']['run_id']}"]
    lines += ["", f"{took(figures['seconds'])} in all."]
    return "\n".join(lines)


def _repeats(count: int, crash: dict[str, Any]) -> str:
    return f"the {crash['tool']} in doubt, with its key" if count == 1 else "see the promises"
