"""Steps of an engine, one after the other, or the next one prepared while one runs (`EngineConfig.async_stepping`).

    host    | schedule 1, launch | schedule 2, launch | results of 1 | schedule 3, launch | results of 2 | ...
    device                       |======= step 1 ========||======= step 2 ========||======= step 3 ...
                                                          ^ takes the tokens that step 1 chose where they lie

Step 2 is scheduled before anybody knows the tokens of step 1: a request that goes on computes its newest token
whatever it is, and the ids are copied on the device from one step to the other. A request that such a token ended (an
end of sequence; lengths are known ahead) has computed one token in vain, which nobody sees.

Where a request's next step depends on more than its token (stop strings, log-probabilities, penalties, several
samples, beams), the host waits for the results before it schedules. On a CPU a step runs as it is launched, so there
is nothing to gain: the same code takes the same tokens, which is what it is there for.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from pagebinder.config import EngineConfig
from pagebinder.runtime.arena import KVArena
from pagebinder.runtime.cascade import cascade_of
from pagebinder.runtime.device_copies import to_device
from pagebinder.runtime.encoder_stage import EncoderStage
from pagebinder.runtime.engine_graphs import engine_graphs
from pagebinder.runtime.engine_setup import EngineModel, steps_in_flight
from pagebinder.runtime.engine_stats import STEP_PARTS, StepClock
from pagebinder.runtime.kv.event_recorder import KVEventRecorder
from pagebinder.runtime.live_requests import AHEAD, QUIET, LiveRequest
from pagebinder.runtime.request import Request
from pagebinder.runtime.sampler import checked_tokens
from pagebinder.runtime.scheduler import Scheduler
from pagebinder.runtime.scheduler_output import NO_DRAFTS, NOBODY, SchedulerOutput
from pagebinder.runtime.speculation import Speculator
from pagebinder.runtime.speculation.verification import choose_verified
from pagebinder.runtime.step_plan import StepPlanner
from pagebinder.runtime.step_tokens import StepTokens, choose_ahead, choose_tokens, take_tokens

MOST_NAMED = 3  # requests, in a message


class DeviceTokens:
    """Tokens that a step chooses, on their way to the host. `on_device`: [L] int64."""

    def __init__(self, on_device: torch.Tensor) -> None:
        self.on_device = on_device
        self._host, self._arrived = on_device, None
        if on_device.is_cuda:
            self._host = torch.empty_like(on_device, device="cpu", pin_memory=True)
            self._host.copy_(on_device, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(on_device.device))

    def wait(self) -> np.ndarray:
        """[L] int64 on the host. Raises FloatingPointError where a row of logits was NaN."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return checked_tokens(self._host)


@dataclass(slots=True)
class LaunchedStep:
    """A step that was handed to the device. `tokens`: chosen there; None: they are chosen of `logits` [L, V] when its
    results are taken. `started`: when, in seconds."""

    output: SchedulerOutput
    logits: torch.Tensor
    tokens: DeviceTokens | None
    encoder_rows: Sequence[int]
    started: float


class FinishedStep(NamedTuple):
    """`finished`: requests that ended with it."""

    output: SchedulerOutput
    chosen: StepTokens
    finished: list[Request]


@dataclass
class AheadStats:
    """`ahead`: steps that were launched before the results of the one before. `waited`: those that were not, though
    they could have been, by reason. `overshot_tokens`: computed for requests that had ended."""

    ahead: int = 0
    waited: Counter[str] = field(default_factory=Counter)
    overshot_tokens: int = 0


