"""/v1/completions and /v1/chat/completions as OpenAI's own client sees them: the engine's tokens, nothing else."""

from __future__ import annotations

import json
import re
import threading

import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.models import tiny_path
from pagebinder.server import create_app
from pagebinder.server.token_texts import BYTES, TokenTexts
from tests.encoder_decoders import tiny
from tests.helpers import tiny_llama
from tests.server.serving import serving

pytestmark = pytest.mark.usefixtures("captured_once")

CONFIG = EngineConfig(num_kv_blocks=64, max_num_seqs=4, check_integrity=True)
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ name or 'assistant' }}:{% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "a file?"}]},
]
RENDERED = "system: Answer.\nuser: What is a file?\nassistant:"


@pytest.fixture(scope="module")
def compiled():
    return pagebinder.compile_model(tiny_path(), CompileConfig(executable="eager"))


@pytest.fixture(scope="module")
def server(compiled):
    with serving(create_app(compiled, CONFIG, chat_template=TEMPLATE)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture
def expected(compiled):
    """What an engine of its own gives."""

    def generate(prompts, **options):
        return compiled.engine(CONFIG).generate(prompts, SamplingParams(**options))

    return generate


def test_the_model_is_listed_under_its_directorys_name(client):
    assert [model.id for model in client.models.list().data] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "pagebinder"
    with pytest.raises(openai.NotFoundError, match="'other' is not served here; 'tiny' is"):
        client.completions.create(model="other", prompt="x")


def test_a_completion_is_what_the_engine_gives(client, expected):
    answer = client.completions.create(model="tiny", prompt="The open function", temperature=0, max_tokens=12)
    (output,) = expected(["The open function"], max_tokens=12, temperature=0.0)
    assert answer.choices[0].text == output.text and answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(output.prompt_token_ids), 12)


def test_sixteen_tokens_unless_told_otherwise(client):
    answer = client.completions.create(model="tiny", prompt="The open function", temperature=0)
    assert answer.usage.completion_tokens == 16


def test_all_ways_of_sampling_arrive(client, expected):
    options = {"max_tokens": 20, "temperature": 0.8, "top_p": 0.9, "seed": 3, "stop": ["e"], "n": 2}
    ours = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2, "stop_token_ids": [9], "ignore_eos": True}
    answer = client.completions.create(model="tiny", prompt=[5, 6, 7], extra_body=ours, **options)
    outputs = expected([[5, 6, 7]], **options, **ours)
    assert [c.text for c in answer.choices] == [o.text for o in outputs]
    assert [c.finish_reason for c in answer.choices] == [o.finish_reason for o in outputs]


def test_changes_of_logits_arrive(client, expected):
    options = {"max_tokens": 20, "temperature": 0, "frequency_penalty": 0.4, "presence_penalty": 0.6}
    bias = {12: 1.5, 100: -3}
    answer = client.completions.create(
        model="tiny", prompt=[5, 6, 7], logit_bias={str(k): v for k, v in bias.items()},
        extra_body={"min_tokens": 15}, **options,
    )  # fmt: skip
    (output,) = expected([[5, 6, 7]], logit_bias=bias, min_tokens=15, **options)
    assert answer.choices[0].text == output.text and answer.usage.completion_tokens >= 15
    assert output.token_ids != expected([[5, 6, 7]], max_tokens=20, temperature=0)[0].token_ids


