"""Calls of an engine that run to the end of their requests: `generate`, `stream`, `beam_search`.

Outputs of a call's requests come into its mailbox, whoever steps; what ends the call aborts what is left of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence

from pagebinder.config import SamplingParams
from pagebinder.errors import RequestError
from pagebinder.interrupts import deferred_interrupts
from pagebinder.runtime.beam_search import BeamSearch
from pagebinder.runtime.encoder_prompts import decoder_prompt, encoder_fields, pair_prompts
from pagebinder.runtime.live_requests import QUIET, LiveRequest
from pagebinder.runtime.outputs import Beam, RequestOutput
from pagebinder.runtime.prompt_parts import release
from pagebinder.runtime.prompt_rows import PromptRowsTakenError
from pagebinder.runtime.request import RequestStatus
from pagebinder.runtime.request_checks import Prompt, beam_options
from pagebinder.runtime.turns import in_turn


class WholeCalls:
    """What `Engine` does with requests from their beginning to their end."""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt | None] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        encoder_prompts: Prompt | Sequence[Prompt] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to the end; returns outputs in the order of the prompts (n > 1: n outputs per prompt).

        Embeddings in prompts wait for those of prompts before them, where the model was compiled for fewer at a time.
        An encoder-decoder needs `encoder_prompts`, as many as there are prompts; `prompts` may be left away.
        """
        lives: list[LiveRequest] = []
        outputs, done = None, {}
        try:
            with self._turns.taken():  # of outputs the last one is wanted
                outputs = self._start(lives, prompts, params, encoder_prompts, flags=QUIET)
            for output in outputs:
                done[output.request_id] = output
        finally:
            if outputs is not None:
                outputs.close()  # aborts what has not ended
        # What somebody else aborted has no last output.
        return [done[i] if i in done else live.output() for i, live in zip(_ids(lives), lives)]

    def beam_search(
        self, prompt: Prompt | None = None, *, beam_width: int, max_tokens: int, length_penalty: float = 1.0,
        ignore_eos: bool = False, encoder_prompt: Prompt | None = None,
    ) -> list[Beam]:  # fmt: skip
        """The `beam_width` continuations of the highest score that beam search finds, best first.

        Score: sum of log-probabilities / number of tokens ** length_penalty. Beams share the blocks of what they
        have in common. Other requests of the engine go on meanwhile. `beam_width`: 1 to 1,024,
        `length_penalty`: -16 to 16.
        Raises RequestError, CacheCapacityError for what cannot be done; nothing was queued.
        """
        beam_width, max_tokens, length_penalty = beam_options(beam_width, max_tokens, length_penalty)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos)
        encoder = encoder_fields(encoder_prompt, self.model, self.kv.max_encoder_tokens)
        tokens, beside = decoder_prompt(prompt, self.model)
        room = max(1, self.model.max_model_len - len(tokens))
        with self._turns.taken():
            search = BeamSearch(
                self.scheduler, self._live, self._fresh_search(), width=beam_width,
                max_tokens=min(max_tokens, room), length_penalty=length_penalty,
                eos=() if ignore_eos else self.model.eos_token_ids,
            )  # fmt: skip
            try:
                search.start(tokens, params, **encoder, **beside)
                while not search.done:
                    self._step()
                    with deferred_interrupts():
                        search.advance()
                return search.best()
            finally:
                with deferred_interrupts():
                    search.close()
                    self._rest_if_done()
                    release(beside.get("held", ()))

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt | None] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        encoder_prompts: Prompt | Sequence[Prompt] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields an output each time a request gets a token. Closing it aborts the rest."""
        with self._turns.taken():
            return self._start([], prompts, params, encoder_prompts)

    def _start(
        self, lives: list[LiveRequest], prompts, params, encoder_prompts, flags: int = 0
    ) -> Generator[RequestOutput, None, None]:
        """Queue all prompts, or none; `lives` become their requests, whose outputs the result is."""
        prompts = pair_prompts(prompts, encoder_prompts)
        if not isinstance(params, (list, tuple)):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts but {len(params)} sampling parameters; give one each."
            )
        mailbox: deque[RequestOutput] = deque()
        try:
            for (prompt, encoder_prompt), p in zip(prompts, params):
                while not self._add_if_there_is_room(lives, mailbox, flags, prompt, p, encoder_prompt):
                    self._step()
            reader = self._read(_ids(lives), mailbox)
            next(reader)  # enter its `try`, so that dropping it unread aborts the requests too
            return reader
        except BaseException:
            self._abort_all(_ids(lives))
            raise

    @in_turn
    def _add_if_there_is_room(
        self, lives: list[LiveRequest], mailbox: deque, flags: int, prompt, params, encoder_prompt
    ) -> bool:
        """Queue a prompt of a whole call, whose requests are put into `lives`; False: requests that there are hold
        the place of its embeddings."""
        try:
            fresh = self._fresh_id(getattr(params, "n", 1))  # what is no SamplingParams is refused below
            ids = self.add_request(fresh, prompt, params, encoder_prompt=encoder_prompt)
        except PromptRowsTakenError:
            if not self._live:  # somebody else does
                raise
            return False
        for i in ids:
            lives.append(self._live[i])
            lives[-1].request.flags |= flags
            self._mailboxes[i] = mailbox
        return True

    def _read(self, ids: list[str], mailbox: deque) -> Generator[RequestOutput, None, None]:
        """Step until the requests are done; another stream that is read in between steps them too."""
        try:
            yield
            while self._fill(mailbox, ids):
                while mailbox:
                    yield mailbox.popleft()
        finally:
            self._abort_all(ids)

    @in_turn
    def _abort_all(self, ids: list[str]) -> None:
        """The requests of a whole call; what one of them raises is raised when all have ended."""
        gone, errors = set(ids), []
        for i in ids:
            self._mailboxes.pop(i, None)
            leader = self._live.get(i)
            # Those that wait for its prompt, all at once: each abort would look through all of them. Not while a step
            # chooses tokens for them.
            if leader is None or not leader.samples or self.loop.is_choosing:
                continue
            rest = [leader]
            for sample in leader.samples[1:]:
                if sample.request.request_id in gone:
                    sample.request.status = RequestStatus.FINISHED_ABORTED
                    del self._live[sample.request.request_id]
                else:
                    rest.append(sample)
            leader.samples = rest if len(rest) > 1 else None
        for i in ids:
            try:
                self.abort(i)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    @in_turn
    def _fill(self, mailbox: deque[RequestOutput], ids: list[str]) -> bool:
        """Step if the mailbox is empty. False: nothing will come any more."""
        if not mailbox and any(i in self._live for i in ids):
            self._step()
            return True
        return bool(mailbox)


def _ids(lives: Sequence[LiveRequest]) -> list[str]:
    return [live.request.request_id for live in lives]
