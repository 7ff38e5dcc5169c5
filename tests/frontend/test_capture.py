"""Capture: one calling convention, the source's own weights, and the source left as it was."""

from __future__ import annotations

import math
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import pagebinder
from pagebinder import CaptureError, CompileConfig
from pagebinder.frontend.capture import capture
from pagebinder.frontend.few_tokens import FewTokens
from pagebinder.frontend.python_state import MOST_ELEMENTS, MOST_INSIDE, SAMPLED, _bytes, _inside, unchanged
from pagebinder.frontend.source import source_from_module
from pagebinder.graph_tools import calls, module_path
from tests.graphs import VOCAB_SIZE, WIDTH, Embedded, EmbeddedWithHead, captured_model, count, run
from tests.helpers import tiny_llama, tiny_qwen3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("hidden_shift", torch.randn(WIDTH), persistent=False)

    def forward(self, x):
        return x + torch.relu(self.proj(x)) + self.shift + self.hidden_shift


class Decoder(nn.Module):
    """Two blocks and a head that is tied to the embedding."""

    def __init__(self, block=Block):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids) + position_ids[..., None] * 0.01
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 40, 77])
def test_the_graph_takes_flat_tokens_of_any_number(num_tokens):
    model = Decoder().eval()
    gm = captured_model(model)
    assert [n.target for n in gm.graph.nodes if n.op == "placeholder"] == ["input_ids", "positions"]
    ids, positions = torch.randint(VOCAB_SIZE, (num_tokens,)), torch.arange(7, 7 + num_tokens)
    with torch.no_grad():
        assert torch.equal(gm(ids, positions), model(ids[None], positions[None])[0])


def test_weights_are_the_very_tensors_of_the_source():
    model = Decoder()
    gm = captured_model(model)
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    names = {n.target for n in gm.graph.nodes if n.op == "get_attr"}
    assert {"blocks.0.proj.weight", "blocks.1.hidden_shift"} <= names <= set(own)
    for name in names:
        assert (
            gm.get_parameter(name) is own[name] if "shift" not in name else gm.get_buffer(name) is own[name]
        )


def test_nodes_know_their_module_and_line():
    gm = captured_model(Decoder())
    relus = list(calls(gm.graph, torch.ops.aten.relu.default))
    assert [module_path(n) for n in relus] == ["blocks.0", "blocks.1"]
    assert all("test_capture.py" in n.meta["stack_trace"] for n in relus)


def test_training_flags_come_back_one_by_one():
    model = Decoder()
    model.train()
    model.blocks[1].eval()
    flags = {name: m.training for name, m in model.named_modules()}
    capture(source_from_module(model))
    assert {name: m.training for name, m in model.named_modules()} == flags


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3], ids=["llama", "qwen3"])
def test_a_transformers_model_is_left_as_it_was(build):
    model = build().train()
    implementation = model.config._attn_implementation
    gradients = [p.requires_grad for p in model.parameters()]
    tensors = {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    capture(source_from_module(model))
    assert model.training and all(m.training for m in model.modules())
    assert model.config._attn_implementation == implementation
    assert [p.requires_grad for p in model.parameters()] == gradients
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == tensors[name][0] and torch.equal(tensor, tensors[name][1])


class Branching(nn.Module):
    def forward(self, x, positions):
        return x * 2 if x.shape[1] > 32 else x


class DataDependent(nn.Module):
    def forward(self, x, positions):
        return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize("body", [Branching(), DataDependent()], ids=["length", "values"])
def test_a_model_that_branches_is_refused_and_left_as_it_was(body):
    model = Embedded(body).train()
    with pytest.raises(CaptureError, match=r"Embedded|sequence length"):
        capture(source_from_module(model))
    assert model.training and body.training


def test_a_branch_on_values_is_told_with_its_line():
    with pytest.raises(
        CaptureError, match=r"branches on values of tensors.*test_capture\.py:\d+ in forward.*torch"
    ):
        captured_model(Embedded(DataDependent()))


class MaskedEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, WIDTH), 1, enable_nested_tensor=False
        )

    def forward(self, x, positions):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layers(x.transpose(0, 1), mask=mask).transpose(0, 1)


def test_a_mask_that_torch_looks_into_is_told_as_that():
    with pytest.raises(CaptureError, match="whether it is causal: say it beside the mask"):
        captured_model(Embedded(MaskedEncoder()))


