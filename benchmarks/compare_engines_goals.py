"""What the results of compare_engines.py are held against: ratios to peers, and the machine's own limits.

A ratio to a peer carries `allowed`: what it would be, had ours the machine's measured read bandwidth or matrix rate
(decode: the one that takes longer; mixed load: the same of each step, and requests that arrive no sooner). What
memory gives is measured beside each round: a machine that is shared gives twice as much at one time as at another.
"""

from __future__ import annotations

from collections.abc import Iterator

from checkpoints import Costs
from common import median
from kv_targets import goal

US, VLLM, LLAMA = "pagebinder", "vllm", "llama.cpp"
CODED = f"{US} coded"  # weights in 12 bits without loss
DECODE, PREFILL = "decode_tokens_per_second", "prefill_tokens_per_second"
QUANTIZED_GOALS = {"fp8": 1.7, "int8": 1.7, "int4_g64": 2.6}


def ratio(engines: dict, key: str, peer: str, us: str = US) -> float:
    """Ours over the peer's, the median of the ratios of rounds; where one side has fewer rounds, of the medians."""
    return median_ratio([row[key] for row in engines[us]["rounds"]], engines[peer], key)


def median_ratio(ours: list[float], peer: dict, key: str) -> float:
    theirs = [row[key] for row in peer["rounds"]]
    if len(ours) != len(theirs):
        return median(ours) / peer[key]
    return median([a / b for a, b in zip(ours, theirs)])


def read_rates(engine: dict, results: dict) -> list[float]:
    """What memory gave beside each of its rounds."""
    return [row.get("read_bytes_per_second", results["limits"]["read"]) for row in engine["rounds"]]


def read_share(engine: dict, step_bytes: float, results: dict) -> float:
    """Of what memory gave, for one request."""
    reads = read_rates(engine, results)
    return median([row[DECODE] * step_bytes / read for row, read in zip(engine["rounds"], reads)])


def decode_allowed(results: dict, requests: int, engines: dict, peer: str) -> float:
    fastest = [decode_limit(results, requests, read) for read in read_rates(engines[US], results)]
    return median_ratio(fastest, engines[peer], DECODE)


def decode_limit(results: dict, requests: int, read: float) -> float:
    """Tokens per second, if a step took as long as its weights and K and V take to read, or the products with its
    weights (two FLOPs for the two bytes of each) at the measured matrix rate, whichever is longer."""
    costs, (prompt, new) = Costs(**results["costs"]), results["settings"]["lengths"]
    context = prompt + new / 2
    step_bytes = costs.decode_bytes(requests) + requests * context * costs.kv_bytes_per_token
    step_flops = requests * costs.decode_flops
    return requests / max(step_bytes / read, step_flops / results["limits"]["product"])


def mixed_limit(arrivals: list, costs: Costs, limits: dict[str, float]) -> float:
    """Seconds that requests [at, prompt tokens, new tokens] take, sorted by arrival.

    A step has the prompts that have arrived and a token of each other request. It takes as long as weights, K and V
    take to read, or as the products with its weights, whichever is longer.
    """
    now, waiting, running = 0.0, list(arrivals), []  # running: [context, tokens to come]
    while waiting or running:
        if not running:
            now = max(now, waiting[0][0])
        arrived = [r for r in waiting if r[0] <= now]
        waiting = waiting[len(arrived) :]
        context = sum(tokens for tokens, _ in running)
        step_bytes = costs.decode_bytes(len(running) or 1) + context * costs.kv_bytes_per_token
        step_flops = len(running) * costs.decode_flops + sum(costs.prefill_flops(1, n) for _, n, _ in arrived)
        now += max(step_bytes / limits["read"], step_flops / limits["product"])
        running = [[tokens + 1, left - 1] for tokens, left in running] + [
            [n, new - 1] for _, n, new in arrived
        ]
        running = [r for r in running if r[1] > 0]
    return now


def goals(results: dict) -> list[dict]:
    """Every goal that there are figures for."""
    found = []
    for case, make in CASES.items():
        if case in results:
            found += make(results[case], results)
    return found


