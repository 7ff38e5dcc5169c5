"""Models whose images are more than embeddings: their parts see each other (Gemma 3, 4), or token ids count besides
(embeddings of each layer: small models of Gemma 4). The tokens are those of transformers' `generate`."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import pagebinder
from pagebinder import CompileConfig, ConfigError, Embeds, EngineConfig, RequestError, SamplingParams
from pagebinder.custom_ops.prompt_rows import seen_ranges
from pagebinder.frontend.lookahead import layers_of, lookahead_of
from pagebinder.runtime.graphs import StepSequence
from pagebinder.runtime.request import Request
from tests.test_prompt_embeds import IMAGE, TEXT, expected_of_text, generated, llava, spread

LONG = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
NUM_PARTS = 16  # of an image
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": 121,
    "audio_token_id": 124,
    "boi_token_id": 122,
    "eoi_token_id": 123,
}


def siglip():
    return transformers.SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
    )


def gemma3(**options):
    """Windows shorter than an image, and in every kind of layer parts of one see each other."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = transformers.Gemma3TextConfig(
        **{**TEXT, "num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 8, **options}
    )
    config = transformers.Gemma3Config(
        text_config=text, vision_config=siglip(), mm_tokens_per_image=NUM_PARTS, image_token_index=IMAGE
    )
    return spread(transformers.Gemma3ForConditionalGeneration(config))


def gemma3_inputs(seed: int) -> dict[str, torch.Tensor]:
    """Two images, which do not see each other."""
    ids = torch.tensor([[1, 3, *[IMAGE] * NUM_PARTS, 5, 9, *[IMAGE] * NUM_PARTS, 6, 7]])
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels,
        "token_type_ids": (ids == IMAGE).long(),
    }  # fmt: skip


