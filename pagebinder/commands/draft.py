"""`--draft` of the commands that generate: who guesses the tokens that a step then checks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagebinder.commands.support import checkpoint_dir, compile_dir, given_path

DraftOption = Annotated[
    str | None,
    typer.Option(
        metavar="WHO",
        help="Guess tokens and check several in a step (the tokens stay the same). ngram: what followed the same "
        "tokens before; int4_g32, fp8, ...: this model with such weights; DIR: a smaller one, same tokenizer.",
    ),
]
MaxDraftOption = Annotated[
    int | None, typer.Option(min=1, help="With --draft: most tokens guessed for a request in a step (7).")
]


def check_draft(choice: str | None, most: int | None) -> None:
    """Refuse what is neither a name nor a checkpoint, before the seconds of compilation."""
    from pagebinder.config import DRAFTERS, QUANTIZATIONS

    if most is not None and choice is None:
        raise typer.BadParameter("--max-draft-tokens says how much --draft may guess: give that, too.")
    if choice is None or choice in (*DRAFTERS, *QUANTIZATIONS):
        return
    if not choice or not given_path(choice).exists():
        raise typer.BadParameter(
            f"--draft {choice!r}: use {', '.join((*DRAFTERS, *QUANTIZATIONS))}, or a checkpoint directory."
        )
    checkpoint_dir(given_path(choice))


def drafter_of(choice: str | None, model: Path, options: dict, max_num_seqs: int):
    """`EngineConfig.drafter` for a choice that `check_draft` has seen. `options`: how `model` was compiled."""
    from pagebinder.config import DRAFTERS, QUANTIZATIONS, EngineConfig

    if choice is None or choice in DRAFTERS:
        return choice
    if choice in QUANTIZATIONS:
        plain = {"activation_quantization": None, "activation_scales": None}
        compiled = compile_dir(model, options | plain | {"quantization": choice})
    else:
        kept = {name: options[name] for name in ("device", "executable", "max_model_len") if name in options}
        compiled = compile_dir(given_path(choice), kept)
    from pagebinder.runtime.speculation import ModelDrafter

    return ModelDrafter(compiled, EngineConfig(prefix_caching=False, max_num_seqs=max_num_seqs))
