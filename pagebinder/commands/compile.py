"""`pagebinder compile DIR`: compile a checkpoint with its weights, check or write its plan lock, print the report."""

import json
from pathlib import Path
from typing import Annotated

import typer

from pagebinder.artefacts.files import check_target
from pagebinder.commands.support import (
    ActivationQuantizationOption,
    ActivationScalesOption,
    CodedWeightsOption,
    DeviceOption,
    ExecutableOption,
    IndexDtypeOption,
    KvDtypeOption,
    QuantizationOption,
    check_folder,
    checkpoint_dir,
    compile_dir,
    err,
    given_path,
    output_file,
    show,
)
from pagebinder.paths import replace_text

HtmlOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", parser=given_path, callback=output_file, help="Write the report as one HTML page."
    ),
]


def compile_command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            parser=given_path,
            callback=checkpoint_dir,
            help="A checkpoint directory (config.json), or an ONNX file.",
        ),
    ],
    lock: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=given_path,
            callback=output_file,
            help="Write the plan lock: what each layer was rewritten into.",
        ),
    ] = None,
    locked: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=given_path,
            help="Fail with exit code 2 where the plan differs from this lock.",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=given_path,
            help="Write an artefact (of the CPU), which starts fast: generate --model DIR.",
        ),
    ] = None,
    device: DeviceOption = "auto",
    executable: ExecutableOption = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; without it, the checkpoint's.")
    ] = None,
    verify: Annotated[
        str,
        typer.Option(help="off, sample or full: run the graph before and after the rewrites and compare."),
    ] = "off",
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt + output, in tokens.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV block.")] = None,
    kv_dtype: KvDtypeOption = "auto",
    index_dtype: IndexDtypeOption = "auto",
    coded_weights: CodedWeightsOption = False,
    quantization: QuantizationOption = None,
    activation_quantization: ActivationQuantizationOption = None,
    activation_scales: ActivationScalesOption = None,
    dump_graphs: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=given_path, help="Directory for the four graphs as Python text."),
    ] = None,
    html: HtmlOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compile a checkpoint with its weights and print the report."""
    if save is not None:
        check_folder(check_target(save).parent, new=True)
        device = "cpu" if device == "auto" else device  # others cannot be saved
    if dump_graphs is not None:
        dump_graphs.mkdir(parents=True, exist_ok=True)  # a bad path shows before the compilation, not after
    options = {
        "device": device, "executable": executable, "dtype": dtype, "verify": verify, "max_model_len": max_model_len,
        "block_size": block_size, "kv_dtype": kv_dtype, "index_dtype": index_dtype,
        "quantization": quantization, "activation_quantization": activation_quantization,
        "pack_weights": "coded" if coded_weights else None,
        "activation_scales": activation_scales, "lock": lock, "locked": locked,
    }  # fmt: skip
    compiled = compile_dir(model, options)
    print_report(compiled.report, as_json, html)
    if lock is not None:
        err.print(f"wrote {lock}")
    if save is not None:
        compiled.save(save)
        err.print(f"wrote the artefact {save}")
    if dump_graphs is not None:
        for level, graph in compiled.graphs.items():
            text = graph.print_readable(print_output=False)
            replace_text(dump_graphs / f"{level}.py", text + "\n")
        err.print(f"wrote {', '.join(f'{level}.py' for level in compiled.graphs)} to {dump_graphs}")


def print_report(report, as_json: bool, html: Path | None = None) -> None:
    """The report to stdout, as text or JSON; or to a page, which the user then opens."""
    from pagebinder.explain import render

    if html is not None:
        report.to_html(html)
        err.print(f"wrote {html}")
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    elif html is None:
        show(render(report))
