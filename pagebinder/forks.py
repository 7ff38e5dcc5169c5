"""What other processes do not have: torch's threads after fork(), and what cannot be written for them.

torch's own ops share their work among threads of OpenMP. Once a process has used them, OpenMP in a child made by
fork() takes them for there. Our threads begin anew in a child, so an engine made before goes on in it, with torch's
ops in one thread (runtime/turns.py). A compilation, a new engine and steps without an engine run torch's ops as ever.
"""

import os

import torch

from pagebinder.errors import ForkedProcessError

_used = False  # by this process or one that it was forked from
_are_the_parents = False


def use_threads(what: str) -> None:
    """`what` begins, which runs torch's ops on several threads.

    Raises:
        ForkedProcessError: they are those of the process that this one was forked from.
    """
    global _used
    if _are_the_parents and torch.get_num_threads() > 1:
        raise ForkedProcessError(
            f"{what} in a process made by fork() would hang, as torch's threads stayed with its parent, which used "
            'them. Start the process with multiprocessing.get_context("spawn"), or call torch.set_num_threads(1) in '
            "it."
        )
    _used = True


class NotPickled:
    """Memory, threads and machine code that no other process could be handed: pickling and copying say so."""

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"{type(self).__name__} can be neither pickled nor copied. For another process, write the compiled model "
            "with compiled.save(directory), and call pagebinder.load(directory) there."
        )


def threads_are_the_parents() -> bool:
    """Would torch's ops wait for threads that stayed with the parent?"""
    return _are_the_parents


def _in_child() -> None:
    global _are_the_parents
    _are_the_parents = _used


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
