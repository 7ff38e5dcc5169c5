"""What a tiny config of one model type needs beyond the general table; "default" leaves the config's own default."""

from __future__ import annotations

_WINDOW_AND_FULL = ["sliding_attention", "full_attention"] * 2
_STATE_AND_FULL = ["linear_attention", "full_attention"] * 2
_MIXED = {"num_hidden_layers": 4, "sliding_window": 16, "layer_types": _WINDOW_AND_FULL}
_SWITCHED_ON = {**_MIXED, "use_sliding_window": True}
_ANY_SPECIAL = {"bos_token_id": "default", "eos_token_id": "default", "pad_token_id": 0}
_BLT_PART = {"hidden_size_global": 64, "num_key_value_heads": 4}
# Biases that end within a prompt, and long contexts from 8 tokens on.
_INKLING = {
    "num_hidden_layers": 4,
    "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    "sliding_window_size": 12,
    "rel_extent": 10,
    "log_scaling_n_floor": 8,
    "log_scaling_alpha": 0.3,
}

OVERRIDES: dict[str, dict] = {
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    # Blocks chosen at random are refused; this is what transformers falls back to for short sequences.
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 64, "local_attention_window_len": 16},
    "blt_local_encoder": _BLT_PART,
    "blt_local_decoder": _BLT_PART,
    "blt_global_transformer": {"num_key_value_heads": 4},
    "blt_patcher": {"num_key_value_heads": 4},
    # Logits of a natural size: the shipped scale of 1/16 would hide a wrong token.
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "cohere2_moe": {"logit_scale": 1.0},
    "cohere_compass_text": {
        "layer_types": _WINDOW_AND_FULL,
        "num_hidden_layers": 4,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    },
    "cwm": {"bos_token_id": "default", "eos_token_id": "default"},
    "esmc": {"num_key_value_heads": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": _MIXED,
    # A layer, two that run twice, and a layer. Parameters are stored in units of initializer_range; the default makes
    # random ones so large that float32 and float64 differ by a sixteenth of the logits' spread.
    "dory": {
        **_MIXED,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "initializer_range": 1.0,
    },
    "emu3": {"pad_token_id": 0, "bos_token_id": "default"},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    # Text that stands for an image is replaced by the padding token, so there must be one.
    "gemma4_text": {"pad_token_id": 0},
    "gemma4_unified_text": {"pad_token_id": 0},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": _STATE_AND_FULL},
    "inkling_text": {
        **_INKLING,
        "logits_mup_width_multiplier": 1.0,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "inkling2_text": _INKLING,
    "inkling2_loop_text": {
        **_INKLING,
        "num_hidden_layers": 6,
        "layer_types": ["hybrid_sliding", "hybrid"] * 3,
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_gate_rank": 8,
    },
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": _MIXED,
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    # Queries scaled by position from 8 tokens on, and every second layer dense.
    "llama4_text": {"floor_scale": 8, "attn_scale": 0.3, "interleave_moe_layer_step": 2},
    "longcat_flash": {"head_dim": 8},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 64},
    "mamba2": {"num_heads": 8},
    "mellum": {**_MIXED, "mlp_layer_types": ["dense", "sparse"] * 2},
    "mllama_text_model": {"bos_token_id": "default", "pad_token_id": 0, "cross_attention_layers": []},
    "modernbert-decoder": _ANY_SPECIAL,
    "modernbert": _ANY_SPECIAL,
    "flaubert": {"pad_token_id": 2},
    "perceiver": {"num_latents": 16, "d_latents": 64, "num_self_attends_per_block": 2},
    "prophetnet": {"pad_token_id": 0},
    "qwen2": _SWITCHED_ON,
    "qwen2_moe": _SWITCHED_ON,
    "qwen3": _SWITCHED_ON,
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": 0},
    "qwen3_asr": _ANY_SPECIAL,
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,  # no two scores tie at zero
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 60,
        "split_ngram_parts": 1,
        "eos_token_id": 5,
    },
    "reformer": {
        "axial_pos_shape": (16, 32),
        "axial_pos_embds_dim": (32, 32),
        "attn_layers": ["local", "lsh"],
    },
    "smollm3": {**_SWITCHED_ON, "no_rope_layers": [1, 0, 1, 1]},
    "t5gemma": {"pad_token_id": 0},
    "t5_gemma_module": {"pad_token_id": 0},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": (1,) * 7},
    "xlm": {"pad_token_id": 2},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
