"""What groups published beside papers and training runs."""

from __future__ import annotations

import importlib.metadata

import torch

from tests.third_party.case import MAX_TOKENS, VOCAB_SIZE, Built, case, scaled
from tests.third_party.checkouts import Checkout, package, stub


@case(
    "modded-nanogpt", "KellerJordan/modded-nanogpt", "train_gpt2.py", "GPT",
    "RoPE in bfloat16 kept by length, norms of q and k",
    adaptation="read up to its data loader; torch.compile left out; logits alone of what it returns",
)  # fmt: skip
def modded_nanogpt(checkout: Checkout):
    module = checkout.load_edited(
        "train_gpt2.py",
        ("open(sys.argv[0])", "open(__file__)"),
        ("@torch.compile", "#"),
        until="class DistributedDataLoader",
    )
    config = module.GPTConfig(vocab_size=VOCAB_SIZE, n_layer=2, n_head=4, n_embd=64)
    model = scaled(module.GPT(config))
    return Built(model, lambda ids: model(torch.tensor([ids]), torch.tensor([ids]))[0][0])


@case(
    "lingua", "facebookresearch/lingua", "apps/main/transformer.py", "LMTransformer",
    "RoPE as matrices of two by two, the mask a string", adaptation="xformers a stub; torch.compile left out",
    needs=("omegaconf",),
)  # fmt: skip
def lingua(checkout: Checkout):
    stub("xformers.ops.fmha")
    torch.compile = lambda function, **options: function
    module = checkout.load("apps.main.transformer")
    args = module.LMTransformerArgs(
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        multiple_of=32,
        max_seqlen=MAX_TOKENS,
        vocab_size=VOCAB_SIZE,
    )
    model = module.LMTransformer(args)
    return scaled(model)


OLMO = {
    "adaptation": "its storage and logging libraries stubs (boto3, datasets, rich, cached_path, google, olmo_data)",
    "needs": ("omegaconf",),
}


def _olmo(checkout: Checkout, **options):
    for absent in (
        "boto3", "botocore.exceptions", "botocore.config", "datasets", "requests", "rich.console", "rich.highlighter",
        "rich.progress", "rich.text", "rich.traceback", "cached_path.schemes", "google.api_core.retry",
        "olmo_data.data", "importlib_resources",
    ):  # fmt: skip
        stub(absent)
    stub(
        "cached_path.schemes",
        SchemeClient=type("SchemeClient", (), {"recoverable_errors": ()}),
        add_scheme_client=lambda client: None,
    )
    stub("rich.highlighter", NullHighlighter=object)
    stub("google.api_core.retry", Retry=lambda **options: lambda function: function)
    package("olmo", checkout.path / "olmo")
    module = checkout.load("olmo.model")
    config = module.ModelConfig(
        d_model=64, n_heads=4, n_layers=2, mlp_ratio=2, vocab_size=VOCAB_SIZE, embedding_size=VOCAB_SIZE,
        max_sequence_length=MAX_TOKENS, attention_dropout=0.0, residual_dropout=0.0, embedding_dropout=0.0,
        init_device="cpu", **options,
    )  # fmt: skip
    return scaled(module.OLMo(config))


OLMO_WHERE = ("allenai/OLMo", "olmo/model.py", "OLMo")


@case("olmo", *OLMO_WHERE, "tables kept in a cache object that grows, LayerNorm without weights", **OLMO)
def olmo(checkout: Checkout):
    return _olmo(checkout, rope=True, n_kv_heads=2, layer_norm_with_affine=False, include_bias=False)


@case("olmo-alibi", *OLMO_WHERE, "ALiBi and causal bias kept in a cache object, blocks in groups", **OLMO)
def olmo_alibi(checkout: Checkout):
    return _olmo(checkout, alibi=True, block_group_size=2)


@case("olmo-2", *OLMO_WHERE, "norms behind each layer, norms of q and k, clipped qkv", **OLMO)
def olmo2(checkout: Checkout):
    kinds = {"layer_norm_type": "rms", "norm_after": True, "attention_layer_norm": True, "clip_qkv": 2.0}
    return _olmo(checkout, rope=True, weight_tying=False, include_bias=False, **kinds)


