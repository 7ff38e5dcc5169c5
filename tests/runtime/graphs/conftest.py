"""What tests of captured steps share: tiny models, compiled once, and an op that cannot be captured."""

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig
from tests.helpers import tiny_gemma3, tiny_llama, tiny_mamba2, tiny_qwen3, tiny_qwen3_next

_WINDOWS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
_RECURRENT = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_only_layers": [0, 1],
}
MODELS = {
    "llama": (tiny_llama, {}),
    "reference attention": (tiny_llama, {"providers": {"paged_attention": "reference"}}),
    "codes of reference attention": (
        lambda: tiny_qwen3(num_hidden_layers=1).bfloat16(),
        {
            "providers": {"quantized_paged_attention_fp8_quant": "reference"},
            "kv_dtype": "fp8_e4m3",
            "quantization": "fp8",
            "activation_quantization": "fp8_per_token",
        },
    ),
    "windows": (lambda: tiny_gemma3(**_WINDOWS), {}),
    "mamba2": (tiny_mamba2, {}),
    "qwen3 next": (lambda: tiny_qwen3_next(**_RECURRENT), {}),
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


@pytest.fixture(scope="session")
def waits():
    """An op of one's own that cannot be captured, as its tag says: x -> 2 x."""
    lib = torch.library.Library("captured_test", "DEF")
    lib.define("waits(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
    lib.impl("waits", lambda x: x * 2.0, "CPU")
    lib.impl("waits", lambda x: torch.empty_like(x, memory_format=torch.contiguous_format), "Meta")
    yield torch.ops.captured_test.waits.default
    lib._destroy()
