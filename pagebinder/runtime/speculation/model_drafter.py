"""A second, cheaper model guesses (Leviathan et al., 2023; Chen et al., 2023): the same one with weights of 4 bits,
or a small one with the same tokenizer.

    request        a b c d                  its twin      a b c d | e f g        guessed greedily, one step each
    (checked)      a b c d e f x            goes back     a b c d e f | x ...    what failed is written anew

It runs on an engine of its own, where every request has a twin: a request that is held (as beams are) until it is
given its next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagebinder.config import EngineConfig, SamplingParams
from pagebinder.custom_ops.prompt_rows import FIRST_ROW_ID
from pagebinder.errors import CacheCapacityError, ConfigError
from pagebinder.runtime.live_requests import LiveRequest
from pagebinder.runtime.request import Request
from pagebinder.runtime.speculation.drafter import DraftRequest

if TYPE_CHECKING:
    from pagebinder.runtime.engine import Engine

GREEDY_PARAMS = SamplingParams(temperature=0.0, max_tokens=None)


@dataclass(slots=True)
class _Twin:
    """`end`: so many tokens it is to have. `num_checked`: the first tokens, which are the request's for certain."""

    live: LiveRequest
    end: int
    num_checked: int

    @property
    def tokens(self) -> list[int]:
        return self.live.request.all_token_ids


class ModelDrafter:
    """Guesses the likeliest tokens of `compiled`, a CompiledModel whose token ids mean the same.

    A request that its cache cannot hold, that is longer than it can read, or that holds embeddings gets no guesses.
    Layers with windows may have lost the oldest few keys of a window where guesses failed: that costs a guess at
    most.

    Args:
        config: of its engine. It has no prefix cache. max_num_seqs should be no less than that of the engine that it
            guesses for.
    Raises:
        ConfigError: it is no compiled decoder, or has state that cannot be taken back.
    """

    def __init__(self, compiled, config: EngineConfig | None = None) -> None:
        config = EngineConfig(prefix_caching=False) if config is None else config
        if not hasattr(compiled, "engine"):
            raise ConfigError(
                f"A ModelDrafter takes what compile_model() gives for a decoder, not {type(compiled).__name__}."
            )
        if not isinstance(config, EngineConfig):
            raise ConfigError(f"A ModelDrafter takes an EngineConfig, not {type(config).__name__}.")
        if config.prefix_caching or config.drafter or config.async_stepping == "on" or config.swap_bytes:
            raise ConfigError(
                "A ModelDrafter's engine writes over what it guessed and waits for every token: use "
                "EngineConfig(prefix_caching=False), without a drafter, swap_bytes or async_stepping."
            )
        self.engine: Engine = compiled.engine(config)
        if self.engine.model.encoder is not None:
            raise ConfigError(
                "A ModelDrafter cannot guess with an encoder-decoder: it has no encoder prompts."
            )
        if not self.engine.kv.takes_back:
            raise ConfigError(
                "A ModelDrafter's model writes over what it guessed, which recurrent state and rings do not allow: "
                'guess with a model of attention alone, or with drafter="ngram".'
            )
        self._twins: dict[str, _Twin] = {}

    @property
    def vocab_size(self) -> int:
        return self.engine.model.vocab_size

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        known = [len(request.token_ids) for request in requests]
        twins = [self._twin_of(request) for request in requests]
        waiting = [twin for twin in twins if twin is not None]
        while waiting:
            self.engine.loop.advance()
            waiting = [twin for twin in waiting if not self._go_on(twin)]
        return [[] if twin is None else twin.tokens[num_known:] for twin, num_known in zip(twins, known)]

    def forget(self, key: str) -> None:
        if self._twins.pop(key, None) is not None:
            self.engine.abort(key)

    def _twin_of(self, request: DraftRequest) -> _Twin | None:
        """The request's twin, with its tokens; None: it can have none."""
        tokens, room = request.token_ids, self.engine.model.max_model_len - len(request.token_ids) - 1
        twin = self._twins.get(request.key)
        if room < 1 or (twin is None and max(tokens) >= FIRST_ROW_ID):
            return None
        end = len(tokens) + min(request.most, room)
        if twin is None:
            return self._new_twin(request, end)
        same = min(twin.num_checked, len(twin.tokens))
        while same < min(len(tokens), len(twin.tokens)) and tokens[same] == twin.tokens[same]:
            same += 1
        self.engine.scheduler.take_back(request.key, same, tokens[same:])
        twin.live.held_logits, twin.end, twin.num_checked = None, end, len(tokens)
        return twin

    def _new_twin(self, asked: DraftRequest, end: int) -> _Twin | None:
        room = self.engine.model.max_model_len - len(asked.token_ids)
        # It never reaches this limit: the last token of a request is not guessed.
        max_tokens = min(asked.limit - len(asked.token_ids), room)
        request = Request(asked.key, list(asked.token_ids), max_tokens=max_tokens, params=GREEDY_PARAMS)
        live = LiveRequest.held(request, GREEDY_PARAMS)
        try:
            self.engine.scheduler.add_request(request)
        except CacheCapacityError:
            return None
        self.engine.live_requests[asked.key] = live
        twin = self._twins[asked.key] = _Twin(live, end, len(asked.token_ids))
        return twin

    def _go_on(self, twin: _Twin) -> bool:
        """Give a twin that was computed its next token; True: it has all."""
        logits = twin.live.held_logits
        if logits is None:
            return False
        twin.live.held_logits = None
        self.engine.scheduler.append_token(twin.live.request.request_id, int(logits.argmax()))
        return len(twin.tokens) >= twin.end
