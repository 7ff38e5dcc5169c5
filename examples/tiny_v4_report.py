"""The README of the small DeepSeek-V4: what it is, what it was trained on, how well it does, what it writes."""

from pathlib import Path

import corpus
from tiny_report import DATE, PROMPTS, continue_text

_TEMPLATE = """# tiny_v4

A DeepSeek-V4 of {millions:.2f} M weights, trained on two software manuals: {layers} layers of width {width} on
{streams} residual streams, {heads} query heads of width {head_dim} over one row of keys (= values), {vocab} tokens,
a context of {context}. It has every kind of layer that the family has, small enough to run anywhere:

| layer | attention | experts |
|---|---|---|
{kinds}

Sparse layers let each token choose {topk} compressed entries of {sparse_ratio} tokens ({index_heads} index heads of
width {index_dim}); heavy ones show all entries of {heavy_ratio} tokens. All see the last {window} tokens as they are.
There is no multi-token prediction layer.

It writes text that looks like documentation and is often wrong. It exists to try and test Pagebinder on real
weights without a download, not to answer questions.

## Data

{licences}

Pages as cleaned by `examples/corpus.py`: {corpus_mb:.1f} MB, {corpus_tokens:,} tokens.
{held_out_documents} whole pages ({held_out_kb:.0f} kB) were held out, chosen by a hash of their name. Tokenizer,
pages and the initial embedding are those of [tiny](../tiny/README.md).

## Training

    python examples/train_tiny_v4.py train --out DIR --minutes {minutes_budget:g} --seed {seed}
    python examples/train_tiny_v4.py export --out DIR --to pagebinder/models/tiny_v4
    python examples/train_tiny_v4.py eval

| | |
|---|---|
| parameters | {parameters:,} (tied embedding), bfloat16 |
| tokens seen | {tokens:,} in {steps:,} steps |
| CPU time | {cpu_minutes:.1f} min of one core ({rate:,.0f} tokens/s, with compilation) |
| held-out bits per byte | **{held_out_bits_per_byte:.3f}** (of these bfloat16 weights) |
| date | {date} |

## Greedy samples

{greedy}

## Sampled (temperature 0.8, top-p 0.95)

{sampled}
"""


def _samples(model, tokenizer, temperature: float) -> str:
    texts = (continue_text(model, tokenizer, prompt, 90, temperature) for prompt in PROMPTS)
    return "\n\n".join("````text\n" + text.strip() + "\n````" for text in texts)


def _kinds(config) -> str:
    short = {"sliding": "sliding window", "compressed": "sparse (CSA)", "heavily": "heavy (HCA)"}
    routed = {"hash_moe": "by token id", "moe": "by score"}
    experts = f"{config.num_experts_per_tok} of {config.n_routed_experts} and a shared one, of width "
    experts += f"{config.moe_intermediate_size}, chosen "
    rows = zip(config.layer_types, config.mlp_layer_types)
    return "\n".join(
        f"| {i} | {short[kind.split('_')[0]]} | {experts}{routed[mlp]} |"
        for i, (kind, mlp) in enumerate(rows)
    )


def write_readme(out: Path, model, tokenizer, figures: dict) -> None:
    """Write `out`/README.md. `figures` is the content of training.json."""
    config = model.config
    text = _TEMPLATE.format(
        **figures,
        millions=figures["parameters"] / 1e6,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        streams=config.hc_mult,
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        context=config.max_position_embeddings,
        kinds=_kinds(config),
        topk=config.index_topk,
        sparse_ratio=config.sparse_ratio,
        heavy_ratio=config.heavy_ratio,
        index_heads=config.index_n_heads,
        index_dim=config.index_head_dim,
        window=config.sliding_window,
        licences="\n".join(
            f"- {m.title} (Debian package `{m.package}`): {m.licence}" for m in corpus.MANUALS
        ),
        corpus_mb=figures["corpus_bytes"] / 1e6,
        held_out_kb=figures["held_out_bytes"] / 1e3,
        cpu_minutes=figures["seconds"] / 60,
        rate=figures["tokens"] / max(figures["seconds"], 1e-9),
        date=DATE,
        greedy=_samples(model, tokenizer, 0.0),
        sampled=_samples(model, tokenizer, 0.8),
    )
    (out / "README.md").write_text(text, encoding="utf-8")
