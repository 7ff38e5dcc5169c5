"""Calls of tools: templates are asked how they write them, answers are read and forced in that form."""

from __future__ import annotations

import json

import openai
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.errors import RequestError
from pagebinder.models import tiny_path
from pagebinder.server import create_app
from pagebinder.server.chat import ChatTemplate
from pagebinder.server.tool_call_kinds import Tool
from pagebinder.server.tool_calls import CallReader
from tests.helpers import tiny_llama
from tests.server import tool_templates as templates
from tests.server.serving import serving

pytestmark = pytest.mark.usefixtures("captured_once")

# Answers are compared: a prompt that is partly there is computed in other shapes, which may decide a tie otherwise.
CONFIG = EngineConfig(num_kv_blocks=128, max_num_seqs=4, check_integrity=True, prefix_caching=False)
ENDS = ("<|im_end|>", "</s>")
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [Tool("get_weather", WEATHER), Tool("now", {})]
ARGUMENTS = {"city": 'Ulm <b> "x" {1}', "days": 3}
CALLS = [("get_weather", ARGUMENTS), ("now", {})]
USER = {"role": "user", "content": "What is the weather like?"}
MODE = {"type": "string", "enum": ["r", "w"]}
OPEN = {
    "type": "function",
    "function": {
        "name": "open_file",
        "description": "Opens a file.",
        "parameters": {
            "type": "object",
            "properties": {"mode": MODE, "lines": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["mode", "lines"],
            "additionalProperties": False,
        },
    },
}
WRONG = {"properties": {"a": {"type": "nothing"}}}
CLOSE = {"type": "function", "function": {"name": "close_file"}}


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(str(tiny_path()))


@pytest.fixture
def chat(tokenizer):
    return lambda text: ChatTemplate(tokenizer, text)


def written(chat: ChatTemplate, calls, content: str = "") -> str:
    """An assistant's turn as the template writes it, without its end."""
    made = [{"id": f"abcdefgh{i}", "name": name, "arguments": args} for i, (name, args) in enumerate(calls)]
    message = {"role": "assistant", **chat._calls[1].calls(made)} | ({"content": content} if content else {})
    asked = chat._render([USER], {})
    text = chat._render([USER, message], {"add_generation_prompt": False})
    assert text.startswith(asked)
    return text[len(asked) : next(text.rindex(end) for end in ENDS if text.rstrip().endswith(end))]


def read(chat: ChatTemplate, text: str, step: int):
    """(content, calls) of a text that comes in pieces of `step` characters."""
    reader = CallReader(chat.call_format(), TOOLS)
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    news = [reader.read(piece, finished=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    assert reader.num_calls == sum(len(n.calls) for n in news)
    calls = [(call.name, json.loads(call.arguments)) for n in news for call in n.calls]
    return "".join(n.content for n in news), calls


@pytest.mark.parametrize("step", [1, 5, 10_000])
@pytest.mark.parametrize("name", templates.ALL)
def test_calls_are_read_as_the_template_writes_them(chat, name, step):
    template = chat(templates.ALL[name])
    assert read(template, written(template, CALLS[:1]), step) == ("", CALLS[:1])
    if name != "llama":
        assert read(template, written(template, CALLS), step) == ("", CALLS)
        assert read(template, written(template, CALLS[::-1]), step) == ("", CALLS[::-1])
    if name not in ("llama", "mistral"):
        assert read(template, written(template, CALLS, "I look."), step) == ("I look.", CALLS)


@pytest.mark.parametrize("step", [1, 10_000])
@pytest.mark.parametrize("name", templates.ALL)
def test_what_is_no_call_stays_text(chat, name, step):
    template = chat(templates.ALL[name])
    whole = written(template, CALLS[:1])
    for text in (
        "No call, only { and [ and < and >.\n\nAnother line.",
        '{"name": 3}',
        '[{"city": "Ulm"}] and more',
        whole[: whole.index("Ulm")],
        f"{template.call_format().mark} is what a call begins with.",
        "ends in white space \n",
    ):
        assert read(template, text, step) == (text, [])


def test_text_is_shown_once_it_cannot_be_a_call(chat):
    reader = CallReader(chat(templates.HERMES).call_format(), TOOLS)
    shown = [reader.read(piece, finished=False).content for piece in ("I ", "see <", "b> and ", "<tool", "<")]
    assert shown == ["I", " see", " <b> and", "", " <tool"]
    assert reader.read("!", finished=True).content == "<!"


def test_text_behind_calls_is_kept(chat):
    template = chat(templates.HERMES)
    text = written(template, CALLS[1:])
    assert read(template, f"{text}\n", 1) == ("", CALLS[1:])
    content, calls = read(template, f"{text}\nDone.", 1)
    assert (content.strip(), calls) == ("Done.", CALLS[1:])


def test_other_white_space_and_another_order_of_keys(chat):
    hermes, coder = chat(templates.HERMES), chat(templates.QWEN_CODER)
    text = '<tool_call>{"arguments": {"city": "Ulm"},\n "name":"get_weather"}</tool_call>'
    assert read(hermes, text, 1) == ("", [("get_weather", {"city": "Ulm"})])
    pairs = "<parameter=city>Ulm</parameter><parameter=days>3</parameter>"
    text = f"<tool_call><function=get_weather>{pairs}</function></tool_call>"
    assert read(coder, text, 1) == ("", [("get_weather", {"city": "Ulm", "days": 3})])
    text = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    assert read(coder, text, 1) == ("", [("now", {})])


@pytest.mark.parametrize(
    ("template", "text", "calls"),
    [
        ("llama", '{"name": "now", "arguments": {"a": 1}}', [("now", {"a": 1})]),
        ("llama", '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', [("now", {})] * 2),
        ("hermes", '<tool_call>\n{"name": "now", "parameters": {"a": 1}}\n</tool_call>', [("now", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
        ("hermes", '<tool_call>[{"name": "now"}, {"name": "now"}]</tool_call>', [("now", {})] * 2),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>',
            [("now", {"a": 1})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": {"a": "b\nc"}}</tool_call>',
            [("now", {"a": "b\nc"})],
        ),
        ("with ids", '[TOOL_CALLS]now[CALL_ID]aBc_9[ARGS]{"a": 1}', [("now", {"a": 1})]),
    ],
)
def test_calls_as_models_write_them_too(chat, template, text, calls):
    for step in (1, 10_000):
        assert read(chat(templates.ALL[template]), text, step) == ("", calls)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "now", "arguments": "Ulm"}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": "{\\"a\\": 1"}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {"a": NaN}}\n</tool_call>',
    ],
)
def test_arguments_that_are_no_object_are_no_call(chat, text):
    assert read(chat(templates.HERMES), text, 1) == (text, [])


def test_arguments_are_the_models_own_text(chat):
    for arguments in ('{"a": 1.10, "b": 1E5, "c": "\\ud83d", "d": "\u00e9", "a": 2}', "{ }"):
        reader = CallReader(chat(templates.HERMES).call_format(), TOOLS)
        news = reader.read(
            f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>', finished=True
        )
        assert [call.arguments for call in news.calls] == [arguments]


def test_what_only_mentions_a_mark_is_shown_at_once(chat):
    for name, text in (
        ("hermes", "The <tool_call> tag"),
        ("qwen coder", "<tool_call> is"),
        ("llama", '[1] says, {"x'),
    ):
        reader = CallReader(chat(templates.ALL[name]).call_format(), TOOLS)
        assert "".join(reader.read(c, finished=False).content for c in text) == text


def test_values_of_pairs_by_their_schemas(chat):
    schemas = {
        "a": {"type": "string"}, "b": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "c": {"enum": ["1", "2"]},
        "d": {"type": ["integer", "null"]}, "e": {"type": "boolean"}, "f": {"type": "object"}, "g": {},
    }  # fmt: skip
    tools = [Tool("f", {"type": "object", "properties": schemas})]
    given = {"a": "12", "b": "12", "c": "1", "d": "None", "e": "True", "f": '{"x": [1]}', "g": "[1, 2]"}
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    reader = CallReader(chat(templates.QWEN_CODER).call_format(), tools)
    news = reader.read(f"<tool_call>\n<function=f>\n{pairs}</function>\n</tool_call>", finished=True)
    values = {"a": "12", "b": "12", "c": "1", "d": None, "e": True, "f": {"x": [1]}, "g": [1, 2]}
    assert [json.loads(call.arguments) for call in news.calls] == [values]
    for properties in (None, [], "x"):  # no schemas
        reader = CallReader(chat(templates.GLM).call_format(), [Tool("f", {"properties": properties})])
        news = reader.read(
            "<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", finished=True
        )
        assert [json.loads(call.arguments) for call in news.calls] == [{"k": 1}]


def test_a_broken_call_takes_no_other_along(chat):
    broken = "<tool_call>\n<function=now>\n<parameter=s>\nx\n</function>\n</tool_call>\n"
    template = chat(templates.QWEN_CODER)
    content, calls = read(template, broken + written(template, CALLS[:1]), 1)
    assert (content.strip(), calls) == (broken.strip(), CALLS[:1])


def test_the_end_may_be_cut(chat):
    template = chat(templates.HERMES)
    whole = written(template, CALLS[1:])
    for end in range(whole.rindex("}") + 1, len(whole)):
        assert read(template, whole[:end], 1) == ("", CALLS[1:])


def test_one_call_where_several_are_not_wanted(chat):
    template = chat(templates.HERMES)
    reader = CallReader(template.call_format(), TOOLS, several=False)
    news = [reader.read(c, finished=False) for c in written(template, CALLS)] + [
        reader.read("", finished=True)
    ]
    assert [call.name for n in news for call in n.calls] == ["get_weather"]
    assert "".join(n.content for n in news) == ""


def test_json_without_a_mark_is_a_call_of_a_known_function_alone(chat):
    template = chat(templates.LLAMA)
    assert read(template, '{"name": "other", "parameters": {}}', 1) == (
        '{"name": "other", "parameters": {}}',
        [],
    )
    assert read(template, '{"name": "now", "parameters": {}}', 1) == ("", [("now", {})])


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (templates.WITHOUT_TOOLS, "shows the model no tools"),
        (templates.GEMMA, "in a form that is not understood"),
    ],
)
def test_templates_that_are_not_understood_are_refused(chat, template, why):
    with pytest.raises(RequestError, match=f"its chat template .*{why}"):
        chat(template).call_format()


# Over HTTP


@pytest.fixture(scope="module")
def compiled():
    return pagebinder.compile_model(tiny_path(), CompileConfig(executable="eager"))


@pytest.fixture(scope="module")
def client(compiled):
    with serving(create_app(compiled, CONFIG, chat_template=templates.HERMES)) as server:
        yield server.client()


def ask(client, **options):
    return client.chat.completions.create(
        model="tiny", messages=[USER], temperature=0, max_tokens=80, **options
    )


def check_call(call, name: str) -> dict:
    assert call.type == "function" and call.function.name == name and len(call.id) == 9
    return json.loads(call.function.arguments)


def test_without_a_call_an_answer_is_what_the_engine_gives(client, compiled, chat):
    answer = ask(client, tools=[OPEN])
    prompt = chat(templates.HERMES)._render([USER], {"tools": [OPEN]})
    assert "open_file" in prompt
    ids = compiled.source.tokenizer()(prompt, add_special_tokens=False)["input_ids"]
    (output,) = compiled.engine(CONFIG).generate([ids], SamplingParams(max_tokens=80, temperature=0.0))
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.tool_calls) == (output.text, None)
    assert (choice.finish_reason, answer.usage.prompt_tokens) == (output.finish_reason, len(ids))
    pieces = ask(client, tools=[OPEN], stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == output.text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "open_file"}}])