STRUCTURED = {
    "json": ({"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}, json.loads),
    "regex": ("[0-9]{2}-[a-z]{1,5}", re.compile("[0-9]{2}-[a-z]{1,5}").fullmatch), "choice": (["a file", "no file"], {
        "a file", "no file"}.__contains__), "grammar": ('start: "yes" | "no"', {"yes", "no"}.__contains__),
}  # fmt: skip


@pytest.mark.parametrize("kind", STRUCTURED)
def test_structured_outputs(client, kind):
    wanted, holds = STRUCTURED[kind]
    options = {
        "model": "tiny",
        "prompt": "The open function",
        "max_tokens": 60,
        "n": 3,
        "seed": 3,
        "temperature": 0.5,
    }
    answer = client.completions.create(**options, extra_body={"structured_outputs": {kind: wanted}})
    texts = [c.text for c in answer.choices if c.finish_reason == "stop"]
    assert texts and all(holds(text) for text in texts)
    pieces = client.completions.create(
        **options, stream=True, extra_body={"structured_outputs": {kind: wanted}}
    )
    streamed = ["", "", ""]
    for piece in pieces:
        for choice in piece.choices:
            streamed[choice.index] += choice.text
    assert streamed == [c.text for c in answer.choices]


def test_several_prompts_and_samples_keep_their_order_and_draw_apart(client, expected):
    prompts = ["The open function", "A file", "The open function"]
    answer = client.completions.create(model="tiny", prompt=prompts, n=2, seed=5, max_tokens=8)
    outputs = [
        output
        for i, prompt in enumerate(prompts)
        for output in expected([prompt], n=2, seed=5 + 2 * i, max_tokens=8)
    ]
    assert [c.index for c in answer.choices] == list(range(6))
    assert [c.text for c in answer.choices] == [o.text for o in outputs]
    assert answer.usage.prompt_tokens == sum(len(o.prompt_token_ids) for o in outputs[::2])


def test_a_stream_adds_up_to_the_whole(client):
    options = {
        "model": "tiny",
        "prompt": ["The open function", "Ein Café"],
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = client.completions.create(**options)
    texts, reasons, usage = ["", ""], [None, None], None
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == ["length", "length"]
    assert usage.completion_tokens == whole.usage.completion_tokens == 48
    assert usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens


def test_log_probabilities_of_completions(client, expected):
    (output,) = expected(["The open function"], max_tokens=6, temperature=0.0, logprobs=3)
    answer = client.completions.create(
        model="tiny", prompt="The open function", max_tokens=6, temperature=0, logprobs=3
    )
    found = answer.choices[0].logprobs
    assert found.tokens == [_decoded(token) for token in output.token_ids]
    assert found.token_logprobs == pytest.approx(
        [values[token] for token, values in zip(output.token_ids, output.logprobs)]
    )
    assert all(len(top) == 3 for top in found.top_logprobs)
    for offset, token in zip(found.text_offset, found.tokens):
        assert answer.choices[0].text[offset:].startswith(token)


def test_offsets_are_those_without_stop_strings(client):
    """What is held back, as a stop string may begin with it, does not move what comes after."""
    options = {
        "model": "tiny",
        "prompt": "The open function",
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": 1,
    }
    plain = client.completions.create(**options).choices[0]
    stopped = client.completions.create(**options, stop=["\x00 no such text"]).choices[0]
    assert (stopped.text, stopped.logprobs.text_offset) == (plain.text, plain.logprobs.text_offset)


def _decoded(token: int) -> str:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tiny_path() / "tokenizer.json")).decode([token])


def test_a_conversation_is_the_prompt_that_the_template_makes_of_it(client, expected):
    answer = client.chat.completions.create(
        model="tiny", messages=CONVERSATION, max_completion_tokens=10, temperature=0
    )
    ids = _ids(RENDERED)
    (output,) = expected([ids], max_tokens=10, temperature=0.0)
    assert answer.choices[0].message.content == output.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(ids)


def test_variables_reach_the_template(client, expected):
    answer = client.chat.completions.create(
        model="tiny", messages=CONVERSATION, max_tokens=4, temperature=0,
        extra_body={"chat_template_kwargs": {"name": "robot"}},
    )  # fmt: skip
    assert answer.usage.prompt_tokens == len(_ids(RENDERED.replace("assistant", "robot")))


def _ids(text: str) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_path() / "tokenizer.json"))
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_a_streamed_conversation(client):
    options = {"model": "tiny", "messages": CONVERSATION, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


def test_log_probabilities_of_conversations(client):
    answer = client.chat.completions.create(
        model="tiny", messages=CONVERSATION, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 3
    for entry in content:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert bytes(entry.bytes).decode() == entry.token and len(entry.top_logprobs) == 2


def test_tokens_that_are_parts_of_characters(client, compiled):
    """Their bytes add up to those of the text."""
    prompt = "Ein Caf\u00e9 und ein \U0001f600"
    tokenizer = compiled.source.tokenizer()
    texts = TokenTexts(tokenizer)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert bytes(byte for i in ids for byte in texts.bytes(i)).decode() == prompt
    assert any(texts.text(i).startswith("bytes:\\x") for i in ids)
    assert len(BYTES) == 256 and len(set(BYTES.values())) == 256


def _word_pieces() -> Tokenizer:
    pieces = ["[UNK]", "a", "open", "##ing", "the", "##s", "file"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return tokenizer


def _metaspace() -> Tokenizer:
    pieces = ["<unk>", "▁a", "▁open", "ing", "▁the", "s", "▁file", "▁", "open", "file"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


@pytest.mark.parametrize("make", [_word_pieces, _metaspace])
def test_a_tokens_text_is_that_behind_another(make):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make())
    texts = TokenTexts(tokenizer)
    ids = tokenizer("opening the files", add_special_tokens=False)["input_ids"]
    assert [texts.text(i) for i in ids] == [" open", "ing", " the", " file", "s"]
    assert bytes(byte for i in ids for byte in texts.bytes(i)).decode() == " opening the files"


def test_without_a_limit_a_conversation_goes_up_to_the_models_length():
    compiled = pagebinder.compile_model(tiny_path(), CompileConfig(executable="eager", max_model_len=40))
    with serving(create_app(compiled, CONFIG, chat_template=TEMPLATE)) as server:
        answer = server.client().chat.completions.create(
            model="tiny", messages=CONVERSATION, temperature=0, extra_body={"ignore_eos": True}
        )
        assert answer.usage.total_tokens == 40 and answer.choices[0].finish_reason == "length"


def test_many_clients_at_once_get_what_each_would_get_alone(client, compiled):
    prompts = [[(7 * i + j) % 128 for j in range(3 + 2 * i)] for i in range(16)]
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    alone = [compiled.engine(CONFIG).generate([p], params)[0].text for p in prompts]
    texts: list[str] = [""] * len(prompts)

    def ask(i: int) -> None:
        options = {"model": "tiny", "prompt": prompts[i], "max_tokens": 10, "temperature": 0}
        ours = {"extra_body": {"ignore_eos": True}}
        if i % 2:
            texts[i] = client.completions.create(**options, **ours).choices[0].text
        else:
            for chunk in client.completions.create(**options, **ours, stream=True):
                texts[i] += chunk.choices[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts == alone


def test_a_model_without_a_tokenizer_speaks_in_token_ids():
    compiled = pagebinder.compile_model(tiny_llama(), CompileConfig(executable="eager"))
    params = {"max_tokens": 5, "temperature": 0.0, "logprobs": 1}
    (output,) = compiled.engine(CONFIG).generate([[1, 2, 3]], SamplingParams(**params))
    with serving(create_app(compiled, CONFIG)) as server:
        status, answer = server.post("/v1/completions", {"prompt": [1, 2, 3], **params})
        assert status == 200
        choice = answer["choices"][0]
        assert choice["token_ids"] == output.token_ids and choice["text"] == ""
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in output.token_ids]
        streamed = []
        _, events = server.send("POST", "/v1/completions", {"prompt": [1, 2, 3], **params, "stream": True})
        for line in events.strip().split("\n\n")[:-1]:
            streamed += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
        assert streamed == output.token_ids
        status, error = server.post("/v1/completions", {"prompt": "text"})
        assert status == 400 and "has no tokenizer" in error["error"]["message"]
        status, error = server.post("/v1/chat/completions", {"messages": CONVERSATION})
        assert status == 400 and "no tokenizer" in error["error"]["message"]


def test_token_ids_beside_the_text(client, expected):
    (output,) = expected(["A file"], max_tokens=4, temperature=0.0)
    options = {"model": "tiny", "prompt": "A file", "max_tokens": 4, "temperature": 0}
    answer = client.completions.create(**options, extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids == output.token_ids


def test_an_encoder_decoder_takes_an_encoder_prompt():
    compiled = pagebinder.compile_model(tiny("bart"), CompileConfig(executable="eager"))
    params = {"max_tokens": 6, "temperature": 0.0}
    sources = [[5, 6, 7, 8], [9, 10, 11]]
    outputs = compiled.engine(CONFIG).generate(None, SamplingParams(**params), encoder_prompts=sources)
    with serving(create_app(compiled, CONFIG)) as server:
        status, answer = server.post("/v1/completions", {"encoder_prompt": sources, **params})
        assert status == 200
        assert [c["token_ids"] for c in answer["choices"]] == [o.token_ids for o in outputs]
        assert answer["usage"]["prompt_tokens"] == 4 + 3 + sum(len(o.prompt_token_ids) for o in outputs)
        status, error = server.post("/v1/completions", {"prompt": [1, 2], **params})
        assert status == 400 and "encoder_prompt" in error["error"]["message"]
        status, error = server.post("/v1/chat/completions", {"messages": CONVERSATION})
        assert status == 400 and "use /v1/completions with encoder_prompt" in error["error"]["message"]
