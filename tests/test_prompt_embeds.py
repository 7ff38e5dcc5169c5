"""Prompts of embeddings, and prompts with images: the tokens of transformers' own `inputs_embeds` and `generate`."""

from __future__ import annotations

import concurrent.futures
import threading

import numpy as np
import pytest
import torch
import transformers

import pagebinder
from pagebinder import (
    CacheCapacityError,
    CompileConfig,
    ConfigError,
    Embeds,
    EngineConfig,
    RequestError,
    SamplingParams,
)
from pagebinder.custom_ops.prompt_rows import FIRST_ROW_ID
from pagebinder.runtime.graphs import StepSequence
from tests.helpers import tiny_llama

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
ENGINE = EngineConfig(num_kv_blocks=96, max_num_batched_tokens=16, check_integrity=True)
NUM_ROWS = 64
IMAGE = 120
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
}
TEXT = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def spread(model: torch.nn.Module) -> torch.nn.Module:
    """Weights with which tokens depend on what is far away."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data = torch.randn(weight.shape, generator=generator) / weight[0].numel() ** 0.5
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return spread(tiny_llama())


@pytest.fixture(scope="module")
def compiled(model):
    return pagebinder.compile_model(model, CompileConfig(prompt_embeds=NUM_ROWS, block_size=16))


def embeds(model, count: int, seed: int = 0) -> torch.Tensor:
    table = model.get_input_embeddings().weight
    noise = torch.randn(count, table.shape[1], generator=torch.Generator().manual_seed(seed))
    return noise * table.detach().std()


def expected(model, parts, num_tokens: int = GREEDY.max_tokens) -> list[int]:
    """What the source model says after these tokens and embeddings, greedily."""
    embed, chosen = model.get_input_embeddings(), []
    rows = [embed(torch.tensor([p])) if isinstance(p, int) else p for p in parts]
    x = torch.cat(rows)[None]
    with torch.no_grad():
        for _ in range(num_tokens):
            chosen.append(int(model(inputs_embeds=x).logits[0, -1].argmax()))
            x = torch.cat([x, embed(torch.tensor([[chosen[-1]]]))], 1)
    return chosen


def test_embeddings_are_computed_as_inputs_embeds(model, compiled):
    """Prefilled in chunks, beside others, whole prompts of embeddings, arrays, and behind a cached prefix."""
    first, second = embeds(model, 37), embeds(model, 9, seed=1)
    prompts = [[1, 2, 3, first, 4, 5], [second, 7], [1, 2, 3, 4]]
    engine = compiled.engine(ENGINE)
    for again in (False, True):
        outputs = engine.generate([prompts[0], [second.numpy(), 7], prompts[2]], GREEDY)
        assert [o.token_ids for o in outputs] == [expected(model, prompt) for prompt in prompts]
        assert outputs[0].num_cached_tokens == (32 if again else 0)
    assert engine.generate(second, GREEDY)[0].token_ids == expected(model, [second])
    assert outputs[0].prompt_token_ids[:3] == [1, 2, 3]
    assert all(token >= FIRST_ROW_ID for token in outputs[0].prompt_token_ids[3:-2])


def test_other_embeddings_of_the_same_place_share_no_prefix(model, compiled):
    engine = compiled.engine(ENGINE)
    for seed in range(2, 6):  # more rows than there are: places are taken again
        prompt = [1, 2, embeds(model, 30, seed), 3]
        output = engine.generate([prompt], GREEDY)[0]
        assert output.token_ids == expected(model, prompt) and output.num_cached_tokens == 0


@pytest.mark.parametrize("executable", ["eager", "native", "inductor"])
def test_all_executables_read_what_is_written_later(model, executable):
    compiled = pagebinder.compile_model(model, CompileConfig(prompt_embeds=NUM_ROWS, executable=executable))
    prompt = [1, embeds(model, 5, seed=7), 2]
    assert compiled.engine(ENGINE).generate([prompt], GREEDY)[0].token_ids == expected(model, prompt)


@pytest.mark.parametrize(
    "options", [{"capture": "on"}, {"drafter": "ngram"}, {"async_stepping": "on"}, {"num_kv_blocks": 8}]
)
def test_engines_of_all_kinds(model, compiled, options):
    """Captured steps, guessed tokens, steps ahead, and a cache so small that requests are preempted."""
    engine = compiled.engine(EngineConfig(**{"num_kv_blocks": 96, "max_num_batched_tokens": 16, **options}))
    prompts = [[1, 2, embeds(model, 20, seed), 1, 2] for seed in range(3)]
    long = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    outputs = engine.generate(prompts, long)
    assert [o.token_ids for o in outputs] == [expected(model, prompt, 20) for prompt in prompts]
    if "num_kv_blocks" in options:
        assert engine.stats().preemptions > 0


def test_a_model_drafter_has_no_guesses_for_embeddings(model, compiled):
    drafter = pagebinder.ModelDrafter(pagebinder.compile_model(model))
    engine = compiled.engine(EngineConfig(num_kv_blocks=96, drafter=drafter))
    prompts = [[1, 2, embeds(model, 3), 4], [5, 6, 7]]
    outputs = engine.generate(prompts, GREEDY)
    assert [o.token_ids for o in outputs] == [expected(model, prompt) for prompt in prompts]
    assert engine.stats().accepted_tokens > 0


def test_samples_forks_beams_and_penalties(model, compiled):
    engine, prompt = compiled.engine(ENGINE), [1, embeds(model, 12), 2]
    two = engine.generate([prompt], SamplingParams(n=2, max_tokens=6, seed=3, repetition_penalty=1.3))
    assert len(two) == 2 and all(len(output.token_ids) == 6 for output in two)
    beams = engine.beam_search(prompt, beam_width=1, max_tokens=6, ignore_eos=True)
    assert beams[0].token_ids == expected(model, prompt)
    engine.add_request("a", prompt, GREEDY)
    while not engine.step():
        pass
    engine.fork("a", "b")
    engine.abort("a")
    assert compiled.prompt_rows.num_held == 12  # the fork's
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step()}
    assert done["b"].token_ids == expected(model, prompt)
    assert compiled.prompt_rows.num_held == 0


def test_rows_are_held_until_their_requests_end(model, compiled):
    engine = compiled.engine(ENGINE)
    for seed in range(2):
        engine.add_request(f"r{seed}", [1, embeds(model, 30, seed)], GREEDY)
    engine.add_request("same", [5, embeds(model, 30, 0)], GREEDY)
    assert compiled.prompt_rows.num_held == 60
    with pytest.raises(CacheCapacityError, match="30 embeddings do not fit beside those of other requests"):
        engine.add_request("more", [1, embeds(model, 30, 2)], GREEDY)
    engine.abort("r0")
    engine.abort("same")
    engine.add_request("more", [1, embeds(model, 30, 2)], GREEDY)
    while engine.has_unfinished:
        outputs = engine.step()
    assert outputs and compiled.prompt_rows.num_held == 0


def test_prompts_of_a_call_wait_for_those_before_them(model, compiled):
    prompts = [[1, embeds(model, 28, seed), 2] for seed in range(5)]
    wanted = [expected(model, prompt) for prompt in prompts]
    engine = compiled.engine(ENGINE)
    engine.add_request("beside", [7, 8, 9], GREEDY)
    two = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, n=2)
    outputs = engine.generate(prompts, [GREEDY, two, GREEDY, GREEDY, GREEDY])
    assert [o.token_ids for o in outputs] == [wanted[0], wanted[1], *wanted[1:]]
    assert compiled.prompt_rows.num_held == 0 and engine.step()[0].request_id == "beside"
    last = {}
    for output in engine.stream(prompts, GREEDY):
        last[output.request_id] = output.token_ids
    assert sorted(last.values()) == sorted(wanted)
    others = compiled.prompt_rows.hold(embeds(model, 40, 9))  # for no request of this engine
    with pytest.raises(CacheCapacityError, match="do not fit beside"):
        engine.generate(prompts, GREEDY)
    others.release()
    assert not engine.has_unfinished and compiled.prompt_rows.num_held == 0


def test_bad_embeddings_are_refused(model, compiled):
    engine, good = compiled.engine(ENGINE), embeds(model, 3)
    width = good.shape[1]
    for bad, message in (
        (torch.zeros(3, width + 1), f"the model's are {width} wide"),
        (torch.zeros(0, width), "at least one"),
        (torch.full((2, width), float("nan")), "not finite"),
        (torch.zeros(NUM_ROWS + 1, width), f"prompt_embeds={NUM_ROWS + 1}"),
        (Embeds(good, torch.zeros(3, 3, dtype=torch.int64)), "token by token"),
        (
            Embeds(good, token_ids=torch.zeros(2, dtype=torch.int64)),
            r"token_ids of 3 embeddings are int64 \[3\]",
        ),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add_request("x", [1, bad], GREEDY)
    for prompt in ([1, good, FIRST_ROW_ID], [FIRST_ROW_ID + NUM_ROWS - 1]):
        with pytest.raises(RequestError, match="out of range: .* stands for an embedding of another prompt"):
            engine.add_request("x", prompt, GREEDY)
    with pytest.raises(RequestError, match=r"out of range: the vocabulary has ids 0 to \d+\.$"):
        engine.add_request("x", [FIRST_ROW_ID + NUM_ROWS], GREEDY)
    with pytest.raises(RequestError, match="no tokenizer"):
        engine.add_request("x", ["text", good], GREEDY)
    with pytest.raises(RequestError, match="whole numbers"):
        engine.add_request("x", [1, good, torch.zeros(4)], GREEDY)
    assert compiled.prompt_rows.num_held == 0
    assert engine.generate([[np.int64(1), good]], GREEDY)[0].token_ids == expected(model, [1, good])
    with pytest.raises(RequestError, match="was not compiled for"):
        pagebinder.compile_model(model).engine(ENGINE).generate([[1, good]], GREEDY)


def test_a_call_that_raises_holds_no_rows(model, compiled):
    """Not even where the exception is kept, with the frames that it went through."""
    engine, kept = compiled.engine(EngineConfig(num_kv_blocks=6)), []
    long = SamplingParams(max_tokens=60, n=2, ignore_eos=True)
    for prompt, params in (
        ([1, embeds(model, 40), 500], GREEDY),
        ([*range(1, 90), embeds(model, 40, 1)], long),
        ([embeds(model, 40, 2), embeds(model, 40, 3)], GREEDY),
    ):
        with pytest.raises((CacheCapacityError, RequestError)) as error:
            engine.add_request("x", prompt, params)
        kept.append(error)
        assert compiled.prompt_rows.num_held == 0
    with pytest.raises(RequestError, match="The prompt's 80 embeddings are more than the 64"):
        engine.add_request("x", [embeds(model, 40, 2), embeds(model, 40, 3)], GREEDY)


def test_parts_of_all_kinds(model, compiled):
    engine, rows = compiled.engine(ENGINE), embeds(model, 6)
    wanted = expected(model, [3, 4, rows])
    for prompt in (
        [*torch.tensor([3, 4]), rows],
        [torch.tensor([3, 4]), rows],
        [[], 3, [4], rows.clone().requires_grad_()],
        [3, 4, rows.double().numpy()[::-1][::-1]],
        [3, 4, rows.numpy().astype(">f4")],
        [3, 4, torch._neg_view(-rows)],
        [3, 4, Embeds(rows)],
    ):
        assert engine.generate([prompt], GREEDY)[0].token_ids == wanted
    for bad, message in (
        ([1, rows[None]], r"floating numbers of the shape \(1, 6, 64\)"),
        ([1, rows, rows[0]], r"shape \(64,\)"),
        ([1, rows, 2.5], "parts are token ids, texts and embeddings"),
        ([1, rows.to("meta")], "dense floating"),
        ([1, rows.to_sparse()], "dense floating"),
        ([1, Embeds(None)], "Embeds holds"),
        (torch.zeros(1, 2, 64), r"shape \(1, 2, 64\)"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add_request("x", bad, GREEDY)


def test_deep_models_in_bfloat16_are_taken():
    """Their rounding is judged by that of tokens."""
    model = spread(tiny_llama(num_hidden_layers=12)).bfloat16()
    assert pagebinder.compile_model(model, CompileConfig(prompt_embeds=8)).prompt_rows.num_held == 0


def test_what_is_made_in_inference_mode_is_written_later(model):
    with torch.inference_mode():
        compiled = pagebinder.compile_model(model, CompileConfig(prompt_embeds=NUM_ROWS))
    prompt = [1, embeds(model, 5), 2]
    assert compiled.engine(ENGINE).generate([prompt], GREEDY)[0].token_ids == expected(model, prompt)


class Gated(torch.nn.Embedding):
    """Uses what it looks up twice."""

    def forward(self, ids):
        row = super().forward(ids)
        return row * torch.sigmoid(row) * 4


def test_rows_are_what_an_embedding_module_returns():
    model = tiny_llama()
    model.model.embed_tokens = Gated(*model.model.embed_tokens.weight.shape)
    spread(model)
    compiled = pagebinder.compile_model(model, CompileConfig(prompt_embeds=8))
    prompt = [1, embeds(model, 4), 2]
    assert compiled.engine(ENGINE).generate([prompt], GREEDY)[0].token_ids == expected(model, prompt)


class SwapsPlaceholders(transformers.LlamaForCausalLM):
    """Looks another id up where an image will be, as Kimi K2.5 does."""

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        if inputs_embeds is None:
            ids = input_ids.clone()
            ids[(input_ids == 99) | (input_ids == 98)] = 0
            inputs_embeds = self.get_input_embeddings()(ids)
        return super().forward(inputs_embeds=inputs_embeds, **kwargs)


def test_ids_of_placeholders_may_be_swapped_on_the_way():
    model = spread(SwapsPlaceholders(tiny_llama().config))
    compiled = pagebinder.compile_model(model, CompileConfig(prompt_embeds=8))
    prompt = [1, embeds(model, 4), 99, 2]
    wanted = expected(model, [1, prompt[1], 0, 2])
    assert compiled.engine(ENGINE).generate([prompt], GREEDY)[0].token_ids == wanted


def test_a_loop_of_ones_own_takes_embeddings(model, compiled):
    held = compiled.prompt_rows.hold(embeds(model, 3))
    graphs = compiled.capture(num_kv_blocks=8, max_num_seqs=1, max_model_len=64)
    tokens, out = [1, *held.token_ids, 2], []
    for start, new in ((0, tokens), *((len(tokens) + i, None) for i in range(5))):
        new = new or [out[-1]]
        step = StepSequence(tokens=new, start=start, blocks=[[1, 2, 3, 4]])
        out.append(int(graphs.replay(graphs.pack([step]))[0].argmax()))
    assert out == expected(model, [1, embeds(model, 3), 2])
    with pytest.raises(RequestError, match="input_ids holds"):
        bad = StepSequence(tokens=[FIRST_ROW_ID + NUM_ROWS], start=0, blocks=[[1, 2, 3, 4]])
        graphs.replay(graphs.pack([bad]))
    assert graphs.pack([StepSequence(tokens=[1, 2], start=5, shift=-3, blocks=[[1]])])[
        "positions"
    ].tolist() == [2, 3]


def test_what_cannot_take_embeddings_is_refused():
    config = CompileConfig(prompt_embeds=8)
    for wrong in (-1, 1.5, True, 1 << 25):
        with pytest.raises(ConfigError, match="prompt_embeds"):
            CompileConfig(prompt_embeds=wrong)

    class ReadsIds(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32)

        def forward(self, input_ids, position_ids):
            return self.head(self.embed(input_ids) * (input_ids != 3).unsqueeze(-1))

    with pytest.raises(ConfigError, match="not only to embed them.*aten.ne"):
        pagebinder.compile_model(ReadsIds(), config)
    t5 = transformers.T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, vocab_size=64)
    with pytest.raises(ConfigError, match="only a decoder alone"):
        pagebinder.compile_model(transformers.T5ForConditionalGeneration(t5), config)
    bert = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    with pytest.raises(ConfigError, match="prompt_embeds.*is an encoder"):
        pagebinder.compile_model(transformers.BertForMaskedLM(bert), config)
    with pytest.raises(ConfigError, match="TensorRT"):
        pagebinder.compile_model(tiny_llama(), CompileConfig(prompt_embeds=8, executable="tensorrt"))


def test_a_scaled_embedding_is_replaced_behind_its_scale():
    config = transformers.Gemma3TextConfig(**TEXT, sliding_window=16)
    model = spread(transformers.Gemma3ForCausalLM(config))
    compiled = pagebinder.compile_model(model, CompileConfig(prompt_embeds=NUM_ROWS, verify="sample"))
    prompt = [1, 8 * embeds(model, 40), 2]
    assert compiled.engine(ENGINE).generate([prompt], GREEDY)[0].token_ids == expected(model, prompt)


def test_an_artefact_takes_embeddings_and_keeps_none(model, compiled, tmp_path):
    prompt = [1, embeds(model, 8), 2]
    compiled.engine(ENGINE).generate([prompt], GREEDY)
    compiled.save(tmp_path / "saved")
    loaded = pagebinder.load(tmp_path / "saved")
    assert not loaded.prompt_rows.table.any()
    assert loaded.engine(ENGINE).generate([prompt], GREEDY)[0].token_ids == expected(model, prompt)
    with pytest.raises(RequestError, match="no transformers model"):
        loaded.media_prompt({"input_ids": torch.tensor([[1]])})
    with pytest.raises(ConfigError, match="takes no embeddings"):
        compiled.save(tmp_path / "ahead", executable="aot")
    with pytest.raises(ConfigError, match="takes token ids alone"):
        compiled.export_onnx(tmp_path / "onnx")


# ---- images --------------------------------------------------------------------------------------------------------


def llava():
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
    )
    text = transformers.LlamaConfig(**TEXT)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    return spread(transformers.LlavaForConditionalGeneration(config))


def llava_inputs(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.tensor([[1, 3, *[IMAGE] * 16, 5, *[IMAGE] * 16, 6, 7]])
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def qwen2_5_vl():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
        "patch_size": 2, "temporal_patch_size": 1, "window_size": 8, "fullatt_block_indexes": [0],
    }  # fmt: skip
    text = {**TEXT, "rope_parameters": rope}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **IDS)
    return spread(transformers.Qwen2_5_VLForConditionalGeneration(config))


def qwen3_vl():
    """Adds features of images behind two of its three layers."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
        "patch_size": 2, "temporal_patch_size": 1, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    text = {**TEXT, "num_hidden_layers": 3, "rope_parameters": rope}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **IDS)
    return spread(transformers.Qwen3VLForConditionalGeneration(config))


