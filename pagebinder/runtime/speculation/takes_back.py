"""Whether a model's state allows guesses: K and V of a token that failed are written anew, a recurrent state has
swallowed it."""

from __future__ import annotations

from pagebinder.errors import ConfigError
from pagebinder.runtime.kv import KVCacheManager


def check_takes_back(kv: KVCacheManager) -> None:
    """Raises ConfigError if some layer's state cannot be taken back."""
    kinds = sorted({
        group.spec.kind for group, manager in zip(kv.groups, kv.managers) if not manager.takes_back
    })  # fmt: skip
    if kinds:
        raise ConfigError(
            f"drafter: state of kind {', '.join(kinds)} cannot be taken back when a guessed token fails; leave "
            "drafter=None for this model."
        )
