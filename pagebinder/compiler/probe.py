"""Code of a user's own runs beside its graph while it is compiled, at three lengths: two calls of the module, one of
the graph. Of a module that returns the last row alone, some rows by calls with fewer tokens.

transformers' own classes are served as tiny models before each release (docs/compatibility.md). Of other code nobody
knows what it does behind torch's back: count calls in a global, draw numbers in NumPy, look at the length of a list.
`verify="sample"` or `"full"` does more, of any model.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Interpreter

from pagebinder.ambient import inference
from pagebinder.compiler.verify_runs import source_rows
from pagebinder.config import CompileConfig
from pagebinder.errors import CaptureError
from pagebinder.frontend.function_caches import nothing_kept
from pagebinder.frontend.own_code import is_known
from pagebinder.frontend.python_state import evaluation_mode, put_back
from pagebinder.frontend.source import ModelSource
from pagebinder.passes.graph_values import REDUCED, rounded_to
from pagebinder.passes.own_passes import may_change
from pagebinder.passes.verifier import CAPTURE_FACTOR, TOLERANCES, errors_of, in_units, spread_of

NUM_TOKENS, SHORTER = 80, (7, 1)


def has_code_of_its_own(module: torch.nn.Module) -> bool:
    return not is_known(module)


def can_probe(source: ModelSource) -> bool:
    return source.device.type != "meta" and has_code_of_its_own(source.module)


def probe(source: ModelSource, semantic: GraphModule, max_model_len: int, config: CompileConfig) -> None:
    """Raises CaptureError if the module computes something else when it is called again, or the graph does: of a
    sequence, and of its beginnings, as code may look at how long it is."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(source.vocab_size, (NUM_TOKENS,), generator=generator, device="cpu")
    ids = ids[:max_model_len].to(source.device)
    name, also = type(source.module).__name__, may_change(config.passes, "semantic")
    _compare(semantic, ids, _called_twice(source, ids), name, also)
    for num_tokens in SHORTER:
        try:
            results = _called_twice(source, ids[:num_tokens])
        except Exception:  # code that was made for long sequences says nothing of such
            continue
        _compare(semantic, ids[:num_tokens], results, name, also)


def _called_twice(source: ModelSource, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    module = source.module
    with put_back(module), evaluation_mode(module), nothing_kept(module):
        first, again = (source_rows(source.module, source, ids).double() for _ in range(2))
    return first, again


def _compare(
    semantic: GraphModule, ids: torch.Tensor, results: tuple[torch.Tensor, torch.Tensor], name: str, also: str
) -> None:
    """In 16 bits single tokens may differ (by experts whose ratings are equal but for rounding): there the mean error
    counts."""
    first, again = results
    positions = torch.arange(len(ids), device=ids.device)
    with inference():  # interpreted: a path may hold a word of Python's, which is no code
        got = Interpreter(semantic).run(ids, positions)[-len(first) :]
    dtype = rounded_to(semantic, got.dtype)
    narrow = dtype in REDUCED
    tolerance = TOLERANCES[dtype] * (1 if narrow else CAPTURE_FACTOR)
    compared = (
        (f"{name} computes something else when it is called again", again),
        (f"The graph of {name} computes something else than {name} itself", got.double()),
    )
    spread = spread_of(first)
    for what, other in compared:
        errors = in_units(errors_of(other, first), first, spread)
        error = float(errors.square().mean().sqrt() if narrow else errors.max())
        if not error <= tolerance:
            worst = len(ids) - len(errors) + int(errors.amax(-1).argmax())
            raise CaptureError(
                f"{what}: logits are off by {error:.2g} of their spread, most at token {worst} of {len(ids)}. It "
                "may keep state outside of its modules, draw numbers by itself, run under autocast, or depend on "
                f"how many tokens there are{also}. "
                '`pagebinder bisect` and verify="full" show more.'
            )
