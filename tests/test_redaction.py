"""What is taken for a secret, what is not, and that a copy which may be shown is the text itself where nothing is hidden."""

from __future__ import annotations

import json
import time
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_run_ledger import model
from agent_run_ledger.rules import redaction
from agent_run_ledger.rules.redaction import HIDDEN, Private, Redactor, words_of

OURS = Redactor()
PRIVATE = Redactor(Private.of(["ssn", "customer number"], ["Project Bluebird", 'with "quotes" é']))

SECRET_NAMES = [
    "password", "Password", "dbPassword", "DB_PASSWORD", "userPasswd", "pwd", "passphrase", "secret", "client_secret", "clientSecret",
    "AWS_SECRET_ACCESS_KEY", "api_key", "apiKey", "apikey", "X-Api-Key", "APIKey", "private_key", "privateKey", "access_key", "signing-key",
    "Authorization", "Proxy-Authorization", "authorization", "Cookie", "Set-Cookie", "cookies", "credentials", "token", "accessToken",
    "refresh_token", "session-token", "csrf_token", "id_tokens", "auth", "basicAuth", "smtp_pass", "jwt", "headers.authorization",
]  # fmt: skip
OTHER_NAMES = [
    "tokens", "max_tokens", "maxTokens", "spent_tokens", "token_count", "tokenizer", "token_type", "author", "authored_by", "key", "keys",
    "primary_key", "idempotency_key", "keyboard", "monkey", "pass", "passed", "compass", "bypass", "password_policy", "secretary", "cookiecutter",
    "passenger", "user", "digest", "fingerprint", "run_id", "name", "api", "access", "token_url",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_what_such_a_name_names_is_hidden_in_data_and_in_texts(name: str) -> None:
    assert OURS.data({name: "abc"}) == {name: HIDDEN}
    for text in (
        json.dumps({name: "abc"}),
        f"call(b=1, x={{{name!r}: 'abc'}})",
        f"{name}=abc",
        f"--{name} abc",
        f"<{name}>abc</{name}>",
    ):
        assert "abc" not in OURS.text(text), text
        assert "abc" not in OURS.text(f"so it said: {text} and no more"), text


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_what_another_name_names_is_shown(name: str) -> None:
    assert OURS.data({name: "abc", "n": 1}) == {name: "abc", "n": 1}
    for text in (json.dumps({name: "abc"}), f"{name}=abc", f"{name}: abc"):
        assert OURS.text(text) == text


def test_numbers_are_secrets_under_the_name_of_a_password_and_counts_under_that_of_a_token() -> None:
    assert OURS.data({"password": 1234, "token": 1234, "fencing_token": 7, "is_secret": True, "secret": None}) == {
        "password": HIDDEN, "token": 1234, "fencing_token": 7, "is_secret": True, "secret": None,
    }  # fmt: skip
    assert (
        OURS.text("fencing token: 7, password: 1234, secret: null")
        == "fencing token: 7, password: [redacted], secret: null"
    )


def test_no_field_of_our_records_has_a_name_that_hides_it() -> None:
    for kind in vars(model).values():
        if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__"):
            names = [each.name for each in fields(kind)]
            assert HIDDEN not in OURS.data(dict.fromkeys(names, 7)).values(), kind
            names = [name for name in names if name != "fencing_token"]  # which is a number
            assert HIDDEN not in OURS.data(dict.fromkeys(names, "x")).values(), kind


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        # names and values, in other forms
        ('["Authorization","Basic abc"]', '["Authorization","[redacted]"]'),
        ("sent ('Authorization', 'Basic abc') to it", "sent ('Authorization', '[redacted]') to it"),
        ('["token","user","name"]', '["token","user","name"]'),
        ('{"name":"Authorization","value":"abc"}', '{"name":"Authorization","value":"[redacted]"}'),
        ('so {"name":"Authorization","value":"abc"}', 'so {"name":"Authorization","value":"[redacted]"}'),
        ("headers['Authorization'] = 'abc'", "headers['Authorization'] = '[redacted]'"),
        ("Authorization: Bearer abc failed with 401", "Authorization: [redacted] failed with 401"),
        ("Cookie: a=b; c=d\nHost: x", "Cookie: [redacted]\nHost: x"),
        ("password 'a b' was wrong", "password '[redacted]' was wrong"),
        ("Server=x;Uid=sa;Pwd=abc!d;Database=y", "Server=x;Uid=sa;Pwd=[redacted];Database=y"),
        ("password\n  Input should be an integer [type=int, input_value='abc', x]", "password\n  Input should be an integer [type=int, input_value='[redacted]', x]"),
        # what is deeper
        ('{"credentials":{"a":[1,{"b":"}"}]},"z":1}', '{"credentials":"[redacted]","z":1}'),
        ('so {"credentials":{"a":[1,{"b":"}"}]},"z":1} it was', 'so {"credentials":[redacted],"z":1} it was'),
        ('{"in":"{\\"password\\":\\"a\\\\\\"b\\"}"}', '{"in":"{\\"password\\":\\"[redacted]\\"}"}'),
        ('so {"in":"{\\"password\\":\\"a\\\\\\"b\\",\\"n\\":1}"}', 'so {"in":"{\\"password\\":\\"[redacted]\\",\\"n\\":1}"}'),
        ('{"x":"sk-abcdefghijklmnopqrstuv","x":1}', '{"x":"[redacted]","x":1}'),
        # addresses
        ("https://ann:p@w@db.internal/x", "https://ann:[redacted]@db.internal/x"),
        ("a postgresql://ann:1234@h/x b", "a postgresql://ann:[redacted]@h/x b"),
        ("redis://:abc@h:6379/0", "redis://:[redacted]@h:6379/0"),
        ("https://0123456789abcdefghij0123@h/x", "https://[redacted]@h/x"),
        ("ssh://git@github.com/x and http://h:8080/?to=a@b.c", "ssh://git@github.com/x and http://h:8080/?to=a@b.c"),
        ("a://h:80/,b://ann:abc@h", "a://h:80/,b://ann:[redacted]@h"),
        ("https://x/y?key=abc&b=1&sig=zz", "https://x/y?key=[redacted]&b=1&sig=[redacted]"),
        ("https://x/cb?code=1&code=0123456789abcdefghijk", "https://x/cb?code=1&code=[redacted]"),
        ("curl -u ann:abc -H 'Accept: x' http://h", "curl -u ann:[redacted] -H 'Accept: x' http://h"),
        # shapes
        ("use ghp_0123456789abcdefghijABCDEFGHIJ now", "use [redacted] now"),
        ("AKIAIOSFODNN7EXAMPLE", "[redacted]"),
        ("xoxb-123456789012-abc", "[redacted]"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc", "[redacted]"),
        ("https://hooks.slack.com/services/T0/B0/abc", "https://hooks.slack.com/services/[redacted]"),
        ("sent with Bearer abcdefgh1.", "sent with Bearer [redacted]"),
        ("Basic authentication failed; Bearer of bad news", "Basic authentication failed; Bearer of bad news"),
        ("a task-force, risk-averse, desk-sk-lamp", "a task-force, risk-averse, desk-sk-lamp"),
        # what was cut
        ('{"password":"ab…', '{"password":"[redacted]'),
        ("postgres://ann:ab…", "postgres://ann:[redacted]…"),
        ("see ghp_ab…", "see [redacted]…"),
        ("-----BEGIN RSA PRIVATE KEY-----\\nMII…", "[redacted]"),
    ],
)  # fmt: skip
def test_secrets_are_hidden_and_nothing_else(text: str, shown: str) -> None:
    assert OURS.text(text) == shown
    assert OURS.text(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the ssn: 123, customerNumber=77, CUSTOMER-NUMBER: 7", "the ssn: [redacted], customerNumber=[redacted], CUSTOMER-NUMBER: [redacted]"),
        ("number=1 customer=2 ssnx=3", "number=1 customer=2 ssnx=3"),
        ("about Project Bluebird it is", "about [redacted] it is"),
        ("about Project Blue…", "about [redacted]…"),
        ('{"a":"with \\"quotes\\" \\u00e9"}', '{"a":"[redacted]"}'),
        ('so {"a":"with \\"quotes\\" é"}', 'so {"a":"[redacted]"}'),
    ],
)  # fmt: skip
def test_a_private_list_hides_by_names_and_values(text: str, shown: str) -> None:
    assert PRIVATE.text(text) == shown


