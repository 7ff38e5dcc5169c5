"""`pagebinder kv-picture`: the KV-cache pool over time, drawn from an event log."""

from pathlib import Path
from typing import Annotated

import typer

from pagebinder.commands.support import err, given_path, output_file, working


def kv_picture(
    log: Annotated[
        Path,
        typer.Argument(
            metavar="LOG", parser=given_path, help="An event log: engine.record_events(), then log.save(LOG)."
        ),
    ],
    picture: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            parser=given_path,
            callback=output_file,
            help="The picture to write: a .svg, .png or .pdf file.",
        ),
    ],
) -> None:
    """Draw who held the KV-cache blocks over time, with hits, evictions and waste. Needs matplotlib."""
    with working("drawing"):
        from pagebinder.runtime.kv.event_log import KVEventLog
        from pagebinder.runtime.kv.picture import draw_pool

        draw_pool(KVEventLog.load(log), picture)
    err.print(f"wrote {picture}")
