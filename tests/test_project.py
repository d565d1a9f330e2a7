"""What the project promises as a whole: no dependencies, a light import, and nothing that leads users astray."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "agent_run_ledger"
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def imported_roots(module: Path) -> Iterator[tuple[int, str]]:
    """Line and top-level name of every import in a module, inside functions too."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"), module)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            yield node.lineno, node.module.partition(".")[0]


def project_files() -> list[Path]:
    """Every file that is committed, or would be by `git add --all`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    paths = (ROOT / name for name in listed.stdout.decode().split("\0") if name)
    return [path for path in paths if path.is_file()]


def lines_that_match(pattern: str) -> list[str]:
    wanted = re.compile(pattern, re.IGNORECASE)
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in project_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
        if wanted.search(line)
    ]


def in_a_fresh_interpreter(code: str, *options: str) -> str:
    program = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); {code}"
    done = subprocess.run([sys.executable, *options, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- no dependencies --------------------------------------------------------------------------------------------------


def test_the_core_imports_only_the_standard_library() -> None:
    extra = (
        PACKAGE / "stores" / "postgres"
    )  # of the extra `postgres`: loaded for nobody who gives no address of a server
    modules = sorted(path for path in PACKAGE.rglob("*.py") if extra not in path.parents)
    assert modules
    allowed = sys.stdlib_module_names | {"agent_run_ledger"}
    elsewhere = {
        (PACKAGE / "testing" / "pytest_plugin.py", "pytest"),  # nobody but pytest loads it
        (
            PACKAGE / "signing.py",
            "cryptography",
        ),  # of the extra `sign`: loaded when somebody makes a Signer or a Verifier
        (PACKAGE / "catalogue.py", "genai_prices"),  # of the extra `prices`: loaded when somebody makes a GenaiPrices
        (PACKAGE / "redacting.py", "kingfisher_sdk"),  # of the extra `guard`: loaded where a private list asks for it
        (
            PACKAGE / "stores" / "encryption.py",
            "cryptography",
        ),  # of the extra `crypto`: loaded when somebody makes an Encryption
    }
    foreign = [
        f"{module.relative_to(ROOT)}:{line}: {root}"
        for module in modules
        for line, root in imported_roots(module)
        if root not in allowed and (module, root) not in elsewhere
    ]
    assert foreign == []


def test_the_distribution_depends_on_nothing() -> None:
    assert PYPROJECT["project"]["dependencies"] == []
    assert "dependencies" not in PYPROJECT["project"].get("dynamic", [])


# --- a light import ---------------------------------------------------------------------------------------------------


def test_importing_the_package_loads_nothing_else() -> None:
    loaded = in_a_fresh_interpreter(
        "before = set(sys.modules); import agent_run_ledger; print(*sorted(set(sys.modules) - before))", "-I", "-S"
    )
    assert set(loaded.split()) <= {"agent_run_ledger", "__future__"}


def test_a_first_step_loads_nothing_that_it_does_not_use(tmp_path: Path) -> None:
    loaded = in_a_fresh_interpreter(
        "import sys; from agent_run_ledger import AgentRunLedger\n"
        f"ledger = AgentRunLedger({str(tmp_path / 'agent.db')!r})\n"
        "ledger.execute_step(ledger.create_run('goal'), 'fetch', {'id': 7}, lambda: {'total': 120})\n"
        "print(*sys.modules)",
        "-I",
        "-S",
    )
    dear = {
        "asyncio",
        "dataclasses",
        "importlib.resources",
        "inspect",
        "logging",
        "platform",
        "random",
        "socket",
        "tempfile",
        "uuid",
    }
    faces = {f"agent_run_ledger.{name}" for name in ("agents", "model", "pipeline", "proving", "settle", "usage")}
    assert not (dear | faces) & set(loaded.split())


def test_every_public_name_resolves() -> None:
    missing = in_a_fresh_interpreter(
        "import agent_run_ledger as package\n"
        "assert package.__all__\n"
        "print(*[name for name in package.__all__ if not hasattr(package, name)])",
        "-I",
    )
    assert missing.split() == []


def test_every_public_name_is_listed_once_and_shown_by_dir() -> None:
    wrong = in_a_fresh_interpreter(
        "import agent_run_ledger as package\n"
        "names = list(package.__all__)\n"
        "print(*[name for name in names if names.count(name) > 1 or name not in dir(package)])",
        "-I",
    )
    assert wrong.split() == []


def test_a_misspelt_public_name_is_an_attribute_error() -> None:
    in_a_fresh_interpreter(
        "import agent_run_ledger\n"
        "try:\n    agent_run_ledger.AgentRunLegder\n"
        "except AttributeError as error:\n    assert 'AgentRunLegder' in str(error)\n"
        "else:\n    raise SystemExit('it resolved')",
        "-I",
    )


def test_type_checkers_are_told_that_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


# --- nothing that leads astray ----------------------------------------------------------------------------------------


def test_nobody_is_told_to_install_the_package_by_name() -> None:
    """That name belongs to somebody else's package on the public index."""
    installs = r"\b(?:(?:pip3?|pipx|uv|poetry|pdm|conda)\b[^|&;`]*\b(?:install|add|run)|uvx)\b[^|&;`]*"
    assert lines_that_match(installs + r"[\s'\"]agent-run-ledger\b(?![-/]|\.\w)") == []


