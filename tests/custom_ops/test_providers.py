"""How a provider is chosen, refused and reported."""

import pytest
import torch

from pagebinder.custom_ops import library, providers
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
        ({"op": "gated_activation"}, "no kernel for gated_activation"),
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


class Mine(Provider):
    name = "mine"

    def overload(self, op):
        return library.op_info(op).overload


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "cpu"}, "one of Pagebinder's"),
        ({"name": "flashinfer"}, "one of Pagebinder's"),
        ({"name": "my provider"}, "name='my provider'"),
        ({"name": None}, "name=None"),
        ({"devices": "cpu"}, "devices='cpu' of mine: use a tuple"),
        ({"graph_capture": "sometimes"}, "graph_capture='sometimes' of mine: use one of never"),
    ],
)
def test_what_a_provider_says_of_itself(change, message, monkeypatch):
    monkeypatch.setattr(providers, "_providers", dict(providers._providers))
    with pytest.raises(ProviderError, match=message):
        providers.register_provider(type("Changed", (Mine,), change)())
    assert "mine" not in providers.registered_providers()


def test_only_providers_are_registered():
    for wrong in (3, Mine, Provider, None):
        with pytest.raises(ProviderError, match="takes an instance of a subclass of Provider"):
            providers.register_provider(wrong)
    with pytest.raises(ProviderError, match="name=None"):
        providers.register_provider(Provider())


def _raise(*_):
    raise KeyError("boom")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reasons_against": lambda self, need: "no"}, r"mine.reasons_against\(rms_norm\) returned 'no'"),
        ({"reasons_against": lambda self, need: None}, "returned None: give a list"),
        ({"reasons_against": _raise}, r"reasons_against\(rms_norm\) raised KeyError: 'boom'"),
        ({"overload": Provider.overload}, "its overload of rms_norm, raised NotImplementedError"),
        ({"overload": _raise}, "raised KeyError: 'boom'"),
        ({"overload": lambda self, op: library.overload(self.namespace, op)}, "raised AttributeError.*define_schema"),
        ({"overload": lambda self, op: torch.relu}, "no torch.ops overload"),
        ({"overload": lambda self, op: torch.ops.aten.relu.default}, "relu.default, whose schema is not the op's"),
    ],
)  # fmt: skip
def test_what_a_provider_answers(change, message, monkeypatch):
    monkeypatch.setattr(providers, "_providers", dict(providers._providers))
    providers.register_provider(type("Changed", (Mine,), change)())
    with pytest.raises(ProviderError, match=message):
        select_provider(OpNeed(op="rms_norm"), "mine")


def test_an_overload_without_a_kernel(monkeypatch):
    monkeypatch.setattr(providers, "_providers", dict(providers._providers))

    class Empty(Mine):
        name = "empty"

        def overload(self, op):
            return library.overload(self.namespace, op)

    library.define_schema("pagebinder_empty", library.op_info("rms_norm"))
    providers.register_provider(Empty())
    with pytest.raises(ProviderError, match="pagebinder_empty.rms_norm.default, which has no kernel for cpu"):
        select_provider(OpNeed(op="rms_norm"), "empty")
    assert select_provider(OpNeed(op="rms_norm"), "empty", prepare=False).provider == "empty"


def test_there_is_no_such_op():
    with pytest.raises(ValueError, match="there is no op 'rms_nrom'; did you mean 'rms_norm'"):
        library.op_info("rms_nrom")