@case(
    "mamba-minimal", "johnma2006/mamba-minimal", "model.py", "Mamba", "a selective scan as a loop over time",
    needs=("einops",),
)  # fmt: skip
def mamba_minimal(checkout: Checkout):
    module = checkout.load("model")
    return scaled(module.Mamba(module.ModelArgs(d_model=64, n_layer=2, vocab_size=VOCAB_SIZE)))


MAMBAPY = ("alxndrTL/mamba.py", "mambapy/lm.py", "LM")


def _mambapy(checkout: Checkout, parallel: bool):
    module = checkout.load("mambapy.lm")
    config = module.MambaConfig(d_model=64, n_layers=2, pscan=parallel)
    return scaled(module.LM(config, VOCAB_SIZE))


@case("mamba.py", *MAMBAPY, "a parallel scan, an autograd.Function that works in place")
def mambapy(checkout: Checkout):
    return _mambapy(checkout, parallel=True)


@case("mamba.py-loop", *MAMBAPY, "a selective scan as a loop over time")
def mambapy_loop(checkout: Checkout):
    return _mambapy(checkout, parallel=False)


@case(
    "rwkv-v1",
    "BlinkDL/RWKV-LM",
    "RWKV-v1/src/model.py",
    "GPT",
    "a matrix of time weights, exp of keys and a running sum",
)
def rwkv_v1(checkout: Checkout):
    module = checkout.load("src.model", under="RWKV-v1")
    config = module.GPTConfig(
        VOCAB_SIZE, MAX_TOKENS, model_type="RWKV", n_layer=2, n_embd=64, n_head=4, n_attn=64, n_ffn=64,
        rwkv_emb_scale=1.0, rwkv_tiny_attn=0,
    )  # fmt: skip
    return scaled(module.GPT(config))


@case(
    "pytorch-llama", "hkproj/pytorch-llama", "model.py", "Transformer",
    "it takes one token at a time, beside its own cache",
    adaptation="logits of a sequence are asked for token by token",
)  # fmt: skip
def pytorch_llama(checkout: Checkout):
    module = checkout.load("model")
    args = module.ModelArgs(
        dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=VOCAB_SIZE, multiple_of=32, max_batch_size=1,
        max_seq_len=MAX_TOKENS, device="cpu",
    )  # fmt: skip
    model = scaled(module.Transformer(args))
    return Built(
        model, lambda ids: torch.cat([model(torch.tensor([[t]]), at)[0] for at, t in enumerate(ids)])
    )


FMS = ("foundation-model-stack/foundation-model-stack",)
# Attention there tells tokens from heads by their numbers: with as many tokens as KV heads it attends over heads.
FMS_OPTIONS = {"adaptation": "a version said for its package, which is not installed"}


def _fms(checkout: Checkout, file: str, config: str, model: str, **options):
    importlib.metadata.version = lambda distribution: "0"
    module = checkout.load(f"fms.models.{file}")
    shape = {
        "src_vocab_size": VOCAB_SIZE, "nheads": 4, "kvheads": 4, "nlayers": 2, "max_expected_seq_len": MAX_TOKENS,
    }  # fmt: skip
    model = getattr(module, model)(getattr(module, config)(**shape | options))
    model.reset_parameters()
    return scaled(model)


@case(
    "fms-llama",
    *FMS,
    "fms/models/llama.py",
    "LLaMA",
    "attends over heads where T is their number, tables of RoPE in dicts",
    **FMS_OPTIONS,
)
def fms_llama(checkout: Checkout):
    return _fms(checkout, "llama", "LLaMAConfig", "LLaMA", emb_dim=64, multiple_of=32)


@case(
    "fms-granite",
    *FMS,
    "fms/models/granite.py",
    "Granite",
    "the same; multipliers of embeddings, residuals and scores",
    **FMS_OPTIONS,
)
def fms_granite(checkout: Checkout):
    return _fms(checkout, "granite", "GraniteConfig", "Granite", emb_dim=64, multiple_of=32, head_dim=16)


@case(
    "fms-mixtral",
    *FMS,
    "fms/models/mixtral.py",
    "Mixtral",
    "the same; experts by a custom op",
    **FMS_OPTIONS,
)
def fms_mixtral(checkout: Checkout):
    return _fms(
        checkout, "mixtral", "MixtralConfig", "Mixtral", dim=64, hidden_dim=64, num_experts=4, top_k_experts=2
    )