def test_no_file_names_a_package_index() -> None:
    """Who installs decides where from: pins carry hashes, so that any index will do."""
    hosts = r"pypi\.org|python[h]osted\.org|npm[j]s\.org"
    options = r"--(?:extra-|default-)?index[-]url|--find[-]links|--emit[-]index|(?:PIP|UV)_[A-Z_]*INDEX"
    assert lines_that_match(f"{hosts}|{options}") == []


def test_no_lock_file_of_a_tool_that_records_where_from() -> None:
    names = {path.name for path in project_files()}
    assert names.isdisjoint({"uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock", "pylock.toml"})


# --- pins and versions ------------------------------------------------------------------------------------------------


def pinned() -> dict[str, str]:
    """The text of each requirement in dev.txt, by name."""
    text = (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8")
    requirements = re.split(r"\n(?=[a-z0-9])", text.strip(), flags=re.IGNORECASE)
    return {requirement.partition("==")[0]: requirement for requirement in requirements}


def test_every_development_dependency_is_pinned_with_hashes() -> None:
    loose = [name for name, text in pinned().items() if not re.match(r"[\w.-]+==\S+ .*--hash=sha256:", text, re.DOTALL)]
    assert loose == []


def test_every_development_dependency_that_is_asked_for_is_pinned() -> None:
    lines = (ROOT / "requirements" / "dev.in").read_text(encoding="utf-8").splitlines()
    asked = {line.strip() for line in lines if line.strip() and not line.startswith("#")}
    assert asked <= pinned().keys()


def test_the_build_backend_is_the_pinned_one() -> None:
    (backend,) = PYPROJECT["build-system"]["requires"]
    assert pinned()["hatchling"].startswith(f"{backend} ")


def test_the_package_says_the_version_of_the_project() -> None:
    said = in_a_fresh_interpreter("import agent_run_ledger; print(agent_run_ledger.__version__)", "-I")
    assert said.strip() == PYPROJECT["project"]["version"]


def test_the_changelog_has_the_current_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = re.escape(PYPROJECT["project"]["version"])
    assert re.search(rf"^## \[?v?{version}\b", changelog, re.MULTILINE)


@pytest.mark.parametrize("verb", ["bench", "check", "clean", "demo", "format", "help", "test", "test-system"])
def test_make_help_lists_the_verb(verb: str) -> None:
    listed = subprocess.run(["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    assert re.search(rf"^make {verb}\s+\S", listed.stdout, re.MULTILINE)