@pytest.mark.parametrize(("names", "values"), [([""], []), (["--"], []), ([], ["abc"]), ([], ["   a  "])])
def test_a_private_list_with_what_would_hide_anything_is_refused(names: list[str], values: list[str]) -> None:
    with pytest.raises(ValueError, match="has"):
        Private.of(names, values)


def test_options_of_a_command_line_hide_the_word_behind_them() -> None:
    given = ["run", "--password", "abc", "--verbose", "yes", "--token", "300", "-o", "token"]
    assert OURS.data(given) == ["run", "--password", HIDDEN, "--verbose", "yes", "--token", "300", "-o", "token"]


def test_a_scanner_says_where_more_is() -> None:
    found = Redactor(scan=lambda text: [(at, at + 3) for at in range(len(text)) if text.startswith("xyz", at)])
    assert found.text("é xyz and xyz") == "é [redacted] and [redacted]"
    assert found.data({"a": ["xyz"]}) == {"a": [HIDDEN]}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.sampled_from(OTHER_NAMES), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(
    _JSON,
    st.sampled_from(SECRET_NAMES),
    st.sampled_from(["repr", "dumps", "compact", "twice", "data"]),
    st.text(max_size=30),
)
def test_a_value_of_a_secret_name_is_in_no_copy_wherever_it_stands(
    value: Any, name: str, form: str, around: str
) -> None:
    secret = "Zx\"'\\ {q} 9é7"
    data = {"before": value, "list": [{name: secret}, value], "after": value}
    made = {
        "repr": lambda: around + repr(data),
        "dumps": lambda: json.dumps(data, indent=2) + around,
        "compact": lambda: json.dumps(data, separators=(",", ":"), ensure_ascii=False),
        "twice": lambda: json.dumps({"inside": json.dumps(data)}),
        "data": lambda: data,
    }[form]()
    shown = OURS.text(made) if isinstance(made, str) else json.dumps(OURS.data(made))
    assert "9é7" not in shown
    assert "9\\u00e97" not in shown


