"""An engine that is a graph with its weights: written at a build, opened at a load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
import onnxruntime as ort

from sdkit_dispatch.contract import BuildRequest, Progress, Report, TensorSpec
from sdkit_dispatch.errors import CacheError
from sdkit_dispatch.graph.precision import GraphPrecision
from sdkit_dispatch.graph.static_shapes import free_inputs
from sdkit_dispatch.graph.tensors import numpy_dtype_name, static_spec
from sdkit_onnxruntime.gpu_session import GRAPH_FILE, write_graph

GRAPH_PRECISIONS: Mapping[str, GraphPrecision] = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}


def write_engine(
    request: BuildRequest, source: Path, out: Path, report: Report, *, keep: tuple[str, ...]
) -> None:
    """Writes the graph of an engine into `out`.

    Raises:
        PipelineError: The graph or its data cannot be read, or the shapes do not fit.
    """
    phase = f"write {request.component} in {request.precision}"
    report(Progress(phase=f"read {request.component}"))
    write_graph(
        source,
        request.shapes,
        GRAPH_PRECISIONS[request.precision],
        out,
        keep=keep,
        on_fraction=lambda fraction: report(Progress(phase=phase, fraction=fraction)),
    )


def check_files(vendor: str, component: str, folder: Path) -> onnx.GraphProto:
    """Returns the graph of an engine, without its weights.

    Raises:
        CacheError: It is damaged, or its weights are not all there.
    """
    path = folder / GRAPH_FILE
    try:
        model = onnx.load(path, load_external_data=False)
        if not model.graph.output:
            raise ValueError("its graph has no outputs")
        for tensor in model.graph.initializer:
            entry = {pair.key: pair.value for pair in tensor.external_data}
            if not entry:
                continue
            size_bytes = (folder / entry["location"]).stat().st_size
            if int(entry["offset"]) + int(entry["length"]) > size_bytes:
                raise ValueError(f"the weights have {size_bytes} bytes, {tensor.name} is missing")
    except Exception as error:  # protobuf and the file system raise half a dozen classes
        raise CacheError(
            f"{vendor}: the engine of {component} in {folder} does not open: {error}"
        ) from error
    return model.graph


def specs_of(
    graph: onnx.GraphProto, session: ort.InferenceSession
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Returns the inputs and outputs of an engine, shapes as the session inferred them.

    Raises:
        ValueError: The shape of one depends on values.
    """
    inputs = tuple(static_spec(value) for value in free_inputs(graph))
    found = {one.name: tuple(one.shape) for one in session.get_outputs()}
    outputs = []
    for value in graph.output:
        shape = found[value.name]
        if not all(isinstance(size, int) for size in shape):
            raise ValueError(f'the shape of "{value.name}" depends on values: {list(shape)}')
        dtype = numpy_dtype_name(value.type.tensor_type.elem_type)
        outputs.append(TensorSpec(name=value.name, dtype=dtype, shape=shape))
    return inputs, tuple(outputs)
