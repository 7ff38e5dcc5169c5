"""The plan lock: short, the same again, and drift that says what was expected, what is there and why."""

from __future__ import annotations

import tomllib

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import pagebinder
from pagebinder import CompileConfig, ConfigError, PlanDriftError, PlanLockError
from pagebinder.compile import explain_model
from pagebinder.compiler.lock import lock_of
from pagebinder.passes.layer_blocks import from_ranges, name_of_layers, place_of, to_ranges
from pagebinder.passes.lock_drift import plan_drift
from pagebinder.passes.lock_file import lock_text, read_plan_lock
from pagebinder.passes.plan_lock import config_hash
from tests.helpers import tiny_llama, tiny_mistral, tiny_qwen3_next

pytestmark = pytest.mark.usefixtures("captured_once")


def compiled(model, **options):
    return pagebinder.compile_model(model, CompileConfig(executable="eager", **options))


def lock(c) -> dict:
    return lock_of(c.source, c.config, c.kv_spec, c.report, c.graphs)


def drifts(expected: dict, c) -> list:
    return plan_drift(expected, lock(c), c.report, c.graphs)


@pytest.fixture(scope="module")
def llama():
    return compiled(tiny_llama(num_hidden_layers=3))


@pytest.fixture(scope="module")
def mistral():
    return compiled(tiny_mistral(16))


@pytest.fixture
def written(llama, tmp_path):
    path = tmp_path / "plan.lock"
    llama.write_lock(path)
    return path


def test_equal_layers_are_one_table_with_every_rewrite(written):
    data = tomllib.loads(written.read_text())
    assert [table["layers"] for table in data["layers"]] == ["0", "1-2"]  # the first norm follows no sum
    rest = data["layers"][1]
    assert rest["state"] == [{"at": "self_attn", "kind": "full_attention", "num_kv_heads": 2, "head_dim": 16,
                              "head_dim_v": 16, "dtype": "float32"}]  # fmt: skip
    assert [(e["at"], e["pattern"]) for e in rest["rewrites"] if e["at"] != "mlp"] == [
        ("input_layernorm", "rms_norm"),
        ("input_layernorm", "add_rms_norm"),
        ("self_attn", "attention"),
        ("self_attn", "rope"),
        ("self_attn", "paged_attention"),
        ("self_attn", "qk_norm_rope_write"),
        ("self_attn", "linears"),
        ("post_attention_layernorm", "rms_norm"),
        ("post_attention_layernorm", "add_rms_norm"),
    ]
    norm, attention, rope = (rest["rewrites"][i] for i in (0, 2, 3))
    assert (norm["eps"], norm["tail"]) == (1e-6, "cast_scale")
    assert (attention["scale"], attention["heads"], attention["kv_heads"]) == (0.25, 4, 2)
    assert (rope["style"], rope["dim"], rope["count"]) == ("half", 16, 2)
    assert data["layers"][0]["refused"][0]["reason"] == "the normalised value is not a sum"
    assert data["kv_groups"] == [
        {"block_size": 64, "layers": ["model.layers.[0-2].self_attn full_attention"]}
    ]
    served = {choice["op"]: choice["layers"] for choice in data["providers"]["choices"]}
    assert served["paged_attention"] == ["model.layers.[0-2].self_attn"]
    assert all(
        line.count("{") <= 1 for line in written.read_text().splitlines()
    )  # an entry is a line of a diff


def test_the_next_run_writes_the_same_and_agrees(llama, written, tmp_path):
    again = tmp_path / "again.lock"
    c = compiled(tiny_llama(num_hidden_layers=3), locked=str(written), lock=again)
    assert again.read_text() == written.read_text()
    assert c.report.notes == [f"the plan is the one in {written}"]


def test_a_directory_without_weights_has_the_same_lock(llama, tmp_path):
    llama.source.module.save_pretrained(tmp_path)
    explained = lock(explain_model(tmp_path))
    assert explained["layers"] == lock(llama)["layers"]
    assert explained["model"] == lock(llama)["model"]


def test_floats_may_be_written_otherwise(llama, written):
    written.write_text(written.read_text().replace("1e-06", "0.000001").replace("0.25", "2.50e-1"))
    assert drifts(read_plan_lock(written), llama) == []


