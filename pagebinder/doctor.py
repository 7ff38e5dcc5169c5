"""`pagebinder doctor`: what this machine has, as data (`examine`) and as text (`render`)."""

import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
from rich.console import Group
from rich.table import Table
from rich.text import Text

# First and last minor version that is tested.
SUPPORTED = {"python": ("3.11", "3.13"), "torch": ("2.11", "2.15"), "transformers": ("5.17", "5.24")}
MOST_OPS_NAMED = 8  # that a provider has no kernel for
# Import name -> distribution, of what providers and executables may use if it is there.
OPTIONAL = {
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "flash_attn": "flash-attn",
    "flash_mla": "flash-mla",
    "tensorrt": "tensorrt",
    "onnx": "onnx",
    "onnxruntime": "onnxruntime",
    "llguidance": "llguidance",
}
SIMD = ("sse4_2", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16",
        "amx_tile", "amx_bf16", "asimd", "asimddp", "bf16", "i8mm", "sve", "sve2")  # fmt: skip


def examine() -> dict:
    """Everything `doctor` prints, JSON-ready. `can_run` is False if torch, transformers or all providers fail."""
    packages = [_python(), *(_package(name) for name in ("torch", "transformers"))]
    facts = {
        "packages": packages,
        "cpu": _cpu(),
        "memory": _memory(),
        "compiler": None,
        "cache": None,
        "gpus": [],
        "optional": [_optional(*names) for names in OPTIONAL.items()],
        "providers": [],
        "can_run": False,
    }
    if not any(p["problem"] for p in packages if p["version"] is None or "import" in p["problem"]):
        facts |= {"compiler": _compiler(), "cache": _cache(), "gpus": _gpus(), "providers": _providers()}
        facts["can_run"] = any(provider["usable"] for provider in facts["providers"])
    return facts


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _range_problem(name: str, version: str) -> str:
    low, high = SUPPORTED[name]
    if _minor(low) <= _minor(version) <= _minor(high):
        return ""
    return f"not tested: {name} {low} to {high} are"


def _python() -> dict:
    version = platform.python_version()
    problem = _range_problem("python", version)
    return {"name": "python", "version": version, "where": sys.executable, "problem": problem}


def _package(name: str) -> dict:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return {"name": name, "version": None, "where": None, "problem": f"not installed: pip install {name}"}
    try:
        where = str(Path(importlib.import_module(name).__file__).parent)
    except Exception as error:  # a broken install raises anything, and saying what is what doctor is for
        return {"name": name, "version": version, "where": None, "problem": f"import fails: {error!r}"}
    return {"name": name, "version": version, "where": where, "problem": _range_problem(name, version)}


def _optional(module: str, distribution: str) -> dict:
    found = importlib.util.find_spec(module) is not None
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = None
    return {"name": module, "installed": found, "version": version if found else None}


def _cpu() -> dict:
    model, flags = platform.processor() or platform.machine(), set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = (part.strip() for part in line.partition(":"))
            if key == "model name":
                model = value
            elif key in ("flags", "Features"):
                flags = set(value.split())
                break
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": model,
        "machine": platform.machine(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": usable,
        "simd": [name for name in SIMD if name in flags],
    }


def _memory() -> dict:
    memory = psutil.virtual_memory()
    return {"total_bytes": memory.total, "available_bytes": memory.available}


def _compiler() -> dict:
    from pagebinder.custom_ops.cpu.compiler import find_compiler
    from pagebinder.errors import CompilerNotFoundError

    try:
        command = find_compiler()
    except CompilerNotFoundError as error:
        return {"path": None, "version": None, "problem": str(error)}
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return {"path": shutil.which(command[0]), "version": None, "problem": f"it does not run: {error}"}
    return {"path": shutil.which(command[0]), "version": done.stdout.splitlines()[0], "problem": ""}


def _cache() -> dict:
    """The prebuilt kernels, if they can be used; those built here, oldest first, and which of them is the one for
    this machine and source."""
    from pagebinder.custom_ops.cpu.build import LIBRARY_NAME, cache_root, in_use, is_intact, library_path
    from pagebinder.errors import ProviderError

    prebuilt, why = in_use()
    kernels = {"level": prebuilt and prebuilt.level.name, "why_no_better": why}
    try:
        root = cache_root()
    except ProviderError:  # no home directory
        return {"prebuilt": kernels, "path": "-", "writable": False, "built": []}
    built = sorted(root.glob(f"*/{LIBRARY_NAME}"), key=lambda path: path.stat().st_mtime)
    try:
        current = library_path()
    except ProviderError:
        current = None
    existing = next(p for p in (root, *root.parents) if p.exists())
    return {
        "prebuilt": kernels,
        "path": str(root),
        "writable": os.access(existing, os.W_OK),
        "built": [
            {"path": str(p), "bytes": p.stat().st_size, "intact": is_intact(p), "current": p == current}
            for p in built
        ],
    }


