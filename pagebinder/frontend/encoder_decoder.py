"""An encoder-decoder as two graphs, so that a request's encoder runs once and its decoder step by step.

    encoder(input_ids [E], positions [E])                               -> states [E, C]
    decoder(input_ids [T], positions [T], encoder_states [E, C])        -> logits [T, V]

E and T are two dynamic sizes that nothing but cross attention relates. Both graphs come from the same module, so
shared embeddings stay shared. Where a model numbers its rows instead of taking positions, the positions of the call
are put in its place (`leaves/given_positions.py`, `leaves/relative_bias.py`).
"""

from __future__ import annotations

import inspect

import torch
from torch.fx import GraphModule

from pagebinder.errors import CaptureError
from pagebinder.frontend.capture import TracedInput, token_inputs, trace
from pagebinder.frontend.grad_mode import same_grad_mode_untraced
from pagebinder.frontend.leaves.given_positions import GivenPositions, given_positions
from pagebinder.frontend.leaves.relative_bias import bias_by_distance
from pagebinder.frontend.source import ModelSource
from pagebinder.graph_tools import val

ENCODER_STATES = "encoder_states"
NUM_ENCODER_TOKENS = "num_encoder_tokens"


class FlatEncoder(torch.nn.Module):
    """Calls the encoder of a model on flat [E] inputs, and returns its last hidden states [E, C]."""

    def __init__(self, source: torch.nn.Module, given: GivenPositions):
        super().__init__()
        self.source = source
        self.given = given

    @same_grad_mode_untraced
    def forward(self, input_ids, positions):
        encoder = self.source.get_encoder()
        told = _told(encoder, "position_ids", positions)
        with self.given.of_call(positions):
            return encoder(input_ids=input_ids.unsqueeze(0), **told).last_hidden_state[0]


class FlatDecoder(torch.nn.Module):
    """Calls a model with the encoder's states [E, C] in place of an encoder prompt, and returns logits [T, V]."""

    def __init__(self, source: torch.nn.Module, given: GivenPositions):
        super().__init__()
        self.source = source
        self.given = given

    @same_grad_mode_untraced
    def forward(self, input_ids, positions, encoder_states):
        from transformers.modeling_outputs import BaseModelOutput

        encoder_outputs = BaseModelOutput(last_hidden_state=encoder_states.unsqueeze(0))
        encoder_outputs.router_logits = None  # models with experts return them, and nothing here reads them
        with self.given.of_call(positions):
            out = self.source(
                decoder_input_ids=input_ids.unsqueeze(0),
                encoder_outputs=encoder_outputs,
                use_cache=False,
                **_told(self.source, "decoder_position_ids", positions),
            )
        return out.logits[0]


def _told(module: torch.nn.Module, name: str, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Positions [T] as the argument [1, T] of that name, where a model takes one (T5Gemma)."""
    takes = inspect.signature(type(module).forward).parameters
    return {name: positions.unsqueeze(0)} if name in takes else {}


def capture_encoder(source: ModelSource) -> tuple[GraphModule, str]:
    """The encoder as a graph, and the route that led to it.

    Raises:
        CaptureError: as `capture`, or the encoder does not take token ids.
    """
    encoder = source.module.get_encoder()
    if encoder in (source.module, source.module.base_model):
        raise CaptureError(
            f"{type(source.module).__name__} does not say which of its modules is the encoder."
        )
    wanted = getattr(encoder, "main_input_name", "input_ids")
    if wanted != "input_ids":
        raise CaptureError(
            f"{type(encoder).__name__} takes {wanted!r}, not token ids: only text encoders are understood here."
        )
    with given_positions(encoder) as given, bias_by_distance(encoder):
        return trace(source, FlatEncoder(source.module, given), token_inputs(source, source.encoder.max_len))


def states_of(encoder: GraphModule) -> torch.Tensor:
    """The fake tensor [E, C] that an encoder's graph returns."""
    output = next(n for n in reversed(encoder.graph.nodes) if n.op == "output")
    return val(output.args[0])


def _decoder_of(module: torch.nn.Module) -> torch.nn.Module:
    """The decoder alone: of a model of text and images, transformers says its whole encoder-decoder."""
    encoder, decoder = module.get_encoder(), module.get_decoder()
    while any(part is encoder for part in decoder.modules()) and decoder.get_decoder() is not decoder:
        decoder = decoder.get_decoder()
    return decoder


def capture_decoder(source: ModelSource, states: torch.Tensor) -> tuple[GraphModule, str]:
    """The decoder as a graph that takes encoder states of the width and dtype of `states`; errors as `capture`."""
    inputs = token_inputs(source)
    num_encoder_tokens = len(inputs["positions"].example) + 7  # another size, so that the two are told apart
    example = torch.zeros(num_encoder_tokens, int(states.shape[1]), dtype=states.dtype, device=source.device)
    inputs[ENCODER_STATES] = TracedInput(example, NUM_ENCODER_TOKENS)
    decoder = _decoder_of(source.module)
    with given_positions(decoder) as given, bias_by_distance(decoder):
        return trace(source, FlatDecoder(source.module, given), inputs)
