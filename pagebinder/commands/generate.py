"""`pagebinder generate`: prompts from the command line, outputs as a stream, as blocks or as JSON lines."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pagebinder.commands.support import err, out, printable

if TYPE_CHECKING:
    from pagebinder.guides import Choice, Grammar, JsonSchema, Regex

MAX_TITLE_CHARS = 80


def read_pairs(
    texts: list[str], ids: list[str], encoder_texts: list[str], encoder_ids: list[str]
) -> tuple[list, list]:
    """Prompts and encoder prompts, equally many; None where there is none."""
    if not encoder_texts and not encoder_ids:
        prompts = read_prompts(texts, ids)
        return prompts, [None] * len(prompts)
    if (texts + encoder_texts).count("-") > 1:
        raise typer.BadParameter('only one prompt can be "-" (stdin).')
    encoder_prompts = read_prompts(encoder_texts, encoder_ids)
    prompts = read_prompts(texts, ids) if texts or ids else [None] * len(encoder_prompts)
    if len(prompts) != len(encoder_prompts):
        raise typer.BadParameter(
            f"{len(encoder_prompts)} encoder prompts but {len(prompts)} prompts: give one each, or no prompts."
        )
    return prompts, encoder_prompts


def read_prompts(texts: list[str], ids: list[str]) -> list[str | list[int]]:
    """Texts ("-" is stdin) and comma-separated token ids, in this order."""
    if not texts and not ids:
        raise typer.BadParameter(
            "give at least one --prompt or --prompt-ids (an encoder-decoder: --encoder-prompt)."
        )
    if texts.count("-") > 1:
        raise typer.BadParameter('only one --prompt can be "-" (stdin).')
    texts = [utf8(_stdin() if text == "-" else text, "prompt") for text in texts]
    try:
        return texts + [[int(i) for i in text.split(",")] for text in ids]
    except ValueError:
        raise typer.BadParameter(
            '--prompt-ids takes whole numbers with commas, for example "1,2,3".'
        ) from None


def guide_of(
    json_schema: Path | None, regex: str | None, choice: list[str] | None, grammar: Path | None
) -> JsonSchema | Regex | Choice | Grammar | None:
    """What the text must look like, as the options have it."""
    from pagebinder.guides import Choice, Grammar, JsonSchema, Regex

    makers = {
        "--json-schema": lambda: JsonSchema(_read_file(json_schema, "--json-schema")),
        "--regex": lambda: Regex(utf8(regex, "expression")),
        "--choice": lambda: Choice([utf8(text, "choice") for text in choice]),
        "--grammar": lambda: Grammar(_read_file(grammar, "--grammar")),
    }
    given = [name for name, value in zip(makers, (json_schema, regex, choice, grammar)) if value]
    if len(given) > 1:
        raise typer.BadParameter(f"{' and '.join(given)}: a text is guided by one of them.")
    return makers[given[0]]() if given else None


def _read_file(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise typer.BadParameter(f"{option}: {path} cannot be read: {error}") from error


def utf8(text: str, name: str) -> str:
    """A text that is UTF-8 whatever the locale makes of it: bytes that it has no characters for are halves of
    surrogate pairs. `name`: what a message calls it."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise typer.BadParameter(f"the {name} is not valid UTF-8.") from None


def _stdin() -> str:
    """All of stdin, but the newline that `echo` and editors put at the end."""
    if sys.stdin is None:
        raise typer.BadParameter('"-" reads the prompt from stdin, which is closed.')
    return sys.stdin.buffer.read().decode("utf-8", "surrogateescape").removesuffix("\n")


def print_outputs(engine, prompts, encoder_prompts, params, *, as_json: bool) -> None:
    """Run the prompts to the end, printing on the way; a line of statistics goes to a terminal's stderr."""
    outputs = _outputs(engine, prompts, encoder_prompts, params)
    titles = [p if e is None else e for p, e in zip(prompts, encoder_prompts)]
    if as_json:
        _print_json(outputs, titles)
    elif len(prompts) == params.n == 1:
        _print_stream(outputs)
    else:
        _print_finished(outputs, titles, params.n)
    if err.is_terminal:
        stats = engine.stats()
        hits = f"{stats.prefix_hit_tokens} of {stats.prefix_queried_tokens} prompt tokens from the cache"
        speed = f"{stats.generated_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s"
        guesses = f"; {stats.accepted_tokens} of {stats.drafted_tokens} guesses were right"
        err.print(f"{speed}; {hits}{guesses if stats.drafted_tokens else ''}", style="dim")


def _outputs(engine, prompts, encoder_prompts, params):
    """Yields (prompt's index, sample's index, output) each time a request gets a token."""
    places = {}
    for index, (prompt, encoder_prompt) in enumerate(zip(prompts, encoder_prompts)):
        # Not one seed for all: equal noise would make the continuations of similar prompts alike.
        own = dataclasses.replace(params, seed=params.seed + index * params.n)
        ids = engine.add_request(f"prompt-{index}", prompt, own, encoder_prompt=encoder_prompt)
        places |= {request_id: (index, sample) for sample, request_id in enumerate(ids)}
    while engine.has_unfinished:
        for output in engine.step():
            yield *places[output.request_id], output


def _text(output) -> str:
    """What to show of an output: its text, or its token ids if the model has no tokenizer."""
    text = " ".join(map(str, output.token_ids)) if output.text is None else output.text
    return printable(text) if out.is_terminal else text


def _print_stream(outputs) -> None:
    num_shown = 0
    try:
        for _, _, output in outputs:
            text = _text(output)
            print(text[num_shown:], end="", flush=True)
            num_shown = len(text)
    finally:  # what Ctrl-C or an error says begins on a line of its own
        if num_shown:
            print()


def _print_finished(outputs, prompts, n: int) -> None:
    for index, sample, output in outputs:
        if output.finished:
            name = f"[{index}]" if n == 1 else f"[{index}, sample {sample}]"
            print(f"--- {name} {_title(prompts[index])}")
            print(_text(output), flush=True)


def _title(prompt) -> str:
    """The beginning of a prompt on one line."""
    line = " ".join((prompt if isinstance(prompt, str) else str(prompt)).split())
    return printable(line if len(line) <= MAX_TITLE_CHARS else line[: MAX_TITLE_CHARS - 3] + "...")


def _print_json(outputs, prompts) -> None:
    for index, sample, output in outputs:
        if output.finished:
            prompt = prompts[index] if isinstance(prompts[index], str) else None
            line = {"index": index, "sample": sample, "prompt": prompt, **dataclasses.asdict(output)}
            print(json.dumps(line), flush=True)
