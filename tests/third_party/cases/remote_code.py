"""Model files that checkpoints brought along before transformers knew them, as copies of them on GitHub have them."""

from __future__ import annotations

import transformers
from torch import nn
from transformers import PreTrainedModel

from tests.third_party.case import MAX_TOKENS, VOCAB_SIZE, case, scaled
from tests.third_party.checkouts import Checkout, package, stub

SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
NEWER = "names that transformers 5 dropped are put back"


def _older_transformers() -> None:
    """What these files import or override and transformers has no more."""
    PreTrainedModel.get_head_mask = lambda self, head_mask, layers, *args: [None] * layers
    for name in ("SequenceClassifierOutputWithPast",):
        getattr(transformers.modeling_outputs, name)
    utils = transformers.utils
    for name in (
        "add_start_docstrings_to_model_forward",
        "add_code_sample_docstrings",
        "replace_return_docstrings",
    ):
        if not hasattr(utils, name):
            setattr(utils, name, lambda *args, **options: lambda function: function)
    if not hasattr(transformers, "add_start_docstrings"):
        transformers.add_start_docstrings = lambda *args, **options: lambda function: function


@case(
    "baichuan-7b", "baichuan-inc/Baichuan-7B", "models/modeling_baichuan.py", "BaiChuanForCausalLM",
    "q, k and v of one matrix, unflattened; scores held above the least number",
    adaptation=f"xformers a stub; {NEWER}",
)  # fmt: skip
def baichuan_7b(checkout: Checkout):
    _older_transformers()
    stub("xformers.ops")
    module = checkout.load("models.modeling_baichuan")
    config = module.BaiChuanConfig(**SHAPE, max_position_embeddings=MAX_TOKENS, use_cache=False)
    return scaled(module.BaiChuanForCausalLM(config))


@case(
    "baichuan2-13b", "jrd77/Baichuan2-13B-Chat", "modeling_baichuan.py", "BaichuanForCausalLM",
    "ALiBi in a mask that it keeps, a head whose rows are normalised on the first call",
    adaptation=f"accelerate a stub; {NEWER}",
)  # fmt: skip
def baichuan2_13b(checkout: Checkout):
    _older_transformers()
    stub("accelerate")
    module = _in_folder(checkout, "modeling_baichuan")
    config = module.BaichuanConfig(**SHAPE, model_max_length=MAX_TOKENS, use_cache=False)
    return scaled(_ones_in_norms(module.BaichuanForCausalLM(config)))


@case(
    "chatglm2", "bq-xiao/chatglm2-6b-model", "model/modeling_chatglm.py", "ChatGLMForConditionalGeneration",
    "tokens first, scripted RoPE on half of each head, transposed logits, SDPA with a mask that is turned round",
    adaptation=NEWER,
)  # fmt: skip
def chatglm2(checkout: Checkout):
    _older_transformers()
    package("model", checkout.path / "model")
    module = checkout.load("model.modeling_chatglm")
    config = module.ChatGLMConfig(
        num_layers=2, padded_vocab_size=VOCAB_SIZE, hidden_size=64, ffn_hidden_size=96, kv_channels=16,
        num_attention_heads=4, seq_length=MAX_TOKENS, multi_query_attention=True, multi_query_group_num=2,
        add_qkv_bias=True, num_hidden_layers=2, original_rope=True, layernorm_epsilon=1e-5,
    )  # fmt: skip
    config.use_cache = False
    return scaled(_ones_in_norms(module.ChatGLMForConditionalGeneration(config, empty_init=False)))


def _ones_in_norms(model: nn.Module) -> nn.Module:
    """Their weights, which these files leave as memory was."""
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            nn.init.ones_(module.weight)
    return model


def _in_folder(checkout: Checkout, file: str):
    """A file of the checkout's root that imports its neighbours relatively."""
    package("of_checkpoint", checkout.path)
    return checkout.load(f"of_checkpoint.{file}")


@case(
    "qwen-7b", "zhangningboo/Qwen-7B", "modeling_qwen.py", "QWenLMHeadModel",
    "RoPE stretched once the sequence is longer than trained, queries scaled by the log of their position",
    adaptation=NEWER,
)  # fmt: skip
def qwen_7b(checkout: Checkout):
    return _qwen(checkout, use_dynamic_ntk=True, use_logn_attn=True)


@case(
    "qwen-7b-plain", "zhangningboo/Qwen-7B", "modeling_qwen.py", "QWenLMHeadModel",
    "a list of tables of RoPE, kept between calls", adaptation=NEWER,
)  # fmt: skip
def qwen_7b_plain(checkout: Checkout):
    return _qwen(checkout, use_dynamic_ntk=False, use_logn_attn=False)


def _qwen(checkout: Checkout, **options):
    _older_transformers()
    module = _in_folder(checkout, "modeling_qwen")
    config = module.QWenConfig(
        **SHAPE, max_position_embeddings=MAX_TOKENS, kv_channels=16, use_cache=False, fp32=True, use_flash_attn=False,
        seq_length=MAX_TOKENS if not options["use_logn_attn"] else 64, **options,
    )  # fmt: skip
    return scaled(module.QWenLMHeadModel(config))