def test_mixed_layers_fold_by_kind():
    c = compiled(tiny_qwen3_next())
    data = lock(c)
    assert [table["layers"] for table in data["layers"]] == ["0", "1-2", "3"]
    assert [s["kind"] for s in data["layers"][1]["state"]] == ["short_conv", "recurrent"]
    assert sorted(len(group["layers"]) for group in data["kv_groups"]) == [1, 2, 2]
    assert drifts(data, c) == []


def test_a_changed_eps(llama):
    found = drifts(lock(llama), compiled(tiny_llama(num_hidden_layers=3, rms_norm_eps=1e-5)))
    by_place = {d.where: (d.expected, d.found) for d in found}
    change = ("rms_norm: eps=1e-06", "rms_norm: eps=1e-05")
    assert by_place.pop("model.layers.[0-2].input_layernorm") == change
    assert by_place.pop("model.layers.[0-2].post_attention_layernorm") == change
    assert by_place.pop("model.norm") == change
    assert list(by_place) == ["model.config"]


def test_a_norm_that_no_longer_matches_names_the_refusal_and_its_line(llama, written, monkeypatch):
    def forward(self, x):
        variance = x.abs().pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.variance_epsilon))

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)
    with pytest.raises(PlanDriftError) as error:
        compiled(tiny_llama(num_hidden_layers=3), locked=written)
    norm = next(d for d in error.value.drifts if d.where == "model.layers.[0-2].input_layernorm")
    assert norm.expected.startswith("rms_norm by recognise_rms_norm (eps=1e-06, tail=cast_scale")
    assert norm.found.startswith("rms_norm refused: ") and "(node rsqrt" in norm.found
    assert "test_plan_lock.py:" in norm.found and "in forward" in norm.found
    assert "mend what the reason says" in norm.remedy and "--lock" in norm.remedy
    text = str(error.value)
    assert (
        "differs from the lock" in text
        and "expected  rms_norm by" in text
        and isinstance(error.value, ValueError)
    )


def test_another_number_of_layers(llama):
    found = drifts(lock(llama), compiled(tiny_llama(num_hidden_layers=2)))
    assert [d.where for d in found] == ["model.config", "model.layers"]
    assert (found[1].expected, found[1].found) == ("3 layers (0-2)", "2 layers (0-1)")


def test_another_window(mistral):
    found = {(d.expected, d.found) for d in drifts(lock(mistral), compiled(tiny_mistral(32)))}
    assert ("sliding_window: window=16", "sliding_window: window=32") in found
    assert ("attention: window=16", "attention: window=32") in found


def test_another_provider_counts_only_where_the_same_ones_could_be_had(llama):
    other = compiled(tiny_llama(num_hidden_layers=3), providers={"paged_attention": "reference"})
    expected = lock(llama)
    if "cpu" in expected["providers"]["available"]:
        (drift,) = drifts(expected, other)
        assert drift.where == "provider of paged_attention" and drift.found.startswith("reference for")
        assert "paged_attention" in drift.remedy
    expected["providers"]["available"] = ["reference", "triton"]
    assert drifts(expected, other) == []


def test_a_note_says_that_providers_were_not_compared(written):
    text = written.read_text().replace('device = "cpu"', 'device = "cuda"')
    written.write_text(text)
    notes = compiled(tiny_llama(num_hidden_layers=3), locked=written).report.notes
    assert "providers were not compared: the lock saw" in notes[0] and "on cuda" in notes[0]


def test_a_new_refusal_and_one_that_is_gone(llama):
    expected = lock(llama)
    (refused,) = expected["layers"][0].pop("refused")
    (drift,) = drifts(expected, llama)
    assert drift.where == "model.layers.0.input_layernorm" and "nothing recorded" in drift.expected
    assert "is not a sum (node rms_norm_default, models/llama/modeling_llama.py" in drift.found
    expected = lock(llama)
    expected["layers"][1]["refused"] = [{**refused, "at": "self_attn"}]
    (drift,) = drifts(expected, llama)
    assert drift.where == "model.layers.[1-2].self_attn" and drift.found == "not refused"