class Picking(nn.Module):
    def forward(self, x, positions):
        picked = (x[0, :, 0] > 0).nonzero()[:, 0]
        return x - x[:, picked].mean(1, keepdim=True)


def test_entries_picked_by_values_are_told_with_their_line():
    with pytest.raises(CaptureError, match=r"by their values in body, .*test_capture\.py:\d+ in forward"):
        captured_model(Embedded(Picking()))


class ForFewTokens(nn.Module):
    """Another sign for one token alone, or a branch that changes nothing of it."""

    def __init__(self, sign):
        super().__init__()
        self.sign = sign

    def forward(self, x, positions):
        if x.shape[1] == 1:
            x = x * self.sign
        return x + 1


def test_a_branch_for_one_token_is_refused_if_it_computes_something_else():
    with pytest.raises(CaptureError, match=r"single token.*branch at .*test_capture\.py:\d+"):
        captured_model(Embedded(ForFewTokens(-1.0)).eval())
    captured_model(Embedded(ForFewTokens(1.0)).eval())
    captured_model(Embedded(ForFewTokens(-1.0)).eval().to("meta"))  # without values nobody can tell


@pytest.mark.parametrize(
    ("fill", "count"), [(0.0, 44), (-1e9, 24), (torch.finfo(torch.float32).min, 24), (-math.inf, 44)]
)
def test_one_token_is_judged_by_what_is_no_mask(fill, count):
    """So many logits of one token are the same number; rounding of the others is no error, another sign is one."""
    expected = torch.full((1, 64), fill)
    expected[0, count:] = torch.linspace(1.0, 3.0, 64 - count)
    graph = torch.fx.symbolic_trace(nn.Identity())
    for factor, is_same in ((1 + 1e-6, True), (-1.0, False)):
        got = torch.where(expected > 0, expected * factor, expected)
        one = FewTokens((got,), expected, ["model.py:1"])
        if is_same:
            one.require_same(graph, "Model")
        else:
            with pytest.raises(CaptureError, match="something else for a single token"):
                one.require_same(graph, "Model")


class ByLength(nn.Module):
    """A factor made of the length."""

    def forward(self, x, positions):
        return x * math.log(x.shape[1] + 1)


class ExpertChoice(nn.Module):
    """Of four tokens each channel picks those with the largest values."""

    def forward(self, x, positions):
        values, tokens = x.topk(4, dim=1)
        return torch.zeros_like(x).scatter(1, tokens, values)


@pytest.mark.parametrize("body", [ByLength(), ExpertChoice()], ids=["factor", "choice"])
def test_what_depends_on_the_number_of_tokens_is_told_as_that(body):
    with pytest.raises(
        CaptureError, match=r"depends on that number \(a factor made of the length, a choice.*torch"
    ):
        captured_model(Embedded(body))


class LoopsOverTokens(nn.Module):
    def forward(self, x, positions):
        mask = torch.zeros(x.shape[1], 1)
        for i in range(x.shape[1]):
            mask[i, 0] = i
        return x + mask


def test_a_loop_over_tokens_is_told_with_its_line():
    with pytest.raises(
        CaptureError, match=r"depends on that number \(.*\) at .*test_capture\.py:\d+ in forward"
    ):
        captured_model(Embedded(LoopsOverTokens()))


class Flex(nn.Module):
    def forward(self, x, positions):
        q = x.view(1, -1, 2, WIDTH // 2).transpose(1, 2)
        out = flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf))
        return out.transpose(1, 2).flatten(2)


class Heads(nn.Module):
    """Attention written for one head, and torch.func.vmap over the first dimension."""

    dim = 0

    def forward(self, x, positions):
        num_tokens = x.shape[1]
        hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)

        def one_head(q):
            return (q @ q.mT).masked_fill(hidden, -math.inf).softmax(-1) @ q

        heads = x.view(num_tokens, 2, WIDTH // 2).movedim(1, self.dim)
        out = torch.func.vmap(one_head, in_dims=self.dim, out_dims=self.dim)(heads)
        return out.movedim(self.dim, 1).reshape(1, num_tokens, WIDTH)


class HeadsBehind(Heads):
    """The same over the second dimension, whose result torch.export loses."""

    dim = 1


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (Flex(), r"flex_attention in body takes a function"),
        (HeadsBehind(), r"torch\.func\.vmap.* in body cannot be captured"),
    ],
    ids=["flex_attention", "vmap"],
)
def test_functions_inside_a_graph_are_a_capture_error_with_their_place(body, message):
    with pytest.raises(CaptureError, match=message):
        captured_model(Embedded(body))