def test_a_call_that_is_asked_for(client, choice):
    answer = ask(client, tools=[OPEN, CLOSE], tool_choice=choice, parallel_tool_calls=False)
    (given,) = answer.choices
    assert given.message.content is None and given.finish_reason == "tool_calls"
    (call,) = given.message.tool_calls
    arguments = check_call(call, call.function.name)
    if call.function.name == "open_file":
        assert arguments["mode"] in "rw" and 0 <= arguments["lines"] <= 9
    if choice != "required":
        assert call.function.name == "open_file"


def test_a_stream_of_calls(client):
    whole = ask(client, tools=[OPEN], tool_choice="required", parallel_tool_calls=False)
    pieces = list(ask(client, tools=[OPEN], tool_choice="required", parallel_tool_calls=False, stream=True))
    (delta,) = [p.choices[0].delta for p in pieces if p.choices[0].delta.tool_calls]
    (call,) = delta.tool_calls
    assert call.index == 0 and check_call(call, "open_file")
    assert call.function.arguments == whole.choices[0].message.tool_calls[0].function.arguments
    assert not any(p.choices[0].delta.content for p in pieces)
    assert pieces[-1].choices[0].finish_reason == "tool_calls"


def test_a_call_or_json_in_its_place(client):
    schema = {"name": "x", "schema": {"type": "object", "properties": {"mode": MODE}, "required": ["mode"],
              "additionalProperties": False}}  # fmt: skip
    answer = ask(client, tools=[OPEN], response_format={"type": "json_schema", "json_schema": schema})
    message = answer.choices[0].message
    if message.tool_calls:
        check_call(message.tool_calls[0], "open_file")
    else:
        assert json.loads(message.content)["mode"] in "rw"


