"""How a provider is chosen, refused and reported."""

import pytest

from pagebinder.custom_ops import providers
from pagebinder.custom_ops.cpu import build
from pagebinder.custom_ops.providers import OpNeed, Provider, available_providers, select_provider
from pagebinder.errors import CompilerNotFoundError, ProviderError

NEED = OpNeed(
    op="paged_attention", dtype="bfloat16", head_dim=64, head_dim_v=64, features=frozenset({"window"})
)


@pytest.fixture
def no_compiler(monkeypatch):
    error = CompilerNotFoundError("no C++ compiler found")
    monkeypatch.setattr(build, "problem", lambda: error)


def test_auto_takes_the_cpu_kernels():
    selection = select_provider(NEED)
    assert selection.provider == "cpu"
    assert str(selection.overload) == "pagebinder_cpu.paged_attention.default"
    assert selection.rejected == {} and "paged_attention" in selection.why
    assert select_provider(NEED, "auto") == selection


def test_explicit_reference():
    selection = select_provider(NEED, "reference")
    assert str(selection.overload) == "pagebinder.paged_attention.default"
    assert "requested" in selection.why


def test_auto_falls_back_loudly_without_a_compiler(no_compiler):
    selection = select_provider(NEED)
    assert selection.provider == "reference"
    assert "FALLBACK" in selection.why and "no C++ compiler" in selection.why
    assert selection.rejected["cpu"] == ["no C++ compiler found"]


@pytest.mark.parametrize("op", ["linear", "linears", "gated_linear"])
def test_a_reference_that_is_fast_is_no_fallback(op, no_compiler):
    """cuBLAS is the fast way on a GPU; on a CPU it is our kernels that are missed."""
    selection = select_provider(OpNeed(op=op, device="cuda"), prepare=False)
    assert selection.provider == "reference" and selection.rejected
    assert (
        f"the reference of {op} runs in cuBLAS on cuda" in selection.why and "FALLBACK" not in selection.why
    )
    assert "FALLBACK" in select_provider(OpNeed(op=op)).why
    assert "FALLBACK" in select_provider(OpNeed(op="paged_relative_attention", device="cuda")).why


def test_explicit_cpu_without_a_compiler_raises(no_compiler):
    with pytest.raises(CompilerNotFoundError, match=r"no C\+\+ compiler.*Registered providers: .*reference"):
        select_provider(NEED, "cpu")


def test_auto_falls_back_when_the_build_fails(monkeypatch):
    def fail(part="core"):
        raise ProviderError("compiling failed: syntax error")

    monkeypatch.setattr(build, "load", fail)
    selection = select_provider(NEED)
    assert selection.provider == "reference" and "syntax error" in selection.why
    with pytest.raises(ProviderError, match="syntax error"):
        select_provider(NEED, "cpu")


def test_only_the_kernels_of_the_needs_type_are_loaded(monkeypatch):
    loaded = []
    monkeypatch.setattr(build, "load", loaded.append)
    for op in ("paged_attention", "linear", "unified_attention"):
        select_provider(OpNeed(op=op, dtype="bfloat16"), "cpu")
    assert loaded == ["core", "bfloat16", "core", "unified", "bfloat16"]


def test_unknown_provider_lists_the_names():
    with pytest.raises(ProviderError, match=r"'fastest'.*cpu, .*reference"):
        select_provider(NEED, "fastest")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "cuda"}, "runs on cpu, not on cuda"),
        ({"dtype": "float64"}, "dtype float64"),
        ({"kv_dtype": "float8_e4m3fn"}, "q's dtype bfloat16, not float8_e4m3fn"),
        ({"op": "rope"}, "no kernel for rope"),
    ],
)
def test_explicit_request_that_cannot_be_served(change, reason):
    need = OpNeed(**{"op": "paged_attention", "dtype": "bfloat16", **change})
    with pytest.raises(ProviderError, match=reason) as caught:
        select_provider(need, "cpu")
    assert not isinstance(caught.value, CompilerNotFoundError)
    if change.get("op") is None:
        assert select_provider(need).provider == "reference"


def test_unknown_op_and_feature():
    with pytest.raises(ProviderError, match="no op telepathy"):
        select_provider(OpNeed(op="telepathy"))
    with pytest.raises(ValueError, match="telepathy"):
        OpNeed(op="paged_attention", features=frozenset({"telepathy"}))


def test_available_providers(no_compiler):
    answer = {name: (usable, reason) for name, usable, reason in available_providers()}
    assert answer["reference"][0] is True
    assert answer["cpu"] == (False, "no C++ compiler found")


def test_a_name_is_registered_once(monkeypatch):
    monkeypatch.setattr(providers, "_providers", dict(providers._providers))

    class Another(Provider):
        name = "another"

    providers.register_provider(Another())
    with pytest.raises(ValueError, match="already registered"):
        providers.register_provider(Another())
    assert "another" in providers.registered_providers()