def qwen_inputs(seed: int) -> dict[str, torch.Tensor]:
    """Two images of 4 x 6 and 2 x 2 tokens, whose positions are 6 and 2 long."""
    ids = torch.tensor([[1, 3, 122, *[IMAGE] * 24, 123, 5, 122, *[IMAGE] * 4, 123, 6, 7]])
    pixels = torch.randn(96 + 16, 12, generator=torch.Generator().manual_seed(seed))
    grid = torch.tensor([[1, 8, 12], [1, 4, 4]])
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "image_grid_thw": grid,
        "mm_token_type_ids": (ids == IMAGE).long(),
    }  # fmt: skip


def generated(model, inputs: dict) -> list[int]:
    """transformers' answer. Newer configs say no tokens that older ones did."""
    new = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    return model.generate(**inputs, **new)[0, inputs["input_ids"].shape[1] :].tolist()


FAMILIES = {
    "llava": (llava, llava_inputs),
    "qwen2_5_vl": (qwen2_5_vl, qwen_inputs),
    "qwen3_vl": (qwen3_vl, qwen_inputs),
}


def video_inputs(seed: int) -> dict[str, torch.Tensor]:
    """Five frames of 2 x 2 tokens: text behind them goes on from a position that frames have."""
    ids = torch.tensor([[1, 3, 122, *[121] * 20, 123, 6, 7]])
    pixels = torch.randn(80, 12, generator=torch.Generator().manual_seed(seed))
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values_videos": pixels,
        "video_grid_thw": torch.tensor([[5, 4, 4]]), "second_per_grid_ts": torch.tensor([1.0]),
        "mm_token_type_ids": 2 * (ids == 121).long(),
    }  # fmt: skip


