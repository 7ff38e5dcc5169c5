"""The errors users see. Each is a ValueError whose message says what was wrong and what to do about it."""

import os
from pathlib import Path


class PagebinderError(ValueError):
    """Base of every error that bad input can cause."""


class ConfigError(PagebinderError):
    """An option is unknown, has a bad value, or contradicts another."""


class CheckpointError(PagebinderError):
    """A checkpoint directory is missing, incomplete or inconsistent with its config."""


class CaptureError(PagebinderError):
    """The source model could not be captured, or a layer in it could not be explained."""


class UnsupportedLayerError(CaptureError):
    """A layer was understood, but nothing here can serve it."""


class ForkedProcessError(PagebinderError):
    """A process made by fork() would wait for threads that only its parent has."""


class ProviderError(PagebinderError):
    """No provider (or not the requested one) can serve an op. The message lists the reasons."""


class CompilerNotFoundError(ProviderError):
    """The C++ provider was requested, but no working compiler was found."""


class PlanLockError(PagebinderError):
    """A plan lock cannot be read: no such file, no TOML, another format, damaged."""


class PlanDriftError(PagebinderError):
    """The compiled plan is not the one in the plan lock. `drifts` lists the places."""

    def __init__(self, message: str, drifts: tuple = ()) -> None:
        super().__init__(message)
        self.drifts = drifts


class ArtefactError(PagebinderError):
    """A saved compilation cannot be written, read or used here: other files, a damaged one, another version."""


class CacheCapacityError(PagebinderError):
    """The KV cache is too small for what was asked."""


class GraphCaptureError(PagebinderError):
    """A step cannot be captured to be replayed: an op reads values on the host, or the device refused."""


class RequestError(PagebinderError):
    """A request is malformed: empty prompt, token id out of range, too long, bad sampling parameter."""


class PassError(PagebinderError):
    """A pass of the user's own (CompileConfig.passes) leaves a graph that cannot be run in place of its source."""


class VerificationError(PagebinderError):
    """A pass changed what the graph computes (CompileConfig.verify).

    `pass_name` and `level` say which pass, `sequence` on which input, `error` by how much, relative to the spread of
    the values; `places` are the module paths that it rewrote; `node` the one at fault, where that is known.
    """

    def __init__(
        self, message: str, *, pass_name: str = "", level: str = "", sequence: str = "", error: float = 0.0,
        places: tuple[str, ...] = (), node: str = "",
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.pass_name, self.level, self.sequence = pass_name, level, sequence
        self.error, self.places, self.node = error, places, node


class UnrunnableGraphError(VerificationError):
    """A pass left a graph that cannot be run."""


class EventLogError(PagebinderError):
    """A KV event log cannot be read, or cannot be drawn."""


class ExportError(PagebinderError):
    """A model cannot be written for another runtime: an operator has no counterpart there, which the message names,
    or the place is none for a directory."""


def not_made(path: Path, error: OSError) -> str:
    """What to say of a directory that could not be made, whatever path the error names."""
    file = next((p for p in (path, *path.parents) if os.path.lexists(p) and not os.path.isdir(p)), None)
    why = error.strerror
    if file is not None:
        why = f"{file} is {'no directory' if os.path.exists(file) else 'a link that leads nowhere'}"
    return f"The directory {path} cannot be made: {why}. Give another place."
