"""DeepSeek-V4 can be trained: every parameter learns, the indexer from its own loss, the prediction layer too."""

import pytest
import torch
import torch.nn.functional as F

from pagebinder.models import deepseek_v4_mixing as mixing
from pagebinder.models.deepseek_v4 import DeepseekV4ForCausalLM
from pagebinder.models.deepseek_v4_losses import entry_mass, indexer_loss
from tests.deepseek_v4_models import VOCAB, oracle_config, oracle_model, random_ids

NUM_TOKENS = 48


def _model(tmp_path, with_mtp: bool = True) -> DeepseekV4ForCausalLM:
    oracle_model(oracle_config()).save_pretrained(tmp_path)
    trained = DeepseekV4ForCausalLM.from_pretrained(tmp_path)
    model = DeepseekV4ForCausalLM(trained.config, with_mtp=with_mtp)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.startswith("mtp.") and parameter.ndim > 1:
            std = parameter.shape[-1] ** -0.5
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std)
    model.load_state_dict(trained.state_dict(), strict=False)
    return model


def _without_gradient(model) -> set[str]:
    return {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0}


def test_every_parameter_learns(tmp_path):
    model = _model(tmp_path)
    losses = model.training_losses(random_ids(NUM_TOKENS + 1))
    assert losses.keys() == {"tokens", "indexer", "mtp"}
    sum(losses.values()).backward()
    assert _without_gradient(model) == set()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_the_indexer_learns_from_its_own_loss_only(tmp_path):
    model = _model(tmp_path, with_mtp=False)
    indexers = {name for name, _ in model.named_parameters() if ".indexer." in name}
    model.training_losses(random_ids(NUM_TOKENS + 1))["tokens"].backward()
    assert _without_gradient(model) == indexers
    model.zero_grad()
    model.training_losses(random_ids(NUM_TOKENS + 1))["indexer"].backward()
    assert _without_gradient(model) == {name for name, _ in model.named_parameters()} - indexers


def test_the_token_loss_is_that_of_the_logits(tmp_path):
    model, ids = _model(tmp_path, with_mtp=False), random_ids(NUM_TOKENS + 1)
    with torch.no_grad():
        expected = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        torch.testing.assert_close(model.training_losses(ids)["tokens"], expected)


@torch.no_grad()
def test_gradients_of_the_mixing_functions_are_right():
    q, kv, entries = (torch.randn(1, 11, 2, 6), torch.randn(1, 11, 6), torch.randn(1, 11, 6))
    sinks = torch.randn(2)

    def attention(q, kv, entries, sinks):
        return mixing.compressed_attention(
            q, kv, entries, None, sinks, scale=0.6, window=4, ratio=2
        ).square().sum()  # fmt: skip

    operands = [q, kv, entries, sinks]
    with torch.enable_grad():
        leaves = [operand.clone().requires_grad_() for operand in operands]
        attention(*leaves).backward()
    for i, leaf in enumerate(leaves):
        step = torch.randn(leaf.shape) * 1e-3
        moved = [[o + sign * step if j == i else o for j, o in enumerate(operands)] for sign in (1, -1)]
        difference = attention(*moved[0]) - attention(*moved[1])
        torch.testing.assert_close(2 * (leaf.grad * step).sum(), difference, atol=2e-4, rtol=2e-2)


