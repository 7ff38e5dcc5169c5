"""Faults of models, of the hook and of leaves: what is captured must not pass for what it is not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2

import pagebinder.compile as compiler
from pagebinder.frontend import attention_interface, layer_observer, repeated_layers
from pagebinder.frontend import capture as capturing
from pagebinder.frontend.leaves.short_convolution import SHORT_CONVOLUTION
from pagebinder.frontend.mask_proof import MaskFacts
from tests import helpers
from tests.fuzz.random_decoders import RandomDecoder, decoder_of
from tests.fuzz.recipes import Recipe
from tests.mutation.bases import PLAIN, WINDOW
from tests.mutation.changes import called, in_captured, option, while_captured
from tests.mutation.faults import AUDIT, VERIFIER, Fault


def of_model(name: str, imitates: str, illegal: str, says: str, **recipe) -> Fault:
    """A plain decoder with an illegal ingredient."""
    parts = {**PLAIN, **recipe}

    def model():
        return decoder_of(Recipe(illegal=illegal, **parts))

    base_name = "written out" if parts["attention"] == "masked_fill" else "plain"
    return Fault(name=name, imitates=imitates, net=AUDIT, base=base_name, model=model, says=says)


MIXING_FAULTS = [
    of_model("shift to the next token", "RWKV's shift with its sign lost", "next token", "the token"),
    of_model("mean over tokens", "a norm with statistics of the batch", "mean over tokens", "reduces over"),
    of_model("cumsum over tokens", "a running sum in place of positions", "cumsum", "along the token dimension"),
    of_model("largest position of the batch", "longrope: frequencies by the longest request of the batch",
             "largest position", "reduces over"),
    of_model("last token of the batch", "pooling inside a layer", "last token", "reduces over"),
    of_model("convolution over tokens", "a short convolution padded on both sides", "convolution ahead",
             "looks at later tokens"),
    of_model("softmax over tokens", "dim=1 for dim=-1", "softmax over tokens", "along the token dimension"),
    of_model("linear attention", "attention without a softmax", "linear attention", "reduces over"),
    of_model("number of tokens as a factor", "log-length scaling by the size of the batch", "number of tokens",
             "number of tokens"),
    of_model("router over tokens", "expert choice: each expert picks its tokens", "router over tokens",
             "reduces over"),
    of_model("dropout left on", "a model in training mode", "random drop", "at random"),
    of_model("buffer that counts calls", "statistics kept between calls", "running buffer", "in place"),
    of_model("bidirectional mask", "an encoder served as a decoder", "bidirectional", "later tokens"),
    of_model("prefix-LM mask", "a prompt that sees itself", "prefix of two", "none of causal"),
    of_model("mask without the diagonal", "triu(0) for triu(1)", "strictly causal", "none of causal"),
    of_model("mask by content", "padding found by the token's value", "mask of content", "values of the tokens"),
    of_model("window that looks ahead", "a window of an encoder", "window ahead", "none of causal"),
    of_model("bidirectional softmax", "a mask that was never added", "bidirectional", "later tokens",
             attention="masked_fill"),
]  # fmt: skip


class ByLength(RandomDecoder):
    """Takes another way for long prompts: a trace of 40 tokens knows one of the two."""

    def forward(self, input_ids, position_ids):
        logits = super().forward(input_ids, position_ids)
        return logits * 2 if input_ids.shape[1] > 32 else logits


def by_length() -> torch.nn.Module:
    return helpers.scale_weights(ByLength(Recipe(**PLAIN)))


def folded_length(gm) -> None:
    """The number of tokens of the trace is written into the graph."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and "sym_size" in str(node.target):
            node.replace_all_uses_with(capturing.EXAMPLE_TOKENS)


def lost_layer(gm) -> None:
    node = called(gm, "attention", 1)
    node.replace_all_uses_with(node.args[0])
    gm.graph.erase_node(node)


def passes_on(**arguments):
    """A model whose attention layers get one more argument from their layer."""

    def model():
        module = helpers.tiny_mistral(WINDOW, num_hidden_layers=1)
        for layer in module.model.layers:
            layer.self_attn.register_forward_pre_hook(
                lambda m, args, kwargs: (args, {**kwargs, **arguments}), with_kwargs=True
            )
        return module

    return model


def no_leaves(patch: pytest.MonkeyPatch) -> None:
    for module in (capturing, compiler):
        patch.setattr(module, "LEAVES", ())


def leaf_of_the_wrong_class(patch: pytest.MonkeyPatch) -> None:
    leaf = dataclasses.replace(SHORT_CONVOLUTION, classes=("Lfm2Attention", "Lfm2ShortConv"))
    for module in (capturing, compiler):
        patch.setattr(module, "LEAVES", (leaf,))


