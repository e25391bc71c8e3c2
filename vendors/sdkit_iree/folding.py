"""Computes ahead what a graph of fixed sizes computes from its sizes alone.

Exported graphs work out their shapes in many nodes. Left to the compiler, they were a fifth of its
time on the sample, and of a VAE encoder whose paddings a Slice with step -1 reverses every output
was NaN (IREE 3.13).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.external_data_helper import uses_external_data
from onnx.reference import ReferenceEvaluator

MOST_ELEMENTS = 1 << 16
"""Of a value that is computed ahead; the attention mask of a text encoder has 77 x 77."""
_MOST_ROUNDS = 8
_UNPREDICTABLE = ("Random", "Bernoulli", "Multinomial", "Dropout")

Constants = dict[str, Any]  # Any: numpy.ndarray


def fold_constants(model: onnx.ModelProto) -> None:
    """Replaces nodes by their results where these are known, in place; unused weights go too."""
    for _ in range(_MOST_ROUNDS):
        if not _fold(model):
            break
    used = set(_used(model.graph))
    kept = [tensor for tensor in model.graph.initializer if tensor.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)


def _fold(model: onnx.ModelProto) -> bool:
    graph = model.graph
    shapes = _known_shapes(model)
    constants: Constants = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in graph.initializer
        if not uses_external_data(tensor) and np.prod(tensor.dims) <= MOST_ELEMENTS
    }
    outputs = {value.name for value in graph.output}
    kept = []
    for node in graph.node:
        results = None if outputs & set(node.output) else _results(node, constants, shapes, model)
        if results is None:
            kept.append(node)
            continue
        constants |= results
        graph.initializer.extend(
            numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
            for name, array in results.items()
        )
    is_changed = len(kept) < len(graph.node)
    del graph.node[:]
    graph.node.extend(kept)
    return is_changed


def _results(
    node: onnx.NodeProto,
    constants: Constants,
    shapes: Mapping[str, tuple[int, ...]],
    model: onnx.ModelProto,
) -> Constants | None:
    """Returns what a node computes; None if that is not known, or too large to keep."""
    if node.op_type == "Shape" and node.input[0] in shapes:
        bounds = {one.name: one.i for one in node.attribute}
        sizes = shapes[node.input[0]][bounds.get("start", 0) : bounds.get("end")]
        return {node.output[0]: np.array(sizes, np.int64)}
    inputs = [name for name in node.input if name]
    if any(name not in constants for name in inputs) or not _is_plain(node):
        return None
    if any(np.prod(shapes.get(name, ())) > MOST_ELEMENTS for name in node.output if name):
        return None
    arrays = _evaluate(node, {name: constants[name] for name in inputs}, model)
    if arrays is None or any(array.size > MOST_ELEMENTS for array in arrays.values()):
        return None
    return arrays


def _is_plain(node: onnx.NodeProto) -> bool:
    return not node.op_type.startswith(_UNPREDICTABLE) and not any(
        one.HasField("g") for one in node.attribute
    )


def _evaluate(node: onnx.NodeProto, feeds: Constants, model: onnx.ModelProto) -> Constants | None:
    names = [name for name in node.output if name]
    alone = helper.make_model(
        helper.make_graph(
            [node],
            "alone",
            [
                helper.make_tensor_value_info(
                    name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
                )
                for name, array in feeds.items()
            ],
            [onnx.ValueInfoProto(name=name) for name in names],
        ),
        opset_imports=model.opset_import,
        ir_version=model.ir_version,
    )
    try:
        results = ReferenceEvaluator(alone).run(names, feeds)
    except Exception:  # an operator that it lacks, or values that do not fit: the compiler's turn
        return None
    return {name: np.asarray(array) for name, array in zip(names, results, strict=True)}


def _known_shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    found = {
        value.name: tuple(int(dim.dim_value) for dim in value.type.tensor_type.shape.dim)
        for value in (*inferred.input, *inferred.value_info, *inferred.output)
        if value.type.tensor_type.HasField("shape")
        and all(dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim)
    }
    return found | {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}


def _used(graph: onnx.GraphProto) -> Iterable[str]:
    yield from (value.name for value in graph.output)
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _used(attribute.g)
