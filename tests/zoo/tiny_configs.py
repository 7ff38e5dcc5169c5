"""Tiny configs of any architecture: a table of field names, kinds of layers mixed, and exceptions by model type."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from pagebinder.frontend.text_writer import writer_of
from tests.zoo.architectures import Architecture
from tests.zoo.overrides import FAMILY_OVERRIDES, OVERRIDES

VOCAB_SIZE = 128
MAX_LEN = 512
WINDOW = 16
NUM_MIXED_LAYERS = 4
MIN_LOGIT_SPREAD = 0.5

# Value -> the fields that mean it, over all configs of transformers.
SHRUNK: tuple[tuple[int, str], ...] = (
    (VOCAB_SIZE, "vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size decoder_vocab_size "
     "t2u_vocab_size unpadded_vocab_size audio_vocab_size pronunciation_vocab_size shape_vocab_size"),
    (MAX_LEN, "max_position_embeddings n_positions n_ctx max_seq_len max_seq_length context_length "
     "max_source_positions max_target_positions"),
    (64, "hidden_size d_model n_embd emb_dim dim embedding_size input_embedding_size output_embedding_size "
     "word_embed_proj_dim lru_width backbone_hidden_size mamba_d_ssm cross_attention_hidden_size "
     "pronunciation_embed_dim shape_embed_dim audio_hidden_size"),
    (128, "intermediate_size intermediate_size_mlp ffn_dim decoder_ffn_dim encoder_ffn_dim d_ff d_inner dff "
     "n_inner dim_ff hidden_dim ffn_hidden_size dense_intermediate_size feed_forward_size"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
     "expert_ffn_hidden_size shared_experts_intermediate_size moe_shared_expert_intermediate_size "
     "prefix_dense_intermediate_size kv_lora_rank q_lora_rank o_lora_rank router_hidden_size index_head_dim"),
    (2, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
     "num_encoder_layers num_key_value_heads num_kv_heads n_groups mamba_n_groups mamba_ngroups "
     "linear_num_key_heads swa_num_key_value_heads num_experts_per_tok moe_topk moe_k top_k_experts "
     "depth speech_encoder_layers t2u_encoder_layers t2u_decoder_layers"),
    (1, "first_k_dense_replace num_dense_layers n_group topk_group n_shared_experts num_shared_experts "
     "moe_num_shared_experts"),
    (4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
     "attention_heads swa_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
     "linear_num_value_heads linear_num_heads num_encoder_attention_heads num_decoder_attention_heads "
     "speech_encoder_attention_heads t2u_encoder_attention_heads t2u_decoder_attention_heads zero_expert_num"),
    (16, "head_dim dim_head d_head attention_head_size swa_head_dim d_kv qk_nope_head_dim v_head_dim "
     "linear_key_head_dim linear_value_head_dim linear_head_dim query_pre_attn_scalar kv_channels "
     "ssm_state_size mamba_d_state state_size mamba_d_head mamba_head_dim chunk_size mamba_chunk_size "
     "block_size hidden_size_per_layer_input laurel_rank gated_norm_rank global_head_dim index_n_heads "
     "index_topk"),
    (8, "qk_rope_head_dim mamba_n_heads mamba_num_heads n_mamba_heads rotary_dim"),
    (WINDOW, "sliding_window sliding_window_size attention_window_size window_size attention_chunk_size "
     "local_attention"),
)  # fmt: skip
VALUE_OF = {name: value for value, names in SHRUNK for name in names.split()}
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Fields that say of each layer what it is.
KINDS_OF_LAYERS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "indexer_types")


def tiny_config(architecture: Architecture) -> PreTrainedConfig:
    """A config of a few small layers, mixed in kind where the family mixes them."""
    return config_of(architecture.config_class, family=architecture.family, model_type=architecture.name)


def config_of(config_class: type, *, family: str = "", model_type: str | None = None) -> PreTrainedConfig:
    return config_class(**options_of(config_class, family=family, model_type=model_type))


def options_of(config_class: type, *, family: str = "", model_type: str | None = None) -> dict[str, Any]:
    """The keyword arguments of a tiny config, nested for configs that are made of others."""
    fields = inspect.signature(config_class.__init__).parameters
    options = {name: VALUE_OF[name] for name in fields if name in VALUE_OF}
    options |= {name: None for name in SPECIAL_TOKENS if name in fields}
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        options["num_key_value_heads"] = options[
            "num_attention_heads"
        ]  # latent attention expands to all heads
    options |= mixed_layers(config_class, fields)
    parts = {name: part for name, part in parts_of(config_class).items() if name in fields}
    options |= {name: {"model_type": part.model_type, **options_of(part)} for name, part in parts.items()}
    own_type = getattr(config_class, "model_type", None)
    for key in dict.fromkeys((own_type, model_type)):
        for name, value in OVERRIDES.get(key, {}).items():
            options[name] = options[name] | value if name in parts and isinstance(value, dict) else value
    options |= FAMILY_OVERRIDES.get((family, model_type or own_type), {})
    return {name: value for name, value in options.items() if value != "default"}


def parts_of(config_class: type) -> dict[str, type]:
    """The configs that a composite config is made of, by field name."""
    known = transformers.CONFIG_MAPPING
    parts = dict(getattr(config_class, "sub_configs", {}))
    for name, spec in (getattr(config_class, "sub_configs_defaults", None) or {}).items():
        # Not `.get`: transformers loads a config class when the mapping is indexed.
        parts[name] = known[spec.model_type] if spec.model_type in known else spec.config_class  # noqa: SIM401
    return {name: part for name, part in parts.items() if part is not transformers.AutoConfig}


def mixed_layers(config_class: type, fields) -> dict[str, Any]:
    """Every kind of layer that the family's own default has, in turn."""
    names = [name for name in KINDS_OF_LAYERS if name in fields]
    if not names:
        return {}
    default = config_class()
    kinds = {name: list(dict.fromkeys(getattr(default, name, None) or ())) for name in names}
    kinds = {name: found for name, found in kinds.items() if len(found) > 1}
    if not kinds:
        return {}
    mixed = {name: list(itertools.islice(itertools.cycle(k), NUM_MIXED_LAYERS)) for name, k in kinds.items()}
    return {"num_hidden_layers": NUM_MIXED_LAYERS, **mixed}


def tiny_model(architecture: Architecture, seed: int = 0) -> torch.nn.Module:
    """The architecture with random weights that make errors visible."""
    torch.manual_seed(seed)
    model = architecture.model_class(tiny_config(architecture))
    return audible(telling_weights(model.float(), seed))


def telling_weights(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Matrices ~ N(0, 1 / fan_in), vectors near one; recurrences forget slowly, so that a wrong state shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(1.0 + 0.1 * noise)
            if name.endswith("A_log"):
                parameter.sub_(4.0)
            elif name.endswith("dt_bias"):
                parameter.sub_(1.0)
    return model.eval()


def audible(model: torch.nn.Module) -> torch.nn.Module:
    """Families that scale their logits down (T5) get a larger output matrix, so that logits spread by about one."""
    head = writer_of(model).get_output_embeddings()
    ids = torch.arange(4, 24)[None]
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    with torch.no_grad():
        spread = writer_of(model)(**inputs, use_cache=False).logits.std()
        if head is not None and 0 < spread < MIN_LOGIT_SPREAD:
            head.weight.mul_(1 / spread)
    return model
