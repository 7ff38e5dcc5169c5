"""Images in conversations over HTTP: the answers of transformers' processor and `generate`, and what is refused."""

from __future__ import annotations

import base64
import concurrent.futures
import io
import json
import shutil

import openai
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

import pagebinder
from pagebinder import CompileConfig, EngineConfig
from pagebinder.server import create_app
from pagebinder.server.contents import ContentForms
from tests.server.serving import eventually, serving
from tests.test_prompt_embeds import IMAGE, generated, llava

WORDS = ["<unk>", "<s>", "</s>", "user:", "assistant:", "what", "is", "this", "and", "that", "a", "cat"]
TEMPLATE = """{{ '<s>' }}{% for m in messages %}{{ ' ' + m['role'] + ': ' }}{% for part in m['content'] %}\
{% if part['type'] == 'image' %}{{ '<image> ' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}\
{% if add_generation_prompt %}{{ ' assistant:' }}{% endif %}"""
BODY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
ANSWER = {"max_tokens": 12, "temperature": 0.0, "extra_body": {"ignore_eos": True}}


def processor():
    vocabulary = {word: i for i, word in enumerate(WORDS)} | {"<image>": IMAGE}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={"image": "<image>"},
    )
    pixels = transformers.CLIPImageProcessor(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    return transformers.LlavaProcessor(
        pixels, tokenizer, patch_size=4, vision_feature_select_strategy="default", chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llava")
    llava().save_pretrained(path)
    processor().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def compiled(directory):
    return pagebinder.compile_model(directory, CompileConfig(prompt_embeds=40, executable="eager"))


@pytest.fixture(scope="module")
def server(compiled):
    with serving(create_app(compiled, EngineConfig(num_kv_blocks=96), model_name="llava")) as running:
        yield running


def picture(seed: int, size=(20, 30)) -> Image.Image:
    values = torch.randint(
        0, 256, (*size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return Image.fromarray(values.numpy())


def url(image: Image.Image, kind: str = "png") -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def part(image: Image.Image, kind: str = "png") -> dict:
    return {"type": "image_url", "image_url": {"url": url(image, kind), "detail": "auto"}}


def conversation(*parts) -> list[dict]:
    return [
        {
            "role": "user",
            "content": [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts],
        }
    ]


@pytest.fixture(scope="module")
def wanted(directory):
    """What transformers says of texts and images: its processor, its model, its `generate`."""
    model = transformers.LlavaForConditionalGeneration.from_pretrained(directory).eval()
    return lambda *parts: answered(model, *parts)


def answered(model, *parts) -> list[int]:
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts
    ]
    inputs = processor().apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, return_dict=True, return_tensors="pt",
        add_generation_prompt=True,
    )  # fmt: skip
    return generated(model, dict(inputs))[:12]


def asked(server, *parts) -> list[int]:
    body = {
        "model": "llava",
        "messages": conversation(*parts),
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
    }
    status, answer = server.post("/v1/chat/completions", {**body, "return_token_ids": True})
    assert status == 200, answer
    return answer["choices"][0]["token_ids"]


def test_answers_are_those_of_transformers(server, wanted):
    one, two = picture(1), picture(2)
    assert asked(server, "what is this ", part(one)) == wanted("what is this ", one)
    assert asked(server, part(one), "and ", part(two), "what") == wanted(one, "and ", two, "what")
    turned = picture(3)
    assert asked(server, part(turned.convert("L").convert("P"), "gif"), "a cat") == wanted(
        turned.convert("L").convert("P").convert("RGB"), "a cat"
    )


def test_openais_client_and_streams(server):
    client = server.client()
    messages = conversation("what is ", part(picture(4)))
    whole = client.chat.completions.create(model="llava", messages=messages, **ANSWER)
    assert whole.usage.prompt_tokens == 16 + 5 and whole.usage.completion_tokens == 12
    pieces = client.chat.completions.create(model="llava", messages=messages, stream=True, **ANSWER)
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole.choices[0].message.content
    text = client.chat.completions.create(model="llava", messages=conversation("a cat"), **ANSWER)
    assert text.usage.prompt_tokens == 5  # its template takes lists of parts alone


def test_requests_wait_for_the_place_of_others(server, compiled, wanted):
    """Twelve pictures of 16 parts each, and place for 40."""
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda seed: asked(server, part(picture(seed)), "what"), range(10, 22)))
    assert answers[0] == wanted(picture(10), "what") and answers[11] == wanted(picture(21), "what")
    assert compiled.prompt_rows.num_held == 0


