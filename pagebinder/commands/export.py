"""`pagebinder export --onnx DIR OUT`: a checkpoint's semantic graph for another runtime."""

from pathlib import Path
from typing import Annotated

import typer

from pagebinder.commands.support import (
    MovedOption,
    check_folder,
    checkpoint_dir,
    compile_dir,
    err,
    given_path,
    working,
)


def export_command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            parser=given_path,
            callback=checkpoint_dir,
            help="A checkpoint directory, an ONNX file, or an artefact.",
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", parser=given_path, help="Directory for the exported files.")
    ],
    onnx: Annotated[
        bool,
        typer.Option(
            "--onnx", help="A standard ONNX model (opset 24), with its cache as inputs and outputs."
        ),
    ] = False,
    contrib: Annotated[
        bool,
        typer.Option(
            "--contrib", help="Attention as ONNX Runtime's GroupQueryAttention: no other runtime reads it."
        ),
    ] = False,
    checkpoint: MovedOption = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32 (what ONNX Runtime runs on a CPU), bfloat16 or float16; else the checkpoint's."
        ),
    ] = None,
) -> None:
    """Write a model for another runtime."""
    if not onnx:
        raise typer.BadParameter("say which format: --onnx.")
    check_folder(out, new=True)
    from pagebinder.artefacts.files import is_artefact

    # Nothing is run here, so nothing is compiled to machine code; an artefact has been.
    options = (
        {"dtype": dtype} if is_artefact(model) else {"executable": "eager", "device": "cpu", "dtype": dtype}
    )
    compiled = compile_dir(model, options, checkpoint=checkpoint)
    with working("writing ONNX"):
        paths = compiled.export_onnx(out, contrib=contrib)
    for path in paths:
        err.print(f"wrote {path}", soft_wrap=True)
    if compiled.report.dtype == "bfloat16":
        err.print(
            "The model computes in bfloat16, which ONNX Runtime cannot on a CPU: --dtype float32 for that."
        )
