"""Verify a bundle of a run with nothing but Python's standard library: `python verify_bundle.py run.arl [KEY]`.

It exits with 1 where something does not agree, with 2 where the file is no bundle. KEY is a public key, `name+hash+base64`, by which
all heads have to be signed, one at least. RFC 9162 (trees), c2sp.org/signed-note, RFC 8032 (Ed25519)."""

import hashlib
import json
import re
import sys
from base64 import b64decode, b64encode
from functools import reduce
from urllib.parse import quote

LINES = {  # in their order, those of heads, entries and requests as often as they like; the letters are those of TYPES
    "bundle": "bundle:s format:i written_by:s run:s listing:o secret:b? payloads:t",
    "head": "head:s proof:l",
    "seq": "seq:i kind:s position:s? attempt:i? body:b roots:b payload:b? digest:b? fingerprint:b? encoding:s?",
    "request": "request:i kind:s payload:b? who:s? at:n",
    "size": "size:i root:b token:i inbox:i",
    "sha256": "sha256:s",
}
LISTING = "created_at:n agent:s? queue:s? priority:i key:s?"
NOTE = re.compile("(\\S+)\n(0|[1-9][0-9]*)\n(\\S+)\n([^\n]+\n)*(\n(\u2014 \\S+ \\S+\n)+)?")
TYPES = {"s": [str], "b": [str], "i": [int], "n": [int, float], "t": [bool], "l": [list], "o": [tuple]}


def sha256(*parts):
    return hashlib.sha256(b"".join(parts)).digest()


def unbase64(text):
    if b64encode(b64decode(text, validate=True)).decode() != text:
        raise ValueError("there are bits in base64 that stand for nothing")
    return b64decode(text)


P, L = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P  # Ed25519, RFC 8032 §5.1; points are (X, Y, Z, T), x = X/Z, y = Y/Z, xy = T/Z


def add(a, b):
    p, q = (a[1] - a[0]) * (b[1] - b[0]), (a[1] + a[0]) * (b[1] + b[0])
    r, s = 2 * a[3] * b[3] * D, 2 * a[2] * b[2]
    e, f, g, h = q - p, s - r, s + r, q + p
    return e * f % P, g * h % P, f * g % P, e * h % P


def times(bits, point):
    half = times(bits[:-1], point) if bits else (0, 1, 1, 0)
    return add(add(half, half), point) if bits.endswith("1") else add(half, half)


