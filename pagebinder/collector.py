"""Python's collector of cycles, held back where it would look through millions of objects for next to nothing."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No collection meanwhile, in any thread. Afterwards it is as it was: on, if it was on."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
