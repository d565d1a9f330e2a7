"""The benchmarks measure what they say: their arithmetic, their floor, their subjects, and the shape of what they leave behind."""

from __future__ import annotations

import importlib.util
import json
import re
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.processes import environment

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
PROGRAMS = sorted(BENCHMARKS.rglob("*.py"))


def loaded(name: str) -> ModuleType:
    """A module of the benchmarks, which are no package, under a name that nobody else has."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


harness, tables = loaded("harness"), loaded("tables")


def told(*command: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    return harness.Bench(tmp_path, None, is_quick=True)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def bursts(*pairs: tuple[float, float]) -> list[Any]:
    """Bursts of three steps, by their floor and their median."""
    return [harness.Burst(floor, [p50 - 1, p50, p50 + 7]) for floor, p50 in pairs]


def test_the_half_of_the_bursts_counts_whose_floors_were_the_quickest() -> None:
    cost = harness.cost(bursts((10, 30), (90, 900), (10, 40), (80, 900), (12, 48)))
    assert cost["p50 µs"] == 40
    assert cost["of F"] == 4
    assert (cost["from"], cost["to"]) == (3.5, 4)
    assert cost["p99 µs"] == 48 + 7


def test_one_burst_is_enough() -> None:
    assert harness.cost(bursts((10, 30))) == {"p50 µs": 30, "p99 µs": 37, "of F": 3, "from": 3, "to": 3}


def test_subjects_are_compared_round_by_round() -> None:
    rounds = {"ours": bursts((1, 10), (1, 100), (1, 1_000)), "theirs": bursts((1, 20), (1, 200), (1, 3_000))}
    assert harness.times(rounds, "theirs", "ours") == 2
    assert harness.times(rounds, "ours", "theirs") == 0.5


def test_the_floor_is_told_as_it_was_around_the_others() -> None:
    rounds = {"ours": bursts((10, 1), (99, 1)), "theirs": bursts((20, 1), (98, 1))}
    assert harness.floor_cost(rounds) == {"p50 µs": 15, "of F": 1.0}


def test_a_resume_is_told_by_the_rounds_whose_probe_was_the_quickest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    rounds = [{"probe": {"ms": probe}, "resume": {"ms": 2 * probe}} for probe in (5.0, 1.0, 9.0, 3.0, 7.0)]
    assert [each["probe"]["ms"] for each in loaded("resuming").quiet(rounds)] == [1.0, 3.0, 5.0]


# --- subjects ---------------------------------------------------------------------------------------------------------


def commits(log: Path) -> int:
    """How many commits stand in a write-ahead log: frames that say how long the database is behind them."""
    data = log.read_bytes()
    (size,) = struct.unpack(">I", data[8:12])
    frames = range(32, len(data), 24 + size)
    return sum(struct.unpack(">I", data[at + 4 : at + 8])[0] > 0 for at in frames)


def test_a_step_of_the_floor_is_two_commits(bench: Any) -> None:
    place = bench.place()
    with bench.subject("floor", place, "NORMAL") as floor:
        floor.ask("steps", 1)
        before = commits(place.with_name("ledger.db-wal"))
        assert len(floor.ask("steps", 3)) == 3
        assert commits(place.with_name("ledger.db-wal")) == before + 6


def test_a_step_of_the_naive_ledger_is_two_commits_on_one_row(bench: Any) -> None:
    place = bench.place()

    def changes() -> int:
        return int(struct.unpack(">I", place.read_bytes()[24:28])[0])

    with bench.subject("naive", place) as naive:
        naive.ask("steps", 1)
        before = changes()
        naive.ask("steps", 3)
        assert changes() == before + 6
    with closing(sqlite3.connect(place)) as db:
        assert db.execute("SELECT DISTINCT status, output FROM steps").fetchall() == [
            ("COMPLETED", '{"ok": true, "total": 12}')
        ]
        assert db.execute("SELECT count(*) FROM steps").fetchone() == (4,)


def test_our_steps_take_turns_with_the_floor(bench: Any) -> None:
    wanted = {
        "plain": ("ledger", bench.place(), ["process"]),
        "async": ("ledger", bench.place(), ["process", "async"]),
        "long": ("ledger", bench.place(), ["process", "20"]),
    }
    with (
        bench.subject("floor", bench.place(), "NORMAL") as floor,
        bench.subjects(wanted, "steps", 1) as started,
    ):
        rounds = harness.in_turns(floor, started, rounds=2, seconds=0.0001)
    assert started.errors == {}
    assert {name: len(each) for name, each in rounds.items()} == {"plain": 2, "async": 2, "long": 2}
    assert all(len(burst.taken) == 9 for each in rounds.values() for burst in each)  # 10, less the first


def test_many_runs_side_by_side_all_make_their_steps(bench: Any) -> None:
    place = bench.place()
    with bench.subject("ledger", place, "process") as ledger:
        assert ledger.ask("throughput", 4, 5) > 0
    with closing(sqlite3.connect(place)) as db:
        assert db.execute("SELECT count(*) FROM entries WHERE kind = 'outcome'").fetchone() == (4 * 5,)


def test_a_conversation_is_new_in_every_turn_and_as_long_as_it_is_said_to_be() -> None:
    talk = loaded("subjects/talk")
    for kind in ("noise", "prose"):
        turns = list(talk.conversation(20, 10, 50, kind))
        assert {(len(asked), len(answered)) for asked, answered in turns} == {(10, 50)}
        assert len(set(turns)) == 20
        assert turns == list(talk.conversation(20, 10, 50, kind))


def test_a_run_that_died_is_taken_up_by_a_fresh_process(bench: Any) -> None:
    place, other = bench.place(), bench.place()
    bench.once("again", "steps", place, 5)
    bench.once("again", "steps", other, 1)
    for what in ("probe", "resume", "dispatch_read", "dispatch"):
        assert bench.once("again", what, place, 5, other).keys() == {"ms", "peak MiB"}
    with closing(sqlite3.connect(place)) as db:
        seen = db.execute("SELECT kind, count(*) FROM entries GROUP BY kind").fetchall()
    assert dict(seen)["outcome"] == 5, "nothing is made twice, and what was dispatched did not end"


@pytest.mark.parametrize("what", ["steps", "agent"])
def test_a_replay_makes_no_step_again(bench: Any, what: str) -> None:
    place, other = bench.place(), bench.place()
    bench.once("again", what, place, 5)
    bench.once("again", what, other, 1)
    assert bench.once("again", what, place, 5, other)["µs a step"] > 0
    with closing(sqlite3.connect(place)) as db:
        assert db.execute("SELECT count(*) FROM entries WHERE kind = 'intent'").fetchone() == (5,)


@pytest.mark.parametrize("what", ["bare", "front_door", "agent_run_ledger"])
def test_a_first_step_is_told_with_the_import_and_the_memory(tmp_path: Path, what: str) -> None:
    place = tmp_path / "ledger.db"
    imported, peak_kib = map(float, told(BENCHMARKS / "subjects" / "first.py", what, place).split())
    assert imported >= 0
    assert peak_kib > 1_000
    if what == "agent_run_ledger":
        with closing(sqlite3.connect(place)) as db:
            assert db.execute("SELECT count(*) FROM entries WHERE kind = 'outcome'").fetchone() == (1,)


def test_bytes_on_the_disk_are_those_of_all_files_when_the_log_is_in_the_database(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    disk, place = loaded("disk"), bench.place()
    with bench.subject("ledger", place, "process") as ledger:
        ledger.ask("turns", 3, 10, 100_000, "noise")
    assert place.with_name("ledger.db-wal").stat().st_size > 0, "it was killed"
    assert disk.kept(place) == sum(path.stat().st_size for path in place.parent.rglob("*") if path.is_file())
    assert disk.kept(place) > 3 * 75_000
    log = place.with_name("ledger.db-wal")
    assert not log.exists() or log.stat().st_size == 0


# --- what cannot be measured ------------------------------------------------------------------------------------------


def subject(program: str) -> Any:
    return harness.Subject([sys.executable, "-c", program], harness.installed())


def test_a_subject_that_does_not_start_says_why() -> None:
    with pytest.raises(harness.NotMeasured, match=r"^ModuleNotFoundError: No module named 'no_such_peer'$"):
        subject("import no_such_peer")


def test_a_subject_that_says_nothing_at_its_end_is_told_with_its_status() -> None:
    with pytest.raises(harness.NotMeasured, match=r"^exit status 3$"):
        subject("import os; os._exit(3)")


def test_a_subject_that_fails_on_the_way_leaves_the_others_alone(bench: Any) -> None:
    introduces = """print('{"name": "it", "promise": ""}', flush=True); """
    dies = subject(introduces + "input(); raise SystemExit('no more')")
    lives = subject(introduces + "[print([1.0, 2.0, 3.0], flush=True) for _ in iter(input, '')]")
    started = harness.Started({"dies": dies, "lives": lives})
    with bench.subject("floor", bench.place(), "NORMAL") as floor:
        rounds = harness.in_turns(floor, started, rounds=2, seconds=0.0001)
    lives.close()
    assert started.errors == {"dies": "no more"}
    assert {name: len(each) for name, each in rounds.items()} == {"lives": 2}


def test_a_peer_without_an_environment_is_an_error_of_that_peer(bench: Any) -> None:
    with pytest.raises(harness.NotMeasured, match=r"^its environment: "):
        bench.python("no-such-peer")


# --- what is left behind ----------------------------------------------------------------------------------------------


@pytest.fixture
def table() -> Any:
    wanted = (tables.Wanted("of F", at_most=3), tables.Wanted("of F", at_most=2.5, note="stretch"))
    made = tables.Table("steps", "A step", "What is timed.", {"p50 µs": 1, "of F": 2})
    made.add("ours", {"p50 µs": 1_234.56, "of F": 2.75}, *wanted)
    made.rows.append(tables.Row("theirs", note="survives", error=""))
    made.rows.append(tables.Row("gone", wanted=[tables.Wanted("of F", at_least=9)], error="No module named 'gone'"))
    return made


FACTS = {"commit": "abc", "when": "now", "machine": {"processor": "one"}}


def test_the_json_has_a_shape(table: Any) -> None:
    data = json.loads(json.dumps(tables.as_data([table], FACTS)))
    assert data["shape"] == tables.SHAPE
    assert data["commit"] == "abc"
    assert data["figures"] == {"steps": {"ours": {"p50 µs": 1_234.56, "of F": 2.75}}}
    assert [(each["row"], each["note"], each["figure"], each["met"]) for each in data["wanted"]] == [
        ("ours", "", 2.75, True),
        ("ours", "stretch", 2.75, False),
        ("gone", "", None, None),
    ]
    assert data["not_measured"] == {"steps, gone": "No module named 'gone'"}


def test_a_table_tells_what_is_wanted_and_whether_it_is_met(table: Any) -> None:
    text = tables.markdown(table)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == ["", "p50 µs", "of F", "wanted", "note"]
    assert rows[2] == ["ours", "1,234.6", "2.75", "of F ≤ 3: **yes**; of F ≤ 2.5 (stretch): no", ""]
    assert rows[4] == ["gone", "", "", "of F ≥ 9: not measured", "not measured: No module named 'gone'"]
    assert len({len(line) for line in text.splitlines() if line.startswith("|")}) == 1


def test_two_measurements_are_compared_figure_by_figure(table: Any, tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(tables.as_data([table], FACTS)))
    table.rows[0].figures = {"of F": 5.5, "p99 µs": 1.0}
    after.write_text(json.dumps(tables.as_data([table], FACTS)))
    assert list(tables.compared(json.loads(before.read_text()), json.loads(after.read_text()))) == [
        ("steps", "ours", "of F", 2.75, 5.5)
    ]
    said = told(BENCHMARKS / "compare.py", before, after)
    assert re.search(r"^ +ours +of F +2\.75 +5\.50 +2\.00$", said, re.MULTILINE)
    assert "2.00" not in told(BENCHMARKS / "compare.py", before, after, "--beyond", "100")


def test_a_part_is_measured_printed_and_written_as_page_and_json(tmp_path: Path) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "results" / "figures.json"
    said = told(BENCHMARKS, "--quick", "--only", "breaker", "--json", figures, "--page", page)
    data = json.loads(figures.read_text(encoding="utf-8"))
    assert data["shape"] == tables.SHAPE
    assert data["broken"] == {}
    assert set(data["figures"]) == {"breaker"}
    assert {"processor", "cores", "system", "filesystem", "python", "sqlite"} <= data["machine"].keys()
    written = page.read_text(encoding="utf-8")
    for row in data["figures"]["breaker"]:
        assert f"| {row} " in said
        assert f"| {row} " in written


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.relative_to(BENCHMARKS).as_posix())
def test_every_program_compiles(program: Path) -> None:
    compile(program.read_text(encoding="utf-8"), program, "exec")


def test_the_parts_are_listed() -> None:
    lines = told(BENCHMARKS, "--list").splitlines()
    assert len(lines) >= 10
    assert all(re.match(r"[a-z-]+ +\S.+\.$", line) for line in lines), lines


def requirements() -> Iterator[Path]:
    return (ROOT / "requirements").glob("bench-*.in")


def test_every_peer_has_a_program_and_an_environment() -> None:
    assert {f"bench-{peer}" for peer in harness.PEERS.values()} == {path.stem for path in requirements()}
    assert all((BENCHMARKS / "subjects" / f"{program}.py").is_file() for program in harness.PEERS)


@pytest.mark.parametrize("asked", sorted(requirements()), ids=lambda path: path.stem)
def test_every_peer_is_pinned_with_hashes(asked: Path) -> None:
    text = asked.with_suffix(".txt").read_text(encoding="utf-8")
    pinned = re.split(r"\n(?=[a-z0-9])", text.strip(), flags=re.IGNORECASE)
    assert [each for each in pinned if not re.match(r"[\w.-]+==\S+ .*--hash=sha256:", each, re.DOTALL)] == []
    names = {re.split(r"[\[<>=~ ]", line)[0] for line in asked.read_text().splitlines() if line and line[0] != "#"}
    assert names <= {each.partition("==")[0] for each in pinned}
