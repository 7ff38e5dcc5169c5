"""The continuous-batching engine: schedule -> plan -> run -> sample -> publish, once per `step()`.

add_request --> waiting --> running --> finished --> RequestOutput
                   ^           |
                   +-preempted-+        (its blocks go back; nothing it generated is lost)
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pagebinder.config import EngineConfig, SamplingParams
from pagebinder.errors import CacheCapacityError, RequestError
from pagebinder.runtime.arena import KVArena
from pagebinder.runtime.detokenizer import Detokenizer
from pagebinder.runtime.executables import Executable
from pagebinder.runtime.interrupts import deferred_interrupts
from pagebinder.runtime.kv import KVCacheManager, KVPlan
from pagebinder.runtime.outputs import EngineStats, RequestOutput
from pagebinder.runtime.request import Request
from pagebinder.runtime.request_checks import Prompt, check_params, prompt_token_ids
from pagebinder.runtime.sampler import SampledToken, SamplingRow, sample
from pagebinder.runtime.scheduler import Scheduler
from pagebinder.runtime.step_plan import StepPlanner

DEFAULT_KV_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """What an engine needs of a compiled model: something to run, a cache plan, and the facts of its tokens."""

    executable: Executable
    kv_plan: KVPlan
    states: tuple
    device: torch.device
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    tokenizer: object | None


@dataclass(slots=True)
class _Live:
    """A request the engine works on, with what only the engine knows of it."""

    request: Request
    params: SamplingParams
    seed: int
    detokenizer: Detokenizer | None
    logprobs: list[dict[int, float]] | None


class Engine:
    """Serves many requests at once over one KV cache. Not thread safe: one thread steps it.

    Bad requests raise before anything changes. An exception or Ctrl-C inside `generate` or `stream` aborts the
    requests of that call; the engine stays usable. Ctrl-C takes effect between steps, never inside one.
    """

    def __init__(self, model: EngineModel, config: EngineConfig | None = None) -> None:
        self.model = model
        self.config = config or EngineConfig()
        self.arena = KVArena(model.kv_plan, model.states, self._num_blocks(), model.device)
        self.kv = KVCacheManager(
            model.kv_plan.groups,
            self.arena.num_blocks,
            max_model_len=model.max_model_len,
            max_in_flight_tokens=self.config.max_num_batched_tokens,
            enable_caching=self.config.prefix_caching,
        )
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=model.max_model_len,
            policy=self.config.scheduling_policy,
            long_prefill_token_threshold=self.config.long_prefill_token_threshold,
        )
        self.planner = StepPlanner([g.block_size for g in model.kv_plan.groups], model.device)
        self._live: dict[str, _Live] = {}
        # Outputs belong to the `stream` or `generate` call that made the request, else to `step`.
        self._mailboxes: dict[str, deque[RequestOutput]] = {}
        self._undelivered: list[RequestOutput] = []
        self._ids = itertools.count()
        self._seeds = itertools.count()
        self._generated_tokens = 0
        self._seconds = dict.fromkeys(("schedule", "plan", "run", "sample", "publish"), 0.0)

    def _num_blocks(self) -> int:
        plan, config = self.model.kv_plan, self.config
        if config.num_kv_blocks is not None:
            num_blocks = config.num_kv_blocks
        elif config.kv_cache_bytes is not None:
            num_blocks = plan.num_blocks_for(config.kv_cache_bytes)
        else:
            per_request = plan.min_blocks(self.model.max_model_len, config.max_num_batched_tokens) - 1
            num_blocks = min(
                per_request * config.max_num_seqs + 1, plan.num_blocks_for(DEFAULT_KV_CACHE_BYTES)
            )
        if num_blocks < 2:
            raise CacheCapacityError(
                f"{num_blocks} KV block(s) of {plan.bytes_per_block:,} bytes are too few: block 0 is reserved, so "
                f"at least 2 are needed. Give num_kv_blocks >= 2 or kv_cache_bytes >= {2 * plan.bytes_per_block:,}."
            )
        return num_blocks

    # Requests

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[str]:  # fmt: skip
        """Queue a prompt: token ids, or text when the model has a tokenizer (which decides on a BOS token).

        Args:
            priority: smaller is served first (policy "priority"). cache_salt: requests with different salts
                never share cached blocks.
        Returns:
            the ids of the requests it became: [request_id], or with params.n > 1 "<request_id>-0", "-1", ...
        Raises:
            RequestError, CacheCapacityError: nothing was queued.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(priority, int):
            raise RequestError(f"priority={priority!r}: use a whole number, smaller is served first.")
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id={request_id!r}: use a non-empty string.")
        tokens = prompt_token_ids(prompt, self.model.tokenizer, self.model.vocab_size)
        check_params(params, self.model.tokenizer, self.model.vocab_size)
        ids = [request_id] if params.n == 1 else [f"{request_id}-{i}" for i in range(params.n)]
        taken = next((i for i in ids if i in self._live), None)
        if taken is not None:
            raise RequestError(f"Request id {taken!r} is already in use; choose another.")
        base = params.seed if params.seed is not None else self._fresh_seed()
        with deferred_interrupts():
            for sample_index, i in enumerate(ids):
                self._queue(i, tokens, params, base + sample_index, priority, cache_salt)
        return ids

    def _queue(self, request_id, tokens, params, seed, priority, cache_salt) -> None:
        room = max(1, self.model.max_model_len - len(tokens))
        request = Request(
            request_id,
            tokens,
            max_tokens=min(params.max_tokens or room, room),
            priority=priority,
            cache_salt=cache_salt,
            params=params,
        )
        self.scheduler.add_request(request)
        detokenizer = None
        if self.model.tokenizer is not None:
            detokenizer = Detokenizer(self.model.tokenizer.backend_tokenizer, params.stop)
        logprobs = [] if params.logprobs is not None else None
        self._live[request_id] = _Live(request, params, seed, detokenizer, logprobs)

    @deferred_interrupts()
    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request and free its blocks; returns what it had generated, or None if it is unknown."""
        live = self._live.pop(request_id, None)
        if live is None:
            return None
        self.scheduler.abort(request_id)
        self.planner.tables.drop(request_id)
        return self._output(live)

    @property
    def has_unfinished(self) -> bool:
        """Is there anything that a further `step` would compute or return?"""
        return bool(self._live or self._undelivered)

    # Stepping

    def step(self) -> list[RequestOutput]:
        """Run one step; returns an output for every request that got a token in it (all tokens so far).

        Requests of a running `stream` get theirs there. With nothing to do it returns []. If the model raises,
        no request is lost: the next step repeats the work.
        """
        if self._live:
            self._step()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    @deferred_interrupts()
    def _step(self) -> None:
        clock = _Clock(self._seconds)
        scheduled = self.scheduler.schedule()
        clock.lap("schedule")
        plan = self.planner.build(scheduled, self.kv.block_ids)
        clock.lap("plan")
        logits = self.model.executable.run({**plan.tensors, **self.arena.caches})
        clock.lap("run")
        lives = [self._live[request_id] for request_id in plan.sampling]
        rows = [
            SamplingRow(x.params, x.seed, x.request.all_token_ids, x.request.num_output_tokens) for x in lives
        ]
        sampled = sample(logits, rows)
        clock.lap("sample")
        self._publish(scheduled, lives, sampled)
        if self.config.check_integrity:
            self.scheduler.check_integrity()
        clock.lap("publish")

    def _publish(self, scheduled, lives: list[_Live], sampled: list[SampledToken]) -> None:
        stopped = {
            live.request.request_id: "stop" for live, token in zip(lives, sampled) if self._take(live, token)
        }
        tokens = {live.request.request_id: token.token_id for live, token in zip(lives, sampled)}
        finished = self.scheduler.update(scheduled, tokens, stopped)
        self._generated_tokens += len(tokens)
        for request in finished:
            self._live.pop(request.request_id)
            self.planner.tables.drop(request.request_id)
        for live in lives:
            self._mailboxes.get(live.request.request_id, self._undelivered).append(self._output(live))

    def _take(self, live: _Live, token: SampledToken) -> bool:
        """Note a new token; True if it ends the request (length limits are the scheduler's business)."""
        if live.logprobs is not None:
            live.logprobs.append(token.logprobs)
        params = live.params
        if token.token_id in params.stop_token_ids:
            return True
        if token.token_id in self.model.eos_token_ids and not params.ignore_eos:
            return True
        return live.detokenizer is not None and live.detokenizer.append(token.token_id)

    def _output(self, live: _Live) -> RequestOutput:
        request = live.request
        if request.is_finished and live.detokenizer is not None:
            live.detokenizer.finish()
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,  # shared: a copy per step would cost a prompt per token
            token_ids=list(request.output_token_ids),
            text=live.detokenizer.visible_text if live.detokenizer is not None else None,
            finished=request.is_finished,
            finish_reason=request.finish_reason,
            logprobs=list(live.logprobs) if live.logprobs is not None else None,
            num_cached_tokens=request.num_cached_tokens,
        )

    # Whole calls

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to the end; returns outputs in the order of the prompts (n > 1: n outputs per prompt)."""
        done: dict[str, RequestOutput] = {}
        ids = self._add_all(prompts, params)
        for output in self._run(ids):
            if output.finished:
                done[output.request_id] = output
        return [done[i] for i in ids]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields an output each time a request gets a token. Closing it aborts the rest."""
        return self._run(self._add_all(prompts, params))

    def _run(self, ids: list[str]) -> Iterator[RequestOutput]:
        mailbox: deque[RequestOutput] = deque()
        self._mailboxes.update(dict.fromkeys(ids, mailbox))
        reader = self._read(ids, mailbox)
        next(reader)  # enter its `try`, so that dropping it unread aborts the requests too
        return reader

    def _read(self, ids: list[str], mailbox: deque[RequestOutput]) -> Iterator[RequestOutput]:
        """Step until the requests are done; another stream that is read in between steps them too."""
        try:
            yield
            while mailbox or any(i in self._live for i in ids):
                if not mailbox:
                    self._step()
                while mailbox:
                    yield mailbox.popleft()
        finally:
            with deferred_interrupts():
                for i in ids:
                    self._mailboxes.pop(i, None)
                    self.abort(i)

    def _add_all(self, prompts, params) -> list[str]:
        if hasattr(prompts, "tolist"):  # a tensor or an array
            prompts = prompts.tolist()
        if not isinstance(prompts, (str, Sequence)):
            raise RequestError(f"Give a prompt or a list of prompts, not {type(prompts).__name__}.")
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if not isinstance(params, (list, tuple)):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts but {len(params)} sampling parameters; give one each."
            )
        ids: list[str] = []
        try:
            for prompt, p in zip(prompts, params):
                ids += self.add_request(self._fresh_id(), prompt, p)
        except BaseException:
            for i in ids:
                self.abort(i)
            raise
        return ids

    # State

    def stats(self) -> EngineStats:
        """Counters and present state; cheap, may be called every step."""
        counters, busy = self.scheduler.stats, sum(self._seconds.values())
        return EngineStats(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            num_blocks=self.arena.num_blocks,
            free_blocks=self.kv.num_free_blocks,
            kv_usage=self.kv.usage,
            prefix_queried_tokens=counters.prefix_queried_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            preemptions=counters.num_preemptions,
            steps=counters.num_steps,
            scheduled_tokens=counters.num_scheduled_tokens,
            generated_tokens=self._generated_tokens,
            busy_seconds=busy,
            tokens_per_second=self._generated_tokens / busy if busy else 0.0,
            finished_requests=counters.num_finished,
            step_seconds=dict(self._seconds),
        )

    def check_integrity(self) -> None:
        """Raise if any block is lost, owned twice, or held by a request that is gone."""
        self.scheduler.check_integrity()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False (and nothing done) while requests hold blocks."""
        return self.kv.reset_prefix_cache()

    def _fresh_id(self) -> str:
        return next(i for i in (f"request-{n}" for n in self._ids) if i not in self._live)

    def _fresh_seed(self) -> int:
        """A seed for a request that brings none: the engine's seed and a running number."""
        return self.config.seed * 1_000_003 + next(self._seeds)


class _Clock:
    """Adds the time since the last lap to a named counter."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] += now - self.last
        self.last = now
