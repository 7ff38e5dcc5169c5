"""`CompiledEncoder`: the graph levels of an encoder, its report and executable, and what they are for: embeddings.

texts -> ids -> | a a a a a b b c c c | -> packed graph -> rows -> list of [tokens, C]      encode_batch
                  one call, no padding                     pool -> [texts, C]               embed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch.fx import GraphModule

from pagebinder.config import CompileConfig, EngineConfig
from pagebinder.config_checks import check_unicode, short_repr
from pagebinder.errors import CaptureError, ConfigError, RequestError
from pagebinder.explain import explain_text
from pagebinder.forks import NotPickled
from pagebinder.frontend.numbering import Numbering
from pagebinder.frontend.sentence_dir import POOLINGS, SentenceRecipe
from pagebinder.frontend.source import ModelSource
from pagebinder.report import CompileReport
from pagebinder.runtime.encoder_batches import EncoderBatch, batches
from pagebinder.runtime.executables import EagerExecutable, Executable
from pagebinder.runtime.pooling import pool
from pagebinder.runtime.saved_tokenizer import SavedTokenizer

LEVELS = ("captured", "semantic", "packed")
DEFAULT_BATCHED_TOKENS = 2048


@dataclass(kw_only=True)
class CompiledEncoder(NotPickled):
    """A compiled encoder. `graphs` holds its levels: "captured" and "semantic" take one sequence, "packed" many.

    `max_tokens` is the longest sequence, special tokens included. Results are float tensors on the model's device;
    they come in the order of the inputs. `has_head`: its rows are logits, not hidden states.
    """

    source: ModelSource
    config: CompileConfig
    graphs: dict[str, GraphModule]
    states: tuple
    report: CompileReport
    device: torch.device
    max_tokens: int
    numbering: Numbering
    recipe: SentenceRecipe | None
    has_head: bool
    executable: Executable | None
    _refused: str | None = None

    def __repr__(self) -> str:
        return f"CompiledEncoder({self.report.headline})"

    def explain(self) -> str:
        """What was matched and refused, providers and times, as text."""
        return explain_text(self.report)

    def engine(self, config: EngineConfig | None = None):
        """Raises ConfigError: an encoder generates nothing."""
        raise ConfigError(
            f"{self.report.model_class} is an encoder and generates nothing: use encode_batch() or embed()."
        )

    def save(self, path: str | Path, *, executable: str | None = None) -> None:
        """Write all of this to a directory, for `pagebinder.load`: weights by reference, machine code, no pickle.

        Args:
            path: a directory that is new, empty, or an artefact, which is then replaced.
            executable: None; an encoder is not compiled for programs without Python.
        Raises:
            ArtefactError, ConfigError: see their messages. OSError: the files cannot be written.
        """
        from pagebinder.artefacts.save import save

        save(self, path, executable=executable)

    def executables(self) -> dict[str, Executable]:
        """What runs the graphs, by level."""
        return {} if self.executable is None else {"packed": self.executable}

    def export_onnx(self, path: str | Path, *, contrib: bool = False) -> list[Path]:
        """Write the semantic graph as a standard ONNX model (opset 24), with weights and tokenizer beside it; returns
        its path.

        Its inputs are input_ids and attention_mask [b, L]; its output is one row for each token.

        Raises:
            ExportError: ONNX has no counterpart of an operator, which is named; `contrib`, which is of decoders; the
                directory cannot be made.
            ConfigError: packages of the extra `onnx` are missing, or the model was compiled with options that
                cannot be exported.
            OSError: the files cannot be written.
        """
        from pagebinder.artefacts.save import save_tokenizer_files
        from pagebinder.export.onnx import export_onnx

        paths = export_onnx(self, path, contrib=contrib)
        save_tokenizer_files(self.source, paths[0].parent)
        return paths

    def run_level(self, level: str, input_ids: torch.Tensor) -> torch.Tensor:
        """Run one graph on one sequence, op by op: input_ids [T] int64 -> [T, C].

        Raises:
            ConfigError: `level` is none of "captured", "semantic", "packed". RequestError: bad token ids.
        """
        if level not in LEVELS:
            raise ConfigError(f"level={level!r}: use one of {', '.join(LEVELS)}.")
        if not (
            isinstance(input_ids, torch.Tensor) and input_ids.dtype == torch.int64 and input_ids.dim() == 1
        ):
            raise RequestError("run_level takes the token ids of one sequence as an int64 tensor [T].")
        ids = self._token_ids(input_ids.tolist(), 0, truncate=False)
        (batch,) = batches([ids], len(ids), self.device)
        return EagerExecutable(self.graphs[level]).run(batch.inputs)[: len(ids)]

    def encode_batch(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
        truncate: bool = False,
    ) -> list[torch.Tensor]:
        """One row for each token of each input: hidden states [T, C], or logits [T, V] of a model with a head.

        Args:
            inputs: texts (special tokens are added) or token ids (taken as they are).
            max_num_batched_tokens: most tokens of one call of the graph, which bounds the memory; an input that is
                longer is a call of its own.
            truncate: cut inputs at `max_tokens` (texts keep their special tokens); else they are an error.
        Raises:
            RequestError: no inputs, an empty one, one that is too long or no Unicode, a token id outside the
                vocabulary; its message names the input. ConfigError: texts without a tokenizer.
        """
        results: list[torch.Tensor] = []
        for batch, rows in self._run(inputs, max_num_batched_tokens, truncate):
            results += rows[: int(batch.lengths.sum())].split(batch.lengths.tolist())
        return results

    def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        pooling: str = "auto",
        normalize: bool | None = None,
        max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
        truncate: bool = False,
    ) -> torch.Tensor:
        """One vector for each input: [inputs, C] float32.

        Args:
            pooling: "mean", "max", "cls" (first token), "lasttoken", or "auto": what the checkpoint directory says
                that sentence-transformers wrote.
            normalize: to length 1; None: as that directory says, else no.
            others: as `encode_batch`, which also says what is raised.
        Raises:
            ConfigError: an unknown pooling, or "auto" without a directory that says it; `normalize` is no bool; a
                model with a head.
        """
        how = self.pooling(pooling)
        if not isinstance(normalize, (bool, NoneType)):
            raise ConfigError(f"normalize is True, False or None, not {short_repr(normalize)}.")
        if normalize is None:
            normalize = self.recipe is not None and self.recipe.normalize
        vectors = [
            pool(
                rows[: int(batch.lengths.sum())],
                batch.starts.to(rows.device),
                batch.lengths.to(rows.device),
                how,
            )
            for batch, rows in self._run(inputs, max_num_batched_tokens, truncate)
        ]
        result = torch.cat(vectors)
        return torch.nn.functional.normalize(result, dim=-1) if normalize else result

    def _run(
        self, inputs, max_num_batched_tokens: int, truncate: bool
    ) -> Iterator[tuple[EncoderBatch, torch.Tensor]]:
        """The batches of a call, each with its rows."""
        if self._refused:
            raise CaptureError(
                f"This model was compiled with strict=False and cannot be run: {self._refused}"
            )
        if self.executable is None:
            raise ConfigError(
                "This model was compiled for explain() only (meta device): it has no weights to run."
            )
        if not (isinstance(max_num_batched_tokens, int) and max_num_batched_tokens >= 1):
            raise ConfigError(
                f"max_num_batched_tokens={max_num_batched_tokens!r}: use a whole number, at least 1."
            )
        sequences = self.token_ids(inputs, truncate=truncate)
        for batch in batches(sequences, max_num_batched_tokens, self.device):
            yield batch, self.executable.run(batch.inputs)

    def pooling(self, pooling: str = "auto") -> str:
        """How `embed` pools rows that was told `pooling`. Raises ConfigError: it cannot."""
        if self.has_head:
            raise ConfigError(
                f"{self.report.model_class} returns logits, not hidden states: compile its base model (AutoModel) "
                "for embeddings."
            )
        if pooling in POOLINGS:
            return pooling
        if pooling != "auto":
            raise ConfigError(f"pooling={pooling!r}: use auto, {', '.join(POOLINGS)}.")
        if self.recipe is None or self.recipe.problem:
            why = "it is no sentence-transformers directory" if self.recipe is None else self.recipe.problem
            raise ConfigError(
                f"The pooling of {self.source.name} is not known ({why}): say pooling= one of {', '.join(POOLINGS)}."
            )
        return self.recipe.pooling

    def token_ids(
        self, inputs: Sequence[str | Sequence[int]], *, truncate: bool = False
    ) -> list[Sequence[int]]:
        """What the model computes for each input: of a text with special tokens. Raises as `encode_batch`."""
        if isinstance(inputs, (str, bytes)) or not isinstance(inputs, Sequence):
            raise RequestError("Give a list of texts or of token ids; one text is a list of one.")
        if not inputs:
            raise RequestError("The list of inputs is empty: give at least one text.")
        texts = {i: text for i, text in enumerate(inputs) if isinstance(text, str)}
        for i, text in texts.items():
            check_unicode(text, f"input {i}")
        of_text = dict(zip(texts, self._tokenize(list(texts.values()), truncate))) if texts else {}
        return [self._token_ids(of_text.get(i, ids), i, truncate) for i, ids in enumerate(inputs)]

    def _tokenize(self, texts: list[str], truncate: bool) -> list[list[int]]:
        tokenizer = self.source.tokenizer()
        if tokenizer is None:
            raise ConfigError(f"{self.source.name} has no tokenizer: give token ids instead of texts.")
        if self.recipe is not None and self.recipe.lower_case:
            texts = [text.lower() for text in texts]
        if isinstance(tokenizer, SavedTokenizer):
            return tokenizer.encode_batch(texts, self.max_tokens if truncate else None)
        limits: dict[str, Any] = {"max_length": self.max_tokens} if truncate else {}
        encoded = tokenizer(
            texts,
            truncation=truncate,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            **limits,
        )
        return encoded["input_ids"]

    def _token_ids(self, ids: Any, index: int, truncate: bool) -> Sequence[int]:
        """One input, checked. Raises RequestError."""
        if isinstance(ids, torch.Tensor):
            ids = ids.tolist()
        if not isinstance(ids, (list, tuple)) or not all(type(t) is int for t in ids):
            raise RequestError(f"Input {index} is neither a text nor a list of token ids.")
        if not ids:
            raise RequestError(f"Input {index} is empty: give at least one token.")
        if len(ids) > self.max_tokens:
            if not truncate:
                raise RequestError(
                    f"Input {index} has {len(ids)} tokens; this model takes {self.max_tokens} at most. "
                    "Shorten it, or say truncate=True."
                )
            ids = ids[: self.max_tokens]
        if not 0 <= min(ids) <= max(ids) < self.source.vocab_size:
            raise RequestError(
                f"Input {index} has a token id outside the vocabulary of {self.source.vocab_size}."
            )
        if self.numbering.uncounted_id in ids:
            raise RequestError(
                f"Input {index} contains the padding token {self.numbering.uncounted_id}, which this model leaves "
                "out when it counts positions: inputs need no padding here, remove it."
            )
        return ids