class StepLoop:
    """Schedules, launches and finishes steps. `live`: the engine's requests by id; nothing is published here.

    `is_choosing`: tokens are being chosen, and functions of guides asked: all requests of the step must stay `live`.
    """

    def __init__(
        self, model: EngineModel, config: EngineConfig, scheduler: Scheduler, arena: KVArena,
        live: Mapping[str, LiveRequest],
    ) -> None:  # fmt: skip
        self.model, self.scheduler, self.arena, self.kv = model, scheduler, arena, scheduler.kv
        self.in_flight = steps_in_flight(model, config)
        self.planner = StepPlanner(
            model.kv_plan.groups, self.kv.tables, model.device, max_steps_in_flight=self.in_flight,
            encoder_lens=scheduler.batch.encoder_lens,
            shifts_positions=model.prompt_rows is not None and model.prompt_rows.axes > 0,
        )  # fmt: skip
        self.cascade = cascade_of(model.graph if model.cascades else None, self.planner, config)
        self.captured = engine_graphs(model, config, arena, self.kv)
        self.encoder = EncoderStage(model.encoder, self.kv, model.device) if model.encoder else None
        self.recorder: KVEventRecorder | None = None
        self.num_copies = 0
        self.ahead = AheadStats()
        self.seconds = dict.fromkeys(STEP_PARTS, 0.0)
        self.speculator: Speculator | None = None
        if config.drafter is not None:
            self.speculator = Speculator(
                config, scheduler, live, vocab_size=model.vocab_size, device_type=model.device.type
            )
            self.seconds["draft"] = 0.0
        self.is_choosing = False
        self._live = live
        self._launched: deque[LaunchedStep] = deque()
        self._last_finish = 0.0

    def advance(self) -> FinishedStep:
        """Finish a step: the one that was launched ahead, or a new one. With no exception in between nothing is lost;
        after one, the steps in flight are scheduled again."""
        clock = StepClock(self.seconds)
        try:
            if not self._launched:
                output = self.scheduler.schedule(self._drafts(clock))
                if not self._live:  # a drafter aborted them all when it was asked
                    return FinishedStep(output, StepTokens(NOBODY), [])
                self._launch(output, clock)
            if self.in_flight > 1 and self._may_look_ahead():
                self._launch_ahead(clock)
            return self._finish(self._launched.popleft(), clock)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Forget the steps in flight: their tokens are scheduled again."""
        self._launched.clear()
        self.scheduler.discard()

    def drain(self) -> None:
        """Forget what was launched for requests that are all gone by now: later steps run behind it anyway."""
        if self._launched and not self._live:
            self.ahead.overshot_tokens += sum(len(step.output.awaited) for step in self._launched)
            self.discard()

    def forget(self, request_ids: Iterable[str]) -> None:
        """The requests are over, and off the books. Raises what a user's drafter raises, once it was told of all."""
        errors = []
        for request_id in request_ids if self.speculator is not None else ():
            try:
                self.speculator.forget(request_id)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    # One step

    def _drafts(self, clock: StepClock) -> Mapping[str, Sequence[int]]:
        if self.speculator is None:
            return NO_DRAFTS
        drafts = self.speculator.drafts()
        clock.lap("draft")
        return drafts

    def _launch(self, output: SchedulerOutput, clock: StepClock) -> None:
        started = time.perf_counter()
        if self.recorder is not None:
            self.recorder.record_step(output)
        self._copy_blocks()
        clock.lap("schedule")
        encoder_rows = self.encoder.rows(output) if self.encoder else []
        logits = self._logits(output, encoder_rows, clock)
        clock.lap("run")
        tokens = None
        if self.in_flight > 1 and (output.flags[output.sampling] & AHEAD).all():
            tokens = DeviceTokens(choose_ahead(logits, output, self._live))
            clock.lap("sample")
        self._launched.append(LaunchedStep(output, logits, tokens, encoder_rows, started))

    def _may_look_ahead(self) -> bool:
        if self._launched[-1].tokens is None:
            self.ahead.waited["a request needs its token first"] += 1
            return False
        return True

    def _launch_ahead(self, clock: StepClock) -> None:
        output = self.scheduler.schedule()
        if output.step is None:
            self.ahead.waited["nothing can be computed yet"] += 1
            clock.lap("schedule")
            return
        self._launch(output, clock)
        self.ahead.ahead += 1

    def _logits(self, output: SchedulerOutput, encoder_rows: Sequence[int], clock: StepClock) -> torch.Tensor:
        """Logits of a scheduled step: from its captured graph if there is one for such a step."""
        bucket = self.captured.find(output)
        if bucket is not None:
            input_ids = self.captured.fill(bucket, output, self.planner)
            self._place_awaited(output, input_ids)
            clock.lap("plan")
            return self.captured.replay(bucket, output)
        plan = self.planner.build(output, encoder_rows)
        self._place_awaited(output, plan.tensors["input_ids"])
        inputs = plan.tensors | self.cascade.inputs(output) | self.arena.caches
        clock.lap("plan")
        if self.encoder:
            inputs["encoder_states"] = self.encoder.run([output.requests[r] for r in encoder_rows])
        return self.model.executable.run(inputs)

    def _place_awaited(self, output: SchedulerOutput, input_ids: torch.Tensor) -> None:
        """Copy the ids that the step before chooses to where this one reads them, on the device."""
        if not len(output.awaited):
            return
        before = self._launched[-1]
        chosen = before.tokens.on_device.clamp(
            min=0
        )  # of NaN logits, which are told when the results are taken
        places, sources = awaited_places(output), awaited_sources(output, before.output)
        if len(places) == len(chosen) and (places == sources).all():
            input_ids[: len(chosen)].copy_(chosen)
            return
        both = to_device(np.stack((places, sources)), input_ids.device)
        input_ids.index_copy_(0, both[0], chosen.index_select(0, both[1]))

    def _copy_blocks(self) -> None:
        """What the step's schedule needs moved, before the graph runs: swaps first, then copies on write."""
        swaps, copies = self.kv.take_swaps(), self.kv.take_copies()
        if swaps:
            self.arena.swap_blocks(swaps)
            for num_bytes, seconds in self.arena.take_swap_times():
                self.scheduler.swap_policy.note_copy(num_bytes, seconds)
        if copies:
            self.arena.copy_blocks(copies)
            self.num_copies += len(copies)

    def _finish(self, step: LaunchedStep, clock: StepClock) -> FinishedStep:
        output, gone = step.output, None
        if output.moves != self.scheduler.batch.moves:
            gone = np.array([output.requests[row].is_finished for row in output.sampling.tolist()], bool)
            self.ahead.overshot_tokens += int(np.isin(output.sampling[gone], output.awaited).sum())
        chosen = self._choose(step, gone, clock)
        clock.lap("sample")
        self._note_prefill(step)
        forks = [(parent, live.request) for parent, live in chosen.forks]
        finished = self.scheduler.update(output, chosen.tokens, chosen.stopped, forks, chosen.further)
        if self.speculator is not None:
            self._note_drafts(output, chosen)
        for parent in {parent for parent, _ in chosen.forks}:
            self._mark_again(self._live[parent])
        clock.lap("schedule")
        return FinishedStep(output, chosen, finished)

    def _choose(self, step: LaunchedStep, gone: np.ndarray | None, clock: StepClock) -> StepTokens:
        output, eos = step.output, self.model.eos_token_ids
        self.is_choosing = True
        try:
            if output.drafts:
                return choose_verified(step.logits, output, self._live, eos)
            if step.tokens is None:
                return choose_tokens(step.logits, output, self._live, eos, gone)
            tokens = step.tokens.wait()
            clock.lap("run")
            return take_tokens(tokens, gone, output, self._live, eos)
        except FloatingPointError as error:
            raise FloatingPointError(f"{error}{_whose(step)}") from error
        finally:
            self.is_choosing = False

    def _mark_again(self, live: LiveRequest) -> None:
        """Its samples go their own ways now: it is like any other."""
        live.mark(quiet=bool(live.request.flags & QUIET))
        self.scheduler.note_flags(live.request)

    def _note_drafts(self, output: SchedulerOutput, chosen: StepTokens) -> None:
        for row, tokens in output.drafts.items():
            request_id = output.requests[row].request_id
            self.speculator.note(request_id, len(tokens), len(chosen.further.get(request_id, ())))

    def _note_prefill(self, step: LaunchedStep) -> None:
        """Tell the swap policy how fast prompts are computed. A step begins when the one before is done."""
        now, policy = time.perf_counter(), self.scheduler.swap_policy
        seconds, self._last_finish = now - max(step.started, self._last_finish), now
        output = step.output
        is_prefill = output.total_num_tokens > len(output.sampling) and not output.drafts
        if policy is not None and is_prefill and not step.encoder_rows:
            policy.note_prefill(output.total_num_tokens, seconds)