def test_no_tool_is_shown_where_none_may_be_called(client):
    plain, none = ask(client), ask(client, tools=[OPEN], tool_choice="none")
    assert none.choices[0].message.content == plain.choices[0].message.content
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens


def test_conversations_with_calls_and_their_results(client, chat, compiled):
    function = {"name": "open_file", "arguments": '{"mode": "r", "lines": 3}'}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }
    messages = [USER, called, {"role": "tool", "tool_call_id": "a", "content": "opened"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=[OPEN], max_tokens=4)
    as_template = {
        **called,
        "tool_calls": [{"function": {**function, "arguments": json.loads(function["arguments"])}}],
    }
    prompt = chat(templates.HERMES)._render([USER, as_template, messages[2]], {"tools": [OPEN]})
    assert '<tool_call>\n{"name": "open_file", "arguments": {"mode": "r", "lines": 3}}' in prompt
    assert answer.usage.prompt_tokens == len(
        compiled.source.tokenizer()(prompt, add_special_tokens=False)["input_ids"]
    )


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"tools": [OPEN], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "no tool 'x'"),
        ({"tools": [OPEN, OPEN]}, "two with the name 'open_file'"),
        ({"tools": [OPEN], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: Input should be 'function'"),
        ({"tool_choice": "required"}, "give tools"),
        ({"tools": [OPEN], "tool_choice": {"type": "function"}}, 'tool_choice: use "none", "auto", "required" or'),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            r"tools\[0\].function.parameters: arguments are an object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": None}}}]},
            r"tools\[0\].function.parameters: arguments are an object",
        ),
        ({"tools": [OPEN], "tool_choice": "required", "response_format": {"type": "json_object"}}, "asks for a call"),
        ({"tools": [OPEN], "extra_body": {"structured_outputs": {"regex": "a+"}}}, "tools go with a JSON schema"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": WRONG}}],
                "tool_choice": "required",
            },
            r"tools\[0\].function.parameters, of 'f': The guide",
        ),
    ],
)  # fmt: skip
def test_bad_tools_are_refused(client, body, why):
    with pytest.raises(openai.BadRequestError, match=why):
        ask(client, **body)


