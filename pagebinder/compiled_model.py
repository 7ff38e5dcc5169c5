"""`CompiledModel`: the four graph levels of a model, its cache plan, report and executable.

What serving does not need is imported where it is used: a saved model should start fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from pagebinder.ambient import inference
from pagebinder.config import CompileConfig, EngineConfig
from pagebinder.config_checks import is_int, plain_number
from pagebinder.errors import CaptureError, ConfigError, RequestError
from pagebinder.forks import NotPickled, use_threads
from pagebinder.frontend.source import ModelSource
from pagebinder.report import CompileReport
from pagebinder.runtime.engine import Engine, EngineModel
from pagebinder.runtime.engine_setup import EncoderModel
from pagebinder.runtime.executables import EagerExecutable, Executable
from pagebinder.runtime.kv import KVPlan
from pagebinder.runtime.prompt_rows import PromptRows
from pagebinder.runtime.single_sequence import single_sequence_inputs
from pagebinder.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagebinder.runtime.graphs import StepGraphs
    from pagebinder.runtime.streams import Overlap

LEVELS = ("captured", "semantic", "paged", "fused")


@dataclass(kw_only=True)
class CompiledModel(NotPickled):
    """A compiled decoder. `graphs` holds the four levels, each a runnable GraphModule; `kv_spec` the cache plan.

    Of an encoder-decoder they are the levels of its decoder, and `graphs["encoder"]` is its encoder, which
    `encoder_executable` runs. `uncounted_id`: the padding token of a model that leaves it out of the positions.
    `prompt_rows`: where embeddings of prompts are held (`CompileConfig(prompt_embeds=...)`), for all engines of this
    model; a serving loop of one's own asks it for token ids. None: the model was not compiled for them.
    """

    source: ModelSource
    config: CompileConfig
    graphs: Mapping[str, GraphModule]
    kv_spec: KVPlan
    states: tuple
    report: CompileReport
    device: torch.device
    max_model_len: int
    executable: Executable | None
    encoder_executable: Executable | None = None
    uncounted_id: int | None = None
    prompt_rows: PromptRows | None = None
    _refused: str | None = None

    def __repr__(self) -> str:
        return f"CompiledModel({self.report.headline})"

    def explain(self) -> str:
        """What was matched and refused, the KV plan, providers and times, as text."""
        from pagebinder.explain import explain_text

        self.predict_captured_steps()
        self.predict_streams()
        return explain_text(self.report)

    def predict_captured_steps(self) -> None:
        """Fill in `report.captured_steps`: sizes, cuts and memory of the steps that an engine captures by default."""
        from pagebinder.runtime.engine_graphs import bucket_table
        from pagebinder.runtime.graphs.describe import describe_prediction

        if not self.report.captured_steps:
            self.report.captured_steps = describe_prediction(
                self.graphs["fused"], self.kv_spec, self.states, bucket_table(EngineConfig()), device=self.device,
                max_model_len=self.max_model_len, not_captured=self._not_captured(), overlap=self._overlap(),
                compiled_by=self._compiles_pieces(),
            )  # fmt: skip

    def _overlap(self) -> Overlap | None:
        """How the fused graph uses two streams, or would if it ran."""
        if self.executable is not None:
            return getattr(self.executable, "overlap", None)
        from pagebinder.compiler.streams import overlap_of

        return overlap_of(self.graphs["fused"], self.config, self.report)

    def _compiles_pieces(self) -> str | None:
        """What compiles the pieces of cut steps; None: they run op by op."""
        pieces = getattr(self.executable, "pieces", None)
        return None if pieces is None or pieces.problem(self.device) is not None else pieces.name

    def predict_streams(self) -> None:
        """Fill in `report.streams`: which ops run side by side, the estimated gain, or why none do."""
        from pagebinder.compiler.streams import note_streams

        note_streams(self.graphs["fused"], self.config, self.report)

    def write_lock(self, path) -> None:
        """Write the plan lock: a TOML file of what every layer was rewritten into. Raises OSError."""
        from pagebinder.compiler.lock import lock_of
        from pagebinder.passes.lock_file import write_plan_lock

        write_plan_lock(lock_of(self.source, self.config, self.kv_spec, self.report, self.graphs), path)

    def save(self, path: str | Path, *, executable: str | None = None) -> None:
        """Write all of this to a directory, for `pagebinder.load`: weights by reference, machine code, no pickle.

        Args:
            path: a directory that is new, empty, or an artefact, which is then replaced.
            executable: "aot" compiles the graphs into libraries that programs without Python can run, and writes
                a plan of their steps (`artefacts/aot.py`); None keeps what runs them here.
        Raises:
            ArtefactError, ConfigError: see their messages. OSError: the files cannot be written.
        """
        from pagebinder.artefacts.save import save

        save(self, path, executable=executable)

    def export_onnx(self, path: str | Path, *, contrib: bool = False) -> list[Path]:
        """Write the semantic graph as a standard ONNX model (opset 24), with weights and tokenizer beside it; returns
        its path.

        Inputs and outputs: `pagebinder/export/onnx_signature.py`. An encoder-decoder gives two, its decoder first.
        contrib: attention as ONNX Runtime's GroupQueryAttention instead, which no other runtime reads.

        Raises:
            ExportError: ONNX (with contrib: ONNX Runtime) has no counterpart of an operator, which is named;
                the directory cannot be made.
            ConfigError: packages of the extra `onnx` are missing, or the model was compiled with options that
                cannot be exported.
            OSError: the files cannot be written.
        """
        from pagebinder.artefacts.save import save_tokenizer_files
        from pagebinder.export.onnx import export_onnx

        paths = export_onnx(self, path, contrib=contrib)
        save_tokenizer_files(self.source, paths[0].parent)
        return paths

    def executables(self) -> dict[str, Executable]:
        """What runs the graphs, by level: the fused one, and an encoder-decoder's encoder."""
        found = {"fused": self.executable, "encoder": self.encoder_executable}
        return {level: executable for level, executable in found.items() if executable is not None}

    def engine(self, config: EngineConfig | None = None) -> Engine:
        """A continuous-batching engine with its own KV cache. Engines share the weights and the executable.

        Raises ConfigError for bad options, ForkedProcessError where it would hang in a process made by fork().
        """
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(f"engine() takes an EngineConfig, not {type(config).__name__}.")
        self._check_runs()
        use_threads("a new engine")
        model = EngineModel(
            executable=self.executable,
            kv_plan=self.kv_spec,
            states=self.states,
            device=self.device,
            vocab_size=self.source.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.source.eos_token_ids,
            tokenizer=self.source.tokenizer(),
            encoder=self._encoder_model(),
            uncounted_id=self.uncounted_id,
            prompt_rows=self.prompt_rows,
            make_graph=lambda: self.graphs["fused"],
            not_captured=self._not_captured(),
            must_capture=self.config.executable == "cuda_graph",
            cascades=bool(self.config.cascade),
        )
        return Engine(model, config)

    def sampling_params(self, **options: Any) -> SamplingParams:
        """`SamplingParams(**options)`, but with what the model's makers said (generation_config.json, a GGUF file) in
        place of the plain defaults.

        Raises RequestError: an unknown option, or a value out of its range.
        """
        return SamplingParams(**{**self.source.sampling_defaults, **options})

    def capture(
        self, *, num_kv_blocks: int, max_num_seqs: int = 8, max_num_batched_tokens: int = 512,
        max_model_len: int | None = None, decode_sizes: Sequence[int] | None = None,
        token_sizes: Sequence[int] | None = None,
    ) -> StepGraphs:  # fmt: skip
        """Captured steps for a serving loop of your own, without our engine: CUDA graphs on a GPU, recorded calls on
        a CPU. `examples/own_loop.py` is such a loop.

        Args:
            num_kv_blocks: blocks of the KV cache, the first dim of all `graphs.caches`. Block 0 is the null block,
                the others are yours: one pool of ids for all KV groups (docs/own_loop.md).
            max_num_seqs: most sequences of a captured step. max_num_batched_tokens: most tokens of one. Larger steps
                run uncaptured and are counted (`graphs.stats`).
            max_model_len: longest sequence; None: the model's. Its blocks are the columns of the block tables.
            decode_sizes: numbers of sequences to capture steps of one token each for; None: up to max_num_seqs.
            token_sizes: numbers of tokens to capture other steps for; None: 16 to 512; (): none.
        Raises:
            ConfigError: sizes that contradict each other, or a model whose steps cannot be captured.
            GraphCaptureError, CacheCapacityError: see their messages.
        """
        from pagebinder.runtime.arena import KVArena
        from pagebinder.runtime.graphs import BucketTable, StepGraphs

        self._check_runs()
        length = self.max_model_len if max_model_len is None else max_model_len
        num_kv_blocks, max_num_seqs, max_num_batched_tokens, length = map(
            plain_number, (num_kv_blocks, max_num_seqs, max_num_batched_tokens, length)
        )
        for name, value in (
            ("num_kv_blocks", num_kv_blocks), ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
        ):  # fmt: skip
            least = 2 if name == "num_kv_blocks" else 1  # one is the null block
            if not is_int(value) or value < least:
                raise ConfigError(f"{name}={value!r}: use a whole number, at least {least}.")
        if (reason := self._not_captured()) is not None:
            raise ConfigError(f"Steps of this model cannot be captured: {reason}")
        if not is_int(length) or not 1 <= length <= self.max_model_len:
            raise ConfigError(f"max_model_len={max_model_len!r}: use 1 to {self.max_model_len}, or None.")
        buckets = BucketTable.of(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, decode_sizes=decode_sizes,
            token_sizes=token_sizes,
        )  # fmt: skip
        arena = KVArena(self.kv_spec, self.states, num_kv_blocks, self.device)
        return StepGraphs(
            self.executable, self.graphs["fused"], self.kv_spec, arena.caches, buckets, device=self.device,
            max_model_len=length, vocab_size=self.source.vocab_size,
            prompt_tables=None if self.prompt_rows is None else self.prompt_rows.tables,
            max_position=self.max_model_len if self.prompt_rows is None else None,
        )  # fmt: skip

    def media_prompt(self, inputs: Mapping[str, Any]) -> list:
        """A prompt, token ids and embeddings, of what a multimodal model's processor returns for one prompt with
        images, sound or video: `inputs = processor(text=..., images=..., return_tensors="pt")`.

        The source model's own code makes the embeddings, once, in PyTorch. Tokens that are generated go on from the
        largest position, as the model's forward counts (transformers' `generate` goes on from the last one along each
        axis where a prompt ends with an image). For engines of models compiled with
        `CompileConfig(prompt_embeds=...)`.

        Raises:
            RequestError: other inputs; a loaded artefact, which has no source model; the model tells its language
                model more of the media than can be served: says what.
        """
        from pagebinder.frontend.lookahead import layers_of
        from pagebinder.frontend.media_prompts import media_prompt

        if not self.source.is_transformers:
            raise RequestError(
                f"{self.report.model_class}: there is no transformers model here that could make embeddings of media "
                "(a loaded artefact has its graphs alone); make them elsewhere, and give them as tensors."
            )
        tables = None if self.prompt_rows is None else self.prompt_rows.tables
        return media_prompt(self.source.module, inputs, tables, layers_of(self.graphs["captured"]))

    def _check_runs(self) -> None:
        if self._refused:
            raise CaptureError(
                f"This model was compiled with strict=False and cannot be served: {self._refused}"
            )
        if self.executable is None:
            raise ConfigError(
                "This model was compiled for explain() only (meta device): it has no weights to run."
            )

    def _not_captured(self) -> str | None:
        """Why steps of this model cannot be padded and captured; None if they can."""
        if self.source.encoder is not None:
            return "encoder prompts have no fixed size."
        mixing = next((p.name for p in self.report.passes if p.mixes_tokens), None)
        if mixing is not None:
            return f"{mixing} finds scales over all tokens of a step, so padding would change them."
        if self.config.cascade:
            return "cascade=True: which requests share a prefix is found anew in every step."
        return None

    def _encoder_model(self) -> EncoderModel | None:
        if self.source.encoder is None:
            return None
        from pagebinder.frontend.encoder_decoder import states_of

        states = states_of(self.graphs["encoder"])
        return EncoderModel(
            executable=self.encoder_executable,
            width=int(states.shape[1]),
            dtype=states.dtype,
            vocab_size=self.source.encoder.vocab_size,
            max_len=self.source.encoder.max_len,
            decoder_start_token_id=self.source.encoder.decoder_start_token_id,
        )

    def run_level(
        self, level: str, input_ids: torch.Tensor, encoder_input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run one graph on one sequence: input_ids [T] int64 -> logits [T, V]. Paged levels get a scratch cache.

        An encoder-decoder takes its encoder's prompt as well: encoder_input_ids [E] int64.

        Raises:
            ConfigError: `level` is none of "captured", "semantic", "paged", "fused"; bad or missing token ids.
        """
        if level not in LEVELS:
            raise ConfigError(f"level={level!r}: use one of {', '.join(LEVELS)}.")
        self._check_ids("run_level", input_ids, self.max_model_len, self.source.vocab_size)
        if (encoder_input_ids is None) != (self.source.encoder is None):
            kind = "a decoder alone" if self.source.encoder is None else "an encoder-decoder"
            need = "takes no" if self.source.encoder is None else "needs its"
            raise ConfigError(f"{self.report.model_class} is {kind}: run_level {need} encoder_input_ids.")
        encoder_states = None if encoder_input_ids is None else self.encode(encoder_input_ids)
        gm = self.graphs[level]
        with inference():
            if level in ("captured", "semantic"):
                positions = torch.arange(len(input_ids), device=input_ids.device)
                return gm(input_ids, positions, *(() if encoder_states is None else (encoder_states,)))
            inputs = single_sequence_inputs(
                self.kv_spec, self.states, input_ids, encoder_states=encoder_states
            )
            return EagerExecutable(gm).run(inputs)

    def encode(self, encoder_input_ids: torch.Tensor) -> torch.Tensor:
        """Run the encoder of an encoder-decoder on one prompt: [E] int64 -> encoder states [E, C].

        Raises:
            ConfigError: the model has no encoder; bad token ids.
        """
        if self.source.encoder is None:
            raise ConfigError(f"{self.report.model_class} has no encoder.")
        facts = self.source.encoder
        self._check_ids("encode", encoder_input_ids, facts.max_len, facts.vocab_size)
        positions = torch.arange(len(encoder_input_ids), device=encoder_input_ids.device)
        with inference():
            return self.graphs["encoder"](encoder_input_ids, positions)

    @staticmethod
    def _check_ids(what: str, ids: torch.Tensor, max_len: int, vocab_size: int) -> None:
        if not (isinstance(ids, torch.Tensor) and ids.dtype == torch.int64 and ids.dim() == 1):
            raise ConfigError(f"{what} takes the token ids of one sequence as an int64 tensor [T].")
        if not 1 <= len(ids) <= max_len:
            raise ConfigError(f"{what} takes 1 to {max_len} tokens, not {len(ids)}.")
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise ConfigError(f"A token id is outside the vocabulary of {vocab_size}.")
