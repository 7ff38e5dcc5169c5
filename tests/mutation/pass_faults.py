"""Faults of passes and of what they emit: the verifier must name the step."""

from __future__ import annotations

import torch

from pagebinder.graph_tools import aten, insert_call
from tests.mutation.bases import CHUNK, WINDOW
from tests.mutation.changes import (
    after,
    argument,
    bypassed,
    called,
    in_captured,
    operand_of_another,
    option,
    placeholder,
    replaced_input,
    result_of,
    swapped,
    through,
)
from tests.mutation.faults import LOCK, VERIFIER, Fault


def fault(name: str, imitates: str, base: str, inject, says: str = "", **options) -> Fault:
    options = {"net": VERIFIER, **options}
    return Fault(name=name, imitates=imitates, base=base, inject=inject, says=says, **options)


def read_before_write(gm) -> None:
    """The new K and V are stored after the attention has read the cache."""
    called(gm, "paged_attention", 0).append(called(gm, "kv_cache_write", 0))


def residual_lost(gm) -> None:
    result_of("add_rms_norm", 0, 1)(gm).replace_all_uses_with(called(gm, "add_rms_norm", 0).args[0])


def results_swapped(gm) -> None:
    normed, total = (result_of("add_rms_norm", 0, i)(gm) for i in (0, 1))
    normed.args, total.args = (normed.args[0], 1), (total.args[0], 0)


def positions_of_the_batch(gm) -> None:
    """Every request's positions count from the first one of the step."""
    positions = placeholder(gm, "positions")
    users = list(positions.users)
    first = insert_call(gm.graph, users[0], aten.select.int, (positions, 0, 0))
    counted = insert_call(gm.graph, users[0], aten.sub.Tensor, (positions, first))
    for user in users:
        user.replace_input_with(positions, counted)


def forgets_its_state(name: str):
    def change(gm):
        node = called(gm, name, 0)
        starts, lens = placeholder(gm, "query_start_loc"), placeholder(gm, "seq_lens")
        node.replace_input_with(lens, insert_call(gm.graph, node, aten.diff.default, (starts,)))

    return change


def tiled_heads(gm) -> None:
    """Head h reads KV head h % G in place of h // (H // G)."""
    for position in (1, 2):
        through("attention", 0, position, aten.repeat.default, [1, 2, 1])(gm)


