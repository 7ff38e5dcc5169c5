"""How tokenizers split a text before merges, by the name that GGUF files have for it (tokenizer.ggml.pre).

The splits are those of the models' own tokenizer.json, as are NFC of Qwen and the merges that Llama 3 leaves out.
"""

from __future__ import annotations

from pagebinder.frontend.gguf.deepseek_split import DEEPSEEK2

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_OF_CASES = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{0}|"
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{0}|{1}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2, DIGITS = "gpt2", "digits"  # GPT-2's own split, and single digits before that
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK3 = (  # one split after the other
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
DEEPSEEK_CODER = r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"
MINICPM5 = r"\p{N}{1,3}", rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+|{_REST}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
QWEN3_5 = (  # marks belong to words
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
EXAONE_MOE = (  # words of one letter each stay together
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
TEKKEN = _OF_CASES.format("", r"\p{N}")
GPT4O = _OF_CASES.format(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
KIMI = "|".join((  # Chinese characters are words of their own
    r"\p{Han}+",
    *(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
        rf"{upper}[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]{lower}{_CONTRACTIONS}?"
        for upper, lower in ("*+", "+*")
    ),
    rf"\p{{N}}{{1,3}}|{_REST}",
))  # fmt: skip
SPLITS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "granite-docling", "exaone4", "mellum", "jais"), GPT2),
    **dict.fromkeys(("gigachat", "a.x-4.0", "trillion"), GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "glm5", "chatglm-bpe"), LLAMA3),
    "seed-coder": SEED,
    "deepseek-llm": DEEPSEEK2,
    "deepseek-coder": DEEPSEEK_CODER,
    "minicpm5": MINICPM5,
    **dict.fromkeys(("hunyuan-dense", "deepseek-v3", "joyai-llm", "hy_v4"), DEEPSEEK3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan", "solar-open", "kormo", "stablelm2"), QWEN2),
    "qwen35": QWEN3_5,
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), BAILING),
    "exaone-moe": EXAONE_MOE,
    "kimi-k2": KIMI,
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), GPT4O),
}  # fmt: skip
BEGINS_WITH_BOS = (  # where the file does not say
    "llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken", "falcon-h1",
)  # fmt: skip
WHOLE_WORDS_FIRST = (*BEGINS_WITH_BOS, "glm4", "glm5")
COMPOSED = ("qwen2", "qwen35")  # NFC
