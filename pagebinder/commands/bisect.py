"""`pagebinder bisect`: which pass, layer and node first differ from the source model."""

from pathlib import Path
from typing import Annotated

import typer

from pagebinder.commands.support import checkpoint_dir, given_path, quiet_third_parties, working

EXIT_DIVERGED = 1


def bisect_command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            parser=given_path,
            callback=checkpoint_dir,
            help="A checkpoint directory with weights, or an ONNX file.",
        ),
    ],
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Length of the only sequence; default: edges of blocks, windows."),
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Error that counts, relative to the spread of the values.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", parser=given_path, help="Where the script that shows the divergence goes."
        ),
    ] = Path("bisect"),
    dtype: Annotated[str | None, typer.Option(help="Compile in this dtype, for example float32.")] = None,
) -> None:
    """Find the first compilation step, layer and node that differ from the source model (exit status 1 if any)."""
    with working("compiling, and running every step"):
        from pagebinder.compiler.bisect import bisect
        from pagebinder.config import CompileConfig

        quiet_third_parties()
        result = bisect(
            model, CompileConfig(dtype=dtype), num_tokens=tokens, tolerance=tolerance, out_dir=out
        )
    print(result.describe())
    if result.diverged:
        raise typer.Exit(EXIT_DIVERGED)
