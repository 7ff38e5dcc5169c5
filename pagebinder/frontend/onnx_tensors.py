"""The tensors of an ONNX file: those of external files as views of a mapping, others from the message.

    model.onnx        tensor "a": float32 [2, 3], raw_data                          its values in the message
                      tensor "b": float16 [4], location "data", offset 24, length 8
    data              |........................|bbbbbbbb|...                        mapped, and never written to

Sizes that contradict each other are damage, and told with the tensor's name before anything is read.
"""

from __future__ import annotations

import math
import mmap
import re
from pathlib import Path

import torch

from pagebinder.errors import CaptureError, CheckpointError

# onnx.TensorProto.DataType -> torch's name
DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool,
    10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip


def stored_dtype(number: int, name: str) -> torch.dtype:
    """Of a TensorProto.DataType. Raises CaptureError, which says that `name` has it: there is none."""
    if number not in DTYPES:
        import onnx

        known = onnx.TensorProto.DataType
        said = known.Name(number) if number in known.values() else number
        raise CaptureError(
            f"{name!r} is of the type {said}, which cannot be imported: export the model unquantised."
        )
    return DTYPES[number]


class OnnxTensors:
    """Reads the tensors of the file `path`. `weights=False`: those of external files are on the meta device."""

    def __init__(self, path: Path, weights: bool) -> None:
        self.path, self.weights = path, weights
        self.files: dict[str, mmap.mmap] = {}

    def read(self, proto) -> torch.Tensor:
        """A TensorProto as a tensor. Raises CaptureError for its type, CheckpointError for what is damaged."""
        dtype, shape = stored_dtype(proto.data_type, proto.name), tuple(proto.dims)
        if min(shape, default=0) < 0:
            raise self._damaged(proto, f"has the shape {list(shape)}")
        num_bytes = math.prod(shape) * dtype.itemsize
        if proto.data_location == 1:
            return self._external(proto, dtype, shape, num_bytes)
        if proto.HasField("raw_data"):
            data = bytearray(proto.raw_data)
            self._check_size(proto, "raw_data", len(data), num_bytes)
            return (
                torch.frombuffer(data, dtype=dtype).reshape(shape)
                if data
                else torch.empty(shape, dtype=dtype, device="cpu")
            )
        import onnx

        try:
            array = onnx.numpy_helper.to_array(proto)
        except ValueError as error:
            raise self._damaged(proto, f"has values that do not fit: {error}") from error
        if dtype is torch.bfloat16:
            array = array.astype("float32")
        return torch.tensor(array, dtype=dtype, device="cpu")

    def _external(self, proto, dtype: torch.dtype, shape: tuple[int, ...], num_bytes: int) -> torch.Tensor:
        said = {entry.key: entry.value for entry in proto.external_data}
        offset, length = (self._num_bytes(proto, key, said.get(key, "0")) for key in ("offset", "length"))
        if length:  # 0: not said
            self._check_size(proto, "length", length, num_bytes)
        if not self.weights:
            return torch.empty(shape, dtype=dtype, device="meta")
        if not num_bytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        memory = self._mapped(said.get("location", ""), proto.name)
        if offset + num_bytes > len(memory):
            raise CheckpointError(
                f"{said['location']} ends before the tensor {proto.name!r}: it is damaged or another."
            )
        if offset % dtype.itemsize:  # rare, and no view could have such an address
            return torch.frombuffer(bytearray(memory[offset : offset + num_bytes]), dtype=dtype).view(shape)
        return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)

    def _num_bytes(self, proto, key: str, value: str) -> int:
        if not re.fullmatch("[0-9]{1,99}", value):
            raise self._damaged(proto, f"has {key}={value[:99]!r}, which is no number of bytes")
        return int(value)

    def _check_size(self, proto, key: str, given: int, num_bytes: int) -> None:
        if given != num_bytes:
            raise self._damaged(proto, f"has {key} of {given} bytes; its type and shape take {num_bytes}")

    def _damaged(self, proto, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: the tensor {proto.name!r} {what}.")

    def _mapped(self, location: str, name: str) -> mmap.mmap:
        if location not in self.files:
            folder, is_name = self.path.parent.resolve(), bool(location) and "\0" not in location
            path = (folder / location).resolve() if is_name else folder
            if not is_name or not path.is_relative_to(folder):
                raise CheckpointError(
                    f"The tensor {name!r} lies in {location!r}, outside the model's directory or no name of a file."
                )
            try:
                with path.open("rb") as file:  # private: nothing can write to the file through it
                    self.files[location] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"{path}, which holds the weights, cannot be read: {error}. It belongs beside the ONNX file."
                ) from error
        return self.files[location]
