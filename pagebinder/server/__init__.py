"""An OpenAI-compatible HTTP server over one compiled model: `pagebinder serve`, or an ASGI application to embed.

    client --HTTP--> app.py --submit--> engine_worker.py --step--> Engine
                       ^                      |  a thread of its own: the event loop never waits for a step
                       +--- feeds.py <--------+  outputs, one wake-up a step

    app.py, api_key.py  the application: routes, errors, API key     protocol.py     what requests may say
    completions.py    texts and token ids -> continuations           answers.py      what they get back
    chat.py           messages -> prompt by the chat template        embeddings.py   texts -> vectors, of encoders
    prompt_limits.py  what is too large to be looked at
    token_texts.py    tokens as log-probabilities name them
    metrics.py        counters and latencies for Prometheus
    patient_server.py uvicorn, whose end running requests are told of

Needs the extra `serve` (FastAPI, uvicorn, prometheus-client).
"""

from __future__ import annotations

from pagebinder.errors import ConfigError

try:
    from pagebinder.server.app import create_app
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] == "pagebinder":
        raise
    raise ConfigError(f"The server needs {error.name}: pip install 'pagebinder[serve]'.") from error

__all__ = ["create_app"]
