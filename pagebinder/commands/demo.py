"""`pagebinder demo`: the shipped model continues three texts that share their beginning.

step 1      text 1: prefill of beginning + ending         fills the prefix cache
step 2 ..   texts 2 and 3 join while text 1 decodes       their beginning comes from the cache
"""

from collections import Counter

import typer
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pagebinder.commands.support import checkpoint_dir, compile_dir, out, printable, show, working

KV_CACHE_BYTES = 8 << 20
HEAD_START_STEPS = 8  # how long the first text runs alone
REPETITION_PENALTY = 1.1  # a model this small would otherwise go round in circles
MIN_PANEL_WIDTH = 34

BEGINNING = """# Programs, files and databases

This chapter shows how a program reads and writes data. The examples use the Python standard library on one side \
and a PostgreSQL server on the other. Each section starts with a short description of a function or of a command, \
followed by an example of its use and by a list of the errors that can occur. All examples assume that the server \
is running, and that the current user is allowed to create tables in the database. The modules are described in \
detail in the library reference, and the commands are described in the reference pages of the server. If you are \
new to the language, read the tutorial first: it introduces the basic data types, control flow, and functions.

"""
EXPLANATION = (
    "All texts begin like this. The model that continues them has a few million parameters: it knows the form of "
    "its two manuals, not the facts."
)
ENDINGS = {
    "Python": "## Reading a file\n\nThe `open()` function returns a file object. The first argument is",
    "SQL": "## Creating a table\n\nThe `CREATE TABLE` command creates a new table in the current database. The",
    "Errors": "## Handling errors\n\nIf an exception occurs while the file is being read, the",
}


def run_demo(model: str, config_options: dict, *, max_tokens: int, temperature: float, seed: int) -> None:
    """Compile, stream, and print what the engine and the compiler did. `model`: a key of `models.SHIPPED`."""
    with working("importing torch"):
        from pagebinder import EngineConfig, SamplingParams
        from pagebinder.models import SHIPPED

    if model not in SHIPPED:
        raise typer.BadParameter(f"{model!r} does not ship with Pagebinder; use {' or '.join(SHIPPED)}.")
    params = [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            repetition_penalty=REPETITION_PENALTY,
            seed=seed + index,
        )
        for index in range(len(ENDINGS))
    ]
    compiled = compile_dir(checkpoint_dir(SHIPPED[model]()), config_options, needs_tokenizer=True)
    engine = compiled.engine(EngineConfig(kv_cache_bytes=KV_CACHE_BYTES, max_num_seqs=len(ENDINGS)))
    tokenizer = compiled.source.tokenizer()
    prompts = [tokenizer(BEGINNING + ending)["input_ids"] for ending in ENDINGS.values()]
    peak_blocks = 0
    view = _Panels() if out.is_terminal else _Lines()
    with view:
        for outputs in _steps(engine, prompts, params):
            stats = engine.stats()
            peak_blocks = max(peak_blocks, _blocks_in_use(stats))
            view.show(outputs, stats)
    show(Group(Text("\nEngine", style="bold"), _engine_table(engine.stats(), peak_blocks)))
    show(Group(Text("\nCompiler", style="bold"), _compiler_table(compiled.report)))
    show(Text("\nMore: pagebinder explain DIR, pagebinder generate --model DIR --prompt TEXT", style="dim"))


def _steps(engine, prompts, params):
    """Run all prompts, the later ones joining the first; yields each step's outputs by prompt index."""
    first, *others = (str(i) for i in range(len(prompts)))
    engine.add_request(first, prompts[0], params[0])
    for _ in range(HEAD_START_STEPS):
        yield {int(o.request_id): o for o in engine.step()}
    for name in others:
        engine.add_request(name, prompts[int(name)], params[int(name)])
    while engine.has_unfinished:
        yield {int(o.request_id): o for o in engine.step()}


def _blocks_in_use(stats) -> int:
    return stats.num_blocks - 1 - stats.free_blocks  # block 0 is the null block


def _hits(stats) -> str:
    percent = 100 * stats.prefix_hit_tokens / max(1, stats.prefix_queried_tokens)
    return f"{stats.prefix_hit_tokens} of {stats.prefix_queried_tokens} prompt tokens ({percent:.0f} %)"


