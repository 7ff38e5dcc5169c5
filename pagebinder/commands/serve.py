"""`pagebinder serve`: a model behind an OpenAI-compatible HTTP server."""

import secrets
import socket
from pathlib import Path
from typing import Annotated

import typer

from pagebinder.commands.draft import DraftOption, MaxDraftOption, check_draft, drafter_of
from pagebinder.commands.support import (
    ActivationQuantizationOption,
    ActivationScalesOption,
    CodedWeightsOption,
    DeviceOption,
    DtypeOption,
    ExecutableOption,
    IndexDtypeOption,
    KvDtypeOption,
    MovedOption,
    PlainSamplingOption,
    QuantizationOption,
    checkpoint_dir,
    compile_dir,
    err,
    given_path,
    say_sampling,
    working,
)

BACKLOG = 2048  # connections that wait to be taken


def serve_command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            parser=given_path,
            callback=checkpoint_dir,
            help="A checkpoint directory with weights, an ONNX file, or an artefact.",
        ),
    ],
    checkpoint: MovedOption = None,
    host: Annotated[str, typer.Option(help="0.0.0.0: reachable from other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model; else its directory's.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="PAGEBINDER_API_KEY", help="Clients must bring it as a bearer token."),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", parser=given_path, help="A Jinja file, in place of the checkpoint's template."
        ),
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt + output, in tokens.")] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Requests that run at once (64); others wait.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a step at most (2,048).")
    ] = None,
    prompt_embeds: Annotated[
        int,
        typer.Option(
            min=0, help="Serve images: room for the embeddings of so many of their parts at a time."
        ),
    ] = 0,
    kv_cache_mib: Annotated[int | None, typer.Option(min=1, help="Size of the KV cache.")] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the state of equal prefixes.")] = True,
    seed: Annotated[
        int | None, typer.Option(help="Of requests that bring none; else other tokens at each start.")
    ] = None,
    pooling: Annotated[str, typer.Option(help="Of an encoder: auto, mean, max, cls or lasttoken.")] = "auto",
    shutdown_seconds: Annotated[
        int, typer.Option(min=0, help="How long running requests may go on after Ctrl-C.")
    ] = 5,
    plain_sampling: PlainSamplingOption = False,
    draft: DraftOption = None,
    max_draft_tokens: MaxDraftOption = None,
    device: DeviceOption = "auto",
    executable: ExecutableOption = "auto",
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = "auto",
    index_dtype: IndexDtypeOption = "auto",
    coded_weights: CodedWeightsOption = False,
    quantization: QuantizationOption = None,
    activation_quantization: ActivationQuantizationOption = None,
    activation_scales: ActivationScalesOption = None,
) -> None:
    """Serve a model over HTTP as OpenAI's API does: completions, chat, embeddings of encoders, with streaming."""
    with working("importing the server"):
        from pagebinder.config import EngineConfig
        from pagebinder.server import create_app
    check_draft(draft, max_draft_tokens)
    template = None if chat_template is None else _read(chat_template)
    listening = _listen(host, port)  # said before the seconds of compilation
    options = {
        "device": device, "executable": executable, "dtype": dtype, "kv_dtype": kv_dtype, "index_dtype": index_dtype,
        "quantization": quantization, "activation_quantization": activation_quantization,
        "pack_weights": "coded" if coded_weights else None,
        "activation_scales": activation_scales, "max_model_len": max_model_len,
        "prompt_embeds": prompt_embeds,
    }  # fmt: skip
    compiled = compile_dir(model, options, checkpoint=checkpoint)
    drafter = drafter_of(draft, model, options, max_num_seqs or EngineConfig().max_num_seqs)
    with working("making room for the KV cache"):
        given = {
            "kv_cache_bytes": None if kv_cache_mib is None else kv_cache_mib << 20, "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens, "prefix_caching": None if prefix_caching else False,
            "seed": seed, "drafter": drafter, "max_draft_tokens": max_draft_tokens,
        }  # fmt: skip
        given = {name: value for name, value in given.items() if value is not None}
        if hasattr(compiled, "embed"):
            config = EngineConfig(**given) if given else None  # which is refused
        else:
            config = EngineConfig(**{"seed": secrets.randbits(31)} | given)
        app = create_app(
            compiled, config,
            model_name=name or model.resolve().name, api_key=api_key, chat_template=template, pooling=pooling,
            sampling_defaults=not plain_sampling,
        )  # fmt: skip
    _run(app, listening, shutdown_seconds)


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises OSError: the address is not ours, or taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise OSError(f"{host}:{port} cannot be listened on: {error.strerror or error}.") from error


def _read(path: Path) -> str:
    """Raises ConfigError, OSError: it cannot be read."""
    from pagebinder.errors import ConfigError

    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}.") from error


def _run(app, listening: socket.socket, shutdown_seconds: int) -> None:
    """Serve until Ctrl-C or SIGTERM, which let running requests go on for a while; a second one ends them."""
    from pagebinder.server.patient_server import PatientServer

    host, port = listening.getsockname()[:2]
    where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    text = f"serving {app.state.model_name} at {where}/v1 (API: {where}/docs); Ctrl-C stops"
    say_sampling(getattr(app.state, "sampling", {}), {})
    server = PatientServer(app, shutdown_seconds, on_ready=lambda: err.print(text, soft_wrap=True))
    server.run(sockets=[listening])
    err.print("stopped")
