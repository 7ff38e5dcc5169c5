"""transformers as a worker, see worker.py: `generate`, or `generate_batch`, which is its continuous batching."""

from __future__ import annotations

import time

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)
from worker import options, serve, summary


class Clock(StoppingCriteria):
    """Notes when each token was there; never stops anything."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Generate:
    """All prompts of a batch must be equally long."""

    def __init__(self, o: dict) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(o["model"], dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def batch(self, prompts: list[list[int]], max_tokens: int) -> dict:
        ids, clock = torch.tensor(prompts), Clock()
        start = time.perf_counter()
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, min_new_tokens=max_tokens,
            do_sample=False, stopping_criteria=StoppingCriteriaList([clock]), pad_token_id=0,
        )  # fmt: skip
        times = [t - start for t in clock.times]
        return summary([times] * len(prompts), out[:, ids.shape[1] :].tolist())


class GenerateBatch:
    """Cache and thread of its loop are kept from batch to batch."""

    def __init__(self, o: dict) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(o["model"], dtype=torch.bfloat16).eval()
        page = 256
        self.config = ContinuousBatchingConfig(
            page_size=page, num_blocks=o["max_num_seqs"] * -(-o["max_model_len"] // page),
            max_batch_tokens=o["max_num_batched_tokens"], max_requests_per_batch=o["max_num_seqs"],
            allow_block_sharing=False,
        )  # fmt: skip

    def batch(self, prompts: list[list[int]], max_tokens: int) -> dict:
        generation = GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        start = time.perf_counter()
        done = self.model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=self.config, record_timestamps=True,
            persistent_manager=True,
        )  # fmt: skip
        outputs = list(done.values())  # in the order of the prompts
        times = [[t - start for t in output.timestamps] for output in outputs]
        return summary(times, [output.generated_tokens for output in outputs])


if __name__ == "__main__":
    asked = options()
    torch.set_num_threads(asked["threads"])
    serve((GenerateBatch if asked["continuous"] else Generate)(asked))