def point(data):
    y = int.from_bytes(data, "little") & (1 << 255) - 1
    above, below = y * y - 1, D * y * y + 1
    x = pow(above * pow(below, -1, P), (P + 3) // 8, P)
    x = x if (x * x * below - above) % P == 0 else x * pow(2, (P - 1) // 4, P) % P
    if y >= P or (x * x * below - above) % P:
        raise ValueError("no point of the curve")
    x = x if x & 1 == data[31] >> 7 else P - x
    return x, y, 1, x * y % P


def is_signed(public, message, signature):
    s = int.from_bytes(signature[32:], "little")
    k = int.from_bytes(hashlib.sha512(signature[:32] + public + message).digest(), "little") % L
    base, (x, y, z, t) = point(b"\x58" + b"\x66" * 31), point(public)
    x, y, z, _ = add(times(f"{s:b}", base), times(f"{k:b}", (P - x, y, z, P - t)))
    x, y = x * pow(z, -1, P) % P, y * pow(z, -1, P) % P
    return len(signature) == 64 and s < L and signature[:32] == (y | (x & 1) << 255).to_bytes(32, "little")


def signed(note, key):
    """For each line of a note that says it is by this key, whether that is so; without a key nobody asks."""
    text, _, lines = note.partition("\n\n")
    name, key_hash, public = key.strip().split("+", 2) if key else ("", "", "")
    named = [(each.split(" ")[1], unbase64(each.split(" ")[2])) for each in lines.splitlines()]
    ours = [each[4:] for by, each in named if (by, each[:4].hex()) == (name, key_hash)]
    return {is_signed(unbase64(public)[1:], (text + "\n").encode(), each) for each in ours} if key else {True}


def proved(size1, size2, root1, proof, is_first=True):
    """The two roots that a consistency proof implies, as SUBPROOF of RFC 9162 §2.1.4.1 takes it apart. Uses the proof up."""
    if size1 == size2:
        return (root1, root1) if is_first else (proof[0], proof.pop(0))
    left = 1 << (size2 - 1).bit_length() - 1
    if size1 <= left:
        old, new = proved(size1, left, root1, proof, is_first)
        return old, sha256(b"\1", new, proof.pop(0))
    old, new = proved(size1 - left, size2 - left, root1, proof, False)
    return sha256(b"\1", proof[0], old), sha256(b"\1", proof.pop(0), new)


def fields_of(pairs, shape):
    """The fields of an object, which has exactly these, in this order, each of its type. Bytes are decoded."""
    wanted = [each.split(":") for each in shape.split()]
    if type(pairs) is not tuple or [name for name, _ in pairs] != [name for name, _ in wanted]:
        raise ValueError("a line has other fields than it should have")
    found = {}
    for (name, kind), (_, value) in zip(wanted, pairs, strict=True):
        if value is not None or not kind.endswith("?"):
            if type(value) not in TYPES[kind[0]] or (kind[0] in "in" and not -(2**53) < value < 2**53):
                raise ValueError(f"{name} is {value!r:.80}")
            str(value).encode()  # half a character is no text
        found[name] = unbase64(value) if kind[0] == "b" and value is not None else value
    return found


def lines_of(file):
    """Each line as its kind and its fields, and the hash of all lines before."""
    digest, kinds, at, line = hashlib.sha256(), list(LINES), 0, b""
    for line in iter(lambda: file.readline(2**28), b""):
        pairs = json.loads(line.decode("ascii"), object_pairs_hook=tuple)
        while kinds[at] in ("head", "seq", "request") and pairs[0][0] != kinds[at]:
            at += 1
        yield kinds[at], fields_of(pairs, LINES[kinds[at]]), digest.hexdigest()
        at += kinds[at] in ("bundle", "size", "sha256")
        digest.update(line)
    if at < len(kinds) or not line.endswith(b"\n"):
        raise ValueError("it was cut off")


def verify(path, key=None):
    """What does not agree, one sentence each, and size and root of the run's tree. Raises where the file is no bundle."""
    found, heads, frontier, roots, keys, gone, is_lost = [], [], [], {}, {}, set(), False
    size = asked = honoured = token = 0

    def expect(what, stored, computed):
        odd = [(name, stored.get(name), value) for name, value in computed.items() if stored.get(name) != value]
        found.extend(f"{what}: {name} is {is_!r:.99}, it should be {value!r:.99}" for name, is_, value in odd)

    with open(path, "rb") as file:
        for what, line, digest in lines_of(file):
            if what == "bundle":
                run, secret, has_payloads, is_carrying = line["run"], line["secret"], line["payloads"], False
                listing, root = fields_of(line["listing"], LISTING), None
                expect("the file", line, {"bundle": "agent-run-ledger", "format": 1})
            elif what == "head":
                heads.append((NOTE.fullmatch(line["head"]), [unbase64(each) for each in line["proof"]]))
            elif what == "request":
                asked += 1
                withheld = {line["payload"] is None, line["who"] is None}
                expect("a request", line | {"withheld": withheld}, {"request": asked, "withheld": {not has_payloads}})
            elif what == "size":
                held = {"token": max(token, line["token"]), "inbox": max(asked, honoured)}
                expect("the end", line | {"asked": asked}, held | {"size": size, "root": root, "asked": line["inbox"]})
            elif what == "sha256":
                expect("the file", line, {"sha256": digest})
            else:
                size += 1
                closed = node = sha256(b"\0", line["body"])
                for _ in range((size & -size).bit_length() - 1):
                    node = sha256(b"\1", frontier.pop(), node)
                    closed += node
                frontier.append(node)
                root = reduce(lambda right, left: sha256(b"\1", left, right), reversed(frontier))
                roots[size] = root
                body = json.loads(line["body"])
                first = listing if size > 1 else {"priority": 0} | body | {"created_at": body["at"]}
                expect("the listing", listing, {name: first.get(name) for name in listing})
                payload = line["payload"] if has_payloads and "payload" in body else None
                plain = None if payload is None else sha256(payload)
                gone |= {size} if has_payloads and "payload" in body and payload is None else set()
                gone = {each for each in gone if not any(a <= each <= b for a, b in body.get("entries", []))}
                is_lost |= body.get("secret") is True
                is_call, tool, position = body["kind"] == "intent", str(body.get("tool")), body.get("position")
                ours = {"seq": size, "kind": body["kind"], "position": position, "attempt": body.get("attempt")}
                ours |= {"roots": closed, "payload": payload, "digest": plain, "encoding": None, "fingerprint": None}
                ours |= {"fingerprint": sha256(tool.encode(), b"\0", plain)} if plain and is_call else {}
                expect(f"entry {size}", line, ours)
                is_carrying = "forked_from" in body or (is_carrying and "carried" in body)
                theirs = {"run": run, "seq": size, "token": max(token, body["token"])}
                theirs |= {"carried": True if is_carrying and size > 1 else None}
                if secret is not None and payload is not None:
                    theirs["payload"] = sha256(secret, payload).hex()
                    if is_call and not is_carrying:
                        parts = secret, run.encode(), position.encode(), tool.encode(), payload
                        begun = keys.get(body.get("continues", position))
                        theirs["key"] = begun or sha256(b"\0".join(parts)).hex()
                expect(f"the body of entry {size}", body, theirs)
                token, honoured = max(token, body["token"]), max(honoured, body.get("request", 0))
                keys |= {position: body.get("key")} if is_call else {}
    whole = {"a signed head": bool(heads or not key), "payloads gone without a word": gone, "no secret": secret == b""}
    expect("the file", whole, dict(zip(whole, (True, set(), is_lost and secret is not None), strict=True)))
    for note, proof in heads:
        of, given = int(note[2]), unbase64(note[3])
        head = {"origin": note[1], "root": given, "signed": signed(note[0], key)}
        head |= {"proof": proved(of, size, given, proof) if 0 < of <= size else None, "left of it": proof}
        right = {"origin": "agent-run-ledger/run/" + quote(run, safe=""), "root": roots.get(of), "signed": {True}}
        expect(f"the head of {of}", head, right | {"proof": (given, root), "left of it": []})
    return found, size, root


if __name__ == "__main__":
    try:
        found, size, root = verify(*sys.argv[1:])
    except Exception as error:  # whatever a file of somebody else leads to
        sys.exit(sys.stderr.write(f"this is no whole bundle: {error!r}\n") and 2)
    last = f"{len(found)} findings in {size} entries with the root {b64encode(root).decode()}"
    sys.exit(print(*found, last, sep="\n") or len(found) > 0)
