"""Computes what is constant once shapes are known, and gives every other value its type."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sdkit_dispatch.errors import CompileError
from sdkit_ggml.compiler.evaluate import EVALUATE
from sdkit_ggml.compiler.graph import Array, Constant, Graph, Node
from sdkit_ggml.compiler.shapes import SHAPES, output_types
from sdkit_ggml.program import WeightStep

LARGE_ELEMENTS = 1 << 16
"""Above it a constant is a weight, wherever it comes from."""
_LAZY = frozenset({"Cast", "Gather", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators on weights that are described, not computed: what an exporter left transposed, and the
rows of a table of positions."""
_MOST_INDICES = 1 << 10
_INTEGERS = frozenset({"int64", "int32"})
_FLOATS = frozenset({"float32", "float16", "bfloat16", "float64"})


def fold(graph: Graph) -> None:
    """Replaces constant nodes by constants and removes those that do nothing, in place.

    A node of an unknown operator stays, and so does what depends on it, without a type.

    Raises:
        CompileError: A node contradicts its inputs.
    """
    renamed: dict[str, str] = {}
    kept: list[Node] = []
    for node in graph.nodes:
        node.inputs = [renamed.get(name, name) for name in node.inputs]
        known = all(
            not name or name in graph.constants or name in graph.types for name in node.inputs
        )
        if node.domain or not known or not _is_known(node):
            kept.append(node)
            continue
        try:
            same = _unchanged(graph, node)
            if same is not None:
                renamed[node.output] = renamed.get(same, same)
            elif not _fold_node(graph, node):
                for name, kind in zip(node.outputs, output_types(graph, node), strict=False):
                    graph.types[name] = kind
                kept.append(node)
        except CompileError:
            raise
        except Exception as error:  # numpy and arithmetic on wrong shapes raise many classes
            raise CompileError(f"ggml: {node}: {error}") from error
    graph.nodes = kept
    graph.outputs = list(graph.outputs)
    _rename_outputs(graph, renamed)
    drop_unused(graph)


def drop_unused(graph: Graph) -> None:
    """Removes nodes whose results nothing uses, in place."""
    wanted = set(graph.outputs)
    kept = []
    for node in reversed(graph.nodes):
        if any(name in wanted for name in node.outputs):
            wanted.update(node.inputs)
            kept.append(node)
    graph.nodes = kept[::-1]


def _is_known(node: Node) -> bool:
    return node.op_type in SHAPES or node.op_type in EVALUATE or node.op_type in ("Shape", "Size")


def _unchanged(graph: Graph, node: Node) -> str | None:
    """Returns the value that the node passes on, if it does just that."""
    source = node.inputs[0] if node.inputs else ""
    if node.op_type in ("Identity", "Dropout"):
        return source
    if source in graph.constants or source not in graph.types:
        return None
    kind = graph.types[source]
    if node.op_type == "Cast":
        (to,) = output_types(graph, node)
        # All floats are computed in one type.
        if to.dtype == kind.dtype or (to.is_float and kind.is_float):
            return source
    if node.op_type in ("Reshape", "Expand", "Squeeze", "Unsqueeze", "Slice"):
        (to,) = output_types(graph, node)[:1]
        plain = node.op_type != "Slice" or not _reverses(graph, node)
        if to.shape == kind.shape and plain:
            return source
    return None


def _reverses(graph: Graph, node: Node) -> bool:
    if len(node.inputs) < 5 or not node.inputs[4]:
        return False
    return bool((graph.constants[node.inputs[4]].array() < 0).any())


def _fold_node(graph: Graph, node: Node) -> bool:
    if node.op_type in ("Shape", "Size"):
        shape = graph.type_of(node.inputs[0]).shape
        if node.op_type == "Size":
            graph.constants[node.output] = Constant.of(np.array(np.prod(shape), np.int64))
        else:
            start, end = node.attributes.get("start", 0), node.attributes.get("end", len(shape))
            graph.constants[node.output] = Constant.of(np.array(shape[start:end], np.int64))
        return True
    if node.op_type not in EVALUATE:
        return False
    if not all(not name or name in graph.constants for name in node.inputs):
        return False
    constants = [graph.constants[name] if name else None for name in node.inputs]
    first = constants[0]
    if node.op_type in _LAZY and first is not None and _is_weight(first, constants[1:]):
        (kind,) = output_types(graph, node)[:1]
        graph.constants[node.output] = first.then(
            _step(node, constants[1:]),
            lambda array: _compute(node, [Constant.of(array), *constants[1:]])[0],
            kind.shape,
            kind.dtype,
        )
        return True
    results = _compute(node, constants)
    for name, array in zip(node.outputs, results, strict=False):
        if name:
            graph.constants[name] = Constant.of(array)
    return True


def _is_weight(constant: Constant, others: Sequence[Constant | None]) -> bool:
    """Whether a program need not know the numbers: shapes are small, and whole."""
    is_large = constant.size > LARGE_ELEMENTS
    is_named = bool(constant.origin) and constant.size > 1 and constant.dtype in _FLOATS
    return (is_large or is_named) and all(
        one is None or (one.dtype in _INTEGERS and one.size <= _MOST_INDICES) for one in others
    )


def _step(node: Node, others: Sequence[Constant | None]) -> WeightStep:
    return WeightStep(
        node.op_type,
        tuple(
            None if one is None else (one.shape, tuple(one.array().ravel().tolist()))
            for one in others
        ),
        tuple(
            (key, tuple(value) if isinstance(value, list) else value)
            for key, value in sorted(node.attributes.items())
        ),
    )


def _compute(node: Node, constants: list[Constant | None]) -> tuple[Array, ...]:
    arrays = [None if one is None else one.array() for one in constants]
    with np.errstate(all="ignore"):
        result = EVALUATE[node.op_type](*arrays, **node.attributes)
    return result if isinstance(result, tuple) else (np.asarray(result),)


def _rename_outputs(graph: Graph, renamed: dict[str, str]) -> None:
    """An output that only passes a value on keeps its name: through an explicit Identity."""
    for name in graph.outputs:
        if name in renamed:
            source = renamed[name]
            kind = graph.type_of(source)
            graph.types[name] = kind
            graph.nodes.append(Node("Identity", [source], [name]))
