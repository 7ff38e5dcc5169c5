"""How many tokens a captured graph holds for: tables that end, branches, what a module does not say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pagebinder
from pagebinder import CaptureError, CompileConfig, ConfigError, EngineConfig, SamplingParams
from pagebinder.frontend.capture import capture
from pagebinder.frontend.length_limits import limit_of
from pagebinder.frontend.source import source_from_module
from tests.frontend import plain_decoders as plain
from tests.graphs import WIDTH, Embedded

ROWS = 64


class Tables(nn.Module):
    """A table as a parameter and as a buffer, and what the test looks up in them."""

    def __init__(self, look_up):
        super().__init__()
        self.place = nn.Embedding(ROWS, WIDTH)
        self.register_buffer("table", torch.randn(ROWS, WIDTH))
        self.register_buffer("numbers", torch.arange(0, 2 * ROWS, 2))
        self.look_up = look_up

    def forward(self, x, positions):
        return x + self.look_up(self, positions)


# what -> (look-up, its limit, None = none)
LOOK_UPS = {
    "embedding": (lambda m, p: m.place(p), ROWS),
    "of later positions": (lambda m, p: m.place(p + 2), ROWS - 2),
    "of half the positions": (lambda m, p: m.place(p // 2), 2 * ROWS),
    "of clamped positions": (lambda m, p: m.place(p.clamp(max=ROWS - 1)), None),
    "in turn": (lambda m, p: m.place(p % ROWS), None),
    "buffer": (lambda m, p: m.table[p], ROWS),
    "buffer from its end": (lambda m, p: m.table[-1 - p], ROWS),
    "index_select": (lambda m, p: m.table.index_select(0, p[0])[None], ROWS),
    "gather": (lambda m, p: m.table.gather(0, p[0, :, None].expand(-1, WIDTH))[None], ROWS),
    "columns": (lambda m, p: m.table.T[:, p[0]].T[None], ROWS),
    "table made of another": (lambda m, p: (m.table.sin() * 2)[p], ROWS),
    "number looked up, then a row": (lambda m, p: m.place(m.numbers[p]), ROWS // 2),
    "the smaller of two": (lambda m, p: m.place(p + 5) + m.place(p + 3), ROWS - 5),
    "from the end of the sequence": (lambda m, p: m.place(p.max() - p), None),
    "of the number of tokens": (lambda m, p: m.place(p * 7 % p.shape[1]), None),
    "none of positions": (lambda m, p: m.place(torch.zeros_like(p)), None),
}


@pytest.mark.parametrize("name", LOOK_UPS)
def test_positions_are_rows_of_the_tables_they_look_up(name):
    look_up, expected = LOOK_UPS[name]
    model = Embedded(Tables(look_up)).eval()
    limit = limit_of(capture(source_from_module(model))[0].graph)
    assert (limit and limit.num_tokens) == expected
    if expected is None:
        return
    assert f"{ROWS} rows" in limit.reason
    ids = torch.zeros(1, expected + 1, dtype=torch.int64)
    with torch.no_grad(), pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        model(ids, torch.arange(expected + 1)[None])


def test_a_table_without_the_first_position_is_an_error():
    model = Embedded(Tables(lambda m, p: m.place(p - 1))).eval()
    with pytest.raises(CaptureError, match=r"first position.*body\.place\.weight \(64 rows\)"):
        capture(source_from_module(model))


def with_table(num_rows=ROWS):
    model = plain.Decoder(plain.MultiheadAttention)
    model.place = nn.Embedding(num_rows, plain.WIDTH)
    return model.eval()


def compiled(model, **options):
    return pagebinder.compile_model(model, CompileConfig(executable="eager", **options))


def test_a_long_request_ends_at_the_table_and_disturbs_no_other():
    served = compiled(with_table())
    assert served.max_model_len == ROWS
    (note,) = [n for n in served.report.notes if "max_model_len" in n]
    assert "place.weight (64 rows), which positions look up, ends" in note
    engine = served.engine(EngineConfig(num_kv_blocks=64))
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    long, short = engine.generate([[1] * (ROWS - 4), [2] * 10], params)
    assert (len(long.token_ids), len(short.token_ids)) == (4, 30)


class Doubled(nn.Module):
    """Another branch for sequences of more than 50 tokens."""

    def __init__(self):
        super().__init__()
        self.decoder = plain.Decoder(plain.MultiheadAttention)

    def forward(self, input_ids, position_ids):
        logits = self.decoder(input_ids, position_ids)
        return logits * 2 if input_ids.shape[1] > 50 else logits


@pytest.mark.parametrize(
    ("make", "wanted", "message"),
    [
        (with_table, ROWS + 1, r"more than the 64 tokens.*table place\.weight"),
        (Doubled, 512, r"more than the 50 tokens.*another branch"),
        (with_table, 4096, r"more than 2048, our default.*max_position_embeddings in its config"),
    ],
    ids=["table", "branch", "default"],
)
def test_a_longer_length_than_the_model_has_is_an_error_with_the_reason(make, wanted, message):
    with pytest.raises(ConfigError, match=message):
        compiled(make().eval(), max_model_len=wanted)


def test_a_config_on_the_module_says_how_long_sequences_may_be():
    model = with_table(num_rows=4096)
    model.config = SimpleNamespace(max_position_embeddings=8192)
    assert compiled(model).max_model_len == 4096
    assert compiled(model, max_model_len=3000).max_model_len == 3000
