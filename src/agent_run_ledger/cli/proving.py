"""The commands for auditors: the head of a run's tree, signed or not, proofs, and the keys that sign."""

from __future__ import annotations

import argparse
import os
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agent_run_ledger import HeadLog, HeadRefused, LedgerError, Signer, StoreCorrupt
from agent_run_ledger.cli.options import number
from agent_run_ledger.cli.shell import OK, PROBLEM, UsageError, opened_to_look
from agent_run_ledger.cli.terminal import as_json, labelled, plain


def add(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands by `add_command(name, module, text, example)`, which returns a command's parser."""
    head = add_command(
        "head",
        "proving",
        "Show the head of a run's tree, its size and root, or those of all runs, as C2SP checkpoints. Kept elsewhere, a head finds by "
        "`verify --against` what was cut off or rewritten since.",
        "--db demo/agent.db head reconcile-2026-10",
    )
    head.add_argument("run_id", metavar="RUN", nargs="?")
    head.add_argument("--size", metavar="N", type=number, help="of RUN as it was when it had N entries")
    head.add_argument("--sign", metavar="FILE", help="sign it with the private key in this file, as `keygen` made it")
    head.add_argument(
        "--log",
        metavar="FILE",
        help="with --sign: add what is new to this log of heads; a head that contradicts one in it is refused",
    )
    prove = add_command(
        "prove",
        "proving",
        "Prove that an entry is in a run's tree, or with --since that the tree has only grown since it had so many entries. Whoever has "
        "the root of a head checks it as RFC 9162 says.",
        "--db demo/agent.db prove reconcile-2026-10 3",
    )
    prove.add_argument("run_id", metavar="RUN")
    what = prove.add_mutually_exclusive_group(required=True)
    what.add_argument("seq", metavar="ENTRY", type=number, nargs="?", help="the number of the entry, from 1")
    what.add_argument("--since", metavar="N", type=number, help="the size of the earlier tree")
    prove.add_argument("--size", metavar="N", type=number, help="in the tree of N entries (default: as the run stands)")
    keygen = add_command(
        "keygen",
        "proving",
        "Make an Ed25519 key that signs heads. The private key is written to a new file that only you can read; the public key, by which "
        "others check, is printed.",
        "keygen billing-host --out head.key",
        of="program",
    )
    keygen.add_argument("name", metavar="NAME", help="whose key it is, for people: no white space and no plus sign")
    keygen.add_argument(
        "--out", metavar="FILE", required=True, help="the file for the private key, which must not exist"
    )


@contextmanager
def signing() -> Iterator[None]:
    """What needs the extra [sign], or is asked of a run that has not so many entries, is said in one line."""
    try:
        yield
    except LedgerError:
        raise
    except (ImportError, ValueError) as error:
        raise UsageError(str(error)) from error


def head(given: argparse.Namespace) -> int:
    if given.size is not None and given.run_id is None:
        raise UsageError("--size is about one run: name it")
    if given.log is not None and given.sign is None:
        raise UsageError("--log keeps what was signed: give --sign FILE with it")
    status = OK
    shown: list[dict[str, object]] = []
    with signing(), opened_to_look(given) as ledger:
        signer = signer_given(given.sign)
        log = HeadLog(given.log, signer) if given.log is not None and signer is not None else None
        for run_id in [given.run_id] if given.run_id is not None else [run.run_id for run in ledger.runs()]:
            try:
                found = ledger.tree_head(run_id, given.size)
                note = found.note(signer) if log is None else log.add(ledger, run_id, found.size)
            except (StoreCorrupt, HeadRefused) as error:
                if given.run_id is not None:
                    raise
                status = PROBLEM  # the others have heads all the same
                shown.append({"run_id": run_id, "size": None, "root": None, "note": None, "trouble": str(error)})
                continue
            data = {"run_id": run_id, "size": found.size, "root": found.root.hex(), "note": note, "trouble": None}
            shown.append(data)
    if given.json:
        print(as_json({"heads": shown}))
        return status
    for each in shown:
        if each["trouble"] is not None:
            sys.stderr.write(f"PROBLEM: {plain(str(each['trouble']))}\n")
        elif each["note"] is None:
            sys.stderr.write(f"nothing new of run {plain(repr(each['run_id']))}: what is signed covers it\n")
        else:
            sys.stdout.write(f"{each['note']}\n" if given.run_id is None else str(each["note"]))
    return status


def prove(given: argparse.Namespace) -> int:
    run_id = given.run_id
    with signing(), opened_to_look(given) as ledger:
        if given.seq is not None:
            found = ledger.prove(run_id, given.seq, given.size)
            size, path = found.size, found.proof
            data = {"run_id": run_id, "seq": given.seq, "leaf_hash": found.leaf_hash.hex(), "index": found.index}
        else:
            grown = ledger.prove_consistency(run_id, given.since, given.size)
            size, path = grown.size2, grown.proof
            data = {"run_id": run_id, "size1": grown.size1, "root1": ledger.tree_head(run_id, grown.size1).root.hex()}
        root = ledger.tree_head(run_id, size).root
    data |= {"size": size, "root": root.hex(), "proof": [node.hex() for node in path]}
    if given.json:
        print(as_json(data))
        return OK
    facts = [(name.replace("_", " "), value) for name, value in data.items() if name != "proof"]
    print(labelled([*facts, ("root (base64)", b64encode(root).decode())]))
    print("proof:" if path else "proof:         empty")
    for node in path:
        print(f"  {node.hex()}")
    return OK


def keygen(given: argparse.Namespace) -> int:
    with signing():
        signer = Signer.generate(given.name)
    with open(os.open(given.out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(signer.key + "\n")
        file.flush()
        os.fsync(file.fileno())
    if given.json:
        print(as_json({"name": signer.name, "public_key": signer.verifier, "private_key_file": given.out}))
    else:
        print(signer.verifier)
    return OK


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def signer_given(path: str | None) -> Signer | None:
    """Who signs with the private key in the file that `--sign` names."""
    if path is not None and path.startswith("PRIVATE+KEY+"):
        raise UsageError("--sign names the file in which the private key is, and not the key itself")
    return None if path is None else Signer(_read(path))


def heads_given(paths: list[str]) -> list[str]:
    """The texts that `--against` or `--heads` names, a file each, or `-` for standard input."""
    return [sys.stdin.read() if path == "-" else _read(path) for path in paths]


def key_given(text: str | None) -> str | None:
    """The public key that `--key` is: its text, or `@FILE`."""
    return _read(text[1:]) if text is not None and text.startswith("@") else text
