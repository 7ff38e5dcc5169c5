"""A GGUF file, llama.cpp's: what it says of its model, and its tensors, mapped.

FILE.gguf, or of a model in several files the first, FILE-00001-of-0000N.gguf; a directory that holds one alone, and
no config.json.

    magic "GGUF", version; number of tensors, of options          uint32; uint64
    an option    name, type, value                                strings and arrays have their length in front
    a tensor     name, number of sizes, sizes, kind, offset       the size that runs fastest first
    padding to general.alignment
    data

The format: docs/gguf.md of ggml. The package `gguf` reads it, too, but takes 20 s for a vocabulary of 150,000 tokens.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagebinder.errors import CheckpointError
from pagebinder.paths import user_path

SUFFIX = ".gguf"
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
MODEL = "model"  # general.type, where it is said; others are adapters, projectors of images, vocabularies
VERSIONS = (2, 3)
ALIGNMENT = 32

# ggml's numbers of kinds: name, weights of a block, bytes of a block.
KINDS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip
NUMBERS = {  # kinds that are no blocks, as numpy reads them; of bfloat16 the bits
    "F32": np.float32, "F16": np.float16, "F64": np.float64, "BF16": np.uint16, "I8": np.int8, "I16": np.int16,
    "I32": np.int32, "I64": np.int64,
}  # fmt: skip
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}  # of options
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """`kind`: ggml's name of how it is stored. `shape`: with rows first, as torch has it. `data`: of blocks uint8
    [..., rows, bytes of a row], else its numbers; a mapping of the file."""

    kind: str
    shape: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True)
class GgufFile:
    """`options`: what it says, by key. `tensors`: by its names for them."""

    path: Path
    options: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.options.get("general.architecture"))

    def __deepcopy__(self, memo: dict) -> GgufFile:
        """Configs of transformers are copied, and with them what they hold: no file is."""
        return self


def gguf_path(path: str | Path) -> Path | None:
    """The GGUF file that a path means; None: it means something else.

    Raises:
        CheckpointError: a directory of several models; a part that is not the first.
    """
    path = user_path(path, CheckpointError)
    if path.is_dir():
        if (path / "config.json").exists():
            return None
        found = sorted(file for file in path.glob(f"*{SUFFIX}") if _is_first(file))
        if len(found) > 1:
            raise CheckpointError(
                f"{path} holds {len(found)} models ({', '.join(file.name for file in found[:4])}): name the file "
                "that is meant."
            )
        return found[0] if found else None
    if path.suffix != SUFFIX:
        return None
    if not _is_first(path):
        first = PART.sub(r"\1-00001-of-\3.gguf", path.name)
        raise CheckpointError(f"{path.name} is a part of a model in several files: name the first, {first}.")
    return path


def _is_first(file: Path) -> bool:
    part = PART.fullmatch(file.name)
    return part is None or int(part[2]) == 1


def read_gguf(path: Path) -> GgufFile:
    """Raises CheckpointError: no such file, a damaged one, one that holds no model."""
    part = PART.fullmatch(path.name)
    names = (
        [f"{part[1]}-{i + 1:05}-of-{part[3]}{SUFFIX}" for i in range(int(part[3]))] if part else [path.name]
    )
    options: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for file in (path.with_name(name) for name in names):
        of_part, more = _read_one(file)
        if twice := tensors.keys() & more.keys():
            raise CheckpointError(f"{file} holds {min(twice)}, which a part before it holds, too.")
        options, tensors = of_part | options, tensors | more
    said = options.get("general.type", MODEL)
    if said != MODEL or not isinstance(options.get("general.architecture"), str):
        what = "a file without general.architecture" if said == MODEL else f"of the type {said!r}"
        raise CheckpointError(f"{path} holds no model: it is {what}.")
    return GgufFile(path, options, tensors)


def _read_one(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist. Of a model in several files, all lie in one directory."
        )
    try:
        reader = _Reader(np.memmap(path, np.uint8, "c"))
        return reader.options, {name: reader.tensor(*rest) for name, *rest in reader.infos}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no GGUF file, or a damaged one: {error}") from error


class _Reader:
    """Reads a mapped file from its beginning on. Raises ValueError, struct.error: it ends early, or says nonsense."""

    def __init__(self, data: np.ndarray):
        self._data, self._bytes, self._at = data, memoryview(data), 4
        if bytes(self._bytes[:4]) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        (version,) = self._take("I")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}; 2 and 3 are read, with the lower bytes first")
        num_tensors, num_options = self._take("QQ")
        self.options = {self._string(): self._value(*self._take("I")) for _ in range(num_options)}
        self.infos = [self._info() for _ in range(num_tensors)]
        alignment = self.options.get("general.alignment", ALIGNMENT)
        self._begin = -(-self._at // alignment) * alignment

    def tensor(self, shape: tuple[int, ...], number: int, offset: int) -> GgufTensor:
        if number not in KINDS:
            raise ValueError(f"a tensor has the kind {number}, which is not known")
        kind, size, num_bytes = KINDS[number]
        if shape[-1] % size:
            raise ValueError(f"a tensor {list(shape)} is of {kind}, whose blocks are {size} long")
        total = math.prod(shape) // size * num_bytes
        data = self._data[self._begin + offset : self._begin + offset + total]
        if len(data) != total:
            raise ValueError(f"it ends in the middle of its tensors, at {len(self._data):,} bytes")
        row = shape[-1] // size * num_bytes
        data = data.view(NUMBERS[kind]).reshape(shape) if kind in NUMBERS else data.reshape(*shape[:-1], row)
        return GgufTensor(kind, shape, data)

    def _take(self, form: str) -> tuple:
        values = struct.unpack_from(f"<{form}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values

    def _string(self) -> str:
        (length,) = self._take("Q")
        text = bytes(self._bytes[self._at : self._at + length])
        if len(text) != length:
            raise ValueError("it ends in the middle of a text")
        self._at += length
        return text.decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            of, count = self._take("IQ")
            if of in SCALARS:
                return list(self._take(f"{count}{SCALARS[of]}"))
            return [self._value(of) for _ in range(count)]
        return self._take(SCALARS[kind])[0]

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (count,) = self._take("I")
        sizes = self._take(f"{count}Q")
        return name, tuple(reversed(sizes)), *self._take("IQ")
