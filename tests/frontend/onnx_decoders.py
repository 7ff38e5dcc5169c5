"""Small ONNX decoders written by hand, in the forms that other exporters give them; running any in ONNX Runtime.

attention   Attention with past_key, past_value -> present, heads in 3 dimensions, RotaryEmbedding by position_ids
scatter     Attention over caches that TensorScatter writes, with the number of rows filled so far
raw         Concat of past and new, MatMul, Softmax, MatMul, a mask from attention_mask and the past's length
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

VOCAB_SIZE, WIDTH, HEADS, KV_HEADS, NUM_LAYERS, MAX_TOKENS = 96, 32, 4, 2, 2, 48
HEAD_DIM = WIDTH // HEADS
FORMS = ("attention", "scatter", "raw")


class Decoder:
    """Collects nodes and weights of one model; `change` may be applied to its ModelProto before it is written."""

    def __init__(self, form: str, opset: int = 24, **attention):
        self.form, self.opset, self.options = form, opset, attention
        self.nodes, self.weights, self.outputs = [], {}, []
        self.inputs = [self.info("input_ids", ["batch", "length"], TensorProto.INT64)]
        self.random = np.random.default_rng(0)
        self.build()

    def info(self, name, shape, kind=TensorProto.FLOAT):
        return helper.make_tensor_value_info(name, kind, shape)

    def constant(self, name, value):
        self.weights[name] = np.asarray(value)
        return name

    def weight(self, name, *shape):
        return self.constant(name, (self.random.standard_normal(shape) * shape[0] ** -0.5).astype(np.float32))

    def add(self, op, *inputs, num_outputs=1, name=None, **attributes):
        name = name or f"{op}_{len(self.nodes)}"
        outputs = [f"{name}_out{i}" for i in range(num_outputs)]
        self.nodes.append(helper.make_node(op, inputs, outputs, name=name, **attributes))
        return outputs[0] if num_outputs == 1 else outputs

    def cache(self, i, part, size):
        past = f"past_key_values.{i}.{part}"
        self.inputs.append(self.info(past, ["batch", KV_HEADS, size, HEAD_DIM]))
        return past

    def present(self, value, i, part, size):
        for node in self.nodes:
            node.output[:] = [f"present.{i}.{part}" if o == value else o for o in node.output]
        self.outputs.append(self.info(f"present.{i}.{part}", ["batch", KV_HEADS, size, HEAD_DIM]))

    def build(self):
        integers = TensorProto.INT64
        if self.form != "raw":
            self.inputs.append(self.info("position_ids", ["batch", "length"], integers))
        if self.form == "raw":
            self.inputs.append(self.info("attention_mask", ["batch", "total"], integers))
        if self.form == "scatter":
            self.inputs.append(self.info("write_indices", ["batch"], integers))
            self.inputs.append(self.info("num_filled", ["batch"], integers))
        x = self.add("Gather", self.weight("embed.weight", VOCAB_SIZE, WIDTH), "input_ids")
        if self.form == "raw":
            x = self.add(
                "Add", x, self.add("Gather", self.weight("place.weight", MAX_TOKENS, WIDTH), self.positions())
            )
        for i in range(NUM_LAYERS):
            x = self.layer(x, i)
        x = self.add("RMSNormalization", x, self.ones("norm.weight"), epsilon=1e-6)
        logits = self.add("MatMul", x, self.weight("lm_head.weight", WIDTH, VOCAB_SIZE))
        self.nodes[-1].output[0] = "logits"
        assert logits
        self.outputs.insert(0, self.info("logits", ["batch", "length", VOCAB_SIZE]))

    def ones(self, name):
        return self.constant(name, (1 + 0.1 * self.random.standard_normal(WIDTH)).astype(np.float32))

    def layer(self, x, i):
        h = self.add("RMSNormalization", x, self.ones(f"layers.{i}.norm.weight"), epsilon=1e-6)
        widths = {"q": WIDTH, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        q, k, v = (
            self.add(
                "Add",
                self.add("MatMul", h, self.weight(f"layers.{i}.{n}.weight", WIDTH, width)),
                self.weight(f"layers.{i}.{n}.bias", width),
            )
            for n, width in widths.items()
        )
        mixed = getattr(self, self.form)(q, k, v, i)
        x = self.add("Add", x, self.add("MatMul", mixed, self.weight(f"layers.{i}.o.weight", WIDTH, WIDTH)))
        h = self.add("MatMul", x, self.weight(f"layers.{i}.up.weight", WIDTH, 2 * WIDTH))
        h = self.add("Mul", h, self.add("Sigmoid", h))
        return self.add(
            "Add", x, self.add("MatMul", h, self.weight(f"layers.{i}.down.weight", 2 * WIDTH, WIDTH))
        )

    def rotated(self, x, heads):
        angles = np.arange(MAX_TOKENS)[:, None] * 10000.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
        tables = [
            self.constant(n, f(angles).astype(np.float32)) for n, f in (("cos", np.cos), ("sin", np.sin))
        ]
        return self.add("RotaryEmbedding", x, *tables, "position_ids", num_heads=heads)

    def attention(self, q, k, v, i):
        q, k = self.rotated(q, HEADS), self.rotated(k, KV_HEADS)
        past = [self.cache(i, part, "past") for part in ("key", "value")]
        out, *present = self.add(
            "Attention", q, k, v, "", *past, num_outputs=3, name=f"attention_{i}", q_num_heads=HEADS,
            kv_num_heads=KV_HEADS, **{"is_causal": 1, **self.options},
        )  # fmt: skip
        for value, part in zip(present, ("key", "value")):
            self.present(value, i, part, "total")
        return out

    def heads(self, x, heads):
        split = self.add("Reshape", x, self.constant(f"split{heads}", np.array([0, 0, heads, HEAD_DIM])))
        return self.add("Transpose", split, perm=[0, 2, 1, 3])

    def joined(self, x):
        merged = self.constant("merged", np.array([0, 0, WIDTH]))
        return self.add("Reshape", self.add("Transpose", x, perm=[0, 2, 1, 3]), merged)

    def scatter(self, q, k, v, i):
        q, k = self.rotated(q, HEADS), self.rotated(k, KV_HEADS)
        rows = []
        for part, x in (("key", k), ("value", v)):
            name = f"write_{part}_{i}"
            past = self.cache(i, part, "capacity")
            self.add("TensorScatter", past, self.heads(x, KV_HEADS), "write_indices", name=name)
            self.present(f"{name}_out0", i, part, "capacity")
            rows.append(f"present.{i}.{part}")
        operands = (self.heads(q, HEADS), *rows, "", "", "", "num_filled")
        return self.joined(self.add("Attention", *operands, **{"is_causal": 1, **self.options}))

    def positions(self):
        """cumsum(attention_mask) - 1, of the new tokens."""
        past = self.add("Shape", "past_key_values.0.key", start=2, end=3)
        counted = self.add("CumSum", "attention_mask", self.constant("axis", np.array(1)))
        total = self.add("Shape", "attention_mask", start=1, end=2)
        counted = self.add("Slice", counted, past, total, self.constant("one", np.array([1])))
        return self.add("Sub", counted, self.constant("one", np.array([1])))

    def raw(self, q, k, v, i):
        whole = []
        for part, x in (("key", k), ("value", v)):
            name = f"join_{part}_{i}"
            past = self.cache(i, part, "past")
            self.add("Concat", past, self.heads(x, KV_HEADS), axis=2, name=name)
            self.present(f"{name}_out0", i, part, "total")
            whole.append(self.repeated(f"present.{i}.{part}"))
        keys = self.add("Transpose", whole[0], perm=[0, 1, 3, 2])
        scores = self.add("MatMul", self.heads(q, HEADS), keys)
        scores = self.add("Mul", scores, self.constant("scale", np.float32(HEAD_DIM**-0.5)))
        weights = self.add("Softmax", self.add("Add", scores, self.mask()), axis=-1)
        return self.joined(self.add("MatMul", weights, whole[1]))

    def repeated(self, x):
        """Every KV head for its group of query heads."""
        wide = self.add("Unsqueeze", x, self.constant("two", np.array([2])))
        wide = self.add("Tile", wide, self.constant("repeats", np.array([1, 1, HEADS // KV_HEADS, 1, 1])))
        return self.add("Reshape", wide, self.constant("grouped", np.array([0, HEADS, -1, HEAD_DIM])))

    def mask(self):
        past = self.add("Squeeze", self.add("Shape", "past_key_values.0.key", start=2, end=3))
        length = self.add("Squeeze", self.add("Shape", "input_ids", start=1, end=2))
        zero, step = self.constant("zero", np.array(0)), self.constant("step", np.array(1))
        total = self.add("Add", past, length)
        rows = self.add(
            "Unsqueeze", self.add("Range", past, total, step), self.constant("one", np.array([1]))
        )
        hidden = self.add("Greater", self.add("Range", zero, total, step), rows)
        low, none = (self.constant(n, np.float32(v)) for n, v in (("low", -3.4028235e38), ("none", 0.0)))
        padding = self.add("Cast", "attention_mask", to=TensorProto.BOOL)
        padding = self.add("Where", padding, none, low)
        padding = self.add("Unsqueeze", padding, self.constant("middle", np.array([1, 2])))
        return self.add("Max", self.add("Add", self.add("Where", hidden, low, none), padding), low)

    def model(self) -> onnx.ModelProto:
        weights = [numpy_helper.from_array(value, name) for name, value in self.weights.items()]
        graph = helper.make_graph(self.nodes, "decoder", self.inputs, self.outputs, weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=11)

    def save(self, path: Path, change=None) -> Path:
        model = self.model()
        if change is not None:
            change(model)
        onnx.save(model, path)
        return path


def greedy(path: Path, prompt: list[int], num_tokens: int, capacity: int = 40) -> list[int]:
    """What ONNX Runtime generates: step by step with the caches the model has, or by whole sequences without."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = onnxruntime.InferenceSession(path, options)
    past = {i.name: _empty(i.shape, capacity) for i in session.get_inputs() if i.name.startswith("past")}
    names = {i.name for i in session.get_inputs()}
    ids, done = list(prompt), 0
    while len(ids) < len(prompt) + num_tokens:
        new = ids[done:] if past else ids
        start = len(ids) - len(new)
        feed = {
            "input_ids": [new], "position_ids": [range(start, len(ids))], "attention_mask": [[1] * len(ids)],
            "write_indices": [start], "num_filled": [len(ids)],
        }  # fmt: skip
        feed = {name: np.array(value) for name, value in feed.items() if name in names}
        logits, *present = session.run(None, feed | past)
        past, done = dict(zip(past, present, strict=True)), len(ids)
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def _empty(shape, capacity: int) -> np.ndarray:
    sizes = {"batch": 1, "past": 0, "capacity": capacity}
    return np.zeros([sizes.get(s, s) for s in shape], np.float32)