FAMILIES["qwen2_5_vl, video"] = (qwen2_5_vl, video_inputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_with_images_are_answered_as_by_transformers(family):
    make, inputs_of = FAMILIES[family]
    model = make()
    compiled = pagebinder.compile_model(model, CompileConfig(prompt_embeds=128, block_size=16))
    long = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    prompts = [compiled.media_prompt(inputs_of(seed)) for seed in (1, 2)]
    wanted = [generated(model, inputs_of(seed)) for seed in (1, 2)]
    assert wanted[0] != wanted[1]
    for options in ({}, {"capture": "on"}, {"num_kv_blocks": 10}):
        engine = compiled.engine(
            EngineConfig(**{"num_kv_blocks": 96, "max_num_batched_tokens": 16, **options})
        )
        outputs = engine.generate([*prompts, [1, 2, 3]], long)
        assert [o.token_ids for o in outputs[:2]] == wanted, options
        assert outputs[2].token_ids == expected_of_text(model, [1, 2, 3]), options
        again = engine.generate([prompts[0]], long)[0]
        assert again.token_ids == wanted[0] and (options or again.num_cached_tokens >= 16)


def expected_of_text(model, ids: list[int]) -> list[int]:
    ids = torch.tensor([ids])
    return generated(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def test_a_loaded_artefact_takes_positions_and_features(tmp_path):
    model = qwen3_vl()
    compiled = pagebinder.compile_model(model, CompileConfig(prompt_embeds=64))
    prompt, inputs = compiled.media_prompt(qwen_inputs(0)), qwen_inputs(0)
    compiled.save(tmp_path / "saved")
    loaded = pagebinder.load(tmp_path / "saved")
    long = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    assert loaded.engine(ENGINE).generate([prompt], long)[0].token_ids == generated(model, inputs)
    image = next(part for part in prompt if isinstance(part, Embeds))
    for bad, message in (
        (Embeds(image.values, image.positions[:, :2], image.features), r"are int64 \[24, 3\]"),
        (Embeds(image.values, -image.positions, image.features), "from 0 on"),
        (Embeds(image.values, image.positions << 40, image.features), "to 16,777,216"),
        (Embeds(image.values, image.positions, image.features, 10**12), "next_position=1000000000000"),
        (Embeds(image.values, image.positions, image.features, None, None, [1]), "token_ids"),
        (Embeds(image.values, image.positions, image.features[:1]), "for 1 layers.*behind 2"),
        (Embeds(image.values, image.positions, [image.values[:3]] * 2), "as many rows"),
    ):
        with pytest.raises(RequestError, match=message):
            loaded.engine(ENGINE).generate([[1, bad]], long)
    plain = loaded.engine(ENGINE).generate([[1, image.values, 2]], GREEDY)[0]
    assert plain.token_ids == expected(model, [1, image.values, 2])


def test_an_artefact_whose_rows_have_the_shape_of_a_weight(tmp_path):
    model, inputs = llava(), llava_inputs(0)
    model.save_pretrained(tmp_path / "model")
    compiled = pagebinder.compile_model(tmp_path / "model", CompileConfig(prompt_embeds=64))
    prompt = compiled.media_prompt(inputs)
    compiled.save(tmp_path / "saved")
    loaded = pagebinder.load(tmp_path / "saved")
    long = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    assert loaded.engine(ENGINE).generate([prompt], long)[0].token_ids == generated(model, inputs)


def test_the_model_may_be_called_while_prompts_are_made():
    model, inputs = llava(), llava_inputs(0)
    compiled, wanted = (
        pagebinder.compile_model(model, CompileConfig(prompt_embeds=64)),
        generated(model, inputs),
    )
    ended = threading.Event()

    def make() -> int:
        count = 0
        while not ended.is_set():
            assert torch.is_tensor(compiled.media_prompt(inputs)[2])
            count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        made = pool.submit(make)
        try:
            assert all(generated(model, inputs) == wanted for _ in range(3))
        finally:
            ended.set()
        assert made.result() > 0


def test_bad_inputs_of_a_processor_are_refused():
    model = llava()
    compiled = pagebinder.compile_model(model, CompileConfig(prompt_embeds=64))
    good = llava_inputs(0)
    for inputs, message in (
        ([1, 2], "processor returns"),
        ({"pixel_values": good["pixel_values"]}, "processor returns"),
        ({**good, "input_ids": good["input_ids"].repeat(2, 1)}, "of one prompt"),
        ({**good, "attention_mask": torch.zeros_like(good["input_ids"])}, "without padding"),
        ({**good, "pixel_values": good["pixel_values"][:1]}, "cannot be called with.*pixel_values"),
        ({**good, "sound": torch.zeros(3)}, "cannot be called with|sound"),
    ):
        with pytest.raises(RequestError, match=message):
            compiled.media_prompt(inputs)
    assert compiled.media_prompt({"input_ids": torch.tensor([[1, 2, 3]])}) == [1, 2, 3]
    prompt = compiled.media_prompt({**good, "generation_mode": "text", "use_cache": True})  # for generate()
    model.train()
    assert torch.equal(prompt[2], compiled.media_prompt(good)[2])
    assert model.training and model.model.vision_tower.training
