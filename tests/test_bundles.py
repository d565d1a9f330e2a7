"""Bundles: one file says everything of a run, two verifiers that share nothing agree on it, and a ledger takes it in byte for byte."""

from __future__ import annotations

import importlib.util
import json
import stat
import subprocess
import sys
import tracemalloc
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_run_ledger import (
    AgentRunLedger,
    BadBundle,
    BadNote,
    Budget,
    CopiedRun,
    CopyRefused,
    Effect,
    InvalidName,
    RetryPolicy,
    RunNotFound,
    Signer,
    StepFailed,
    TreeHead,
    VerificationReport,
    merkle,
    verify_bundle,
)
from support.ledgers import HOSTILE, Bench, raising, raw
from support.shell import Shell
from test_verify import every_kind_of_entry

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "docs" / "reference" / "verify_bundle.py"
RUN = "october"
SIGNER = Signer.generate("billing-host")
SECRETIVE = "4711-0815-SESAME"
"""What stands in arguments, outputs, the goal and a signal of the run, and nowhere else."""


KEYS = [pytest.param(None, id="no key"), pytest.param(SIGNER.verifier, id="key", marks=pytest.mark.slow)]
"""With a key each look at a bundle takes ten times as long: the script does Ed25519 in Python."""


def script() -> Any:
    """The verifier of the documentation, as a module."""
    spec = importlib.util.spec_from_file_location("verify_bundle_of_the_docs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DOCS = script()


def is_sound(path: Path, key: str | None = None) -> bool:
    """Whether `verify_bundle` finds nothing, and raises nothing but what it should."""
    try:
        report = verify_bundle(path, key=key)
    except BadBundle:
        return False
    assert report.ok == (report.findings == [])
    return report.ok


def is_sound_to_the_script(path: Path, key: str | None = None) -> bool:
    try:
        found, _, _ = DOCS.verify(path, key)
    except Exception:  # it says so itself: whatever a file of somebody else leads to
        return False
    return not found


def begun(ledger: AgentRunLedger, run_id: str = RUN) -> None:
    """A run with a retry, a failure, a signal and some results, which goes on."""
    ledger.create_run(f"reconcile {SECRETIVE}", run_id)
    ledger.execute_step(run_id, "fetch", {"card": SECRETIVE}, lambda card: [card], effect=Effect.READ)
    with pytest.raises(StepFailed):
        ledger.execute_step(
            run_id, "b", {}, raising(ValueError(SECRETIVE)), retry=RetryPolicy(max_attempts=2, base=0.0)
        )
    ledger.signal(run_id, "paid", {"by": SECRETIVE}, by="ann")
    ledger.execute_step(run_id, "c", {"n": 1}, lambda n: n)


def ended(ledger: AgentRunLedger, run_id: str = RUN) -> TreeHead:
    begun(ledger, run_id)
    ledger.finish_run(run_id, SECRETIVE)
    return ledger.tree_head(run_id)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench("sqlite", tmp_path) as opened:
        yield opened


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Bench]:
    (tmp_path / "other").mkdir()
    with Bench("sqlite", tmp_path / "other") as opened:
        yield opened


@pytest.fixture
def bundle(bench: Bench, tmp_path: Path) -> Path:
    """The bundle of an ended run with its secret, a head that was kept, and one that was signed with it."""
    ledger = bench.open()
    ended(ledger)
    kept = ledger.tree_head(RUN, 5).note(SIGNER)
    path = tmp_path / "run.arl"
    ledger.export(RUN, path, secret=True, heads=kept, signer=SIGNER)
    return path


def standing(bench: Bench, run_id: str = RUN) -> tuple[Any, ...]:
    """Everything that a storage has of a run, but for leases."""
    store = bench.store()
    head = store.head(run_id)
    assert head is not None
    return head.token, head.listing, head.inbox, bench.rows(run_id), store.secret(run_id), store.inbox(run_id, 0)


# --- out and in -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kinds", [("memory", "sqlite"), ("sqlite", "postgres"), ("postgres", "memory")], ids="-to-".join
)
def test_every_run_leaves_a_ledger_and_comes_into_another_byte_for_byte(tmp_path: Path, kinds: tuple[str, str]) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    with Bench(kinds[0], tmp_path / "here") as here, Bench(kinds[1], tmp_path / "there") as there:
        every_kind_of_entry(here)
        ended(here.open())
        ledger, target = here.open(), there.open()
        for run in ledger.runs():
            path = tmp_path / f"{run.run_id}.arl"
            head = ledger.export(run.run_id, path, secret=True, signer=SIGNER)
            assert head == ledger.tree_head(run.run_id)
            assert verify_bundle(path, head, key=None) == VerificationReport(
                ok=True, findings=[], entries=head.size, runs=1, heads=2, covered=head.size
            )
            assert DOCS.verify(path, SIGNER.verifier) == ([], head.size, head.root)
            if run.status not in ("COMPLETED", "FAILED", "DEAD_LETTER", "CANCELLED"):
                with pytest.raises(CopyRefused, match="it has not ended"):
                    target.import_run(path)
                continue
            place = there.store().place
            assert target.import_run(path) == CopiedRun(run.run_id, place, head.size, is_moved=False, was_there=False)
            assert standing(there, run.run_id) == standing(here, run.run_id)
            assert target.import_run(path) == CopiedRun(run.run_id, place, head.size, is_moved=False, was_there=True)
            again = tmp_path / "again.arl"
            target.export(run.run_id, again, secret=True, signer=SIGNER, overwrite=True)
            assert again.read_bytes() == path.read_bytes()
        assert len(target.runs()) >= 4
        assert target.verify().findings == []


