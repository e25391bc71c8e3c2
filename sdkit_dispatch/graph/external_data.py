"""Which files beside an ONNX graph hold its weights."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx.external_data_helper import uses_external_data

from sdkit_dispatch.graph.tensor_sizes import external_part


def external_locations(model: onnx.ModelProto) -> tuple[str, ...]:
    """Returns the external files that tensors of `model` name, sorted, as the graph writes them.

    They are relative to the folder of the ONNX file. Reads no file.

    Raises:
        PipelineError: What a tensor says of its data cannot be.
    """
    return tuple(sorted(external_sizes(model)))


def external_sizes(model: onnx.ModelProto) -> dict[str, int]:
    """Returns the location of every external file, and how many bytes it must have at least.

    Raises:
        PipelineError: What a tensor says of its data cannot be.
    """
    sizes: dict[str, int] = {}
    for tensor in tensors_of(model.graph):
        if uses_external_data(tensor):
            part = external_part(tensor)
            sizes[part.location] = max(sizes.get(part.location, 0), part.end)
    return sizes


def tensors_of(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yields initializers and tensor attributes, those of subgraphs included."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            if attribute.HasField("g"):
                yield from tensors_of(attribute.g)
            for subgraph in attribute.graphs:
                yield from tensors_of(subgraph)
