"""The command line: `agent-run-ledger`, or `python -m agent_run_ledger`."""

from agent_run_ledger.cli.commands import main as main