def test_a_run_that_has_ended_answers_in_the_other_ledger_as_it_did_here(bundle: Path, other: Bench) -> None:
    ledger = other.open()
    ledger.import_run(bundle)
    assert ledger.get_run(RUN).result == SECRETIVE
    assert [step.tool_name for step in ledger.steps(RUN)] == ["fetch", "b", "c"]
    ledger.create_run(f"reconcile {SECRETIVE}", RUN)
    assert ledger.execute_step(RUN, "fetch", {"card": SECRETIVE}, raising(AssertionError())) == [SECRETIVE]


def test_a_run_that_goes_on_is_exported_as_it_stands_and_can_only_be_looked_at(
    bench: Bench, other: Bench, tmp_path: Path
) -> None:
    ledger = bench.open()
    begun(ledger)
    head = bench.open().export(RUN, tmp_path / "run.arl", secret=True)
    assert verify_bundle(tmp_path / "run.arl", head).ok
    with pytest.raises(CopyRefused, match="it has not ended"):
        other.open().import_run(tmp_path / "run.arl")
    assert other.open().runs() == []
    ledger.finish_run(RUN)  # it was disturbed in nothing
    assert ledger.verify(against=head).ok


def test_what_is_appended_meanwhile_is_not_in_it(bench: Bench, tmp_path: Path) -> None:
    ledger = bench.open(max_steps=1000)
    ledger.create_run("long", RUN)
    for number in range(300):
        ledger.execute_step(RUN, "t", {"n": number}, lambda n: n)
    size = ledger.tree_head(RUN).size

    def go_on(entries: int) -> None:
        ledger.signal(RUN, "more", None)
        ledger.execute_step(RUN, "more", {"n": entries}, lambda n: n)

    assert ledger.export(RUN, tmp_path / "run.arl", secret=True, told=go_on).size == size
    assert ledger.tree_head(RUN).size > size
    assert verify_bundle(tmp_path / "run.arl").entries == size
    assert DOCS.verify(tmp_path / "run.arl")[:2] == ([], size)


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_names_stay_data(bench: Bench, other: Bench, tmp_path: Path, name: str) -> None:
    name = name.translate(dict.fromkeys([*range(32), 0x7F]))  # with control characters it could not be made
    ended(bench.open(), name)
    bench.open().export(name, tmp_path / "run.arl", secret=True, signer=SIGNER)
    assert DOCS.verify(tmp_path / "run.arl", SIGNER.verifier)[0] == []
    assert other.open().import_run(tmp_path / "run.arl").run_id == name
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".arl") == ["run.arl"]