def test_training_lowers_every_loss(tmp_path):
    model, ids = _model(tmp_path), random_ids(NUM_TOKENS + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    history = []
    for _ in range(30):
        losses = model.training_losses(ids)
        history.append({name: loss.item() for name, loss in losses.items()})
        sum(losses.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert history[-1]["tokens"] < 0.7 * history[0]["tokens"]
    assert history[-1]["mtp"] < 0.7 * history[0]["mtp"]
    assert history[-1]["indexer"] < 0.9 * history[0]["indexer"]


def test_entry_mass_is_what_dense_attention_gives():
    T, ratio, window = 12, 4, 3
    q, kv, entries = torch.randn(1, T, 2, 6), torch.randn(1, T, 6), torch.randn(1, T, 6)
    sinks, rows = torch.randn(2), torch.tensor([2, 3, 11])
    mass = entry_mass(q, kv, entries, sinks, rows, scale=0.5, window=window, ratio=ratio)
    for i, p in enumerate(rows.tolist()):
        num_seen = (p + 1) // ratio
        keys = torch.cat((entries[0, ratio - 1 :: ratio][:num_seen], kv[0, max(p - window + 1, 0) : p + 1]))
        logits = torch.cat((0.5 * q[0, p] @ keys.T, sinks[:, None]), dim=1)
        expected = logits.softmax(1)[:, :num_seen].sum(0)
        assert not mass[0, i, num_seen:].any()
        torch.testing.assert_close(mass[0, i, :num_seen], expected / expected.sum().clamp(min=1e-12))


def test_indexer_loss_is_zero_for_the_attention_itself_and_positive_otherwise():
    # One head, scores q . k well above 0: the index's own scores are the attention's logits.
    T, ratio = 16, 4
    q, entries = torch.rand(1, T, 1, 6) + 0.2, torch.rand(1, T, 6) + 0.2
    options = {"scale": 1.0, "window": 2, "ratio": ratio, "index_scale": 1.0}
    attention = (q, torch.randn(1, T, 6), entries, torch.zeros(1))
    exact = indexer_loss(q, entries, torch.ones(1, T, 1), *attention, **options)
    assert exact.abs() < 1e-6
    assert indexer_loss(q, entries, -3 * torch.ones(1, T, 1), *attention, **options) > 0.01
    short = indexer_loss(
        q[:, :3],
        entries[:, :3],
        torch.ones(1, 3, 1),
        *(x[:, :3] for x in attention[:3]),
        attention[3],
        **options,
    )
    assert short == 0


def test_mtp_predicts_two_ahead_from_streams_and_next_token(tmp_path):
    model, ids = _model(tmp_path), random_ids(NUM_TOKENS + 1)
    inputs, positions = ids[:, :-1], torch.arange(NUM_TOKENS)[None]
    with torch.no_grad():
        streams = model.model.streams(inputs, positions)
        logits, next_streams = model.mtp_logits(streams, ids[:, 1:])
        assert logits.shape == (2, NUM_TOKENS, VOCAB)
        assert next_streams.shape == streams.shape == (2, NUM_TOKENS, 4, 32)
        # The embedding of row 0 is zero, and later rows do not reach back in time.
        changed = ids[:, 1:].clone()
        changed[:, 20] = (changed[:, 20] + 1) % VOCAB
        moved, _ = model.mtp_logits(streams, changed)
        assert torch.equal(moved[:, :20], logits[:, :20])
        assert not torch.equal(moved[:, 20], logits[:, 20])
        expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 2:].flatten())
        torch.testing.assert_close(model.training_losses(ids)["mtp"], expected)
        embedded = model.model.embed_tokens(inputs)
        joined = model.mtp[0].join(streams, embedded, positions)
        torch.testing.assert_close(joined[:, 0], model.mtp[0].h_proj(model.mtp[0].hnorm(streams[:, 0])))


def test_a_model_without_prediction_layers_says_so(tmp_path):
    model = _model(tmp_path, with_mtp=False)
    with pytest.raises(ValueError, match="with_mtp=True"):
        model.mtp_logits(torch.zeros(1, 3, 4, 32), torch.zeros(1, 3, dtype=torch.long))


def test_entries_that_no_index_head_scores_are_pushed_up():
    T, ratio = 16, 4
    q, entries = torch.rand(1, T, 1, 6) + 0.2, torch.rand(1, T, 6) + 0.2
    index_k = (-entries).requires_grad_()  # every score is negative: no gradient passes the ReLU
    attention = (q, torch.randn(1, T, 6), entries, torch.zeros(1))
    options = {"scale": 1.0, "window": 2, "ratio": ratio, "index_scale": 1.0}
    indexer_loss(q, index_k, torch.ones(1, T, 1), *attention, **options).backward()
    assert (index_k.grad[:, ratio - 1 :: ratio] < 0).all()
