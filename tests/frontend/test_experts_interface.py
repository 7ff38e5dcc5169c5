"""The hook into transformers' experts: what a module computes is proven by numbers, and everything is put back."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import (
    OpenAIPrivacyFilterExperts,
)

from pagebinder import CaptureError
from pagebinder.custom_ops.moe.gates import Gate
from pagebinder.frontend import experts_interface
from pagebinder.frontend.audit import audit
from pagebinder.frontend.capture import capture
from pagebinder.frontend.experts_interface import (
    experts_forward,
    experts_hook,
    experts_modules,
    hooked_experts,
)
from pagebinder.frontend.experts_proof import understand
from pagebinder.frontend.source import source_from_module
from tests.graphs import count
from tests.helpers import by_day
from tests.moe_models import tiny_mixtral, tiny_qwen3_moe

OPS = torch.ops.pagebinder


@dataclasses.dataclass
class Config:
    """What the experts' classes read of their model's config."""

    num_local_experts: int = 6
    num_experts: int = 6
    n_routed_experts: int = 6
    hidden_size: int = 16
    moe_hidden_size: int = 16
    intermediate_size: int = 24
    moe_intermediate_size: int = 24
    moe_latent_size: int | None = None
    hidden_act: str = "silu"
    mlp_hidden_act: str = "relu2"
    swiglu_limit: float = 1.5
    swiglu_alpha: float = 1.702
    post_norm_eps: float = 1e-5
    _experts_implementation_internal: str | None = None

    @property
    def _experts_implementation(self):
        return self._experts_implementation_internal


def experts(cls, dtype=torch.float32, **config):
    module, generator = cls(Config(**config)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return module.to(dtype).eval()


def limit_of(cls) -> float:
    """What it clamps to: the config's limit, or its own in releases that do not read that."""
    return getattr(cls(Config()), "limit", Config.swiglu_limit)


def understood(module):
    return understand("experts", module, experts_forward, [])


GPT_OSS = Gate(
    activation="swish", alpha=1.702, limit=limit_of(GptOssExperts), up_offset=1.0, interleaved=True
)
GATES = {
    MixtralExperts: Gate(),
    GptOssExperts: GPT_OSS,
    OpenAIPrivacyFilterExperts: dataclasses.replace(GPT_OSS, interleaved=False),
    DeepseekV4Experts: Gate(limit=1.5),
    NemotronHExperts: Gate(gated=False, activation="relu2"),
}
try:
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts

    MUSE = [MuseSparkExperts]
except ModuleNotFoundError:  # a release of transformers without it
    MUSE = []


@pytest.mark.parametrize("cls", GATES, ids=lambda cls: cls.__name__)
def test_the_gate_is_found_by_running_it(cls):
    assert understood(experts(cls)).gate == GATES[cls]


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "sigmoid", "gelu_new"])
def test_activations_are_found(act):
    name = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}.get(act, act)
    assert understood(experts(MixtralExperts, hidden_act=act)).gate == Gate(activation=name)


def test_rounding_decides_between_equal_functions():
    """Beam gates in float32; of a float32 model that is the same function, and the plainer one."""
    beam = pytest.importorskip("transformers.models.beam.modeling_beam", reason="not in this transformers")
    assert understood(experts(beam.BeamExperts)).gate == Gate()
    assert understood(experts(beam.BeamExperts, torch.bfloat16)).gate == Gate(in_float32=True)
    assert understood(experts(MixtralExperts, torch.bfloat16)).gate == Gate()


def test_a_limit_is_seen_however_large_it_is():
    assert understood(experts(DeepseekV4Experts, swiglu_limit=900.0)).gate == Gate(limit=900.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cls", [*GATES, *MUSE], ids=lambda cls: cls.__name__)
def test_equals_transformers_own_function(cls, dtype):
    module = experts(cls, dtype)
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.randn(9, 16, generator=generator).to(dtype)
    ids = torch.rand(9, 6, generator=generator).argsort(1)[:, :3]
    weights = torch.rand(9, 3, generator=generator).to(dtype)
    with torch.no_grad():
        expected = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, x, ids, weights)
        with experts_hook(module):
            got = module(x, ids, weights)
        in_float32 = (copy.deepcopy(module).float(), x.float(), ids, weights.float())
        exact = ALL_EXPERTS_FUNCTIONS["grouped_mm"](*in_float32)
    assert got.dtype is dtype and expected.abs().mean() > 0.1
    if dtype is torch.float32:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    else:  # releases of transformers round a bias in other places
        assert (got.float() - exact).norm() <= 1.01 * (expected.float() - exact).norm()


