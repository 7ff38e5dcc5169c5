"""What the source model says, per sequence and without a cache, and whether served tokens agree with it."""

from __future__ import annotations

import torch

from pagebinder.frontend.text_writer import writer_of
from tests.zoo.tiny_configs import VOCAB_SIZE

# How far below the best logit a chosen one may be, in units of the logits' spread (at least 1): rounding decides
# between two that are as close as this.
TIE = 1e-4
# How far rows of an encoder and log-probabilities may be from the source's, in the same units.
ROW_TOLERANCE = 2e-4
MIN_SPREAD = 0.2
# Below these, ids may mean the beginning, the end, padding or a mask.
FIRST_PLAIN_ID = 4


class Wrong(Exception):
    """A token that the source model would not have chosen."""


def tokens(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randint(FIRST_PLAIN_ID, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


def stop_ids(model) -> tuple[int, ...]:
    """The padding token: some models leave it out when they count positions, so nothing can follow it."""
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    return (pad,) if pad is not None and 0 <= pad < VOCAB_SIZE else ()


def source_logits(model, ids: list[int], encoder_ids: list[int] | None = None) -> torch.Tensor:
    """One run of the source model over a whole sequence: [T, V]."""
    inputs = {"input_ids": torch.tensor([ids])}
    if encoder_ids is not None:
        inputs = {"input_ids": torch.tensor([encoder_ids]), "decoder_input_ids": torch.tensor([ids])}
    with torch.no_grad():
        return writer_of(model)(**inputs, use_cache=False).logits[0].float()


class Reference:
    """Judges continuations by one run of the source over each whole sequence; equal ones are judged once."""

    def __init__(self, model):
        self.model = model
        self.judged: set[tuple] = set()

    def assert_greedy(self, ids: list[int], output, encoder_ids: list[int] | None = None) -> None:
        """Every token has the source's largest logit, given all tokens before it, and its log-probability."""
        continuation, logprobs = list(output.token_ids), output.logprobs
        key = (tuple(ids), tuple(continuation), tuple(encoder_ids or ()), logprobs is None)
        if key in self.judged:
            return
        logits = source_logits(self.model, ids + continuation, encoder_ids)[len(ids) - 1 : -1]
        chosen = torch.tensor(continuation)[:, None]
        spread = max(1.0, float(logits.std()))
        self._expect(
            logits.amax(1) - logits.gather(1, chosen)[:, 0], TIE * spread, ids, "is below the best logit"
        )
        if logprobs is not None:
            served = torch.tensor([row[token] for row, token in zip(logprobs, continuation, strict=True)])
            errors = (logits.log_softmax(1).gather(1, chosen)[:, 0] - served).abs()
            self._expect(errors, ROW_TOLERANCE * spread, ids, "has another log-probability")
        self.judged.add(key)

    @staticmethod
    def _expect(errors: torch.Tensor, tolerance: float, ids: list[int], what: str) -> None:
        bad = ~(errors <= tolerance)  # a NaN is bad as well
        if bad.any():
            first = int(bad.nonzero()[0, 0])
            raise Wrong(
                f"token {first} after a prompt of {len(ids)} {what}, by {float(errors[first]):.3g} "
                f"({int(bad.sum())} of {len(errors)} tokens)"
            )

    def assert_rows(self, ids: list[int], rows: torch.Tensor) -> None:
        """An encoder's rows [T, C] equal the source's."""
        with torch.no_grad():
            expected = self.model(input_ids=torch.tensor([ids])).logits[0]
        if rows.shape != expected.shape:
            raise Wrong(
                f"{len(ids)} tokens give {tuple(rows.shape)}, the source gives {tuple(expected.shape)}"
            )
        error = float((rows - expected).abs().max() / expected.std())
        if not error <= ROW_TOLERANCE:
            raise Wrong(f"{len(ids)} tokens: the rows are {error:.3g} of their spread away from the source's")
