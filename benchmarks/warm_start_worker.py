"""One start in a process of its own: import, load or compile, first token. Prints its stages in seconds as JSON.

python benchmarks/warm_start_worker.py artefact|compile|save DIR

"save" compiles DIR and writes DIR.artefact, which fills the caches as well.
"""

import time

STARTED = time.perf_counter()

import json  # noqa: E402  what comes after the clock is part of the start
import resource  # noqa: E402
import sys  # noqa: E402

PROMPT_TOKENS = 16
NUM_DECODES = 4
KV_CACHE_BYTES = 256 << 20


class Stages:
    """Seconds of each stage, which ends when it is named."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun = STARTED

    def ends(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = now - self._begun
        self._begun = now


def run(kind: str, model: str) -> dict:
    stages = Stages()
    import torch  # noqa: F401  the largest import, told apart

    stages.ends("import torch")
    from pagebinder import EngineConfig, SamplingParams

    if kind == "artefact":
        from pagebinder import load as make
    else:
        from pagebinder import compile_model as make
    stages.ends("import pagebinder")
    compiled = make(model)
    stages.ends("load" if kind == "artefact" else "compile")
    if kind == "save":
        compiled.save(f"{model}.artefact")
        stages.ends("save")
    engine = compiled.engine(EngineConfig(kv_cache_bytes=KV_CACHE_BYTES, max_num_seqs=1))
    stages.ends("engine")
    params = SamplingParams(max_tokens=1 + NUM_DECODES, temperature=0.0, ignore_eos=True)
    engine.add_request("prompt", list(range(100, 100 + PROMPT_TOKENS)), params)
    engine.step()
    stages.ends("first token")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    total = time.perf_counter() - STARTED
    decodes = []
    while engine.has_unfinished:
        before = time.perf_counter()
        engine.step()
        decodes.append(time.perf_counter() - before)
    return {
        "total": total,
        "processor": usage.ru_utime + usage.ru_stime,
        "stages": stages.seconds,
        "decode": min(decodes),
    }


if __name__ == "__main__":
    print(json.dumps(run(*sys.argv[1:])))
