"""Recognisers: captured graph -> semantic graph. Each one answers matched or refused at every anchor it sees."""

from pagebinder.frontend.recognise.causal_conv import recognise_causal_conv
from pagebinder.frontend.recognise.expert_loop import recognise_expert_loop
from pagebinder.frontend.recognise.first_rows import recognise_first_rows
from pagebinder.frontend.recognise.gated_activation import recognise_gated_activation
from pagebinder.frontend.recognise.layer_norm import recognise_layer_norm
from pagebinder.frontend.recognise.raw_attention import recognise_raw_attention
from pagebinder.frontend.recognise.rms_norm import recognise_rms_norm
from pagebinder.frontend.recognise.rope import recognise_rope
from pagebinder.frontend.recognise.row_positions import recognise_row_positions
from pagebinder.frontend.recognise.sdpa import recognise_sdpa

__all__ = [
    "recognise_causal_conv",
    "recognise_expert_loop",
    "recognise_first_rows",
    "recognise_gated_activation",
    "recognise_layer_norm",
    "recognise_raw_attention",
    "recognise_rms_norm",
    "recognise_rope",
    "recognise_row_positions",
    "recognise_sdpa",
]