def test_bad_calls_in_a_conversation_are_refused(client):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{not json"}}
    with pytest.raises(openai.BadRequestError, match=r"messages.0.tool_calls.0.function.arguments"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "assistant", "tool_calls": [call]}, USER]
        )


@pytest.mark.parametrize(
    ("template", "special"),
    [
        ("mistral", True),
        ("names outside", True),
        ("deepseek", True),
        ("nested", True),
        ("nested", False),
        ("hermes", False),
    ],
)
def test_marks_may_be_added_tokens(tmp_path, template, special):
    """The text of an output leaves out special ones; others look special to the library of grammars."""
    own = PreTrainedTokenizerFast.from_pretrained(str(tiny_path()))
    marks = [
        "[TOOL_CALLS]",
        "[ARGS]",
        "<calls_begin>",
        "<call_end>",
        "<sep>",
        "<|call|>",
        "<|/call|>",
        "<|im_end|>",
    ]
    own.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    own.eos_token = "<|im_end|>"
    model = tiny_llama(vocab_size=len(own), eos_token_id=own.eos_token_id)
    model.save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    compiled = pagebinder.compile_model(tmp_path, CompileConfig(executable="eager"))
    with serving(
        create_app(compiled, CONFIG, chat_template=templates.ALL[template], model_name="tiny")
    ) as server:
        options = {"tools": [OPEN], "tool_choice": "required", "parallel_tool_calls": False}
        whole = ask(server.client(), **options)
        (call,) = whole.choices[0].message.tool_calls
        check_call(call, "open_file")
        pieces = list(ask(server.client(), **options, stream=True))
        (delta,) = [p.choices[0].delta for p in pieces if p.choices[0].delta.tool_calls]
        assert delta.tool_calls[0].function.arguments == call.function.arguments
        assert not any(p.choices[0].delta.content for p in pieces)