def _gpus() -> list[dict]:
    import torch

    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        gpus.append(
            {"name": properties.name, "memory_bytes": properties.total_memory, "capability": capability}
        )
    return gpus


def _providers() -> list[dict]:
    """Every provider, whether this machine can use it, and per op why it cannot serve a bfloat16 layer."""
    import torch

    from pagebinder.custom_ops.providers import OpNeed, available_providers, registered_providers
    from pagebinder.passes.select_providers import SELECTABLE

    answers = []
    for name, usable, reason in available_providers():
        provider = registered_providers()[name]
        devices = provider.devices or ("cpu",)
        device = devices[0] if torch.cuda.is_available() or "cpu" not in devices else "cpu"
        ops = {
            op: provider.reasons_against(OpNeed(op=op, device=device, dtype="bfloat16", kv_dtype="bfloat16"))
            for op in SELECTABLE
        }
        answers.append({"name": name, "usable": usable, "reason": reason, "ops": ops})
    return answers


def render(facts: dict) -> Group:
    """The facts as a rich renderable."""
    table = Table(show_header=False, show_edge=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for line in _rows(facts):
        table.add_row(*line)
    verdict = Text("Models can run here.", style="green")
    if not facts["can_run"]:
        verdict = Text("Nothing can run here: see the problems above.", style="bold red")
    return Group(table, Text(), verdict)


def _rows(facts: dict):
    """(name, text) for each line; a problem is marked."""
    for p in facts["packages"]:
        yield p["name"], _marked(f"{p['version'] or '-'}  {p['where'] or ''}".rstrip(), p["problem"])
    cpu, memory = facts["cpu"], facts["memory"]
    cores = f"{cpu['usable_cores']} usable of {cpu['logical_cores']} logical"
    yield "CPU", Text(f"{cpu['model']} ({cpu['machine']}), {cores} cores")
    yield "SIMD", Text(" ".join(cpu["simd"]) or "none that is known here")
    free, total = (memory[key] / 2**30 for key in ("available_bytes", "total_bytes"))
    yield "memory", Text(f"{free:.1f} GiB free of {total:.1f} GiB")
    if facts["compiler"] is not None:
        compiler = facts["compiler"]
        found = (
            f"{compiler['path']}  {compiler['version']}" if compiler["version"] else compiler["path"] or "-"
        )
        yield "C++ compiler", _marked(found, compiler["problem"])
        yield from _cache_rows(facts["cache"])
    gpus = [
        f"{g['name']}, {g['memory_bytes'] / 2**30:.0f} GiB, compute {g['capability']}" for g in facts["gpus"]
    ]
    yield "GPU", Text("\n".join(gpus) or "none that torch can use")
    here = [f"{o['name']} {o['version'] or ''}".strip() for o in facts["optional"] if o["installed"]]
    missing = [o["name"] for o in facts["optional"] if not o["installed"]]
    yield (
        "optional",
        Text(f"installed: {', '.join(here) or 'none'}\nnot here: {', '.join(missing) or 'none'}"),
    )
    for provider in facts["providers"]:
        yield f"provider {provider['name']}", _provider_text(provider)


def _cache_rows(cache: dict):
    yield "cache", _marked(cache["path"], "" if cache["writable"] else "not writable: set PAGEBINDER_CACHE")
    current = next((b for b in cache["built"] if b["current"]), None)
    size = sum(b["bytes"] for b in cache["built"]) / 2**20
    state = "not built yet (the first compilation does it)"
    level, why = cache["prebuilt"]["level"], cache["prebuilt"]["why_no_better"]
    if level is not None:
        state = f"prebuilt for {level}" + (f" ({why})" if why else "")
    elif current is not None:
        state = "built" if current["intact"] else "damaged, will be rebuilt"
    if level is None:
        state += f", no prebuilt ones: {why}"
    yield "C++ kernels", Text(f"{state}; {len(cache['built'])} version(s) in the cache, {size:.1f} MiB")


def _provider_text(provider: dict) -> Text:
    from pagebinder.custom_ops.providers import no_kernel_for

    if not provider["usable"]:
        return _marked("no", provider["reason"])
    served = [op for op, reasons in provider["ops"].items() if not reasons]
    named = "every op" if len(served) == len(provider["ops"]) else ", ".join(served) or "no op"
    text = Text(f"yes, {provider['reason']}: {named}")
    without = [op for op, reasons in provider["ops"].items() if reasons == [no_kernel_for(op)]]
    for op, reasons in provider["ops"].items():
        if reasons and op not in without:
            text.append(f"\nnot {op}: {'; '.join(reasons)}", style="yellow")
    if without:
        few = len(without) <= MOST_OPS_NAMED
        which = ", ".join(without) if few else f"the other {len(without)} ops"
        text.append(f"\nno kernel for {which}", style="yellow")
    return text


def _marked(text: str, problem: str) -> Text:
    return Text.assemble(text, (f"  ({problem})" if problem else "", "yellow"))
