"""What the C++ kernels consist of: parts, a library each, their sources and headers.

A model waits for no kernels that it does not use: "core" is the sources in this folder, "latent" those in latent/
(latent rows, DeepSeek) and what they need of the core. Kernels of attention are many for each element type:
"bfloat16", "float16" (its linear layers, too) and "float32" hold those of one type, which the other parts find by
name; a call that misses one loads it (`load_part`, provider.py).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

SOURCE_DIR = Path(__file__).parent
POOL = "thread_pool.cpp"  # of all libraries whose kernels use threads
# part -> (folder of its sources, sources of other folders that it is linked with)
PARTS = {
    "bfloat16": ("bfloat16", ()),
    "core": (".", ()),
    "float16": ("float16", (POOL,)),
    "float32": ("float32", ()),
    "fp8": ("fp8", (POOL,)),
    "latent": ("latent", (POOL, "attention_plan.cpp", "linear.cpp")),
    "layer_norm": ("layer_norm", (POOL,)),
    "lookahead": ("lookahead", (POOL, "attention_plan.cpp")),
    "moe": ("moe", (POOL,)),
    "pointwise": ("pointwise", (POOL,)),
    "quant": ("quant", (POOL,)),
    "quantized_kv": ("quantized_kv", (POOL, "attention_plan.cpp", "cache_write.cpp")),
    "quantized_moe": ("quantized_moe", (POOL, "moe/moe_router.cpp")),
    "recurrent": ("recurrent", (POOL,)),
    "relative": ("relative", (POOL, "attention_plan.cpp")),
    "rope": ("rope", (POOL,)),
    "sampling": ("sampling", (POOL, "argmax.cpp")),
    "unified": ("unified", (POOL, "attention_plan.cpp")),
}
# Kernels that are compiled together, as the headers take longer to read than they to be compiled. What is local to
# one has a name that the others do not have.
SMALL_KERNELS = frozenset(
    f"{name}.cpp"
    for name in (
        "argmax",
        "attention_plan",
        "cache_write",
        "linear_vectors",
        "rms_norm",
        "thread_pool",
        "weight_packing",
    )
)
# part -> how late it is compiled where processors are few: greedy requests need no "sampling"
RANKS = {"sampling": 1}
# part -> folders whose headers it includes, beside its own and this one
HEADERS_OF = {"quantized_moe": ("moe", "quant")}
ELEMENT_PARTS = ("bfloat16", "float16", "float32")


def sources(part: str) -> list[Path]:
    """The sources of a part, the largest first: what takes longest should not begin last."""
    folder, shared = PARTS[part]
    paths = [*(SOURCE_DIR / folder).glob("*.cpp"), *(SOURCE_DIR / name for name in shared)]
    return sorted(paths, key=lambda path: (-path.stat().st_size, path.name))


def units(part: str) -> list[tuple[str, list[Path]]]:
    """The sources of a part as they are compiled: what takes longest first; a name, and what is one unit."""
    merged = {"bindings": [], "small_kernels": []}
    alone = []
    for source in sources(part):
        if is_binding(source):
            merged["bindings"].append(source)
        elif source.name in SMALL_KERNELS:
            merged["small_kernels"].append(source)
        else:
            alone.append((source.stem, [source]))
    return [*((name, paths) for name, paths in merged.items() if paths), *alone]


def is_binding(source: Path) -> bool:
    """Does a source register ops with torch? Such read torch's headers and hold no loops that matter."""
    return source.stem.startswith("binding")


def source_texts(part: str) -> list[str]:
    """Names and contents of all files that a part is compiled from."""
    return [path.name + "\0" + path.read_text() for path in sorted([*sources(part), *_headers(part)])]


def source_digest() -> str:
    """Of all parts together: libraries that were compiled from the same sources work together."""
    folders = {SOURCE_DIR / folder for folder, _ in PARTS.values()}
    files = sorted(
        path for pattern in ("*.cpp", "*.h") for folder in folders for path in folder.glob(pattern)
    )
    texts = (f"{path.relative_to(SOURCE_DIR)}\0{path.read_text()}" for path in files)
    return hashlib.sha256("\0".join((repr(PARTS), *texts)).encode()).hexdigest()


def file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _headers(part: str) -> list[Path]:
    folders = {SOURCE_DIR, *(SOURCE_DIR / name for name in (PARTS[part][0], *HEADERS_OF.get(part, ())))}
    return [header for folder in folders for header in folder.glob("*.h")]
