from __future__ import annotations

import copy
import json
import uuid
import warnings
from collections.abc import Callable
from typing import Any, Self, cast

import anthropic
import httpx2
import openai
import pydantic
import pytest
from anthropic.types import Message, TextBlock, ThinkingBlock, ToolUseBlock
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ParsedChatCompletion
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem

from agent_run_ledger.errors import PlainDataWarning, StepFailed
from support.ledgers import RUN, Bench, never, program, raising

# --- what servers send ------------------------------------------------------------------------------------------------

CHAT: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1_790_000_000,
    "model": "some-model",
    "system_fingerprint": None,
    "x_groq": {"id": "req_1", "usage": {"queue_time": 0.5}},
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "logprobs": None,
            "content_filter_results": {"hate": {"filtered": False}},
            "message": {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "reasoning_content": "I need the invoice.",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "index": 0,
                        "function": {"name": "fetch_invoice", "arguments": '{"id":"INV-109"}', "strict": True},
                    },
                    {"id": "call_2", "type": "custom", "custom": {"name": "note", "input": "ä\U0001f600"}},
                ],
            },
        }
    ],
    "usage": {
        "prompt_tokens": 12,
        "completion_tokens": 7,
        "total_tokens": 19,
        "cost": 0.00021,
        "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": None},
    },
}

RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1_790_000_000.5,
    "model": "some-model",
    "status": "completed",
    "error": None,
    "billing": {"payer": "developer"},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [{"type": "function", "name": "fetch_invoice", "parameters": {"type": "object"}, "strict": True}],
    "text": {"format": {"type": "json_schema", "name": "answer", "schema": {"type": "object"}}},
    "output": [
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "effort_used": 3},
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "name": "fetch_invoice",
            "arguments": '{"id":"INV-109"}',
            "status": "completed",
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "Paid.", "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "no more"},
            ],
        },
    ],
    "usage": {
        "input_tokens": 12,
        "output_tokens": 7,
        "total_tokens": 19,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 2},
    },
}

MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "some-model",
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "context_management": {"applied_edits": []},
    "content": [
        {"type": "thinking", "thinking": "I need the invoice.", "signature": "c2ln"},
        {"type": "text", "text": "Let me look.", "citations": None},
        {"type": "tool_use", "id": "toolu_1", "name": "fetch_invoice", "input": {"id": "INV-109", "pages": [1, None]}},
    ],
    "usage": {"input_tokens": 12, "output_tokens": 7, "cache_read_input_tokens": None, "inference_geo": "eu"},
}


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The document with one value replaced, at a path of keys and indices."""
    document = copy.deepcopy(document)
    *above, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
    place: Any = document
    for key in above:
        place = place[key]
    place[last] = value
    return document


def without(document: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The document without some of its keys."""
    return {key: value for key, value in document.items() if key not in keys}


ANSWERS: dict[str, tuple[type[pydantic.BaseModel], dict[str, Any]]] = {
    "chat": (ChatCompletion, CHAT),
    "chat, an unknown finish_reason": (ChatCompletion, changed(CHAT, "choices.0.finish_reason", "eos")),
    "chat, numbers as text and as float": (
        ChatCompletion,
        changed(changed(CHAT, "created", "1790000000"), "choices.0.index", 0.0),
    ),
    "chat, a truth for a number": (ChatCompletion, changed(CHAT, "choices.0.index", False)),
    "chat, null where nothing may be null": (ChatCompletion, changed(CHAT, "choices.0.message.role", None)),
    "chat, a tool call of an unknown type": (
        ChatCompletion,
        changed(CHAT, "choices.0.message.tool_calls.1", {"id": "call_2", "type": "browser", "browser": {"url": "u"}}),
    ),
    "chat, no choices, an error instead": (
        ChatCompletion,
        {**without(CHAT, "choices", "usage"), "error": {"code": 429, "message": "slow down"}},
    ),
    "chat, a field with a tag's name": (ChatCompletion, {**CHAT, "extension": {"$tuple": [1, 2]}}),
    "response": (Response, RESPONSE),
    "response, an unknown status": (Response, changed(RESPONSE, "output.1.status", "thinking")),
    "response, an older server's usage": (
        Response,
        changed(RESPONSE, "usage.input_tokens_details", {"cached_tokens": 4}),
    ),
    "response, an item of an unknown type": (
        Response,
        changed(RESPONSE, "output.2", {"type": "quantum_call", "id": "q_1", "spin": 0.5}),
    ),
    "response, an unknown annotation": (
        Response,
        changed(RESPONSE, "output.2.content.0.annotations", [{"type": "map_citation", "place": "here"}]),
    ),
    "message": (Message, MESSAGE),
    "message, a block of an unknown type": (
        Message,
        changed(MESSAGE, "content.1", {"type": "hologram", "points": [1, 2]}),
    ),
    "message, a signature that is missing": (
        Message,
        changed(MESSAGE, "content.0", {"type": "thinking", "thinking": "hm"}),
    ),
    "message, an unknown stop_reason": (Message, changed(MESSAGE, "stop_reason", "tired")),
    "message, an empty one": (Message, {}),
}


