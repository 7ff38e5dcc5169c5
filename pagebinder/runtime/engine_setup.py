"""What an engine is made from: the compiled model, the size of its cache, its swap space."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from pagebinder.config import EngineConfig
from pagebinder.errors import CacheCapacityError, ConfigError
from pagebinder.runtime.arena import KVArena
from pagebinder.runtime.executables import Executable
from pagebinder.runtime.kv import KVPlan
from pagebinder.runtime.kv.host_blocks import HostBlocks
from pagebinder.runtime.kv.retention import PrefixRetention
from pagebinder.runtime.prompt_rows import PromptRows
from pagebinder.runtime.swap_policy import SwapPolicy

DEFAULT_KV_CACHE_BYTES = 1 << 30
CPU_MIXED_PREFILL_TOKENS = 1024  # see docs/measurements.md
ENCODER_LIMIT = (
    "That is what the model's config says (max_source_positions, max_position_embeddings or n_positions; 2048 "
    "without them). An encoder with relative positions, as T5's, takes any length: set a larger "
    "max_source_positions there and compile again."
)


@dataclass(frozen=True, kw_only=True)
class EncoderModel:
    """The encoder of an encoder-decoder: input_ids [E], positions [E] -> states [E, width] of `dtype`.

    `vocab_size`, `max_len`: ids and most tokens of an encoder prompt. `decoder_start_token_id`: what the decoder's
    prompt is by default.
    """

    executable: Executable
    width: int
    dtype: torch.dtype
    vocab_size: int
    max_len: int
    decoder_start_token_id: int | None


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """What an engine needs of a compiled model: something to run, a cache plan, and the facts of its tokens.

    `uncounted_id`: the padding token of a model that leaves it out of the positions or masks; no prompt may hold it.
    `prompt_rows`: what embeddings of prompts become rows of, where the model was compiled for them.
    `make_graph`: gives what `executable` runs, for capturing it in pieces; `cascades`: it reads shared prefixes.
    `not_captured`: why steps cannot be captured at all; `must_capture`: then that is an error.
    """

    executable: Executable
    kv_plan: KVPlan
    states: tuple
    device: torch.device
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    tokenizer: object | None
    encoder: EncoderModel | None = None
    uncounted_id: int | None = None
    prompt_rows: PromptRows | None = None
    make_graph: Callable[[], GraphModule] | None = None
    not_captured: str | None = None
    must_capture: bool = False
    cascades: bool = False

    @property
    def num_prompt_rows(self) -> int:
        """Embeddings that all prompts can hold at a time; 0: it was compiled for none."""
        return 0 if self.prompt_rows is None else len(self.prompt_rows.table)

    @functools.cached_property
    def graph(self) -> GraphModule | None:
        """Of a saved model it is read when somebody asks: it takes compilers that serving does without."""
        return None if self.make_graph is None else self.make_graph()


def num_blocks(model: EngineModel, config: EngineConfig) -> int:
    """Blocks of the cache, null block included. Raises CacheCapacityError if not even one can be used."""
    plan = model.kv_plan
    if config.num_kv_blocks is not None:
        count = config.num_kv_blocks
    elif config.kv_cache_bytes is not None:
        count = plan.num_blocks_for(config.kv_cache_bytes)
    else:
        encoder_tokens = max_encoder_tokens(model, config)
        per_request = (
            plan.min_blocks(model.max_model_len, in_flight_tokens(model, config), encoder_tokens) - 1
        )
        count = min(per_request * config.max_num_seqs + 1, plan.num_blocks_for(DEFAULT_KV_CACHE_BYTES))
    if count < 2:
        raise CacheCapacityError(
            f"{count} KV block(s) of {plan.bytes_per_block:,} bytes are too few: block 0 is reserved, so "
            f"at least 2 are needed. Give num_kv_blocks >= 2 or kv_cache_bytes >= {2 * plan.bytes_per_block:,}."
        )
    return count


def steps_in_flight(model: EngineModel, config: EngineConfig) -> int:
    """2 where the next step is prepared while one runs. Raises ConfigError if that is asked for and cannot be."""
    waits = None
    if model.encoder is not None:
        waits = "an encoder-decoder waits for its encoder"
    elif config.drafter is not None:
        waits = "guesses of a drafter wait for the tokens of the step before"
    if config.async_stepping == "on" and waits is not None:
        raise ConfigError(f'async_stepping="on": {waits}; use "auto" or "off".')
    asked = config.async_stepping == "on" or (
        config.async_stepping == "auto" and model.device.type == "cuda" and waits is None
    )
    return 2 if asked else 1


def in_flight_tokens(model: EngineModel, config: EngineConfig) -> int:
    """Most tokens that are scheduled and whose results are not in yet."""
    return steps_in_flight(model, config) * config.max_num_batched_tokens


def mixed_prefill_tokens(model: EngineModel, config: EngineConfig) -> int:
    """Most prompt tokens of a step in which others decode; 0 = no limit but the budget."""
    if config.mixed_prefill_tokens is not None:
        return config.mixed_prefill_tokens
    return 0 if model.device.type == "cuda" else CPU_MIXED_PREFILL_TOKENS


def max_encoder_tokens(model: EngineModel, config: EngineConfig) -> int:
    """Most tokens of an encoder prompt, 0 without an encoder. Raises ConfigError for what the model cannot do."""
    wanted = config.max_encoder_tokens
    if model.encoder is None:
        if wanted is not None:
            raise ConfigError(f"max_encoder_tokens={wanted}: this model has no encoder; leave it None.")
        return 0
    if wanted is not None and wanted > model.encoder.max_len:
        raise ConfigError(
            f"max_encoder_tokens={wanted} is more than the {model.encoder.max_len} tokens that the model's encoder "
            f"takes; lower it. {ENCODER_LIMIT}"
        )
    return model.encoder.max_len if wanted is None else wanted


def swap_space(arena: KVArena, config: EngineConfig) -> tuple[SwapPolicy | None, HostBlocks | None]:
    """Host memory for preempted requests, with the copy rate measured on it; None without.

    Raises CacheCapacityError if it is smaller than a block, or cannot be had.
    """
    if not config.swap_bytes or config.swap_policy == "never":
        return None, None
    num_slots = config.swap_bytes // arena.bytes_per_block
    if not num_slots:
        raise CacheCapacityError(
            f"swap_bytes={config.swap_bytes} holds no KV block of {arena.bytes_per_block:,} bytes; give more, or 0."
        )
    arena.add_host_blocks(num_slots)
    policy = SwapPolicy(config.swap_policy, arena.bytes_per_block)
    policy.note_copy(*arena.time_copies())
    return policy, HostBlocks(num_slots)


def retention(choice: str | int) -> PrefixRetention:
    """`EngineConfig.prefix_retention` as the cache takes it."""
    if choice == "dense":
        return PrefixRetention.dense()
    return PrefixRetention.sparse(0 if choice == "sparse" else choice)
