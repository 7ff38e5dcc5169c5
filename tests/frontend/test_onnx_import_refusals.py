"""What cannot be imported from ONNX is refused by name; files that lack something; the command line."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

import pagebinder
from pagebinder import CompileConfig, ConfigError
from pagebinder.cli import app
from pagebinder.errors import CaptureError, CheckpointError
from pagebinder.frontend import onnx_file
from pagebinder.frontend.onnx_source import source_from_onnx
from tests.frontend.onnx_decoders import Decoder, greedy


def node_of(model, op: str):
    return next(n for n in model.graph.node if n.op_type == op)


def renamed(op: str, to: str, domain: str = ""):
    def change(model):
        node = node_of(model, op)
        node.op_type, node.domain = to, domain

    return change


def insert(*node, **attributes):
    return lambda model: model.graph.node.insert(0, helper.make_node(*node, **attributes))


def reads_a_cache_twice(model):
    insert("Mul", ["past_key_values.0.key"] * 2, ["squares"], name="squares")(model)


def swapped(model):
    node_of(model, "Concat").input.reverse()


def along_heads(model):
    node_of(model, "Concat").attribute[0].i = 1


def other_past(model):
    """Keys are scaled before they are cached, and attention sees the unscaled ones."""
    concat = node_of(model, "Concat")
    past, name = concat.input[0], "scaled"
    concat.input[0] = name
    insert("Identity", [past], [name], name="passed_on")(model)


def without_present(model):
    del model.graph.output[1]


def sized(name: str, dim: int, size: int):
    def change(model):
        value = next(i for i in model.graph.input if i.name == name)
        value.type.tensor_type.shape.dim[dim].dim_value = size

    return change


def with_input(name: str, kind, shape):
    return lambda model: model.graph.input.append(helper.make_tensor_value_info(name, kind, shape))


def last_token_only(model):
    node = next(n for n in model.graph.node if n.output[0] == "logits")
    node.output[0] = "every"
    model.graph.node.append(
        helper.make_node("Slice", ["every", "last", "end", "one"], ["logits"], name="last_only")
    )
    bounds = {"last": np.array([-1]), "end": np.array([2**62])}
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in bounds.items())


def without_ids(model):
    next(i for i in model.graph.input if i.name == "input_ids").name = "mask_of_something"
    for node in model.graph.node:
        node.input[:] = ["mask_of_something" if name == "input_ids" else name for name in node.input]


def exchanged(one: str, other: str):
    """Two caches are read where the other one was; their outputs stay."""
    names = {one: other, other: one}

    def change(model):
        for node in model.graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]

    return change


def unnamed_and_out_of_order(model):
    """Names say nothing, and outputs come in another order than inputs."""
    rename(model, lambda name: name.replace("present.", "out_").translate(str.maketrans("01", "ab")))
    outputs = list(model.graph.output)
    del model.graph.output[1:]
    model.graph.output.extend(reversed(outputs[1:]))


def rename(model, new_name):
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [new_name(name) if name.startswith("present.") else name for name in names]
    for output in model.graph.output:
        output.name = new_name(output.name) if output.name.startswith("present.") else output.name


def without_a_head(model):
    node = next(n for n in model.graph.node if n.output[0] == "logits")
    node.output[0] = "real_logits"
    model.graph.node.append(helper.make_node("Identity", [node.input[0]], ["logits"], name="states"))


def fewer_bits(model):
    weight = next(i for i in model.graph.initializer if i.name == "layers.0.up.weight")
    weight.data_type = TensorProto.INT4


def old_opset(model):
    model.opset_import[0].version = 12


def as_a_function(domain: str):
    """A function with a loop, which the model need not call."""

    def change(model):
        body = helper.make_graph([], "body", [], [])
        loop = helper.make_node("Loop", ["n", ""], ["y"], name="y", body=body)
        imports = [helper.make_opsetid("", 23)]
        model.functions.append(helper.make_function(domain, "ExpertRows", ["n"], ["y"], [loop], imports))

    return change


def log_of_the_length(model):
    """Added to what the model returns, so that it is needed."""
    model.graph.output[0].name = "scaled"
    shape = [("Shape", ["input_ids"], ["ids_shape"]), ("Cast", ["ids_shape"], ["ids_sizes"])]
    nodes = [helper.make_node(*n, **({"to": TensorProto.FLOAT} if n[0] == "Cast" else {})) for n in shape]
    nodes.append(helper.make_node("Log", ["ids_sizes"], ["log_sizes"], name="log_of_sizes"))
    nodes.append(helper.make_node("ReduceSum", ["log_sizes"], ["log_size"], keepdims=0))
    model.graph.node.extend([*nodes, helper.make_node("Mul", ["logits", "log_size"], ["scaled"])])


REFUSED = {
    "unknown": (renamed("RMSNormalization", "GroupNorm", "com.x"), r"com\.x::GroupNorm \(1: RMSNormalization_\d+\)"),
    "loop": (renamed("Tile", "Loop"), r"Loop \(node Tile_\d+\): control flow"),
    "our loop": (as_a_function("pagebinder"), r"Loop \(node y, in function .*Compile the checkpoint"),
    "a loop of others": (as_a_function("others"), r"Loop \(node y, in function others::.*loops unrolled"),
    "contrib": (renamed("Concat", "GroupQueryAttention", "com.microsoft"), "not read back.*without --contrib"),
    "log of the length": (log_of_the_length, r"Log \(node log_of_sizes\): it is taken of a number of tokens"),
    "branch": (renamed("Tile", "If"), r"If \(node .*merged"),
    "quantised": (renamed("MatMul", "MatMulNBits", "com.microsoft"), r"MatMulNBits \(node MatMul_\d+\): quantised"),
    "qdq": (renamed("MatMul", "DequantizeLinear"), r"DequantizeLinear \(node .*quantization="),
    "fewer bits": (fewer_bits, "layers.0.up.weight.*INT4"),
    "old": (old_opset, "opset 12"),
    "cache read twice": (reads_a_cache_twice, r"past_key_values\.0\.key is read in several .*Mul \(node squares"),
    "new before past": (swapped, r"Concat \(node join_key_0\) reads past_key_values\.0\.key"),
    "joined along heads": (along_heads, r"join_key_0\) joins past_key_values\.0\.key .* dimension 1"),
    "cache of something else": (other_past, r"Identity \(node passed_on\) reads past_key_values\.0\.key"),
    "no present": (without_present, r"past_key_values\.0\.key is joined .* is no output"),
    "another layer's cache": (
        exchanged("past_key_values.0.key", "past_key_values.1.key"),
        r"past_key_values\.0\.key is continued by present\.1\.key",
    ),
    "values in place of keys": (
        exchanged("past_key_values.0.key", "past_key_values.0.value"),
        r"past_key_values\.0\.key is continued by present\.0\.value",
    ),
    "another order": (unnamed_and_out_of_order, "not in that order among the outputs"),
    "no head": (without_a_head, "logits is 32 wide, and there are 96 tokens"),
    "fixed length": (sized("input_ids", 1, 8), "input_ids has a fixed length of 8"),
    "fixed batch": (sized("attention_mask", 0, 4), "attention_mask has a fixed batch of 4"),
    "fixed cache": (sized("past_key_values.1.value", 2, 64), r"fixed \(64\)"),
    "branch flag": (with_input("use_cache_branch", TensorProto.BOOL, [1]), "use_cache_branch .* no meaning"),
    "embeddings": (with_input("inputs_embeds", TensorProto.FLOAT, ["b", "l", 32]), "inputs_embeds .* no meaning"),
    "outer mask": (with_input("mask", TensorProto.FLOAT, ["b", 1, "l", "t"]), "mask of 4 dimensions"),
    "no ids": (without_ids, "no input input_ids; its inputs are mask_of_something"),
    "last token": (last_token_only, "logits of every token|logits has the shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_place(case, tmp_path):
    change, message = REFUSED[case]
    path = Decoder("raw").save(tmp_path / "model.onnx", change)
    with pytest.raises(CaptureError, match=message):
        pagebinder.compile_model(path, CompileConfig(executable="eager"))


@pytest.mark.parametrize(
    ("form", "options", "message"),
    [
        ("attention", {"is_causal": 0}, r"model\.onnx:\d+ in attention_0\): it attends to later tokens"),
        ("attention", {"magic": 1}, r"Attention \(node attention_0\): its attribute magic"),
        ("scatter", {"is_causal": 0}, "later tokens"),
    ],
)
def test_attention_that_is_something_else(form, options, message, tmp_path):
    path = Decoder(form, **options).save(tmp_path / "model.onnx")
    with pytest.raises(CaptureError, match=message):
        pagebinder.compile_model(path, CompileConfig(executable="eager"))


def test_a_cache_that_is_written_elsewhere_than_at_the_tokens_positions(tmp_path):
    def shifted(model):
        for node in model.graph.node:
            if node.op_type == "TensorScatter":
                node.input[2] = "later"
        insert("Add", ["write_indices", "one_more"], ["later"], name="later")(model)
        model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "one_more"))

    path = Decoder("scatter").save(tmp_path / "model.onnx", shifted)
    with pytest.raises(CaptureError, match="write_indices .* no meaning"):
        source_from_onnx(path)


def external(folder):
    path = Decoder("attention").save(folder / "inside.onnx")
    onnx.save(
        onnx.load(path), folder / "model.onnx", save_as_external_data=True, size_threshold=0, location="data"
    )
    path.unlink()
    return folder / "model.onnx"


def test_files_that_are_not_whole(tmp_path):
    path = external(tmp_path)
    (tmp_path / "junk.onnx").write_bytes(b"not a model at all")
    (tmp_path / "empty.onnx").write_bytes(b"")
    for name, message in (
        ("junk", "not an ONNX model"),
        ("empty", "no nodes"),
        ("missing", "does not exist"),
    ):
        with pytest.raises(CheckpointError, match=message):
            pagebinder.compile_model(tmp_path / f"{name}.onnx")
    data = (tmp_path / "data").read_bytes()
    (tmp_path / "data").write_bytes(data[:-8])
    with pytest.raises(CheckpointError, match="data ends before the tensor"):
        pagebinder.compile_model(path)
    (tmp_path / "data").unlink()
    with pytest.raises(CheckpointError, match="holds the weights, cannot be read"):
        pagebinder.compile_model(path)


def test_damaged_graphs(tmp_path):
    def dangling(model):
        node_of(model, "Concat").input[1] = "nowhere"

    def without_a_table(model):
        del model.graph.initializer[0]

    def unordered(model):
        nodes = list(model.graph.node)
        del model.graph.node[:]
        model.graph.node.extend(reversed(nodes))

    def without_an_axis(model):
        del node_of(model, "Concat").attribute[:]

    def without_inputs(model):
        del node_of(model, "Gather").input[1:]

    for change, message in (
        (without_an_axis, r"damaged: Concat \(node join_key_0\) lacks axis"),
        (without_inputs, r"damaged: Gather \(node \w+\) lacks an input"),
        (dangling, r"Concat \(node join_key_0\) reads 'nowhere'"),
        (without_a_table, "damaged: .* no tensor of the file"),
        (unordered, "the result of no node before it"),
    ):
        path = Decoder("raw").save(tmp_path / "model.onnx", change)
        with pytest.raises(CheckpointError, match=message):
            source_from_onnx(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("offset", "75/76", "has offset='75/76', which is no number of bytes"),
        ("offset", "-8", "has offset='-8', which is no number"),
        ("offset", "9" * 5000, "has offset='99.*, which is no number"),
        ("offset", "9" * 30, "data ends before the tensor"),
        ("length", "abc", "has length='abc', which is no number"),
        ("length", "-1", "has length='-1', which is no number"),
        ("length", "9" * 30, "has length of 9{30} bytes; its type and shape take 12288"),
        ("location", "a\0b", "lies in .*no name of a file"),
    ],
)
def test_damaged_places_of_tensors(key, value, message, tmp_path):
    path = external(tmp_path)
    model = onnx.load(path, load_external_data=False)
    tensor = model.graph.initializer[0]
    next(entry for entry in tensor.external_data if entry.key == key).value = value
    onnx.save(model, path)
    with pytest.raises(CheckpointError, match=message) as raised:
        source_from_onnx(path)
    assert repr(tensor.name) in str(raised.value)


def test_values_that_do_not_fill_a_tensor(tmp_path):
    def of_another_size(model):
        model.graph.initializer[0].dims[0] += 1

    def of_a_negative_size(model):
        model.graph.initializer[0].dims[0] = -1

    def typed(model):
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.float_data.append(1.0)

    for change, message in (
        (of_another_size, "bytes; its type and shape take"),
        (of_a_negative_size, r"has the shape \[-1"),
        (typed, "has values that do not fit"),
    ):
        path = Decoder("raw").save(tmp_path / "model.onnx", change)
        with pytest.raises(CheckpointError, match=rf"model\.onnx is damaged: the tensor '\S+' .*{message}"):
            source_from_onnx(path)


@pytest.mark.parametrize("what", ["op_type", "output", "initializer", "input"])
def test_names_are_text(what, tmp_path):
    path = Decoder("raw").save(tmp_path / "model.onnx")
    graph = onnx.load(path).graph
    named = {"initializer": graph.initializer[0].name, "input": graph.input[0].name}
    named |= {"op_type": graph.node[3].op_type, "output": graph.node[3].output[0]}
    name = named[what].encode()
    path.write_bytes(path.read_bytes().replace(name, b"\xff" + name[1:]))
    with pytest.raises(CheckpointError, match=r"model\.onnx is damaged: graph .* b'.*\\xff.* is not UTF-8"):
        source_from_onnx(path)


def test_a_directory_with_files_of_other_names(tmp_path):
    for name in ("a.onnx", "b.onnx"):
        Decoder("raw").save(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"holds no model\.onnx, but a\.onnx, b\.onnx"):
        pagebinder.compile_model(tmp_path)


def test_weights_outside_the_models_directory_are_not_read(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    path = external(folder)
    path.write_bytes(path.read_bytes().replace(b"\x04data", b"\x04../x"))
    with pytest.raises(CheckpointError, match="outside the model's directory"):
        pagebinder.compile_model(path)


def test_options_that_contradict_the_file(tmp_path, monkeypatch):
    path = Decoder("attention").save(tmp_path / "model.onnx")
    with pytest.raises(ConfigError, match="computes in float32"):
        pagebinder.compile_model(path, CompileConfig(dtype="bfloat16"))
    monkeypatch.setattr(onnx_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pagebinder\[onnx\]"):
        pagebinder.compile_model(path)


def test_facts_beside_the_model(tmp_path):
    """config.json and generation_config.json, as optimum writes them; a table of positions ends a sequence first."""
    path = Decoder("attention").save(tmp_path / "model.onnx")
    config = {"vocab_size": 90, "max_position_embeddings": 4096, "eos_token_id": 2, "bos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = source_from_onnx(path)
    assert (source.vocab_size, source.max_model_len, source.bos_token_id) == (90, 48, 1)
    assert source.eos_token_ids == {2} and source.num_attention_layers == 2
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert source_from_onnx(path).eos_token_ids == {3, 4}
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="holds a list"):
        source_from_onnx(path)


def test_from_the_command_line(tmp_path):
    path = external(tmp_path)
    command = ["generate", "--model", str(path), "--prompt-ids", "5,24,7", "--max-tokens", "8"]
    result = CliRunner().invoke(app, [*command, "--temperature", "0", "--executable", "eager"])
    assert result.exit_code == 0, result.output
    assert [int(t) for t in result.output.split()] == greedy(path, [5, 24, 7], 8)
    result = CliRunner().invoke(app, ["generate", "--model", str(path), "--prompt", "text"])
    assert result.exit_code == 2 and "no tokenizer.json" in result.output

    (tmp_path / "data").unlink()  # explaining needs no weights
    for target in (path, tmp_path):
        result = CliRunner().invoke(app, ["explain", str(target), "--json"])
        assert result.exit_code == 0, result.output
        assert [layer["kind"] for layer in json.loads(result.stdout)["layers"]] == ["full_attention"] * 2
    result = CliRunner().invoke(app, ["explain", str(tmp_path / "model.txt")])
    assert result.exit_code == 2 and "does not exist" in result.output
