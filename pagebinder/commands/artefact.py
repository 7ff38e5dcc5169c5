"""Artefacts on the command line: a directory that `compile --save` wrote stands for a checkpoint directory."""

from pathlib import Path

from pagebinder.commands.support import working


def open_artefact(path: Path, config_options: dict, *, needs_tokenizer: bool, checkpoint: Path | None = None):
    """Load an artefact with progress; returns a CompiledModel.

    Raises:
        ConfigError: an option says how to compile, which has happened. RequestError: a tokenizer is needed and the
            artefact has none.
    """
    with working("importing torch") as step:
        from pagebinder import load
        from pagebinder.config import CompileConfig
        from pagebinder.errors import ConfigError, RequestError

        plain = CompileConfig()
        for name, value in config_options.items():
            if value != getattr(plain, name) and (name, value) != (
                "device",
                "cpu",
            ):  # where all artefacts run
                raise ConfigError(
                    f"{path} is compiled already, and {name}={str(value)!r} says how to: leave that out, or give the "
                    "checkpoint directory."
                )
        step("loading the artefact")
        compiled = load(path, checkpoint=checkpoint)
        if needs_tokenizer and compiled.source.tokenizer() is None:
            raise RequestError(
                f"{path} was saved without a tokenizer, so prompts and stop strings cannot be text: give "
                "--prompt-ids (--encoder-prompt-ids) and --stop-token-id."
            )
        return compiled
