"""The documentation is true: its snippets run, its links lead somewhere, its names exist, its tables come from the code.

`PYTHONPATH=src python tests/test_docs.py` writes the generated parts anew; the tests fail where a page is stale.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import builtins
import contextlib
import importlib
import inspect
import io
import itertools
import json
import keyword
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ForwardRef, Literal, Self

import pytest

import agent_run_ledger
from agent_run_ledger import (
    AgentRunLedger,
    Budget,
    CallBlocked,
    Effect,
    LedgerError,
    LoopDetectorPolicy,
    Receipt,
    Run,
    RunawayLoopException,
    RunLedger,
    StepFailed,
    StepInDoubt,
    Verdict,
    current_step,
    errors,
)
from agent_run_ledger.cli import commands
from agent_run_ledger.contract import Row
from agent_run_ledger.engine.history import Outcome, StepHistory
from agent_run_ledger.engine.recovery import Declaration, plan_recovery
from agent_run_ledger.model import RetryPolicy
from agent_run_ledger.rules import lifecycle
from agent_run_ledger.rules.loops.breaker import Rule
from agent_run_ledger.rules.loops.calls import Call
from agent_run_ledger.stores.memory import MemoryStore
from agent_run_ledger.testing import FakeClock
from agent_run_ledger.words import Event, RunState
from support.databases import databases
from support.ledgers import packs_nothing
from support.pumping import pump, work_once

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "agent_run_ledger"
DOCS = ROOT / "docs"
TOP = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")]
GUIDES = sorted(path for path in DOCS.rglob("*.md") if "design" not in path.relative_to(DOCS).parts)
"""Decisions in docs/design speak of what is not built, too: only their links are checked."""
PAGES = [*TOP, *GUIDES]
EVERY_PAGE = [*PAGES, *sorted((DOCS / "design").rglob("*.md"))]
PYTHON_API = DOCS / "reference" / "python-api.md"
ERRORS = DOCS / "reference" / "errors.md"
SCHEMA = DOCS / "reference" / "entries-and-schema.md"
SCRIPTS = DOCS / "reference"
"""Where the programs are that the documentation comes with."""
ADDRESS = "postgresql://agents@db.internal/agents"
"""Where a ledger on a server is, in the documentation."""
TWO_PROGRAMS = DOCS / "tutorial" / "two-programs.md"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# --- pages ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the words behind that, its text, and the line of the page on which the text begins."""

    language: str
    info: str
    text: str
    line: int

    @property
    def title(self) -> str | None:
        """The name of the file that the block is the contents of."""
        found = re.search(r'title="([^"]+)"', self.info)
        return found[1] if found else None