PNG = url(picture(0))
BAD = [
    ({"type": "image_url"}, 'no string in "image_url"'),
    ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}, "URLs are not fetched"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "URLs are not fetched"),
    ({"type": "image_url", "image_url": "data:image/png,abc"}, "give the image itself"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}, "no base64"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}, "is no image"),
    ({"type": "image_url", "image_url": {"url": PNG[: len("data:image/png;base64,") + 800]}}, "is no image"),
    ({"type": "input_audio", "input_audio": {}}, "is no text or image (input_audio)"),
    ({"type": "image", "url": "/etc/passwd"}, "is no text or image (image)"),
    ({"type": "text", "text": "<image>"}, "processor does not take|cannot be called|takes no such"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_what_is_no_image_is_refused(server, bad, message):

    status, answer = server.post("/v1/chat/completions", {"messages": conversation(bad, part(picture(1)))})
    assert status == 400 and any(m in answer["error"]["message"] for m in message.split("|")), answer


def test_variables_of_the_template_reach_nothing_else(server):
    """A processor would load `images` from files and URLs."""
    variables = {
        "images": ["/etc/passwd"],
        "size": {"shortest_edge": 4096},
        "images_kwargs": {"do_resize": False},
    }
    body = {"messages": conversation(part(picture(1)), "what"), "max_tokens": 3, "temperature": 0}
    plain = server.post("/v1/chat/completions", body)[1]
    status, told = server.post("/v1/chat/completions", {**body, "chat_template_kwargs": variables})
    assert status == 200 and told["choices"] == plain["choices"] and told["usage"]["prompt_tokens"] == 20
    for name in ("tokenize", "return_tensors", "chat_template"):
        refused = server.post("/v1/chat/completions", {**body, "chat_template_kwargs": {name: 1}})
        assert refused[0] == 400 and name in refused[1]["error"]["message"]


def test_an_image_of_too_many_pixels_or_parts_is_refused(server):
    huge = io.BytesIO()
    Image.new("1", (9000, 9000)).save(huge, "png")
    data = f"data:image/png;base64,{base64.b64encode(huge.getvalue()).decode()}"
    status, answer = server.post(
        "/v1/chat/completions", {"messages": conversation({"type": "image_url", "image_url": {"url": data}})}
    )
    assert status == 400 and "9000 x 9000 pixels" in answer["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="48 embeddings are more than the 40"):
        server.client().chat.completions.create(
            model="llava", messages=conversation(*(part(picture(seed)) for seed in range(3))), **ANSWER
        )


def test_images_of_a_request_are_bounded_together(server):
    image = Image.new("1", (6000, 6000))
    status, answer = server.post("/v1/chat/completions", {"messages": conversation(part(image), part(image))})
    assert status == 400 and "content[1]: an image of 6000 x 6000 pixels" in answer["error"]["message"]
    many = [part(Image.new("1", (1, 1)))] * 129
    status, answer = server.post("/v1/chat/completions", {"messages": conversation(*many)})
    assert status == 400 and "128 images" in answer["error"]["message"]


# Takes strings of systems and assistants (what `trim` makes of a list is Python's text of it), and both of users.
STRINGS = """{{ '<s>' }}{% for m in messages %}{{ ' ' + m['role'] + ': ' }}{% if m['role'] != 'user' %}\
{{ m['content'] | trim }}{% elif m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}\
{% if part['type'] == 'image' %}{{ '<image> ' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ ' assistant:' }}{% endif %}"""


USERS_ALONE = """{% if messages[0]['role'] != 'user' %}{{ raise_exception('no') }}{% endif %}\
{{ messages[0]['content'][0]['text'] }}"""


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (TEMPLATE, {"user": True, "system": True, "assistant": True, "tool": True}),
        (STRINGS, {"user": False, "system": False, "assistant": False, "tool": False}),
        (STRINGS.replace("m['content'] is string", "false"), {"user": True, "system": False, "assistant": False}),
        ("{{ messages[0]['content'] }}", {"user": False, "system": False}),
        (USERS_ALONE, {"user": True, "system": True}),
        ("{{ no_function() }}", {"user": False, "system": False}),
    ],
)  # fmt: skip
def test_forms_of_contents_by_role(template, parts):
    ours = processor()
    forms = ContentForms(lambda c: ours.apply_chat_template(c, chat_template=template, tokenize=False))
    assert {role: forms.wants_parts(role) for role in parts} == parts
    text, image = {"type": "text", "text": "a"}, {"type": "image", "image": None}
    assert forms.content("user", [text, text]) == ([text, text] if parts["user"] else "aa")
    assert forms.content("system", [text, image]) == [text, image]