# --- clients whose server is a function -------------------------------------------------------------------------------


class Server:
    """Answers every request with one document and keeps the requests' bodies; nothing leaves the process."""

    def __init__(self, document: Any, status: int = 200) -> None:
        self.bodies: list[Any] = []
        self._document = document
        self._status = status

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        self.bodies.append(json.loads(request.content))
        return httpx2.Response(self._status, json=self._document, headers={"x-request-id": "req_1"})

    def _options(self) -> dict[str, Any]:
        transport = httpx2.MockTransport(self._answer)
        return {
            "api_key": "none",
            "base_url": "http://localhost/v1",
            "max_retries": 0,
            "http_client": httpx2.Client(transport=transport),
        }

    def chat(self, messages: Any = ()) -> ChatCompletion:
        with openai.OpenAI(**self._options()) as client:
            return client.chat.completions.create(model="m", messages=list(messages))

    def respond(self) -> Response:
        with openai.OpenAI(**self._options()) as client:
            return client.responses.create(model="m", input="hello")

    def message(self) -> Message:
        with anthropic.Anthropic(**self._options()) as client:
            return client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hello"}])


def received(cls: type[pydantic.BaseModel], document: dict[str, Any]) -> Any:
    """What the provider's client makes of the document."""
    server = Server(document)
    calls: dict[Any, Callable[[], Any]] = {
        ChatCompletion: server.chat,
        Response: server.respond,
        Message: server.message,
    }
    return calls[cls]()


def both_times(bench: Bench, value: Any, returns: Any) -> list[Any]:
    """What the step's caller gets live, and what he gets of another ledger at replay."""
    live = program(bench).execute_step(RUN, "model", {}, lambda: value, returns=returns)
    replayed = program(bench).execute_step(RUN, "model", {}, never, returns=returns)
    assert repr(live) == repr(replayed)
    return [live, replayed]


def shape(value: Any) -> Any:
    """Every class, field, extra field and value of an object, as deep as it goes."""
    if isinstance(value, pydantic.BaseModel):
        names = type(value).model_fields.keys() | (value.model_extra or {}).keys()
        return type(value), {name: shape(getattr(value, name)) for name in sorted(names)}
    if isinstance(value, list):
        return [shape(item) for item in value]
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return type(value), value


def assert_alike(got: Any, original: Any) -> None:
    assert shape(got) == shape(original)
    assert got == original
    assert got.model_dump(warnings=False) == original.model_dump(warnings=False)
    assert json.loads(got.model_dump_json(warnings=False)) == json.loads(original.model_dump_json(warnings=False))
    assert got.to_dict(warnings=False) == original.to_dict(warnings=False), "what was left out is left out"


# --- declared ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ANSWERS)
def test_what_a_client_returned_is_what_the_caller_gets_live_and_at_replay(bench: Bench, name: str) -> None:
    cls, document = ANSWERS[name]
    original = received(cls, document)
    assert original.to_dict(warnings=False) == document, "the client keeps all that the server sent"
    for got in both_times(bench, original, cls):
        assert_alike(got, original)


@pytest.mark.parametrize(("cls", "document"), [(ChatCompletion, CHAT), (Response, RESPONSE), (Message, MESSAGE)])
def test_a_validated_object_comes_back_as_well(bench: Bench, cls: Any, document: dict[str, Any]) -> None:
    original = cls.model_validate(document)
    for got in both_times(bench, original, cls):
        assert_alike(got, original)


def test_an_answer_is_read_by_its_attributes_both_times(bench: Bench) -> None:
    for completion in both_times(bench, received(ChatCompletion, CHAT), ChatCompletion):
        message = completion.choices[0].message
        assert message.content is None
        assert message.reasoning_content == "I need the invoice."
        assert message.tool_calls[0].function.name == "fetch_invoice"
        assert message.tool_calls[1].custom.input == "ä\U0001f600"
        assert completion.usage.prompt_tokens_details.cached_tokens == 4
        assert completion.usage.cost == 0.00021
        assert completion.x_groq["usage"] == {"queue_time": 0.5}


def test_the_members_of_a_union_are_of_their_own_classes_both_times(bench: Bench) -> None:
    message = Server(changed(MESSAGE, "stop_reason", "tired")).message()
    for got in both_times(bench, message, Message):
        assert [type(block) for block in got.content] == [ThinkingBlock, TextBlock, ToolUseBlock]
        assert got.content[2].input == {"id": "INV-109", "pages": [1, None]}


