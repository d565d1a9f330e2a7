"""The pytest plugin: a fixture `crashtest` that fails the test with the whole report, and options for the whole suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from agent_run_ledger.testing.report import Report


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("agent-run-ledger", "crash tests of agents and pipelines")
    group.addoption(
        "--crashtest-kill",
        action="store_true",
        help="crashtest kills real processes with SIGKILL, where a test does not say otherwise",
    )
    group.addoption(
        "--crashtest-limit",
        type=int,
        metavar="N",
        help="crashtest tries at most N boundaries of each flow, where a test does not say otherwise",
    )


@pytest.fixture
def crashtest(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """`agent_run_ledger.testing.crashtest`, which fails the test with its report where that is not ok.

    With `check=False` the report is only returned. `kill=` and `limit=` are those of the command line where they are not given.
    """

    def call(flow: Any, /, *args: Any, check: bool = True, **options: Any) -> Report:
        __tracebackhide__ = True
        from agent_run_ledger import testing

        if request.config.getoption("--crashtest-kill"):
            options.setdefault("kill", True)
        if (limit := request.config.getoption("--crashtest-limit")) is not None:
            options.setdefault("limit", limit)
        report = testing.crashtest(flow, *args, **options)
        if not report.ok:
            if check:
                pytest.fail(str(report), pytrace=False)
            request.node.add_report_section("call", "crashtest", str(report))  # shown where the test fails after all
        return report

    return call