def test_strings_stay_strings_where_a_template_takes_them(compiled, directory):
    app = create_app(compiled, EngineConfig(num_kv_blocks=96), chat_template=STRINGS)
    picked = picture(1)
    told = [{"role": "system", "content": "a cat"}, *conversation("what ", part(picked))]
    told += [{"role": "assistant", "content": [{"type": "text", "text": "that"}]}, *conversation("and this")]
    with serving(app) as server:
        status, answer = server.post("/v1/chat/completions", {"messages": told, **BODY})
        plain = server.post("/v1/chat/completions", {"messages": told[2:], **BODY})[1]
    assert status == 200, answer
    ours = processor()
    text = ours.apply_chat_template(
        [
            {"role": "system", "content": "a cat"},
            {"role": "user", "content": [{"type": "text", "text": "what "}, {"type": "image"}]},
            {"role": "assistant", "content": "that"},
            {"role": "user", "content": "and this"},
        ],
        chat_template=STRINGS, tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    assert "system: a cat user: what <image>" in text
    inputs = ours(text=[text], images=[picked], return_tensors="pt", add_special_tokens=False)
    model = transformers.LlavaForConditionalGeneration.from_pretrained(directory).eval()
    assert answer["choices"][0]["token_ids"] == generated(model, dict(inputs))[:12]
    assert answer["usage"]["prompt_tokens"] == inputs["input_ids"].shape[1]
    assert plain["usage"]["prompt_tokens"] == 7


@pytest.mark.parametrize("kept", ["in the old place", "nowhere"])
def test_a_template_elsewhere_serves_texts_and_images(kept, directory, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(directory, folder)
    (folder / "chat_template.jinja").unlink()
    if kept == "in the old place":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    elsewhere = pagebinder.compile_model(folder, CompileConfig(prompt_embeds=40, executable="eager"))
    given = None if kept == "in the old place" else TEMPLATE
    with serving(create_app(elsewhere, EngineConfig(num_kv_blocks=96), chat_template=given)) as server:
        for messages, count in ((conversation("a cat"), 5), (conversation("what ", part(picture(4))), 20)):
            status, answer = server.post("/v1/chat/completions", {"messages": messages, **BODY})
            assert status == 200 and answer["usage"]["prompt_tokens"] == count, answer


def test_the_end_reaches_requests_that_wait_for_the_place_of_others(compiled):
    app = create_app(compiled, EngineConfig(num_kv_blocks=96, max_num_seqs=1))
    long = {**BODY, "max_tokens": 200}
    with serving(app) as server, concurrent.futures.ThreadPoolExecutor(8) as pool:
        messages = [conversation(part(picture(seed)), part(picture(50 + seed))) for seed in range(8)]
        waiting = [
            pool.submit(server.post, "/v1/chat/completions", {**long, "messages": m}) for m in messages
        ]
        eventually(lambda: compiled.prompt_rows.num_held)
        app.state.end_requests()
        statuses = [future.result()[0] for future in waiting]
    assert statuses.count(503) >= 7 and compiled.prompt_rows.num_held == 0


def test_servers_that_see_no_images_say_why(compiled, directory, tmp_path, caplog):
    model = llava()
    model.save_pretrained(tmp_path)
    without = pagebinder.compile_model(tmp_path, CompileConfig(prompt_embeds=40, executable="eager"))
    module = pagebinder.compile_model(model, CompileConfig(prompt_embeds=40, executable="eager"))
    text = pagebinder.compile_model(directory, CompileConfig(executable="eager"))
    compiled.save(tmp_path / "saved")
    for one, message in (
        (without, "has no processor that can be read"),
        (module, "no directory with a processor"),
        (pagebinder.load(tmp_path / "saved"), "an artefact has no model"),
        (text, "start the server with --prompt-embeds N"),
    ):
        caplog.clear()
        with serving(create_app(one, EngineConfig(num_kv_blocks=96))) as server:
            status, answer = server.post("/v1/chat/completions", {"messages": conversation(part(picture(1)))})
        assert one is text or message in caplog.text  # where place for images was asked for
        assert status == 400 and message in json.dumps(answer), answer
