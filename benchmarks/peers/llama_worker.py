"""llama.cpp as a worker, see worker.py: its library through ctypes, one sequence for each request.

llama.cpp has no scheduler of its own in the library: each step here decodes one token for every running request, or
computes the prompts that wait, as many as `max_num_batched_tokens` holds. The next token is the largest logit.
"""

import ctypes

import llama_cpp as lib
import numpy as np
from worker import options, serve


class Llama:
    def __init__(self, o: dict) -> None:
        lib.llama_backend_init()
        model_params = lib.llama_model_default_params()
        self.model = lib.llama_model_load_from_file(o["gguf"].encode(), model_params)
        params = lib.llama_context_default_params()
        params.n_seq_max = o["max_num_seqs"]
        params.n_ctx = o["max_num_seqs"] * o["max_model_len"]
        params.n_batch = params.n_ubatch = o["max_num_batched_tokens"]
        params.n_threads = params.n_threads_batch = o["threads"]
        params.kv_unified = False
        self.context = lib.llama_init_from_model(self.model, params)
        assert self.context, "llama.cpp made no context"
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.budget = o["max_num_batched_tokens"]
        self.rows = lib.llama_batch_init(self.budget, 0, 1)
        self.free = list(range(o["max_num_seqs"]))[::-1]
        self.waiting: list[tuple[int, list[int], int]] = []
        self.running: dict[
            int, list[int]
        ] = {}  # request -> [sequence, tokens in the cache, last token, tokens left]

    def add(self, request: int, prompt: list[int], max_tokens: int) -> None:
        self.waiting.append((request, prompt, max_tokens))

    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> dict[int, list[int]]:
        rows: list[
            tuple[int, int, int, bool]
        ] = []  # token, position, sequence, whether its logits are wanted
        sampling: list[int] = []
        if self.waiting and self.free:
            while self.waiting and self.free and len(rows) + len(self.waiting[0][1]) <= self.budget:
                request, prompt, max_tokens = self.waiting.pop(0)
                sequence = self.free.pop()
                rows += [(t, i, sequence, i == len(prompt) - 1) for i, t in enumerate(prompt)]
                self.running[request] = [sequence, len(prompt), 0, max_tokens]
                sampling.append(request)
        else:
            for request, state in self.running.items():
                rows.append((state[2], state[1], state[0], True))
                state[1] += 1
                sampling.append(request)
        return self._decode(rows, sampling)

    def _decode(self, rows: list[tuple[int, int, int, bool]], sampling: list[int]) -> dict[int, list[int]]:
        batch = self.rows
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        status = lib.llama_decode(self.context, batch)
        assert status == 0, f"llama_decode returned {status}"
        new = {}
        wanted = (i for i, row in enumerate(rows) if row[3])
        for request, i in zip(sampling, wanted):
            logits = lib.llama_get_logits_ith(self.context, i)
            values = np.ctypeslib.as_array(
                ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self.vocab_size,)
            )
            token = int(values.argmax())
            state = self.running[request]
            state[2], state[3] = token, state[3] - 1
            new[request] = [token]
            if state[3] == 0:
                lib.llama_memory_seq_rm(lib.llama_get_memory(self.context), state[0], -1, -1)
                self.free.append(state[0])
                del self.running[request]
        return new


if __name__ == "__main__":
    serve(Llama(options()))
