"""Runs exported models in ONNX Runtime, step by step."""

from __future__ import annotations

import itertools

import numpy as np
import onnxruntime


def session(path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


def nothing_yet(model, batch: int, capacity: int) -> dict[str, np.ndarray]:
    """The caches and states of `batch` sequences of at most `capacity` tokens, before their first."""

    def size(name) -> int:
        if isinstance(name, str) and name.startswith("entries_"):
            return capacity // int(name.removeprefix("entries_")) + 1
        return {"batch": batch, "capacity": capacity}.get(name, name)

    past = (i for i in model.get_inputs() if i.name.startswith("past_"))
    return {i.name: np.zeros([size(name) for name in i.shape], np.float32) for i in past}


def in_steps(model, ids: np.ndarray, ends, capacity: int = 40, **inputs: np.ndarray) -> np.ndarray:
    """Logits [b, T, V] of ids [b, T], fed in steps that end at `ends`, with caches of `capacity` slots."""
    past, parts = nothing_yet(model, len(ids), capacity), []
    for start, end in itertools.pairwise((0, *ends)):
        positions = np.broadcast_to(np.arange(start, end), (len(ids), end - start))
        feed = {"input_ids": ids[:, start:end], "position_ids": positions, **inputs, **past}
        logits, *present = model.run(None, feed)
        parts.append(logits)
        past = dict(zip(past, present, strict=True))
    return np.concatenate(parts, axis=1)


def greedy(model, prompt: list[int], num_tokens: int) -> list[int]:
    """The tokens that follow a prompt, which is given whole, then one by one."""
    past, ids, position, tokens = nothing_yet(model, 1, len(prompt) + num_tokens), prompt, 0, []
    for _ in range(num_tokens):
        positions = np.arange(position, position + len(ids))[None]
        feed = {"input_ids": np.array([ids]), "position_ids": positions, **past}
        logits, *present = model.run(None, feed)
        past, position = dict(zip(past, present, strict=True)), position + len(ids)
        ids = [int(logits[0, -1].argmax())]
        tokens += ids
    return tokens
