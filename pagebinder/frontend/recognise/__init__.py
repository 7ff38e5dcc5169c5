"""Recognisers: captured graph -> semantic graph. Each one answers matched or refused at every anchor it sees."""

from pagebinder.frontend.recognise.rms_norm import recognise_rms_norm
from pagebinder.frontend.recognise.rope import recognise_rope
from pagebinder.frontend.recognise.sdpa import recognise_sdpa

__all__ = ["recognise_rms_norm", "recognise_rope", "recognise_sdpa"]
