"""Values that are known while a graph is traced: sizes, axes, scalars. They are numpy arrays; tensors are torch's.

A size of T tokens is a SymInt inside an array of objects. A scalar enters torch's operators as a number, so that the
graph says `x * 0.25`, as PyTorch models do, and recognisers read it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

OPERATORS: dict[str, Callable] = {}
_DTYPES = {
    "bool": torch.bool, "int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32,
    "int64": torch.int64, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64,
    "object": torch.int64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items() if name != "object"}
LARGE = 1e38
MOST_ENTRIES = 64  # of a constant that is kept as an array


def operator(*names: str) -> Callable[[Callable], Callable]:
    """Registers a translation: fn(call, *inputs, **attributes). What its signature lacks is refused."""

    def register(function: Callable) -> Callable:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register


def is_host(value) -> bool:
    return isinstance(value, np.ndarray)


def host(value) -> np.ndarray:
    """An array; of objects only while one of them is symbolic."""
    array = np.asarray(value)
    if array.dtype == object and not any(isinstance(v, (torch.SymInt, torch.SymFloat)) for v in array.flat):
        array = np.array(array.tolist()).reshape(array.shape)
    return array.astype(np.int64) if array.dtype == np.int32 else array


def sizes(shape) -> np.ndarray:
    """A shape as an array."""
    array = np.empty(len(shape), dtype=object)
    array[:] = list(shape)
    return host(array) if len(shape) else np.zeros(0, np.int64)


def as_host(tensor: torch.Tensor) -> np.ndarray | None:
    """A constant as an array, if it is a scalar or a few integers; None: it is data."""
    small = tensor.numel() == 1 or (not tensor.is_floating_point() and tensor.numel() <= MOST_ENTRIES)
    if not small or tensor.device.type == "meta" or tensor.dtype is torch.bfloat16:
        return None
    return tensor.numpy()


def number(array: np.ndarray):
    """The only entry. A float32 becomes the shortest decimal that rounds to it: 1e-06 and not 9.99999997e-07."""
    value = array.reshape(-1)[0]
    if array.dtype == np.float32:
        return shortest(value)
    return value if array.dtype == object else value.item()


def shortest(value: float) -> float:
    """The shortest decimal that is this number in float32, in which ONNX keeps attributes.

    The decimal of the largest number is larger than it, which torch does not take for a float32.
    """
    exact = float(np.float32(value))
    return exact if abs(exact) > LARGE else float(str(np.float32(value)))


def integers(array: np.ndarray) -> list:
    """The entries, as ints and SymInts."""
    return [v if isinstance(v, torch.SymInt) else int(v) for v in array.reshape(-1)]


def torch_dtype(array: np.ndarray) -> torch.dtype:
    return _DTYPES[array.dtype.name]


def cast(array: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    if array.dtype == object:
        return array  # sizes: exact in whatever they are counted in
    return array.astype(_NAMES[dtype])


def filled(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array as a tensor."""
    dtype = torch_dtype(array)
    if array.size and (array.size == 1 or (array.dtype != object and (array == array.reshape(-1)[0]).all())):
        return torch.full(array.shape, number(array), dtype=dtype, device=device)
    if array.dtype == object:
        raise ValueError("sizes that depend on the number of tokens are used as data")
    return torch.tensor(array.tolist(), dtype=dtype, device=device).reshape(array.shape)


def broadcast_shape(shape, target) -> list:
    """A shape after an Expand to `target`: sizes of 1 follow the other side."""
    rank = max(len(shape), len(target))
    pairs = zip([1] * (rank - len(shape)) + list(shape), [1] * (rank - len(target)) + list(target))
    return [a if isinstance(b, int) and b == 1 else b for a, b in pairs]
