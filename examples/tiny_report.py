"""The README of the small model: what it is, what it was trained on, how well it does, what it writes."""

from pathlib import Path

import corpus
import torch

PROMPTS = (
    "The `json` module provides",
    "CREATE INDEX constructs an index on",
    "If the file does not exist, an exception",
)
DATE = "2026-11-21"

_TEMPLATE = """# tiny

A Llama-style decoder of {millions:.2f} M weights, trained from scratch on two software manuals: {layers}
layers of width {width}, {heads} query heads over {kv_heads} KV heads of width {head_dim}, {vocab} tokens, a
context of {context}.

It writes text that looks like documentation and is often wrong. It exists to try and test Pagebinder on real
weights without a download, not to answer questions.

## Data

{licences}

Pages as cleaned by `examples/corpus.py`: {corpus_mb:.1f} MB, {corpus_tokens:,} tokens.
{held_out_documents} whole pages ({held_out_kb:.0f} kB) were held out, chosen by a hash of their name.

## Training

    python examples/train_tiny.py train --out DIR --minutes {minutes:g} --seed {seed}
    python examples/train_tiny.py eval --checkpoint DIR

| | |
|---|---|
| parameters | {parameters:,} (tied embedding), bfloat16 |
| tokens seen | {tokens:,} in {steps:,} steps |
| wall time | {wall_minutes:.1f} min on 2 CPU cores ({rate:,.0f} tokens/s, with compilation) |
| held-out bits per byte | **{held_out_bits_per_byte:.3f}** (of these bfloat16 weights) |
| date | {date} |

## Greedy samples

{greedy}

## Sampled (temperature 0.8, top-p 0.95)

{sampled}
"""


@torch.no_grad()
def continue_text(model, tokenizer, prompt: str, num_tokens: int, temperature: float, seed: int = 0) -> str:
    """`prompt` and up to `num_tokens` more tokens: greedy at temperature 0, else nucleus sampling at 0.95."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(prompt)["input_ids"]]])
    for _ in range(num_tokens):
        logits = model(ids[:, -model.config.max_position_embeddings :])[0, -1].float()
        chosen = logits.argmax()
        if temperature > 0:
            probs, order = (logits / temperature).softmax(-1).sort(descending=True)
            probs[probs.cumsum(0) - probs > 0.95] = 0.0
            chosen = order[torch.multinomial(probs, 1, generator=generator)[0]]
        if chosen == tokenizer.eos_token_id:
            break
        ids = torch.cat((ids, chosen.view(1, 1)), dim=1)
    return tokenizer.decode(ids[0, 1:])


def _samples(model, tokenizer, temperature: float) -> str:
    texts = (continue_text(model, tokenizer, prompt, 90, temperature) for prompt in PROMPTS)
    return "\n\n".join("````text\n" + text.strip() + "\n````" for text in texts)


def write_readme(out: Path, model, tokenizer, figures: dict) -> None:
    """Write `out`/README.md. `figures` is the content of training.json."""
    config = model.config
    text = _TEMPLATE.format(
        **figures,
        millions=figures["parameters"] / 1e6,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        context=config.max_position_embeddings,
        licences="\n".join(
            f"- {m.title} (Debian package `{m.package}`): {m.licence}" for m in corpus.MANUALS
        ),
        corpus_mb=figures["corpus_bytes"] / 1e6,
        held_out_kb=figures["held_out_bytes"] / 1e3,
        minutes=figures["minutes_budget"],
        wall_minutes=figures["seconds"] / 60,
        rate=figures["tokens"] / max(figures["seconds"], 1e-9),
        date=DATE,
        greedy=_samples(model, tokenizer, 0.0),
        sampled=_samples(model, tokenizer, 0.8),
    )
    (out / "README.md").write_text(text, encoding="utf-8")
