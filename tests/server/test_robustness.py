"""What goes wrong with requests, clients and steps: clear errors, nothing left behind, and the server goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import openai
import pytest
from fastapi import FastAPI, HTTPException
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import pagebinder
from pagebinder import CompileConfig, EngineConfig
from pagebinder.errors import ConfigError, RequestError
from pagebinder.models import tiny_path
from pagebinder.server import create_app
from pagebinder.server.prompt_limits import BodyLimit, PromptLimit
from tests.server.serving import eventually, serving

pytestmark = pytest.mark.usefixtures("captured_once")

CONFIG = EngineConfig(num_kv_blocks=64, max_num_seqs=2, check_integrity=True)
LONG = {"prompt": "The open function", "max_tokens": 900, "ignore_eos": True}
USER = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def compiled():
    return pagebinder.compile_model(tiny_path(), CompileConfig(executable="eager"))


@pytest.fixture
def engines(compiled, monkeypatch):
    """The engines that are made from here on."""
    made, make = [], type(compiled).engine
    monkeypatch.setattr(
        type(compiled), "engine", lambda self, config=None: made.append(make(self, config)) or made[-1]
    )
    return made


@pytest.fixture
def server(compiled, engines):
    with serving(create_app(compiled, CONFIG)) as server:
        yield server
    for engine in engines:
        assert not engine.has_unfinished
        engine.check_integrity()


BAD = [
    ({"tempature": 0}, "no field 'tempature'; did you mean 'temperature'?"),
    ({"temperature": -1}, "temperature=-1.0"),
    ({"temperature": "0.5"}, "temperature: "),
    ({"max_tokens": 0}, "max_tokens=0: use at least 1."),
    ({"max_tokens": 2.5}, "max_tokens: "),
    ({"max_tokens": True}, "max_tokens: "),
    ({"top_p": 0}, "top_p=0.0"),
    ({"n": 0}, "n=0"),
    ({"n": 100_000}, "n=100000: use 128 at most"),
    ({"logit_bias": {"99999": 1}}, "logit_bias [99999] are outside the vocabulary"),
    ({"logit_bias": {"a": 1}}, "logit_bias is for token ids, 0 or more, not for 'a'"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias is for token ids, 0 or more, not for '111"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5: "),
    ({"frequency_penalty": 500}, "frequency_penalty=500.0: use -100.0 to 100.0"),
    ({"min_tokens": 20}, "min_tokens=20 is more than max_tokens=16"),
    ({"response_format": {"type": "xml"}}, "response_format.type: "),
    ({"response_format": {"type": "json_schema"}}, 'json_schema goes with the type "json_schema"'),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        "(JsonSchema) is wrong",
    ),
    ({"structured_outputs": {}}, "give one of json, regex, choice and grammar"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "give one of json, regex, choice and grammar"),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "is for json"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp: "),
    ({"structured_outputs": {"regex": "(["}}, "The guide (Regex) is wrong"),
    ({"structured_outputs": {"json": "{"}}, "schema is no JSON"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "not both"),
    ({"echo": True}, "echo=True is not supported"),
    ({"stop_token_ids": [99_999]}, "outside the vocabulary"),
    ({"stop": [""]}, "use non-empty strings"),
    ({"stop": ["x"] * 300}, "300 stop strings: use 256 at most"),
    ({"prompt": ""}, "The prompt is empty"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "Give a prompt"),
    ({"prompt": [99_999]}, "out of range"),
    ({"prompt": ["x", ""]}, "prompts[1]: The prompt is empty"),
    ({"prompt": ["x"] * 3000}, "3000 prompts: give 1 to 2048"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": "a b " * 5000}, "tokens"),
    ({"encoder_prompt": ["y"]}, "no encoder"),
    ({"prompt": "a" * 100_000}, "100,000 characters: more tokens than the model takes"),
    ({"prompt": [5] * 100_000}, "100,000 tokens, but at most 1,023 are allowed"),
    ({"prompt": [5] * 1024}, "1,024 tokens, but at most 1,023 are allowed"),
    ({"prompt": "a\ud800"}, "half of a surrogate pair"),
    ({"\ud800": 1}, "The body: a name or a text is no Unicode: it holds half of a surrogate pair"),
    ({"response_format": {"type": "\ud800"}}, "response_format.type: a name or a text is no Unicode"),
    ({"prompt": [1.5]}, "prompt: use a text, a list of token ids, or a list of several of either"),
    ({"prompt": "The open function " * 20, "cache_salt": "\ud83d"}, "half of a surrogate pair"),
    ({"logprobs": 21}, "20 at most"),
    ({"prompt": ["x"] * 2000, "n": 100}, "give 4096 samples at most"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[str(list(fields)) for fields, _ in BAD])
def test_bad_requests_say_what_is_wrong(server, fields, message):
    status, answer = server.post("/v1/completions", {"prompt": "x"} | fields)
    assert status == 400 and message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


BAD_CHATS = [
    ({"messages": []}, "messages: "),
    ({"messages": [{"content": "x"}]}, "messages.0.role: "),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "the server with --prompt-embeds"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 'has the type "text" and no string'),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0] has no type"),
    ({"tools": [{"type": "function"}]}, "tools.0.function: Field required"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type: Input should be 'function'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name: String should match"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "two with the name 'f'"),
    ({"tool_choice": "required"}, "tool_choice asks for a call: give tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "chat template shows the model no tools"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "and only with it"),
    ({"top_logprobs": 2}, "top_logprobs needs logprobs=true"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "differ"),
    ({"messages": [{"role": "user", "content": "a\ud800"}]}, "half of a surrogate pair"),
    ({"messages": [{"role": "user", "content": "a" * 100_000}]}, "more tokens than the model takes"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "may not hold chat_template"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), BAD_CHATS, ids=[str(list(fields)) for fields, _ in BAD_CHATS])
def test_bad_conversations_say_what_is_wrong(compiled, fields, message):
    with serving(create_app(compiled, CONFIG, chat_template="{{ messages[0].content }}")) as server:
        status, answer = server.post("/v1/chat/completions", {"messages": USER} | fields)
        assert status == 400 and message in answer["error"]["message"]


def test_conversations_need_a_template_that_takes_them(compiled, server):
    with pytest.raises(openai.BadRequestError, match="no chat template.*--chat-template FILE"):
        server.client().chat.completions.create(model="tiny", messages=USER)
    template = "{{ raise_exception('roles must alternate') }}"
    with serving(create_app(compiled, CONFIG, chat_template=template)) as other:
        status, answer = other.post("/v1/chat/completions", {"messages": USER})
        assert status == 400 and "roles must alternate" in answer["error"]["message"]


def test_templates_that_are_none(compiled):
    with pytest.raises(ConfigError, match="wrong in line 2"):
        create_app(compiled, CONFIG, chat_template="\n{% if %}")


def test_errors_that_quote_halves_of_surrogate_pairs_can_be_sent(compiled):
    with serving(
        create_app(compiled, CONFIG, chat_template="{{ raise_exception(messages[0].role) }}")
    ) as server:
        body = {"messages": [{"role": "\ud800", "content": "x"}]}
        status, answer = server.post("/v1/chat/completions", body)
        assert status == 400 and "does not take this conversation: ?" in answer["error"]["message"]


def test_tokens_may_stand_for_any_number_of_characters():
    """As spaces do that a tokenizer drops, and words that it does not know."""
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    limit = PromptLimit(PreTrainedTokenizerFast(tokenizer_object=tokenizer), "prompt", 8)
    for text in ("a" + " " * 100_000 + "a", "b" * 100_000, "a " * 9, None, [1] * 8):
        limit.check(text)  # the engine counts its tokens
    for text in ("a " * 1000, [1] * 9):
        with pytest.raises(RequestError, match="The prompt has"):
            limit.check(text)


def test_bodies_that_are_too_large(server):
    status, answer = server.post("/v1/completions", {"prompt": "x", "user": "x" * (5 << 20)})
    assert status == 413 and "bytes" in answer["error"]["message"]
    with contextlib.closing(server.connect()) as connection:
        parts = (b"x" * (1 << 20) for _ in range(5))  # of unknown length
        connection.request("POST", "/v1/completions", parts, {"content-type": "application/json"})
        assert connection.getresponse().status == 413


@pytest.mark.parametrize("length_is_said", [True, False])
def test_a_client_that_sends_all_before_it_reads_gets_the_answer(server, length_is_said):
    """More than sockets hold, so it would meet a closed connection if the server took no more of it."""
    with contextlib.closing(server.connect()) as connection:
        part = b"x" * (1 << 20)
        body = part * 40 if length_is_said else (part for _ in range(40))
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 413 and b"4,194,304 bytes" in response.read()
    assert server.send("GET", "/health")[0] == 200


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(server):
    """A client that says "Expect: 100-continue" is not told to go on."""
    with contextlib.closing(server.connect()) as connection:
        connection.putrequest("POST", "/v1/completions")
        for header in (
            ("content-type", "application/json"),
            ("content-length", str(1 << 30)),
            ("expect", "100-continue"),
        ):
            connection.putheader(*header)
        connection.endheaders()
        connection.sock.settimeout(10)
        assert connection.sock.recv(12) == b"HTTP/1.1 413"


@pytest.mark.parametrize("length", [b"9" * 20, b"9" * 5000])
def test_a_length_of_any_number_of_digits_is_too_large(length):
    async def app(scope, receive, send):
        await receive()

    scope = {"type": "http", "headers": [(b"content-length", length)]}
    with pytest.raises(HTTPException) as caught:
        asyncio.run(BodyLimit(app, limit=100)(scope, None, None))
    assert caught.value.status_code == 413


@pytest.mark.parametrize("body", [b"{bad", b"", b"[1]", b"\xff\xfe", b"null"])
def test_what_is_no_json_object(server, body):
    status, text = server.send("POST", "/v1/completions", body)
    assert status == 400 and json.loads(text)["error"]["message"]


def test_no_such_place(server):
    for method, path, expected in (
        ("GET", "/v2", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/models/x", 404),
    ):
        status, text = server.send(method, path)
        assert status == expected and json.loads(text)["error"]["message"]


def test_fields_that_ask_for_nothing_are_taken(server):
    fields = {"user": "me", "metadata": {"a": "b"}, "presence_penalty": 0, "logit_bias": {}, "suffix": None}
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1} | fields)[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_takes_its_request_along(compiled, engines, stream):
    with serving(create_app(compiled, CONFIG, api_key="secret")) as server:
        leave(server, engines, stream)


def leave(server, engines, stream: bool) -> None:
    connection = server.connect()
    headers = {"content-type": "application/json", "authorization": "Bearer secret"}
    connection.request("POST", "/v1/completions", json.dumps(LONG | {"stream": stream}), headers)
    eventually(lambda: engines[0].stats().running)
    connection.close()
    eventually(lambda: not engines[0].has_unfinished)
    assert engines[0].generated_tokens < 900


def test_clients_that_leave_while_they_wait_are_forgotten(server, engines):
    connections = [server.connect() for _ in range(6)]
    for connection in connections:
        connection.request("POST", "/v1/completions", json.dumps(LONG), {"content-type": "application/json"})
    eventually(lambda: engines[0].stats().running == 2 and engines[0].stats().waiting == 4)
    for connection in reversed(connections):
        connection.close()
    eventually(lambda: not engines[0].has_unfinished)


def test_a_step_that_fails_ends_its_requests_and_not_the_server(server, engines, monkeypatch):
    engine = engines[0]

    def fail():
        raise RuntimeError("the kernel is gone")

    monkeypatch.setattr(engine, "step", fail)
    status, answer = server.post("/v1/completions", LONG)
    assert status == 503 and "the kernel is gone" in answer["error"]["message"]
    _, events = server.send("POST", "/v1/completions", LONG | {"stream": True})
    assert "the kernel is gone" in events
    monkeypatch.undo()
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


def test_the_end_of_the_server_is_the_end_of_its_requests(compiled, engines):
    with contextlib.suppress(ConnectionError), serving(create_app(compiled, CONFIG)) as server:
        connection = server.connect()
        body = json.dumps(LONG | {"stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        assert connection.getresponse().status == 200
        started = time.monotonic()
    assert time.monotonic() - started < 30 and not engines[0].has_unfinished
    engines[0].check_integrity()


def test_a_mounted_application_serves_from_the_first_request_and_wants_its_key(compiled):
    """Nobody runs the lifespan of a mounted application."""
    outer = FastAPI()
    outer.mount("/llm", create_app(compiled, CONFIG, api_key="secret", model_name="tiny"))
    with serving(outer) as server:
        assert server.send("GET", "/llm/health")[0] == 200
        body, key = {"prompt": "x", "max_tokens": 2}, {"authorization": "Bearer secret"}
        for path in ("/llm/v1/completions", "/llm/v1/models"):
            assert server.send("POST", path, body)[0] == 401
        status, answer = server.post("/llm/v1/completions", body, **key)
        assert status == 200 and answer["usage"]["completion_tokens"] == 2


def test_an_application_may_be_served_again(compiled):
    app = create_app(compiled, CONFIG)
    for _ in range(2):
        with serving(app) as server:
            assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


def test_the_api_key(compiled):
    with serving(create_app(compiled, CONFIG, api_key="secret")) as server:
        assert server.client("secret").models.list().data
        with pytest.raises(openai.AuthenticationError, match="bearer token"):
            server.client("other").models.list()
        assert server.send("POST", "/v1/completions", b"{}")[0] == 401
        assert server.send("GET", "/v1/models", authorization="bearer  secret ")[0] == 200
        assert server.send("GET", "/health")[0] == 200


@pytest.mark.parametrize("key", ["", " ", "schl\u00fcssel"])
def test_keys_that_nobody_could_bring(compiled, key):
    with pytest.raises(ConfigError, match="API key"):
        create_app(compiled, CONFIG, api_key=key)


def test_metrics_count(server):
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})[0] == 200
    status, text = server.send("GET", "/metrics")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert status == 200 and float(values["pagebinder_generated_tokens_total"]) == 3
    assert float(values["pagebinder_time_to_first_token_seconds_count"]) == 1
    assert float(values['pagebinder_finished_requests_total{reason="length"}']) == 1
    assert float(values["pagebinder_running"]) == 0


def test_an_encoders_options_are_not_a_decoders(compiled):
    class Encoder:
        source, embed = compiled.source, None

    with pytest.raises(ConfigError, match="no engine .* and no chat template"):
        create_app(Encoder(), CONFIG)
    with pytest.raises(ConfigError, match="no encoder"):
        create_app(compiled, CONFIG, pooling="mean")
