"""`CompiledModel`: the four graph levels of a model, its cache plan, report and executable.

What serving does not need is imported where it is used: a saved model should start fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.fx import GraphModule

from pagebinder.config import CompileConfig, EngineConfig
from pagebinder.errors import CaptureError, ConfigError
from pagebinder.frontend.source import ModelSource
from pagebinder.report import CompileReport
from pagebinder.runtime.engine import Engine, EngineModel
from pagebinder.runtime.engine_setup import EncoderModel
from pagebinder.runtime.executables import EagerExecutable, Executable
from pagebinder.runtime.kv import KVPlan
from pagebinder.runtime.single_sequence import single_sequence_inputs

LEVELS = ("captured", "semantic", "paged", "fused")


@dataclass(kw_only=True)
class CompiledModel:
    """A compiled decoder. `graphs` holds the four levels, each a runnable GraphModule; `kv_spec` the cache plan.

    Of an encoder-decoder they are the levels of its decoder, and `graphs["encoder"]` is its encoder, which
    `encoder_executable` runs. `uncounted_id`: the padding token of a model that leaves it out of the positions.
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
    _refused: str | None = field(default=None, repr=False)

    def explain(self) -> str:
        """What was matched and refused, the KV plan, providers and times, as text."""
        from pagebinder.explain import explain_text

        return explain_text(self.report)

    def write_lock(self, path) -> None:
        """Write the plan lock: a TOML file of what every layer was rewritten into. Raises OSError."""
        from pagebinder.compile_lock import lock_of
        from pagebinder.passes.lock_file import write_plan_lock

        write_plan_lock(lock_of(self.source, self.config, self.kv_spec, self.report, self.graphs), path)

    def save(self, path: str | Path) -> None:
        """Write all of this to a directory, for `pagebinder.load`: weights by reference, machine code, no pickle.

        Args:
            path: a directory that is new, empty, or an artefact, which is then replaced.
        Raises:
            ArtefactError: see its message. OSError: the files cannot be written.
        """
        from pagebinder.compiled_save import save

        save(self, path)

    def export_onnx(self, path: str | Path) -> list[Path]:
        """Write the semantic graph as a standard ONNX model (opset 24) with its weights beside it; returns its path.

        Inputs and outputs: `pagebinder/export/onnx_module.py`. An encoder-decoder gives two, its decoder first.

        Raises:
            ExportError: ONNX has no counterpart of an operator, which is named. ConfigError: packages of the extra
                `onnx` are missing, or the model was compiled with options that cannot be exported.
            OSError: the files cannot be written.
        """
        from pagebinder.export.onnx import export_onnx

        return export_onnx(self, path)

    def executables(self) -> dict[str, Executable]:
        """What runs the graphs, by level: the fused one, and an encoder-decoder's encoder."""
        found = {"fused": self.executable, "encoder": self.encoder_executable}
        return {level: executable for level, executable in found.items() if executable is not None}

    def engine(self, config: EngineConfig | None = None) -> Engine:
        """A continuous-batching engine with its own KV cache. Engines share the weights and the executable."""
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(f"engine() takes an EngineConfig, not {type(config).__name__}.")
        if self._refused:
            raise CaptureError(
                f"This model was compiled with strict=False and cannot be served: {self._refused}"
            )
        if self.executable is None:
            raise ConfigError(
                "This model was compiled for explain() only (meta device): it has no weights to run."
            )
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
        )
        return Engine(model, config)

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
        with torch.inference_mode():
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
        with torch.inference_mode():
            return self.graphs["encoder"](encoder_input_ids, positions)

    @staticmethod
    def _check_ids(what: str, ids: torch.Tensor, max_len: int, vocab_size: int) -> None:
        if not (isinstance(ids, torch.Tensor) and ids.dtype == torch.int64 and ids.dim() == 1):
            raise ConfigError(f"{what} takes the token ids of one sequence as an int64 tensor [T].")
        if not 1 <= len(ids) <= max_len:
            raise ConfigError(f"{what} takes 1 to {max_len} tokens, not {len(ids)}.")
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise ConfigError(f"A token id is outside the vocabulary of {vocab_size}.")
