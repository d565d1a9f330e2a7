"""How a decision becomes entries: what is written is what is taken in."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent_run_ledger import merkle
from agent_run_ledger.engine.history import History
from agent_run_ledger.engine.log import Draft, seal
from agent_run_ledger.rules import digests

SECRET = bytes(32)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
times = st.one_of(st.integers(0, 2**40), st.floats(0, 1e12, allow_nan=False))
values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False), texts
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
drafts = st.lists(
    st.builds(
        Draft,
        st.sampled_from(["value", "notice", "signal", "refused", "blocked", "granted"]),
        st.none(),
        st.dictionaries(texts.map(lambda name: f"own {name}"), values, max_size=4),
        st.one_of(st.none(), st.binary(max_size=40)),
        st.one_of(st.none(), texts),
        st.one_of(st.none(), st.integers(1, 2**40)),
        digest=st.none(),
        salted=st.none(),
        fingerprint=st.none(),
    ).map(lambda draft: draft._replace(fields=draft.fields | _GRANT) if draft.kind == "granted" else draft),
    max_size=5,
)
_GRANT: dict[str, Any] = {"grant": ["a", "1", 1], "holds": {"tokens": 5}, "under": 1}


@given(texts, times, st.integers(1, 2**60), drafts)
def test_a_body_is_the_json_of_what_is_taken_in(run_id: str, at: float, token: int, given: list[Draft]) -> None:
    """The text of a body is put together by hand, as far as all bodies are alike."""
    sealed = seal(History(run_id, SECRET), token, at, given)
    for number, ((row, body), draft) in enumerate(zip(sealed, given, strict=True), 1):
        assert json.loads(row.body) == body
        assert row.body == json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        assert (body["run"], body["seq"], body["kind"], body["at"], body["token"]) == (
            run_id,
            number,
            draft.kind,
            at,
            token,
        )
        assert (body.get("position"), body.get("attempt")) == (draft.position, draft.attempt)
        assert draft.fields.items() <= body.items()
        assert body.get("payload") == (None if draft.payload is None else digests.salted(SECRET, draft.payload))
        assert row.roots[:32] == merkle.leaf_hash(row.body)