@given(
    st.text(alphabet="ab:=\"'\\\\ .{}[]/@?&-_01", max_size=20),
    st.sampled_from([*SECRET_NAMES, "note", "customer number"]),
    st.text(max_size=9),
)
def test_a_text_that_is_taken_for_harmless_at_a_glance_is(before: str, name: str, after: str) -> None:
    text = f"{before}{name}{after}"
    if not redaction._may_hold_one(text, PRIVATE.private):
        assert redaction._without_named(redaction._without_shapes(text), PRIVATE.private) == text


def test_every_secret_word_and_shape_is_seen_at_a_glance() -> None:
    words = [
        *redaction._ALWAYS,
        *redaction._OF_TEXT,
        "key",
        "auth",
        "pass",
        "tokens",
        *(mark for mark, _ in redaction._SHAPES if mark != "gh"),
    ]
    assert [word for word in words if not redaction._may_hold_one(word, Private())] == []


@given(_JSON)
def test_data_in_which_nothing_is_hidden_is_shown_as_it_is(value: Any) -> None:
    assert OURS.data({"a": value}) == {"a": value}
    text = json.dumps(value)
    assert OURS.text(text) == text


@given(st.text())
def test_a_copy_is_its_own_copy(text: str) -> None:
    assert OURS.text(OURS.text(text)) == OURS.text(text)


@pytest.mark.parametrize("depth", [10, 200, 100_000])
def test_depth_is_survived_and_hides_nothing_less(depth: int) -> None:
    text = "[" * depth + '{"password":"abc"}' + "]" * depth
    assert "abc" not in OURS.text(text)


def test_a_long_text_takes_time_in_proportion() -> None:
    """Each of these is looked at once more than half of it, so what grows with the square is seen: it would take an hour."""
    for piece in (
        "://a:",
        "token ",
        'password=\\"',
        "'token', ",
        "-u ",
        "eyJ",
        "?key=",
        "[",
        "\\\\",
        "Bearer ",
        "<token>",
        "a\n",
    ):
        text = piece * (300_000 // len(piece))
        began = time.process_time()
        OURS.text(text)
        assert time.process_time() - began < 60


def test_names_are_split_into_words_however_they_are_joined() -> None:
    assert words_of("OAuth2Token-for_db.passWord") == ("o", "auth", "token", "for", "db", "pass", "word")
