"""Which files beside an ONNX graph hold its weights."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data


def external_locations(model: onnx.ModelProto) -> tuple[str, ...]:
    """Returns the external files that tensors of `model` name, sorted, as the graph writes them.

    They are relative to the folder of the ONNX file. Reads no file.
    """
    return tuple(
        sorted(
            {
                ExternalDataInfo(tensor).location
                for tensor in tensors_of(model.graph)
                if uses_external_data(tensor)
            }
        )
    )


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
