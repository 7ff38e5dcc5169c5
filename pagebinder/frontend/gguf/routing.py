"""What GGUF files say of routers of experts that transformers computes as DeepSeek's, and where their tensors are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagebinder.frontend.gguf.architecture import Rule
from pagebinder.frontend.gguf.options import Options, counts

SOFTMAX, SIGMOID = 1, 2  # values of expert_gating_func; 0 says nothing

SHARED = {  # an expert of every token, and what is added to scores before experts are chosen
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj", "exp_probs_b": "mlp.gate.e_score_correction_bias",
}  # fmt: skip
CORRECTION = ("exp_probs_b", "e_score_correction_bias")  # of files, of transformers


def corrected(config: Any) -> Mapping[str, Rule]:
    """Rules of an architecture whose scores are corrected."""
    return {CORRECTION[0]: Rule(is_bare=True)}


def gating(options: Options, otherwise: int) -> int:
    """What makes scores of a router's logits: SOFTMAX or SIGMOID; `otherwise`: where the file does not say.

    Raises:
        CheckpointError: something else does.
    """
    said = options.get("expert_gating_func", 0)
    kind = said or otherwise
    if type(said) is not int or kind not in (SOFTMAX, SIGMOID):
        options.refuse("expert_gating_func")
    return kind


def require_gating(options: Options, kind: int, otherwise: int) -> None:
    """Raises CheckpointError: something else makes scores."""
    if gating(options, otherwise) != kind:
        options.refuse("expert_gating_func")


def flag(options: Options, name: str, default: bool = False) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        options.refuse(name)
    return value


def scale_of_experts(options: Options) -> float:
    """Of the weights of experts; a file that says 0 means none."""
    return options.number("expert_weights_scale", 1.0) if options.get("expert_weights_scale") else 1.0


def num_dense(options: Options) -> int:
    """Layers without experts, which are the first ones."""
    count = options.get("leading_dense_block_count", 0)
    if not isinstance(count, int) or not 0 <= count <= options.num_layers:
        options.refuse("leading_dense_block_count")
    return count


def groups(options: Options) -> tuple[int, int]:
    """Of experts, and of those that a token may go to; a file that says nothing of them has one."""
    experts, used_experts = counts(options)
    count, used = options.count("expert_group_count", 1), options.count("expert_group_used_count", 1)
    if experts % count or experts < 2 * count:  # a group has the score of its best two experts
        options.refuse("expert_group_count")
    if used > count or used * (experts // count) < used_experts:
        options.refuse("expert_group_used_count")
    return count, used


def routed(options: Options) -> dict[str, Any]:
    """The config of experts that a router chooses, beside one that is shared, behind layers without any."""
    (count, used), (num_groups, used_groups) = counts(options), groups(options)
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "n_shared_experts": options.count("expert_shared_count"),
        "moe_intermediate_size": options.count("expert_feed_forward_length"),
        "first_k_dense_replace": num_dense(options),
        "n_group": num_groups,
        "topk_group": used_groups,
        "norm_topk_prob": flag(options, "expert_weights_norm"),
        "routed_scaling_factor": scale_of_experts(options),
    }