def test_the_items_of_a_response_are_of_their_own_classes_both_times(bench: Bench) -> None:
    response = Server(changed(RESPONSE, "status", "pausing")).respond()
    for got in both_times(bench, response, Response):
        assert [type(item) for item in got.output] == [
            ResponseReasoningItem,
            ResponseFunctionToolCall,
            ResponseOutputMessage,
        ]
        assert got.output_text == "Paid."
        assert got.text.format.schema_ == {"type": "object"}, "a field whose name is not the server's"


@pytest.mark.parametrize("document", [CHAT, changed(CHAT, "choices.0.finish_reason", "eos")])
def test_a_message_is_handed_back_to_the_provider_with_the_same_bytes(bench: Bench, document: dict[str, Any]) -> None:
    server = Server(document)
    original = server.chat()
    for completion in [original, *both_times(bench, original, ChatCompletion)]:
        server.chat([completion.choices[0].message])
    _, *sent = server.bodies
    assert sent[0]["messages"][0]["tool_calls"][0]["id"] == "call_1"
    assert sent[0] == sent[1] == sent[2]


@pytest.mark.parametrize("name", [name for name, (_, document) in ANSWERS.items() if document])
def test_a_union_of_providers_is_read_as_the_class_that_the_answer_names(bench: Bench, name: str) -> None:
    cls, document = ANSWERS[name]
    original = received(cls, document)
    for got in both_times(bench, original, Response | ChatCompletion | Message | None):
        assert_alike(got, original)


def test_the_chunks_of_a_stream_come_back_in_a_list(bench: Bench) -> None:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, {"content": "Hi", "logits": [0.5]}, {}]
    chunks = [
        ChatCompletionChunk.construct(
            **without(CHAT, "choices", "usage"),
            choices=[{"index": 0, "delta": delta, "finish_reason": "eos" if not delta else None}],
        )
        for delta in deltas
    ]
    for got in both_times(bench, chunks, list[ChatCompletionChunk]):
        assert shape(got) == shape(chunks)
        assert [chunk.choices[0].delta.content for chunk in got] == ["", "Hi", None]


class Invoice(pydantic.BaseModel):
    number: int
    note: str = "none"


@pytest.mark.parametrize("finish_reason", ["stop", "eos"])
def test_a_parsed_answer_holds_the_users_class_both_times(bench: Bench, finish_reason: str) -> None:
    document = changed(CHAT, "choices.0.finish_reason", finish_reason)
    document["choices"][0]["message"] = {"role": "assistant", "content": '{"number":7}', "parsed": {"number": 7}}
    declared: Any = ParsedChatCompletion[Invoice]
    original = declared.construct(**document)
    for got in both_times(bench, original, declared):
        assert_alike(got, original)
        assert got.choices[0].message.parsed == Invoice(number=7)


def test_a_dataclass_may_hold_what_a_client_returned(bench: Bench) -> None:
    from dataclasses import make_dataclass

    turn: Any = make_dataclass("Turn", [("number", int), ("completion", ChatCompletion)])
    original = received(*ANSWERS["chat, an unknown finish_reason"])
    for got in both_times(bench, turn(1, original), turn):
        assert type(got) is turn
        assert_alike(got.completion, original)


# --- undeclared -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chat", "chat, numbers as text and as float", "response", "message"])
def test_without_returns_it_is_plain_data_both_times_with_one_warning_that_names_returns(
    bench: Bench, name: str
) -> None:
    cls, document = ANSWERS[name]
    fresh = pydantic.create_model(f"{cls.__name__}_{bench.kind}_{len(name)}", __base__=cls)  # a class is warned of once
    original = cast(Any, fresh).construct(**document)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = both_times(bench, original, None)
    assert [warning.category for warning in caught] == [PlainDataWarning]
    assert "returns=" in str(caught[0].message)
    for plain in got:
        assert type(plain) is dict
        assert plain == original.model_dump(warnings=False)


# --- a class that only looks like a provider's ------------------------------------------------------------------------


class Draft(pydantic.BaseModel):
    """Has a way of its own to be built without validation, and defaults that are not the same each time."""

    id: str = pydantic.Field(default_factory=lambda: str(uuid.uuid4()))
    lines: list[str] = []
    title: str = ""

    @classmethod
    def model_construct(cls, _fields_set: set[str] | None = None, **values: Any) -> Self:
        return super().model_construct(_fields_set, **values)


def test_a_default_that_was_made_or_changed_is_stored_although_nobody_set_it(bench: Bench) -> None:
    original = Draft(title="t")
    original.lines.append("x")
    for got in both_times(bench, original, Draft):
        assert type(got) is Draft
        assert got.model_dump() == original.model_dump()


