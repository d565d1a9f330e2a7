# Every verb does its own set-up: git, make and a Python of 3.11 or newer are all it takes (uv is used where it is there).

PYTHON ?= python3
VENV ?= .venv
JOBS ?= auto
BENCH ?= --json benchmarks/results/latest.json --page docs/benchmarks.md
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# what is tried is this checkout, whatever the shell points at
unexport PYTHONPATH VIRTUAL_ENV

.DEFAULT_GOAL := help
.PHONY: help demo test check test-system bench coverage lint format wheel pins clean python environment

help: ## list these verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

demo: python ## see a run survive a crash; needs nothing but Python, no network and no installation
	@PYTHONPATH=src $(PYTHON) -m agent_run_ledger demo

test: lint ## everything that must hold: format, lint, types, floors and all tests but those of test-system
	$(PYTEST) -m "not system"

check: lint ## the same without the slow tests, in under a minute
	$(PYTEST) -m "not system and not slow"

test-system: environment ## tests that need the machine: strace, faketime, mounts, PostgreSQL 15, PgBouncer (Linux, root)
	$(PYTEST) -m system
	PYTHONPATH=src:tests $(BIN)/python tests/system/other_servers.py -n $(JOBS) --dist worksteal

bench: environment ## measure against the floor and the peers: tables, docs/benchmarks.md, JSON; BENCH=--quick for a look that writes nothing
	$(BIN)/python benchmarks $(BENCH)

coverage: environment ## which lines and branches the tests reach, subprocesses included
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "not system"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --show-missing --skip-covered

lint: environment ## format, lint, types and floors, without tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/basedpyright --pythonpath $(BIN)/python tests/typing/public_api.py
	$(BIN)/lint-imports --no-logo

format: environment ## rewrite the code in the house format
	$(BIN)/ruff check --fix-only --select I .
	$(BIN)/ruff format .

wheel: environment ## build the wheel, install it into an empty environment and try it there
	$(BIN)/python tools/try_wheel.py

pins: ## read requirements/*.in anew and pin their newest versions with hashes (needs uv)
	for kind in $(notdir $(basename $(wildcard requirements/*.in))); do \
	    uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-header \
	        requirements/$$kind.in --output-file requirements/$$kind.txt || exit; \
	done

clean: ## remove environments, caches and builds
	rm -rf .venv .venv-* .venv*.lock build dist .coverage* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests tools -name __pycache__ -prune -exec rm -rf {} +

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "agent-run-ledger needs Python 3.11 or newer, %s is %d.%d: call make with PYTHON=..." % (sys.executable, *sys.version_info[:2]))'

environment: python
	@$(PYTHON) tools/environment.py $(VENV)
