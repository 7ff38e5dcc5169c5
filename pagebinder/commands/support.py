"""What the commands share: two consoles, how a command ends, progress, and quiet third parties.

Results go to stdout, everything about the run (progress, errors, statistics) to stderr.
"""

import contextlib
import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from pagebinder.__main__ import EXIT_INTERRUPTED
from pagebinder.errors import ConfigError, PagebinderError
from pagebinder.paths import user_path

PLAIN_WIDTH = 118
EXIT_ERROR = 2

STAGES = {
    "load": "loading the model",
    "capture": "tracing the model",
    "recognise": "recognising attention, norms and RoPE",
    "audit": "proving that nothing else mixes tokens",
    "plan": "planning the KV cache",
    "page": "rewriting attention onto the paged cache",
    "fuse": "fusing, and choosing providers (the C++ kernels are built once)",
    "verify": "running the graph before and after every pass",
    "executable": "compiling the executable",
}

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def given_path(text: str | Path) -> Path:
    """What Typer makes of the text of a path."""
    try:
        return user_path(text)
    except PagebinderError as error:
        raise typer.BadParameter(str(error)) from None


MovedOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        parser=given_path,
        help="Of an artefact whose checkpoint was moved: where its weights are now.",
    ),
]
PlainSamplingOption = Annotated[
    bool,
    typer.Option(
        "--plain-sampling", help="Without what the model's generation_config.json says of sampling."
    ),
]
DeviceOption = Annotated[
    str, typer.Option(help="auto (the GPU if there is one), cpu or cuda, on another GPU cuda:1.")
]
KvDtypeOption = Annotated[
    str,
    typer.Option(
        help="auto; fp8_e4m3, fp8_e5m2, int8: K and V in a byte a value (fp8 also with _per_head, _per_tensor); "
        "fp8_ds_mla: 8-bit rows of latents, for MLA and DeepSeek-V4."
    ),
]
IndexDtypeOption = Annotated[
    str, typer.Option(help="Keys of an indexer: auto (like --kv-dtype), fp8, mxfp4.")
]
DtypeOption = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; else the checkpoint's.")]
QuantizationOption = Annotated[
    str | None,
    typer.Option(help="Weights in fewer bits: fp8, fp8_tensor, fp8_block, int8, int4_g64, int4_g32, mxfp4."),
]

CodedWeightsOption = Annotated[
    bool, typer.Option("--coded-weights", help="Keep weights in bf16 in about 12 of 16 bits, without loss.")
]

ActivationQuantizationOption = Annotated[
    str | None,
    typer.Option(
        help="With weights in fp8, what they multiply, too: fp8_per_token, fp8_per_group, fp8_per_tensor."
    ),
]
ExecutableOption = Annotated[
    str,
    typer.Option(
        help="auto, eager, native, inductor, cuda_graph or tensorrt; auto: what suits the model and the device."
    ),
]
ActivationScalesOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        parser=given_path,
        help="Fixed scales for fp8_per_tensor: safetensors, LAYER.input_scale.",
    ),
]


