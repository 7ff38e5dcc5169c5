"""The audit finds every way in which one token can learn of another, and is silent on real decoders."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pagebinder.frontend.audit import audit
from pagebinder.frontend.capture import capture
from pagebinder.frontend.recognise import recognise_rms_norm, recognise_rope, recognise_sdpa
from pagebinder.frontend.source import source_from_module
from pagebinder.graph_tools import calls
from pagebinder.models.llama import LlamaConfig, LlamaForCausalLM
from tests.graphs import WIDTH, captured
from tests.helpers import by_day, tiny_llama, tiny_mistral, tiny_qwen3


def semantic_of(body, width=WIDTH):
    gm = captured(body, width=width)
    for recognise in (recognise_rms_norm, recognise_rope, recognise_sdpa):
        recognise(gm)
    return gm


def weighted(function, shape=(64, WIDTH)):
    """A module with one parameter: function(x, positions, weight)."""

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(shape))

        def forward(self, x, positions):
            return function(x, positions, self.weight)

    return Weighted()


def shift(x):
    return torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)


def conv(x, positions, weight):
    return F.conv1d(F.pad(x.mT, (3, 0)), weight)[..., : x.shape[1]].mT


def eager_attention(x, positions):
    scores = x @ x.mT / WIDTH**0.5
    hidden = positions[0, None, :] > positions[0, :, None]
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ x


def rms_over_tokens(x):
    x = x.mT
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)).mT


def latent_attention(x, positions):
    q, weight = x[0].view(-1, 2, WIDTH // 2), torch.ones(2, 4, WIDTH)
    operands = (q[..., :4], q[..., 4:], x[0], x[0, :, : WIDTH // 2 - 4], weight, weight)
    return torch.ops.pagebinder.mla_attention(*operands, None, x[0, :, 0], scale=0.5).flatten(1)[None]


MIXES_TOKENS = {
    "cumsum": (lambda x, p: x.cumsum(1), "along the token dimension"),
    "softmax": (lambda x, p: x.softmax(1), "along the token dimension"),
    "log-softmax": (lambda x, p: x.log_softmax(1), "along the token dimension"),
    "mean": (lambda x, p: x - x.mean(1, keepdim=True), "reduces over the tokens"),
    "mean of everything": (lambda x, p: x - x.mean(), "reduces over the tokens"),
    "sum without dimensions": (lambda x, p: x * x.sum(()), "reduces over the tokens"),
    "first token": (lambda x, p: x + x[:, :1], "reduces over the tokens"),
    "last token": (lambda x, p: x + x[:, -1:], "reduces over the tokens"),
    "largest position": (lambda x, p: x * p.max(), "reduces over the tokens"),
    "amax": (lambda x, p: x * x.amax(1, keepdim=True), "reduces over the tokens"),
    "flip": (lambda x, p: x.flip(1), "along the token dimension"),
    "roll": (lambda x, p: x.roll(1, 1), "along the token dimension"),
    "roll of everything": (lambda x, p: x.roll(1), "along all dimensions"),
    "sort": (lambda x, p: x.sort(1).values, "along the token dimension"),
    "argsort": (lambda x, p: x + x.argsort(1), ""),
    "gather": (lambda x, p: x.gather(1, (p[..., None] // 2).expand_as(x)), "along the token dimension"),
    "index of tokens": (lambda x, p: x[:, p[0] // 2], "table that depends on tokens"),
    "index of the tokens' row": (lambda x, p: x + x[:, [0]], ""),
    "masked write of another token": (
        lambda x, p: x.index_put([p.flip(1) > 2], torch.zeros(())),
        "along the token dimension",
    ),
    "write by index": (
        lambda x, p: x[0].index_put([p[0] // 2], torch.zeros(()))[None],
        "other values choose",
    ),
    "write to a token": (
        lambda x, p: x[0].index_put([torch.tensor([1])], torch.zeros(()))[None],
        "other values choose",
    ),
    "write to a channel of a token's choice": (
        lambda x, p: torch.ops.aten.index_put(x[0], [None, p[0] % 4], torch.zeros(()))[None],
        "other values choose",
    ),
    "added to some channels": (
        lambda x, p: torch.ops.aten.index_put(x, [None, None, torch.tensor([1, 1])], torch.ones(()), True),
        "as often as they are named",
    ),
    "addmm over tokens": (
        lambda x, p: x + torch.addmm(torch.zeros(WIDTH, WIDTH), x[0].mT, x[0]).sum(0),
        "reduces over the tokens",
    ),
    "addmm onto tokens": (lambda x, p: torch.addmm(x[0], x[0], torch.eye(WIDTH))[None], "to a product"),
    "index_select of tokens": (lambda x, p: x.index_select(1, p[0] // 2), "picks tokens"),
    "shift": (lambda x, p: x + shift(x), "token dimension"),
    "shift by padding": (lambda x, p: x + F.pad(x, (0, 0, 1, -1)), "pads along the token dimension"),
    "convolution": (weighted(conv, (WIDTH, WIDTH, 4)), ""),
    "matmul-softmax-matmul": (eager_attention, "two token dimensions"),
    "outer product without weights": (lambda x, p: (x @ x.mT).relu() @ x, "two token dimensions"),
    "linear attention": (lambda x, p: x @ (x.mT @ x), "reduces over the tokens"),
    "einsum": (lambda x, p: x + torch.einsum("btc,btd->bcd", x, x)[:, 0], ""),
    "einsum over tokens": (lambda x, p: x + torch.einsum("btc->bc", x)[:, None], "the tokens"),
    "einsum over dots": (lambda x, p: x + torch.einsum("...c->c", x), "the tokens"),
    "einsum of all pairs in dots": (lambda x, p: torch.einsum("...tc,...sc,...sd->...td", x, x, x), "einsum"),
    "einsum of all pairs": (lambda x, p: torch.einsum("btc,bsc,bsd->btd", x, x, x), "einsum"),
    "layer norm over tokens": (
        lambda x, p: F.layer_norm(x.mT, (x.shape[1],)).mT,
        "along the token dimension",
    ),
    "layer norm over tokens and channels": (
        lambda x, p: F.layer_norm(x, x.shape[1:]),
        "along the token dimension",
    ),
    "RMS over tokens": (lambda x, p: rms_over_tokens(x), ""),
    "number of tokens as a factor": (lambda x, p: x * x.shape[1], "number of tokens"),
    "root of the number of tokens": (lambda x, p: x * x.shape[1] ** -0.5, "number of tokens"),
    "number of tokens in a tensor": (lambda x, p: x * torch.tensor(x.shape[1]), "number of tokens"),
    "number of tokens as a fill": (lambda x, p: x * torch.full((1,), x.shape[1]), "number of tokens"),
    "number of tokens as fill of a like": (
        lambda x, p: torch.full_like(x, x.shape[1]),
        "number of tokens",
    ),
    "arange for positions": (lambda x, p: x * torch.arange(x.shape[1])[None, :, None], "counts the tokens"),
    "cumulated ones for positions": (
        lambda x, p: x * p.new_ones(p.shape).cumsum(1)[..., None],
        "along the token",
    ),
    "rows of a position table by count": (
        weighted(lambda x, p, w: x + w.repeat(1 << 15, 1)[: x.shape[1]]),
        "counts the tokens",
    ),
    "deviation over the tokens": (lambda x, p: x / x.std(1, keepdim=True), "reduces over the tokens"),
    "products over the tokens": (lambda x, p: x.cumprod(1), "along the token dimension"),
    "groups of channels and tokens": (
        lambda x, p: F.group_norm(x.transpose(1, 2), 4).transpose(1, 2),
        "means over the tokens",
    ),
    "statistics of the batch": (
        lambda x, p: F.batch_norm(x[0], None, None, training=True)[None],
        "means over the tokens",
    ),
    "random numbers": (lambda x, p: x + torch.rand(x.shape[1], WIDTH), "at random"),
    "random numbers for all tokens": (lambda x, p: x + torch.rand(WIDTH), "at random"),
    "random slopes": (lambda x, p: F.rrelu(x, 0.1, 0.9, training=True), "at random"),
    "random dropout": (lambda x, p: F.dropout(x, 0.5, training=True), "at random"),
    "triangle of the channels": (lambda x, p: x.tril(), "not known"),
    "attention over everything": (
        lambda x, p: F.scaled_dot_product_attention(*[x[:, None]] * 3)[:, 0],
        "later tokens",
    ),
    "attention over heads": (
        lambda x, p: F.scaled_dot_product_attention(*[x.view(1, -1, 4, 4)] * 3, is_causal=True).flatten(2),
        "not known",
    ),
    "sinks of tokens": (latent_attention, "weights depend on tokens"),
}


@pytest.mark.parametrize("name", by_day(MIXES_TOKENS, list(MIXES_TOKENS)[::2]))
def test_every_mixture_is_found_and_located(name):
    body, reason = MIXES_TOKENS[name]
    violations = audit(semantic_of(body))
    assert violations, "the audit was silent"
    assert any(reason in v.reason for v in violations), violations
    for v in violations:
        assert v.module_path == "body" and ".py:" in v.source_line
        assert v.module_path in str(v) and v.source_line in str(v) and v.reason in str(v)


def test_a_view_in_place_of_a_transpose_is_found():
    """[1, T, C] viewed as [1, H, T, C/H]: the sizes are right, and the tokens have swapped places.

    torch.export refuses to trace it for some lengths, so the node is written by hand.
    """
    gm = captured(lambda x, p: x.unsqueeze(1).expand(1, 4, -1, -1).sum(1))
    x = next(calls(gm.graph, torch.ops.aten.embedding.default))
    expanded = next(calls(gm.graph, torch.ops.aten.expand.default))
    assert audit(gm) == []
    with gm.graph.inserting_after(expanded):
        view = gm.graph.call_function(torch.ops.aten.view.default, (x, [1, 4, -1, WIDTH // 4]))
    view.meta = {**expanded.meta, "val": expanded.meta["val"][..., : WIDTH // 4]}
    assert ["swap places" in v.reason for v in audit(gm)] == [True]


class Counter(nn.Module):
    """Keeps a running sum in a buffer: what a token gets depends on every earlier call."""

    def __init__(self, write):
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH))
        self.write = write

    def forward(self, x, positions):
        self.write(self.total)
        return x + self.total


@pytest.mark.parametrize(
    "write",
    [lambda b: b.add_(1.0), lambda b: b.mul_(2.0), lambda b: b.copy_(b + 1), lambda b: b[:2].fill_(3.0)],
    ids=["add_", "mul_", "copy_", "part"],
)
def test_a_buffer_update_is_found(write):
    violations = audit(semantic_of(Counter(write)))
    assert [v.reason for v in violations] == ["it writes to a tensor in place"]
    assert violations[0].module_path == "body" and "test_audit.py:" in violations[0].source_line


def written_by_parts(x, positions):
    y = torch.empty_like(x)
    y[..., ::2], y[..., 1::2] = -x[..., 1::2], x[..., ::2]
    return y


def set_channels(x, positions):
    y = x.clone()
    y[..., :3] = 0
    return y


KEEPS_TOKENS_APART = {
    "mlp": lambda x, p: F.silu(x) * x.exp() + x.clamp(-1, 1),
    "norms": lambda x, p: F.layer_norm(x, (WIDTH,)) + x / x.norm(dim=-1, keepdim=True),
    "softmax over channels": lambda x, p: x.softmax(-1) + x.cumsum(-1) + x.flip(-1) + x.roll(1, -1),
    "sort of channels": lambda x, p: x.sort(-1).values + x.topk(1, -1).values + x.argmax(-1, keepdim=True),
    "masked write": lambda x, p: x.index_put([p > 2], torch.zeros(())) + x.index_put([x > 0], torch.ones(())),
    "write to some channels": lambda x, p: torch.ops.aten.index_put(
        x, [None, None, torch.tensor([2, 0])], torch.ones(())
    ),
    "aliases": lambda x, p: torch.where(
        (x > 0) | (x < -1), 0.0, torch.divide(torch.multiply(x, x), torch.absolute(x))
    ),
    "addmm": weighted(lambda x, p, w: torch.addmm(w[0], x.view(-1, WIDTH), w[:WIDTH]).view(x.shape)),
    "some heads": lambda x, p: x.view(1, -1, 4, 4)[..., [-1, 0], :].repeat(1, 1, 2, 1).flatten(2),
    "heads": lambda x, p: (
        x.view(1, -1, 4, 4).transpose(1, 2).reshape(4, -1, 4).transpose(0, 1).reshape(1, -1, 16)
    ),
    "split and concatenate": lambda x, p: torch.cat((x[..., 8:], *x[..., :8].chunk(2, -1)), -1),
    "stack": lambda x, p: (
        torch.stack((x, x), -1).flatten(-2)[..., ::2] + torch.stack((p, p), -1).sum(-1)[..., None]
    ),
    "deviations": lambda x, p: x / x.std(-1, keepdim=True) + torch.var_mean(x, -1, keepdim=True)[1],
    "products and truths": lambda x, p: (
        x * x.prod(-1, keepdim=True) * (x > 0).any(-1, keepdim=True) + x.cumprod(-1)
    ),
    "written by parts": written_by_parts,
    "some channels set": set_channels,
    "conjugates": lambda x, p: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2))).conj() * 1j
    ).flatten(2),
    "groups of channels": lambda x, p: F.group_norm(x.flatten(0, 1), 4).unflatten(0, (1, -1)),
    "statistics that were measured": lambda x, p: F.batch_norm(
        x.transpose(1, 2), torch.zeros(WIDTH), torch.ones(WIDTH)
    ).transpose(1, 2),
    "positions": lambda x, p: x * p[..., None].float().cos(),
    "whole slices": lambda x, p: x[:, :, :8].repeat(1, 1, 2) + x[:],
    "ones of all tokens": lambda x, p: x + torch.ones(x.shape[1], WIDTH) + x.new_zeros(x.shape),
    "dropout in evaluation": lambda x, p: F.dropout(x, 0.5, training=False),
    "random slopes in evaluation": lambda x, p: F.rrelu(x, 0.1, 0.9),
    "other activations": lambda x, p: F.hardswish(x) + F.prelu(x, torch.full((1,), 0.1)),
    "padding of channels": lambda x, p: F.pad(x, (1, 2)).flip(-1)[..., 3:],
    "einsum of experts": weighted(lambda x, p, w: torch.einsum("btc, ecd -> btd", x, w), (3, WIDTH, WIDTH)),
    "einsum with dots": weighted(lambda x, p, w: torch.einsum("...c, cd -> ...d", x, w), (WIDTH, WIDTH)),
    "einsum of parts of channels": weighted(
        lambda x, p, w: torch.einsum("...rk,rkc->...rc", x.unflatten(-1, (2, -1)), w).flatten(-2),
        (2, WIDTH // 2, WIDTH // 2),
    ),
    "channel mixing": weighted(lambda x, p, w: x @ w, (WIDTH, WIDTH)),
    "low rank": weighted(lambda x, p, w: F.linear(F.linear(x, w), w.mT), (4, WIDTH)),
    "bias expanded": weighted(lambda x, p, w: x + w[:1].expand(x.shape[1], -1)),
    "position table by position": weighted(
        lambda x, p, w: x + w[p] + F.embedding(p, w) + w.index_select(0, p[0])
    ),
}


@pytest.mark.parametrize("name", KEEPS_TOKENS_APART)
def test_work_on_single_tokens_is_accepted(name):
    assert audit(semantic_of(KEEPS_TOKENS_APART[name])) == []


def our_llama():
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        layer_types=("full_attention", "sliding_attention"), sliding_window=16, model_type="qwen3",
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(
    "build",
    [tiny_llama, tiny_qwen3, lambda: tiny_mistral(12), our_llama],
    ids=["llama", "qwen3", "mistral", "ours"],
)
def test_real_decoders_are_clean(build):
    gm, _ = capture(source_from_module(build().eval()))
    for recognise in (recognise_rms_norm, recognise_rope, recognise_sdpa):
        result = recognise(gm)
        assert not result.refusals
    assert audit(gm) == []
