"""A user's own passes run like ours: matched, verified, locked, saved. What breaks the graph is an error."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pagebinder
from pagebinder import CompileConfig, ConfigError, EngineConfig, SamplingParams
from pagebinder.compiler.bisect import bisect
from pagebinder.errors import ArtefactError, CaptureError, PassError, PlanDriftError, VerificationError
from pagebinder.graph_tools import (
    aten,
    attach,
    calls,
    describe,
    device_of,
    insert_call,
    insert_constant,
    insert_derived,
    is_call,
    source_line,
)
from pagebinder.passes.own_passes import pass_name
from pagebinder.report import Match, PassResult, Refusal
from tests.encoder_decoders import tiny
from tests.helpers import tiny_llama
from tests.test_verify_encoder import bert

DOCS = Path(__file__).parents[2] / "docs" / "passes.md"
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]
pytestmark = pytest.mark.usefixtures("captured_once")
LEVELS = ("semantic", "paged", "fused")


@torch.library.custom_op("pagebinder_tests::squared_relu", mutates_args=())
def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


@squared_relu.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("pagebinder_tests::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


OWN = torch.ops.pagebinder_tests.squared_relu.default


def fuse_squared_relu(gm):
    result = PassResult(name="fuse_squared_relu")
    for square in calls(gm.graph, aten.pow.Tensor_Scalar):
        relu = square.args[0]
        if not is_call(relu, aten.relu.default):
            where = {"source_line": source_line(square), **describe(square)}
            result.refusals.append(Refusal(pattern="squared_relu", reason="no relu is squared", **where))
            continue
        fused = insert_call(gm.graph, square, OWN, (relu.args[0],))
        square.replace_all_uses_with(fused)
        result.matches.append(Match(pattern="squared_relu", **describe(fused)))
    return result


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(x)) ** 2)


class Decoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))

    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@functools.cache
def decoder():
    """One for all tests: captured once, see tests/captures.py."""
    return Decoder()


def compiled_with(run, level="fused", model=None, **options):
    config = CompileConfig(executable="eager", passes={level: run}, **options)
    return pagebinder.compile_model(model or decoder(), config)


def tokens_of(compiled):
    engine = compiled.engine(EngineConfig(num_kv_blocks=32))
    return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


def result_of(compiled, name="fuse_squared_relu"):
    return next(p for p in compiled.report.passes if p.name == name)


@pytest.fixture(scope="module")
def expected():
    return tokens_of(pagebinder.compile_model(decoder(), CompileConfig(executable="eager")))


@pytest.mark.parametrize("level", LEVELS)
def test_a_pass_runs_on_each_level_and_is_certified(level, expected):
    named = {"tokenwise_ops": ["pagebinder_tests::squared_relu"]} if level == "semantic" else {}
    compiled = compiled_with([fuse_squared_relu], level, verify="full", **named)
    result = result_of(compiled)
    assert len(result.matches) == 2 and result.changed and result.level == level
    assert sum(c.count for c in result.certificates) == 2
    assert all(c.max_rel_error == 0 for c in result.certificates)
    assert len(list(calls(compiled.graphs[level].graph, OWN))) == 2
    assert len(list(calls(compiled.graphs["fused"].graph, OWN))) == 2
    assert tokens_of(compiled) == expected
    assert "fuse_squared_relu" in compiled.explain()


@pytest.mark.parametrize("executable", ["native", "inductor"])
def test_what_it_leaves_runs_in_every_executable(executable, expected):
    config = CompileConfig(executable=executable, passes={"fused": [fuse_squared_relu]})
    compiled = pagebinder.compile_model(decoder(), config)
    assert compiled.report.executable == executable
    assert tokens_of(compiled) == expected


def test_a_wrong_rewrite_is_found_and_named(tmp_path):
    def forget_the_square(gm):
        result = PassResult(name="forget_the_square")
        for square in calls(gm.graph, aten.pow.Tensor_Scalar):
            square.replace_all_uses_with(square.args[0])
            result.matches.append(Match(pattern="squared_relu", **describe(square.args[0])))
        return result

    with pytest.raises(VerificationError, match="forget_the_square"):
        compiled_with(forget_the_square, verify="full")
    with pytest.raises(VerificationError, match="fused"):
        compiled_with(forget_the_square, verify="sample")
    config = CompileConfig(passes={"fused": [forget_the_square]})
    found = bisect(decoder(), config, out_dir=tmp_path)
    assert found.diverged and found.pass_name == "forget_the_square" and found.script.exists()


def test_numbers_changed_on_purpose_are_measured_and_not_judged():
    def halve(gm):
        result = PassResult(name="halve", changes_numbers=True)
        for square in calls(gm.graph, aten.pow.Tensor_Scalar):
            half = insert_call(gm.graph, square, aten.mul.Scalar, (square.args[0], 0.5))
            square.replace_all_uses_with(half)
            result.matches.append(Match(pattern="half", **describe(half)))
        return result

    for level in ("semantic", "fused"):
        compiled_with(halve, level)  # nor by the module itself
        result = result_of(compiled_with(halve, level, verify="full"), "halve")
        assert result.max_rel_error > 0.01
        assert max(c.max_rel_error for c in result.certificates) > 0.1


def test_a_semantic_pass_that_changes_the_model_is_found_without_verification():
    def forget_the_square(gm):
        for square in calls(gm.graph, aten.pow.Tensor_Scalar):
            square.replace_all_uses_with(square.args[0])
        return PassResult(name="forget")

    with pytest.raises(pagebinder.CaptureError, match="pass of your own .forget_the_square. may change"):
        compiled_with(forget_the_square, "semantic")


def test_the_audit_sees_what_a_semantic_pass_leaves():
    def mix(gm):
        relu = next(calls(gm.graph, aten.relu.default))
        summed = insert_call(gm.graph, relu, aten.cumsum.default, (relu.args[0], 1))
        relu.args = (summed,)
        return PassResult(name="mix", matches=[Match(pattern="mix", **describe(summed))])

    with pytest.raises(pagebinder.CaptureError, match="works along the token dimension"):
        compiled_with(mix, "semantic")


def test_a_pass_without_an_answer_for_any_place_is_noted():
    def look_for_nothing(gm):
        return PassResult(name="look_for_nothing")

    (note,) = compiled_with(look_for_nothing).report.notes
    assert note.startswith("look_for_nothing, a pass of your own on the fused graph, found nothing")


def test_a_constant_and_new_dtypes_get_their_values(expected):
    def by_way_of_double(gm):
        result = PassResult(name="by_way_of_double")
        attach(gm, "tests_one", torch.ones(1, dtype=torch.float64))
        for relu in calls(gm.graph, aten.relu.default):
            with gm.graph.inserting_before(relu):
                one = gm.graph.get_attr("tests_one")
                wide = gm.graph.call_function(aten.to.dtype, (relu.args[0], torch.float64))
                scaled = gm.graph.call_function(aten.mul.Tensor, (wide, one))
            relu.args = (scaled,)
            (square,) = relu.users
            with gm.graph.inserting_after(square):
                narrow = gm.graph.call_function(aten.to.dtype, (square, torch.float32))
            square.replace_all_uses_with(narrow, delete_user_cb=lambda user: user.target is not aten.to.dtype)
            result.matches.append(Match(pattern="double", **describe(relu)))
        return result

    compiled = compiled_with(by_way_of_double, verify="full")
    graph = compiled.graphs["fused"].graph
    assert all("val" in n.meta for n in graph.nodes if n.op in ("call_function", "get_attr"))
    assert {n.meta["val"].dtype for n in calls(graph, aten.relu.default)} == {torch.float64}
    assert tokens_of(compiled) == expected


def behind_relu(make):
    def add_behind_relu(gm):
        relu = next(calls(gm.graph, aten.relu.default))
        with gm.graph.inserting_after(relu):
            node = make(gm.graph, relu)
        relu.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)
        return PassResult(name="add_behind_relu")

    return add_behind_relu


def scale_logits(name, factor):
    def scale(gm):
        (output,) = gm.graph.find_nodes(op="output")
        (logits,) = output.all_input_nodes
        constant = insert_constant(gm, output, name, torch.tensor([factor], device=device_of(gm.graph)))
        scaled = insert_call(gm.graph, output, aten.mul.Tensor, (logits, constant))
        output.replace_input_with(logits, scaled)
        result = PassResult(name=f"scale_{name}", changes_numbers=True)
        result.matches.append(Match(pattern="scale", **describe(scaled)))
        return result

    return scale


@pytest.mark.parametrize("level", LEVELS)
def test_constants_by_name(level, expected):
    compiled = compiled_with(
        [scale_logits("by_two", 2.0), scale_logits("by_a_half", 0.5)], level, verify="full"
    )
    assert tokens_of(compiled) == expected
    assert result_of(compiled, "scale_by_two").max_rel_error > 0.1
    with pytest.raises(ValueError, match="'by_two'"):
        compiled_with([scale_logits("by_two", 2.0), scale_logits("by_two", 0.5)], level)
    with torch.device("meta"):
        explained = pagebinder.compile_model(Decoder(), CompileConfig(passes={level: scale_logits("a", 2.0)}))
    assert "scale_a" in explained.explain()


@pytest.mark.parametrize("level", ["semantic", "packed"])
def test_encoders(level):
    plain = pagebinder.compile_model(bert(), CompileConfig(executable="eager"))
    config = CompileConfig(executable="eager", passes={level: scale_logits("by_two", 2.0)}, verify="full")
    scaled = pagebinder.compile_model(bert(), config)
    (one,), (other,) = (c.encode_batch([[5, 6, 7]]) for c in (plain, scaled))
    torch.testing.assert_close(other, 2 * one)

    def silent(gm):
        result = scale_logits("by_two", 2.0)(gm)
        result.changes_numbers = False
        return result

    with pytest.raises(pagebinder.CaptureError, match="pass of your own .silent. may change"):
        pagebinder.compile_model(bert(), CompileConfig(executable="eager", passes={level: silent}))
    with pytest.raises(ConfigError, match="an encoder has no fused graph"):
        pagebinder.compile_model(bert(), CompileConfig(passes={"fused": silent}))


def write_to_a_weight(gm):
    with torch.no_grad():
        gm.get_submodule("head").weight.mul_(1)
    return PassResult(name="write_to_a_weight")


def write_past_the_count(gm):
    gm.get_submodule("head").weight.data.zero_()
    return PassResult(name="write_past_the_count")


def write_with_every_step(gm):
    read = next(n for n in gm.graph.find_nodes(op="get_attr") if n.target == "head.weight")
    with gm.graph.inserting_after(read):
        flat = gm.graph.call_function(aten.view.default, (read, [-1]))
    with gm.graph.inserting_after(flat):
        gm.graph.call_function(aten.mul_.Tensor, (flat, 0.5))
    return PassResult(name="write_with_every_step")


def replace_a_weight(gm):
    gm.get_submodule("head").weight = nn.Parameter(gm.get_submodule("head").weight[:32].clone())
    return PassResult(name="replace_a_weight")


def read_fewer_rows(gm):
    attach(gm, "fewer", gm.get_submodule("head").weight.detach()[:32].clone())
    for node in gm.graph.find_nodes(op="get_attr"):
        node.target = "fewer" if node.target == "head.weight" else node.target
    return PassResult(name="read_fewer_rows")


def change_the_output(make):
    def change(gm):
        (output,) = gm.graph.find_nodes(op="output")
        (logits,) = output.all_input_nodes
        make(gm.graph, output, logits)
        return PassResult(name="change")

    return change


def without_meta(gm):
    for node in gm.graph.nodes:
        node.meta = {}
    return PassResult(name="without_meta")


def use_before_made(gm):
    relu = next(calls(gm.graph, aten.relu.default))
    next(iter(relu.users)).append(relu)
    return PassResult(name="use_before_made")


def one_input_more(gm):
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("more")
    return PassResult(name="one_input_more")


def another_dtype(gm):
    (output,) = gm.graph.find_nodes(op="output")
    (logits,) = output.all_input_nodes
    with gm.graph.inserting_after(logits):
        output.replace_input_with(logits, gm.graph.call_function(aten.to.dtype, (logits, torch.bfloat16)))
    return PassResult(name="another_dtype")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda gm: None, "returned a NoneType: a pass changes the graph in place"),
        (lambda gm: gm, "returned a Decoder|returned a Fused"),
        (lambda gm: PassResult(name="quantize_weights"), "as one of Pagebinder's does"),
        (lambda gm: PassResult(name="audit"), "as one of Pagebinder's does"),
        (lambda gm: PassResult(name="my pass"), "takes a name like a function's"),
        (lambda gm: PassResult(name="a", matches=None), "something else than lists of Match"),
        (lambda gm: PassResult(name="a", refusals=["no"]), "something else than lists of Match"),
        (
            lambda gm: PassResult(name="a", matches=[Match(pattern="p", node=None, module_path="")]),
            "a Match whose node is a NoneType and no text",
        ),
        (
            lambda gm: PassResult(name="a", refusals=[Refusal(pattern="p", reason=3, node="n", module_path="")]),
            "a Refusal whose reason is a int and no text",
        ),
        (lambda gm: PassResult(name="a", changes_numbers="no"), "changes_numbers='no': use True or False"),
        (write_to_a_weight, "has written into 'head.weight', the model's own tensor, which is changed now"),
        (write_past_the_count, "has written into 'head.weight'"),
        (write_with_every_step, "writes into 'head.weight' with every step"),
        (replace_a_weight, "puts another tensor in the place of 'head.weight'"),
        (read_fewer_rows, "cannot be called so|makes the graph return"),
        (change_the_output(lambda g, output, x: g.erase_node(output)), "0 outputs instead of one"),
        (change_the_output(lambda g, output, x: g.output((x,))), "2 outputs instead of one"),
        (change_the_output(lambda g, output, x: setattr(output, "args", ((x, x),))), "makes the graph return"),
        (without_meta, "changes the graph's inputs"),
        (behind_relu(lambda g, x: g.call_function(aten.mul.Tensor, (x, torch.ones(1)))), "tensor as an operand"),
        (use_before_made, "use_before_made.* leaves a graph that is not whole"),
        (one_input_more, "changes the graph's inputs"),
        (another_dtype, "makes the graph return bfloat16"),
        (behind_relu(lambda g, x: g.call_function(torch.relu, (x,))), "a call of relu: .* by their overloads"),
        (behind_relu(lambda g, x: g.call_method("contiguous", (x,))), "'contiguous' as a method"),
        (behind_relu(lambda g, x: g.call_function(aten.mm.default, (x, x))), "cannot be called so"),
        (
            behind_relu(lambda g, x: g.call_function(torch.ops.pagebinder_tests.without_fake.default, (x,))),
            "register_fake",
        ),
        (
            behind_relu(lambda g, x: g.call_function(aten.mul.Tensor, (x, g.get_attr("nowhere")))),
            "'nowhere', which the graph's module does not have|not whole",
        ),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr")
def test_what_cannot_run_is_an_error_that_names_the_pass(run, message):
    with pytest.raises(PassError, match=message):
        compiled_with(run, model=Decoder() if run is write_past_the_count else None)


def before_the_write(gm):
    write = next(calls(gm.graph, torch.ops.pagebinder.kv_cache_write.default))
    read = next(calls(gm.graph, torch.ops.pagebinder.paged_attention.default))
    read.append(write)
    return PassResult(name="before_the_write")


def without_the_write(gm):
    gm.graph.erase_node(next(calls(gm.graph, torch.ops.pagebinder.kv_cache_write.default)))
    return PassResult(name="without_the_write")


def another_write(gm):
    read = next(calls(gm.graph, torch.ops.pagebinder.paged_attention.default))
    (ids,) = (n for n in gm.graph.find_nodes(op="placeholder") if n.target == "input_ids")
    insert_call(gm.graph, read, aten.add_.Scalar, (ids, 1))
    return PassResult(name="another_write")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            before_the_write,
            "moves paged_attention_default to the other side of kv_cache_write_default, which writes to",
        ),
        (without_the_write, "leaves nothing that writes to kv_cache_0, which kv_cache_write_default did"),
        (another_write, "which writes into input_ids: an input that nobody writes"),
    ],
)
def test_writes_to_caches_stay_and_come_first(run, message):
    with pytest.raises(PassError, match=message):
        compiled_with([run], "paged")


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_write_of_one_value_is_found_where_all_are_compared(layout):
    model = Decoder()
    if layout == "columns":
        model.head.weight = nn.Parameter(model.head.weight.detach().t().contiguous().t())

    def write_one(gm):
        gm.get_submodule("head").weight.data[3, 1] += 1
        return PassResult(name="write_one")

    with pytest.raises(PassError, match="has written into 'head.weight'"):
        compiled_with([write_one], model=model, verify="full")


def fold(make):
    """head(x) as twice a linear layer with half the weights, which `make` puts in."""

    def fold_head(gm):
        result = PassResult(name="fold_head")
        (head,) = (n for n in calls(gm.graph, aten.linear.default) if n.args[1].target == "head.weight")
        weight, bias = (make(gm, head, f"half_{i}", read) for i, read in enumerate(head.args[1:]))
        half = insert_call(gm.graph, head, aten.linear.default, (head.args[0], weight, bias))
        twice = insert_call(gm.graph, head, aten.mul.Tensor, (half, 2.0))
        head.replace_all_uses_with(twice)
        result.matches.append(Match(pattern="fold_head", **describe(twice)))
        return result

    return fold_head


def halved(gm, like, name, read):
    return insert_derived(gm, like, name, lambda weight: weight / 2, [read])


@pytest.mark.parametrize("level", ["semantic", "paged"])
def test_constants_made_of_weights_are_verified_with_other_weights(level, expected):
    compiled = compiled_with([fold(halved)], level, verify="full")
    assert tokens_of(compiled) == expected
    (certificate,) = result_of(compiled, "fold_head").certificates
    assert certificate.max_rel_error < 1e-5 and not certificate.reason


def test_a_wrong_constant_is_found():
    def wrong(gm, like, name, read):
        return insert_derived(gm, like, name, lambda weight: weight / 1.9, [read])

    def of_these_values(gm, like, name, read):
        return insert_constant(gm, like, name, gm.get_parameter(read.target).detach() / 2)

    for make in (wrong, of_these_values):  # the other one holds for the weights that the model has now
        with pytest.raises(VerificationError, match="fold_head"):
            compiled_with([fold(make)], "paged", verify="full")


def test_derived_constants_that_cannot_be_made():
    def made_of(function, weights=lambda gm, relu: [next(iter(gm.graph.find_nodes(op="get_attr")))]):
        def run(gm):
            relu = next(calls(gm.graph, aten.relu.default))
            insert_derived(gm, relu, "made", function, weights(gm, relu))
            return PassResult(name="run")

        return run

    for run, message in (
        (made_of(lambda w: 3.0), "gave a float and no tensor"),
        (made_of(lambda w: w, lambda gm, relu: [relu]), "is no node that reads a weight"),
    ):
        with pytest.raises(ValueError, match=message):
            compiled_with([run])
    compiled = compiled_with([made_of(lambda w: w)])  # the weight itself: a copy of it
    assert compiled is not None


@pytest.mark.parametrize("level", ["semantic", "paged"])
def test_norms_of_ours_take_constants_of_a_pass(level):
    """Also those that are fused with the sum before them."""
    model = tiny_llama()
    (before,) = (
        pagebinder.compile_model(model, CompileConfig(executable="eager"))
        .engine(EngineConfig(num_kv_blocks=32))
        .generate(PROMPTS[:1], GREEDY)
    )

    def same_weights(gm):
        result = PassResult(name="same_weights")
        for i, norm in enumerate(calls(gm.graph, torch.ops.pagebinder.rms_norm.default)):
            weight = gm.get_parameter(norm.args[1].target).detach().clone()
            norm.args = (norm.args[0], insert_constant(gm, norm, f"mine_{i}", weight), *norm.args[2:])
            result.matches.append(Match(pattern="same", **describe(norm)))
        return result

    compiled = compiled_with([same_weights], level, model=model)
    assert len(result_of(compiled, "fuse_add_rms_norm").matches) == 4
    (after,) = compiled.engine(EngineConfig(num_kv_blocks=32)).generate(PROMPTS[:1], GREEDY)
    assert after.token_ids == before.token_ids


def own_op(name, kernel, fake=torch.empty_like):
    op = torch.library.custom_op(
        f"pagebinder_tests::{name}", kernel, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_fake(fake)
    return getattr(torch.ops.pagebinder_tests, name).default


def put_behind_relu(op, name):
    def run(gm):
        result = PassResult(name=name)
        relu = next(calls(gm.graph, aten.relu.default))
        square = next(iter(relu.users))
        new = insert_call(gm.graph, square, op, (relu,))
        square.replace_input_with(relu, new)
        result.matches.append(Match(pattern="put", **describe(new)))
        return result

    return run


def test_fake_kernels_that_say_something_else_are_found():
    half = own_op("half", torch.clone, lambda x: torch.empty_like(x, dtype=torch.float16))
    said = r"torch.float32 \[.*says torch.float16"
    with pytest.raises(VerificationError, match=rf"putting .*{half}, gives {said}"):
        compiled_with([put_behind_relu(half, "putting")], "paged", verify="full")
    fixed = own_op("fixed", torch.clone, lambda x: x.new_empty([int(n) for n in x.shape]))
    for level in LEVELS:
        with pytest.raises(
            PassError, match="fake kernel of what it puts in, makes .*, a number of tokens, one"
        ):
            compiled_with([put_behind_relu(fixed, "putting")], level, model=Decoder())


def test_what_an_op_raises_is_named():
    def fails(x):
        raise ZeroDivisionError("by zero")

    op = own_op("fails", fails)
    with pytest.raises(VerificationError, match=r"putting .*ZeroDivisionError: by zero \(in %fails"):
        compiled_with([put_behind_relu(op, "putting")], verify="full")
    found = bisect(decoder(), CompileConfig(passes={"fused": [put_behind_relu(op, "putting")]}))
    assert found.diverged and found.op == "pagebinder_tests.fails.default" and "by zero" in found.describe()
    with pytest.raises(
        CaptureError, match="pagebinder_tests::fails in .* cannot be called .*ZeroDivisionError"
    ):
        compiled_with([put_behind_relu(op, "putting")], "semantic", tokenwise_ops=["pagebinder_tests::fails"])


def test_one_config_serves_models_in_which_a_pass_finds_nothing():
    config = {
        "tokenwise_ops": ["pagebinder_tests::squared_relu"],
        "providers": {"paged_mla_attention": "cpu"},
    }
    compiled = compiled_with([fuse_squared_relu], "semantic", tiny_llama(num_hidden_layers=1), **config)
    notes = " ".join(compiled.report.notes)
    assert "the model calls no 'pagebinder_tests::squared_relu'" in notes
    assert "cpu was asked to serve paged_mla_attention, and there is none in this graph" in notes
    for name in ("aten::relu", "pagebinder_tests::squared_relu"):  # torch's are judged by what they do
        with pytest.raises(ConfigError, match=f"calls no '{name}'"):
            compiled_with([], "fused", tiny_llama(num_hidden_layers=1), tokenwise_ops=[name])


def test_what_a_kernel_does_to_its_operands_is_found():
    """Undeclared, it would be seen in what others compute: bisect names the op itself."""

    def in_place(x):
        x.mul_(2.0)
        return x.clone()

    def itself(x):
        return x.view(-1).view(x.shape)

    lib = torch.library.Library("pagebinder_tests_lib", "FRAGMENT")  # which nobody watches
    for name, kernel, what in (
        ("in_place", in_place, "writes into its operand x"),
        ("itself", itself, "memory of its"),
    ):
        lib.define(f"{name}(Tensor x) -> Tensor")
        lib.impl(name, kernel, "CPU")
        lib.impl(name, torch.empty_like, "Meta")
        run = put_behind_relu(getattr(torch.ops.pagebinder_tests_lib, name).default, "putting")
        with pytest.raises(VerificationError, match=f"putting .*{name}.default, .*{what}"):
            compiled_with([run], "paged", verify="full")
        config = CompileConfig(passes={"paged": [run]}, executable="eager")
        found = bisect(decoder(), config)
        assert found.diverged and found.op.endswith(f"{name}.default") and what in found.describe()
    lib._destroy()


def test_a_kernel_for_bfloat16_alone_is_judged_in_that():
    def only_bfloat16(x):
        if x.dtype is not torch.bfloat16:
            raise RuntimeError("this kernel is for bfloat16")
        return x.clone()

    op = own_op("only_bfloat16", only_bfloat16)
    compiled = compiled_with([put_behind_relu(op, "putting")], model=Decoder().bfloat16(), verify="full")
    notes = [note for note in compiled.report.notes if "not compared in float32" in note]
    assert all("putting (level fused)" in note and "this kernel is for bfloat16" in note for note in notes)
    assert len(notes) == 2  # with the model's weights, and with random ones
    assert result_of(compiled, "putting").max_rel_error is not None


def test_one_and_one_point_nothing_are_not_the_same():
    def to_float(gm):
        for node in calls(gm.graph, aten.pow.Tensor_Scalar):
            node.args = (node.args[0], float(node.args[1]))
        return PassResult(name="to_float")

    report = compiled_with(to_float).report
    assert next(p for p in report.passes if p.name == "to_float").changed


def test_a_pass_is_called_the_same_in_every_process():
    class Options:
        pass

    name = pass_name(functools.partial(fuse_squared_relu, Options(), by=Options()))
    assert name.startswith("fuse_squared_relu(<") and "0x" not in name


def test_what_a_pass_raises_goes_through_with_its_name():
    def fails(gm):
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing") as caught:
        compiled_with(fails)
    assert "fails, a pass of your own on the fused graph" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ([fuse_squared_relu], "passes maps a graph"),
        ({"late": [fuse_squared_relu]}, "no 'late' graph"),
        ({"fused": ["fuse_squared_relu"]}, "use a list of functions"),
        ({"fused": None}, "use a list of functions"),
    ],
)
def test_bad_options(passes, message):
    with pytest.raises(ConfigError, match=message):
        CompileConfig(passes=passes)


def test_levels_that_a_model_does_not_have():
    with pytest.raises(ConfigError, match='no "packed" graph'):
        compiled_with(fuse_squared_relu, "packed")


def test_both_graphs_of_an_encoder_decoder():
    seen = []

    def count_ops(gm):
        seen.append(len(gm.graph.nodes))
        return PassResult(name="count_ops")

    config = CompileConfig(executable="eager", passes={"semantic": count_ops})
    compiled = pagebinder.compile_model(tiny("t5"), config)
    assert len(seen) == 2
    assert {"count_ops", "encoder.count_ops"} <= {p.name for p in compiled.report.passes}


def test_the_lock_knows_passes(tmp_path):
    lock = tmp_path / "plan.lock"
    compiled_with(fuse_squared_relu, lock=lock)
    assert "squared_relu" in lock.read_text()
    compiled_with(fuse_squared_relu, locked=lock)
    with pytest.raises(PlanDriftError, match=r"options.passes[\s\S]*squared_relu by fuse_squared_relu"):
        pagebinder.compile_model(decoder(), CompileConfig(locked=lock))


def test_an_artefact_keeps_what_a_pass_left(tmp_path, expected):
    compiled_with(fuse_squared_relu).save(tmp_path / "artefact")
    loaded = pagebinder.load(tmp_path / "artefact")
    assert tokens_of(loaded) == expected
    assert len(list(calls(loaded.graphs["fused"].graph, OWN))) == 2
    assert not loaded.config.passes
    code = f"import pagebinder; pagebinder.load({str(tmp_path / 'artefact')!r})"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        "'pagebinder_tests::squared_relu.default'" in other.stderr and ArtefactError.__name__ in other.stderr
    )


def test_the_documented_pass_runs_as_it_stands():
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("2 matches, largest error ")
