"""Leaves: Qwen4's per-layer embeddings of n-grams (PLE), which look some tokens back.

    n-gram ids   tokens t, t-1, .. t-N+1, "end of text" in the place of those before such a token or before the first
    source       gathers along the tokens            here   short_conv, whose taps are 1 at one token and 0 elsewhere
    after it     a convolution with holes            here   short_conv, with zeros in the holes

A short convolution knows nothing but zeros before the first token, so ids count from that of the end of text. In
float32 they are exact below 2^24.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.errors import CaptureError
from pagebinder.frontend.leaves.base import Leaf

MOST_IDS = 1 << 24
PROBED_TOKENS = 24
OPS = torch.ops.pagebinder


def earlier_tokens(ids_T: torch.Tensor, size: int, end: int) -> list[torch.Tensor]:
    """`size` times [T]: the token itself, the one before it, ..; `end` where there is none or an end is between."""
    taps = torch.eye(size, dtype=torch.float32, device=ids_T.device)[1:].flip(1)  # [size - 1, size]
    rows = (ids_T - end).float()[:, None].expand(-1, size - 1)
    before = OPS.short_conv(rows, taps, None, activation=None).round().long() + end
    found = [ids_T]
    for shift in range(1, size):
        here = before[:, shift - 1]
        ended = found[-1] == end if shift > 1 else None
        found.append(here if ended is None else torch.where(ended, end, here))
    return found


def ngram_embedding(self, input_ids, cache):
    """Qwen4ExpTextNGramEmbedding.forward: [1, T] -> [1, T, embedding width]."""
    if cache is not None or input_ids.shape[0] != 1:
        raise CaptureError(f"{type(self).__name__} is given a cache, or several sequences, during capture.")
    tokens = earlier_tokens(input_ids[0].long(), self.ngram_size, int(self.eos_token_id))
    mixed, blocks = tokens[0] * self.layer_multipliers[0], []
    for ngram in range(2, self.ngram_size + 1):
        mixed = torch.bitwise_xor(mixed, tokens[ngram - 1] * self.layer_multipliers[ngram - 1])
        heads = slice((ngram - 2) * self.heads_per_ngram, (ngram - 1) * self.heads_per_ngram)
        ids = torch.remainder(mixed[:, None], self.ngram_heads_vocab_sizes[heads])
        blocks.append(ids + self.ngram_heads_offsets[heads])
    return self.ngram_embedding(torch.cat(blocks, dim=-1)).flatten(-2).unsqueeze(0)


def short_conv(self, hidden_states, cache):
    """Qwen4ExpTextPLELayer._short_conv: [1, T, C] -> [1, T, C]."""
    conv = self.conv1d
    known = type(conv) is torch.nn.Conv1d and conv.groups == conv.in_channels == conv.out_channels
    if not known or conv.bias is not None or conv.stride != (1,) or cache is not None:
        raise CaptureError(f"{conv} is not a causal depthwise convolution without a bias and a cache.")
    (taps,), (holes,) = conv.kernel_size, conv.dilation
    weight = torch.nn.functional.pad(conv.weight[:, 0, :, None], (0, holes - 1)).flatten(1)
    weight = weight[:, : (taps - 1) * holes + 1]
    return OPS.short_conv(hidden_states[0], weight, None, activation="silu").unsqueeze(0)


@dataclass(frozen=True, kw_only=True)
class ProvenLeaf(Leaf):
    """Each module's own method runs beside ours before the capture, on the ids or rows of `probe`."""

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        for path, module in self.modules(model).items():
            for name, ours in self.functions.items():
                self._prove(path, module, name.partition(".")[2], ours)
        with Leaf.patched(self, model):
            yield

    def _prove(self, path: str, module: torch.nn.Module, method: str, ours) -> None:
        """Raises CaptureError: the method is gone, or gives something else than ours."""
        theirs = getattr(type(module), method, None)
        if theirs is None:
            raise CaptureError(self._changed(f"{path} has no method {method}"))
        tensor = next(module.parameters())
        if tensor.is_meta:
            return
        x = self.probe(module).to(tensor.device)
        with torch.no_grad():
            expected, got = (form(module, x, None).float() for form in (theirs, ours))
        tolerance = 2e-2 if tensor.dtype.itemsize < 4 else 1e-4  # of 16 bits the source rounds in between
        if not (expected - got).abs().max() <= tolerance * expected.abs().max():
            raise CaptureError(self._changed(f"{path} computes something else"))

    def probe(self, module: torch.nn.Module) -> torch.Tensor:
        """Rows that a convolution meets."""
        shape, generator = (1, PROBED_TOKENS, module.conv1d.in_channels), torch.Generator().manual_seed(0)
        return torch.randn(shape, generator=generator).to(module.conv1d.weight.dtype)


@dataclass(frozen=True, kw_only=True)
class NgramLeaf(ProvenLeaf):
    def probe(self, module: torch.nn.Module) -> torch.Tensor:
        """Token ids with ends of text at the beginning, alone and side by side."""
        if module.unigram_vocab_size > MOST_IDS:
            raise CaptureError(f"{module.unigram_vocab_size} token ids are more than float32 tells apart.")
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, module.unigram_vocab_size, (1, PROBED_TOKENS), generator=generator)
        ids[0, [0, 5, 6, 10, 12]] = int(module.eos_token_id)
        return ids


NGRAM_EMBEDDING = NgramLeaf(
    name="n-gram embedding",
    classes=("Qwen4ExpTextNGramEmbedding",),
    functions={"Qwen4ExpTextNGramEmbedding.forward": ngram_embedding},
    emits=(torch.ops.pagebinder.short_conv.default,),
    seen_on=("5.23", "5.24"),
)
PLE_CONVOLUTION = ProvenLeaf(
    name="convolution of n-gram embeddings",
    classes=("Qwen4ExpTextPLELayer",),
    functions={"Qwen4ExpTextPLELayer._short_conv": short_conv},
    emits=(torch.ops.pagebinder.short_conv.default,),
    seen_on=("5.23", "5.24"),
)
