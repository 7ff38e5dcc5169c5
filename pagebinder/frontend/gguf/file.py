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
PROJECTOR = "mmproj"  # how names of files begin that make embeddings of images for a model beside them
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
FLOATS = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "BF16": np.uint16}  # of bfloat16 the bits
NUMBERS = FLOATS | {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}  # that are no blocks
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
        files = (file for file in path.iterdir() if file.suffix.lower() == SUFFIX)
        found = sorted(file for file in files if _is_first(file) and not file.name.startswith(PROJECTOR))
        if len(found) > 1:
            raise CheckpointError(
                f"{path} holds {len(found)} models ({', '.join(file.name for file in found[:4])}): name the file "
                "that is meant."
            )
        return found[0] if found else None
    if path.suffix.lower() != SUFFIX:
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
        if other := _contradiction(options, of_part | {"split.no": options.get("split.no")}):
            raise CheckpointError(f"{file} and the part before it say different things of {other}.")
        if of_part.get("split.no", names.index(file.name)) != names.index(file.name):
            raise CheckpointError(f"{file} says that its split.no is {of_part['split.no']!r}.")
        if twice := tensors.keys() & more.keys():
            raise CheckpointError(f"{file} holds {min(twice)}, which a part before it holds, too.")
        options, tensors = of_part | options, tensors | more
    if options.get("split.count", len(names)) not in (0, len(names)):
        raise CheckpointError(
            f"{path} is one of {options['split.count']} files: give the first by its name, *-00001-of-0000N.gguf."
        )
    said = options.get("general.type", MODEL)
    if said != MODEL or not isinstance(options.get("general.architecture"), str):
        what = "a file without general.architecture" if said == MODEL else f"of the type {said!r}"
        raise CheckpointError(f"{path} holds no model: it is {what}.")
    return GgufFile(path, options, tensors)


def _contradiction(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    return next((name for name in sorted(one.keys() & other.keys()) if one[name] != other[name]), None)


def _read_one(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    if not path.is_file():
        more = " Of a model in several files, all lie in one directory." if PART.fullmatch(path.name) else ""
        raise CheckpointError(f"{path} does not exist.{more}")
    try:
        reader = _Reader(np.memmap(path, np.uint8, "c"))
        return reader.options, reader.tensors
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except struct.error as error:
        raise CheckpointError(f"{path} is no GGUF file, or a damaged one: it ends early") from error
    except (ValueError, KeyError, TypeError) as error:
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
        self.options: dict[str, Any] = {}
        for _ in range(num_options):
            name = self._string()
            if name in self.options:
                raise ValueError(f"it says {name} twice")
            self.options[name] = self._value(*self._take("I"))
        infos = [self._info() for _ in range(num_tensors)]
        self._alignment = self.options.get("general.alignment", ALIGNMENT)
        if (
            not isinstance(self._alignment, int)
            or self._alignment < 1
            or self._alignment & (self._alignment - 1)
        ):
            raise ValueError(f"its general.alignment is {self._alignment!r}")
        self._begin = -(-self._at // self._alignment) * self._alignment
        self.tensors = self._tensors(infos)

    def _tensors(self, infos: list[tuple]) -> dict[str, GgufTensor]:
        tensors, end = {}, 0
        for name, shape, number, offset in sorted(infos, key=lambda info: info[-1]):
            if name in tensors:
                raise ValueError(f"it holds {name} twice")
            if offset < end or offset % self._alignment:
                raise ValueError(
                    f"{name} begins at {offset:,}, inside of another tensor or off its alignment"
                )
            tensors[name] = self._tensor(name, shape, number, offset)
            end = offset + tensors[name].data.nbytes
        return tensors

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> GgufTensor:
        if number not in KINDS:
            raise ValueError(f"{name} has the kind {number}, which is not known")
        kind, size, num_bytes = KINDS[number]
        if not shape or 0 in shape or shape[-1] % size:
            raise ValueError(f"{name} {list(shape)} is of {kind}, whose blocks are {size} long")
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
            if of == ARRAY:
                raise ValueError("it has an array of arrays")
            if of in SCALARS:
                return list(self._take(f"{count}{SCALARS[of]}"))
            return [self._value(of) for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"an option has the type {kind}, which is not known")
        return self._take(SCALARS[kind])[0]

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (count,) = self._take("I")
        sizes = self._take(f"{count}Q")
        return name, tuple(reversed(sizes)), *self._take("IQ")
