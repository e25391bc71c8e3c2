"""A graph -> a compiled module and an archive of its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx

from sdkit_dispatch.contract import Progress, Report, Shapes, TensorSpec
from sdkit_dispatch.errors import CompileError, UnsupportedOpError
from sdkit_dispatch.graph.precision import is_half_graph, write_at_precision
from sdkit_dispatch.graph.static_shapes import free_inputs, make_static
from sdkit_dispatch.graph.tensor_sizes import tensor_bytes
from sdkit_dispatch.graph.tensors import numpy_dtype_name, static_spec
from sdkit_iree.build_memory import estimated_peak_bytes, machine_bytes
from sdkit_iree.engine_files import MODULE_FILE, WEIGHTS_FILE, write_note
from sdkit_iree.graph_file import OUTSIDE_ELEMENTS, prepare, without_operators, write_archive
from sdkit_iree.refusals import errors_in, missing_operators
from sdkit_iree.tools import Finished, compiler, importer, run_tool

logger = logging.getLogger(__name__)

_GRAPH_FILE, _CODE_FILE, _PHASES_FOLDER = "graph.onnx", "graph.mlir", "phases"
_SHARE_DONE = {
    "input": 0.02,
    "abi": 0.03,
    "preprocessing": 0.04,
    "global-optimization": 0.10,
    "dispatch-creation": 0.14,
    "flow": 0.16,
    "stream": 0.25,
    "executable-sources": 0.26,
    "executable-configurations": 0.28,
    "executable-targets": 0.73,
    "hal": 0.97,
    "vm": 1.0,
}
"""Phase of the compiler -> share of the time that has passed at its end, with the sample's VAE."""
_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """What is to be built.

    Attributes:
        who: The runtime, for messages: "iree 3.13.0".
        flags: Of the compiler, for the target.
        must_fit: Whether a build that needs more memory than there is is refused.
    """

    who: str
    component: str
    onnx: Path
    shapes: Shapes
    precision: Literal["fp32", "fp16"]
    flags: tuple[str, ...]
    must_fit: bool = True


def build_engine(blueprint: Blueprint, workshop: Path, out: Path, report: Report) -> None:
    """Builds an engine in `out`; files on the way go to the empty folder `workshop`.

    Raises:
        CompileError: In the compiler's own words.
        UnsupportedOpError: Names all operators that it does not have.
    """
    component = blueprint.component
    report(Progress(phase=f"read {component}"))
    model = make_static(blueprint.onnx, blueprint.shapes)
    _check_memory(blueprint, model)
    inputs = tuple(static_spec(value) for value in free_inputs(model.graph))
    model, folder = _at_precision(blueprint, model, workshop, report)
    try:
        prepared = prepare(model, folder)
    except UnsupportedOpError as error:
        raise _no_operators(blueprint, error.message) from error

    report(Progress(phase=f"write the weights of {component}"))
    write_archive(prepared, out / WEIGHTS_FILE)
    done = _compile(blueprint, prepared.graph, workshop, report)
    if done.code:
        raise _refusal(blueprint, prepared.graph, workshop, done, report)
    (workshop / MODULE_FILE).replace(out / MODULE_FILE)
    write_note(out, inputs=inputs, outputs=_outputs(prepared.graph))
    report(Progress(phase=f"compile {component}", fraction=1.0))


def _check_memory(blueprint: Blueprint, model: onnx.ModelProto) -> None:
    nodes = len(model.graph.node)
    weights_bytes = sum(tensor_bytes(tensor) for tensor in model.graph.initializer)
    peak = estimated_peak_bytes(nodes=nodes, weights_bytes=weights_bytes)
    have = machine_bytes()
    if have is None or peak <= have:
        return
    sentence = (
        f"compiling {blueprint.component} ({nodes} nodes, {weights_bytes / _GB:.1f} GB of weights) "
        f"takes about {peak / _GB:.1f} GB of memory, and there are {have / _GB:.1f}"
    )
    if blueprint.must_fit:
        raise CompileError(
            f"{blueprint.who}: {sentence}",
            hint="build on a machine with more memory, or set options.iree.force: true",
        )
    logger.warning("%s", sentence)


