"""Pagebinder as a worker, see worker.py."""

from worker import options, serve

from pagebinder import CompileConfig, EngineConfig, SamplingParams, compile_model


class Pagebinder:
    def __init__(self, o: dict) -> None:
        config = CompileConfig(**o.get("compile", {}))
        self.engine = compile_model(o["model"], config).engine(
            EngineConfig(
                max_num_seqs=o["max_num_seqs"], max_num_batched_tokens=o["max_num_batched_tokens"],
                prefix_caching=False, kv_cache_bytes=o["kv_bytes"],
            )
        )  # fmt: skip
        self.lengths: dict[int, int] = {}

    def add(self, request: int, prompt: list[int], max_tokens: int) -> None:
        self.lengths[request] = 0
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.engine.add_request(str(request), prompt, params)

    def step(self) -> dict[int, list[int]]:
        new = {}
        for output in self.engine.step():
            request = int(output.request_id)
            new[request] = list(output.token_ids[self.lengths[request] :])
            self.lengths[request] = len(output.token_ids)
        return new

    def busy(self) -> bool:
        return self.engine.has_unfinished


if __name__ == "__main__":
    serve(Pagebinder(options()))