def test_a_file_is_there_whole_or_not_at_all_and_only_its_owner_may_read_it(bench: Bench, tmp_path: Path) -> None:
    ledger = bench.open()
    ended(ledger)
    path = tmp_path / "run.arl"
    path.write_text("kept")
    before = {each.name for each in tmp_path.iterdir()}
    with pytest.raises(CopyRefused, match="there is a file already"):
        ledger.export(RUN, path)
    assert path.read_text() == "kept"

    def dies(entries: int) -> None:
        raise KeyboardInterrupt

    long = bench.open(max_steps=1000, loop_threshold=1000)
    long.create_run("long", "long")
    for number in range(300):
        long.execute_step("long", "t", {"n": number}, lambda n: n)
    with pytest.raises(KeyboardInterrupt):
        long.export("long", path, overwrite=True, told=dies)
    assert path.read_text() == "kept"
    assert {each.name for each in tmp_path.iterdir()} == before
    ledger.export(RUN, path, overwrite=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {each.name for each in tmp_path.iterdir()} == before
    assert verify_bundle(path).ok


def test_the_ledger_itself_is_no_place_for_a_bundle(bench: Bench) -> None:
    ended(bench.open())
    with pytest.raises(CopyRefused, match="the ledger itself"):
        bench.open().export(RUN, bench.path, overwrite=True)


def test_a_token_that_no_epoch_comes_to_is_refused(bundle: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in bundle.read_text().splitlines()]
    lines[-2]["token"] = 2**53
    path = written(tmp_path / "changed.arl", lines, is_repaired=True)
    with pytest.raises(BadBundle, match="token"):
        verify_bundle(path)
    with pytest.raises(ValueError, match="token"):
        DOCS.verify(path)


def test_a_damaged_run_is_not_exported(bench: Bench, tmp_path: Path) -> None:
    ended(bench.open())
    with raw(bench.path, without_triggers=True) as connection:
        connection.execute("UPDATE entries SET body = replace(body, 'fetch', 'fetsh') WHERE seq = 2")
    with pytest.raises(CopyRefused, match="it is damaged"):
        bench.open().export(RUN, tmp_path / "run.arl")
    assert not list(tmp_path.glob("*arl*"))


def test_what_is_not_there_is_not_exported(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(RunNotFound):
        bench.open().export(RUN, tmp_path / "run.arl")
    with pytest.raises(InvalidName):
        bench.open().export("", tmp_path / "run.arl")


# --- what is left out -------------------------------------------------------------------------------------------------


def said_in(path: Path) -> str:
    """A bundle with everything in it that base64 hides."""
    text = path.read_text()
    for line in text.splitlines():
        for value in json.loads(line).values():
            if isinstance(value, str):
                try:
                    text += b64decode(value, validate=True).decode(errors="replace")
                except ValueError:
                    continue
    return text


def test_without_payloads_nothing_of_them_is_in_it_and_the_log_verifies(
    bench: Bench, other: Bench, tmp_path: Path
) -> None:
    ledger = bench.open()
    head = ended(ledger)
    path = tmp_path / "run.arl"
    ledger.export(RUN, path, secret=True)
    assert said_in(path).count(SECRETIVE) >= 6
    assert "ann" in said_in(path)
    ledger.export(RUN, path, payloads=False, signer=SIGNER, overwrite=True)
    said = said_in(path)
    assert SECRETIVE not in said
    assert '"ann' not in said
    secret = bench.store().secret(RUN)
    rows = bench.rows(RUN)
    for hidden in [secret, *(each for row in rows for each in (row.digest, row.fingerprint) if each)]:
        assert b64encode(hidden).decode() not in said
    payloads = sum(row.payload is not None for row in rows)
    assert verify_bundle(path, key=SIGNER.verifier) == VerificationReport(
        ok=True, findings=[], entries=head.size, runs=1, heads=1, covered=head.size, unchecked=payloads
    )
    assert DOCS.verify(path, SIGNER.verifier) == ([], head.size, head.root)
    with pytest.raises(CopyRefused, match="without its payloads"):
        other.open().import_run(path)


def test_without_the_secret_payloads_are_shown_and_not_proved(bench: Bench, other: Bench, tmp_path: Path) -> None:
    ledger = bench.open()
    ended(ledger)
    path = tmp_path / "run.arl"
    ledger.export(RUN, path)
    assert b64encode(bench.store().secret(RUN)).decode() not in path.read_text()
    report = verify_bundle(path)
    assert report.ok
    assert report.unchecked == sum(row.payload is not None for row in bench.rows(RUN))
    with pytest.raises(CopyRefused, match="without its secret"):
        other.open().import_run(path)


def test_the_secret_does_not_go_where_payloads_are_withheld(bench: Bench, tmp_path: Path) -> None:
    ended(bench.open())
    with pytest.raises(ValueError, match="can guess"):
        bench.open().export(RUN, tmp_path / "run.arl", payloads=False, secret=True)


def test_a_payload_that_was_erased_stays_erased(bench: Bench, other: Bench, tmp_path: Path) -> None:
    ended(bench.open())
    bench.open().forget(RUN, 1, by="ann", reason="asked to")
    bench.open().export(RUN, tmp_path / "run.arl", secret=True)
    assert verify_bundle(tmp_path / "run.arl").ok
    assert DOCS.verify(tmp_path / "run.arl")[0] == []
    other.open().import_run(tmp_path / "run.arl")
    assert standing(other) == standing(bench)
    lines = [line for line in (tmp_path / "run.arl").read_text().splitlines() if '"kind":"erased"' not in line]
    assert len(lines) < len((tmp_path / "run.arl").read_text().splitlines())


def test_a_run_that_was_forgotten_whole_is_still_a_sound_bundle(bench: Bench, tmp_path: Path) -> None:
    ended(bench.open())
    bench.open().forget(RUN, everything=True, by="ann", reason="asked to")
    bench.open().export(RUN, tmp_path / "run.arl")
    assert verify_bundle(tmp_path / "run.arl").ok
    assert DOCS.verify(tmp_path / "run.arl")[0] == []


# --- two verifiers that share nothing ---------------------------------------------------------------------------------

Line = dict[str, Any]


def written(path: Path, lines: list[Line], *, is_repaired: bool) -> Path:
    """A bundle of these lines; repaired, its last line is right again."""
    data = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
    if is_repaired and len(lines) > 1 and "sha256" in lines[-1]:
        body = data[: data[:-1].rindex(b"\n") + 1]
        data = body + json.dumps({"sha256": sha256(body).hexdigest()}, separators=(",", ":")).encode() + b"\n"
    path.write_bytes(data)
    return path


def lines_of(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def others(name: str, value: Any) -> Iterator[Any]:
    """Other values for a field: of the same type, and of types that do not belong there."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value - 1, -value - 5, 2**80)
    elif isinstance(value, str):
        yield from (value + "x", value[:-1], "")
        if name not in ("head", "kind", "who", "run", "position", "written_by", "bundle"):
            data = bytearray(b64decode(value)) if name != "sha256" else bytearray(bytes.fromhex(value))
            if data:
                data[len(data) // 2] ^= 4
                yield data.hex() if name == "sha256" else b64encode(data).decode()
            yield b64encode(bytes(32)).decode()
        elif name == "head":
            yield from (
                value.replace("\n5\n", "\n4\n"),
                value[:90] + "AAAA" + value[94:],
                value.replace("october", "octobes"),
            )
    elif isinstance(value, list):
        yield from ([], value[1:], value[::-1], [*value, b64encode(bytes(32)).decode()], [1])
    elif value is None:
        yield from ("eA==", b64encode(bytes(32)).decode(), 1, "", "1")
    yield from ({}, [], 1.5, True, "\ud800", "\u00e4")
    if value is not None:
        yield None


def fields_of(lines: list[Line]) -> Iterator[tuple[int, str, Any, Callable[[Any], Line]]]:
    """Each field of each line, those of the listing, too: where it is, and how the line is with another value."""

    def replaced(line: Line, name: str) -> Callable[[Any], Line]:
        return lambda value: line | {name: value}

    for number, line in enumerate(lines):
        for name, value in line.items():
            if name == "listing":
                for part, inner in value.items():
                    yield (
                        number,
                        part,
                        inner,
                        lambda new, line=line, part=part: line | {"listing": line["listing"] | {part: new}},
                    )
            yield number, name, value, replaced(line, name)


UNBOUND = {"written_by", "who", "at"}
"""Of a file whose last line is right nobody can say whether these were changed. The inbox proves nothing, in a ledger neither."""


def is_bound(line: Line, name: str, new: Any) -> bool:
    if name == "sha256":  # which is repaired
        return False
    if name == "secret":  # who takes it out takes with it what held the payloads to the log, and it is said so
        return new is not None
    if name == "token":
        return not (type(new) is int and line["token"] <= new < 2**63)
    return not (name in UNBOUND or ("request" in line and name in ("kind", "payload")))


@pytest.mark.parametrize("variant", ["whole", "without secret", "without payloads"])
@pytest.mark.parametrize("key", KEYS)
def test_two_verifiers_agree_on_a_bundle_in_which_any_one_field_was_changed(
    bench: Bench, tmp_path: Path, variant: str, key: str | None
) -> None:
    path, changed = tmp_path / "run.arl", tmp_path / "changed.arl"
    ledger = bench.open()
    ended(ledger)
    options: dict[str, Any] = {
        "whole": {"secret": True},
        "without secret": {},
        "without payloads": {"payloads": False},
    }[variant]
    ledger.export(RUN, path, heads=ledger.tree_head(RUN, 5).note(SIGNER), signer=SIGNER, **options)
    lines = lines_of(path)
    assert is_sound(written(changed, lines, is_repaired=True), key)
    assert changed.read_bytes() == path.read_bytes()
    assert is_sound_to_the_script(changed, key)
    accepted = set()
    for number, name, value, remade in fields_of(lines):
        if key is not None and "seq" in lines[number] and number % 4:
            continue  # it takes long to look at signatures, and they say nothing new of every entry
        for new in others(name, value):
            if (type(new), new) == (type(value), value):
                continue
            mutant = [*lines[:number], remade(new), *lines[number + 1 :]]
            verdict = is_sound(written(changed, mutant, is_repaired=True), key)
            assert verdict == is_sound_to_the_script(changed, key), (number, name, new)
            if verdict:
                accepted.add((name, is_bound(lines[number], name, new)))
            if verdict or number % 5 == 0:
                assert not is_sound(written(changed, mutant, is_repaired=False), key), (number, name, new)
                assert not is_sound_to_the_script(changed, key), (number, name, new)
    free = {name for name, is_wrong in accepted if is_wrong}
    if variant == "whole":  # what is signed is not looked at without a key
        assert free <= ({"head"} if key is None else set())
    else:
        assert free <= {"head", "secret", "payload", "payloads", "digest", "fingerprint"}


@pytest.mark.parametrize("key", KEYS)
def test_two_verifiers_agree_on_a_bundle_whose_lines_were_moved(bundle: Path, tmp_path: Path, key: str | None) -> None:
    lines, changed = lines_of(bundle), tmp_path / "changed.arl"
    size = len(lines)
    mutants = [lines[:first] + lines[last:] for first in range(size) for last in range(first + 1, size + 1)]
    mutants += [[*lines[:number], lines[number], *lines[number:]] for number in range(size)]
    for one in range(size):
        for two in range(one + 1, size):
            swapped = list(lines)
            swapped[one], swapped[two] = swapped[two], swapped[one]
            mutants += [swapped, [*lines[:two], lines[one], *lines[two:]]]
    accepted = []
    for mutant in mutants:
        verdict = is_sound(written(changed, mutant, is_repaired=True), key)
        assert verdict == is_sound_to_the_script(changed, key), mutant
        assert not is_sound(written(changed, mutant, is_repaired=False), key)
        if verdict:
            accepted.append(mutant)
    # Heads may be left out, doubled and in any order: what is left of them says what it says.
    without = [[line for line in mutant if "head" not in line and "sha256" not in line] for mutant in accepted]
    assert without == [[line for line in lines if "head" not in line and "sha256" not in line]] * len(accepted)
    assert accepted
    assert key is None or all("head" in mutant[1] for mutant in accepted)


def test_a_file_that_was_cut_off_anywhere_is_said_to_be_so(bundle: Path, tmp_path: Path) -> None:
    data, cut = bundle.read_bytes(), tmp_path / "cut.arl"
    ends = [number for number, each in enumerate(data) if each == 10]
    for length in {*range(0, len(data), 61), *ends, *(end + 1 for end in ends[:-1])}:
        cut.write_bytes(data[:length])
        with pytest.raises(BadBundle, match=r"cut off|is empty|no JSON|no bundle"):
            verify_bundle(cut)
        assert not is_sound_to_the_script(cut)
    for more in (b"\n", b"{}\n", data, data[ends[-2] + 1 :]):
        cut.write_bytes(data + more)
        with pytest.raises(BadBundle, match=r"something stands behind its end"):
            verify_bundle(cut)
        assert not is_sound_to_the_script(cut)


def test_every_flipped_bit_is_found_by_both(bundle: Path, tmp_path: Path) -> None:
    data, flipped = bundle.read_bytes(), tmp_path / "flipped.arl"
    for place in range(0, len(data), 13):
        flipped.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        assert not is_sound(flipped)
        assert not is_sound_to_the_script(flipped)


def test_bytes_are_spelt_in_one_way(bundle: Path, tmp_path: Path) -> None:
    lines, changed, seen = lines_of(bundle), tmp_path / "changed.arl", 0
    for number, name, value, remade in fields_of(lines):
        if not isinstance(value, str) or not value.endswith("=") or name == "head":
            continue
        at = len(value.rstrip("=")) - 1
        other = value[:at] + chr(ord(value[at]) + 1) + value[at + 1 :]
        if b64decode(other) == b64decode(value):
            seen += 1
            written(changed, [*lines[:number], remade(other), *lines[number + 1 :]], is_repaired=True)
            with pytest.raises(BadBundle, match=f"{name} should be"):
                verify_bundle(changed)
            assert not is_sound_to_the_script(changed)
    assert seen > 20


def rebuilt(lines: list[Line], change: Callable[[int, dict[str, Any]], None]) -> list[Line]:
    """The bundle as somebody would forge it who knows all the rules: bodies are changed, and every hash in it fits."""
    frontier: list[bytes] = []
    made, size, root = [], 0, b""
    for line in lines:
        line = dict(line)
        if "seq" in line:
            body = json.loads(b64decode(line["body"]))
            change(line["seq"], body)
            data = json.dumps(body, separators=(",", ":")).encode()
            frontier, closed = merkle.append(frontier, size, merkle.leaf_hash(data))
            size, root = size + 1, merkle.frontier_root(frontier)
            line |= {"body": b64encode(data).decode(), "roots": b64encode(closed).decode()}
        elif "size" in line:
            line |= {"root": b64encode(root).decode()}
        made.append(line)
    return made


def test_who_rebuilds_all_of_it_is_found_by_a_head_that_was_signed_or_kept(bundle: Path, tmp_path: Path) -> None:
    head = TreeHead(RUN, 11, b64decode(lines_of(bundle)[-2]["root"]))

    def late(seq: int, body: dict[str, Any]) -> None:
        body["at"] += seq > 1

    forged = written(tmp_path / "forged.arl", rebuilt(lines_of(bundle), late), is_repaired=True)
    assert {each.code for each in verify_bundle(forged).findings} == {"fork", "proof"}
    assert not is_sound_to_the_script(forged)
    lines = [line for line in rebuilt(lines_of(bundle), late) if "head" not in line]
    written(forged, lines, is_repaired=True)
    assert is_sound(forged)  # it agrees with itself
    assert is_sound_to_the_script(forged)
    assert [each.code for each in verify_bundle(forged, against=head).findings] == ["fork"]
    assert [each.code for each in verify_bundle(forged, key=SIGNER.verifier).findings] == ["signature"]
    assert not is_sound_to_the_script(forged, SIGNER.verifier)
    somebody = Signer.generate("billing-host")
    own = {"head": TreeHead(RUN, 11, b64decode(lines[-2]["root"])).note(somebody), "proof": []}
    written(forged, [lines[0], own, *lines[1:]], is_repaired=True)
    assert is_sound(forged, somebody.verifier)
    assert is_sound_to_the_script(forged, somebody.verifier)
    assert [each.code for each in verify_bundle(forged, key=SIGNER.verifier).findings] == ["signature"]
    assert not is_sound_to_the_script(forged, SIGNER.verifier)


def test_what_no_program_writes_is_found_though_every_hash_fits(bundle: Path, tmp_path: Path) -> None:
    def running(seq: int, body: dict[str, Any]) -> None:
        if body["kind"] == "finished":
            body["state"] = "RUNNING"

    lines = [line for line in rebuilt(lines_of(bundle), running) if "head" not in line]
    forged = written(tmp_path / "forged.arl", lines, is_repaired=True)
    assert [each.code for each in verify_bundle(forged).findings] == ["lifecycle"]
    assert is_sound_to_the_script(forged)  # which knows no lifecycle


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_stands_in_the_bodies_is_a_finding_and_breaks_nothing(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = _a_bundle(tmp_path_factory)
    at = data.draw(st.integers(1, 11))
    value = data.draw(_values)
    body = json.loads(b64decode(next(line for line in lines_of(path) if line.get("seq") == at)["body"]))
    name = data.draw(st.sampled_from(sorted({*body, "seen", "follows", "signal", "carried", "continues", "request"})))

    def change(seq: int, body: dict[str, Any]) -> None:
        if seq == at:
            body[name] = value

    lines = [line for line in rebuilt(lines_of(path), change) if "head" not in line]
    is_sound(written(path.with_name("changed.arl"), lines, is_repaired=True))


_made: list[Path] = []


def _a_bundle(factory: pytest.TempPathFactory) -> Path:
    """One bundle for all examples."""
    if not _made or not _made[0].is_file():
        folder = factory.mktemp("bundle")
        with AgentRunLedger(folder / "ledger.db") as ledger:
            ended(ledger)
            ledger.export(RUN, folder / "run.arl", secret=True)
        _made[:] = [folder / "run.arl"]
    return _made[0]


@settings(max_examples=150, deadline=None)
@given(cut=st.integers(0, 40), noise=st.binary(max_size=60), tail=st.integers(0, 400))
def test_noise_in_a_file_is_no_more_than_no_bundle(
    cut: int, noise: bytes, tail: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = _a_bundle(tmp_path_factory).read_bytes()
    path = _a_bundle(tmp_path_factory).with_name("noise.arl")
    path.write_bytes(data[: cut * 20] + noise + data[cut * 20 + tail :])
    if path.read_bytes() != data:
        assert not is_sound(path)
        assert not is_sound_to_the_script(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        ("\n", "it is no JSON"),
        ("[]\n", "it is no JSON object"),
        ("5\n", "it is no JSON object"),
        ("[" * 100_000 + "\n", "it is no JSON"),
        ("9" * 5_000 + "\n", "it is no JSON"),
        ('{"bundle":"agent-run-ledger","format":2}\n', "format is 2, and this version reads format 1. A newer version"),
        ('{"bundle":"agent-run-ledger","format":"1"}\n', "format should be a whole number"),
        ('{"bundle":"agent-run-ledger","format":1}\n', "should be bundle, format, written_by"),
        ('{"bundle":"other","format":1}\n', "it is no bundle"),
        ('{"bundle":"agent-run-ledger","bundle":"x","format":1}\n', "it is no bundle"),
        ("SQLite format 3\x00\n", "it is no JSON"),
        ("\u00e4\n", "it is no JSON in ASCII"),
    ],
)
def test_what_is_no_bundle_is_refused_with_the_line_and_the_reason(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "run.arl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadBundle) as caught:
        verify_bundle(path)
    assert why in str(caught.value)
    assert (caught.value.path, caught.value.line) == (str(path), 1)
    with AgentRunLedger(tmp_path / "ledger.db") as ledger, pytest.raises(BadBundle):
        ledger.import_run(path)
    assert not is_sound_to_the_script(path)


def test_a_field_that_stands_twice_is_refused(bundle: Path) -> None:
    text = bundle.read_text()
    bundle.write_text(text.replace('"kind":"finished"', '"kind":"finished","kind":"finished"'))
    with pytest.raises(BadBundle, match="is not expected here"):
        verify_bundle(bundle)
    assert not is_sound_to_the_script(bundle)


def test_no_line_makes_a_reader_hold_more_than_the_longest(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_run_ledger.exporting.LONGEST", 10_000)
    monkeypatch.setattr("agent_run_ledger.bundles.LONGEST", 10_000)
    path = tmp_path / "run.arl"
    path.write_bytes(b'{"bundle":"agent-run-ledger"' + b" " * 50_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(BadBundle, match="longer than 10000 bytes"):
            verify_bundle(path)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    ledger = bench.open()
    ledger.create_run("long", RUN)
    ledger.execute_step(RUN, "t", {}, lambda: "x" * 20_000)
    with pytest.raises(CopyRefused, match=r"entry 3 takes \d+ bytes"):
        ledger.export(RUN, path, overwrite=True)
    assert [each.name for each in tmp_path.glob("*.arl*")] == ["run.arl"]


def test_a_long_run_is_written_verified_and_taken_in_a_little_at_a_time(
    bench: Bench, other: Bench, tmp_path: Path
) -> None:
    ledger = bench.open(max_steps=1000)
    ledger.create_run("long", RUN)
    for number in range(400):
        ledger.execute_step(RUN, "t", {"n": number}, lambda n: str(n) * 15_000)
    ledger.finish_run(RUN)
    path = tmp_path / "run.arl"
    reader, target = bench.open(), other.open()
    tracemalloc.start()
    try:
        reader.export(RUN, path, secret=True)
        assert path.stat().st_size > 20_000_000
        assert verify_bundle(path).ok
        target.import_run(path)
        assert tracemalloc.get_traced_memory()[1] < 6_000_000
    finally:
        tracemalloc.stop()


# --- heads ------------------------------------------------------------------------------------------------------------


def test_the_heads_of_the_run_in_a_log_go_with_it_each_with_its_proof(bench: Bench, tmp_path: Path) -> None:
    ledger = bench.open()
    ended(ledger)
    ended(ledger, "another")
    sizes = [3, 4, 7, 11]
    log = "\n".join(ledger.tree_head(run_id, size).note(SIGNER) for size in sizes for run_id in (RUN, "another"))
    path = tmp_path / "run.arl"
    ledger.export(RUN, path, heads=[log, log], signer=SIGNER)
    kept = [line for line in lines_of(path) if "head" in line]
    assert [int(line["head"].split("\n")[1]) for line in kept] == sizes
    last = ledger.tree_head(RUN)
    for line, size in zip(kept, sizes, strict=True):
        proof = [b64decode(each) for each in line["proof"]]
        assert merkle.verify_consistency(size, last.size, proof, ledger.tree_head(RUN, size).root, last.root)
    report = verify_bundle(path, against=log, key=SIGNER.verifier)
    assert (report.ok, report.heads, report.covered) == (True, 8, 11)
    assert DOCS.verify(path, SIGNER.verifier)[0] == []


def test_entries_behind_the_last_head_are_not_covered(bench: Bench, tmp_path: Path) -> None:
    ledger = bench.open()
    ended(ledger)
    ledger.export(RUN, tmp_path / "run.arl", heads=ledger.tree_head(RUN, 7).note(SIGNER))
    assert verify_bundle(tmp_path / "run.arl", key=SIGNER.verifier).covered == 7


@pytest.mark.parametrize(
    "wrong", [TreeHead(RUN, 5, bytes(32)), TreeHead(RUN, 500, bytes(32))], ids=["fork", "rollback"]
)
def test_a_run_that_is_not_what_a_head_says_is_not_exported(bench: Bench, tmp_path: Path, wrong: TreeHead) -> None:
    ledger = bench.open()
    ended(ledger)
    with pytest.raises(CopyRefused, match="a head that was kept"):
        ledger.export(RUN, tmp_path / "run.arl", heads=wrong.note(SIGNER))
    assert not list(tmp_path.glob("*arl*"))
    with pytest.raises(BadNote):
        ledger.export(RUN, tmp_path / "run.arl", heads="no head\n")
    with pytest.raises(ValueError, match="is none of run"):
        ledger.export(RUN, tmp_path / "run.arl", heads=TreeHead("other", 1, bytes(32)).note())


def test_heads_of_other_runs_say_nothing_of_a_bundle(bundle: Path) -> None:
    with pytest.raises(ValueError, match="is none of run"):
        verify_bundle(bundle, against=TreeHead("other", 1, bytes(32)))
    with pytest.raises(BadNote, match="no public key"):
        verify_bundle(bundle, key="no key")


def test_the_script_checks_signatures_as_a_well_kept_library_does() -> None:
    public = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    signature = bytes.fromhex(
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
    )  # RFC 8032 §7.1, test 1
    assert DOCS.is_signed(public, b"", signature)
    order = 2**252 + 27742317777372353535851937790883648493
    for number in range(12):
        key = Ed25519PrivateKey.from_private_bytes(sha256(bytes([number])).digest())
        public, message = key.public_key().public_bytes_raw(), bytes(range(number))
        made = key.sign(message)
        assert DOCS.is_signed(public, message, made)
        assert not DOCS.is_signed(public, message + b"x", made)
        for place in range(0, 64, 9):
            changed = bytes([*made[:place], made[place] ^ 1, *made[place + 1 :]])
            assert not DOCS.is_signed(public, message, changed)
        larger = (int.from_bytes(made[32:], "little") + order).to_bytes(32, "little")
        assert not DOCS.is_signed(public, message, made[:32] + larger)  # RFC 8032 §8.4
        assert not DOCS.is_signed(public, message, made + b"x")
        other = Ed25519PrivateKey.from_private_bytes(sha256(bytes([number, 1])).digest()).public_key()
        assert not DOCS.is_signed(other.public_bytes_raw(), message, made)


def test_the_script_is_short_and_needs_nothing_but_python(bundle: Path, tmp_path: Path) -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 200
    alone = tmp_path / "alone.py"
    alone.write_bytes(SCRIPT.read_bytes())

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", "-S", str(alone), *map(str, arguments)]  # without what is installed
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    root = lines_of(bundle)[-2]["root"]
    for arguments in ([bundle], [bundle, SIGNER.verifier]):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (0, f"0 findings in 11 entries with the root {root}\n"), done.stderr
    done = run(bundle, Signer.generate("another").verifier)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("2 findings")
    alone_text = tmp_path / "no.arl"
    alone_text.write_text("x")
    assert run(alone_text).returncode == 2


# --- into a ledger ----------------------------------------------------------------------------------------------------


def test_another_run_of_that_id_stays_as_it_is(bundle: Path, other: Bench) -> None:
    ledger = other.open()
    ended(ledger)
    before = standing(other)
    with pytest.raises(CopyRefused, match="another run of this id stands there; they differ at entry 1"):
        ledger.import_run(bundle)
    assert standing(other) == before


def test_a_run_that_was_moved_away_comes_back_as_it_ended(bench: Bench, other: Bench, tmp_path: Path) -> None:
    here, there = bench.open(), other.open()
    begun(here)
    here.copy(RUN, there)
    there.resume_run(RUN)
    there.signal(RUN, "late", 1)
    there.finish_run(RUN, "done")
    there.export(RUN, tmp_path / "run.arl", secret=True)
    assert here.get_run(RUN).moved_to is not None
    assert not here.import_run(tmp_path / "run.arl").was_there
    assert (here.get_run(RUN).moved_to, here.get_run(RUN).result) == (None, "done")
    assert here.verify().ok
    assert standing(bench) == standing(other)


def test_what_is_damaged_does_not_come_in(bundle: Path, other: Bench, tmp_path: Path) -> None:
    lines = lines_of(bundle)
    lines[4]["payload"] = b64encode(b"{}").decode()
    written(tmp_path / "changed.arl", lines, is_repaired=True)
    with pytest.raises(CopyRefused, match="is damaged"):
        other.open().import_run(tmp_path / "changed.arl")
    assert other.open().runs() == []


def test_a_file_that_is_changed_while_it_is_read_does_not_come_in(
    bundle: Path, other: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = other.open()
    store = ledger._store
    adopt = store.adopt

    def changes(*given: Any) -> bool:
        lines = lines_of(bundle)
        late = rebuilt(lines, lambda seq, body: body.update(at=body["at"] + (seq > 1)))
        data = bundle.read_bytes()
        made = written(bundle.with_name("made"), late, is_repaired=True).read_bytes()
        assert len(made) == len(data)
        bundle.write_bytes(made)
        return adopt(*given)

    monkeypatch.setattr(store, "adopt", changes)
    with pytest.raises(BadBundle, match="it was changed while it was read"):
        ledger.import_run(bundle)
    assert ledger.runs() == []


def test_the_log_of_a_shared_budget_is_kept_by_its_ledger_alone(bench: Bench, other: Bench, tmp_path: Path) -> None:
    ledger = bench.open()
    shared = ledger.budget("team", tokens=5_000)
    with bench.open(budget=Budget(within=shared)).open_run("x", RUN) as run:
        run.step("think", {}, lambda: 1, kind="model", max_tokens=10)
    account = ledger.budgets()[0].account
    ledger.export(account, tmp_path / "account.arl", secret=True)
    assert verify_bundle(tmp_path / "account.arl").ok
    with pytest.raises(InvalidName):
        other.open().import_run(tmp_path / "account.arl")


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, monkeypatch)


def test_the_command_line_exports_verifies_without_a_ledger_and_imports(
    shell: Shell, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = ended(bench.open())
    bench.open().close()
    key, kept = tmp_path / "head.key", tmp_path / "heads.log"
    key.write_text(SIGNER.key)
    kept.write_text(bench.open().tree_head(RUN, 5).note(SIGNER))
    path, target = tmp_path / "run.arl", tmp_path / "target.db"
    said = shell("--db", bench.path, "export", RUN, "--out", path, "--with-secret", "--sign", key, "--heads", kept)
    assert said == (0, f"run 'october' was written to {path}: 11 entries, root {head.root.hex()}\n", "")
    status, out, err = shell("verify", path)
    assert (status, err) == (0, "")
    assert out.startswith("11 entries of 1 run: no findings, held to 2 kept heads over 11 entries\n")
    assert "who can write it" in out.lower()
    status, out, _ = shell("verify", path, "--key", SIGNER.verifier, "--against", kept)
    assert status == 0
    assert "when they were signed" in out
    assert shell("verify", path, "--key", Signer.generate("x").verifier)[0] == 1
    assert "it is signed by 'billing-host'" in shell.refused(
        "verify", path, "--key", Signer.generate("x").verifier, "--against", kept
    )
    assert shell("verify", path, "--key", SIGNER.verifier)[0] == 0
    assert shell.json("verify", path)["covered"] == 11
    assert shell("--db", target, "import", path) == (0, f"run 'october' was brought into {target}: 11 entries\n", "")
    assert shell.json("--db", target, "import", path)["was_there"] is True
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENT_RUN_LEDGER_DB", str(target))
    assert shell("verify", "run.arl")[0] == 0
    assert "no run 'run.arl'" in shell.refused("--db", target, "verify", "run.arl")
    assert shell("verify", RUN)[0] == 0
    path.write_bytes(path.read_bytes()[:500])
    assert "cut off" in shell.refused("verify", "run.arl")
    path.write_bytes(b"")
    assert "it is empty" in shell.refused("verify", "run.arl")


def test_the_command_line_says_what_is_not_proved(shell: Shell, bench: Bench, tmp_path: Path) -> None:
    ended(bench.open())
    path = tmp_path / "run.arl"
    for option in ("--with-secret", "--without-payloads", None):
        words = [option] if option else []
        assert shell("--db", bench.path, "export", RUN, "--out", path, "--overwrite", *words)[0] == 0
        status, out, _ = shell("verify", path)
        assert status == 0
        assert ("could not be held to the log" in out) == (option != "--with-secret")
    assert shell("--db", bench.path, "export", RUN, "--out", path, "--with-secret", "--without-payloads")[0] == 2
    assert "there is a file already" in shell.refused("--db", bench.path, "export", RUN, "--out", path)
    assert shell.json("--db", bench.path, "export", RUN, "--out", path, "--overwrite")["size"] == 11
    assert shell("--db", tmp_path / "other.db", "import", path)[0] == 2
