"""The `pagebinder` command: demo, generate, serve, explain, compile, export, bench, doctor, bisect, kv-picture.

torch and transformers take seconds to import, so only the commands that need them do it.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from pagebinder.commands.bench import bench_command
from pagebinder.commands.bisect import bisect_command
from pagebinder.commands.compile import HtmlOption, compile_command, print_report
from pagebinder.commands.draft import DraftOption, MaxDraftOption, check_draft, drafter_of
from pagebinder.commands.export import export_command
from pagebinder.commands.kv import kv_picture
from pagebinder.commands.serve import serve_command
from pagebinder.commands.support import (
    ActivationQuantizationOption,
    ActivationScalesOption,
    CodedWeightsOption,
    Commands,
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
    end_with,
    fill_closed_streams,
    given_path,
    quiet_third_parties,
    say_sampling,
    show,
    working,
)

app = typer.Typer(
    cls=Commands,
    help="Compile an unmodified PyTorch decoder onto a paged KV cache, and run it with continuous batching.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

CheckpointArgument = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        parser=given_path,
        callback=checkpoint_dir,
        help="A checkpoint directory (config.json), or an ONNX file.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """The command, until it exits."""
    fill_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not so where somebody put another object in its place
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end the run
    try:
        app(prog_name="pagebinder")
    except OSError as error:  # of help and usage, which are printed where no command has begun
        end_with(error)


def _print_version(wanted: bool) -> None:
    if wanted:
        from pagebinder import __version__

        print(f"pagebinder {__version__}", flush=True)
        raise typer.Exit


@app.callback()
def common(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="PAGEBINDER_DEBUG", help="Show tracebacks and all warnings.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if not debug:
        quiet_third_parties()


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="tiny: a Llama; v4: a small DeepSeek-V4.")] = "tiny",
    device: DeviceOption = "auto",
    executable: ExecutableOption = "auto",
    quantization: QuantizationOption = None,
    activation_quantization: ActivationQuantizationOption = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per text.")] = 120,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Same seed, same texts.")] = 0,
) -> None:
    """Compile a small model that ships with Pagebinder and stream three texts that share their beginning."""
    from pagebinder.commands.demo import run_demo

    options = {
        "device": device, "executable": executable, "quantization": quantization,
        "activation_quantization": activation_quantization,
    }  # fmt: skip
    run_demo(model, options, max_tokens=max_tokens, temperature=temperature, seed=seed)


@app.command()
def explain(
    model: CheckpointArgument,
    html: HtmlOption = None,
    as_json: JsonOption = False,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt + output, in tokens.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV block.")] = None,
    kv_dtype: KvDtypeOption = "auto",
    index_dtype: IndexDtypeOption = "auto",
    quantization: QuantizationOption = None,
    activation_quantization: ActivationQuantizationOption = None,
) -> None:
    """What the compiler makes of a model: layers, KV cache, rewrites, providers. Needs config.json, no weights."""
    with working("explaining the model"):
        from pagebinder.compile import explain_model
        from pagebinder.config import CompileConfig

        config = CompileConfig(
            max_model_len=max_model_len,
            block_size=block_size,
            kv_dtype=kv_dtype,
            index_dtype=index_dtype,
            quantization=quantization,
            activation_quantization=activation_quantization,
        )
        report = explain_model(model, config).report
    print_report(report, as_json, html)


@app.command()
def doctor(
    as_json: JsonOption = False,
    kv: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=given_path,
            help="Print the KV cache plan of this checkpoint (config.json) instead.",
        ),
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(help="With --kv: a context length in tokens, like 8000 or 32k. May be repeated."),
    ] = None,
    memory: Annotated[
        list[str] | None, typer.Option(help="With --kv: memory for the cache, like 20GiB. May be repeated.")
    ] = None,
    workload: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=given_path,
            help="With --kv: TOML file, e.g. contexts = [[2000, 0.7], [8000, 0.3]].",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="With --kv: longest prompt + output, in tokens.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="With --kv: tokens per KV block.")] = None,
    kv_dtype: KvDtypeOption = "auto",
    index_dtype: IndexDtypeOption = "auto",
) -> None:
    """What this machine has, which providers it can use and why not the others; or a model's KV cache plan."""
    if kv is not None:
        from pagebinder.commands.plan import doctor_kv

        doctor_kv(
            checkpoint_dir(kv), contexts=context or [], memory=memory or [], workload=workload,
            max_model_len=max_model_len, block_size=block_size, kv_dtype=kv_dtype, index_dtype=index_dtype,
            as_json=as_json,
        )  # fmt: skip
        return
    if context or memory or workload or max_model_len or block_size or {kv_dtype, index_dtype} != {"auto"}:
        raise typer.BadParameter("these options are about a KV cache plan: add --kv DIR.")
    with working("looking around"):
        from pagebinder.doctor import examine, render

        facts = examine()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        show(render(facts))
    if not facts["can_run"]:
        raise typer.Exit(1)


