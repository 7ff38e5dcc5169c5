"""Train the small model that ships with Pagebinder, on two CPU cores in about 35 minutes.

    python examples/train_tiny.py train --out /tmp/tiny --minutes 34
    python examples/train_tiny.py eval --checkpoint pagebinder/models/tiny

The learning rate follows the share of the time budget that is used, so the run always ends with a finished
schedule; Ctrl-C saves what there is.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

# Before torch is imported: threads that spin while they wait make training several times slower on busy cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import corpus
import tiny_report
import torch
import torch.nn.functional as F
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pagebinder.models import tiny_path
from pagebinder.models.llama import LlamaConfig, LlamaForCausalLM

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 3072
CONTEXT_TOKENS = 1024
SHORT_CONTEXT_TOKENS = 256
TOKENS_PER_STEP = 8192
LONG_CONTEXT_FROM = 0.8  # share of the time budget after which windows are CONTEXT_TOKENS long

DEFAULT_CACHE = Path.home() / ".cache/pagebinder/corpus"
SHIPPED = tiny_path()
CacheOption = Annotated[Path, typer.Option(help="Where the packages are unpacked.")]

app = typer.Typer(help=__doc__, add_completion=False)


@dataclass
class Progressed:
    """What the run has done so far."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")


def train_tokenizer(texts: list[str], out: Path):
    """A byte-level BPE tokenizer trained on `texts`, saved in `out` and loaded back the way users load it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(out)
    return AutoTokenizer.from_pretrained(out)


def encode(tokenizer, texts: list[str]) -> list[torch.Tensor]:
    """One int64 vector per text, each opened by the end-of-text token (it separates documents)."""
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [torch.tensor([tokenizer.bos_token_id, *ids]) for ids in encoded]


class Windows:
    """Endless batches [B, T + 1] of consecutive tokens; each epoch shuffles documents, then windows."""

    def __init__(self, documents: list[torch.Tensor], seed: int, tokens_per_step: int = TOKENS_PER_STEP):
        self.documents = documents
        self.tokens_per_step = tokens_per_step
        self.generator = torch.Generator().manual_seed(seed)
        self.pending = torch.empty(0, 0, dtype=torch.long)

    def _epoch(self, num_tokens: int) -> torch.Tensor:
        order = torch.randperm(len(self.documents), generator=self.generator)
        stream = torch.cat([self.documents[i] for i in order])
        first = int(torch.randint(num_tokens, (1,), generator=self.generator))
        windows = stream[first:].unfold(0, num_tokens + 1, num_tokens)
        return windows[torch.randperm(len(windows), generator=self.generator)]

    def batch(self, num_tokens: int) -> torch.Tensor:
        size = self.tokens_per_step // num_tokens
        if self.pending.shape[1] != num_tokens + 1 or len(self.pending) < size:
            self.pending = self._epoch(num_tokens)
        batch, self.pending = self.pending[:size], self.pending[size:]
        return batch


def build_model(tokenizer, seed: int) -> LlamaForCausalLM:
    num_layers = 6
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        layer_types=("full_attention",) * num_layers,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.init_weights(seed)
    return model


def build_optimizers(model: LlamaForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the layers' matrices, AdamW for the embedding and the norms."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in named if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [muon, adamw]


def learning_rate_scale(share: float) -> float:
    """Short warm-up, then linearly to zero. `share` is the used part of the time budget."""
    return min(1.0, share / 0.02) * max(0.0, 1.0 - share)


def step_loss(model: LlamaForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of windows [B, T + 1], with bfloat16 matrix products."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def train_model(model, windows: Windows, minutes: float, lr: float, progress: Progress) -> Progressed:
    """Train until the budget is used or Ctrl-C. Compilation counts as used time."""
    optimizers = build_optimizers(model, lr)
    compiled_loss = torch.compile(step_loss, dynamic=False)
    bar, done, started = progress.add_task("training", total=1.0), Progressed(), time.monotonic()
    try:
        while (share := (time.monotonic() - started) / (60 * minutes)) < 1.0:
            num_tokens = SHORT_CONTEXT_TOKENS if share < LONG_CONTEXT_FROM else CONTEXT_TOKENS
            loss = compiled_loss(model, windows.batch(num_tokens))
            loss.backward()
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr * learning_rate_scale(share)
                optimizer.step()
                optimizer.zero_grad()
            done.steps += 1
            done.tokens += TOKENS_PER_STEP
            done.seconds = time.monotonic() - started
            done.loss = loss.item() if done.steps == 1 else 0.95 * done.loss + 0.05 * loss.item()
            rate = done.tokens / done.seconds
            line = f"step {done.steps}  loss {done.loss:.3f}  {rate:,.0f} tokens/s"
            progress.update(bar, completed=share, description=line)
            if done.steps % 50 == 0 and not progress.console.is_terminal:
                print(f"{share:.3f}  {line}  context {num_tokens}", flush=True)
    except KeyboardInterrupt:
        progress.console.print("interrupted: saving what there is")
    return done


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, tokenizer, texts: list[str], overlap_tokens: int = 256) -> float:
    """Held-out cost in bits per UTF-8 byte.

    A document longer than the context is read in overlapping windows; each token is counted once, and after
    the first window sees at least `overlap_tokens` of context.
    """
    nats, context = 0.0, model.config.max_position_embeddings
    for ids in encode(tokenizer, texts):
        counted = 1  # the opening end-of-text token is given, not predicted
        while counted < len(ids):
            start = max(0, counted - overlap_tokens) if counted > 1 else 0
            window = ids[start : start + context + 1]
            logits = model(window[None, :-1])[0].float()
            costs = F.cross_entropy(logits, window[1:], reduction="none")
            nats += costs[counted - start - 1 :].sum().item()
            counted = start + len(window)
    num_bytes = sum(len(text.encode()) for text in texts)
    return nats / num_bytes / torch.log(torch.tensor(2.0)).item()


@app.command("train")
def train_command(
    out: Annotated[Path, typer.Option(help="Directory of the checkpoint to write.")],
    cache: CacheOption = DEFAULT_CACHE,
    minutes: Annotated[float, typer.Option(help="Time budget of the training loop.")] = 34.0,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 0.006,
    seed: int = 0,
    threads: int = 2,
) -> None:
    """Build the corpus and the tokenizer, train, measure, save."""
    torch.set_num_threads(threads)
    training, held_out = corpus.split(corpus.load_documents(cache))
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer([document.text for document in training], out)
    encoded = encode(tokenizer, [document.text for document in training])
    model = build_model(tokenizer, seed)
    num_corpus_tokens = sum(len(ids) for ids in encoded)
    print(
        f"{len(training)} documents, {num_corpus_tokens:,} tokens; {len(held_out)} documents held out",
        flush=True,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        done = train_model(model, Windows(encoded, seed), minutes, lr, progress)
    model.to(torch.bfloat16).save_pretrained(out)
    shipped = LlamaForCausalLM.from_pretrained(out)
    figures = {
        **asdict(done),
        "minutes_budget": minutes,
        "peak_learning_rate": lr,
        "seed": seed,
        "parameters": sum(p.numel() for p in shipped.parameters()),
        "corpus_bytes": sum(len(d.text.encode()) for d in training),
        "corpus_tokens": num_corpus_tokens,
        "held_out_documents": len(held_out),
        "held_out_bytes": sum(len(d.text.encode()) for d in held_out),
        "held_out_bits_per_byte": bits_per_byte(shipped, tokenizer, [d.text for d in held_out]),
    }
    (out / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
    tiny_report.write_readme(out, shipped, tokenizer, figures)
    print(json.dumps(figures, indent=2))


@app.command("eval")
def eval_command(
    checkpoint: Annotated[Path, typer.Option(help="Directory of the checkpoint.")] = SHIPPED,
    cache: CacheOption = DEFAULT_CACHE,
) -> None:
    """Recompute bits per byte of a saved checkpoint on the held-out documents."""
    _, held_out = corpus.split(corpus.load_documents(cache))
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    value = bits_per_byte(model, AutoTokenizer.from_pretrained(checkpoint), [d.text for d in held_out])
    print(f"{value:.4f} bits per byte, {len(held_out)} held-out documents")


if __name__ == "__main__":
    app()
