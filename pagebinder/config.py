"""What users may ask for: frozen, keyword-only, an unknown key is an error that names the nearest option.

CompileConfig    how a model is compiled
EngineConfig     how much memory and how many requests an engine gets
SamplingParams   how one request's tokens are chosen (`sampling_params.py`)
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from pagebinder.config_checks import is_int, parse_dtype, require, strict
from pagebinder.errors import ConfigError
from pagebinder.sampling_params import SamplingParams

__all__ = ["CompileConfig", "EngineConfig", "SamplingParams"]

EXECUTABLES = ("auto", "eager", "native", "inductor", "cuda_graph", "tensorrt")
DRAFTERS = ("ngram", "guide")
VERIFY = ("off", "sample", "full")
MOST_PROMPT_EMBEDS = 1 << 24


KV_DTYPES = (
    *("auto", "fp8_ds_mla", "fp8_e4m3", "fp8_e5m2", "int8"),
    *("fp8_e4m3_per_head", "fp8_e4m3_per_tensor", "fp8_e5m2_per_head", "fp8_e5m2_per_tensor"),
)
INDEX_DTYPES = ("auto", "fp8", "mxfp4")
QUANTIZATIONS = ("fp8", "fp8_tensor", "fp8_block", "int8", "int4_g64", "int4_g32", "mxfp4")
PASS_LEVELS = ("semantic", "paged", "fused", "packed")
ACTIVATION_QUANTIZATIONS = ("fp8_per_token", "fp8_per_group", "fp8_per_tensor")


@strict(ConfigError)
@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """How to compile a model.

    Args:
        device: "auto" (where the model is; for a checkpoint directory or ONNX file the GPU if there is one), "cpu",
            "cuda" or "cuda:N". Of a module that was given it must be where that is: it is not moved.
        dtype: weights and activations; None keeps the model's.
        kv_dtype: "auto" stores K and V in the activations' dtype. "fp8_e4m3", "fp8_e5m2" and "int8" store them in a
            byte a value, with a scale for each token and head; "fp8_e4m3_per_head", "fp8_e4m3_per_tensor" and those
            of e5m2 with fixed scales. "fp8_ds_mla" stores latent rows as DeepSeek's kernels do: e4m3 with scales,
            rotated channels in bfloat16 (584 bytes a row for DeepSeek-V4's attention, 656 for MLA of 512 + 64).
        kv_scales: the fixed scales: a safetensors file with a float32 tensor [2, KV heads] for each attention layer,
            named by its module path: what K and V are divided by. None: 1. Values beyond 448 (e4m3) or 57344 (e5m2)
            scales saturate.
        index_dtype: of the keys of an indexer: "auto" (like kv_dtype), "fp8" (132 bytes a key of 128), "mxfp4" (68).
        executable: "auto", "eager", "native", "inductor", "cuda_graph" or "tensorrt". "native" (CPU) calls the
            graph's ops from C++: nothing is compiled, a call costs a few us, the bits are those of eager. "auto" is
            native on a CPU where the layers are ops of ours, so that nothing is left to fuse, or only what is little
            and light (the report says how little); else inductor where a C++ compiler is, else eager. On a GPU
            engines capture the steps of each of them where they can; with
            "cuda_graph" it is an error if they cannot. "tensorrt" needs torch_tensorrt and an NVIDIA GPU: dense parts
            of the graph are its engines, paged and sparse ops stay in torch.
        streams: run branches of a layer that do not need each other side by side, on a second stream: "auto" (on a
            GPU and where ops run one by one: executable="eager"), "on" (on a CPU, too, where simulated streams try
            orders of the ops: the same tokens, no gain; with "auto" and "cuda_graph" as the executable the graph is
            then run op by op), "off". The report says what overlaps.
        tensorrt_fallback: torch runs what TensorRT cannot build, and the report says so; False makes it an error.
        providers: op name -> provider name, for example {"paged_attention": "reference"}.
        cascade: let attention read a prefix that several requests share once for all of them, where an engine finds
            that it pays (`EngineConfig(cascade=...)`): full attention, and windows that nobody has outgrown. Sums are
            then in another order, so a request's last bits may depend on who shares its prefix in a step.
        fusions: apply the passes that lead to the fused graph.
        passes: passes of your own by the graph they work on, {"fused": [fuse_squared_relu]} for example, which run in
            their order behind ours: "semantic" (ahead of the proof that nothing but attention and recurrences relates
            tokens), "paged" and "fused" of a decoder, "semantic" and "packed" of an encoder. See docs/passes.md.
        tokenwise_ops: names of ops of your own, "mylib::fancy_norm" for example, in the model or put there by your
            passes, that compute every token from itself alone. The proof takes your word for it, and the report says
            so; where the model has weights, each is run on parts of a sequence to see whether that holds.
        quantization: weights of linear layers in fewer bits, with activations as they are; None keeps them. "fp8"
            (e4m3, a scale for each output channel), "fp8_tensor" (one scale), "fp8_block" (128 x 128), "int8" (for
            each output channel), "int4_g64" and "int4_g32" (for 64 or 32 neighbours; the LM head always for 32),
            "mxfp4" (e2m1, a power of two for 32 neighbours; the LM head as int4_g32). The report says which layers
            keep their weights, and why. Codes that a checkpoint stores stay as they are.
        activation_quantization: what linear layers with weights in fp8 read, in fp8 (e4m3), too: "fp8_per_token",
            "fp8_per_group" (128 neighbours of a token) or "fp8_per_tensor". Scales are found in every step; that of a
            whole tensor then makes a request's numbers depend on the others of its step. None keeps activations.
        activation_scales: fixed scales for "fp8_per_tensor": a safetensors file with one float32 value for each
            linear layer, named "<module path>.input_scale": what activations are divided by. Layers that read the
            same value share the largest of theirs. Values beyond 448 scales saturate.
        map_weights: leave a checkpoint's weights mapped from their files, shared between processes. False copies
            them into huge pages where the model runs on a CPU and twice as much memory is free: decode of one request
            reads them 15 to 20 % faster. Tables of embeddings, of which a step reads some rows, stay mapped.
        pack_weights: keep weights of linear layers in bf16 (without matrix units experts, too) in the order in which
            kernels for x86 processors read them: AMX, dot products of bf16 pairs, AVX2. None: those
            of a checkpoint directory, whose files are no longer needed in memory then, and its experts, which are
            held twice, where that takes a quarter of the free memory at most; True: also those of a module that was
            given, which takes as much memory again; False: none. Packed weights are copies: to change the module's
            in place changes nothing.
            "coded": as True, and where rows are multiples of 256 in about 12 of 16 bits without loss, so a decode
            reads a quarter less: the same tokens. Prefill decodes linear layers again for each 512 tokens.
        verify: "full" runs the graph before and after every pass, on sequences at the edges of blocks and windows,
            with the model's weights and with random ones, and tests each kind of rewrite on its own; "sample" runs
            a few short sequences before and after each level. A difference is a VerificationError. Needs weights;
            the random ones take as much memory again while it runs.
        strict: an attention layer that is not explained is a CaptureError; False records it and goes on.
        block_size: tokens per KV block, at most 65,536; None lets the planner choose.
        workload: what the KV cache is planned for, a pagebinder.runtime.kv.Workload or a dict of its fields, for
            example {"contexts": [[2000, 0.7], [8000, 0.3]], "concurrency": 64}; None: mixed lengths.
        max_model_len: longest prompt + output in tokens; None takes the model's.
        prompt_embeds: let prompts hold embeddings (images, learned prompts) in the place of tokens, this many at a
            time over all requests; 0: none. A row takes as much memory as one of the model's embedding.
        lock: write the plan lock to this file. locked: a plan lock that the compilation must agree with, else it is
            a PlanDriftError that says where matching stopped.
    """

    device: str = "auto"
    dtype: str | torch.dtype | None = None
    kv_dtype: str = "auto"
    kv_scales: str | os.PathLike | None = None
    index_dtype: str = "auto"
    executable: str = "auto"
    streams: str = "auto"
    tensorrt_fallback: bool = True
    providers: dict[str, str] = field(default_factory=dict)
    cascade: bool = False
    fusions: bool = True
    passes: dict[str, Any] = field(default_factory=dict)
    tokenwise_ops: tuple[str, ...] = ()
    quantization: str | None = None
    activation_quantization: str | None = None
    activation_scales: str | os.PathLike | None = None
    map_weights: bool = False
    pack_weights: bool | str | None = None
    verify: str = "off"
    strict: bool = True
    block_size: int | None = None
    workload: Any = None
    max_model_len: int | None = None
    prompt_embeds: int = 0
    lock: str | os.PathLike | None = None
    locked: str | os.PathLike | None = None

    def __post_init__(self):
        object.__setattr__(self, "dtype", parse_dtype(self.dtype))
        if self.executable not in EXECUTABLES:
            raise ConfigError(
                f"executable={self.executable!r} is unknown; use one of {', '.join(EXECUTABLES)}."
            )
        ok = isinstance(self.streams, str) and self.streams in ("auto", "on", "off")
        require(ok, ConfigError, f'streams={self.streams!r}: use "auto", "on" or "off".')
        ok = self.streams != "on" or self.executable in ("auto", "eager", "cuda_graph")
        require(ok, ConfigError, f'streams="on" needs ops that run one by one, executable="eager", for example, '
                 f"and not {self.executable!r}.")  # fmt: skip
        for name in ("fusions", "map_weights", "strict"):
            value = getattr(self, name)
            require(isinstance(value, bool), ConfigError, f"{name}={value!r}: use True or False.")
        for name, known in (("kv_dtype", KV_DTYPES), ("index_dtype", INDEX_DTYPES)):
            value = getattr(self, name)
            ok = isinstance(value, str) and value in known
            require(ok, ConfigError, f"{name}={value!r} is unknown; use one of {', '.join(known)}.")
        ok = self.quantization is None or self.quantization in QUANTIZATIONS
        known = ", ".join(QUANTIZATIONS)
        require(ok, ConfigError, f"quantization={self.quantization!r}: use one of {known}, or None.")
        self._check_activation_options()
        fallback = self.tensorrt_fallback
        ok = isinstance(fallback, bool)
        require(ok, ConfigError, f"tensorrt_fallback={fallback!r}: use True or False.")
        fixed = self.kv_dtype.endswith(("_per_head", "_per_tensor"))
        ok = self.kv_scales is None or (fixed and isinstance(self.kv_scales, (str, os.PathLike)))
        require(
            ok,
            ConfigError,
            "kv_scales: use the path of a safetensors file, with a kv_dtype per head or tensor.",
        )
        if self.verify not in VERIFY:
            raise ConfigError(f"verify={self.verify!r} is unknown; use one of {', '.join(VERIFY)}.")
        packed = self.pack_weights
        ok = packed is None or isinstance(packed, bool) or packed == "coded"
        require(ok, ConfigError, f'pack_weights={packed!r}: use True, False, "coded" or None.')
        ok = not (packed and self.map_weights)
        require(
            ok,
            ConfigError,
            "map_weights leaves weights in their files and pack_weights copies them: use one.",
        )
        require(isinstance(self.cascade, bool), ConfigError, f"cascade={self.cascade!r}: use True or False.")
        self._check_passes()
        if not isinstance(self.providers, dict):
            raise ConfigError('providers maps an op to a provider, for example {"paged_attention": "cpu"}.')
        length = self.max_model_len
        ok = length is None or (is_int(length) and length >= 1)
        require(
            ok, ConfigError, f"max_model_len={length!r}: use a whole number of tokens, at least 1, or None."
        )
        rows = self.prompt_embeds
        ok = is_int(rows) and 0 <= rows <= MOST_PROMPT_EMBEDS
        require(
            ok, ConfigError, f"prompt_embeds={rows!r}: use a whole number from 0 to {MOST_PROMPT_EMBEDS}."
        )
        for name in ("lock", "locked"):
            path = getattr(self, name)
            ok = path is None or isinstance(path, (str, os.PathLike))
            require(ok, ConfigError, f"{name}={path!r}: use the path of a plan lock, or None.")
        self._check_plan_options()
        if isinstance(self.device, torch.device):
            object.__setattr__(self, "device", str(self.device))
        device_ok = isinstance(self.device, str) and re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device)
        require(device_ok, ConfigError, f'device={self.device!r}: use "auto", "cpu", "cuda" or "cuda:N".')

    def _check_activation_options(self) -> None:
        wanted, known = self.activation_quantization, ", ".join(ACTIVATION_QUANTIZATIONS)
        ok = wanted is None or wanted in ACTIVATION_QUANTIZATIONS
        require(ok, ConfigError, f"activation_quantization={wanted!r}: use one of {known}, or None.")
        ok = wanted is None or (self.quantization or "").startswith("fp8")
        remedy = 'quantization="fp8", for example'
        require(ok, ConfigError, f"activation_quantization needs weights in fp8, too: {remedy}.")
        scales = self.activation_scales
        ok = scales is None or (wanted == "fp8_per_tensor" and isinstance(scales, (str, os.PathLike)))
        require(
            ok,
            ConfigError,
            'activation_scales: use the path of a safetensors file, with activation_quantization="fp8_per_tensor".',
        )

    def _check_passes(self) -> None:
        example = 'passes={"fused": [fuse_squared_relu]}'
        require(
            isinstance(self.passes, dict),
            ConfigError,
            f"passes maps a graph to its passes: {example}, for example.",
        )
        own = {}
        for level, passes in self.passes.items():
            known = ", ".join(PASS_LEVELS)
            require(
                level in PASS_LEVELS, ConfigError, f"passes: there is no {level!r} graph; use one of {known}."
            )
            own[level] = (passes,) if callable(passes) else passes
            ok = isinstance(own[level], (list, tuple)) and all(map(callable, own[level]))
            require(ok, ConfigError, f"passes[{level!r}]: use a list of functions, {example}, for example.")
            own[level] = tuple(own[level])
        object.__setattr__(self, "passes", own)
        names = self.tokenwise_ops
        names = (names,) if isinstance(names, str) else names
        ok = isinstance(names, (list, tuple, set, frozenset)) and all(isinstance(n, str) for n in names)
        ok = ok and all(re.fullmatch(r"\w+::\w+(\.\w+)?", n) for n in names)
        require(ok, ConfigError, f'tokenwise_ops={self.tokenwise_ops!r}: use names like "mylib::fancy_norm".')
        object.__setattr__(self, "tokenwise_ops", tuple(names))

    def _check_plan_options(self) -> None:
        """What the planner would refuse after minutes of capturing; what depends on the model is checked there."""
        # Imported where it is needed: this file is a leaf, which all rooms import.
        if self.block_size is not None:
            from pagebinder.runtime.kv.constraints import check_block_size

            check_block_size(self.block_size)
        if self.workload is not None:
            from pagebinder.runtime.kv.workload import UNLIMITED_TOKENS, Workload

            Workload.of(self.workload, self.max_model_len or UNLIMITED_TOKENS)


@strict(ConfigError)
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Memory and limits of one engine.

    Args:
        kv_cache_bytes: bytes of KV cache; or num_kv_blocks, the number of blocks (block 0 is the null block).
            With neither, as much as max_num_seqs requests of the model's length need, at most 1 GiB.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: token budget of one step; longer prompts are computed in chunks.
            An encoder prompt counts as its request is admitted; it is computed at once, so one in a step may go
            beyond the budget.
        max_encoder_tokens: longest encoder prompt of an encoder-decoder; None = the model's limit.
        prefix_caching: reuse the blocks of equal prompt prefixes, and of equal encoder prompts.
        scheduling_policy: "fcfs" or "priority" (smaller number first).
        long_prefill_token_threshold: largest chunk of one prompt while others wait; 0 = no limit.
        mixed_prefill_tokens: most prompt tokens of a step in which other requests decode, 0 = no limit but the
            budget. A small number keeps the time between tokens short and lets decodes go along in more steps; None =
            1024 on a CPU, where a step's time grows with its tokens, no limit on a GPU.
        prefix_retention: resume points that layers with windows or recurrent state keep for later prompts:
            "dense" (every block), "sparse" (ends of prompts and places where prompts parted) or a number of
            tokens (sparse, and one every so many tokens). Full attention keeps everything.
        swap_bytes: host memory for the state of preempted requests; 0 = they are always recomputed.
        swap_policy: "auto" (swap when cheaper by measured rates), "always", "never".
        seed: base of the random streams of requests that bring no seed.
        cascade: of models compiled with cascade=True: "auto" (read a shared prefix once where that is faster, by
            rates that are measured when the engine starts), "on" (wherever requests share a block), "off".
        async_stepping: prepare and launch the next step while one runs: "auto" (on a GPU), "on" (on a CPU, too, where
            steps run as they are launched: the same tokens, no gain), "off". Requests whose next step needs more than
            the id of their token (stop strings, log-probabilities, penalties, n > 1, beams) make steps wait;
            `stats()` counts them.
        check_integrity: check the books of the KV cache after every step (for tests and debugging; O(blocks)).
        capture: run steps from captured graphs, padded to a set of sizes: "auto" (on a GPU), "on" (on a CPU, too,
            where recorded calls stand for CUDA graphs: the same tokens, no gain), "off". Steps of other sizes run
            uncaptured; `stats()` counts them.
        capture_decode_sizes: numbers of requests to capture steps of one token each for; None: up to max_num_seqs.
        capture_token_sizes: numbers of tokens to capture other steps for; None: 16 to 512, (): none.
        drafter: what guesses tokens that a step then checks, several at once; the tokens that come out stay the same.
            "ngram" (what followed the last tokens when they came before), "guide" (only what a request's guide
            forces, as the keys of a JSON object; the others guess that, too), an object with `propose` and `forget`
            (`runtime/speculation/drafter.py`; ModelDrafter is one), or None.
        max_draft_tokens: most tokens that are guessed for a request in a step; how many is settled by what stood.
        draft_budget: tokens of a step up to which guesses are added, so none where as many requests decode; None: 8
            on a CPU, 64 on a GPU.
    """

    kv_cache_bytes: int | None = None
    num_kv_blocks: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_encoder_tokens: int | None = None
    prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    mixed_prefill_tokens: int | None = None
    prefix_retention: str | int = "sparse"
    swap_bytes: int = 0
    swap_policy: str = "auto"
    seed: int = 0
    cascade: str = "auto"
    async_stepping: str = "auto"
    check_integrity: bool = False
    capture: str = "auto"
    capture_decode_sizes: tuple[int, ...] | None = None
    capture_token_sizes: tuple[int, ...] | None = None
    drafter: Any = None
    max_draft_tokens: int = 7
    draft_budget: int | None = None

    def __post_init__(self):
        if self.kv_cache_bytes is not None and self.num_kv_blocks is not None:
            raise ConfigError("Give kv_cache_bytes or num_kv_blocks, not both.")
        for name in ("kv_cache_bytes", "num_kv_blocks", "max_encoder_tokens"):
            value = getattr(self, name)
            ok = value is None or (is_int(value) and value >= 1)
            require(ok, ConfigError, f"{name}={value!r}: use a whole number, at least 1, or None.")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            require(is_int(value) and value >= 1, ConfigError, f"{name}={value!r}: use at least 1.")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ConfigError(f'scheduling_policy={self.scheduling_policy!r}: use "fcfs" or "priority".')
        require(
            self.prefix_retention in ("dense", "sparse")
            or (is_int(self.prefix_retention) and self.prefix_retention >= 1),
            ConfigError,
            f'prefix_retention={self.prefix_retention!r}: use "dense", "sparse" or a number of tokens.',
        )
        require(
            is_int(self.swap_bytes) and self.swap_bytes >= 0,
            ConfigError,
            f"swap_bytes={self.swap_bytes!r}: use a whole number of bytes, 0 for no swap space.",
        )
        require(
            self.swap_policy in ("auto", "always", "never"),
            ConfigError,
            f'swap_policy={self.swap_policy!r}: use "auto", "always" or "never".',
        )
        require(
            self.swap_policy != "always" or self.swap_bytes > 0,
            ConfigError,
            'swap_policy="always" needs swap space: give swap_bytes.',
        )
        require(is_int(self.seed), ConfigError, f"seed={self.seed!r}: use a whole number.")
        ok = isinstance(self.cascade, str) and self.cascade in ("auto", "on", "off")
        require(ok, ConfigError, f'cascade={self.cascade!r}: use "auto", "on" or "off".')
        ok = isinstance(self.async_stepping, str) and self.async_stepping in ("auto", "on", "off")
        require(ok, ConfigError, f'async_stepping={self.async_stepping!r}: use "auto", "on" or "off".')
        for name in ("prefix_caching", "check_integrity"):
            value = getattr(self, name)
            require(isinstance(value, bool), ConfigError, f"{name}={value!r}: use True or False.")
        self._check_capture()
        self._check_drafter()
        mixed = self.mixed_prefill_tokens
        require(
            mixed is None or (is_int(mixed) and mixed >= 0),
            ConfigError,
            f"mixed_prefill_tokens={mixed!r}: use 0 or more, or None.",
        )
        threshold = self.long_prefill_token_threshold
        require(
            is_int(threshold) and threshold >= 0, ConfigError, "long_prefill_token_threshold: use 0 or more."
        )

    def _check_drafter(self) -> None:
        has_methods = all(callable(getattr(self.drafter, name, None)) for name in ("propose", "forget"))
        is_drafter = has_methods and not isinstance(self.drafter, type)
        ok = self.drafter in (None, *DRAFTERS) if isinstance(self.drafter, (str, type(None))) else is_drafter
        known = ", ".join(f'"{name}"' for name in DRAFTERS)
        given = repr(self.drafter) if isinstance(self.drafter, (str, type)) else type(self.drafter).__name__
        hint = ", as ModelDrafter(compiled) is" if hasattr(self.drafter, "engine") else ""
        require(
            ok,
            ConfigError,
            f"drafter={given}: use {known}, an object with propose and forget{hint}, or None.",
        )
        most, budget = self.max_draft_tokens, self.draft_budget
        require(is_int(most) and most >= 1, ConfigError, f"max_draft_tokens={most!r}: use at least 1.")
        ok = budget is None or (is_int(budget) and budget >= 2)
        require(ok, ConfigError, f"draft_budget={budget!r}: use at least 2 tokens, or None.")

    def _check_capture(self) -> None:
        ok = isinstance(self.capture, str) and self.capture in ("auto", "on", "off")
        require(ok, ConfigError, f'capture={self.capture!r}: use "auto", "on" or "off".')
        for name, most in (("decode", "max_num_seqs"), ("token", "max_num_batched_tokens")):
            option, limit = f"capture_{name}_sizes", getattr(self, most)
            sizes = getattr(self, option)
            if sizes is None:
                continue
            ok = isinstance(sizes, (list, tuple)) and all(is_int(n) and 1 <= n <= limit for n in sizes)
            require(
                ok, ConfigError, f"{option}={sizes!r}: use whole numbers from 1 to {most}={limit}, or None."
            )
            object.__setattr__(self, option, tuple(sizes))