def _batch(cases: dict, results: dict) -> Iterator[dict]:
    for requests, case in cases.items():
        engines, label = case["engines"], f"{requests} request(s)"
        if US not in engines:
            continue
        prefill_limit = results["limits"]["product"] * case["prompt_tokens"] / case["prefill_flops"]
        if requests == "1":
            share = read_share(engines[US], Costs(**results["costs"]).weight_bytes_per_token, results)
            yield goal("decode, 1 request, share of read bandwidth", share, 0.95)
            if LLAMA in engines:
                allowed = decode_allowed(results, 1, engines, LLAMA)
                yield goal(
                    "decode, 1 request, over llama.cpp", ratio(engines, DECODE, LLAMA), 1.0, allowed=allowed
                )
            if {LLAMA, CODED} <= {*engines}:
                yield goal(
                    "decode, 1 request, coded, over llama.cpp", ratio(engines, DECODE, LLAMA, us=CODED), 1.1
                )
        elif VLLM in engines:
            allowed = decode_allowed(results, int(requests), engines, VLLM)
            yield goal(f"decode, {label}, over vLLM", ratio(engines, DECODE, VLLM), 2.0, allowed=allowed)
            if CODED in engines:
                value = ratio(engines, DECODE, VLLM, us=CODED)
                yield goal(f"decode, {label}, coded, over vLLM", value, 2.0)
        peers = [name for name in engines if name not in (US, CODED)]
        if requests != "32" and peers:
            best = max(peers, key=lambda name: engines[name][PREFILL])
            name, value = f"prefill, {label}, over the best peer ({best})", ratio(engines, PREFILL, best)
            yield goal(name, value, 1.4, allowed=prefill_limit / engines[best][PREFILL])
        if requests != "32":
            share = engines[US][PREFILL] / prefill_limit
            yield goal(f"prefill, {label}, share of the matrix rate", share, 0.8)


def _mixed(case: dict, results: dict) -> Iterator[dict]:
    engines = case["engines"]
    if US in engines and VLLM in engines:
        fastest = mixed_limit(case["arrivals"], Costs(**results["costs"]), results["limits"])
        value, allowed = ratio(engines, "tokens_per_second", VLLM), engines[VLLM]["seconds"] / fastest
        yield goal("mixed load, throughput over vLLM", value, 1.6, allowed=allowed)
        for what in ("first_token", "between_tokens"):
            for percent in (50, 99):
                key = f"{what}_p{percent}"
                value = ratio(engines, key, VLLM)
                yield goal(
                    f"mixed load, p{percent} of {what.replace('_', ' ')} over vLLM's",
                    value,
                    1.0,
                    at_most=True,
                )


def _contention(case: dict, results: dict) -> Iterator[dict]:
    if US in case["engines"]:
        yield goal("half of a core taken, share of decode kept", case["engines"][US]["kept"], 0.6)


def _context(case: dict, results: dict) -> Iterator[dict]:
    if US in case["engines"]:
        share = read_share(case["engines"][US], case["bytes_per_step"], results)
        yield goal(f"context {case['context']:,}, share of read bandwidth", share, 0.85)


def _start(case: dict, results: dict) -> Iterator[dict]:
    if US in case:
        yield goal(
            "start to first token, nothing cached, seconds", case[US]["ready_seconds"], 25.0, at_most=True
        )


# Ours and llama.cpp's of as many bits a weight.
SAME_BITS = (("int8", "Q8_0"), ("int4_g32", "Q4_0"))


def _quantized(case: dict, results: dict) -> Iterator[dict]:
    for name in case["engines"]:
        target = QUANTIZED_GOALS.get(name.removeprefix(f"{US} "))
        if target and US in case["engines"]:
            yield goal(
                f"decode, 1 request, {name} over bf16", ratio(case["engines"], DECODE, US, us=name), target
            )
    for ours, theirs in ((f"{US} {a}", f"{LLAMA} {b}") for a, b in SAME_BITS):
        if {ours, theirs} <= {*case["engines"]}:
            for what, key in (("decode, 1 request", DECODE), ("prefill, 1 request", PREFILL)):
                value = ratio(case["engines"], key, theirs, us=ours)
                yield goal(f"{what}, {ours} over {theirs}", value, 1.0)


def _gguf(case: dict, results: dict) -> Iterator[dict]:
    """The same file in both."""
    for ours in (name for name in case["engines"] if name.startswith(f"{US} ")):
        format = ours.removeprefix(f"{US} ")
        for what, key in (("decode", DECODE), ("prefill", PREFILL)):
            value = ratio(case["engines"], key, f"{LLAMA} {format}", us=ours)
            yield goal(f"{what}, 1 request, the GGUF file in {format} over llama.cpp", value, 1.0)


CASES = {
    "batch": _batch, "mixed": _mixed, "contention": _contention, "context": _context, "start": _start,
    "quantized": _quantized, "gguf": _gguf,
}  # fmt: skip