def test_a_missing_rewrite_without_a_refusal_names_the_ops_that_are_there(llama):
    expected = lock(llama)
    entry = {"at": "mlp.down_proj", "by": "fuse_gate", "pattern": "gate"}
    expected["layers"][1]["rewrites"].append(entry)
    (drift,) = drifts(expected, llama)
    assert drift.found == "no match and no refusal; the ops there are aten.linear.default"
    entry["at"] = "mlp.nowhere"
    (drift,) = drifts(expected, llama)
    assert drift.found == "nothing: no op of the model comes from there"


def test_options_and_blocks(llama):
    found = drifts(lock(llama), compiled(tiny_llama(num_hidden_layers=3), block_size=16))
    assert [d.where for d in found] == ["options.block_size", "KV groups"]
    assert "compile without block_size" in found[0].remedy


def test_a_lock_of_another_model(llama, mistral):
    (drift,) = drifts(lock(mistral), llama)
    assert (drift.where, drift.expected, drift.found) == ("model", "MistralForCausalLM", "LlamaForCausalLM")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[: len(t) // 2], "is not a TOML file"),
        (lambda t: t.replace("format = 1", "format = 99"), "has format 99; this version reads format 1"),
        (lambda t: "", "has format None"),
        (lambda t: t.replace("[options]", "[optionss]"), "section 'options' is missing"),
        (lambda t: t.replace('"1-2"', '"one-three"'), "no list of numbers"),
        (lambda t: t.replace('"1-2"', '"3-"'), "no list of numbers"),
        (lambda t: t.replace("refused = [", "refused = [3,", 1), "no array of tables"),
        (lambda t: t.replace('at = "self_attn", ', ""), "an entry says not where"),
    ],
)
def test_a_damaged_lock_is_told_with_the_remedy(written, change, message):
    written.write_text(change(written.read_text()))
    with pytest.raises(PlanLockError, match=message) as error:
        read_plan_lock(written)
    assert "pagebinder compile DIR --lock" in str(error.value)


def test_a_missing_lock_is_told_before_the_capture(tmp_path):
    stages = []
    config = CompileConfig(executable="eager", locked=tmp_path / "none.lock")
    with pytest.raises(PlanLockError, match="No such file"):
        pagebinder.compile_model(tiny_llama(), config, on_stage=stages.append)
    assert stages == ["load"]
    with pytest.raises(ConfigError, match="path of a plan lock"):
        CompileConfig(lock=7)


def test_a_file_that_is_no_lock_is_not_replaced(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"hidden_size": 64}')
    with pytest.raises(PlanLockError, match="holds something else. Give another path") as refused:
        pagebinder.compile_model(tiny_llama(), CompileConfig(executable="eager", lock=file))
    assert file.read_text() == '{"hidden_size": 64}' and "compile DIR" not in str(refused.value)
    with pytest.raises(PlanLockError, match="is not a TOML file.*Give the path of a lock that was written"):
        read_plan_lock(file)


def test_the_hash_is_of_the_model_and_not_of_the_file():
    config = {"hidden_size": 64, "rms_norm_eps": 1e-6, "_name_or_path": "a", "transformers_version": "5.17"}
    same = {"transformers_version": "5.23", "rms_norm_eps": 0.000001, "hidden_size": 64}
    assert config_hash(config) == config_hash(same) != config_hash({**same, "hidden_size": 65})
    assert config_hash(None) == "none"
    assert config_hash({"a": object()}) == config_hash({"a": object()})  # nothing of an address


def test_ranges_and_places():
    assert to_ranges([5, 0, 1, 2]) == "0-2, 5" and from_ranges("0-2, 5") == [0, 1, 2, 5]
    assert name_of_layers("model.layers", [3]) == "model.layers.3"
    assert name_of_layers("model.layers", [0, 2]) == "model.layers.[0, 2]"
    place = place_of("decoder.block.1.layer.0.SelfAttention")
    assert (place.stack, place.index, place.inside) == ("decoder.block", 1, "layer.0.SelfAttention")
    assert place_of("model.norm").index is None and place_of("_empty_nn_module_stack_x").inside == ""


def test_the_text_is_what_is_compared(llama):
    assert tomllib.loads(lock_text(lock(llama))) == lock(llama)
