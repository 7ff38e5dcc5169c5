"""Attention written out in PyTorch -> pagebinder.attention: styles, what is proven, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, ConfigError, EngineConfig, SamplingParams
from pagebinder.frontend.audit import audit
from pagebinder.frontend.recognise import recognise_raw_attention
from pagebinder.graph_tools import calls
from tests.frontend import plain_decoders as plain
from tests.graphs import WIDTH, captured, captured_model, clone, count, run

ATTENTION = torch.ops.pagebinder.attention.default

STYLES = {
    plain.NanoGPT: {"scale": 8**-0.5},
    plain.MinGPT: {"scale": 8**-0.5},
    plain.MaskedInPlace: {"scale": 8**-0.5},
    plain.Einsum: {"scale": 8**-0.5, "window": 9},
    plain.Bloom: {"scale": 8**-0.5},
    plain.MultiheadAttention: {"scale": 8**-0.5},
    plain.Grouped: {"scale": 0.5, "soft_cap": 3.0, "chunk": 12},
}
KV_HEADS = {plain.MinGPT: 1, plain.Grouped: 2}


@pytest.mark.parametrize("style", STYLES, ids=lambda s: s.__name__)
def test_plain_decoders_are_recognised_and_equal(style):
    before = captured_model(plain.Decoder(style))
    after = clone(before)
    result = recognise_raw_attention(after)
    assert not result.refusals and len(result.matches) == 2, result.refusals
    assert not audit(after)
    for node in calls(after.graph, ATTENTION):
        assert node.kwargs == pytest.approx(STYLES[style])
        heads = [n.meta["val"].shape[1] for n in node.args[:3]]
        assert heads == [plain.HEADS] + [KV_HEADS.get(style, plain.HEADS)] * 2
    for num_tokens in (1, 2, 17, 50):
        torch.testing.assert_close(run(after, num_tokens), run(before, num_tokens), atol=1e-5, rtol=1e-5)


def test_the_slopes_of_alibi_are_recovered():
    gm = captured_model(plain.Decoder(plain.Bloom))
    recognise_raw_attention(gm)
    for node in calls(gm.graph, ATTENTION):
        assert torch.equal(getattr(gm, node.args[4].target), 2.0 ** (-2.0 * torch.arange(1, 5)))
    assert len({node.args[4] for node in calls(gm.graph, ATTENTION)}) == 1


def greedy(model, prompt, num_tokens):
    ids = list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([ids]), torch.arange(len(ids))[None])
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def assert_verified_and_served(model, dtype):
    """Every step is verified; in float32 tokens are compared, too: a tie in bfloat16 is no error."""
    model = model.eval().to(dtype)
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager", verify="full"))
    if dtype is torch.float32:
        engine = compiled.engine(EngineConfig(num_kv_blocks=64, max_num_batched_tokens=24))
        prompts = [[1, 2, 3], list(range(20)), [7] * 45]
        outputs = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        assert [o.token_ids for o in outputs] == [greedy(model, p, 8) for p in prompts]


@pytest.mark.parametrize("style", [plain.NanoGPT, plain.Bloom], ids=lambda s: s.__name__)
def test_a_plain_decoder_is_served_token_for_token(style):
    model = plain.Decoder(style).eval()
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager"))
    assert compiled.max_model_len == (plain.MAX_TOKENS if style is plain.NanoGPT else 2048)
    engine = compiled.engine(EngineConfig(num_kv_blocks=64, max_num_seqs=4, max_num_batched_tokens=96))
    prompts = [[1, 2, 3], list(range(20)), [7] * 45, [5] * 33]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert [o.token_ids for o in outputs] == [greedy(model, p, 8) for p in prompts]


def test_a_mask_buffer_bounds_the_length():
    model = plain.Decoder(plain.NanoGPT).eval()
    with pytest.raises(ConfigError, match=r"more than the 64 tokens"):
        pagebinder.compile_model(model, CompileConfig(executable="eager", max_model_len=100))


def heads(x, num_heads=2):
    return x.view(1, -1, num_heads, WIDTH // num_heads).transpose(1, 2)


def causal(scores):
    t = scores.shape[-1]
    return scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))


def attend(x, change_scores=causal, change_weights=lambda w: w, dim=-1):
    q = heads(x)
    weights = change_weights(torch.softmax(change_scores(q @ q.transpose(-1, -2)), dim=dim))
    return (weights @ q).transpose(1, 2).flatten(2)


def with_other_user(x, positions):
    q = heads(x)
    scores = q @ q.transpose(-1, -2)
    weights = torch.softmax(causal(scores), dim=-1)
    return (weights @ q).transpose(1, 2).flatten(2) + scores.mean((1, 3))[..., None]


def with_weights_used(x, positions):
    q = heads(x)
    weights = torch.softmax(causal(q @ q.transpose(-1, -2)), dim=-1)
    return (weights @ q).transpose(1, 2).flatten(2) + weights.amax((1, 3))[..., None]


def sinks_kept(x, positions):
    q = heads(x)
    scores = causal(q @ q.transpose(-1, -2))
    scores = torch.cat((scores, torch.zeros(1, 2, 1, 1).expand(-1, -1, x.shape[1], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)
    return (weights[..., 1:] @ q).transpose(1, 2).flatten(2)


def of_two_products(x, positions):
    """Scores of parts of the channels: one part of heads, one that all heads share, as MLA has them."""
    q, shared = heads(x), x.mT[:, None, :3]
    scores = q[..., 3:] @ q[..., 3:].mT + q[..., :3] @ shared
    return (torch.softmax(causal(scores / 3), dim=-1) @ q).transpose(1, 2).flatten(2)


def of_three_products(x, positions):
    q = heads(x)
    scores = q[..., :2] @ q[..., :2].mT + q[..., 2:5] @ q[..., 2:5].mT + q[..., 5:] @ q[..., 5:].mT
    return (torch.softmax(causal(scores), dim=-1) @ q).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("body", [of_two_products, of_three_products], ids=lambda f: f.__name__)
def test_scores_that_are_a_sum_of_products_are_one_product(body):
    before = captured(body)
    after = clone(before)
    result = recognise_raw_attention(after)
    assert not result.refusals and len(result.matches) == 1 and not audit(after)
    (node,) = calls(after.graph, ATTENTION)
    assert [n.meta["val"].shape[1:] for n in node.args[:2]] == [(2, WIDTH // 2)] * 2
    for num_tokens in (1, 2, 17):
        torch.testing.assert_close(run(after, num_tokens), run(before, num_tokens), atol=1e-5, rtol=1e-5)


def rows_first(x):
    """[b, s, h, d]."""
    return x.unflatten(-1, (2, -1))


def rows_before_heads(x, positions):
    """As DeepSeek's inference code writes it."""
    q, t = rows_first(x), x.shape[1]
    scores = torch.einsum("bshd,bthd->bsht", q, q) * 0.4
    scores = scores + torch.full((t, t), float("-inf")).triu(1).unsqueeze(1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).type_as(x)
    return torch.einsum("bsht,bthd->bshd", weights, q).flatten(2)


