"""Leaf: the adapter of X-MOD's layers, for the language that the config sets for all sequences.

    the source                                         while capturing
    for each language:                                 new = adapters[config.default_language](x)
        rows of sequences in it -> its adapter
    dropout(new) + residual                            the same

Sequences are given no language of their own, and then the source uses the default one for every row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from pagebinder.errors import CaptureError
from pagebinder.frontend.leaves.base import Leaf


@dataclass(frozen=True, kw_only=True)
class AdapterLeaf(Leaf):
    """Gives each module the language of the model's config."""

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        language = getattr(model.config, "default_language", None)
        if language is None:
            raise CaptureError("X-MOD has no language set: call set_default_language() before compiling.")
        with contextlib.ExitStack() as undo:
            for path, module in self.modules(model).items():
                if language not in module.adapter_modules:
                    raise CaptureError(f"{path} has no adapter for the language {language!r}.")
                ours = partial(adapted, module, language)
                module.lang_adapter = self._fitting_method(module, "lang_adapter", ours)
                undo.callback(delattr, module, "lang_adapter")
            yield


def adapted(self, language, lang_ids, hidden_states):
    """hidden [1, T, C] -> [1, T, C], by the adapter of one language; the norms around it as in the source."""
    residual = hidden_states
    if self.adapter_layer_norm is not None:
        hidden_states = self.adapter_layer_norm(hidden_states)
    elif self.adapter_reuse_layer_norm:
        hidden_states = self.LayerNorm(hidden_states)
    if self.ln_before_adapter:
        residual = hidden_states
    return self.dropout(self.adapter_modules[language](hidden_states)) + residual


XMOD_ADAPTERS = AdapterLeaf(
    name="language adapter",
    classes=("XmodOutput",),
    functions={},
    emits=(),
    seen_on=("5.23", "5.24"),
)
