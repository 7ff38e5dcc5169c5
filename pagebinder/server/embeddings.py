"""POST /v1/embeddings: one vector for each text or list of token ids, by a compiled encoder."""

from __future__ import annotations

import asyncio
import base64
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pagebinder.errors import RequestError
from pagebinder.runtime.request_checks import prompt_list
from pagebinder.server.protocol import MOST_PROMPTS, EmbeddingBody

FORMATS = ("float", "base64")


class Embeddings:
    """`encoder`: a CompiledEncoder; requests take turns, each as batches of its own."""

    def __init__(self, encoder: Any, model: str, pooling: str) -> None:
        self.encoder, self.model, self.pooling = encoder, model, pooling
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pagebinder-encoder")

    async def embed(self, body: EmbeddingBody) -> dict[str, Any]:
        if body.encoding_format not in FORMATS:
            raise RequestError(f"encoding_format={body.encoding_format!r}: use one of {', '.join(FORMATS)}.")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._embed, body)

    def _embed(self, body: EmbeddingBody) -> dict[str, Any]:
        inputs = prompt_list(body.input)
        if len(inputs) > MOST_PROMPTS:
            raise RequestError(f"{len(inputs)} inputs: give {MOST_PROMPTS} at most.")
        ids = self.encoder.token_ids(inputs, truncate=body.truncate)
        vectors = self.encoder.embed(ids, pooling=self.pooling).float().cpu().numpy()
        if body.encoding_format == "base64":  # of float32, little endian
            values = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        else:
            values = vectors.tolist()
        data = [{"object": "embedding", "index": i, "embedding": value} for i, value in enumerate(values)]
        num_tokens = sum(map(len, ids))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}
