"""Arguments of public calls: a number that is none, or out of range, is refused with its name."""

from __future__ import annotations

from pagebinder.errors import ConfigError


def is_int(value: object) -> bool:
    """A whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def require_whole(name: str, value: object, least: int, unit: str) -> None:
    """Raise ConfigError unless `value` is a whole number of at least `least`."""
    if not is_int(value) or value < least:
        plural = "" if least == 1 else "s"
        raise ConfigError(f"{name}={value!r}: use a whole number, at least {least} {unit}{plural}.")
