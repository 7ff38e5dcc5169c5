"""vLLM's CPU engine as a worker, see worker.py: the engine in this process, without tokenizer."""

import os

from worker import options, serve

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_NUM_OF_RESERVED_CPU="0", VLLM_LOGGING_LEVEL="ERROR"
)


class Vllm:
    def __init__(self, o: dict) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, o["kv_bytes"] >> 30))
        if o["threads"] < os.cpu_count():  # else it takes all cores, whatever OMP_NUM_THREADS says
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{o['threads'] - 1}"
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.params = SamplingParams
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=o["model"], skip_tokenizer_init=True, dtype=o["dtype"], max_model_len=o["max_model_len"],
                max_num_batched_tokens=o["max_num_batched_tokens"], max_num_seqs=o["max_num_seqs"],
                enable_prefix_caching=False, disable_log_stats=True,
            )
        )  # fmt: skip
        self.lengths: dict[int, int] = {}
        self.names = 0
        self.request_of: dict[str, int] = {}

    def add(self, request: int, prompt: list[int], max_tokens: int) -> None:
        name = f"n{self.names}"
        self.names += 1
        self.request_of[name], self.lengths[request] = request, 0
        params = self.params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> dict[int, list[int]]:
        new = {}
        for output in self.engine.step():
            request, tokens = self.request_of[output.request_id], output.outputs[0].token_ids
            new[request] = list(tokens[self.lengths[request] :])
            self.lengths[request] = len(tokens)
        return new

    def busy(self) -> bool:
        return self.engine.has_unfinished_requests()


if __name__ == "__main__":
    serve(Vllm(options()))
