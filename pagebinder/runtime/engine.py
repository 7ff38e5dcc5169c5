"""The continuous-batching engine: schedule -> plan -> run -> sample -> publish, once per `step()`.

add_request --> waiting --> running --> finished --> RequestOutput
                   ^           |
                   +-preempted-+        (its blocks go back; nothing it generated is lost)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator

import numpy as np

from pagebinder.ambient import untraced
from pagebinder.config import EngineConfig, SamplingParams
from pagebinder.config_checks import check_unicode
from pagebinder.custom_ops.cpu.freed_memory import keep_freed_memory
from pagebinder.errors import RequestError
from pagebinder.forks import NotPickled
from pagebinder.interrupts import deferred_interrupts
from pagebinder.runtime.arena import KVArena
from pagebinder.runtime.encoder_prompts import decoder_prompt, encoder_fields
from pagebinder.runtime.engine_setup import (
    EngineModel,
    in_flight_tokens,
    max_encoder_tokens,
    mixed_prefill_tokens,
    retention,
    steps_in_flight,
    swap_space,
)
from pagebinder.runtime.engine_stats import StepClock, collect_stats
from pagebinder.runtime.guide_book import GuideBook
from pagebinder.runtime.kv import KVCacheManager
from pagebinder.runtime.kv.event_log import KVEventLog
from pagebinder.runtime.kv.event_recorder import KVEventRecorder
from pagebinder.runtime.live_requests import AHEAD, QUIET, LiveRequest
from pagebinder.runtime.memory_plan import plan_memory
from pagebinder.runtime.outputs import EngineStats, RequestOutput
from pagebinder.runtime.prompt_parts import release
from pagebinder.runtime.request import Request, RequestStatus
from pagebinder.runtime.request_checks import (
    Prompt,
    check_id,
    check_params,
    whole_priority,
)
from pagebinder.runtime.sampler import prepare as prepare_sampling
from pagebinder.runtime.scheduler import Scheduler
from pagebinder.runtime.scheduler_output import SchedulerOutput
from pagebinder.runtime.step_loop import StepLoop
from pagebinder.runtime.step_tokens import StepTokens
from pagebinder.runtime.turns import Turns, in_turn
from pagebinder.runtime.whole_calls import WholeCalls


class Engine(WholeCalls, NotPickled):
    """Serves many requests at once over one KV cache.

    Several threads may use it: they take turns, a step or a change at a time (a beam search as a whole), and whoever
    steps computes for all.

    Bad requests raise before anything changes. An exception or Ctrl-C inside `generate` or `stream` aborts the
    requests of that call; the engine stays usable. Ctrl-C and the handlers of other signals that stop programs
    (SIGALRM, SIGTERM, ...) take effect between steps, never inside one.
    """

    def __init__(self, model: EngineModel, config: EngineConfig | None = None) -> None:
        self.model = model
        self.config = config or EngineConfig()
        prepare_sampling(model.device)
        self.memory = plan_memory(model, self.config)
        if model.device.type == "cpu":
            keep_freed_memory()
        self.arena = KVArena(model.kv_plan, model.states, self.memory.num_blocks, model.device)
        self.swap_policy, self.host_blocks = swap_space(self.arena, self.config)
        self.kv = KVCacheManager(
            model.kv_plan.groups,
            self.arena.num_blocks,
            max_model_len=model.max_model_len,
            max_in_flight_tokens=in_flight_tokens(model, self.config),
            enable_caching=self.config.prefix_caching,
            retention=retention(self.config.prefix_retention),
            max_encoder_tokens=max_encoder_tokens(model, self.config),
            host_blocks=self.host_blocks,
        )
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=model.max_model_len,
            policy=self.config.scheduling_policy,
            long_prefill_token_threshold=self.config.long_prefill_token_threshold,
            mixed_prefill_tokens=mixed_prefill_tokens(model, self.config),
            max_steps_in_flight=steps_in_flight(model, self.config),
            ahead_flags=AHEAD,
            swap_policy=self.swap_policy,
        )
        self._turns, self._in_step = Turns(), False
        self._live: dict[str, LiveRequest] = {}
        self.guides = GuideBook(model.tokenizer, model.vocab_size, model.eos_token_ids)
        self.loop = StepLoop(model, self.config, self.scheduler, self.arena, self._live)
        # Outputs belong to the `stream` or `generate` call that made the request, else to `step`.
        self._mailboxes: dict[str, deque[RequestOutput]] = {}
        self._undelivered: list[RequestOutput] = []
        self._to_abort: dict[str, LiveRequest] = {}  # when the step that chooses tokens has been published
        self._ids = itertools.count()
        self._seeds = itertools.count()
        self.generated_tokens = 0

    # Requests

    def add_request(
        self, request_id: str, prompt: Prompt | None = None, params: SamplingParams | None = None, *,
        encoder_prompt: Prompt | None = None, priority: int = 0, cache_salt: str | None = None,
    ) -> list[str]:  # fmt: skip
        """Queue a prompt: token ids, or text when the model has a tokenizer (which decides on a BOS token).

        Args:
            prompt: also a list of token ids, texts and embeddings (tensors [tokens, width]) in the place of tokens,
                where the model was compiled with `CompileConfig(prompt_embeds=...)`.
            encoder_prompt: what the encoder of an encoder-decoder reads; only such models take it, and need it.
                Then `prompt` is the decoder's, by default its start token (see `encoder_prompts.py`).
            priority: smaller is served first (policy "priority"). cache_salt: requests with different salts
                never share cached blocks.
        Returns:
            the ids of the requests it became: [request_id], or with params.n > 1 "<request_id>-0", "-1", ...
        Raises:
            RequestError, CacheCapacityError: nothing was queued.
        """
        params = SamplingParams() if params is None else params
        priority = whole_priority(priority)
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id={request_id!r}: use a non-empty string.")
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt={cache_salt!r}: use a string, or None.")
        if cache_salt is not None:
            check_unicode(cache_salt, "cache_salt")
        encoder = encoder_fields(encoder_prompt, self.model, self.kv.max_encoder_tokens, cache_salt)
        tokens, beside = decoder_prompt(prompt, self.model)
        try:
            check_params(params, self.model.tokenizer, self.model.vocab_size)
            guides = self.guides.guides(params.guide, params.n)
            ids = _ids_of(request_id, params.n)
            with deferred_interrupts(), self._turns.taken():
                taken = next(filter(self._is_taken, ids), None)
                if taken is not None:
                    raise RequestError(f"Request id {taken!r} is already in use; choose another.")
                base = params.seed if params.seed is not None else self._fresh_seed()
                room = max(1, self.model.max_model_len - len(tokens))
                requests = [
                    Request(
                        i, tokens, max_tokens=min(params.max_tokens or room, room), priority=priority,
                        cache_salt=cache_salt, params=params, **encoder, **beside,
                    )
                    for i in ids
                ]  # fmt: skip
                self._enter(
                    [LiveRequest.of(r, base + k, guides[k], self.model) for k, r in enumerate(requests)]
                )
        except BaseException:
            release(beside.get("held", ()))
            raise
        return ids

    def _enter(self, lives: list[LiveRequest], *, quiet: bool = False) -> None:
        """Queue samples of one prompt: the first computes it, the others fork from it at their first token."""
        leader = lives[0]
        leader.samples = lives if len(lives) > 1 else None
        for live in lives:
            live.mark(quiet=quiet)
        self.scheduler.add_request(leader.request)
        for live in lives[1:]:
            if live.request.arrival < 0:
                live.request.arrival = self.scheduler.next_arrival()
        self._live.update({live.request.request_id: live for live in lives})

    @in_turn
    def fork(self, request_id: str, new_request_id: str, params: SamplingParams | None = None) -> None:
        """Go on with a copy of a request besides the request itself: same tokens so far, shared cache blocks.

        Args:
            params: of the new request, by default the old one's, but for the seed: without a seed of its own the
                fork draws its own tokens. max_tokens counts from the prompt on, as for the old request.
        Raises:
            RequestError: no such request, an id in use, parameters that do not fit.
            CacheCapacityError: the fork could not run to its end even alone. Nothing was changed.
        """
        check_id(request_id)
        parent = self._parent(request_id)
        params = dataclasses.replace(parent.params, n=1, seed=None) if params is None else params
        self._check_new(new_request_id, params)
        old, room = parent.request, self.model.max_model_len - parent.request.num_prompt_tokens
        limit = min(params.max_tokens or room, room)
        if params.n != 1 or limit <= old.num_output_tokens:
            raise RequestError(
                f"A fork of {request_id!r} is one sample that goes on after {old.num_output_tokens} generated "
                f"tokens: use n=1 (not {params.n}) and a larger max_tokens (not {params.max_tokens})."
            )
        if params.logprobs is not None and parent.logprobs is None and old.num_output_tokens:
            raise RequestError(f"{request_id!r} kept no log-probabilities, so its fork cannot report them.")
        self.scheduler.check_fits(old.num_prompt_tokens, limit, old.num_encoder_tokens)
        guide = self.guides.guide(params.guide, old.output_token_ids)
        if callable(params.guide):  # it may have aborted the one, and taken the other's name
            self._parent(request_id)
            self._check_new(new_request_id, params)
        seed = params.seed if params.seed is not None else self._fresh_seed()
        child = old.child(new_request_id, old.num_tokens, max_tokens=limit, params=params)
        live = LiveRequest.of(child, seed, guide, self.model)
        if live.logprobs is not None:
            live.logprobs += parent.logprobs or ()
        if params.stop:
            live.text.catch_up(child.num_output_tokens)
        live.mark()
        if request_id in self.scheduler.requests:
            self.scheduler.fork(request_id, child)
        else:  # a sample that waits for its prompt
            self.scheduler.add_request(child)
        self._live[new_request_id] = live

    def _parent(self, request_id: str) -> LiveRequest:
        parent = self._live.get(request_id)
        if parent is None or request_id in self._to_abort:
            raise RequestError(f"request {request_id!r} is not in the engine: it cannot be forked.")
        return parent

    def _check_new(self, request_id: str, params: SamplingParams) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id={request_id!r}: use a non-empty string.")
        check_params(params, self.model.tokenizer, self.model.vocab_size)
        if self._is_taken(request_id):
            raise RequestError(f"Request id {request_id!r} is already in use; choose another.")

    def _is_taken(self, request_id: str) -> bool:
        """Also by a request that has ended in a `generate` beside it and whose outputs `step` still owes."""
        return request_id in self._live or any(o.request_id == request_id for o in self._undelivered)

    @in_turn
    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request and free its blocks; returns what it had generated, or None if it is unknown. `step` returns
        no output of it any more. A guide's function may call it, for its own request, too: what it returns is what
        there was then, and the request ends with the step.

        Samples of one prompt (n > 1) are requests of their own: "<id>-0", "<id>-1", ...
        Raises RequestError: the id is no string.
        """
        check_id(request_id)
        owed = [output for output in self._undelivered if output.request_id == request_id]
        if owed:
            self._undelivered = [o for o in self._undelivered if o.request_id != request_id]
        live = self._live.get(request_id)
        if live is None or request_id in self._to_abort:
            return owed[-1] if owed else None
        if self.loop.is_choosing:
            self._to_abort[request_id] = live
            return live.aborted_output()
        del self._live[request_id]
        if self.scheduler.abort(request_id) is None:  # a sample that waits for its prompt
            live.request.status = RequestStatus.FINISHED_ABORTED
            for leader in self._live.values():
                if leader.samples and live in leader.samples:
                    leader.samples.remove(live)
                    break
        elif live.samples:
            # The next sample computes the prompt instead, from what the prefix cache has of it.
            rest = live.samples[1:]
            live.samples = None
            if rest:
                self._enter(rest, quiet=bool(live.request.flags & QUIET))
        self.loop.drain()
        self.loop.forget([request_id])
        self._rest_if_done()
        return live.output()

    @property
    def live_requests(self) -> dict[str, LiveRequest]:
        """The requests by id, for what drives them from outside."""
        return self._live

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
        with deferred_interrupts() as interrupts, self._turns.taken():
            if self._live:
                self._step()
            if interrupts.pending:  # raised at the end of this block: the next step returns the outputs
                return []
            outputs, self._undelivered = self._undelivered, []
        return outputs

    @untraced
    @in_turn
    def _step(self) -> None:
        if self._in_step:
            raise RequestError(
                "The engine was asked for a step in the middle of one: a guide's function or a drafter must not "
                "generate with the engine that asks it. Use another engine of the compiled model."
            )
        self.arena.idle.clear()
        try:
            self._in_step = True
            try:
                output, chosen, finished = self.loop.advance()
            finally:
                self._in_step = False
            clock = StepClock(self.loop.seconds)
            self._publish(output, chosen, finished)
        finally:
            self._abort_noted()
        self.loop.drain()
        if self.config.check_integrity:
            self.scheduler.check_integrity()
        self._rest_if_done()
        clock.lap("publish")

    def _abort_noted(self) -> None:
        """Carry out what guides' functions aborted while the step chose its tokens."""
        if not self._to_abort:
            return
        noted, self._to_abort = self._to_abort, {}
        here = [i for i, live in noted.items() if self._live.get(i) is live]
        for i in noted.keys() - here:  # it ended in this very step
            noted[i].request.status = RequestStatus.FINISHED_ABORTED
        self._abort_all(here)

    def _rest_if_done(self) -> None:
        if not self._live:
            self.arena.idle.set()

    def _publish(self, output: SchedulerOutput, chosen: StepTokens, finished: list[Request]) -> None:
        self.generated_tokens += int(np.count_nonzero(chosen.tokens >= 0)) + len(chosen.forks)
        self.generated_tokens += sum(map(len, chosen.further.values()))
        outputs = []
        if not (output.flags[output.sampling] & QUIET).all():
            for row, token in zip(output.sampling.tolist(), chosen.tokens.tolist()):
                request = output.requests[row]
                if token >= 0 and not request.flags & QUIET:
                    outputs.append(self._live[request.request_id].output())
            outputs += [live.output() for _, live in chosen.forks if not live.request.flags & QUIET]
        for request in finished:
            live = self._live.pop(request.request_id)
            if request.flags & QUIET:
                outputs.append(live.output())
        for one in outputs:
            if one.request_id in self._to_abort:
                continue
            self._mailboxes.get(one.request_id, self._undelivered).append(one)
        self.loop.forget(request.request_id for request in finished)

    # State

    def stats(self) -> EngineStats:
        """Counters and present state; cheap, may be called every step."""
        with self._turns.taken():
            return collect_stats(self)

    def check_integrity(self) -> None:
        """Raise if any block is lost, owned twice, or held by a request that is gone."""
        with self._turns.taken():
            self.scheduler.check_integrity()

    def record_events(self) -> KVEventLog:
        """Log the KV cache from now on: the log gets a record (about 1 KB) in each step; called again, the same log.

        `log.save(path)` writes it, `pagebinder kv-picture` draws it.
        """
        if self.loop.recorder is None:
            self.loop.recorder = KVEventRecorder(self.scheduler, bytes_per_block=self.arena.bytes_per_block)
        return self.loop.recorder.log

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False (and nothing done) while requests hold blocks."""
        with self._turns.taken():
            return self.kv.reset_prefix_cache()

    def _fresh_id(self, num_samples: int) -> str:
        """An id for a prompt of a call; nobody has it, nor those of its samples."""
        owed = {output.request_id for output in self._undelivered}

        def is_free(name: str) -> bool:
            return not any(i in self._live or i in owed for i in _ids_of(name, num_samples))

        return next(filter(is_free, self._fresh_names()))

    def _fresh_search(self) -> str:
        """A name for a beam search; nobody has an id as its beams have."""
        taken = [*self._live, *(output.request_id for output in self._undelivered)]
        return next(name for name in self._fresh_names() if not any(i.startswith(f"{name}/") for i in taken))

    def _fresh_names(self) -> Iterator[str]:
        return (f"request-{number}" for number in self._ids)

    def _fresh_seed(self) -> int:
        """A seed for a request that brings none: the engine's seed and a running number."""
        return self.config.seed * 1_000_003 + next(self._seeds)


def _ids_of(request_id: str, num_samples: int) -> list[str]:
    """Of the requests that a prompt becomes."""
    return [request_id] if num_samples == 1 else [f"{request_id}-{i}" for i in range(num_samples)]
