"""Attention among the parts of an image: which layers let them see each other, and how far, by the model's own masks.

    asked while compiling   model(input_ids [1, 4], token_type_ids [0, 1, 1, 0]), up to the call of its language model
    its masks               {"full_attention": token 1 sees token 2, "sliding_attention": it does not}
    the captured graph      attention -> lookahead_attention in layers of full attention

    asked of a prompt       masks [1, 1, T, T] by kind of layer  ->  lookahead [T], if that is all that they say

Models that do so (Gemma 3 and 4, PaliGemma, Molmo 2) are told by types of tokens which of them are an image's.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pagebinder.errors import RequestError
from pagebinder.frontend.language_model import MASK, given_to, language_model
from pagebinder.frontend.python_state import evaluation_mode
from pagebinder.graph_tools import calls

TYPES = "token_type_ids"
FULL, SLIDING = "full_attention", "sliding_attention"
ASKED = [[0, 1, 1, 0]]  # types of tokens: two parts of an image
ours = torch.ops.pagebinder
# Kind of a layer -> (window or None, whether its tokens of images see those behind them).
Layers = Mapping[str, tuple[int | None, bool]]


def kinds_that_see_on(model: torch.nn.Module) -> frozenset[str]:
    """Kinds of layers in which parts of an image see those behind them, as far as the model says before it has seen
    any: of none where it takes no types of tokens, or cannot be asked."""
    inner = language_model(model)
    takes = [name for name in inspect.signature(model.forward).parameters if name.endswith(TYPES)]
    if inner is None or not takes:
        return frozenset()
    types = torch.tensor(ASKED, device="cpu")
    with contextlib.suppress(RequestError), torch.no_grad(), evaluation_mode(model), _small(model) as device:
        ids = torch.zeros_like(types, device=device)
        given = given_to(inner, model, {"input_ids": ids, **dict.fromkeys(takes, types.to(device))})
        masks = _matrices(given.get(MASK), types.shape[1], type(model).__name__)
        return frozenset(kind for kind, mask in masks.items() if bool(mask.triu(1).any()))
    return frozenset()


@contextlib.contextmanager
def _small(model: torch.nn.Module) -> Iterator[torch.device]:
    """Where the model can be called up to its language model: one without weights with an embedding of one channel,
    as masks are made of sizes alone."""
    embedding = model.get_input_embeddings()
    device = embedding.weight.device
    if device.type != "meta":
        yield device
        return
    model.set_input_embeddings(torch.nn.Embedding(len(embedding.weight), 1, device="cpu"))
    try:
        yield torch.device("cpu")
    finally:
        model.set_input_embeddings(embedding)


def _matrices(given: Any, num_tokens: int, name: str) -> dict[str, torch.Tensor]:
    """Masks [T, T] by kind of layer, True: seen; of kinds that are told nothing but what text is: none.

    Raises:
        RequestError: they are in a form that is not known here.
    """
    if not isinstance(given, Mapping):
        given = {FULL: given, SLIDING: given}
    masks = {}
    for kind, mask in given.items():
        if mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool((mask == 1).all())):
            continue  # nothing is said beside the order of tokens
        fits = isinstance(mask, torch.Tensor) and mask.shape == (1, 1, num_tokens, num_tokens)
        if not fits or kind not in (FULL, SLIDING):
            raise RequestError(
                f"{name} gives its language model a mask that is not known here ({kind}): prompts like it are not "
                "served."
            )
        mask = mask[0, 0].cpu()
        masks[kind] = mask if mask.dtype == torch.bool else mask == 0
    return masks


def attention_of(gm: GraphModule, kinds: frozenset[str]) -> list[Node]:
    """Attention of these kinds of layers that can be made to see on, in the order of the layers."""
    return [
        node for node in calls(gm.graph, ours.attention.default) if _kind(node) in kinds and _can_see_on(node)
    ]


def let_see_on(nodes: list[Node], lookahead: Node) -> None:
    """Their queries see as many keys behind their own as `lookahead` [T] int32 says; in place."""
    for node in nodes:
        q, k, v, *optional = node.args
        options = {key: node.kwargs[key] for key in ("scale", "window", "soft_cap") if key in node.kwargs}
        node.target = ours.lookahead_attention.default
        node.args, node.kwargs = (q, k, v, lookahead, *optional[:1]), options


def _can_see_on(node: Node) -> bool:
    slopes = node.args[4] if len(node.args) > 4 else node.kwargs.get("alibi_slopes")
    return slopes is None and node.kwargs.get("chunk") is None and node.kwargs.get("causal", True)


def _kind(node: Node) -> str:
    return FULL if node.kwargs.get("window") is None else SLIDING


def layers_of(gm: GraphModule) -> Layers:
    """What is asked of masks, of a graph after `let_see_on`; {} where none of its layers sees on, or where layers
    of a kind differ, of which there is one mask."""
    layers: dict[str, tuple[int | None, bool]] = {}
    for node in calls(gm.graph, ours.attention.default, ours.lookahead_attention.default):
        layer = (node.kwargs.get("window"), node.target is ours.lookahead_attention.default)
        if layers.setdefault(_kind(node), layer) != layer:
            return {}
    return layers if any(sees_on for _, sees_on in layers.values()) else {}


def lookahead_of(given: Any, layers: Layers, num_tokens: int, name: str) -> torch.Tensor:
    """[T] int64: how many tokens behind it each one sees, by the masks that the language model is given.

    Raises:
        RequestError: they say anything besides.
    """
    place, lookahead = torch.arange(num_tokens), torch.zeros(num_tokens, dtype=torch.int64)
    if not layers:  # then the masks are those of text
        return lookahead
    masks = _matrices(given, num_tokens, name)
    for kind, (_, sees_on) in layers.items():
        if sees_on and kind in masks:
            last = (masks[kind].long() * place).amax(1)
            lookahead = torch.maximum(lookahead, (last - place).clamp(min=0))
    for kind, (window, sees_on) in layers.items():
        ahead = lookahead if sees_on else torch.zeros_like(lookahead)
        wanted = place[None] <= (place + ahead)[:, None]
        if window is not None:
            wanted &= place[None] > (place - window)[:, None]
        if kind in masks and not torch.equal(masks[kind], wanted):
            raise RequestError(
                f"{name}: tokens of this prompt see others than those before them and the parts of their own image "
                f"({kind}). Prompts like it are not served."
            )
        if kind not in masks and bool(ahead.any()):
            raise RequestError(f"{name} lets parts of images see each other in some of its layers alone.")
    return lookahead
