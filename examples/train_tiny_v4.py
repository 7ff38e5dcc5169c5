"""Train the small DeepSeek-V4 that ships with Pagebinder: every kind of layer, 4.6 M parameters, one CPU thread.

    python examples/train_tiny_v4.py train --out /tmp/v4 --minutes 40
    python examples/train_tiny_v4.py export --out /tmp/v4 --to pagebinder/models/tiny_v4
    python examples/train_tiny_v4.py eval --checkpoint pagebinder/models/tiny_v4

Tokenizer, text and held-out pages are those of train_tiny.py, and the embedding starts from that model's. `--minutes`
counts CPU time of the process, so a busy machine trains longer, not less. To end early with a finished schedule,
`touch OUT/finish`; Ctrl-C saves what there is.
"""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import corpus
import tiny_v4_report
import torch
import torch.nn.functional as F
import typer
from tiny_v4_model import MAX_TOKENS, init_weights, tiny_config
from train_tiny import DEFAULT_CACHE, CacheOption, Progressed, Windows, bits_per_byte, encode
from transformers import AutoTokenizer

from pagebinder.models import deepseek_v4, tiny_path
from pagebinder.models import deepseek_v4_mixing as mixing
from pagebinder.models.deepseek_v4 import DeepseekV4ForCausalLM
from pagebinder.models.deepseek_v4_experts import Router

TOKENS_PER_STEP = 4096
CONTEXT_TOKENS = 512
LONG_CONTEXT_FROM = 0.8  # share of the time budget after which windows are MAX_TOKENS long
CHECKPOINT_SECONDS = 240.0  # wall time between checkpoints
BALANCE_RATE = 0.01  # step of the routers' correction biases towards equal load
SLOW = 0.05  # learning rate of routers and hyper-connections relative to the rest: their inputs are wide

SHIPPED = tiny_path().with_name("tiny_v4")
OutOption = Annotated[Path, typer.Option(help="Directory of the training run.")]

# Compiled one by one: whole, the model takes minutes to compile and runs no faster.
_COMPILED = (
    "rms_norm", "rotate", "q_norm_rope", "compress", "index_topk", "compressed_attention", "hyper_connection",
    "hyper_mix", "hyper_head",
)  # fmt: skip
_FUNCTIONS = {False: {name: getattr(mixing, name) for name in _COMPILED}}
_FUNCTIONS[True] = {name: torch.compile(plain, dynamic=False) for name, plain in _FUNCTIONS[False].items()}

app = typer.Typer(help=__doc__, add_completion=False)


class Optimizer:
    """Muon for matrices (each expert's by itself), AdamW for the embedding and small tensors, slower for the weights
    that routers and hyper-connections decide by: AdamW moves all inputs' weights at once, and choices collapse."""

    def __init__(self, model: DeepseekV4ForCausalLM, lr: float):
        self.lr, self.stacked, matrices, slow, rest = lr, [], [], [], []
        for name, parameter in model.named_parameters():
            if parameter.ndim == 3:
                each = [torch.nn.Parameter(matrix) for matrix in parameter.data]  # views: updated in place
                self.stacked.append((parameter, each))
                matrices += each
            elif parameter.ndim == 2 and name.endswith("proj.weight"):
                matrices.append(parameter)
            elif name.endswith(("gate.weight", "fn")):
                slow.append(parameter)
            else:
                rest.append(parameter)
        muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        groups = [{"params": rest}, {"params": slow, "scale": SLOW}]
        adamw = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.optimizers = (muon, adamw)

    def step(self, scale: float) -> None:
        for parameter, each in self.stacked:
            for view, grad in zip(each, parameter.grad):
                view.grad = grad
            parameter.grad = None
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * scale * group.get("scale", 1.0)
            optimizer.step()
            optimizer.zero_grad()


class Balance:
    """Moves the correction bias of each router towards equal load, as DeepSeek-V3 does (no loss for it)."""

    def __init__(self, model: DeepseekV4ForCausalLM):
        self.routers = [m for m in model.modules() if isinstance(m, Router) and not m.is_hash]
        self.loads: dict[Router, torch.Tensor] = {}
        for router in self.routers:
            router.register_forward_hook(self._count)

    def _count(self, router: Router, _, out) -> None:
        self.loads[router] = out[0].flatten().bincount(minlength=len(router.weight)).float()

    def step(self) -> float:
        """Returns the largest load of an expert relative to the mean."""
        for router in self.routers:
            load = self.loads[router]
            router.e_score_correction_bias += BALANCE_RATE * (load.mean() - load).sign()
        return max((load.max() / load.mean()).item() for load in self.loads.values())


def use_compiled(compiled: bool) -> None:
    for name, function in _FUNCTIONS[compiled].items():
        setattr(mixing, name, function)


@torch.no_grad()
def held_out_loss(model: DeepseekV4ForCausalLM, windows_BT: torch.Tensor) -> float:
    """Mean cross entropy in nats per token, in plain PyTorch."""
    use_compiled(False)
    logits = model(windows_BT[:, :-1]).float()
    use_compiled(True)
    return F.cross_entropy(logits.flatten(0, 1), windows_BT[:, 1:].flatten()).item()


def learning_rate_scale(share: float) -> float:
    """Short warm-up, then linearly to zero. `share` is the used part of the time budget."""
    return min(1.0, share / 0.02) * max(0.0, 1.0 - share)


def write_progress(out: Path, done: Progressed, figures: dict) -> None:
    (out / "progress.json").write_text(json.dumps({**asdict(done), **figures}, indent=2) + "\n")