def test_vmap_over_the_first_dimension_is_captured():
    model = EmbeddedWithHead(Heads()).eval()
    gm, route = capture(source_from_module(model))
    assert "functionalised" in route
    ids = torch.randint(VOCAB_SIZE, (5,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(run(gm, 5), model(ids[None], torch.arange(5)[None])[0])


class InPlace(nn.Module):
    """Changes only its own values."""

    def forward(self, x, positions):
        y = x.clone()
        y[..., :4] += 1
        y.mul_(2)
        return y + positions[..., None]


def test_changing_a_value_in_place_is_made_functional():
    model = Embedded(InPlace()).eval()
    gm, route = capture(source_from_module(model))
    assert "functionalised" in route
    assert not any(n.target._schema.is_mutable for n in gm.graph.nodes if hasattr(n.target, "_schema"))
    ids = torch.randint(VOCAB_SIZE, (5,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        assert torch.equal(run(gm, 5), model(ids[None], torch.arange(5)[None])[0])


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, positions):
        self.calls.add_(1)
        return x + self.calls


class Marking(nn.Module):
    """Writes into its input."""

    def forward(self, x, positions):
        positions.add_(1)
        return x + positions[..., None]


@pytest.mark.parametrize("body", [Counting(), Marking()], ids=["buffer", "input"])
def test_a_write_to_a_buffer_or_an_input_stays_in_the_graph(body):
    """The graph returns the logits, and does what the model does: the write is there for the audit to see."""
    model = Embedded(body).eval()
    gm = captured_model(model)
    (write,) = calls(gm.graph, torch.ops.aten.copy_.default)
    assert module_path(write) == "body" and "test_capture.py" in write.meta["stack_trace"]
    ids, positions = torch.randint(VOCAB_SIZE, (5,)), torch.arange(5)
    before = {name: b.clone() for name, b in model.named_buffers()}
    with torch.no_grad():
        expected = model(ids[None], positions[None].clone())[0]
        for name, b in model.named_buffers():
            b.copy_(before[name])
        assert torch.equal(gm(ids, positions.clone()), expected)


def test_a_write_to_a_buffer_is_a_capture_error_with_its_place():
    with pytest.raises(CaptureError, match=r"body.*test_capture\.py:\d+.*in place"):
        pagebinder.compile_model(EmbeddedWithHead(Counting()).eval(), CompileConfig(executable="eager"))


class CountingInPython(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, []

    def forward(self, x, positions):
        self.calls += 1
        return x if self.calls % 2 else -x


class CountingInside(nn.Module):
    """Keeps the number at some place of a container or array."""

    def __init__(self, held, count):
        super().__init__()
        self.held, self.count = held, count

    def forward(self, x, positions):
        self.count(self.held)
        return x + 1


def count_at(*path):
    def count(held):
        for key in path[:-1]:
            held = held[key]
        held[path[-1]] += 1

    return count


class Appending(CountingInPython):
    def forward(self, x, positions):
        self.seen.append(x)
        return x * len(self.seen)


class Noting(nn.Module):
    """Sets an attribute to what it is, and makes one that nobody can have read."""

    width = WIDTH

    def forward(self, x, positions):
        self.width, self.last = x.shape[-1], "seen"
        return x + 1


class Swapping(nn.Module):
    """Takes another submodule in each call."""

    def __init__(self):
        super().__init__()
        self.now, self.next = nn.SiLU(), nn.GELU()

    def forward(self, x, positions):
        self.now, self.next = self.next, self.now
        return self.now(x)


class CountingInAnObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.counter = SimpleNamespace(calls=0)

    def forward(self, x, positions):
        self.counter.calls += 1
        return x * self.counter.calls


class RememberingATensor(nn.Module):
    """Adds what the last token of the call before was."""

    def __init__(self):
        super().__init__()
        self.before = torch.zeros(WIDTH)

    def forward(self, x, positions):
        out = x + self.before
        self.before = x[0, -1]
        return out


class RememberingIfThere(RememberingATensor):
    def __init__(self):
        super().__init__()
        self.before = None

    def forward(self, x, positions):
        out = x if self.before is None else x + self.before
        self.before = x[0, -1]
        return out


class MakingATable(nn.Module):
    """Its first call makes a table; and each one keeps what it computed for whoever wants to see it."""

    def __init__(self):
        super().__init__()
        self.table, self.shown = None, None

    def forward(self, x, positions):
        if self.table is None:
            self.table = torch.arange(512.0)
        self.shown = x * self.table[positions][..., None]
        return self.shown


class FirstCall(CountingInPython):
    """Its first call is unlike all others."""

    def forward(self, x, positions):
        first, self.calls = self.calls == 0, 1
        return x + 1 if first else x + 2


class Longest(CountingInPython):
    """Changes what it holds in its first call, and nothing that it computes."""

    def forward(self, x, positions):
        self.calls = max(self.calls, 1)
        return x + 1


@pytest.mark.parametrize(
    ("body", "change"),
    [
        (CountingInPython(), r"body\.calls \(0 -> 1\)"),
        (Appending(), r"body\.seen \(list of 0 -> list of 1\)"),
        (FirstCall(), r"body\.calls \(0 -> 1\)"),
        (CountingInAnObject(), r"body\.counter\.calls \(0 -> 1\)"),
        (RememberingATensor(), r"body\.before \(another tensor -> another tensor\)"),
        (RememberingIfThere(), r"body\.before \(None -> another tensor\)"),
        (Swapping(), r"body\.next \(GELU -> SiLU\); body\.now \(SiLU -> GELU\)"),
    ],
    ids=["number", "list", "first call", "object", "tensor", "tensor or none", "submodule"],
)
def test_what_forward_changes_in_python_is_a_capture_error(body, change):
    model = Embedded(body).eval()
    with pytest.raises(CaptureError, match=change):
        captured_model(model)
    assert getattr(body, "calls", 0) == 0 and getattr(body, "seen", []) == [] and "forward" not in vars(model)
    assert not isinstance(body, Swapping) or isinstance(body.now, nn.SiLU)


@pytest.mark.parametrize(
    ("make", "count", "change"),
    [
        (lambda: np.zeros(3), count_at(1), r"in ndarray of 3: array of \(3,\) -> other values"),
        (lambda: np.array([[0, 0], "a"], dtype=object), count_at(0, 1), "in ndarray of 2: 0 -> 1"),
        (lambda: [[0]], count_at(0, 0), "in list of 1: 0 -> 1"),
        (
            lambda: {"a": ({"b": np.zeros(1)},)},
            count_at("a", 0, "b", 0),
            r"in dict of 1: array of \(1,\) -> other values",
        ),
        (lambda: {"ids": []}, lambda held: held["ids"].append(1), "in dict of 1: list of 0 -> list of 1"),
        (
            lambda: deque([1, 2], maxlen=2),
            lambda held: held.append(held[0]),
            "in deque of 2: 1 -> 2",
        ),
    ],
    ids=["array", "array of objects", "list", "dict", "list in a dict", "deque"],
)
def test_what_forward_changes_inside_of_containers_is_a_capture_error(make, count, change):
    body = CountingInside(make(), count)
    with pytest.raises(CaptureError, match=rf"body\.held \({change}\)"):
        captured_model(Embedded(body).eval())
    assert repr(body.held) == repr(make())
    captured_model(Embedded(CountingInside(make(), lambda held: None)).eval())


def test_a_list_that_holds_itself_is_compared():
    body = nn.Identity()
    body.held = [[0]]
    body.held.append(body.held)
    with pytest.raises(CaptureError, match=r"held \(in list of 2: 0 -> 1\)"), unchanged(body):
        body.held[1][1][0][0] += 1
    assert body.held[0] == [0]


def test_a_number_of_numpy_is_compared():
    body = CountingInside({}, lambda held: None)
    body.calls = np.int64(0)
    with pytest.raises(CaptureError, match=r"calls \(np\.int64\(0\) -> np\.int64\(1\)\)"), unchanged(body):
        body.calls += 1


class OwnList(list):
    def __iter__(self):
        raise RuntimeError("not to be looked at")


class OwnDict(dict):
    def items(self):
        raise RuntimeError("not to be looked at")


def test_containers_with_code_of_their_own_are_left_alone():
    held = {"list": OwnList(), "dict": OwnDict(n=1), "itself": [0]}
    captured_model(Embedded(CountingInside(held, lambda held: None)).eval())
    with pytest.raises(CaptureError, match=r"body\.held"):
        captured_model(Embedded(CountingInside(held, count_at("itself", 0))).eval())


def test_of_large_containers_and_arrays_so_much_is_looked_at():
    nested = [[[0] * 1000 for _ in range(1000)] for _ in range(20)]
    assert MOST_INSIDE <= len([*_inside(nested)]) < MOST_INSIDE + MOST_ELEMENTS
    assert len(_bytes(np.zeros(1 << 22))) < 2 * SAMPLED * 8


def test_sets_and_dicts_are_compared_whatever_their_order():
    body = nn.Identity()
    body.names, body.sizes = {f"name {i}" for i in range(20)}, {"a": 1}
    with unchanged(body):
        names = sorted(body.names)
        body.names.clear()
        body.names.update(reversed(names))
    with (
        pytest.raises(
            CaptureError, match=r"names \(in set of 20: .+ -> .+\); sizes \(in dict of 1: 1 -> 2\)"
        ),
        unchanged(body),
    ):
        body.names.symmetric_difference_update({"name 1", "another"})
        body.sizes["a"] = 2
    assert "name 1" in body.names and body.sizes == {"a": 1}


@pytest.mark.parametrize("body", [CountingInPython(), Swapping()], ids=["number", "submodule"])
def test_unchanged_puts_back_what_a_call_changed(body):
    before = dict(vars(body)) | dict(body.named_children())
    with pytest.raises(CaptureError, match=r"\(0 -> 1\)|SiLU -> GELU"), unchanged(body):
        body(torch.zeros(3), torch.arange(3))
    assert dict(vars(body)) | dict(body.named_children()) == before


def test_a_change_of_the_first_call_alone_is_served_if_the_graph_is_the_same():
    model = Embedded(Longest()).eval()
    captured_model(model)
    assert model.body.calls == 0


def test_a_table_that_the_first_call_makes_is_part_of_the_graph():
    model = Embedded(MakingATable()).eval()
    ids, positions = torch.randint(VOCAB_SIZE, (5,)), torch.arange(5)
    out = captured_model(model)(ids, positions)
    assert model.body.table is None and model.body.shown is None
    with torch.no_grad():
        assert torch.equal(out, model(ids[None], positions[None])[0])


def test_attributes_that_forward_does_not_change_may_be_set():
    captured_model(Embedded(Noting()).eval())


class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, positions):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.proj(x) + x


def test_casts_of_autocast_are_in_the_graph():
    model = Embedded(Cast()).eval()
    gm = captured_model(model)
    ids, positions = torch.randint(VOCAB_SIZE, (5,)), torch.arange(5)
    with torch.no_grad():
        expected = model(ids[None], positions[None])[0]
        assert torch.equal(gm(ids, positions), expected)


class Cumulative(nn.Module):
    """Attention that is understood, and a cumulated sum that is not."""

    def forward(self, x, positions):
        q = x.view(1, -1, 2, WIDTH // 2).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return out.transpose(1, 2).flatten(2) + x.cumsum(1)


def test_strict_false_compiles_lists_and_refuses_to_serve():
    model = EmbeddedWithHead(Cumulative()).eval()
    with pytest.raises(CaptureError, match=r"body.*test_capture\.py:\d+.*along the token dimension"):
        pagebinder.compile_model(model, CompileConfig(executable="eager"))
    reference = {"paged_attention": "reference", "kv_cache_write": "reference"}
    config = CompileConfig(executable="eager", strict=False, providers=reference)
    compiled = pagebinder.compile_model(model, config)
    (refusal,) = [r for r in compiled.report.refusals if r.pattern == "audit"]
    assert refusal.module_path == "body" and "test_capture.py:" in refusal.source_line
    assert "along the token dimension" in compiled.explain()
    ids = torch.randint(VOCAB_SIZE, (9,))
    with torch.no_grad():
        expected = model(ids[None], torch.arange(9)[None])[0]
    torch.testing.assert_close(compiled.run_level("semantic", ids), expected)
    with pytest.raises(CaptureError, match="strict=False"):
        compiled.engine()


def test_a_cat_of_one_part_is_that_part():
    gm = captured_model(Embedded(OfParts()).eval())
    assert not count(gm, torch.ops.aten.cat.default)


class OfParts(torch.nn.Module):
    """As code has it that takes a list of sequences."""

    def forward(self, x, positions):
        return torch.cat([x * n for n in (2.0,)], dim=1)