_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S)


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        inner = "".join(line.removeprefix(match["indent"]) for line in match["text"].splitlines(keepends=True))
        found.append(
            Block(match["language"], match["info"].strip(), inner, text.count("\n", 0, match.start("text")) + 1)
        )
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks and comments, line for line."""
    text = page.read_text(encoding="utf-8")
    for pattern in (_FENCE, re.compile(r"<!--.*?-->", re.S)):
        text = pattern.sub(lambda match: "\n" * match[0].count("\n"), text)
    return text


# --- snippets run -----------------------------------------------------------------------------------------------------


class Reader:
    """Somebody who types a page from its top to its end, in an empty folder."""

    def __init__(self, page: Path, folder: Path, server: str = "") -> None:
        self.page = page
        self.folder = folder
        self.server = server
        """The database that stands behind the address which pages give, where the page gives it."""
        self.module = types.ModuleType("a_page_of_the_documentation")
        self.ran = 0

    def type_all(self) -> None:
        for shown in blocks(self.page):
            block = replace(shown, text=shown.text.replace(ADDRESS, self.server)) if self.server else shown
            if block.info == "signature":
                continue
            if block.title is not None:
                (self.folder / block.title).write_text(block.text, encoding="utf-8")
            elif block.language == "python":
                self.python(block)
            elif block.language == "console":
                self.console(block)
            elif block.language == "sh":
                for line in block.text.splitlines():
                    check_without_running(list(itertools.dropwhile(lambda word: "=" in word, shlex.split(line))))
            elif block.language == "sql":
                self.sql(block)

    def python(self, block: Block) -> None:
        if "own" in block.info.split():
            self.module = types.ModuleType("a_page_of_the_documentation")
        sys.modules[self.module.__name__] = self.module  # dataclasses look themselves up
        code = compile("\n" * (block.line - 1) + block.text, str(self.page), "exec")
        exec(code, self.module.__dict__)
        self.ran += 1

    def console(self, block: Block) -> None:
        for command, expected in commands_of(block):
            words = shlex.split(command, comments=True)
            if words[0] == "python":
                words[0] = sys.executable
                if (SCRIPTS / words[1]).is_file():
                    words[1] = str(SCRIPTS / words[1])
            elif words[0] == "agent-run-ledger" and words[1:2] != ["demo"]:  # the demo has tests of its own
                words[:1] = [sys.executable, "-m", "agent_run_ledger"]
            else:
                check_without_running(words)
                continue
            self.ran += 1
            done = subprocess.run(
                words,
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error", "PYTHONUNBUFFERED": "1"},
                capture_output=True,
                text=True,
                timeout=60,
            )
            said = done.stdout + ("Killed\n" if done.returncode == -signal.SIGKILL else done.stderr)
            assert done.returncode == (-signal.SIGKILL if expected.endswith("Killed\n") else 0), said
            assert agrees(said, expected), f"{name_of(self.page)}:{block.line}: {command}\n{said}"

    def sql(self, block: Block) -> None:
        """Each statement must give a row, on the ledger that the page made."""
        with contextlib.closing(sqlite3.connect(f"file:{self.folder}/agent.db?mode=ro", uri=True)) as connection:
            for statement in filter(str.strip, block.text.split(";")):
                assert connection.execute(statement).fetchall(), f"{name_of(self.page)}:{block.line}: no rows"
                self.ran += 1

    def unsaid(self) -> list[str]:
        """The messages that the page shows and that its snippets, which collect them in `said`, did not get."""
        got = vars(self.module).get("said", [])
        shown = [block.text for block in blocks(self.page) if block.info == "message"]
        return [message for message in shown if not any(agrees(said, message) for said in got)]

    def leave(self) -> None:
        """Close its ledgers, and forget the modules of its folder, which another page may have under the same names."""
        files = {path.stem: str(path) for path in self.folder.glob("*.py")}
        typed = [module for name in files if getattr(module := sys.modules.get(name), "__file__", None) == files[name]]
        for module in (self.module, *typed):
            for value in list(vars(module).values()):
                if isinstance(value, AgentRunLedger | RunLedger):
                    value.close()
            sys.modules.pop(module.__name__, None)


def commands_of(block: Block) -> Iterator[tuple[str, str]]:
    """Each `$ command` of a console block, with the output that is shown for it."""
    for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
        command, _, output = part.partition("\n")
        while command.endswith("\\"):
            more, _, output = output.partition("\n")
            command = command[:-1] + more.strip()
        yield command, output


def agrees(said: str, shown: str) -> bool:
    """Whether an output is what the page shows, where … stands for anything. Where nothing is shown, anything is right."""
    pattern = ".*".join(map(re.escape, shown.strip().split("…")))
    return not pattern or re.fullmatch(pattern, said.strip(), re.S) is not None


def check_without_running(words: list[str]) -> None:
    """What would leave the folder, or takes long, is only held to what exists."""
    if words[0] == "make":
        verbs = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        assert set(words[1:]) <= set(verbs), words
    elif words[0] == "agent-run-ledger":
        commands._parser().parse_args(words[1:])
    else:
        assert words[0] in ("git", "cd", "pip", "export"), words


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """A model for the agents of the pages that call one."""
    with Endpoint(books) as endpoint:
        for name, value in endpoint.environment.items():
            monkeypatch.setenv(name, value)
        yield endpoint


@pytest.mark.usefixtures("endpoint")
@pytest.mark.parametrize("page", [page for page in PAGES if page.is_file()], ids=name_of)
def test_every_snippet_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("AGENT_RUN_LEDGER_DB", "agent.db")
    with contextlib.ExitStack() as servers:
        needs_server = any(ADDRESS in block.text for block in blocks(page) if block.language in ("python", "console"))
        server = servers.enter_context(databases().fresh(leave_empty)) if needs_server else ""
        reader = Reader(page, tmp_path, server)
        try:
            reader.type_all()
            assert reader.unsaid() == []
        finally:
            reader.leave()


def leave_empty(_: str) -> None:
    """Make nothing of a database: the page does."""


def test_there_is_something_to_run() -> None:
    languages = [block.language for page in PAGES for block in blocks(page)]
    assert languages.count("python") > 40
    assert languages.count("console") >= 8
    assert set(languages) <= {"python", "console", "sh", "sql", "mermaid", "text", "toml"}


# --- the published programs -------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """The process ends here."""


def program(contains: str) -> str:
    (found,) = (block.text for block in blocks(TWO_PROGRAMS) if block.language == "python" and contains in block.text)
    return found


def test_the_published_pipeline_calls_its_first_step_once_and_its_second_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[str] = []
    ends: list[BaseException] = [Interrupted(), ConnectionError("the model is away")]

    def api(company_id: str) -> dict[str, Any]:
        calls.append("fetch")
        return {"company": company_id}

    def model(data: dict[str, Any]) -> str:
        calls.append("synthesize")
        if ends:
            raise ends.pop(0)
        return f"report on {data['company']}"

    for error in (Interrupted, RuntimeError):
        with pytest.raises(error):
            run_published("= RunLedger(", fetch_from_erp=api, ask_model=model)
    assert calls == ["fetch", "synthesize", "synthesize"]
    for _ in range(2):
        assert run_published("= RunLedger(", fetch_from_erp=api, ask_model=model)["result"] == "report on acme-corp"
    assert calls == ["fetch", "synthesize", "synthesize", "synthesize"]


def test_the_published_agent_loop_is_halted_at_the_fourth_equal_call_and_at_the_31st_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_published(
        "= AgentRunLedger(", close=False, fetch_invoice=lambda number: {"number": number, "total": 120}
    )
    ledger, run_id = names["ledger"], names["run_id"]
    assert [record.tool_name for record in ledger.resume_run(run_id)] == ["fetch_invoice"]
    calls: list[int] = []

    def fails() -> None:
        calls.append(1)
        raise ValueError("no such invoice")

    for _ in range(3):
        with pytest.raises(RuntimeError):
            ledger.execute_step(run_id, "fetch_invoice", {"invoice_id": "INV-1"}, fails)
    with pytest.raises(RunawayLoopException):
        ledger.execute_step(run_id, "fetch_invoice", {"invoice_id": "INV-1"}, fails)
    assert len(calls) == 3
    assert ledger.get_run(run_id).status == "DEAD_LETTER"
    run_id = ledger.create_run(goal="Count")
    for number in range(30):
        ledger.execute_step(run_id, "count", {"number": number}, lambda number: number)
    with pytest.raises(agent_run_ledger.BudgetExceededException):
        ledger.execute_step(run_id, "count", {"number": 30}, lambda number: number)
    ledger.close()


def run_published(contains: str, *, close: bool = True, **functions: Any) -> dict[str, Any]:
    names: dict[str, Any] = {**functions}
    try:
        with contextlib.redirect_stdout(io.StringIO()), _undeclared_is_said():
            exec(program(contains), names)
    finally:
        if close:
            names["ledger"].close()
    return names


@contextlib.contextmanager
def _undeclared_is_said() -> Iterator[None]:
    """The published programs declare no effects, so a second dispatch is warned of; here that is not the news."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", agent_run_ledger.UndeclaredEffectWarning)
        yield


class Endpoint(ThreadingHTTPServer):
    """An endpoint that speaks chat completions. What it answers is a function of what its tools have told the model."""

    def __init__(self, answer: Callable[[list[str]], dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), _Completions)
        self.answer = answer
        self.asked: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """What a program needs to find it."""
        address = f"http://127.0.0.1:{self.server_port}/v1"
        return {"OPENAI_BASE_URL": address, "OPENAI_MODEL": "scripted", "OPENAI_API_KEY": "none"} | _NO_PROXY


_NO_PROXY = {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}


