"""Random decoders are compiled and served token for token, or refused with a reason; illegal ones are always refused.

3 recipes in every run, always the same; PAGEBINDER_NIGHTLY=1 draws 500 new ones (PAGEBINDER_FUZZ_EXAMPLES: another
number).
"""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, example, given, settings

import pagebinder
from pagebinder import CaptureError, CompileConfig, EngineConfig, SamplingParams
from tests.fuzz.known_refusals import known_refusal
from tests.fuzz.random_decoders import VOCAB_SIZE, RandomDecoder, decoder_of
from tests.fuzz.recipes import Recipe, recipes

NIGHTLY = os.environ.get("PAGEBINDER_NIGHTLY") == "1"
EXAMPLES = int(os.environ.get("PAGEBINDER_FUZZ_EXAMPLES", 500 if NIGHTLY else 3))
NEW_TOKENS = 5
ONE = ("causal",)
TIE = 1e-4  # of the logits' spread: two tokens this near are equally right


def compiled(model: torch.nn.Module):
    config = CompileConfig(executable="eager", block_size=8, max_model_len=64)
    return pagebinder.compile_model(model, config)


def prompts(seed: int) -> list[list[int]]:
    """Longer than every window, chunk and block; the second begins as the first; the third is one token."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(VOCAB_SIZE, (27,), generator=generator).tolist()
    return [first, [*first[:20], 1, 2, 3], [first[0] ^ 1]]


def serve(served, texts: list[list[int]]) -> dict[str, list[int]]:
    """Each prompt in chunks of at most 8 tokens, the later ones while the first is being computed or decoded."""
    options = {"num_kv_blocks": 64, "max_num_seqs": 3, "max_num_batched_tokens": 8}
    engine = served.engine(EngineConfig(**options))
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    waiting, done, step = list(enumerate(texts)), {}, 0
    while waiting or engine.has_unfinished:
        if waiting and step % 5 == 0:
            index, text = waiting.pop(0)
            engine.add_request(f"r{index}", text, params)
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output.token_ids
        step += 1
    engine.check_integrity()
    return done


def require_exact(model: RandomDecoder, text: list[int], new: list[int]) -> None:
    """Every new token is the one with the largest logit, by the source model on all tokens before it."""
    ids = text + new
    with torch.no_grad():
        logits = model(torch.tensor([ids]), torch.arange(len(ids))[None])[0, len(text) - 1 : -1]
    assert len(new) == NEW_TOKENS and bool(logits.isfinite().all())
    short = logits.max(-1).values - logits.gather(-1, torch.tensor(new)[:, None])[:, 0]
    assert float(short.max()) <= TIE * float(logits.std()), f"{new} is not what the model says"


def check(recipe: Recipe) -> str:
    """Why it was refused; or "served"."""
    model = decoder_of(recipe)
    try:
        served = compiled(model)
    except CaptureError as refusal:
        assert len(str(refusal)) > 40
        return str(refusal)
    texts = prompts(recipe.seed)
    for name, new in serve(served, texts).items():
        require_exact(model, texts[int(name[1:])], new)
    return "served"


def require_as_expected(recipe: Recipe) -> None:
    answer = check(recipe)
    if recipe.illegal is not None:
        assert answer != "served", f"{recipe.illegal} was compiled"
        return
    known = known_refusal(recipe)
    if known is None:
        assert answer == "served", answer
    else:
        assert known in answer, answer


@settings(
    max_examples=EXAMPLES,
    derandomize=not NIGHTLY,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
@given(recipe=recipes())
@example(recipe=Recipe(attention="sdpa bool", masks=ONE, extra="scaled values"))  # their factor was lost
@example(recipe=Recipe(attention="masked_fill", masks=ONE, extra="scaled values"))
@example(recipe=Recipe(attention="sdpa float", masks=ONE, positions="alibi"))  # was refused
@example(
    recipe=Recipe(attention="where", masks=ONE, positions="by distance", sinks=True, repeat="native")
)  # sinks of groups
def test_random_decoders_are_served_exactly_or_refused(recipe):
    require_as_expected(recipe)