# Position ids start after the padding token's.
_PADDED = (
    "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod fsmt led m2m_100 nllb-moe "
    "seamless_m4t seamless_m4t_v2 esm ibert longformer luke nomic_bert"
)
for _name in _PADDED.split():
    OVERRIDES.setdefault(_name, {})["pad_token_id"] = 1

# The sections of rotated channels that stand for time, height and width.
_SECTIONS_OF_8 = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
_SECTIONS_OF_4 = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_BY_SECTIONS = "glm46v glm4v glm_ocr hunyuan_vl paddleocr_vl qwen2_5_omni qwen2_5_vl qwen2_vl"
OVERRIDES |= {f"{name}_text": _SECTIONS_OF_8 for name in _BY_SECTIONS.split()}
OVERRIDES |= {
    # Two tokens that stand for pieces of an image, and whose logits are the least there is.
    "chameleon": {"vocabulary_map": {"<image>": 3, "IMGIMGAZ": 100, "IMGIMGBZ": 101}},
    "cosmos3_edge_text": _SECTIONS_OF_8,
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [32, 32],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]},
    },
    "florence_vision": {
        "depths": (1,) * 4,
        "embed_dim": (32,) * 4,
        "num_groups": (4,) * 4,
        "num_heads": (4,) * 4,
        "projection_dim": 64,
    },
    # Two towers of timm's, which has its own names for sizes.
    "fast_vlm": {
        "vision_config": {
            "architecture": "fastvit_mci0",
            "global_pool": "avg",
            "hidden_size": 1024,
            "model_args": {"inference_mode": True},
        }
    },
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_pe_core_large_patch14_336",
            "model_args": {
                "embed_dim": 64,
                "img_size": [14, 14],
                "depth": 2,
                "global_pool": "",
                "ref_feat_shape": [1, 1],
            },
        }
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "glm4v_moe_text": _SECTIONS_OF_4,
    # A layer that takes what the one before it chose; two pools of 4 tokens, no two of whose scores tie at zero.
    "glm5_next_text": {
        "qk_rope_head_dim": 0,
        "num_hidden_layers": 5,
        "layer_types": [
            f"{kind}_attention" for kind in ("linear", "indexed", "indexed", "linear", "indexed")
        ],
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "dense"],
        "indexer_types": ["full", "full", "shared", "full", "full"],
        "index_topk": 8,
        "index_kpool": 4,
    },
    "granite4_vision": {"deepstack_layer_map": [[0, 0], [1, 1]], "downsample_rate": "1/2"},
    "granite_docling_vision": {"out_hidden_size": 64},
    # Layers with and without RoPE, of which two read the latents of an earlier one.
    "mistral_large4_text": {"no_rope_layers": [1, 0] * 2, "kv_source_layers": [0, 1] * 2},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "inkling2_vision": {"text_hidden_size": 64},
    "wavtokenizer_encoder": {"codebook_dim": 64, "codebook_size": 16},
    "apertus1p5": {
        "vision_config": {"codebook_size": 32},
        "image_token_offset": 80,
        "audio_token_offset": 112,
        "image_token_id": 78,
        "audio_token_id": 79,
    },
    "hy_v4_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    },
    "muse_spark": {"out_hidden_size": 256, "projector_hidden_size": 64},
    "muse_spark_audio": {"num_hidden_layers": "default", "hidden_sizes": (8,) * 4, "out_hidden_size": 64},
    # Scores of a natural size: the shipped factor of 5.5 makes every error of rounding that much larger, the source's
    # own, too.
    "muse_spark_text": {
        "moe_hidden_size": 32,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "qk_scale_factor": 1.5,
    },
    "parakeet_encoder": {"projection_hidden_size": 64, "projection_bias": False},
    "qwen2_5_omni_bigvgan": {"upsample_initial_channel": 64},
    "qwen3_omni_moe": {
        "code2wav_config": {"decoder_dim": 64},
        "talker_config": {"spatial_merge_size": 2},
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},
    "qwen3_omni_moe_text": {"sliding_window": "default"},
    "radio": {"video_temporal_patch_size": 2},
    "step3p5": {"pad_token_id": 0},
}
# Of one family's list only: a BERT is a decoder when its config says so.
FAMILY_OVERRIDES: dict[tuple[str, str], dict] = {
    ("causal", "xlm"): {"causal": True},
    ("causal", "xlnet"): {"attn_type": "uni"},
    ("causal", "reformer"): {"is_decoder": True},
}
_DECODERS = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
    "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod"
)
for _name in _DECODERS.split():
    FAMILY_OVERRIDES["causal", _name] = {"is_decoder": True}