@app.command()
def generate(
    model: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            parser=given_path,
            callback=checkpoint_dir,
            help="A checkpoint directory with weights, an ONNX file, or an artefact.",
        ),
    ],
    checkpoint: MovedOption = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help='A text, or "-" to read it from stdin. Repeat for several.')
    ] = None,
    prompt_ids: Annotated[
        list[str] | None, typer.Option(help='Token ids, "1,2,3". Repeat for several.')
    ] = None,
    encoder_prompt: Annotated[
        list[str] | None,
        typer.Option(help="What an encoder-decoder's encoder reads; it needs no --prompt then."),
    ] = None,
    encoder_prompt_ids: Annotated[list[str] | None, typer.Option(help="The same as token ids.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; the model's, else 1, as the next ones.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is off.")] = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    plain_sampling: PlainSamplingOption = False,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same tokens; prompt i draws from seed + i * n.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="A string that ends the text. May be repeated.")
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="A token that ends it. May be repeated.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", parser=given_path, help="The text is JSON of this schema.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="All of the text matches this expression.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="The text is one of these. May be repeated.")
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option(metavar="FILE", parser=given_path, help="In Lark's or GBNF's notation.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities per token; only with --json.")
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Samples per prompt.")] = 1,
    draft: DraftOption = None,
    max_draft_tokens: MaxDraftOption = None,
    device: DeviceOption = "auto",
    executable: ExecutableOption = "auto",
    dtype: DtypeOption = None,
    kv_cache_mib: Annotated[int | None, typer.Option(min=1, help="Size of the KV cache.")] = None,
    kv_dtype: KvDtypeOption = "auto",
    index_dtype: IndexDtypeOption = "auto",
    coded_weights: CodedWeightsOption = False,
    quantization: QuantizationOption = None,
    activation_quantization: ActivationQuantizationOption = None,
    activation_scales: ActivationScalesOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line as requests finish.")
    ] = False,
) -> None:
    """Continue one or more prompts. One prompt streams; several are printed as they finish."""
    from pagebinder.commands.generate import guide_of, print_outputs, read_pairs, utf8

    prompts, encoder_prompts = read_pairs(
        prompt or [], prompt_ids or [], encoder_prompt or [], encoder_prompt_ids or []
    )
    stops = tuple(utf8(text, "stop string") for text in stop or ())
    if logprobs is not None and not as_json:
        raise typer.BadParameter("log-probabilities are printed only with --json; add --json.")
    with working("importing torch"):
        from pagebinder import EngineConfig, SamplingParams
    check_draft(draft, max_draft_tokens)
    guide = guide_of(json_schema, regex, choice, grammar)
    sampling = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }  # fmt: skip
    sampling = {name: value for name, value in sampling.items() if value is not None} | {
        "max_tokens": max_tokens, "frequency_penalty": frequency_penalty, "presence_penalty": presence_penalty,
        "guide": guide, "seed": seed, "stop": stops, "stop_token_ids": tuple(stop_token_id or ()),
        "ignore_eos": ignore_eos, "logprobs": logprobs, "n": n,
    }  # fmt: skip
    params = SamplingParams(**sampling)  # what is wrong is said before the model is compiled
    has_text = bool(stop or guide) or any(isinstance(p, str) for p in prompts + encoder_prompts)
    options = {
        "device": device, "executable": executable, "dtype": dtype, "kv_dtype": kv_dtype, "index_dtype": index_dtype,
        "pack_weights": "coded" if coded_weights else None,
        "quantization": quantization, "activation_quantization": activation_quantization,
        "activation_scales": activation_scales,
    }  # fmt: skip
    compiled = compile_dir(model, options, needs_tokenizer=has_text, checkpoint=checkpoint)
    kv_cache_bytes = None if kv_cache_mib is None else kv_cache_mib << 20
    # No more sequences than there can be: the default cache has room for all of them at full length.
    max_num_seqs = min(64, len(prompts) * n)
    drafter = drafter_of(draft, model, options, max_num_seqs)
    limit = {} if max_draft_tokens is None else {"max_draft_tokens": max_draft_tokens}
    engine = compiled.engine(
        EngineConfig(kv_cache_bytes=kv_cache_bytes, max_num_seqs=max_num_seqs, drafter=drafter, **limit)
    )
    if not plain_sampling:
        params = compiled.sampling_params(**sampling)
        say_sampling(compiled.source.sampling_defaults, sampling)
    print_outputs(engine, prompts, encoder_prompts, params, as_json=as_json)


app.command("serve")(serve_command)
app.command("bench")(bench_command)
app.command("compile")(compile_command)
app.command("bisect")(bisect_command)
app.command("export")(export_command)
app.command("kv-picture")(kv_picture)