class Doubling(pydantic.BaseModel):
    """Makes another value of its own data each time it is validated, and cannot be built in any other way."""

    number: int

    @pydantic.field_validator("number")
    @classmethod
    def _double(cls, number: int) -> int:
        return 2 * number

    @classmethod
    def model_construct(cls, _fields_set: set[str] | None = None, **values: Any) -> Self:
        raise NotImplementedError


def test_a_class_that_cannot_be_built_without_validation_is_validated_both_times(bench: Bench) -> None:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        live, replayed = both_times(bench, Doubling(number=1), Doubling)
    assert live == replayed


# --- exceptions -------------------------------------------------------------------------------------------------------


class InvoiceNotFound(Exception):
    def __init__(self, number: int, *, where: str) -> None:
        super().__init__(f"no invoice {number} in {where}")
        self.number = number


class ArchivedInvoice(InvoiceNotFound):
    def __init__(self, number: int) -> None:
        super().__init__(number, where="the archive")


class Slotted(Exception):
    __slots__ = ("status",)

    def __init__(self, status: int) -> None:
        self.status = status

    def __str__(self) -> str:
        return f"the bank answered {self.status}"


class Rejected(ExceptionGroup[Exception]):
    pass


def refused(status: int, provider: str = "chat") -> Exception:
    """What the provider's client raises when its server answers with this status."""
    server = Server({"error": {"message": "slow down", "type": "rate", "code": "x"}}, status)
    try:
        getattr(server, provider)()
    except Exception as error:
        return error
    raise AssertionError("it was not refused")


ERRORS: dict[str, tuple[Callable[[], Exception], type[BaseException]]] = {
    "further arguments": (lambda: InvoiceNotFound(7, where="acme"), InvoiceNotFound),
    "a class below the declared one": (lambda: ArchivedInvoice(7), InvoiceNotFound),
    "slots and a text of its own": (lambda: Slotted(503), Slotted),
    "a group": (lambda: ExceptionGroup("two", [ValueError(1), KeyError("k")]), ExceptionGroup),
    "a group's subclass": (lambda: Rejected("two", [ValueError(1), ArchivedInvoice(2)]), Rejected),
    "openai, 404": (lambda: refused(404), openai.NotFoundError),
    "openai, 429": (lambda: refused(429), openai.RateLimitError),
    "openai, 500": (lambda: refused(500), openai.APIStatusError),
    "openai, 400": (lambda: refused(400), openai.OpenAIError),
    "openai, a timeout": (
        lambda: openai.APITimeoutError(httpx2.Request("POST", "http://localhost")),
        openai.APIConnectionError,
    ),
    "openai, cut off": (
        lambda: openai.LengthFinishReasonError(completion=ChatCompletion.construct(**CHAT)),
        openai.LengthFinishReasonError,
    ),
    "anthropic, 429": (lambda: refused(429, "message"), anthropic.RateLimitError),
}


def caught_both_times(bench: Bench, error: Exception, kind: type[BaseException], **options: Any) -> list[Any]:
    """What `except kind` catches live and at replay. A failure is replayed once something follows it."""
    seen: list[BaseException] = []
    for function in (raising(error), never):
        ledger = program(bench)
        try:
            ledger.execute_step(RUN, "tool", {}, function, **options)
        except kind as one:
            seen.append(one)
        assert ledger.execute_step(RUN, "next", {}, lambda: "went on") == "went on"
    assert len(seen) == 2
    return seen


@pytest.mark.parametrize("name", ERRORS)
def test_except_works_live_and_at_replay_for_a_declared_error(bench: Bench, name: str) -> None:
    make, declared = ERRORS[name]
    error = make()
    live, replayed = caught_both_times(bench, error, declared, raises=(declared,))
    assert live is error
    assert str(replayed) == str(error)
    assert isinstance(replayed.__cause__, StepFailed)
    assert replayed.__cause__.is_a(f"{type(error).__module__}.{type(error).__qualname__}")


@pytest.mark.parametrize("name", ERRORS)
def test_an_undeclared_error_is_step_failed_live_and_at_replay_and_tells_its_classes(bench: Bench, name: str) -> None:
    make, above = ERRORS[name]
    error = make()
    failures = caught_both_times(bench, error, StepFailed)
    for failure in failures:
        assert type(failure) is StepFailed
        assert str(failure) == f"Tool execution failed: {type(error).__qualname__}: {error}"
        assert failure.is_a(f"{type(error).__module__}.{type(error).__qualname__}")
        assert failure.is_a(f"{above.__module__}.{above.__qualname__}")
        assert not failure.is_a("builtins.OSError")
    assert failures[0].error == failures[1].error


def test_an_error_that_is_declared_by_another_class_alone_is_step_failed_both_times(bench: Bench) -> None:
    error = InvoiceNotFound(7, where="acme")
    caught_both_times(bench, error, StepFailed, raises=(ArchivedInvoice, openai.OpenAIError))