class _Completions(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(request)
        told = [message["content"] for message in request["messages"] if message["role"] == "tool"]
        message = {"role": "assistant", "content": None} | self.server.answer(told)
        choice = {"index": 0, "finish_reason": "tool_calls" if "tool_calls" in message else "stop", "message": message}
        about = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1_790_000_000, "model": request["model"]}
        answer = json.dumps({**about, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None: ...


def asks_for(*calls: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """The message of a model that wants these calls of tools: id, name and arguments of each."""
    return {
        "tool_calls": [
            {"id": call, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for call, name, arguments in calls
        ]
    }


def adds_up(told: list[str]) -> dict[str, Any]:
    """A model that makes one wrong call, one right one, and then answers."""
    if len(told) == 2:
        return {"content": f"It is {told}."}
    return asks_for((f"call {len(told)}", "read_invoice", {"number": "INV-107"} if told else {"nummer": "INV-107"}))


def books(told: list[str]) -> dict[str, Any]:
    """A model that makes two calls at once, then one more, and then answers."""
    if not told:
        numbers = ("INV-107", "INV-999")
        return asks_for(*((f"call_{number}", "read_invoice", {"number": number}) for number in numbers))
    if len(told) == 2:
        return asks_for(("call_post", "post_entry", {"number": "INV-107", "amount": 80}))
    return {"content": "INV-107 is booked; there is no INV-999."}


def test_the_agent_of_the_tutorial_asks_a_real_endpoint_once_for_each_answer(tmp_path: Path) -> None:
    (block,) = (block for block in blocks(DOCS / "tutorial" / "first-agent.md") if block.title == "model_agent.py")
    said = []
    with Endpoint(adds_up) as endpoint:
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-W", "error", "-c", block.text],
                cwd=tmp_path,
                env=os.environ | {"PYTHONPATH": str(ROOT / "src")} | endpoint.environment,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stderr
            said.append(done.stdout)
    assert said[0] == said[1]
    assert "InvalidArguments" in said[0]
    assert '"total": 80' in said[0]
    assert [len(request["messages"]) for request in endpoint.asked] == [1, 3, 5]


def test_the_agent_of_the_page_on_agents_pays_for_no_answer_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint
) -> None:
    reader = Reader(DOCS / "how-to" / "write-an-agent.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    try:
        reader.type_all()
    finally:
        reader.leave()
    assert [len(request["messages"]) for request in endpoint.asked] == [1, 4, 6]
    assert "there is no INV-999" in endpoint.asked[1]["messages"][3]["content"]


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in EVERY_PAGE if page.is_file()], ids=name_of)
def test_every_internal_link_of_the_page_leads_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md" or not page.is_file():
            continue
        reached.add(page)
        waiting += [(page.parent / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)", prose(page))]
    assert [name_of(page) for page in PAGES if page not in reached] == []


# --- names ------------------------------------------------------------------------------------------------------------

_FOREIGN = frozenset(
    {
        "FIRST_COMPLETED",
        "FULL",
        "IdempotentParameterMismatch",
        "NORMAL",
        "OFF",
        "TaskGroup",
        "ThreadPoolExecutor",
        "ToolNode",
        "TransactWriteItems",
        "as_completed",
        "asyncio",
        "base",
        "cancelled_caught",
        "contextvars",
        "cp",
        "fail_after",
        "flock",
        "fullfsync",
        "hashlib",
        "json",
        "langgraph",
        "langgraph-checkpoint-sqlite",
        "make",
        "max_retries",
        "model_dump",
        "move_on_after",
        "pg_dump",
        "previous",
        "run_in_executor",
        "sha",
        "shield",
        "synchronous",
        "to_thread",
        "tool_call_id",
        "uniform",
        "urllib",
        "user_version",
        "wait_for",
    }
)
"""Names of the world that the pages may speak of beside those of the package."""


def known_names() -> set[str]:
    """Every identifier of the package's code, and every word of its schema."""
    known = {*dir(builtins), *keyword.kwlist, *keyword.softkwlist, *_FOREIGN}
    for module in PACKAGE.rglob("*.py"):
        known |= {*module.relative_to(PACKAGE).with_suffix("").parts}
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                known.add(node.name)
            elif isinstance(node, ast.arg | ast.keyword):
                known.add(node.arg or "")
            elif isinstance(node, ast.Name):
                known.add(node.id)
            elif isinstance(node, ast.Attribute):
                known.add(node.attr)
            elif isinstance(node, ast.alias):
                known |= {*node.name.split(".")}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                known.add(node.value)
    for script in PACKAGE.rglob("*.sql"):
        known |= set(re.findall(r"\w+", script.read_text(encoding="utf-8")))
    return known


def snippet_names(page: Path) -> set[str]:
    """What the page's own snippets define."""
    return set(re.findall(r"\w+", " ".join(block.text for block in blocks(page))))


_NAME = re.compile(r"@?[A-Za-z_][\w.]*(\([^`]*\))?|[a-z_]+=[\w.\"']*")


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_file()], ids=name_of)
def test_the_page_speaks_of_no_name_that_does_not_exist(page: Path) -> None:
    known = known_names() | snippet_names(page)
    unknown = []
    for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page)):
        if re.search(r"\.(md|py|db|sql|toml|txt|lock|owners|json|backup)\b|[/-]", span):
            file = span.rpartition(" ")[2]
            if "/" in file and file.endswith((".py", ".sql")) and not is_a_file(file):
                unknown.append(span)
        elif _NAME.fullmatch(span):
            owner, _, attribute = re.sub(r"\(.*", "", span).partition(".")
            if attribute and owner in _OWNERS and not any(hasattr(each, attribute) for each in _OWNERS[owner]):
                unknown.append(span)
            bare = re.sub(r"\"[^\"]*\"|'[^']*'", "", span)
            unknown += [span for word in re.findall(r"[A-Za-z_]\w*", bare) if word not in known]
    assert unknown == []


_OWNERS: dict[str, tuple[object, ...]] = {
    "ledger": (AgentRunLedger, RunLedger),
    "run": (agent_run_ledger.Run, types.SimpleNamespace(result=None, run_id="")),
    "Effect": (Effect,),
    "LoopDetectorPolicy": (agent_run_ledger.LoopDetectorPolicy,),
    "Budget": (agent_run_ledger.Budget,),
}
"""Whose attributes a span like `ledger.verify()` speaks of."""


def is_a_file(span: str) -> bool:
    return any((folder / span).exists() for folder in (ROOT, ROOT / "src", PACKAGE))


# --- what the code says -----------------------------------------------------------------------------------------------


def generated() -> dict[str, Callable[[], str]]:
    """What stands between `<!-- begin: name -->` and `<!-- end: name -->`, by name."""
    return {
        "state diagram": lambda: f"```mermaid\n{lifecycle.diagram()}\n```",
        "lifecycle table": lifecycle_table,
        "recovery table": recovery_table,
        "receipt table": receipt_table,
        "live table": live_table,
        "modules": module_table,
    }