PAGED, NORMS = "page_attention", "recognise_rms_norm"
PASS_FAULTS = [
    fault("window off by one", "`>` for `>=` in a kernel's mask", "mistral",
          after(PAGED, option("paged_attention", 1, window=WINDOW + 1)), "paged level"),
    fault("window ignored", "a backend without sliding windows runs full attention", "mistral",
          after(PAGED, option("paged_attention", 1, window=None)), "paged level"),
    fault("window of one layer given to all", "one window for layers that alternate", "gemma2",
          after(PAGED, option("paged_attention", 1, window=WINDOW)), "paged level"),
    fault("chunk off by one", "a chunk's border belongs to the wrong chunk", "llama4",
          after(PAGED, option("paged_attention", 0, chunk=CHUNK + 1)), "paged level"),
    fault("causality dropped", "a kernel called without its causal flag", "mistral",
          after(PAGED, option("paged_attention", 0, causal=False)), "paged level"),
    fault("sink dropped", "a kernel that takes no sinks", "gpt-oss",
          after(PAGED, argument("paged_attention", 1, 5, None)), "paged level"),
    fault("sink of another head", "sinks sharded or permuted unlike the heads", "gpt-oss",
          after(PAGED, through("paged_attention", 1, 5, aten.flip.default, [0])), "paged level"),
    fault("scale changed", "1 / sqrt(hidden / heads) where head_dim says otherwise", "mistral",
          after(PAGED, option("paged_attention", 1, scale=0.2)), "paged level"),
    fault("soft cap dropped", "a fast kernel without soft caps", "gemma2",
          after(PAGED, option("paged_attention", 0, soft_cap=None)), "paged level"),
    fault("soft cap of another size", "the logits' cap used for the scores", "gemma2",
          after(PAGED, option("paged_attention", 0, soft_cap=10.0)), "paged level"),
    fault("ALiBi with the other sign", "slope * (p - j) for slope * (j - p)", "alibi",
          after(PAGED, through("paged_attention", 0, 6, aten.neg.default)), "paged level"),
    fault("ALiBi halved", "slopes of another number of heads", "alibi",
          after(PAGED, through("paged_attention", 0, 6, aten.mul.Tensor, 0.5)), "paged level"),
    fault("bias by distance off by one", "distances counted from one", "by distance",
          after(PAGED, through("paged_relative_attention", 0, 5, aten.roll.default, [1], [1])), "paged level"),
    fault("bias by distance in reverse", "a table of j - p read by p - j", "by distance",
          after(PAGED, through("paged_relative_attention", 0, 5, aten.flip.default, [1])), "paged level"),
    fault("RoPE pairs neighbours", "interleaved weights read half-split, or the reverse", "mistral",
          after("recognise_rope", option("rope", 2, style="every_two")), "semantic level"),
    fault("cosine and sine swapped", "the tables unpacked in the wrong order", "mistral",
          after("recognise_rope", swapped("rope", 2, 1, 2)), "semantic level"),
    fault("RoPE turned backwards", "a sign lost in rotate_half", "mistral",
          after("recognise_rope", through("rope", 3, 2, aten.neg.default)), "semantic level"),
    fault("RoPE left out for keys", "a layer taken for one without positions", "mistral",
          after("recognise_rope", bypassed("rope", 1)), "semantic level"),
    fault("RoPE of the other kind of layer", "local and global frequencies mixed up", "gemma3",
          after("recognise_rope", operand_of_another("rope", 2, 0, 1)), "semantic level"),
    fault("eps changed", "a default eps of 1e-5 for a config's 1e-6", "mistral",
          after(NORMS, option("rms_norm", 2, eps=1e-5)), NORMS, verify="full"),
    # One unit in the last place of bfloat16: no more than a sum in another order, so the verifier must tolerate it.
    fault("norm rounds late", "the cast moved behind the weight", "mistral bf16",
          after(NORMS, option("rms_norm", 1, tail="scale_cast")), "tail=scale_cast", net=LOCK, verify="full"),
    fault("1 + w taken for w", "Gemma's norm served as Llama's", "gemma2",
          after(NORMS, option("rms_norm", 0, tail="cast_scale")), "semantic level"),
    fault("norm with another layer's weight", "weights off by one layer", "mistral",
          after(NORMS, operand_of_another("rms_norm", 0, 2, 1)), "semantic level"),
    fault("residual lost in add + norm", "a fused kernel that returns x for x + residual", "mistral",
          after("fuse_add_rms_norm", residual_lost), "fused level"),
    fault("results of add + norm swapped", "outputs unpacked in the wrong order", "mistral",
          after("fuse_add_rms_norm", results_swapped), "fused level"),
    fault("gate and up swapped", "halves of a fused projection in the wrong order", "mistral",
          after("recognise_gated_activation", swapped("gated_activation", 1, 0, 1)), "semantic level"),
    fault("another activation", "GELU for SiLU", "mistral",
          after("recognise_gated_activation", option("gated_activation", 0, activation="gelu")), "semantic level"),
    fault("KV heads in reverse", "KV heads sharded in another order than the queries", "mistral",
          after(PAGED, through("kv_cache_write", 0, 0, aten.flip.default, [1])), "paged level"),
    fault("query heads tiled over KV heads", "repeat for repeat_interleave", "mistral",
          after("recognise_sdpa", tiled_heads), "semantic level"),
    fault("K written where V belongs", "both halves of the cache from one tensor", "mistral",
          after(PAGED, swapped("kv_cache_write", 1, 0, 1)), "paged level"),
    fault("slot mapping off by one", "slots counted from one", "mistral",
          after(PAGED, through("kv_cache_write", 0, 3, aten.sub.Tensor, 1)), "paged level"),
    fault("block table of another request", "rows of a batch out of step after a request has ended", "mistral",
          after(PAGED, through("paged_attention", 1, 2, aten.roll.default, [1], [0])), "paged level"),
    fault("cache of another layer", "one cache bound twice", "mistral",
          after(PAGED, operand_of_another("paged_attention", 1, 0, 1)), "paged level"),
    fault("cache read before it is written", "a scheduler that moves a mutating op", "mistral",
          after(PAGED, read_before_write), "paged level"),
    fault("lengths without the cached tokens", "chunked prefill that sees its own chunk only", "mistral",
          after(PAGED, forgets_its_state("paged_attention")), "paged level"),
    fault("positions of the batch", "positions counted from the first token of the step", "mistral",
          after(PAGED, positions_of_the_batch), "paged level"),
    fault("logits of the token before", "the last-token index off by one", "mistral",
          after("gather_logits", through("index_select", 0, 2, aten.roll.default, [1], [0])), "paged level"),
    fault("cross attention is causal", "a decoder's default flag on cross attention", "bart",
          after("page_cross_attention", option("paged_attention", 1, causal=True)), "paged level"),
    fault("cross attention by the decoder's lengths", "one length per request for both sequences", "bart",
          after("page_cross_attention", replaced_input("paged_attention", 1, "encoder_lens", "seq_lens")),
          "cannot be run"),
    fault("recurrence forgets between steps", "a state cache that is reset by each chunk", "qwen3-next",
          after("page_recurrent", forgets_its_state("paged_gated_delta_rule")), "paged level"),
    fault("convolution forgets between steps", "the last taps of a chunk are not kept", "lfm2",
          after("page_recurrent", forgets_its_state("paged_short_conv")), "paged level"),
    fault("provider with a wrong result", "a kernel that is wrong for one feature", "mistral",
          after("select_providers", option("paged_attention", 1, soft_cap=5.0)), "fused level"),
    fault("provider given another provider's layout", "a kernel called with permuted operands", "mistral",
          after("select_providers", through("paged_attention", 0, 0, aten.flip.default, [2])), "fused level"),
]  # fmt: skip

