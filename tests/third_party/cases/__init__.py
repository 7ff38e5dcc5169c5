"""All cases, and the commit of each repository that they were written for."""

from __future__ import annotations

import importlib
import pkgutil

from tests.third_party.case import CASES, Case

COMMITS = {
    "allenai/OLMo": "59a53e3f68e546330ca5a99ec626e58f9ab96494",
    "alxndrTL/mamba.py": "2cc168c78b2494557f45072c4b8daa9d6f5608c7",
    "baichuan-inc/Baichuan-7B": "6f3ef4633a90c2d8a3e0763d0dec1b8dc11588f5",
    "BlinkDL/RWKV-LM": "524481d5099b38d9bc8ef1e89209161b86c8011b",
    "bq-xiao/chatglm2-6b-model": "944d831c7a98721ec4ffa30b362de909fbbeec17",
    "deepseek-ai/DeepSeek-V3": "9b4e9788e4a3a731f7567338ed15d3ec549ce03b",
    "facebookresearch/lingua": "437d680e521873bb5971067148a69587790da853",
    "foundation-model-stack/foundation-model-stack": "062adf6e1111850aa1c2abf7a678cfb95e35f59a",
    "google/gemma_pytorch": "014acb7ac4563a5f77c76d7ff98f31b568c16508",
    "hkproj/pytorch-llama": "067f8a37fe36ac8b52dca9cc6f2a2e8d6aa372d6",
    "jingyaogong/minimind": "d65ef2c00ebc6082f9df11541e1b191655eddb00",
    "johnma2006/mamba-minimal": "03de542a36d873f6e6c4057ad687278cc6ae944d",
    "jrd77/Baichuan2-13B-Chat": "d022d7264467b2c3bc483e7a3a17105dedba50b8",
    "karpathy/llama2.c": "350e04fe35433e6d2941dce5a1f53308f87058eb",
    "karpathy/minGPT": "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
    "karpathy/nanochat": "92d63d4e8bb4df75c3b71618f31ddde2378b2bcd",
    "karpathy/nanoGPT": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    "KellerJordan/modded-nanogpt": "7e1f20b8e881bc0444ac0a46f2e54a673a9a2cd6",
    "Lightning-AI/litgpt": "26857050fe3ff627cd714fe92f5838f51a3d5efa",
    "lucidrains/PaLM-rlhf-pytorch": "bd0d0f3893ec62f827fa35e759cb38d748829d51",
    "lucidrains/x-transformers": "9252ed7838021ee61e6c5be0930b3a9a88efdf06",
    "meta-llama/llama": "689c7f261b9c5514636ecc3c5fefefcbb3e6eed7",
    "meta-llama/llama3": "a0940f9cf7065d45bb6675660f80d305c041a754",
    "meta-pytorch/gpt-fast": "6ecad9b5b6b987d17ac4303965545873d0192086",
    "microsoft/torchscale": "4d1e0e82e5adf86dd424f1463192635b73fc8efc",
    "mistralai/mistral-inference": "2557e12d0e1878a1562ece30434820f80aa3e12a",
    "mlfoundations/open_lm": "9bb92ef1689333534b7057942a20d18a46d1fa52",
    "NVIDIA/ngpt": "ed19eb232380d41a9d71024b58d2403937d8f2c9",
    "openai/gpt-oss": "7b583341fe16729127f6d5b94a7b09ccae97e1a1",
    "pytorch-labs/gpt-fast": "32971d3129541c5bfb4f715abc33d1c5f408d204",
    "rasbt/LLMs-from-scratch": "28c65cdfbc3338e2e040016eea4b7fdf556e4d57",
    "zhangningboo/Qwen-7B": "ffe04dd57f85293043ba999a2c0daa788d6182e9",
}


def all_cases() -> list[Case]:
    """Every case, sorted by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return [CASES[name] for name in sorted(CASES)]
