"""Building the CPU kernels: caching, damage, concurrency, a missing or failing compiler, other instruction sets."""

import ctypes
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pagebinder.custom_ops.cpu import build, compiler, parts
from pagebinder.custom_ops.cpu.provider import parts_of
from pagebinder.errors import CompilerNotFoundError, ProviderError

REPOSITORY = Path(__file__).parents[2]
TINY_SOURCE = 'extern "C" int pagebinder_answer() { return 42; }\n'


def run_python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def tiny_build(monkeypatch, tmp_path):
    """Makes `build` compile a one-line source into a fresh cache, so that these tests are quick."""
    source_dir = tmp_path / "source"
    source_dir.mkdir()
    (source_dir / "tiny.cpp").write_text(TINY_SOURCE)
    monkeypatch.setattr(parts, "SOURCE_DIR", source_dir)
    monkeypatch.setenv("PAGEBINDER_CACHE", str(tmp_path / "cache"))
    return source_dir


def test_without_a_home_it_is_as_with_one_that_cannot_be_written(monkeypatch):
    def unknown(*_):
        raise RuntimeError("Could not determine home directory.")

    for name in ("PAGEBINDER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(ProviderError, match="no home directory.*PAGEBINDER_CACHE"):
        build.build()


def test_second_build_is_a_cache_hit(tiny_build):
    path = build.build()
    first = path.stat()
    assert build.is_intact(path)
    assert build.build() == path and path.stat().st_mtime_ns == first.st_mtime_ns
    assert [p.name for p in path.parent.iterdir() if p.name.startswith("build-")] == []


def test_key_depends_on_source_flags_and_compiler(tiny_build, monkeypatch):
    paths = {build.library_path()}
    (tiny_build / "tiny.cpp").write_text(TINY_SOURCE + "// changed\n")
    paths.add(build.library_path())
    monkeypatch.setenv("PAGEBINDER_CPU_MARCH", "x86-64")
    paths.add(build.library_path())
    monkeypatch.setattr(compiler, "_version", lambda command: "another compiler")
    paths.add(build.library_path())
    assert len(paths) == 4


@pytest.mark.parametrize("damage", ["truncate", "garbage", "no digest"])
def test_damaged_library_is_rebuilt(tiny_build, damage):
    path = build.build()
    content = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(content[:1000])
    elif damage == "garbage":
        path.write_bytes(b"\0" * len(content))
    else:
        path.with_name(path.name + ".sha256").unlink()
    with pytest.warns(UserWarning, match="damaged"):
        assert build.build() == path
    assert build.is_intact(path)


def test_compile_error_shows_the_compilers_last_lines(tiny_build):
    (tiny_build / "tiny.cpp").write_text("int broken( { return missing_name; }\n")
    with pytest.raises(ProviderError, match=r"compiling the CPU kernels failed(.|\n)*tiny\.cpp"):
        build.build()
    assert not build.is_intact(build.library_path())


def test_threads_build_once_and_agree(tiny_build):
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(build.build())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4 and len(set(paths)) == 1 and build.is_intact(paths[0])


def test_processes_build_at_the_same_time(tiny_build, tmp_path):
    code = (
        "from pathlib import Path; from pagebinder.custom_ops.cpu import build, parts; "
        f"parts.SOURCE_DIR = Path({str(tiny_build)!r}); p = build.build(); assert build.is_intact(p); print(p)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PAGEBINDER_CACHE": str(tmp_path / "shared")}
    command = [sys.executable, "-W", "error", "-c", code]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert len({out for out, _ in outputs}) == 1


def test_unwritable_cache_names_the_variable(tiny_build, monkeypatch, tmp_path, caplog):
    """It is told once, as slower ops run in the place of kernels."""
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("PAGEBINDER_CACHE", str(blocker))
    monkeypatch.setattr(build, "_told", [])
    for _ in range(2):
        with pytest.raises(ProviderError, match="PAGEBINDER_CACHE"):
            build.build()
    (record,) = caplog.records
    assert f"{blocker}/pagebinder" in record.message and "slower" in record.message


def test_cxx_names_the_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(CompilerNotFoundError, match="no-such-compiler"):
        compiler.find_compiler()


def test_bindings_are_one_source(tiny_build, monkeypatch):
    """They cost mostly what torch's headers cost, and no loop of theirs matters."""
    for name in ("first", "second"):
        answer = f'extern "C" __attribute__((visibility("default"))) int pagebinder_{name}()'
        (tiny_build / f"binding_{name}.cpp").write_text(f"{answer} {{ return 1; }}\n")
    run, commands = compiler._run_all, []
    monkeypatch.setattr(compiler, "_run_all", lambda some, rank: (commands.extend(some), run(some, rank)))
    library = ctypes.CDLL(str(build.build()))
    assert library.pagebinder_first() == library.pagebinder_second() == 1
    lower = set(compiler.BINDING_FLAGS)
    compiled = {Path(c[c.index("-c") + 1]).name: lower <= set(c) for c in commands if "-c" in c}
    assert compiled == {"bindings.cpp": True, "tiny.cpp": False}


def test_small_kernels_are_one_source(tiny_build):
    """Their headers take longer to read than they to be compiled; names that two of them have are an error."""
    for name in ("rms_norm", "argmax"):
        (tiny_build / f"{name}.cpp").write_text(f"namespace {{ int of_{name} = 1; }}\n")
    units = dict(parts.units("core"))
    assert {source.name for source in units["small_kernels"]} == {"rms_norm.cpp", "argmax.cpp"}
    assert [source.name for source in units["tiny"]] == ["tiny.cpp"] and len(units) == 2
    build.build()
    (tiny_build / "argmax.cpp").write_text("namespace { int of_rms_norm = 1; }\n")
    with pytest.raises(ProviderError, match="redefinition"):
        build.build()


def test_what_nobody_waits_for_is_compiled_last():
    slots, order = compiler.Slots(1), []

    def work(rank, name):
        with slots.taken(lambda: rank):
            order.append(name)

    with slots.taken(lambda: 0):
        threads = []
        for rank, name in ((1, "late"), (0, "first"), (1, "later"), (0, "second")):
            threads.append(threading.Thread(target=work, args=(rank, name)))
            threads[-1].start()
            while len(slots._waiting) < len(threads):
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == ["first", "second", "late", "later"]
    assert parts.RANKS["sampling"] > parts.RANKS.get("core", 0)


def test_a_failure_gives_its_slot_back():
    slots = compiler.Slots(1)
    with pytest.raises(KeyError), slots.taken(lambda: 0):
        raise KeyError
    with slots.taken(lambda: 0):
        pass


def test_what_nobody_waits_for_leaves_a_processor_until_somebody_does():
    slots, ranks, entered = compiler.Slots(2), {"late": 1}, threading.Event()

    def work():
        with slots.taken(lambda: ranks["late"]):
            entered.set()

    with slots.taken(lambda: 0):
        thread = threading.Thread(target=work)
        thread.start()
        while not slots._waiting:
            time.sleep(0.001)
        with slots.taken(lambda: 0):  # who comes later does not wait behind it
            pass
        assert not entered.wait(0.05)
        ranks["late"] = 0
        slots.look_again()
        assert entered.wait(60)
    thread.join()
    with slots.taken(lambda: 1):
        pass


def test_a_call_hurries_the_part_that_it_waits_for(tiny_build, monkeypatch):
    monkeypatch.setattr(compiler, "_hurried", set())
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_register", lambda part, path: None)
    monkeypatch.setitem(parts.PARTS, "sampling", (".", ()))
    build.start_build("sampling").join()
    assert list(build._loaded) == ["sampling"] and not compiler._hurried
    build.load("sampling")
    assert compiler._hurried == {"sampling"}


def test_parts_share_the_processors(tiny_build, monkeypatch, tmp_path):
    """However many parts are built at a time, no more compilers run than there are processors; linking is quick."""
    script, log = tmp_path / "compiler", tmp_path / "log"
    script.write_text(
        f'#!/bin/sh\ncase " $* " in *" -c "*) echo 1 >> {log}; sleep 0.1; echo -1 >> {log};; esac\n'
        'while [ $# != 0 -a "$1" != -o ]; do shift; done\n[ $# = 0 ] || touch $2\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(compiler, "_slots", compiler.Slots(2))
    for name in ("one", "two", "three"):
        (tiny_build / f"{name}.cpp").touch()
        monkeypatch.setitem(parts.PARTS, name, (".", ()))
    threads = [threading.Thread(target=build.build, args=(name,)) for name in ("one", "two", "three")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    changes = [int(line) for line in log.read_text().split()]
    assert len(changes) == 2 * 3 * 4 and max(itertools.accumulate(changes)) == 2


def test_a_call_builds_the_kernels_of_its_element_type(tmp_path):
    """Kernels of a type are a library of their own: a first call loads them, or says why it cannot."""
    assert parts_of("linear", "float16") == ("core", "float16") and parts_of("linear", "bfloat16") == (
        "core",
    )
    code = """
import os
import torch
from pagebinder.custom_ops.cpu import build
from pagebinder.custom_ops.providers import OpNeed, select_provider
attention = select_provider(OpNeed(op="paged_attention", dtype="bfloat16")).overload
assert sorted(build._loaded) == ["bfloat16", "core"], build._loaded
index = lambda *values: torch.tensor(values, dtype=torch.int32)
def call(op, dtype):
    q, cache = torch.ones(1, 2, 16, dtype=dtype), torch.ones(2, 1, 4, 32, dtype=dtype)
    return op(q, cache, index(1)[None], index(3), index(0, 1), head_dim_v=16, scale=0.25)
def gate_in_float16():
    x, weight = torch.ones(2, 31, dtype=torch.float16), torch.ones(8, 31, dtype=torch.float16)
    return torch.ops.pagebinder_cpu.gated_linear(x, weight, weight, activation="silu")
call(attention, torch.bfloat16)
torch.testing.assert_close(*(call(op, torch.float32) for op in (attention, torch.ops.pagebinder.paged_attention)))
assert sorted(build._loaded) == ["bfloat16", "core", "float32"], build._loaded
x, weight = torch.ones(2, 32), torch.ones(32, 32)
for dtype in (torch.bfloat16, torch.float32):
    torch.ops.pagebinder_cpu.linear(x.to(dtype), weight.to(dtype), None)
    torch.ops.pagebinder_cpu.gated_linear(x.to(dtype), weight.to(dtype), weight.to(dtype), activation="silu")
assert "float16" not in build._loaded
os.environ["PAGEBINDER_CPU_MARCH"] = "no-such-machine"
for _ in range(2):
    for refused in (lambda: call(attention, torch.float16), gate_in_float16):
        try:
            refused()
        except RuntimeError as error:
            assert "float16 are not loaded" in str(error) and "no-such-machine" in str(error), error
        else:
            raise SystemExit("no error")
print("passed")
"""
    assert "passed" in run_python(code)


def test_every_part_stands_alone():
    """A model loads the parts it needs: no part may miss what only another has."""
    code = f"""
import ctypes, os, torch
for path in {[str(build.build(part)) for part in parts.PARTS]!r}:
    if not (child := os.fork()):  # torch's imports once, and each part in a process of its own
        try:
            ctypes.CDLL(path, mode=2)  # RTLD_NOW: every symbol must be found
        except OSError as error:
            print(error, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, path
"""
    run_python(code)


def test_background_build_is_awaited_by_load():
    thread = build.start_build()
    path = build.load()
    thread.join(timeout=120)
    assert not thread.is_alive() and build.is_intact(path)


def test_without_a_compiler_the_reference_serves(tmp_path):
    code = """
import torch
from pagebinder.custom_ops.providers import OpNeed, available_providers, select_provider
from pagebinder.errors import CompilerNotFoundError
need = OpNeed(op="paged_attention")
selection = select_provider(need)
assert selection.provider == "reference", selection
assert "no C++ compiler found" in selection.why, selection.why
try:
    select_provider(need, "cpu")
except CompilerNotFoundError as error:
    assert "install g++" in str(error)
else:
    raise SystemExit("no error")
index = lambda *values: torch.tensor(values, dtype=torch.int32)
out = selection.overload(torch.randn(1, 2, 16), torch.randn(2, 1, 4, 32), index(1)[None], index(3), index(0, 1),
                         head_dim_v=16, scale=0.25)
print(out.shape, [usable for name, usable, _ in available_providers() if name == "cpu"])
"""
    environment = {"PATH": str(tmp_path), "CXX": "", "PAGEBINDER_CACHE": str(tmp_path / "cache")}
    environment["PAGEBINDER_CPU_MARCH"] = "native"  # no prebuilt kernels either
    assert "[1, 2, 16]) [False]" in run_python(code, **environment)
    assert not (tmp_path / "cache").exists()


NEEDED_FLAG = {"x86-64": "fpu", "x86-64-v3": "avx2", "cooperlake": "avx512_bf16"}


@pytest.mark.parametrize("march", NEEDED_FLAG)
def test_narrower_instruction_sets_pass_the_numerics(march):
    """The same sources for plain SSE2, for AVX2 and for AVX-512 without matrix tiles, in a process of their own."""
    if os.uname().machine != "x86_64":
        pytest.skip("x86 only")
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if NEEDED_FLAG[march] not in flags:
        pytest.skip(f"no {NEEDED_FLAG[march]} here")
    code = """
import torch
from hypothesis import given, settings
from pagebinder.custom_ops.cpu import build
from pagebinder.custom_ops.cpu.provider import CpuProvider
from pagebinder.custom_ops.linear import packed_weights
from tests.custom_ops import test_linear as t_linear
from tests.custom_ops import test_paged_attention as t
from tests.custom_ops import test_quantized_linear as t_quantized
from tests.custom_ops.paged_cases import Case, cases
build.load()
attention = CpuProvider().overload("paged_attention_lse")
for dtype in t.DTYPES:
    # Many prompts of several heads whose last tiles have few rows, whatever the number of lanes.
    t.check(attention, Case(tuple((0, 64 + rows) for rows in range(1, 34)), dtype, num_kv_heads=8, group=1))
    for group in (1, 2, 3, 5, 9):
        t.check(attention, Case(((1100, 1), (0, 40), (3, 2)), dtype, head_dim=72, head_dim_v=20, group=group,
                                sinks="finite", alibi=True, options={"soft_cap": 5.0}))
@settings(t.relaxed, max_examples=25, database=None)
@given(cases(max_context=200, max_new=40))
def check_random_cases(case):
    t.check(attention, case)
check_random_cases()
assert not torch.ops.pagebinder_cpu.has_matrix_tiles()
assert torch.ops.pagebinder_cpu.reads_packed_weights()
kernels = torch.ops.pagebinder_cpu
x, weight, bias = t_linear.operands(40, 96, 1056)
packed = packed_weights.pack(weight)
for rows in (1, 2, 3, 4, 5, 6, 7, 13, 14, 15, 40):
    t_linear.check(lambda x, w, b: kernels.linear(x, packed, b), x[:rows], weight, bias)
    assert torch.equal(kernels.linear(x[:rows], packed, bias), kernels.linear(x, packed, bias)[:rows])
    assert rows <= 4 or torch.equal(kernels.linear(x[:rows], weight, bias), kernels.linear(x[:rows], packed, bias))
CpuProvider().prepare("quantized_linear")
linear = CpuProvider().overload("quantized_linear")
for name in t_quantized.FORMATS:
    weight = t_quantized.weight_of(96, 320)
    x, bias = t_quantized.operands(13, 96, 320)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13):
        t_quantized.check(linear, x[:rows], weight, name, bias)
print("passed")
"""
    assert "passed" in run_python(code, PAGEBINDER_CPU_MARCH=march)


def test_a_processor_between_those_compiles():
    """AVX-512 without dot products (Skylake): wide vectors, and not what has dots or is 8 lanes wide."""
    if os.uname().machine != "x86_64":
        pytest.skip("x86 only")
    folder = Path(parts.SOURCE_DIR)
    kernels = [*folder.glob("quant/quantized_linear*.cpp"), *folder.glob("quantized_moe/coded_*.cpp")]
    assert len(kernels) >= 8
    options = ("-std=c++17", "-march=skylake-avx512", "-fsyntax-only", "-Wno-psabi", f"-I{folder}")
    subprocess.run([*compiler.find_compiler(), *options, *map(str, kernels)], check=True)