def lifecycle_table() -> str:
    """δ as a table: a row a state, a column an event that moves anything."""
    events = [event for event in Event if event is not Event.HEARTBEAT_EXPIRED]
    lines = ["| event | " + " | ".join(str(state) for state in RunState if not state.is_terminal) + " |"]
    lines.append("|---" * (1 + sum(not state.is_terminal for state in RunState)) + "|")
    for event in events:
        cells = [str(lifecycle.DELTA[state].get(event, "–")) for state in RunState if not state.is_terminal]
        lines.append(f"| `{event}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


_WORDS = {
    "dispatch": "dispatched again",
    "dispatch_undeclared": "dispatched again, with a warning",
    "ask": "**asked**",
    "record": "the output is recorded",
    "wait": "waits, and is asked again",
    "park": "**parked**",
    "dead_letter": "dead letter",
}
_DAY = 86_400.0
_DECLARED = [
    ("`READ`", Declaration(Effect.READ)),
    ("`IDEMPOTENT`", Declaration(Effect.IDEMPOTENT)),
    ("`IDEMPOTENT`, within its `key_window`", Declaration(Effect.IDEMPOTENT, key_window=2 * _DAY)),
    ("`IDEMPOTENT`, behind its `key_window`", Declaration(Effect.IDEMPOTENT, key_window=_DAY / 2)),
    ("the same, with `receipt=`", Declaration(Effect.IDEMPOTENT, key_window=_DAY / 2, has_receipt=True)),
    ("`MUTATE`", Declaration(Effect.MUTATE)),
    ("`MUTATE`, with `receipt=`", Declaration(Effect.MUTATE, has_receipt=True)),
    ("none (the default)", Declaration(None)),
    ('none, `undeclared="block"`', Declaration(None, blocks_undeclared=True)),
]


def planned(declared: Declaration, step: StepHistory, receipt: Receipt | None = None) -> str:
    """What is done about a step a day after its first dispatch."""
    receipts = {} if receipt is None else {step.position: receipt}
    (action,) = plan_recovery([step], {"tool": declared}, receipts, _DAY)
    return _WORDS[action.kind]


def recovery_table() -> str:
    """What `plan_recovery` answers for every kind of step, as long as nobody was asked."""
    columns: list[tuple[str, Callable[[], StepHistory]]] = [
        ("in doubt", a_step),
        ("in doubt, attempts used up", lambda: a_step(attempts=4)),
        ("failed, and it took no effect", lambda: a_step("failed")),
        ("failed, and it may have taken effect", lambda: a_step("failed", unproven=True)),
        ("failed, attempts used up", lambda: a_step("failed", attempts=4)),
    ]
    lines = ["| declared effect | " + " | ".join(words for words, _ in columns) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for words, declared in _DECLARED:
        cells = [planned(declared, make()) for _, make in columns]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def receipt_table() -> str:
    """What `plan_recovery` answers for a step in doubt whose receiver can be asked, or of which somebody has said something."""
    asked = Declaration(Effect.MUTATE, has_receipt=True)
    cases: list[tuple[str, Callable[[], StepHistory], Receipt | None]] = [
        ("nobody was asked yet", a_step, None),
        ("*found*", a_step, Receipt.found(None)),
        ("*absent*", a_step, Receipt.absent()),
        ("*absent*, attempts used up", lambda: a_step(attempts=4), Receipt.absent()),
        ("*unknown*, or an exception", a_step, Receipt.unknown("")),
        ("nothing: the process ended in the question", lambda: a_step(questions=1), None),
        ("nothing, `max_attempts` times in a row", lambda: a_step(questions=4), None),
    ]
    lines = ["| the receiver's answer | the step |", "|---|---|"]
    lines += [f"| {words} | {planned(asked, make(), receipt)} |" for words, make, receipt in cases]
    said = planned(Declaration(Effect.MUTATE), a_step(attempts=4, is_absent=True))
    lines.append(f"| none, but an operator said: *not executed* | {said}, attempts counted afresh |")
    return "\n".join(lines)


def a_step(
    ok: str | None = None, *, attempts: int = 1, unproven: bool = False, questions: int = 0, is_absent: bool = False
) -> StepHistory:
    """A step as the log tells of it. `ok` None: it has no outcome."""
    common = {"at": 0.0, "left": 0, "token": 1, "payload": "", "environment": "e", "step": 1, "tool": "tool", "key": ""}

    def entry(seq: int, kind: str, attempt: int, **fields: Any) -> tuple[Row, dict[str, Any]]:
        body = {**common, "attempt": attempt, **fields}
        return Row(seq, kind, "1", attempt, b"", bytes(32), b"{}", bytes(32)), body

    step = StepHistory(*entry(1, "intent", 1, step_state="RUNNING"), None)
    for attempt in range(2, attempts + 1):
        step.dispatched(*entry(attempt, "intent", attempt, step_state="RUNNING"))
    if ok is not None:
        open_to_doubt = {"unproven": True} if unproven else {}
        step.settled(*entry(9, "outcome", attempts, ok=ok, step_state="FAILED", **open_to_doubt))
        assert isinstance(step.outcome, Outcome)
    for number in range(questions):
        step.marked(*entry(10 + number, "asked", attempts, question=number + 1))
    if is_absent:
        step.marked(*entry(20, "resolved", attempts, executed=False))
    return step


def live_table() -> str:
    """What is done about a call that ran out of time, and about a second equal call of the same program: tried out on a ledger."""
    said: dict[str, Receipt] = {
        "found": Receipt.found("done"),
        "absent": Receipt.absent(),
        "unknown": Receipt.unknown("the service is away"),
    }
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("`READ`", {"effect": Effect.READ}, "dispatch"),
        ("`IDEMPOTENT`", {"effect": Effect.IDEMPOTENT}, "dispatch"),
        ("`MUTATE`", {"effect": Effect.MUTATE}, "dispatch"),
        *(
            (f"`MUTATE`, whose receipt says *{word}*", {"effect": Effect.MUTATE, "receipt": _says(receipt)}, "dispatch")
            for word, receipt in said.items()
        ),
        ("none (the default)", {}, "dispatch"),
        ('none, `undeclared="block"`', {}, "block"),
    ]
    lines = ["| declared effect | the program gets | a second, equal call |", "|---|---|---|"]
    for words, options, undeclared in cases:
        lines.append(f"| {words} | " + " | ".join(_plays(options, undeclared)) + " |")
    return "\n".join(lines)


def _says(receipt: Receipt) -> Callable[[str, dict[str, Any]], Receipt]:
    return lambda key, arguments: receipt


def _plays(options: dict[str, Any], undeclared: str) -> tuple[str, str]:
    keys: list[str] = []

    def call() -> str:
        keys.append(current_step().idempotency_key)
        if len(keys) == 1:
            raise TimeoutError("no answer")
        return "done"

    clock = FakeClock()
    ledger = AgentRunLedger(MemoryStore(clock=clock), clock=clock, heartbeat_seconds=29.0, undeclared=undeclared)
    ledger.create_run("play", "run")
    cells = []
    for _ in range(2):
        before = len(keys)
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                ledger.execute_step("run", "tool", {}, call, **options)
            got = "its output"
        except (StepFailed, StepInDoubt) as error:
            got = f"`{type(error).__name__}`"
        if before == 0 and len(keys) > 1:
            got += ", after it was dispatched again with the same key"
        elif before and len(keys) > before:
            got = f"is dispatched, with {'the same key' if keys[-1] == keys[0] else 'a key of its own'}"
            got += ", and a warning" if told else ""
        elif before and got.startswith("`"):
            got = f"is not dispatched: {got}"
        cells.append(got)
    ledger.close()
    return cells[0], cells[1]


def module_table() -> str:
    """Every module with the first line of its docstring, floor by floor."""
    floors = [
        ("0 words", ["errors.py", "words.py", "model.py", "contract.py"]),
        ("1 rules", ["rules", "merkle.py", "checkpoints.py", "bundles.py", "usage.py", "prices.py"]),
        ("2 engine", ["engine"]),
        ("2 stores", ["stores"]),
        ("3 drivers", ["drivers"]),
        ("4 faces", ["ledger.py", "operator.py", "run.py", "agents.py", "settle.py", "recover.py", "pipeline.py"]),
        (
            "4 faces",
            [
                "working.py",
                "fleet",
                "copying.py",
                "exporting.py",
                "backups.py",
                "forgetting.py",
                "redacting.py",
                "guard.py",
                "preflight.py",
                "supervisor.py",
                "catalogue.py",
                "proving.py",
                "heads.py",
                "late.py",
                "verifying.py",
                "signing.py",
                "testing",
            ],
        ),
        ("5 edges", ["cli", "demo", "__main__.py"]),
        ("the front door", ["__init__.py"]),
    ]
    lines = ["| floor | module | responsibility |", "|---|---|---|"]
    seen = set()
    for floor, rooms in floors:
        for room in rooms:
            paths = [PACKAGE / room] if room.endswith(".py") else sorted((PACKAGE / room).rglob("*.py"))
            for path in paths:
                seen.add(path)
                said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
                if path.name == "__init__.py" and not said:
                    continue
                first = " ".join(said.partition("\n\n")[0].split())
                lines.append(f"| {floor} | `{path.relative_to(PACKAGE).as_posix()}` | {first} |")
    assert seen == set(PACKAGE.rglob("*.py"))
    return "\n".join(lines)


def signature(path: str) -> str:
    """The signature of a public name (`Name.method`, or `module:Name.method`), one parameter a line where it is long."""
    module, _, rest = path.rpartition(":")
    target: Any = importlib.import_module(f"agent_run_ledger.{module}".rstrip("."))
    for name in rest.split("."):
        target = getattr(target, name)
    described = inspect.signature(target)
    parts: list[str] = []
    kinds = set()
    for parameter in described.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.kind not in kinds:
            parts.append("*")
        kinds.add(parameter.kind)
        parts.append(written(parameter))
    returned = described.return_annotation
    tail = "" if isinstance(target, type) or returned is inspect.Signature.empty else f" -> {annotation(returned)}"
    line = f"{rest}({', '.join(parts)}){tail}"
    return line if len(line) <= 110 else f"{rest}(\n" + "".join(f"    {part},\n" for part in parts) + f"){tail}"


def written(parameter: inspect.Parameter) -> str:
    stars = "**" if parameter.kind is inspect.Parameter.VAR_KEYWORD else ""
    text = f"{stars}{parameter.name}"
    has_default = parameter.default is not inspect.Parameter.empty
    if parameter.annotation is not inspect.Parameter.empty:
        text += f": {annotation(parameter.annotation)}"
    if has_default:
        default = parameter.default
        said = json.dumps(default) if isinstance(default, str) else repr(default)
        text += f" = {'…' if said.startswith('<') else said}"
    return text


def annotation(given: Any) -> str:
    """An annotation as it is written in the code."""
    given = given.__forward_arg__ if isinstance(given, ForwardRef) else given  # of a named tuple
    return given.strip("'") if isinstance(given, str) else getattr(given, "__name__", str(given))


def rewritten(page: Path, text: str) -> str:
    """The page as it should be."""
    for name, make in generated().items():
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
        if begin in text:
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}{make()}\n{end}{rest.partition(end)[2]}"
    text = re.sub(
        r"(<!-- signature: ([^ ]+) -->\n)```python signature\n.*?```",
        lambda match: f"{match[1]}```python signature\n{signature(match[2])}\n```",
        text,
        flags=re.S,
    )
    if page == ERRORS:
        text = re.sub(
            r"^(### (\w+)\n\n)(?:> [^\n]*\n|>\n)*",
            lambda match: match[1] + quoted(inspect.cleandoc(getattr(errors, match[2]).__doc__)),
            text,
            flags=re.M,
        )
    return text


