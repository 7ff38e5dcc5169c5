"""Files of Qwen3-Next and Qwen3.5, see gguf_files.py: value heads in turns, q, k, v and z one behind the other."""

from __future__ import annotations

import numpy as np

from tests.frontend.gguf_files import EXPERTS, HEAD, MODELS, TENSORS, THETA, Stored, one_more

LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4, "num_hidden_layers": 4, "rope_parameters": THETA | {"partial_rotary_factor": 0.25},
}  # fmt: skip
OF_LINEAR = {
    "ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2, "ssm.time_step_rank": 8, "ssm.inner_size": 512,
    "rope.dimension_count": 16,
}  # fmt: skip
SHARED = EXPERTS | {"shared_expert_intermediate_size": 256}
OF_EXPERTS = {
    "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256,
    "expert_shared_feed_forward_length": 256,
}  # fmt: skip
SECTIONS = {"rope.dimension_sections": [4, 2, 2, 0]}
LAYERS = {"attention.recurrent_layers": [True, False, True, False]}
TYPES = ["linear_attention", "full_attention"] * 2

MODELS |= {
    "qwen3next": ("qwen3next", "qwen3_next", HEAD | LINEAR | SHARED, OF_LINEAR | OF_EXPERTS),
    "qwen35": (
        "qwen35",
        "qwen3_5_text",
        HEAD | LINEAR | {"layer_types": TYPES},
        OF_LINEAR | SECTIONS | LAYERS,
    ),
    "qwen35moe": ("qwen35moe", "qwen3_5_moe_text", HEAD | LINEAR | SHARED, OF_LINEAR | OF_EXPERTS | SECTIONS),
}
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _tensors(model) -> dict[str, Stored]:
    found, in_turns = {}, "in_proj_z" in "".join(name for name, _ in model.named_modules())
    for key, parameter in model.named_parameters():
        owner, _, kind = key.rpartition(".")
        if owner in WHOLE:
            found[f"{WHOLE[owner]}.{kind}"] = Stored(parameter, change=one_more if "norm" in key else None)
            continue
        _, _, layer, path = key.split(".", 3)
        found |= {
            f"blk.{layer}.{name}": stored
            for name, stored in _of_layer(path, parameter, model.config, in_turns).items()
        }
    return found


def _of_layer(path: str, parameter, config, in_turns: bool) -> dict[str, Stored]:
    if path.endswith("A_log"):
        heads = _in_turns(config, 1) if in_turns else None
        return {"ssm_a": Stored(parameter, heads, change=lambda values: -np.exp(values))}
    if path.endswith("dt_bias"):
        return {"ssm_dt.bias": Stored(parameter, _in_turns(config, 1) if in_turns else None)}
    if path.endswith("gate_up_proj"):
        gates, ups = parameter.chunk(2, dim=1)
        return {"ffn_gate_exps.weight": Stored(gates), "ffn_up_exps.weight": Stored(ups)}
    if path == "mlp.experts.down_proj":
        return {"ffn_down_exps.weight": Stored(parameter)}
    if "in_proj_qkvz" in path:
        return _one_behind_the_other(parameter, config)
    name = NAMES[path.rpartition(".")[0]]
    rows = columns = change = None
    if in_turns and name in ("attn_gate", "attn_qkv", "ssm_conv1d"):
        rows = _in_turns(config, config.linear_value_head_dim, len(parameter))
    elif in_turns and name in ("ssm_beta", "ssm_alpha"):
        rows = _in_turns(config, 1)
    elif in_turns and name == "ssm_out":
        columns = _in_turns(config, config.linear_value_head_dim)
    if "norm" in name and name != "ssm_norm":
        change = one_more
    elif name in ("ssm_conv1d", "ffn_gate_inp_shexp"):
        change = lambda values: values.squeeze(1) if values.ndim == 3 else values[0]  # noqa: E731
    return {f"{name}.weight": Stored(parameter, rows, columns, change)}


def _in_turns(config, width: int, count: int | None = None) -> np.ndarray:
    """The first value head of each key head, the second of each, ...: at the end of `count` rows."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    of_values = np.arange(values * width).reshape(keys, values // keys, width).swapaxes(0, 1).reshape(-1)
    before = 0 if count is None else count - len(of_values)
    return np.concatenate((np.arange(before), before + of_values))


def _one_behind_the_other(parameter, config) -> dict[str, Stored]:
    """q, k, v and z lie head by head."""
    keys = config.linear_num_key_heads
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    widths = (config.linear_key_head_dim, config.linear_key_head_dim, values, values)
    rows = np.arange(len(parameter)).reshape(keys, -1)
    q, k, v, z = (part.reshape(-1) for part in np.split(rows, np.cumsum(widths)[:-1], axis=1))
    return {
        "attn_qkv.weight": Stored(parameter, np.concatenate((q, k, v))),
        "attn_gate.weight": Stored(parameter, z),
    }


TENSORS.update(dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _tensors))