class _Lines:
    """For pipes and files: each line of a text as soon as it is complete, with the text's number."""

    def __init__(self) -> None:
        self.printed = [0] * len(ENDINGS)

    def __enter__(self):
        print(f"{BEGINNING}({EXPLANATION})\n")
        return self

    def __exit__(self, *exception) -> None:
        pass

    def show(self, outputs, stats) -> None:
        for index, output in outputs.items():
            text = list(ENDINGS.values())[index] + output.text
            complete = len(text) if output.finished else text.rfind("\n") + 1
            for line in filter(str.strip, text[self.printed[index] : complete].splitlines()):
                print(f"[{index + 1}] {line}", flush=True)
            self.printed[index] = max(complete, self.printed[index])


class _Panels:
    """For terminals: the texts side by side, growing, and the engine's state below."""

    def __init__(self) -> None:
        self.outputs: list = [None] * len(ENDINGS)
        self.stats = None
        self.live = Live(get_renderable=self.render, console=out, refresh_per_second=10)

    def __enter__(self):
        out.print(Text(BEGINNING, style="dim"), Text(f"{EXPLANATION}\n"), sep="")
        self.live.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self.live.__exit__(*exception)

    def show(self, outputs, stats) -> None:
        self.stats = stats
        for index, output in outputs.items():
            self.outputs[index] = output

    def render(self) -> Group:
        side_by_side = out.width >= MIN_PANEL_WIDTH * len(ENDINGS)
        width = out.width // len(ENDINGS) if side_by_side else out.width
        room = out.height - 3 if side_by_side else (out.height - 3) // len(ENDINGS)
        height = max(3, min(18, room))
        panels = [self._panel(index, width, height) for index in range(len(ENDINGS))]
        if side_by_side:
            grid = Table.grid()
            grid.add_row(*panels)
            panels = [grid]
        return Group(*panels, self._status())

    def _panel(self, index: int, width: int, height: int) -> Panel:
        output, (title, ending) = self.outputs[index], list(ENDINGS.items())[index]
        text = Text(ending, style="dim")
        caption = "waiting"
        if output is not None:
            text.append(printable(output.text), style="not dim")
            caption = f"{len(output.token_ids)} tokens, {output.num_cached_tokens} cached"
        lines = text.wrap(out, width - 4)
        body = Text("\n").join(lines[-(height - 2) :])
        return Panel(body, title=title, subtitle=caption, width=width, height=height)

    def _status(self) -> Text:
        if self.stats is None:
            return Text("starting")
        s = self.stats
        return Text(
            f"{s.tokens_per_second:.0f} tokens/s   {s.running} running, {s.waiting} waiting   {_blocks_in_use(s)} of "
            f"{s.num_blocks - 1} blocks   cache hits {_hits(s)}",
            no_wrap=True,
            overflow="ellipsis",
        )


def _facts() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    return table


def _engine_table(stats, peak_blocks: int) -> Table:
    table = _facts()
    seconds = f"{stats.busy_seconds:.1f} s in {stats.steps} steps"
    table.add_row(
        "speed", f"{stats.tokens_per_second:.1f} tokens/s ({stats.generated_tokens} tokens, {seconds})"
    )
    table.add_row("prefix cache", f"{_hits(stats)} were not computed again")
    table.add_row("KV blocks", f"{peak_blocks} of {stats.num_blocks - 1} in use at the peak")
    table.add_row("preemptions", str(stats.preemptions))
    return table


def _compiler_table(report) -> Table:
    """The report in a few lines; `pagebinder explain` prints all of it."""
    table = _facts()
    matches = Counter(match.pattern for match in report.matches)
    providers = "; ".join(f"{p.op}: {p.provider} ({p.num_nodes} nodes)" for p in report.providers)
    size = f"{report.num_parameters:,} parameters, {report.weight_bytes / 1e6:.1f} MB of {report.dtype}"
    table.add_row("model", f"{report.model_class}, {size}, on {report.device}")
    table.add_row("ops per level", " -> ".join(f"{level} {n}" for level, n in report.node_counts.items()))
    table.add_row("matched", ", ".join(f"{n} {pattern}" for pattern, n in matches.most_common()))
    table.add_row("refused", _refusals(report))
    table.add_row("providers", providers)
    table.add_row("executable", f"{report.executable} ({report.executable_why})")
    table.add_row("KV cache", f"{report.kv['bytes_per_token']:,.0f} bytes per token")
    table.add_row("time", ", ".join(f"{name} {s:.1f} s" for name, s in report.stage_seconds.items()))
    return table


def _refusals(report) -> str:
    kinds = Counter(f"{r.pattern}: {r.reason}" for r in report.refusals)
    return "; ".join(f"{n} x {kind}" for kind, n in kinds.most_common(3)) or "nothing"