def quoted(docstring: str) -> str:
    return "".join(f"> {line}".rstrip() + "\n" for line in docstring.replace("``", "`").splitlines())


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_file()], ids=name_of)
def test_the_generated_parts_of_the_page_are_what_the_code_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == rewritten(page, text), f"{name_of(page)} is stale: run `PYTHONPATH=src python tests/test_docs.py`"


def test_everything_that_is_generated_stands_on_some_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in generated() if not re.search(rf"<!-- begin: {name} -->\n[^<]", text)] == []


def test_the_reference_has_every_public_name() -> None:
    text = PYTHON_API.read_text(encoding="utf-8") + ERRORS.read_text(encoding="utf-8")
    described = {*re.findall(r"^### (\w+)$", text, re.M), *re.findall(r"<!-- signature: (\w+) -->", text)}
    described |= set(re.findall(r"`(\w+)` is another name", text))
    assert set(agent_run_ledger.__all__) - described == set()


def test_the_reference_has_every_code_of_a_finding() -> None:
    files = ("engine/audit.py", "engine/audit_budgets.py", "verifying.py", "heads.py", "exporting.py")
    code = "".join((PACKAGE / file).read_text(encoding="utf-8") for file in files)
    codes = set(re.findall(r'(?:self\._?found|Finding)\([^"]*?, "(\w+)"', code))
    listed = section(PYTHON_API.read_text(encoding="utf-8"), "Finding").partition("`code` is one of")[2]
    assert set(re.findall(r"`(\w+)`", listed)) == codes


def test_every_error_and_warning_is_explained() -> None:
    classes = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, LedgerError | Warning) and value.__name__ == name
    ]
    sections = re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", ERRORS.read_text(encoding="utf-8"), re.M | re.S)
    assert [name for name, _ in sections] == classes
    bare = [name for name, text in sections if not re.search(r"\*\*(Do|Next)", text)]
    assert bare == [], "each says what to do"


def test_the_attributes_of_every_error_are_listed() -> None:
    text = ERRORS.read_text(encoding="utf-8")
    tree = ast.parse((PACKAGE / "errors.py").read_text(encoding="utf-8"))
    for definition in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        own = {
            target.attr
            for node in ast.walk(definition)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Attribute)
        }
        own |= {
            node.name for node in definition.body if isinstance(node, ast.FunctionDef) and node.decorator_list
        }  # properties
        listed = re.search(r"Attributes: ([^.]*)", section(text, definition.name))
        assert set(re.findall(r"`(\w+)`", listed[1] if listed else "")) == own, definition.name


# --- entries and schema -----------------------------------------------------------------------------------------------


@pytest.fixture
def rich(tmp_path: Path) -> Path:
    """A ledger in which every kind of entry occurs."""
    path = tmp_path / "agent.db"
    clock = Answering()
    options: dict[str, Any] = {"clock": clock, "heartbeat_seconds": 29.0}
    with AgentRunLedger(path, max_steps=8, loop_threshold=3, **options) as ledger, _undeclared_is_said():
        fill(ledger)
    with AgentRunLedger(path, policy=Patient(), budget=Budget(tokens=500, notice_at=0.5), **options) as ledger:
        fill_with_usage(ledger)
    with AgentRunLedger(path, durability="process", **options) as ledger:
        fill_side_by_side(ledger)
    with AgentRunLedger(path, durability="process", **options) as ledger:
        with ledger.open_run("talk", "talk") as run:
            said = [{"role": "user", "content": f"{number} " * 1_000} for number in range(10, 16)]
            for number in range(6):
                run.step("ask", {"messages": said[: number + 1]}, lambda messages: messages[-1]["content"])
        with packs_nothing(ledger).open_run("plain", "plain") as run:
            run.step("large", {}, lambda: "y" * 70_000)
    with AgentRunLedger(path, policy=Suspicious(max_repetitions=2), **options) as ledger:
        fill_by_others(ledger, clock)
        fill_by_forks(ledger)
        fill_by_workers(ledger, clock)
        fill_by_forgetting(ledger)
        fill_by_sharing(ledger)
    with RunLedger("pipeline", path, **options) as pipeline:
        pipeline.step("one")(lambda given: given)
        pipeline.step("two", depends_on=["one"])(lambda one: one)
        pipeline.execute(given=1)
    return path