def awaited_places(output: SchedulerOutput) -> np.ndarray:
    """Where the tokens of `output.awaited` stand among the step's tokens [A] int64: each row has one."""
    return (np.cumsum(output.counts) - 1)[output.awaited]


def awaited_sources(output: SchedulerOutput, before: SchedulerOutput) -> np.ndarray:
    """Which of the tokens that the step `before` chooses they are [A] int64."""
    if output.moves == before.moves:  # rows were only added
        return np.searchsorted(before.sampling, output.awaited)
    rows = {id(before.requests[row]): i for i, row in enumerate(before.sampling.tolist())}
    return np.array([rows[id(output.requests[row])] for row in output.awaited.tolist()], np.int64)


def _whose(step: LaunchedStep) -> str:
    """Which requests have NaN logits, and what to do so that the others go on."""
    if len(step.logits) != len(step.output.sampling):
        return ""
    # Of a step behind which another one was launched, logits may be overwritten by now.
    rows = step.logits.isnan().any(-1) if step.tokens is None else step.tokens.on_device < 0
    ids = np.array(step.output.sampling_ids, object)[rows.cpu().numpy()].tolist()
    shown = ", ".join(map(repr, ids[:MOST_NAMED])) + (", ..." if len(ids) > MOST_NAMED else "")
    return f" (request {shown}; once that is aborted, the others go on)" if ids else ""