OPS = torch.ops.pagebinder
CAPTURE = "captured level"
CAPTURED_FAULTS = [
    fault("decay squared", "log decay applied twice", "qwen3-next",
          in_captured(through("gated_delta_rule", 0, 3, aten.mul.Tensor, 2.0)), CAPTURE),
    fault("gate of the delta rule left out", "beta taken for one", "qwen3-next",
          in_captured(through("gated_delta_rule", 0, 4, aten.ones_like.default)), CAPTURE),
    fault("bias of the time step lost", "dt_bias is not passed to the scan", "mamba2",
          in_captured(argument("ssd", 0, 6, None)), CAPTURE),
    fault("skip connection of the scan lost", "D is not passed to the scan", "mamba2",
          in_captured(argument("ssd", 0, 5, None)), CAPTURE),
    fault("taps in reverse", "convolution for cross-correlation", "lfm2",
          in_captured(through("short_conv", 0, 1, aten.flip.default, [1])), CAPTURE),
    fault("activation of the convolution lost", "a kernel that leaves the SiLU to its caller", "mamba2",
          in_captured(option("short_conv", 0, activation=None)), CAPTURE),
    fault("experts in another order", "expert weights permuted by a converter", "qwen3 experts",
          in_captured(through("moe_experts", 0, 3, aten.flip.default, [0])), CAPTURE),
    fault("limit of the experts lost", "a SwiGLU without its clamp", "gpt-oss experts",
          in_captured(option("moe_experts", 0, limit=None)), CAPTURE),
    fault("alpha of the experts lost", "SiLU for x * sigmoid(1.702 x)", "gpt-oss experts",
          in_captured(option("moe_experts", 0, alpha=1.0)), CAPTURE),
    fault("down projection's bias lost", "biases of experts are rare and forgotten", "gpt-oss experts",
          in_captured(argument("moe_experts", 0, 6, None)), CAPTURE),
    fault("interleaved experts read as halves", "gate_up split down the middle", "gpt-oss experts",
          in_captured(option("moe_experts", 0, interleaved=False)), CAPTURE),
]  # fmt: skip