class Commands(typer.core.TyperGroup):
    """Ends every command the same way: one line for a user's error, 130 for Ctrl-C, silence for a closed pipe."""

    def invoke(self, ctx):
        debug = ctx.params.get("debug", False)
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a closed pipe shows here rather than in the interpreter's exit
        except KeyboardInterrupt:
            err.print("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            _detach_stdout()
            raise typer.Exit(1) from None
        except (PagebinderError, OSError, FloatingPointError) as error:  # the last: NaN logits
            if debug:
                raise
            show_error(error)
            raise typer.Exit(EXIT_ERROR) from None
        return result


def fill_closed_streams() -> None:
    """Standard streams that the caller closed (`>&-`) lead nowhere; no file opened later gets their number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # the lowest free number, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def show_error(error: Exception) -> None:
    err.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)


def end_with(error: OSError) -> NoReturn:
    """Exit because of an error that came before any command."""
    _detach_stdout()
    show_error(error)
    sys.exit(EXIT_ERROR)


def _detach_stdout() -> None:
    """The reader is gone: what is still buffered must not raise again when the interpreter exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def quiet_third_parties() -> None:
    """Warnings and progress bars of torch and transformers say nothing that a user of the command can act on."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("torch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if "transformers" in sys.modules:
        sys.modules["transformers"].logging.set_verbosity_error()


def say_sampling(defaults: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """On stderr: what is sampled with, as the model's makers said, and nobody else."""
    from pagebinder.sampling_defaults import described

    if taken := {name: value for name, value in defaults.items() if name not in asked}:
        err.print(
            f"sampling as the model's makers say, unless asked otherwise: {described(taken)}", soft_wrap=True
        )


def checkpoint_dir(path: Path) -> Path:
    """Refuse a missing directory before anything heavy is imported. A file that holds a model is as good."""
    from pagebinder.errors import CheckpointError

    if path.is_dir() or (path.suffix.lower() in (".onnx", ".gguf") and path.is_file()):
        return path
    if path.exists():
        raise CheckpointError(
            f"{path} is a file. Give the checkpoint directory that holds config.json, or a file *.onnx or *.gguf."
        )
    raise CheckpointError(
        f"{path} does not exist. Give a local checkpoint directory with a config.json; nothing is downloaded "
        "(for a model of the Hugging Face hub: hf download ORG/NAME --local-dir DIR)."
    )


def output_file(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before the work whose result it is to hold."""
    if path is None:
        return None
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: give the file to write.")
    is_device = path.is_relative_to("/dev")
    check_folder((path if is_device else Path(os.path.realpath(path))).parent)
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigError(f"{path} may not be written.")
    return path


def check_folder(path: Path, *, new: bool = False) -> None:
    """Raises ConfigError where no file could be written. `new`: folders that are missing will be made."""
    while new and not path.exists() and path != path.parent:
        path = path.parent
    if not path.exists():
        raise ConfigError(f"{path} does not exist; create it first.")
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory.")
    try:  # what permissions say is not all: file systems may be read-only, or full
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written to: {error.strerror}.") from error


def show(renderable: RenderableType) -> None:
    """Print to stdout: as wide as the terminal, or as plain lines of PLAIN_WIDTH for pipes and files."""
    if out.is_terminal:
        out.print(renderable)
        return
    plain = Console(file=io.StringIO(), width=PLAIN_WIDTH, color_system=None)
    plain.print(renderable)
    print("\n".join(line.rstrip() for line in plain.file.getvalue().splitlines()), flush=True)


@contextlib.contextmanager
def working(message: str) -> Iterator[Callable[[str], None]]:
    """A spinner with the step's name on a terminal, nothing elsewhere. Yields a function that renames the step."""
    if not err.is_terminal:
        yield lambda message: None
        return
    with err.status(f"{message} ...") as status:
        yield lambda message: status.update(f"{message} ...")


def compile_dir(
    path: Path, config_options: dict, *, needs_tokenizer: bool = False, checkpoint: Path | None = None
):
    """Load and compile a checkpoint directory, or load an artefact, with progress; returns a CompiledModel.

    checkpoint: where the weights of an artefact are now.

    Raises:
        ConfigError: `checkpoint` is given, and no artefact.
        RequestError: a tokenizer is needed and the directory has none (said before the seconds of compilation).
    """
    from pagebinder.artefacts.files import is_artefact

    if is_artefact(path):
        from pagebinder.commands.artefact import open_artefact

        return open_artefact(path, config_options, needs_tokenizer=needs_tokenizer, checkpoint=checkpoint)
    if checkpoint is not None:
        raise ConfigError(
            f"--checkpoint says where the weights of an artefact are, and {path} is no artefact: leave it out."
        )
    with working("importing torch") as step:
        from pagebinder.compile import compile_model
        from pagebinder.config import CompileConfig
        from pagebinder.errors import RequestError
        from pagebinder.frontend.model_path import tokenizer_problem

        def on_stage(name: str) -> None:
            quiet_third_parties()  # again: transformers is imported by now
            if name == "capture" and needs_tokenizer and (problem := tokenizer_problem(path)):
                raise RequestError(
                    f"{problem}, so prompts and stop strings cannot be text: give --prompt-ids "
                    "(--encoder-prompt-ids) and --stop-token-id."
                )
            step(STAGES.get(name, name))

        return compile_model(path, CompileConfig(**config_options), on_stage=on_stage)


def printable(text: str) -> str:
    """Without control characters: a model may emit escape codes, and a terminal must not obey them."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))
