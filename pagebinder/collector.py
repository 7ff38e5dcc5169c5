"""Python's collector of cycles, held back where it would look through millions of objects for next to nothing."""

import contextlib
import gc
from collections.abc import Iterator

from pagebinder.interrupts import deferred_interrupts


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No collection meanwhile, in any thread. Afterwards it is as it was: on, if it was on."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            # Here rather than at the next object: it calls weak references' callbacks, and what a handler of Ctrl-C
            # raises inside one of those is lost.
            with deferred_interrupts():
                gc.enable()
                gc.collect(0)