def gemma4(per_layer: int = 0, see_on: str | None = "vision"):
    """Parts of an image see each other in layers with a window. `per_layer`: width of embeddings of each layer."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    text = transformers.Gemma4TextConfig(
        **{**TEXT, "num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 24, "pad_token_id": 0},
        use_bidirectional_attention=see_on, hidden_size_per_layer_input=per_layer, vocab_size_per_layer_input=128,
    )  # fmt: skip
    vision = transformers.Gemma4VisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, patch_size=4, pooling_kernel_size=2, position_embedding_size=64,
    )  # fmt: skip
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **IDS)
    return spread(transformers.Gemma4ForConditionalGeneration(config))


def gemma4_inputs(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.tensor([[1, 3, 122, *[IMAGE] * NUM_PARTS, 123, 5, 9]])
    pixels = torch.rand(1, 64, 48, generator=torch.Generator().manual_seed(seed))
    places = torch.cartesian_prod(torch.arange(8), torch.arange(8)).flip(1)[None]
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels,
        "image_position_ids": places, "mm_token_type_ids": (ids == IMAGE).long(),
    }  # fmt: skip


FAMILIES = {
    "gemma3": (gemma3, gemma3_inputs),
    "gemma4": (gemma4, gemma4_inputs),
    "gemma4, embeddings of each layer": (lambda: gemma4(16, None), gemma4_inputs),
}


@pytest.fixture(scope="module")
def gemma():
    model = gemma3()
    return model, pagebinder.compile_model(
        model, CompileConfig(prompt_embeds=128, block_size=16, executable="eager")
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_answered_as_by_transformers(family):
    """In small steps, none of which cuts an image; beside text; from a cached prefix; captured; preempted."""
    make, inputs_of = FAMILIES[family]
    model = make()
    config = CompileConfig(prompt_embeds=128, block_size=16, executable="eager")
    compiled = pagebinder.compile_model(model, config)
    prompts = [compiled.media_prompt(inputs_of(seed)) for seed in (1, 2)]
    wanted = [generated(model, inputs_of(seed)) for seed in (1, 2)]
    assert wanted[0] != wanted[1]
    text = expected_of_text(model, [1, 2, 3])
    for options in (
        {}, {"capture": "on", "long_prefill_token_threshold": 4}, {"drafter": "ngram"}, {"num_kv_blocks": 13},
        {"mixed_prefill_tokens": 4},
    ):  # fmt: skip
        defaults = {"num_kv_blocks": 96, "max_num_batched_tokens": 24, "check_integrity": True}
        engine = compiled.engine(EngineConfig(**{**defaults, **options}))
        outputs = engine.generate([*prompts, [1, 2, 3]], LONG)
        assert [o.token_ids for o in outputs] == [*wanted, text], options
        again = engine.generate([prompts[0]], LONG)[0]
        assert again.token_ids == wanted[0] and (options or again.num_cached_tokens >= 16)


@pytest.mark.parametrize("executable", ["native", "inductor"])
def test_every_level_and_executable(executable):
    model = gemma3()
    config = CompileConfig(prompt_embeds=64, executable=executable, verify="sample")
    compiled = pagebinder.compile_model(model, config)
    prompt = compiled.media_prompt(gemma3_inputs(3))
    assert compiled.engine(EngineConfig(num_kv_blocks=96)).generate([prompt], LONG)[0].token_ids == generated(
        model, gemma3_inputs(3)
    )


def test_one_step_computes_an_image(gemma):
    _, compiled = gemma
    prompt = compiled.media_prompt(gemma3_inputs(1))
    engine = compiled.engine(EngineConfig(num_kv_blocks=96, max_num_batched_tokens=NUM_PARTS - 1))
    with pytest.raises(RequestError, match=r"16 embeddings.*see each other.*max_num_batched_tokens=16"):
        engine.add_request("x", prompt, LONG)
    assert compiled.prompt_rows.num_held == 0
    assert engine.generate([[1, 2, 3]], LONG)[0].token_ids


def test_a_loop_of_ones_own_computes_an_image_in_one_step(gemma):
    model, compiled = gemma
    prompt = compiled.media_prompt(gemma3_inputs(4))
    held = [compiled.prompt_rows.hold(part) for part in prompt if isinstance(part, Embeds)]
    images, tokens = iter(held), []
    for part in prompt:
        tokens += [part] if isinstance(part, int) else next(images).token_ids
    graphs = compiled.capture(num_kv_blocks=32, max_num_seqs=1, max_num_batched_tokens=64, max_model_len=96)
    blocks = [[*range(1 + 6 * g, 7 + 6 * g)] for g in range(len(compiled.kv_spec.groups))]
    with pytest.raises(RequestError, match="see each other"):
        graphs.replay(graphs.pack([StepSequence(tokens=tokens[:10], start=0, blocks=blocks)]))
    out = []
    for start, new in ((0, tokens), *((len(tokens) + i, None) for i in range(19))):
        step = StepSequence(tokens=new or [out[-1]], start=start, blocks=blocks)
        out.append(int(graphs.replay(graphs.pack([step]))[0].argmax()))
    assert out == generated(model, gemma3_inputs(4))


def test_the_mask_is_read_and_what_it_says_besides_is_refused(gemma):
    model, compiled = gemma
    prompt = compiled.media_prompt(gemma3_inputs(1))
    images = [part for part in prompt if isinstance(part, Embeds)]
    assert [image.lookahead.tolist() for image in images] == [[*range(NUM_PARTS - 1, -1, -1)]] * 2
    model.set_attn_implementation("eager")  # masks of numbers
    again = compiled.media_prompt(gemma3_inputs(1))
    model.set_attn_implementation("sdpa")
    assert torch.equal(again[2].lookahead, images[0].lookahead)
    everything = torch.ones(1, 1, 38, 38, dtype=torch.bool)  # which transformers passes on
    with pytest.raises(RequestError, match="see others than those before them"):
        compiled.media_prompt({**gemma3_inputs(1), "attention_mask": everything})


def test_embeddings_of_ones_own_that_see_each_other(gemma):
    _, compiled = gemma
    engine = compiled.engine(EngineConfig(num_kv_blocks=96))
    rows = 20 * torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    ahead = torch.tensor([3, 2, 1, 0])
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1)
    causal, seeing, again = (
        engine.generate([[1, Embeds(rows, lookahead=x), 2]], params)[0] for x in (None, ahead, ahead.int())
    )
    assert causal.num_cached_tokens == seeing.num_cached_tokens == 0
    assert causal.logprobs != seeing.logprobs == again.logprobs
    for bad in (
        torch.tensor([4, 0, 0, 0]),
        torch.tensor([-1, 0, 0, 0]),
        torch.zeros(3).long(),
        ahead.float(),
        [3, 2, 1, 0],
    ):
        with pytest.raises(RequestError, match="lookahead of 4 embeddings is int64"):
            engine.add_request("x", [1, Embeds(rows, lookahead=bad)], LONG)
    plain = pagebinder.compile_model(llava(), CompileConfig(prompt_embeds=8)).engine(
        EngineConfig(num_kv_blocks=96)
    )
    with pytest.raises(RequestError, match="see none behind them"):
        plain.add_request("x", [1, Embeds(rows, lookahead=ahead)], LONG)
    assert compiled.prompt_rows.num_held == 0


def test_token_ids_besides():
    compiled = pagebinder.compile_model(gemma4(16, None), CompileConfig(prompt_embeds=32, executable="eager"))
    engine = compiled.engine(EngineConfig(num_kv_blocks=96))
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    answers = [
        engine.generate([[1, Embeds(rows, token_ids=torch.tensor(ids)), 2]], LONG)[0].token_ids
        for ids in ([IMAGE] * 3, [5, 6, 7])
    ]
    assert answers[0] != answers[1]
    for bad, message in (
        (rows, "reads token ids beside embeddings"),
        (Embeds(rows, token_ids=torch.tensor([1, 2])), r"int64 \[3\]"),
        (Embeds(rows, token_ids=torch.tensor([1, 2, 128])), "the model has 128"),
        (Embeds(rows, token_ids=[1, 2, 3]), r"int64 \[3\]"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add_request("x", [1, bad, 2], LONG)


@pytest.mark.parametrize("family", ["gemma3", "gemma4, embeddings of each layer"])
def test_a_loaded_artefact(family, tmp_path):
    make, inputs_of = FAMILIES[family]
    model = make()
    compiled = pagebinder.compile_model(model, CompileConfig(prompt_embeds=64, executable="eager"))
    prompt = compiled.media_prompt(inputs_of(1))
    compiled.engine(EngineConfig(num_kv_blocks=96)).generate([prompt], LONG)
    compiled.save(tmp_path / "saved")
    loaded = pagebinder.load(tmp_path / "saved")
    assert not any(table.any() for table in loaded.prompt_rows.tables.by_name.values())
    output = loaded.engine(EngineConfig(num_kv_blocks=96)).generate([prompt], LONG)[0]
    assert output.token_ids == generated(model, inputs_of(1))


def test_what_has_no_kernel_for_it_says_so():
    compiled = pagebinder.compile_model(gemma3(), CompileConfig(prompt_embeds=32, cascade=True))
    assert "some of its queries see on" in compiled.explain()
    with pytest.raises(ConfigError, match="attention that sees on keeps K and V"):
        pagebinder.compile_model(gemma3(), CompileConfig(prompt_embeds=32, kv_dtype="fp8_e4m3"))
    pagebinder.compile_model(gemma3(), CompileConfig(kv_dtype="fp8_e4m3"))  # for text alone nothing sees on


def test_layers_of_a_kind_that_differ_have_no_mask_that_is_known(gemma):
    graph = copy.deepcopy(gemma[1].graphs["captured"])
    windows = [n for n in graph.graph.nodes if n.kwargs.get("window")]
    assert layers_of(graph) == {"sliding_attention": (8, True), "full_attention": (None, True)}
    windows[0].update_kwarg("window", 9)
    assert layers_of(graph) == {}
    assert not lookahead_of("whatever it is", {}, 3, "Model").any()


def test_ranges_and_chunks():
    assert list(seen_ranges(torch.tensor([0, 2, 1, 0, 0, 1, 0, 3, 0, 0, 0]))) == [(1, 4), (5, 7), (7, 11)]
    assert list(seen_ranges(torch.tensor([1, 2, 0, 0]))) == [(0, 4)]  # chained
    request = Request("r", [*range(1, 31)], max_tokens=1, whole_ranges=((4, 12), (12, 20)))
    cases = {
        (0, 30, 30): 30, (0, 4, 30): 4, (0, 8, 30): 4, (0, 12, 30): 12, (0, 15, 30): 12,
        (4, 3, 30): 8, (4, 3, 8): 8, (4, 3, 7): 0, (4, 9, 30): 8, (6, 1, 30): 6, (6, 1, 5): 0, (20, 5, 5): 5,
    }  # fmt: skip
    for (start, count, room), fits in cases.items():
        assert request.fit_chunk(start, count, room) == fits, (start, count, room)