def train_model(model, windows: Windows, held_out_BT, figures: dict, out: Path) -> Progressed:
    """Train until the CPU time is used; a file OUT/finish shortens the budget to 1.15 times what is used by then."""
    optimizer, balance = Optimizer(model, figures["peak_learning_rate"]), Balance(model)
    done, budget = Progressed(), 60 * figures["minutes_budget"]
    use_compiled(True)
    deepseek_v4.indexer_loss = torch.compile(deepseek_v4.indexer_loss, dynamic=False)
    started, saved = time.process_time(), time.monotonic()
    mean_index_loss, finish = float("nan"), out / "finish"
    try:
        while (used := time.process_time() - started) < budget:
            if finish.exists():
                finish.unlink()
                budget = min(budget, 1.15 * used)
            share = used / budget
            num_tokens = CONTEXT_TOKENS if share < LONG_CONTEXT_FROM else MAX_TOKENS
            losses = model.training_losses(windows.batch(num_tokens))
            (losses["tokens"] + losses["indexer"]).backward()
            optimizer.step(learning_rate_scale(share))
            largest_load = balance.step()
            done.steps += 1
            done.tokens += TOKENS_PER_STEP
            done.seconds = time.process_time() - started
            loss, index_loss = losses["tokens"].item(), losses["indexer"].item()
            done.loss = loss if done.steps == 1 else 0.95 * done.loss + 0.05 * loss
            mean_index_loss = index_loss if done.steps == 1 else 0.95 * mean_index_loss + 0.05 * index_loss
            if done.steps % 10 == 0:
                print(
                    f"{share:.3f}  step {done.steps}  loss {done.loss:.3f}  indexer {mean_index_loss:.3f}  "
                    f"load {largest_load:.2f}  {done.tokens / done.seconds:,.0f} tokens per CPU second",
                    flush=True,
                )
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                saved = time.monotonic()
                model.save_pretrained(out)
                write_progress(out, done, figures)
                print(
                    f"checkpoint; held-out loss {held_out_loss(model, held_out_BT):.4f} per token", flush=True
                )
    except KeyboardInterrupt:
        print("interrupted: saving what there is", flush=True)
    use_compiled(False)
    return done


@app.command("train")
def train_command(
    out: OutOption,
    cache: CacheOption = DEFAULT_CACHE,
    minutes: Annotated[float, typer.Option(help="Budget of the training loop, in CPU time.")] = 40.0,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 0.005,
    seed: int = 0,
    threads: int = 1,
) -> None:
    """Train and save float32 weights and figures in OUT; checkpoints are kept there on the way."""
    torch.set_num_threads(threads)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    training, held_out = corpus.split(corpus.load_documents(cache))
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(tiny_path())
    tokenizer.save_pretrained(out)
    encoded = encode(tokenizer, [document.text for document in training])
    held_out_tokens = torch.cat(encode(tokenizer, [document.text for document in held_out]))
    held_out_BT = held_out_tokens.unfold(0, CONTEXT_TOKENS + 1, CONTEXT_TOKENS)[::12][:16].contiguous()
    model = DeepseekV4ForCausalLM(tiny_config(tokenizer))
    init_weights(model, seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    figures = {
        "minutes_budget": minutes,
        "peak_learning_rate": lr,
        "seed": seed,
        "corpus_bytes": sum(len(d.text.encode()) for d in training),
        "corpus_tokens": sum(len(ids) for ids in encoded),
    }
    windows = Windows(encoded, seed, TOKENS_PER_STEP)
    done = train_model(model, windows, held_out_BT, figures, out)
    model.save_pretrained(out)
    write_progress(out, done, figures)
    print("trained", json.dumps(asdict(done)), flush=True)


@app.command("export")
def export_command(
    out: OutOption,
    to: Annotated[Path, typer.Option(help="Directory of the checkpoint to write.")] = SHIPPED,
    cache: CacheOption = DEFAULT_CACHE,
) -> None:
    """Write and measure the bfloat16 checkpoint of a run, finished or not, with tokenizer and README."""
    _, held_out = corpus.split(corpus.load_documents(cache))
    tokenizer = AutoTokenizer.from_pretrained(out)
    DeepseekV4ForCausalLM.from_pretrained(out).to(torch.bfloat16).save_pretrained(to)
    tokenizer.save_pretrained(to)
    shipped = DeepseekV4ForCausalLM.from_pretrained(to, dtype=torch.float32)
    texts = [document.text for document in held_out]
    figures = json.loads((out / "progress.json").read_text())
    figures |= {
        "parameters": sum(p.numel() for p in shipped.parameters()),
        "held_out_documents": len(held_out),
        "held_out_bytes": sum(len(text.encode()) for text in texts),
        "held_out_bits_per_byte": bits_per_byte(shipped, tokenizer, texts),
    }
    (to / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
    tiny_v4_report.write_readme(to, shipped, tokenizer, figures)
    print(json.dumps(figures, indent=2))


@app.command("eval")
def eval_command(
    checkpoint: Annotated[Path, typer.Option(help="Directory of the checkpoint.")] = SHIPPED,
    cache: CacheOption = DEFAULT_CACHE,
) -> None:
    """Recompute bits per byte of a saved checkpoint on the held-out documents."""
    _, held_out = corpus.split(corpus.load_documents(cache))
    model = DeepseekV4ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    value = bits_per_byte(model, AutoTokenizer.from_pretrained(checkpoint), [d.text for d in held_out])
    print(f"{value:.4f} bits per byte, {len(held_out)} held-out documents")


if __name__ == "__main__":
    app()
