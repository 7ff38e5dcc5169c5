"""DeepSeek-V4 against `transformers`, and proof that the comparison would see an error of one in any place."""

import pytest
import torch

from pagebinder.models import deepseek_v4_mixing as mixing
from pagebinder.models.deepseek_v4 import DeepseekV4ForCausalLM, Rope, Yarn
from tests.deepseek_v4_models import oracle_config, oracle_model, random_ids, relative_error

MAX_ERROR = 1e-5  # of float32 logits, relative to the largest
CLEAR = 100 * MAX_ERROR  # what an error in the model must at least cause
LENGTHS = (1, 3, 4, 5, 15, 16, 17, 32, 127, 128, 129, 300)


@pytest.fixture(scope="module", params=[8, 128], ids="heavy{}".format)
def pair(request, tmp_path_factory):
    return _pair(tmp_path_factory.mktemp("v4"), oracle_config(heavy_ratio=request.param))


@pytest.fixture(scope="module")
def spread_pair(tmp_path_factory):
    """Mixing matrices so uneven that the twentieth round of Sinkhorn's iteration still matters."""
    return _pair(tmp_path_factory.mktemp("v4"), oracle_config(), comb_spread=60.0)


def _pair(directory, config, **kwargs):
    oracle = oracle_model(config, **kwargs)
    oracle.save_pretrained(directory)
    return DeepseekV4ForCausalLM.from_pretrained(directory), oracle


@torch.no_grad()
def _error(pair, num_tokens: int) -> float:
    ours, oracle = pair
    ids = random_ids(num_tokens)
    expected = oracle(ids).logits
    assert expected.std() > 0.3
    return relative_error(ours(ids), expected)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_logits_equal_transformers(pair, num_tokens):
    assert _error(pair, num_tokens) < MAX_ERROR


def test_logits_equal_transformers_with_uneven_mixing(spread_pair):
    assert _error(spread_pair, 40) < MAX_ERROR


def _one_fewer(function, option):
    def changed(*args, **kwargs):
        return function(*args, **kwargs | {option: kwargs[option] - 1})

    return changed


def _late_visibility(num_tokens, ratio, device):
    complete = torch.arange(num_tokens, device=device) // ratio
    return torch.arange(num_tokens // ratio, device=device) < complete[:, None]


def _no_previous_window(windows, fill):
    first, second = windows.chunk(2, dim=-1)
    return torch.cat((torch.full_like(first, fill), second), dim=2)


def _without_sinks(q, kv, entries, indices, sinks, **options):
    return _ATTENTION(q, kv, entries, indices, None, **options)


_ATTENTION = mixing.compressed_attention
VARIANTS = {
    "top-k": ("index_topk", _one_fewer(mixing.index_topk, "topk")),
    "window": ("compressed_attention", _one_fewer(mixing.compressed_attention, "window")),
    "visibility": ("visible_entries", _late_visibility),
    "overlap": ("_with_previous", _no_previous_window),
    "sinks": ("compressed_attention", _without_sinks),
    "mixing direction": (
        "hyper_mix",
        lambda streams, post, comb, update, original=mixing.hyper_mix: original(
            streams, post, comb.transpose(-1, -2), update
        ),
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_error_of_one_is_seen(pair, monkeypatch, variant):
    name, changed = VARIANTS[variant]
    assert _error(pair, 140) < MAX_ERROR
    monkeypatch.setattr(mixing, name, changed)
    assert _error(pair, 140) > CLEAR


def test_a_missing_round_of_sinkhorn_is_seen(spread_pair, monkeypatch):
    monkeypatch.setattr(mixing, "hyper_connection", _one_fewer(mixing.hyper_connection, "sinkhorn_iters"))
    assert _error(spread_pair, 40) > CLEAR


def test_sinkhorn_goldens():
    logits = torch.tensor(
        [[0.0, 1.0, 2.0, 3.0], [1.0, 0.0, -1.0, 0.5], [0.2, 0.4, 0.6, 0.8], [-2.0, 0.0, 1.0, 0.0]]
    )
    comb = mixing.sinkhorn(logits[None], iters=20, eps=1e-6)[0]
    rows = {
        0: [0.065969, 0.163821, 0.251102, 0.519107],
        1: [0.608480, 0.204503, 0.042423, 0.144593],
        3: [0.047637, 0.321566, 0.492893, 0.137903],
    }
    for row, expected in rows.items():
        torch.testing.assert_close(comb[row], torch.tensor(expected), atol=1e-6, rtol=0)
    torch.testing.assert_close(comb.sum(0), torch.full((4,), 1 - 1e-6), atol=3e-7, rtol=0)


def test_yarn_goldens():
    yarn = Yarn(factor=16, original_max_position_embeddings=65536, attention_factor=1.0)
    rope = Rope(theta=160000.0, width=64, yarn=yarn)
    assert rope.ramp() == (15, 25)
    assert rope.scale == 1.0
    inv_freq = rope.inverse_frequencies()
    goldens = {0: 1.0, 14: 0.00528686, 16: 0.00226563, 20: 2.96978e-4, 25: 5.37231e-6, 31: 5.68053e-7}
    for pair, expected in goldens.items():
        assert inv_freq[pair].item() == pytest.approx(expected, rel=5e-6), pair  # six digits
    plain = Rope(theta=160000.0, width=64).inverse_frequencies()
    assert plain[16].item() == pytest.approx(0.0025, rel=1e-6)
    torch.testing.assert_close(inv_freq[25:], plain[25:] / 16)
    assert torch.equal(inv_freq[:16], plain[:16])