def fill(ledger: AgentRunLedger) -> None:
    flaky = iter([ConnectionResetError("gone"), None])

    def fails() -> None:
        raise ValueError("no such invoice")

    def fails_once() -> str:
        if (error := next(flaky)) is not None:
            raise error
        return "there"

    def interrupted() -> None:
        raise KeyboardInterrupt

    def unstorable() -> object:
        return object()

    def step(run_id: str, tool: str, function: Callable[[], object], **options: Any) -> None:
        with contextlib.suppress(LedgerError, KeyboardInterrupt):
            ledger.execute_step(run_id, tool, {"tool": tool}, function, **options)

    with ledger.open_run("everything", "one") as run:
        run.now(), run.random(), run.uuid4()
        step("one", "read", lambda: "x", kind="model")
        step("one", "large", lambda: "y" * 70_000)
        step("one", "flaky", fails_once, retry=RetryPolicy())
        step("one", "poll", lambda: "again", may_repeat=True)
        step("one", "unstorable", unstorable)
        step("one", "interrupted", interrupted)
        step("one", "after", lambda: "after")
        run.result = {"$looks": "like a tag"}
    with contextlib.suppress(KeyError), ledger.open_run("parked", "parked"):
        raise KeyError("x")
    for name in ("loop", "spent", "aborted", "fatal", "cancelled", "asked", "undeclared", "doubt", "exhausted"):
        ledger.create_run(name, name)
    for _ in range(4):
        step("loop", "same", fails)
    for number in range(9):
        step("spent", f"tool {number}", lambda: 1)
    ledger.abort_run("aborted", "no reason")
    step("fatal", "fails", fails, fatal=(ValueError,))
    ledger.cancel("cancelled", by="ann", reason="enough")
    step("asked", "asks for the end", lambda: ledger.cancel("asked"))
    for run_id, effect in (("undeclared", None), ("doubt", Effect.MUTATE)):
        step(run_id, "interrupted", interrupted, effect=effect)
        ledger.create_run(run_id, run_id)
        step(run_id, "interrupted", interrupted, effect=effect)
    for _ in range(5):
        step("exhausted", "fails", fails)
        with contextlib.suppress(LedgerError):
            ledger.create_run("exhausted", "exhausted")


def fill_by_forgetting(ledger: AgentRunLedger) -> None:
    """What is said of a run that has forgotten one step, and of one that has forgotten everything."""
    for run_id in ("forgets one", "forgets all"):
        with ledger.open_run("forgets", run_id) as run:
            run.step("look", {"at": "this"}, lambda at: at)
    ledger.forget("forgets one", 1, by="ann", reason="asked to")
    ledger.forget("forgets all", everything=True)


class Patient(LoopDetectorPolicy):
    """Says something before it refuses anything."""

    def __init__(self) -> None:
        super().__init__(reactions={"suspected": "notice", "certain": "notice"})


def fill_with_usage(ledger: AgentRunLedger) -> None:
    """What calls use, and what a run is told before it ends."""
    told = {"model": "m", "usage": {"prompt_tokens": 200, "completion_tokens": 200}}

    @ledger.tool(kind="model", max_tokens=10)
    async def think(n: int) -> int:
        return n

    @ledger.tool(effect=Effect.READ)
    async def fail() -> None:
        raise ValueError("no such page")

    @ledger.agent()
    async def goes_round(thoughts: int) -> None:
        for _ in range(3):
            with contextlib.suppress(StepFailed):
                await fail()
        thinking = [asyncio.create_task(think(n)) for n in range(thoughts)]
        for first in thinking[:1]:
            await first  # the second has its outcome, too, and waits for its turn
        with contextlib.suppress(CallBlocked):
            await fail()
        await asyncio.gather(*thinking)

    with ledger.open_run("pays", "pays") as run:
        run.step("forgets", {}, lambda: "?", kind="model", max_tokens=50, max_usd="0.1")
        run.step("ask", {}, lambda: told, kind="model", max_tokens=100)
    ledger.run(goes_round, 0, run_id="goes round")
    ledger.run(goes_round, 2, run_id="goes round beside thoughts")


def fill_side_by_side(ledger: AgentRunLedger) -> None:
    """What only agents write: whose run it is, what was interrupted, what was seen and acted upon by then."""

    @ledger.tool(effect=Effect.READ)
    async def look(n: int) -> int:
        return n

    @ledger.tool(effect=Effect.READ)
    async def stay() -> None:
        await asyncio.sleep(3600)

    @ledger.tool(effect=Effect.READ)
    async def fail() -> None:
        raise ValueError("no such invoice")

    @ledger.tool(effect=Effect.IDEMPOTENT, timeout=0.01, retry=RetryPolicy(base=0.0))
    def dawdle() -> str:
        threading.Event().wait(0.1)
        return "late"

    @ledger.agent()
    async def child() -> int:
        return await look(0)

    @ledger.agent()
    async def parent(run: Run) -> None:
        await child()
        for value in (run.now, run.random):
            with contextlib.suppress(StepFailed):
                await fail()
            value()
        first, second, third = (asyncio.create_task(call) for call in (look(1), look(2), stay()))
        await first  # the second has its outcome, too, and waits for its turn
        second.cancel()
        third.cancel()
        unwritten = asyncio.create_task(look(4))
        await asyncio.sleep(0)
        unwritten.cancel()
        await asyncio.gather(second, third, unwritten, return_exceptions=True)
        await look(5)

    @ledger.agent()
    def waits() -> str:
        return dawdle()

    ledger.run(parent, run_id="parent")
    assert ledger.run(waits, run_id="waits") == "late"


class Suspicious(LoopDetectorPolicy):
    """Suspects what others are certain of."""

    def rule(self) -> Rule:
        found = super().rule()

        class Suspects:
            continues, remember, reach = found.continues, found.remember, found.reach

            def observe(self, call: Call) -> Verdict:
                said = found.observe(call)
                return said if said.level == "ok" else Verdict("suspected", said.rule, said.reason, said.evidence)

        return Suspects()


class Answering(FakeClock):
    """A clock that whoever sleeps by it is answered."""

    answer: Callable[[], object] = staticmethod(lambda: None)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.answer()


def fill_by_workers(ledger: AgentRunLedger, clock: Answering) -> None:
    """What workers do with runs of a queue: tried again, with children, and ended with them."""

    @ledger.agent()
    def child(number: int) -> int:
        return number

    @ledger.agent(retry=RetryPolicy(base=0, cap=0))
    def parent() -> int:
        if child(1):
            raise ValueError("once more")
        return 1

    for run_id in ("retried", "ended with its child"):
        ledger.submit(parent, run_id=run_id, priority=1, key="acme")
        work_once(ledger, "parent")
    ledger.cancel("ended with its child", children=True, by="ann")
    pump(ledger, clock, until=5.0)


