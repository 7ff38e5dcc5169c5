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


def in_steps(model, ids: np.ndarray, ends, capacity: int = 40, **inputs: np.ndarray) -> np.ndarray:
    """Logits [b, T, V] of ids [b, T], fed in steps that end at `ends`, with caches of `capacity` slots."""
    sizes = {"batch": len(ids), "capacity": capacity}
    past = {
        i.name: np.zeros([sizes.get(size, size) for size in i.shape], np.float32)
        for i in model.get_inputs()
        if i.name.startswith("past_")
    }
    parts = []
    for start, end in itertools.pairwise((0, *ends)):
        positions = np.broadcast_to(np.arange(start, end), (len(ids), end - start))
        feed = {"input_ids": ids[:, start:end], "position_ids": positions, **inputs, **past}
        logits, *present = model.run(None, feed)
        parts.append(logits)
        past = dict(zip(past, present, strict=True))
    return np.concatenate(parts, axis=1)
