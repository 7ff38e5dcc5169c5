"""Tiny models compiled once for the tests of captured steps."""

import pytest

import pagebinder
from pagebinder import CompileConfig
from tests.helpers import tiny_gemma3, tiny_llama, tiny_mamba2, tiny_qwen3_next

MODELS = {
    "llama": (tiny_llama, {}),
    "reference attention": (tiny_llama, {"providers": {"paged_attention": "reference"}}),
    "windows": (tiny_gemma3, {}),
    "mamba2": (tiny_mamba2, {}),
    "qwen3 next": (tiny_qwen3_next, {}),
}
_compiled: dict = {}


@pytest.fixture(scope="session")
def compiled():
    """name -> model, compiled with the eager executable."""

    def get(name: str):
        if name not in _compiled:
            make, options = MODELS[name]
            config = CompileConfig(executable="eager", block_size=16, **options)
            _compiled[name] = pagebinder.compile_model(make(), config)
        return _compiled[name]

    return get
