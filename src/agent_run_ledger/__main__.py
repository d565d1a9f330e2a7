"""`python -m agent_run_ledger` is the command line."""

import sys

from agent_run_ledger.cli import main

sys.exit(main())
