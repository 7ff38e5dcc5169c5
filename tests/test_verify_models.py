"""verify="full" on models with several kinds of state: all steps agree, encoders included."""

from __future__ import annotations

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, VerificationError
from pagebinder.graph_tools import aten, insert_call
from tests.broken_passes import break_pass, ops, with_option
from tests.encoder_decoders import tiny
from tests.frontend.plain_decoders import Decoder, Einsum
from tests.frontend.test_family_routes import tiny_roberta
from tests.helpers import tiny_gemma3, tiny_qwen3_next
from tests.v4_models import v4_model

pytestmark = pytest.mark.usefixtures("captured_once")

MODELS = {
    "windows and full attention": lambda: tiny_gemma3(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    ),
    "recurrences": lambda: tiny_qwen3_next(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    ),
    "encoder and decoder": lambda: tiny("t5", num_layers=1, num_decoder_layers=1),
    "positions counted from 2": tiny_roberta,  # over tokens that are not padding, which random ids would hold
}


@pytest.fixture(scope="module")
def models():
    return {}


def compiled(models, name, **options):
    model = models.setdefault(name, None) or MODELS[name]()
    models[name] = model
    config = CompileConfig(executable="eager", verify="full", max_model_len=120, **options)
    return pagebinder.compile_model(model, config)


@pytest.mark.parametrize("name", MODELS)
def test_all_steps_agree(name, models):
    report = compiled(models, name).report
    assert report.verified and all(s.judged for s in report.verified)
    assert max(s.max_rel_error / s.tolerance for s in report.verified) < 0.5
    certificates = [c for p in report.passes for c in p.certificates]
    assert any(not c.reason for c in certificates)
    if name == "encoder and decoder":
        assert {s.chain for s in report.verified} == {"encoder", "decoder"}
        assert any(p.certificates for p in report.passes if p.name == "encoder.recognise_rms_norm")
    else:
        assert {s.chain for s in report.verified} == {"decoder"}
    assert "packed" in " ".join(s.worst for s in report.verified)


def test_an_encoders_wrong_norm_is_found(models, monkeypatch):
    name = "encoder and decoder"

    def in_the_encoder_only(gm):
        if not any(n.target == "encoder_states" for n in gm.graph.nodes):
            with_option(ops.rms_norm.default, 1, eps=1e-4)(gm)

    break_pass(monkeypatch, "recognise_rms_norm", in_the_encoder_only)
    with pytest.raises(VerificationError) as caught:
        compiled(models, name)
    assert caught.value.level == "encoder" and caught.value.places[0].startswith("encoder.block.0")


def test_a_wrong_cross_attention_is_found(models, monkeypatch):
    change = with_option(ops.paged_attention.default, 0, causal=True)
    break_pass(monkeypatch, "page_cross_attention", change)
    with pytest.raises(VerificationError, match="page_cross_attention"):
        compiled(models, "encoder and decoder")


def test_a_recurrence_that_forgets_between_steps_is_found(models, monkeypatch):
    """It takes the new tokens for the whole sequence: right in one call, wrong when a sequence goes on."""

    def change(gm):
        for node in [n for n in gm.graph.nodes if "gated_delta_rule" in str(n.target)]:
            starts = next(n for n in gm.graph.nodes if n.target == "query_start_loc")
            lens = next(n for n in gm.graph.nodes if n.target == "seq_lens")
            node.replace_input_with(lens, insert_call(gm.graph, node, aten.diff.default, (starts,)))

    break_pass(monkeypatch, "page_recurrent", change)
    with pytest.raises(VerificationError, match="page_recurrent") as caught:
        compiled(models, "recurrences")
    assert "two chunks" in caught.value.sequence


def test_reduced_precision_is_also_run_in_float32(models):
    report = compiled(models, "windows and full attention", dtype=torch.bfloat16).report
    kinds = {(s.weights, s.dtype) for s in report.verified}
    assert kinds == {(w, d) for w in ("model", "rescaled") for d in ("bfloat16", "float32")}
    exact = [s for s in report.verified if s.dtype == "float32"]
    assert max(s.max_rel_error for s in exact) < 1e-4


class OfBfloat16(Decoder):
    def forward(self, input_ids, position_ids):
        x = (self.embed(input_ids) + self.place(position_ids)).float().bfloat16()
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return self.head(x)


def test_code_that_holds_a_dtype_is_compared_in_that_alone():
    model = OfBfloat16(Einsum, num_layers=1).bfloat16().eval()
    config = CompileConfig(executable="eager", verify="full", max_model_len=120)
    report = pagebinder.compile_model(model, config).report
    assert {(s.weights, s.dtype) for s in report.verified} == {(w, "bfloat16") for w in ("model", "rescaled")}
    assert any("not compared in torch.float32" in note for note in report.notes)


def test_a_model_with_a_short_table_is_compared_in_float32_too():
    """It takes no more tokens than the table has rows, in any dtype."""
    model = Decoder(Einsum, num_layers=1)
    model.place = torch.nn.Embedding(20, model.place.embedding_dim)
    config = CompileConfig(executable="eager", verify="full", block_size=8)
    report = pagebinder.compile_model(model.bfloat16().eval(), config).report
    assert {s.dtype for s in report.verified} == {"bfloat16", "float32"}


def test_8_bit_latents_are_measured_and_so_is_what_follows_where_scores_choose():
    config = CompileConfig(
        executable="eager", verify="sample", max_model_len=128, kv_dtype="fp8_ds_mla", index_dtype="mxfp4"
    )
    verified = pagebinder.compile_model(v4_model(), config).report.verified
    paged = next(line for line in verified if line.name == "page_compressed")
    assert not paged.judged and paged.max_rel_error > 1e-3
    judged = [line.judged for line in verified]
    assert judged == [True] * verified.index(paged) + [False] * (len(verified) - verified.index(paged))