def _at_precision(
    blueprint: Blueprint, model: onnx.ModelProto, workshop: Path, report: Report
) -> tuple[onnx.ModelProto, Path]:
    """Returns the graph in the precision of the build, and the folder of its external files."""
    if blueprint.precision == ("fp16" if is_half_graph(model) else "fp32"):
        return model, blueprint.onnx.parent
    path = workshop / "typed.onnx"
    phase = f"write {blueprint.component} in {blueprint.precision}"
    write_at_precision(
        model,
        blueprint.onnx.parent,
        path,
        blueprint.precision,
        on_fraction=lambda share: report(Progress(phase=phase, fraction=share)),
    )
    return onnx.load(path, load_external_data=False), workshop


def _compile(
    blueprint: Blueprint, graph: onnx.ModelProto, workshop: Path, report: Report
) -> Finished:
    """Imports and compiles a graph; the module is left in the workshop."""
    phases = workshop / _PHASES_FOLDER
    done = _import(blueprint, graph, workshop, report)
    if done.code:
        return done

    def on_poll() -> None:
        names = {path.name.split(".")[2] for path in phases.glob("*.*.*.mlir")}
        share = max((_SHARE_DONE.get(name, 0.0) for name in names), default=0.0)
        report(Progress(phase=f"compile {blueprint.component}", fraction=share))

    flags = (*blueprint.flags, f"--dump-compilation-phases-to={_PHASES_FOLDER}")
    command = (*compiler(), _CODE_FILE, "--iree-input-type=onnx", *flags, "-o", MODULE_FILE)
    return run_tool(command, workshop, on_poll=on_poll)


def _import(
    blueprint: Blueprint, graph: onnx.ModelProto, workshop: Path, report: Report
) -> Finished:
    onnx.save(graph, workshop / _GRAPH_FILE)
    command = (
        *importer(),
        *(_GRAPH_FILE, "-o", _CODE_FILE),
        *("--externalize-params", "--no-save-params", "--large-model"),
        *("--num-elements-threshold", str(OUTSIDE_ELEMENTS)),
    )
    return run_tool(command, workshop, on_poll=_still(f"import {blueprint.component}", report))


def _still(phase: str, report: Report) -> Callable[[], None]:
    return lambda: report(Progress(phase=phase))


def _outputs(graph: onnx.ModelProto) -> tuple[TensorSpec, ...]:
    inferred = onnx.shape_inference.infer_shapes(graph, data_prop=True).graph
    return tuple(
        TensorSpec(
            name=value.name,
            dtype=numpy_dtype_name(value.type.tensor_type.elem_type),
            shape=tuple(
                dim.dim_value if dim.dim_value > 0 else -1
                for dim in value.type.tensor_type.shape.dim
            ),
        )
        for value in inferred.output
    )


def _refusal(
    blueprint: Blueprint, graph: onnx.ModelProto, workshop: Path, done: Finished, report: Report
) -> CompileError:
    words = "; ".join(errors_in(done.words))
    missing = missing_operators(done.words)
    if not missing:
        return CompileError(
            f"{blueprint.who} refuses {blueprint.component} (exit code {done.code}): {words}"
        )
    missing |= _more_missing(blueprint, graph, missing, workshop, report)
    return _no_operators(blueprint, f"operators it does not have: {', '.join(sorted(missing))}")


def _no_operators(blueprint: Blueprint, words: str) -> UnsupportedOpError:
    return UnsupportedOpError(f"{blueprint.who} refuses {blueprint.component}: {words}")


def _more_missing(
    blueprint: Blueprint,
    graph: onnx.ModelProto,
    missing: set[str],
    workshop: Path,
    report: Report,
) -> set[str]:
    """Returns the other operators that the compiler lacks: it stops at the first.

    What is known to be missing is cut out of the graph, and the rest is asked about again.
    """
    found = set(missing)
    while True:
        rest = without_operators(graph, found)
        if rest is None or _import(blueprint, rest, workshop, report).code:
            return found
        command = (*compiler(), _CODE_FILE, "--iree-input-type=onnx", "--compile-to=input")
        done = run_tool(
            (*command, *blueprint.flags, "-o", "rest.mlir"),
            workshop,
            on_poll=_still(f"import {blueprint.component}", report),
        )
        more = missing_operators(done.words) - found if done.code else set()
        if not more:
            return found
        found |= more
