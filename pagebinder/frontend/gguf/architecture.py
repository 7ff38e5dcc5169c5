"""How an architecture of GGUF files is told: its config in transformers, its names, what lies in another order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pagebinder.errors import CheckpointError
from pagebinder.frontend.gguf.file import GgufFile
from pagebinder.frontend.gguf.options import Options

# Parts of names of a layer, and what they are in the decoders of transformers.
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "attn_qkv": "self_attn.qkv_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
# Of experts: the parameter, and where a tensor's rows are among those of others.
EXPERTS = {
    "ffn_gate_exps": ("gate_up_proj", 0), "ffn_up_exps": ("gate_up_proj", 1), "ffn_gate_up_exps": ("gate_up_proj", 0),
    "ffn_down_exps": ("down_proj", 0),
}  # fmt: skip
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

Name = str | tuple[str, int]  # of a module, and the place of a tensor's rows among those of others
Order = Callable[[int], np.ndarray]  # from how many there are


@dataclass(frozen=True)
class Rule:
    """A parameter that is not the numbers of its tensors as they lie there.

    `rows`, `columns`: which of them each of its own is, from how many there are. `make`: the parameter, of the
    tensors' values in float32 instead; such a one keeps no codes. `is_bare`: it is a parameter of that name, no
    module's weight. `plain`: why it keeps no codes, though it could.
    """

    rows: Order | None = None
    columns: Order | None = None
    make: Callable[..., torch.Tensor] | None = None
    is_bare: bool = False
    plain: str | None = None


AS_STORED = Rule()


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One kind of model.

    `model_type`: of transformers. `config`: what its config has beyond what `config_of` says, or instead; `own`: what
    that need not look for. `base`: the module that has the layers. `names`: parts of names of a layer that differ
    from LAYER, `whole`: those of no layer. A part with its ending (`ffn_gate_inp.scale`) is a parameter of that name,
    no module's weight. `stacked`: names of no layer whose tensors are several matrices, of modules in a list.
    `unread`: tensors of layers that files may have and no model needs, from the config. `rules`: by parts of names,
    from the config. `norms_are_one_more`: weights of norms have 1 added. `frequencies`: tensors about RoPE that it
    may have; `in_config`: what they say is in the config. `turns_parts`: some of a head's width may be left as it is
    by RoPE. `experts`: where they are in a layer. `experts_alternate`: rows of gates and ups take turns in
    transformers' experts, whose matrices are transposed. `no_biases`: endings of biases of which no layer may have
    one where transformers has all of them: zeros.
    """

    model_type: str | Callable[[Options], str]
    config: Callable[[Options], dict[str, Any]] = lambda options: {}
    own: frozenset[str] = frozenset()
    base: str = "model"
    names: Mapping[str, Name] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    rules: Callable[[Any], Mapping[str, Rule]] = lambda config: {}
    norms_are_one_more: bool = False
    stacked: tuple[str, ...] = ()
    unread: Callable[[Any], frozenset[str]] = lambda config: frozenset()
    frequencies: tuple[str, ...] = ()
    in_config: bool = False
    turns_parts: bool = False
    experts: str = "mlp.experts"
    experts_alternate: bool = False
    no_biases: tuple[str, ...] = ("self_attn.o_proj.bias",)


def architecture_of(file: GgufFile) -> Architecture:
    """Raises CheckpointError: it is not served."""
    from pagebinder.frontend.gguf.architectures import ARCHITECTURES

    if file.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} holds a model of the architecture {file.architecture!r}; of GGUF files "
            f"{', '.join(sorted(ARCHITECTURES))} are served. The model's safetensors may be: give their directory."
        )
    return ARCHITECTURES[file.architecture]


# ---- orders ------------------------------------------------------------------------------------------------------


def halves_of_pairs(num_heads: int) -> Order:
    """llama.cpp turns neighbouring channels of some models' queries and keys, transformers those of two halves."""
    return lambda rows: np.arange(rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def paired(config: Any) -> dict[str, Rule]:
    """Rules of an architecture that rotates pairs of neighbours."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    return {part: Rule(rows=halves_of_pairs(count)) for part, count in heads.items()}
