"""Gives every input of an ONNX graph a fixed shape, so that a compiler can plan all memory."""

from __future__ import annotations

from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from sdkit_dispatch.contract import Shapes
from sdkit_dispatch.errors import PipelineError
from sdkit_dispatch.graph.upsampling import crop_upsampling


def make_static(source: onnx.ModelProto | Path, shapes: Shapes) -> onnx.ModelProto:
    """Returns the graph of `source` with its inputs fixed to `shapes`.

    Weights in external files stay there, unread; their locations stay relative to the folder of
    `source`. Symbolic sizes of the outputs are dropped, even where an input binds the symbol:
    exporters reuse one symbol for different sizes (a VAE decoder with the batch and the height of
    its output under one name was seen), and a runtime infers them from the inputs anyway.

    A UNet whose sides do not halve evenly is changed so that it can be computed (`upsampling`).

    Raises:
        PipelineError: The file is not ONNX, or `shapes` does not fit the inputs of the graph.
    """
    model = read_graph(source) if isinstance(source, Path) else _copy(source)
    graph = model.graph
    inputs = free_inputs(graph)
    _check_names({value.name for value in inputs}, shapes)

    bound: dict[str, tuple[str, int]] = {}
    for value in inputs:
        _fix_input(value, shapes[value.name], bound)
    for value in graph.output:
        _forget_symbols(value)
    _forget_intermediate_shapes(graph)
    crop_upsampling(model)
    return model


def read_graph(path: Path) -> onnx.ModelProto:
    """Returns the model of an ONNX file, without the contents of its external files.

    Raises:
        PipelineError: There is no such file, or it is not ONNX.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise PipelineError(f"cannot read {path}: {error.strerror or error}") from error
    except (DecodeError, ValueError) as error:
        raise PipelineError(f"{path} is not a readable ONNX file: {error}") from error
    if not model.graph.output:
        raise PipelineError(f"{path} is not a usable ONNX file: its graph has no outputs")
    return model


def free_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Returns the inputs that a caller must feed.

    Before IR version 4 every initializer was listed among the inputs too; those are left out.
    """
    initializers = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in initializers]


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def _check_names(declared: set[str], shapes: Shapes) -> None:
    missing, unknown = sorted(declared - set(shapes)), sorted(set(shapes) - declared)
    if missing or unknown:
        raise PipelineError(
            f"shapes were given for {sorted(shapes)}, but the graph has the inputs "
            f"{sorted(declared)}"
            + (f"; missing: {missing}" if missing else "")
            + (f"; unknown: {unknown}" if unknown else "")
        )


def _fix_input(
    value: onnx.ValueInfoProto, asked: tuple[int, ...], bound: dict[str, tuple[str, int]]
) -> None:
    """Writes `asked` into `value`; `bound`: symbol -> input and size."""
    if any(size < 1 for size in asked):
        raise PipelineError(f'input "{value.name}": sizes must be positive, got {list(asked)}')
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        tensor.shape.dim.extend(onnx.TensorShapeProto.Dimension(dim_value=size) for size in asked)
        return
    dims = tensor.shape.dim
    declared = [_size_or_symbol(dim) for dim in dims]
    if len(asked) != len(declared):
        raise PipelineError(
            f'input "{value.name}": asked for the shape {list(asked)}, but the graph declares '
            f"{len(declared)} dimensions: {declared}"
        )
    for dim, have, size in zip(dims, declared, asked, strict=True):
        if isinstance(have, int):
            if have != size:
                raise PipelineError(
                    f'input "{value.name}": asked for the shape {list(asked)}, but the graph '
                    f"fixes {declared}"
                )
        elif have != "?":
            other, other_size = bound.setdefault(have, (value.name, size))
            if other_size != size:
                raise PipelineError(
                    f'input "{value.name}": asked for the shape {list(asked)} of {declared}, but '
                    f'"{have}" is {other_size} in input "{other}"'
                )
        dim.dim_value = size


def _size_or_symbol(dim: onnx.TensorShapeProto.Dimension) -> int | str:
    # Some exporters write 0 or -1 for "unknown".
    if dim.dim_value > 0:
        return int(dim.dim_value)
    return str(dim.dim_param) or "?"


def _forget_symbols(value: onnx.ValueInfoProto) -> None:
    for dim in value.type.tensor_type.shape.dim:
        if isinstance(_size_or_symbol(dim), str):
            dim.Clear()


def _forget_intermediate_shapes(graph: onnx.GraphProto) -> None:
    """Drops recorded shapes inside the graph: they speak of the symbols that are gone."""
    del graph.value_info[:]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _forget_intermediate_shapes(attribute.g)
            for subgraph in attribute.graphs:
                _forget_intermediate_shapes(subgraph)
