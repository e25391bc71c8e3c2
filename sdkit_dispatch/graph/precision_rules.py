"""Which nodes of a float32 graph stay in float32 when the rest goes to half precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

FLOAT_TYPES = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})

FULL_OP_TYPES = frozenset(
    {
        # Sums of many squares or exponentials: a half overflows at 65504 and swallows small terms.
        "Softmax",
        "LogSoftmax",
        "InstanceNormalization",
        "MeanVarianceNormalization",
        "LpNormalization",
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSum",
        "ReduceLogSumExp",
        "ReduceMean",
        "ReduceProd",
        "ReduceSum",
        "ReduceSumSquare",
        "CumSum",
        "Exp",
        "Log",
        "Pow",
        "Sqrt",
        "Reciprocal",
        # Coordinates: 8 bits of mantissa cannot name the pixels of a row, and the scales of a
        # Resize are float32 by its definition.
        "Range",
        "Resize",
        "Upsample",
        "GridSample",
        "Sin",
        "Cos",
        # Types by attribute, or random.
        "ConstantOfShape",
        "EyeLike",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    }
)
"""Operators that always compute in float32."""

STASHING_OP_TYPES = frozenset({"LayerNormalization", "GroupNormalization", "RMSNormalization"})
"""Norms that say themselves, by `stash_type`, that their statistics are float32."""

_POINTWISE = frozenset(
    {"Abs", "Add", "Cast", "Clip", "Div", "Max", "Min", "Mul", "Neg", "Sub", "Where"}
)
_MOVING = frozenset(
    {"Concat", "Expand", "Flatten", "Gather", "GatherND", "Identity", "Reshape", "ScatterND"}
    | {"Slice", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze"}
)
_QUANTISING = frozenset({"QuantizeLinear", "DequantizeLinear"})
_ROUNDING = frozenset({"Ceil", "Floor", "Round"})
_LEAST_NORMAL_HALF = 2.0**-14
"""Quantisation scales below it lose bits in float16."""


def full_nodes(
    graph: onnx.GraphProto, types: Mapping[str, int], *, keep: Sequence[str] = ()
) -> frozenset[int]:
    """Returns the indices of the nodes that must compute in float32.

    Args:
        graph: Sorted topologically.
        types: Value name -> element type.
        keep: Shell patterns over node names and operator types.
    """
    nodes = list(graph.node)
    producer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    full = {
        index
        for index, node in enumerate(nodes)
        if node.op_type in FULL_OP_TYPES
        or _has_subgraph(node)
        or any(fnmatchcase(node.name, p) or fnmatchcase(node.op_type, p) for p in keep)
        or (node.op_type in _QUANTISING and _scale_is_tiny(node, constants))
    }
    captured = {name for node in nodes for name in _captured_names(node)}
    full |= {producer[name] for name in captured if name in producer}

    # What sines are taken of (a timestep of 981, positions) needs every bit that float32 has.
    waves = (index for index, node in enumerate(nodes) if node.op_type in ("Sin", "Cos"))
    full |= _ancestors(nodes, producer, waves, lambda node: True)
    # Scores and masks on their way into a softmax: a mask is -3.4e38.
    softmaxes = (i for i, node in enumerate(nodes) if node.op_type in ("Softmax", "LogSoftmax"))
    light = _POINTWISE | _MOVING
    full |= _ancestors(nodes, producer, softmaxes, lambda node: node.op_type in light)
    # Sizes and coordinates that are computed in float on their way to an integer.
    integers = (index for index, node in enumerate(nodes) if _makes_integers(node, types))
    full |= _ancestors(
        nodes, producer, integers, lambda node: node.op_type in light | _ROUNDING
    ) | {index for index, node in enumerate(nodes) if _makes_integers(node, types)}
    return frozenset(_with_bridges(graph, types, full, producer))


def _with_bridges(
    graph: onnx.GraphProto, types: Mapping[str, int], full: set[int], producer: Mapping[str, int]
) -> set[int]:
    """Adds pointwise nodes that stand between full ones: the epsilon of a decomposed norm."""
    nodes = list(graph.node)
    constants = {tensor.name for tensor in graph.initializer}
    readers: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in node.input:
            readers.setdefault(name, []).append(index)
    result, is_growing = set(full), True
    while is_growing:
        is_growing = False
        for index, node in enumerate(nodes):
            if index in result or node.op_type not in _POINTWISE:
                continue
            made = [n for n in node.input if types.get(n) in FLOAT_TYPES and n not in constants]
            feeds_full = any(r in result for name in node.output for r in readers.get(name, ()))
            if feeds_full and all(producer.get(name) in result for name in made):
                result.add(index)
                is_growing = True
    return result


def _ancestors(
    nodes: Sequence[onnx.NodeProto],
    producer: Mapping[str, int],
    roots: Iterable[int],
    may_pass: Callable[[onnx.NodeProto], bool],
) -> set[int]:
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        for name in nodes[waiting.pop()].input:
            index = producer.get(name)
            if index is not None and index not in found and may_pass(nodes[index]):
                found.add(index)
                waiting.append(index)
    return found


def _makes_integers(node: onnx.NodeProto, types: Mapping[str, int]) -> bool:
    if node.op_type != "Cast" or types.get(node.input[0]) not in FLOAT_TYPES:
        return False
    to = next(attribute.i for attribute in node.attribute if attribute.name == "to")
    return to in (TensorProto.INT32, TensorProto.INT64)


def _scale_is_tiny(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    scale = constants.get(node.input[1]) if len(node.input) > 1 else None
    if scale is None or scale.data_location == TensorProto.EXTERNAL:
        return False
    values = np.abs(numpy_helper.to_array(scale).astype(np.float32))
    return bool(values.size) and float(values.min()) < _LEAST_NORMAL_HALF


def _has_subgraph(node: onnx.NodeProto) -> bool:
    return any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)


def _captured_names(node: onnx.NodeProto) -> set[str]:
    """Returns every name that the subgraphs of a node read; their own values do no harm."""
    names: set[str] = set()
    for attribute in node.attribute:
        for graph in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
            for inner in graph.node:
                names.update(inner.input)
                names |= _captured_names(inner)
            names.update(value.name for value in graph.output)
    return names
