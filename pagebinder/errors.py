"""The errors users see. Each is a ValueError whose message says what was wrong and what to do about it."""


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


class ProviderError(PagebinderError):
    """No provider (or not the requested one) can serve an op. The message lists the reasons."""


class CompilerNotFoundError(ProviderError):
    """The C++ provider was requested, but no working compiler was found."""


class CacheCapacityError(PagebinderError):
    """The KV cache is too small for what was asked."""


class RequestError(PagebinderError):
    """A request is malformed: empty prompt, token id out of range, too long, bad sampling parameter."""


class EventLogError(PagebinderError):
    """A KV event log cannot be read, or cannot be drawn."""
