"""What the demo's agent can do: read the month's CSV files, match a payment to an invoice, post an entry."""

from __future__ import annotations

import csv
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

from agent_run_ledger import Effect, current_step
from agent_run_ledger.demo.witness import Witness

MONTH = "2026-10"


class Tools:
    """The tools of one month. Each call leaves a line with the witness before it does anything."""

    def __init__(self, data: Path, service: str, witness: Witness) -> None:
        self._data = data
        self._service = service
        self._witness = witness
        self._direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the service is on this machine

    def list_invoices(self, month: str) -> list[dict[str, str]]:
        """The invoices of a month that are still open: number, customer and gross amount."""
        self._witness.saw("list_invoices")
        wanted = ("number", "customer", "gross")
        return [{key: row[key] for key in wanted} for row in self._read("invoices", month) if row["status"] == "open"]

    def read_bank(self, month: str) -> list[dict[str, str]]:
        """The bank statement of a month, one object per line."""
        self._witness.saw("read_bank")
        return self._read("bank", month)

    def read_invoice(self, number: str) -> dict[str, str]:
        """One invoice, whole."""
        self._witness.saw("read_invoice")
        return self._invoice(number)

    def find_match(self, number: str) -> dict[str, Any]:
        """The payments that may be for an invoice: those that name it, else those of its customer with its amount."""
        self._witness.saw("find_match")
        invoice = self._invoice(number)
        incoming = [line for line in self._read("bank", MONTH) if not line["amount"].startswith("-")]
        found = [line for line in incoming if number in line["reference"]]
        how = "reference"
        if not found:
            wanted = (invoice["customer"], invoice["gross"])
            found = [line for line in incoming if (line["counterparty"], line["amount"]) == wanted]
            how = "customer and amount"
        if not found:
            return {"invoice": number, "matched_by": None, "payments": []}
        difference = Decimal(found[0]["amount"]) - Decimal(invoice["gross"])
        return {"invoice": number, "matched_by": how, "payments": found, "difference": str(difference)}

    def post_entry(self, invoice: str, bank_line: str, received: str, charges: str, text: str) -> dict[str, Any]:
        """Book a payment: bank (and bank charges) against the customer's account. The service books each key once."""
        self._witness.saw("post_entry")
        lines = [{"account": "1800 Bank", "debit": received}]
        if Decimal(charges):
            lines.append({"account": "6855 Bank charges", "debit": charges})
        lines.append({"account": "1200 Receivables", "credit": str(Decimal(received) + Decimal(charges))})
        entry = {"invoice": invoice, "bank_line": bank_line, "lines": lines, "text": text}
        return self._post("/entries", entry)

    def _post(self, path: str, value: Any) -> dict[str, Any]:
        step = current_step()
        headers = {
            "Content-Type": "application/json",
            "Idempotency-Key": step.idempotency_key,
            "Agent-Step": str(step.step_number),
        }
        request = urllib.request.Request(self._service + path, json.dumps(value).encode(), headers)
        try:
            with self._direct.open(request, timeout=60) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(500).decode(errors="replace")
            raise RuntimeError(f"HTTP {error.code}: {said}") from error

    def _invoice(self, number: str) -> dict[str, str]:
        for row in self._read("invoices", MONTH):
            if row["number"] == number:
                return row
        raise LookupError(f"there is no invoice {number!r}")

    def _read(self, name: str, month: str) -> list[dict[str, str]]:
        if month != MONTH:
            raise LookupError(f"there is no file for {month!r}, only for {MONTH}")
        with (self._data / f"{name}_{MONTH}.csv").open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def by_name(self) -> dict[str, tuple[Callable[..., Any], Effect]]:
        """Each tool with what a second dispatch of it would do."""
        reading = (self.list_invoices, self.read_bank, self.read_invoice, self.find_match)
        return {tool.__name__: (tool, Effect.READ) for tool in reading} | {
            "post_entry": (self.post_entry, Effect.IDEMPOTENT)
        }


def _described(name: str, text: str, /, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": meaning} for key, meaning in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}


DESCRIPTIONS = [
    _described("list_invoices", "List the open invoices of a month.", month="the month, as YYYY-MM"),
    _described("read_bank", "Read the bank statement of a month.", month="the month, as YYYY-MM"),
    _described("read_invoice", "Read one invoice, whole.", number="the invoice's number"),
    _described("find_match", "Find the payments that may be for an invoice.", number="the invoice's number"),
    _described(
        "post_entry",
        "Book the payment of an invoice. Book each invoice at most once.",
        invoice="the invoice's number",
        bank_line="the line of the bank statement",
        received="the amount received, like 119.00",
        charges="bank charges that the customer's bank kept, 0.00 where there are none",
        text="what the entry is about, in a few words",
    ),
]
"""The tools as chat.completions wants them described."""