def fill_by_others(ledger: AgentRunLedger, clock: Answering) -> None:
    """What receivers, operators and time have to do with a run."""
    answers = iter([Receipt.found("done"), *4 * [Receipt.unknown("away")], Receipt.absent()])

    def asks(key: str, arguments: dict[str, Any]) -> Receipt:
        return next(answers)

    def interrupted() -> None:
        raise KeyboardInterrupt

    def lost() -> None:
        raise ConnectionResetError

    def step(run_id: str, function: Callable[[], object], tool: str = "pay", **options: Any) -> None:
        with contextlib.suppress(LedgerError, KeyboardInterrupt):
            ledger.execute_step(run_id, tool, {}, function, **options)

    mutates: dict[str, Any] = {"effect": Effect.MUTATE, "receipt": asks}
    ledger.create_run("found", "found")
    step("found", lost, **mutates)
    for function in (lost, lambda: "done"):
        ledger.create_run("unknown, then absent", "unknown")
        step("unknown", function, **mutates)
    ledger.create_run("continued", "continued")
    for _ in range(2):
        step("continued", lost, effect=Effect.IDEMPOTENT, key_window=60)
    ledger.create_run("taken over", "taken over")
    answers = iter([Receipt.absent()])
    for function in (interrupted, lambda: "done"):
        step("taken over", function, **mutates)
    ledger.create_run("unproven", "unproven")
    step("unproven", lambda: int("x"), effect=Effect.MUTATE)
    for run_id in ("did", "did not"):
        ledger.create_run(run_id, run_id)
        step(run_id, interrupted, effect=Effect.MUTATE)
        ledger.resolve(run_id, 1, **({"output": 7} if run_id == "did" else {"executed": False}), by="ann")
    ledger.create_run("asked", "asked for too much")
    step("asked for too much", lambda: ledger.release("asked for too much"))
    ledger.create_run("halted", "halted")
    for _ in range(3):
        step("halted", lambda: "pending", "poll")
    ledger.release("halted", by="ann")
    with ledger.open_run("rests", "rests") as run:
        run.sleep(1)
        ledger.signal("rests", "paid", {"amount": 120})
        run.wait_for("paid")
        with contextlib.suppress(LedgerError):
            run.wait_for("paid", timeout=1)
        for says in (ledger.approve, ledger.deny):

            def answer(says: Callable[..., None] = says) -> None:
                for asked in ledger.approvals("rests"):
                    says("rests", asked.name, asked.digest, by="ann")

            clock.answer = answer
            with contextlib.suppress(LedgerError):
                run.approve("pay", {"amount": 120})
    clock.answer = lambda: None


def fill_by_forks(ledger: AgentRunLedger) -> None:
    """What is carried from one run to another."""
    limits = Budget(tokens=100, usd=1, seconds=60, deadline=datetime(2100, 1, 1, tzinfo=UTC), notice_at=0.9)
    ledger.redrive("spent", budget=limits, max_steps=20)
    ledger.fork("parent", ledger.get_run("parent").total_steps + 1)
    ledger.fork("continued", 2)
    ledger.fork("rests", 1)  # its signals are there to be taken once more
    for run_id in ("one", "goes round", "undeclared", "found", "rests", "taken over"):
        ledger.fork(run_id, ledger.get_run(run_id).total_steps + 1)


def fill_by_sharing(ledger: AgentRunLedger) -> None:
    """A budget of several runs, which is raised."""

    @ledger.tool(kind="model", max_usd="0.1", max_tokens=100)
    def shared(number: int) -> int:
        return number

    @ledger.agent()
    def shares(number: int) -> int:
        return shared(number)

    for number, limit in enumerate((1, 2)):

        @ledger.agent(
            name=f"parent of {number}", budget=Budget(usd=1, within=ledger.budget("team", usd=limit, tokens=1000))
        )
        def begins(number: int) -> int:
            return shares(number) + shared(2 * number)

        ledger.run(begins, number)


def verifier() -> Callable[[str], list[str]]:
    """The verifier that the page shows, as its reader would type it."""
    (block,) = (block for block in blocks(SCHEMA) if block.language == "python" and "def verify(" in block.text)
    names: dict[str, Any] = {}
    exec(compile("\n" * (block.line - 1) + block.text, str(SCHEMA), "exec"), names)
    imported = {node.names[0].name for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Import)}
    assert imported == {"hashlib", "json", "sqlite3", "zlib"}
    found: Callable[[str], list[str]] = names["verify"]
    return found


def test_a_verifier_written_after_the_page_agrees_with_a_whole_ledger(rich: Path) -> None:
    assert verifier()(str(rich)) == []


def blob(text: str) -> str:
    return f"CAST({text} AS BLOB)"


quote = """'{"tool":"other"}'"""


@pytest.mark.parametrize(
    ("trigger", "damage"),
    [
        (
            "entries_are_never_changed",
            f"UPDATE entries SET body = {blob('replace(CAST(body AS TEXT), 1, 7)')} WHERE seq = 5",
        ),
        ("entries_are_never_changed", f"UPDATE entries SET payload = {blob(quote)} WHERE kind = 'intent'"),
        ("entries_are_never_changed", "UPDATE entries SET roots = zeroblob(32) WHERE seq = 1"),
        ("entries_are_never_changed", "UPDATE entries SET fingerprint = zeroblob(32) WHERE kind = 'intent'"),
        ("entries_are_never_deleted", "DELETE FROM entries WHERE seq = 2"),
        ("entries_are_never_changed", "UPDATE entries SET payload = substr(payload, 2) WHERE encoding = 'packed'"),
        ("payloads_are_never_changed", f"UPDATE payloads SET bytes = {blob(quote)}"),
        ("secrets_are_never_changed", "UPDATE secrets SET secret = zeroblob(32)"),
    ],
)
def test_a_verifier_written_after_the_page_finds_what_was_changed(trigger: str, damage: str, rich: Path) -> None:
    with contextlib.closing(sqlite3.connect(rich)) as connection, connection:
        connection.execute(f"DROP TRIGGER {trigger}")
        assert connection.execute(damage).rowcount > 0
    assert verifier()(str(rich)) != []


def test_every_kind_of_entry_and_every_field_of_its_body_is_described(rich: Path) -> None:
    text = SCHEMA.read_text(encoding="utf-8")
    always = set(re.findall(r"^\| `(\w+)`", section(text, "Fields of every body"), re.M))
    described = {
        kind: set(re.findall(r"`(\w+)`", fields)) | always
        for kind, fields in re.findall(r"^\| `(\w+)` \|[^|\n]*\|([^|\n]*)\|", section(text, "Kinds of entries"), re.M)
    }
    found: dict[str, set[str]] = {}
    with contextlib.closing(sqlite3.connect(rich)) as connection:
        for kind, body in connection.execute("SELECT kind, body FROM entries"):
            found.setdefault(kind, set()).update(json.loads(body))
    assert found.keys() == described.keys()
    missing = {kind: found[kind] - described[kind] for kind in found if found[kind] - described[kind]}
    invented = {
        kind: described[kind] - always - found[kind] for kind in found if described[kind] - always - found[kind]
    }
    assert (missing, invented) == ({}, {})