def test_everything_is_put_back():
    model = tiny_mixtral()
    model.config._experts_implementation = "batched_mm"
    before = [dict(vars(m)) for m in experts_modules(model).values()]
    for error in (None, RuntimeError("stop")):
        try:
            with experts_hook(model):
                assert experts_interface.IMPLEMENTATION in ALL_EXPERTS_FUNCTIONS
                if error:
                    raise error
        except RuntimeError:
            assert error is not None
        assert model.config._experts_implementation == "batched_mm"
        assert experts_interface.IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS
        assert [dict(vars(m)) for m in experts_modules(model).values()] == before


@functools.cache
def captured_pair(build):
    model = build()
    return model, capture(source_from_module(model))[0]


@pytest.mark.parametrize("build", by_day([tiny_mixtral, tiny_qwen3_moe], [tiny_mixtral]))
def test_one_op_for_each_module_and_nothing_else_mixes_tokens(build):
    model, gm = captured_pair(build)
    modules = experts_modules(model)
    assert count(gm, OPS.moe_experts.default) == len(modules) > 0
    assert audit(gm) == []
    result = hooked_experts(model, gm)
    assert [m.module_path for m in result.matches] == list(modules)
    assert all(m.detail == "silu(gate) * up" for m in result.matches)


def with_gate(gate):
    """Mixtral's experts with another gate between the projections, in both of the class's ways to run."""

    @use_experts_implementation
    class Experts(MixtralExperts):
        forward = DeepseekV4Experts.forward.__wrapped__  # the loop over experts that calls _apply_gate
        _apply_gate = gate

    return Experts


def soft_capped(self, h):
    gate, up = h.chunk(2, dim=-1)
    return torch.tanh(self.act_fn(gate)) * up


def test_an_unknown_gate_is_traced_as_it_is():
    module = experts(with_gate(soft_capped))
    assert understood(module).gate is None
    x, ids, weights = torch.randn(5, 16), torch.tensor([[0, 3]] * 5), torch.rand(5, 2)
    with torch.no_grad():
        expected = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, x, ids, weights)
        with experts_hook(module):
            torch.testing.assert_close(module(x, ids, weights), expected, rtol=1e-5, atol=1e-5)


def test_an_unknown_gate_emits_two_projections():
    model = tiny_mixtral(num_hidden_layers=1)
    model.model.layers[0].mlp.experts.act_fn = nn.Hardtanh()
    gm, _ = capture(source_from_module(model))
    assert count(gm, OPS.moe_experts.default) == 0 and count(gm, OPS.expert_linear.default) == 2
    assert audit(gm) == [] and len(hooked_experts(model, gm).matches) == 2


def gate_of_all_rows(self, h):
    gate, up = h.chunk(2, dim=-1)
    return self.act_fn(gate) * up / (1 + up.abs().mean())


def extra_weight(module):
    module.expert_scale = nn.Parameter(torch.ones(6))


def split_over_devices(module):
    module._is_expert_parallel = True


def other_projection(module):
    module.gate_up_proj_scale_inv = nn.Parameter(torch.ones(6))


def loop_that_does_more():
    @use_experts_implementation
    class Experts(MixtralExperts):
        def forward(self, *args):
            return MixtralExperts.forward.__wrapped__(self, *args) * 1.01

    return experts(Experts)


def changed(change):
    module = experts(MixtralExperts)
    change(module)
    return module


REFUSED = {
    "a weight more": (lambda: changed(extra_weight), "expert_scale"),
    "quantised": (lambda: changed(other_projection), "quantised"),
    "expert parallel": (lambda: changed(split_over_devices), "several devices"),
    "a loop that does more": (loop_that_does_more, "its result differs"),
    "a gate that looks at all rows": (lambda: experts(with_gate(gate_of_all_rows)), "its result differs"),
    "a gate that cannot be run": (lambda: experts(with_gate(lambda self, h: h.nothing)), "cannot be run"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_an_error(name):
    build, reason = REFUSED[name]
    module = build()
    with pytest.raises(CaptureError, match=reason) as error, experts_hook(nn.ModuleDict({"mlp": module})):
        pass
    assert "mlp" in str(error.value) and type(module).__name__ in str(error.value)


def test_a_call_that_is_not_understood_is_an_error():
    module = experts(MixtralExperts)
    with experts_hook(module), pytest.raises(CaptureError, match="3 dimensions"):
        module(torch.randn(1, 5, 16), torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2))


def test_a_module_that_is_not_in_the_graph_is_an_error():
    model, gm = captured_pair(tiny_mixtral)
    model.unused = experts(MixtralExperts)
    with pytest.raises(CaptureError, match="unused"):
        hooked_experts(model, gm)
    del model.unused
