"""`compiled.export_onnx(dir)`: semantic graphs as standard ONNX models, weights beside them.

    DIR/model.onnx, model.onnx.data      a decoder, or an encoder alone
    DIR/encoder.onnx, encoder.onnx.data  of an encoder-decoder, beside its decoder in model.onnx

torch's exporter translates ATen; our ops reach it as calls of ONNX operators (onnx_ops.py). Weights are written
tensor by tensor from the memory that the compiled model holds. Inputs and outputs: onnx_signature.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.fx import GraphModule

from pagebinder.errors import CaptureError, ConfigError, ExportError, not_made
from pagebinder.export.onnx_contrib import check_contrib
from pagebinder.export.onnx_experts import definition
from pagebinder.export.onnx_functions import DOMAIN, definitions
from pagebinder.export.onnx_module import OnnxModule, check_translatable
from pagebinder.export.onnx_step import OPSET
from pagebinder.paths import user_path

NEEDED = ("onnx", "onnxscript")


def export_onnx(compiled, directory: str | Path, *, contrib: bool = False) -> list[Path]:
    """Write the ONNX models of a CompiledModel or CompiledEncoder into a directory; returns their paths.

    contrib: attention of decoders as ONNX Runtime's GroupQueryAttention (onnx_contrib.py), for ONNX Runtime alone.

    Raises:
        ConfigError: packages of the extra `onnx` are missing; the model has no weights, is not on a CPU, or was
            compiled with options that the semantic graph does not hold. CaptureError: compiled with strict=False, and
            not understood. ExportError: an operator has no counterpart (it is named), in the standard or, with
            contrib, in ONNX Runtime; what was written is not valid; the directory cannot be made.
        OSError: the files cannot be written.
    """
    _check(compiled)
    decoder = "packed" not in compiled.graphs
    parts = {"model": (compiled.graphs["semantic"], decoder)}
    if "encoder" in compiled.graphs:
        parts["encoder"] = (compiled.graphs["encoder"], False)
    for gm, _ in parts.values():
        check_translatable(gm)
    if contrib and not decoder:
        raise ExportError("An encoder has no cached attention, which is all that contrib=True replaces.")
    if contrib:
        check_contrib(compiled.graphs["semantic"])
    directory = user_path(directory, ExportError)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(not_made(directory, error)) from error
    return [
        write_onnx(gm, directory / f"{name}.onnx", cached=cached, contrib=contrib and cached)
        for name, (gm, cached) in parts.items()
    ]


def _check(compiled) -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"Exporting needs {' and '.join(missing)}: install the extra, pip install 'pagebinder[onnx]'."
        )
    if compiled._refused:
        raise CaptureError(
            f"This model was compiled with strict=False and cannot be exported: {compiled._refused}"
        )
    if compiled.executable is None:
        raise ConfigError(
            "This model was compiled for explain() only (meta device): it has no weights to export."
        )
    if compiled.device.type != "cpu":
        raise ConfigError('Weights are exported from CPU memory: compile with device="cpu".')
    if getattr(compiled, "prompt_rows", None) is not None:
        raise ConfigError("An ONNX export takes token ids alone: compile without prompt_embeds.")
    config = compiled.config
    if config.quantization is not None or {config.kv_dtype, config.index_dtype} != {"auto"}:
        raise ConfigError(
            "An ONNX export holds weights and caches in the model's own dtype: compile without quantization, "
            "kv_dtype and index_dtype."
        )


def write_onnx(gm: GraphModule, path: Path, *, cached: bool, contrib: bool = False) -> Path:
    """One graph as one model: a decoder with its caches as inputs and outputs (`cached`), or an encoder."""
    import onnx

    module = OnnxModule(gm, cached=cached, contrib=contrib).eval()
    program = _translate(
        module, module.signature.examples, module.signature.dynamic, module.signature.outputs
    )
    _finish(program.model, definitions(module.functions, _translated))
    with _put_together(path) as made:
        program.save(made, external_data=True)
        try:
            onnx.checker.check_model(made, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise ExportError(f"{path} would be no valid ONNX model: {error}") from error
    return path


@contextlib.contextmanager
def _put_together(path: Path) -> Iterator[Path]:
    """Where to write a file and what lies beside it; all go to the folder of `path` if the block ends well.

    Files that are there may be those that the weights are read from, so they stay until the end.
    Raises OSError, which names `path`.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as folder:
            yield Path(folder) / path.name
            for file in Path(folder).iterdir():
                os.replace(file, path.parent / file.name)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _translate(module: torch.nn.Module, examples: dict, dynamic: dict, outputs: list[str] | None = None):
    """torch's ONNXProgram of the module, as traced. By input name: an example, and its dynamic sizes."""
    with _quiet(), torch.no_grad():
        try:
            return torch.onnx.export(
                module,
                tuple(examples.values()),
                input_names=list(examples),
                output_names=outputs,
                dynamic_shapes=(tuple(dynamic.values()),),
                opset_version=OPSET,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            reason = error
            while reason.__cause__ is not None:
                reason = reason.__cause__
            raise ExportError(f"torch's ONNX exporter cannot write this graph: {reason}") from error


def _translated(module: torch.nn.Module, examples: dict, dynamic: dict):
    """The onnx_ir Model of the functions, optimised."""
    model = _translate(module, examples, dynamic).model
    _optimise(model)
    return model


@contextlib.contextmanager
def _quiet():
    """The exporter prints progress, and warns of optional packages and of what is not folded: nothing to act on."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


# Rules of onnxscript for what can occur in a decoder. All of its default ones take ten times as long: some are of
# convolutions, and one looks through the whole graph at every node.
REWRITE_RULES = (
    "add_0_rule", "sub_0_rule", "mul_by_1_rule", "div_by_1_rule", "cast_cast_rule", "no_op_cast_rule",
    "no_op_expand_rule", "no_op_transpose_rule", "transpose_transpose_rule", "reshape_reshape_rule",
    "squeeze_reshape_1d_rule", "unsqueeze_unsqueeze_rule", "materialize_reshape_shape_rule", "collapse_slice_rule",
    "collapse_slice2_rule", "cast_constant_of_shape_rule", "cast_constant_of_shape_without_value_rule",
)  # fmt: skip


def _optimise(model) -> None:
    """Constants folded, what nothing reads or what is there twice removed: passes of onnx_ir and onnxscript."""
    from onnx_ir.passes import Sequential, common
    from onnxscript.optimizer import fold_constants_ir
    from onnxscript.rewriter import RewritePass
    from onnxscript.rewriter.rules import common as rules

    rewrite = Sequential(
        RewritePass([getattr(rules, name) for name in REWRITE_RULES]),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
    )
    finish = Sequential(
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
        common.ClearMetadataAndDocStringPass(),
    )

    def should_fold(node):
        return False if node.op_type == "Transpose" else None

    with _quiet():
        common.InlinePass()(model)
        for _ in range(2):
            folded = fold_constants_ir(model, onnx_shape_inference=True, should_fold=should_fold).modified
            if not rewrite(model).modified and not folded:
                break
        finish(model)


def _finish(model, functions: list) -> None:
    """Weights as the source has them and under its names, definitions of the functions in use."""
    from onnx_ir import serde

    _optimise(model)
    for value in list(model.graph.initializers.values()):
        value.name = value.name.removeprefix("gm.")
    called = {node.op_type for node in model.graph if node.domain == DOMAIN}
    known = {function.name for function in functions}
    functions += [serde.deserialize_function(definition(name, OPSET)) for name in sorted(called - known)]
    for function in functions:
        model.functions[function.identifier()] = function