def rows_before_heads_of_two_products(x, positions):
    """The same over latents, with a part that all heads share: absorbed MLA."""
    q, latents = rows_first(x), x[..., :5]
    scores = torch.einsum("bshc,btc->bsht", q[..., :5], latents)
    scores = (scores + torch.einsum("bshr,btr->bsht", q[..., 5:], x[..., 5:8])) / 3
    hidden = (positions[:, None, :] > positions[:, :, None])[:, :, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bsht,btc->bshc", weights, latents).flatten(2)


def rows_before_heads_capped(x, positions):
    q = rows_first(x)
    scores = 5.0 * torch.tanh(torch.einsum("bqhd,bkhd->bqhk", q, q) / 5.0)
    scores = torch.where(
        (positions[:, None, :] <= positions[:, :, None])[:, :, None], scores, torch.tensor(-1e30)
    )
    return torch.einsum("bqhk,bkhd->bqhd", scores.softmax(-1), q).flatten(2)


@pytest.mark.parametrize(
    ("body", "kv_heads", "widths"),
    [
        (rows_before_heads, 2, (8, 8)),
        (rows_before_heads_of_two_products, 1, (8, 5)),
        (rows_before_heads_capped, 2, (8, 8)),
    ],
)
def test_rows_may_come_before_heads(body, kv_heads, widths):
    before = captured(body)
    after = clone(before)
    result = recognise_raw_attention(after)
    assert not result.refusals and len(result.matches) == 1 and not audit(after), result.refusals
    (node,) = calls(after.graph, ATTENTION)
    assert [tuple(n.meta["val"].shape[1:]) for n in node.args[1:3]] == [(kv_heads, width) for width in widths]
    for num_tokens in (1, 2, 17):
        torch.testing.assert_close(run(after, num_tokens), run(before, num_tokens), atol=1e-5, rtol=1e-5)


def rows_before_heads_changed(x, positions):
    q = rows_first(x)
    scores = torch.einsum("bqhd,bkhd->bqhk", q, q).cumsum(2)  # over heads
    scores = scores.masked_fill((positions[:, None, :] > positions[:, :, None])[:, :, None], float("-inf"))
    return torch.einsum("bqhk,bkhd->bqhd", scores.softmax(-1), q).flatten(2)


def one_of_two_products_is_used_elsewhere(x, positions):
    q = heads(x)
    first, second = q[..., :4] @ q[..., :4].mT, q[..., 4:] @ q[..., 4:].mT
    weights = torch.softmax(causal(first + second), dim=-1)
    return (weights @ q).transpose(1, 2).flatten(2) + first.mean((1, 3))[..., None]


def product_scaled_by_length(x, positions):
    q = heads(x)[0]
    scores = torch.baddbmm(torch.zeros(1), q, q.transpose(-1, -2), beta=0, alpha=10 / x.shape[1])
    return (torch.softmax(causal(scores[None]), dim=-1) @ q[None]).transpose(1, 2).flatten(2)


NEAR_MISSES = {
    "differs in one place": (
        lambda x, p: attend(x, lambda s: causal(s).masked_fill((p[0, :, None] == 9) & (p[0] == 4), -1e9)),
        "none of causal",
    ),
    "a prefix": (
        lambda x, p: attend(x, lambda s: s.masked_fill((p[0] > p[0, :, None]) & (p[0] >= 6), -1e9)),
        "prefix-LM",
    ),
    "hidden by too little": (
        lambda x, p: attend(x, lambda s: s.masked_fill(p[0] > p[0, :, None], -50.0)),
        "large negative number",
    ),
    "a bias that is not ALiBi": (
        lambda x, p: attend(x, lambda s: causal(s) - 0.1 * (p[0, :, None] - p[0]).float() ** 2),
        "not linear in the distance",
    ),
    "sines of the distance": (
        lambda x, p: attend(x, lambda s: causal(s) + ((p[0, :, None] - p[0]).float() / 50).sin()),
        "not linear in the distance",
    ),
    "ALiBi rounded to bfloat16": (
        lambda x, p: attend(x, lambda s: causal(s) + (p[0] * torch.tensor(0.25).bfloat16()).float()),
        "ALiBi that was rounded to bfloat16",
    ),
    "a bias of the tokens": (
        lambda x, p: attend(x, lambda s: causal(s) + x.mean(-1)[:, None, None]),
        "values of the tokens",
    ),
    "a mask of the tokens": (
        lambda x, p: attend(x, lambda s: causal(s).masked_fill((x[..., 0] > 1)[:, None, None], -1e9)),
        "values of the tokens",
    ),
    "another dimension": (lambda x, p: attend(x, dim=-2), "another dimension"),
    "weights changed": (
        lambda x, p: attend(x, change_weights=lambda w: w * w),
        "several places|stands between",
    ),
    "weights rounded": (lambda x, p: attend(x, change_weights=torch.round), "round.* stands between"),
    "scores changed": (lambda x, p: attend(x, lambda s: causal(s.abs())), "abs stands between"),
    "scaled by the length": (
        lambda x, p: attend(
            x, lambda s: causal(s * torch.tensor(x.shape[1], dtype=torch.float32).log().clamp(min=4.0))
        ),
        "multiplied by what depends on the number of tokens",
    ),
    "scaled by a table at the length": (
        lambda x, p: attend(x, lambda s: causal(s * torch.ones(4096)[x.shape[1] - 1])),
        "multiplied by what depends on the number of tokens",
    ),
    "capped by the length": (
        lambda x, p: attend(x, lambda s: causal((s / torch.arange(x.shape[1]).float().mean()).tanh() * 5.0)),
        "multiplied by what depends on the number of tokens|before the soft cap",
    ),
    "hidden by the length": (
        lambda x, p: attend(
            x, lambda s: torch.where(p[0] > p[0, :, None], torch.tensor(-1e9) * x.shape[1], s)
        ),
        "large negative number",
    ),
    "a product scaled by the length": (product_scaled_by_length, "scaled by what depends on the number"),
    "a window inside chunks": (
        lambda x, p: attend(
            x,
            lambda s: s.masked_fill(
                (p[0] > p[0, :, None]) | (p[0, :, None] - p[0] >= 5) | (p[0, :, None] // 16 != p[0] // 16),
                -1e9,
            ),
        ),
        "a window inside chunks is not served",
    ),
    "one of two products used elsewhere": (one_of_two_products_is_used_elsewhere, "values of the tokens"),
    "rows before heads, and heads that see one another": (rows_before_heads_changed, ""),
    "masked before the cap": (
        lambda x, p: attend(x, lambda s: causal(s).tanh() * 5.0),
        "before the soft cap",
    ),
    "scores used elsewhere": (with_other_user, "scores are used in other places"),
    "weights used elsewhere": (with_weights_used, "weights of the attention are used"),
    "a column that is not dropped": (sinks_kept, "are cut"),
    "not of scores": (lambda x, p: torch.softmax(x, dim=1), "another dimension"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_deviates_is_refused_with_the_reason(name):
    body, reason = NEAR_MISSES[name]
    before = captured(body)
    after = clone(before)
    result = recognise_raw_attention(after)
    assert count(after, ATTENTION) == 0 and not result.matches
    (refusal,) = result.refusals
    assert re.search(reason, refusal.reason), refusal.reason
    assert refusal.pattern == "attention" and "graphs.py:" in refusal.source_line
    assert torch.equal(run(after, 20), run(before, 20))


def test_the_router_of_experts_is_no_attention():
    result = recognise_raw_attention(captured(lambda x, p: torch.softmax(x, dim=-1)))
    assert not result.matches and not result.refusals


def test_keys_of_two_parts_and_narrower_values():
    """As multi-head latent attention expands them: a rotary part shared by all heads, values of their own width."""

    def body(x, positions):
        q, nope, v = heads(x), heads(x.sin())[..., :5], heads(x.cos())[..., :3]
        shared = x[..., :3].unsqueeze(1).expand(-1, 2, -1, -1)
        k = torch.cat((nope, shared), dim=-1)
        weights = torch.softmax(causal(q @ k.transpose(-1, -2) * 0.3), dim=-1)
        return (weights @ v).transpose(1, 2).flatten(2)

    before = captured(body)
    after = clone(before)
    assert len(recognise_raw_attention(after).matches) == 1
    (node,) = calls(after.graph, ATTENTION)
    assert [n.meta["val"].shape[2] for n in node.args[:3]] == [8, 8, 3]
    torch.testing.assert_close(run(after, 20), run(before, 20), atol=1e-6, rtol=1e-5)


def test_a_sum_of_alibi_and_mask():
    def body(x, positions):
        p, j = positions[0, :, None], positions[0]
        slopes = torch.tensor([0.5, 0.25])
        bias = slopes[:, None, None] * (j - p) + torch.where(j <= p, 0.0, float("-inf"))
        return attend(x, lambda s: s * 0.3 + bias)

    before = captured(body)
    after = clone(before)
    result = recognise_raw_attention(after)
    assert [m.detail for m in result.matches] == ["causal, ALiBi"], result.refusals
    torch.testing.assert_close(run(after, 20), run(before, 20), atol=1e-6, rtol=1e-5)