def function_is_gone(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(modeling_mamba2, "mamba2_chunk_scan")


def function_takes_other_arguments(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modeling_mamba2, "mamba2_chunk_scan", lambda x, time_step, **kwargs: x)


def hook_without(argument: str):
    """The hook never hears of an argument."""

    def inject(patch):
        original = attention_interface.attention_forward
        deaf = lambda *args, **kwargs: original(*args, **{k: v for k, v in kwargs.items() if k != argument})  # noqa: E731
        patch.setattr(attention_interface, "attention_forward", deaf)

    return inject


def chunk_unread(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention_interface, "_configured_chunk", lambda module, name: None)


def mask_dropped(patch: pytest.MonkeyPatch) -> None:
    from pagebinder.frontend.recognise import sdpa

    patch.setattr(sdpa, "_mask_of", lambda node, proofs: (MaskFacts(causal=True), None))


def factor_of_values_lost(patch: pytest.MonkeyPatch) -> None:
    from pagebinder.frontend.recognise import sdpa

    original = sdpa.unrepeated
    patch.setattr(sdpa, "unrepeated", lambda x, head, fold_factors: original(x, head, fold_factors=True))


def written_mask_dropped(patch: pytest.MonkeyPatch) -> None:
    from pagebinder.frontend.recognise import raw_attention

    patch.setattr(raw_attention, "prove_terms", lambda terms: MaskFacts(causal=True))


def partial_applied_fully(meanwhile, model) -> None:
    for layer in model.layers:
        wide = layer.attention.recipe.head_dim
        meanwhile.setattr(layer.attention, "turned", wide)
        frequencies = 100.0 ** -(torch.arange(0, wide, 2).float() / wide)
        meanwhile.setitem(layer.attention._buffers, "frequencies", frequencies)


def one_more_expert(meanwhile, model) -> None:
    router = model.model.layers[0].mlp.gate
    meanwhile.setattr(router, "top_k", router.top_k + 1)


def not_normalised(meanwhile, model) -> None:
    meanwhile.setattr(model.model.layers[0].mlp.gate, "norm_topk_prob", False)


def embedding_unscaled(meanwhile, model) -> None:
    meanwhile.setitem(model.model.embed_tokens._buffers, "embed_scale", torch.tensor(1.0))


def all_layers_alike(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layer_observer, "_alike", lambda a, b: type(a[0].module) is type(b[0].module))


def weights_of_the_first_layer(patch: pytest.MonkeyPatch) -> None:
    weights = repeated_layers._weights
    patch.setattr(repeated_layers, "_weights", lambda layer, leader: weights(leader, leader))


def fault(name: str, imitates: str, base: str, inject=None, says: str = "", **options) -> Fault:
    options = {"net": AUDIT, "recapture": True, **options}
    return Fault(name=name, imitates=imitates, base=base, inject=inject, says=says, **options)


ACAUSAL = in_captured(option("attention", 1, causal=False))
CAPTURE_FAULTS = [
    fault("causality lost by the capture", "BLOOM through the attention hook", "mistral", ACAUSAL, "later tokens"),
    fault("attention layer lost", "a layer traced as the identity", "mistral", in_captured(lost_layer),
          "the config says 2"),
    fault("length folded into the graph", "a trace that is right for one prompt length", "plain",
          in_captured(folded_length), ""),
    fault("another way for long prompts", "a Python branch on the number of tokens", "plain", model=by_length,
          says="tokens"),
    fault("missing leaf", "a recurrent layer that is traced as it stands", "lfm2", no_leaves, ""),
    fault("leaf on the wrong class", "a leaf applied by a name that has moved", "lfm2", leaf_of_the_wrong_class,
          "emitted 0 calls"),
    fault("leaf whose function is gone", "a new version of transformers", "mamba2", function_is_gone,
          "has no function"),
    fault("leaf whose function has changed", "renamed arguments in a new version", "mamba2",
          function_takes_other_arguments, "does not take"),
    fault("unknown argument of attention", "DeepSeek-V4: a block bias that the hook ignores", "mistral",
          model=passes_on(block_bias=torch.ones(1)), says="block_bias"),
    fault("mask given to the hook", "a padding mask that is dropped", "mistral",
          model=passes_on(attention_mask=torch.zeros(1, 1, 40, 40)), says="mask"),
    fault("window not passed on", "Phi-MoE: the window lives in the mask alone", "mistral",
          hook_without("sliding_window"), "sliding window"),
    fault("soft cap not passed on", "a hook that ignores what it does not know", "gemma2", hook_without("softcap"),
          "captured level", net=VERIFIER),
    fault("sinks not passed on", "s_aux ignored by an attention backend", "gpt-oss", hook_without("s_aux"),
          "captured level", net=VERIFIER),
    fault("chunk not read", "Llama 4: the chunk size is in the config alone", "llama4", chunk_unread,
          "captured level", net=VERIFIER),
    fault("mask dropped in silence", "a mask taken for a causal one without looking", "plain", mask_dropped,
          "semantic level", net=VERIFIER, recapture=False),
    fault("factor of repeated values lost", "a scaling taken out of an operand, and used by nobody", "plain",
          factor_of_values_lost, "semantic level", net=VERIFIER, recapture=False),
    fault("written-out mask dropped in silence", "masked_fill taken for causal", "written out", written_mask_dropped,
          "semantic level", net=VERIFIER, recapture=False),
    fault("partial RoPE applied fully", "partial_rotary_factor not read", "plain",
          while_captured(partial_applied_fully), "captured level", net=VERIFIER),
    fault("one expert too many", "top k off by one", "qwen3 experts", while_captured(one_more_expert),
          "captured level", net=VERIFIER),
    fault("expert weights not normalised", "norm_topk_prob not read", "qwen3 experts", while_captured(not_normalised),
          "captured level", net=VERIFIER),
    fault("embedding not scaled", "Gemma without its sqrt(width)", "gemma2", while_captured(embedding_unscaled),
          "captured level", net=VERIFIER),
    fault("layers taken for the same that are not", "one layer captured for all of a hybrid model", "gemma2",
          all_layers_alike, "captured level", net=VERIFIER),
    fault("weights of the first layer in every copy", "a layer copied with what it reads", "mistral",
          weights_of_the_first_layer, "captured level", net=VERIFIER),
]  # fmt: skip