def test_every_column_of_every_table_and_view_is_described(rich: Path) -> None:
    text = SCHEMA.read_text(encoding="utf-8")
    with contextlib.closing(sqlite3.connect(rich)) as connection:
        for name, kind in connection.execute("SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view')"):
            columns = [column for _, column, *_ in connection.execute(f"PRAGMA table_info({name})")]
            if kind == "table":
                assert re.findall(r"^\| `(\w+)`", section(text, f"Table {name}"), re.M) == columns, name
            elif f"### View {name}\n" in text:
                assert re.findall(r"`(\w+)`", section(text, f"View {name}").partition("\n\n")[0]) == columns, name
    assert {"agent_runs", "run_steps", "agent_step_journal"} == set(re.findall(r"^### View (\w+)", text, re.M))


def section(text: str, heading: str) -> str:
    found = re.search(rf"^(#+) {re.escape(heading)}\n+(.*?)(?=^#|\Z)", text, re.M | re.S)
    assert found, f"there is no section {heading!r}"
    return found[2]


def test_the_numbers_on_the_page_are_those_of_the_code() -> None:
    from agent_run_ledger.rules.canonical import MAX_NESTING
    from agent_run_ledger.rules.names import MAX_BYTES
    from agent_run_ledger.stores.schema import APPLICATION_ID, SCHEMA_VERSION
    from agent_run_ledger.stores.sqlite_log import LARGE_PAYLOAD_BYTES

    text = SCHEMA.read_text(encoding="utf-8")
    assert f"0x{APPLICATION_ID:X}" in text
    assert f"`user_version` is {SCHEMA_VERSION}" in text
    assert f"{LARGE_PAYLOAD_BYTES // 1024} KiB" in text
    limits = (DOCS / "explanation" / "limits.md").read_text(encoding="utf-8")
    assert f"{MAX_NESTING} containers" in limits
    assert f"{MAX_BYTES} bytes" in limits
    assert "16 MiB" in limits


# --- durability -------------------------------------------------------------------------------------------------------


class Observed(MemoryStore):
    """Remembers of each append what it was of, and whether it had to be synced."""

    def __init__(self) -> None:
        self.answering = Answering()
        super().__init__(clock=self.answering)
        self.synced: dict[str, set[bool]] = {}

    def append(self, run_id: str, token: int, inbox: int, rows: Sequence[Row], *, synced: bool) -> bool:
        kinds = [row.kind for row in rows]
        if rows[-1].kind == "intent":
            is_read = json.loads(rows[-1].body).get("effect") == "READ"
            kinds = ["intent of an `Effect.READ` step" if is_read else "intent of any other step"]
        self.synced.setdefault(" and ".join(kinds), set()).add(synced)
        return super().append(run_id, token, inbox, rows, synced=synced)


@pytest.mark.parametrize("durability", ["full", "process"])
def test_what_is_synced_is_what_the_table_says(durability: Literal["full", "process"]) -> None:
    stores = Observed(), Observed()
    options: dict[str, Any] = {"durability": durability, "heartbeat_seconds": 29.0}
    with AgentRunLedger(stores[0], 8, clock=stores[0].clock, **options) as ledger, _undeclared_is_said():
        fill(ledger)
    options["policy"] = Suspicious(max_repetitions=2)
    with AgentRunLedger(stores[1], clock=stores[1].clock, **options) as ledger, _undeclared_is_said():
        fill_by_others(ledger, stores[1].answering)
    synced: dict[str, set[bool]] = {}
    for kinds, observed in (each for store in stores for each in store.synced.items()):
        synced.setdefault(kinds, set()).update(observed)
    page = (DOCS / "reference" / "durability.md").read_text(encoding="utf-8")
    column = {"full": 2, "process": 3}[durability]
    table = {cells[1].strip(): cells[column].strip() for line in page.splitlines() if (cells := line.split("|"))[3:]}
    rows = {
        "outcome": "outcome",
        "value": "recorded value (`run.now()` and the like)",
        "parked": "parking",
        "refused": "refusal by the breaker or the budget, attempts used up",
        "exhausted": "refusal by the breaker or the budget, attempts used up",
        "finished": "end of a run: finished, aborted, cancelled by its owner",
        "aborted": "end of a run: finished, aborted, cancelled by its owner",
        "cancelled": "end of a run: finished, aborted, cancelled by its owner",
        "outcome and aborted": "end of a run together with an outcome: a fatal error, a request to cancel",
        "outcome and cancelled": "end of a run together with an outcome: a fatal error, a request to cancel",
        **dict.fromkeys(
            ("asked", "answered", "answered and outcome", "answered and parked", "outcome and intent and asked"),
            "question to a receipt, and its answer with what follows from it",
        ),
        "intent and waiting": "beginning of a durable wait",
        **dict.fromkeys(
            ("resolved", "resolved and outcome", "released", "signal", "intent and waiting and signal"),
            "what an operator or a sender asked for, as an entry",
        ),
        "outcome and declined": "what an operator or a sender asked for, as an entry",
    }
    assert synced.keys() - rows.keys() == {"intent of an `Effect.READ` step", "intent of any other step"}
    for kinds, observed in synced.items():
        assert {"synced" if each else "written" for each in observed} == {table[rows.get(kinds, kinds)]}, kinds


# --- the page on deaths -----------------------------------------------------------------------------------------------


def test_a_mutating_step_in_doubt_parks_and_is_not_dispatched_again() -> None:
    """The sentence of the limits page that costs its readers most."""
    store = MemoryStore(clock=FakeClock())
    calls: list[int] = []

    def pays() -> None:
        calls.append(1)
        raise KeyboardInterrupt

    ledger = AgentRunLedger(store, heartbeat_seconds=29.0)
    ledger.create_run("pay", "r")
    with pytest.raises(KeyboardInterrupt):
        ledger.execute_step("r", "pay", {}, pays, effect=Effect.MUTATE)
    for _ in range(2):
        ledger.create_run("pay", "r")
        with pytest.raises(StepInDoubt):
            ledger.execute_step("r", "pay", {}, pays, effect=Effect.MUTATE)
    assert (len(calls), ledger.get_run("r").status) == (1, "BLOCKED")
    ledger.close()


def write() -> None:
    """Write the generated parts of every page anew."""
    parser = argparse.ArgumentParser(description=write.__doc__)
    parser.parse_args()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := rewritten(page, text)) != text:
            page.write_text(new, encoding="utf-8")
            sys.stdout.write(f"{name_of(page)}\n")


if __name__ == "__main__":
    write()
