"""A float32 graph -> the same graph in float16 or bfloat16, for compilers that take types as given.

Strongly typed compilers compute in what the graph says. What must not lose bits stays in float32
(`precision_rules`); inputs and outputs keep their types, so that a session looks the same to its
caller. Weights are read, converted and written a piece at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx
from onnx import TensorProto, helper

from sdkit_dispatch.errors import CompileError
from sdkit_dispatch.graph.opset import raise_opset
from sdkit_dispatch.graph.precision_rules import FLOAT_TYPES, STASHING_OP_TYPES, full_nodes
from sdkit_dispatch.graph.tensor_sizes import tensor_bytes
from sdkit_dispatch.graph.value_types import element_types, inline_functions, type_variables
from sdkit_dispatch.graph.weight_files import WeightWriter, load_small_tensors

logger = logging.getLogger(__name__)

GraphPrecision = Literal["fp32", "fp16", "bf16"]
ELEMENT_TYPES: Mapping[GraphPrecision, int] = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
}
BF16_OPSET = 22
"""The first in which convolutions and all that stands around them may be bfloat16."""
_SMALL_TENSOR_BYTES = 64 << 10
"""External tensors up to this size are read before types and shapes are looked at."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What became of a graph.

    Attributes:
        low_nodes: Nodes that compute in the precision that was asked for.
        full_nodes: Nodes with float inputs or outputs that compute in float32.
        casts: Casts that were put between them.
        weights_bytes: Size of all weights as written.
    """

    low_nodes: int
    full_nodes: int
    casts: int
    weights_bytes: int


def write_at_precision(
    model: onnx.ModelProto,
    folder: Path,
    out: Path,
    precision: GraphPrecision,
    *,
    keep: Sequence[str] = (),
    on_fraction: Callable[[float], None] = lambda fraction: None,
) -> Conversion:
    """Writes `model` in another precision to `out`, its weights beside it (`<name>_data`).

    A graph that its exporter already wrote in half precision keeps the float32 islands that it
    has: its half values alone change their type. `precision` "fp32" makes such a graph float32.

    Args:
        model: Left as it is; its external data stays unread until it is written.
        folder: Where the external data of `model` lies.
        out: An ONNX file to make.
        precision: Of the result.
        keep: Shell patterns over node names and operator types that stay in float32.
        on_fraction: Called often with the share of the weights that is written; may raise.

    Raises:
        CompileError: The graph cannot be bfloat16.
        PipelineError: External data is missing.
    """
    work = inline_functions(_copied_without_weights(model))
    sources = {tensor.name: tensor for tensor in model.graph.initializer}
    load_small_tensors(work, folder, _SMALL_TENSOR_BYTES)
    _constants_to_initializers(work.graph)
    if precision == "bf16" and not raise_opset(work, BF16_OPSET):
        raise CompileError(
            f"bf16 needs a graph of opset {BF16_OPSET} or one that can be raised to it, this one "
            f"has {[(o.domain or 'ai.onnx', o.version) for o in work.opset_import]}",
            hint="export the pipeline again with opset 18 or newer, or ask for fp16",
        )
    rewriting = _Rewriting(work, ELEMENT_TYPES[precision], keep)
    rewriting.rewrite()
    weights_bytes = _write(work, rewriting, sources, folder, out, on_fraction)
    return Conversion(
        low_nodes=rewriting.low_nodes,
        full_nodes=rewriting.full_nodes,
        casts=rewriting.casts,
        weights_bytes=weights_bytes,
    )


def is_half_graph(model: onnx.ModelProto) -> bool:
    """Says whether most of the float weights of a graph are in half precision already."""
    half = full = 0
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            full += tensor_bytes(tensor)
        elif tensor.data_type in FLOAT_TYPES:
            half += 2 * tensor_bytes(tensor)
    return half > full


class _Rewriting:
    """One pass over a graph, in place."""

    def __init__(self, model: onnx.ModelProto, target: int, keep: Sequence[str]) -> None:
        self.low_nodes = self.full_nodes = self.casts = 0
        self.variants: dict[str, tuple[str, int]] = {}
        """Name of an initializer of the result -> name of its source, element type."""
        self._model = model
        self._graph = model.graph
        self._target = target
        self._types = element_types(model)
        self._is_half = is_half_graph(model)
        self._full = full_nodes(self._graph, self._types, keep=keep)
        self._constants = {tensor.name: tensor.data_type for tensor in self._graph.initializer}
        self._now: dict[str, int] = {
            value.name: value.type.tensor_type.elem_type for value in self._graph.input
        }
        self._nodes: list[onnx.NodeProto] = []
        self._cast_names: dict[tuple[str, int], str] = {}
        self._names = {name for node in self._graph.node for name in (*node.input, *node.output)}
        self._opsets = {one.domain: one.version for one in model.opset_import}

    def rewrite(self) -> None:
        captured = _names_in_subgraphs(self._graph)
        for name in captured & set(self._constants):
            self.variants[name] = (name, self._constants[name])
        for index, node in enumerate(self._graph.node):
            self._rewrite_node(node, is_full=index in self._full)
        self._restore_outputs()
        del self._graph.node[:]
        self._graph.node.extend(self._nodes)
        del self._graph.value_info[:]  # it speaks of the types before

    def _rewrite_node(self, node: onnx.NodeProto, *, is_full: bool) -> None:
        variables = type_variables(node, self._opsets, self._target)
        # Of an operator of somebody else nothing is known: it gets what it had.
        is_low = not is_full and not self._is_half and variables is not None
        if is_low and node.op_type not in ("Cast", "CastLike") and variables is not None:
            bound = [
                variable
                for variable, name in zip(variables.inputs, node.input, strict=False)
                if self._types.get(name) == TensorProto.FLOAT
            ]
            is_low = any(bound) or not bound
        has_floats = any(self._types.get(n) in FLOAT_TYPES for n in (*node.input, *node.output))
        if has_floats:
            is_target = is_low or (self._is_half and self._has_half(node))
            self.low_nodes += is_target
            self.full_nodes += not is_target
        for position, name in enumerate(node.input):
            if self._types.get(name) in FLOAT_TYPES:
                can = variables is None or variables.inputs[position]
                node.input[position] = self._as(name, self._wanted(name, is_low and can))
        for position, name in enumerate(node.output):
            if self._types.get(name) in FLOAT_TYPES:
                can = variables is None or variables.outputs[position]
                self._now[name] = self._wanted(name, is_low and can)
        _set_types(node, self._now, is_low=is_low)
        self._nodes.append(node)

    def _has_half(self, node: onnx.NodeProto) -> bool:
        names = (*node.input, *node.output)
        return any(self._types.get(n) in FLOAT_TYPES - {TensorProto.FLOAT} for n in names)

    def _wanted(self, name: str, is_low: bool) -> int:
        """Returns the type that a node wants a value in."""
        if self._types[name] != TensorProto.FLOAT:
            return self._target if self._is_half else self._types[name]
        return self._target if is_low else TensorProto.FLOAT

    def _as(self, name: str, wanted: int) -> str:
        """Returns a value that holds `name` in the type `wanted`."""
        if name in self._constants:
            return self._variant(name, wanted)
        if self._now.get(name, self._types[name]) == wanted:
            return name
        if (name, wanted) not in self._cast_names:
            cast = self._fresh(f"{name}_as_{TensorProto.DataType.Name(wanted).lower()}")
            self._nodes.append(helper.make_node("Cast", [name], [cast], name=cast, to=wanted))
            self.casts += 1
            self._cast_names[name, wanted] = cast
        return self._cast_names[name, wanted]

    def _variant(self, name: str, wanted: int) -> str:
        taken = self.variants.get(name)
        if taken is None or taken[1] == wanted:
            self.variants[name] = (name, wanted)
            return name
        if (name, wanted) not in self._cast_names:
            other = self._fresh(f"{name}_as_{TensorProto.DataType.Name(wanted).lower()}")
            self._cast_names[name, wanted] = other
            self.variants[other] = (name, wanted)
        return self._cast_names[name, wanted]

    def _restore_outputs(self) -> None:
        for value in self._graph.output:
            declared = value.type.tensor_type.elem_type
            name = value.name
            if self._types.get(name) not in FLOAT_TYPES:
                continue
            if name in self._constants:
                self.variants[name] = (name, declared)
                continue
            if self._now.get(name, declared) == declared:
                continue
            inner = self._fresh(f"{name}_in_{TensorProto.DataType.Name(self._now[name]).lower()}")
            for node in self._nodes:
                for names in (node.input, node.output):
                    for position, one in enumerate(names):
                        if one == name:
                            names[position] = inner
            self._nodes.append(helper.make_node("Cast", [inner], [name], name=name, to=declared))
            self.casts += 1

    def _fresh(self, name: str) -> str:
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name


def _set_types(node: onnx.NodeProto, now: Mapping[str, int], *, is_low: bool) -> None:
    """Writes types that a node has as attributes."""
    if node.op_type == "Cast" and node.output[0] in now:
        for attribute in node.attribute:
            if attribute.name == "to":
                attribute.i = now[node.output[0]]
    if node.op_type in STASHING_OP_TYPES and is_low:
        kept = [one for one in node.attribute if one.name != "stash_type"]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute("stash_type", TensorProto.FLOAT)])


def _write(
    model: onnx.ModelProto,
    rewriting: _Rewriting,
    sources: Mapping[str, onnx.TensorProto],
    folder: Path,
    out: Path,
    on_fraction: Callable[[float], None],
) -> int:
    graph = model.graph
    inner = {tensor.name: tensor for tensor in graph.initializer}
    wanted = dict(rewriting.variants)
    # Whole numbers go as they are; what nobody reads is left behind.
    read = {name for node in graph.node for name in node.input} | _names_in_subgraphs(graph)
    for name, tensor in inner.items():
        if tensor.data_type not in FLOAT_TYPES and name in read:
            wanted[name] = (name, tensor.data_type)
    total = sum(tensor_bytes(sources.get(name, inner[name])) for name, _ in wanted.values())
    location = f"{out.name}_data"
    written: list[onnx.TensorProto] = []
    with (out.parent / location).open("wb") as stream:
        writer = WeightWriter(stream, location, total_bytes=total, on_fraction=on_fraction)
        for name, (source, target) in wanted.items():
            tensor = writer.write(sources.get(source, inner[source]), folder, target)
            tensor.name = name
            written.append(tensor)
        size_bytes = stream.tell()
    if size_bytes == 0:
        (out.parent / location).unlink()
    del graph.initializer[:]
    graph.initializer.extend(written)
    out.write_bytes(model.SerializeToString(deterministic=True))
    logger.debug("%s: %d bytes of weights", out, size_bytes)
    return sum(tensor_bytes(tensor) for tensor in written)


def _copied_without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy whose large initializers have a type and a shape, but no data.

    Passes of the `onnx` package serialise a model, which protobuf refuses above 2 GiB.
    """
    copy = onnx.ModelProto()
    copy.ir_version = model.ir_version
    copy.opset_import.extend(model.opset_import)
    copy.functions.extend(model.functions)
    graph, source = copy.graph, model.graph
    graph.name = source.name
    for name in ("node", "input", "output", "value_info", "sparse_initializer"):
        getattr(graph, name).extend(getattr(source, name))
    for tensor in source.initializer:
        is_inside = tensor.data_location != TensorProto.EXTERNAL
        if is_inside and tensor_bytes(tensor) > _SMALL_TENSOR_BYTES:
            graph.initializer.add(
                name=tensor.name,
                dims=tensor.dims,
                data_type=tensor.data_type,
                data_location=TensorProto.EXTERNAL,
            )
        else:
            graph.initializer.append(tensor)
    return copy


def _constants_to_initializers(graph: onnx.GraphProto) -> None:
    """Makes Constant nodes initializers: what reads a constant decides its type."""
    kept = []
    for node in graph.node:
        values = [one for one in node.attribute if one.name == "value" and one.HasField("t")]
        if node.op_type != "Constant" or not values:
            kept.append(node)
            continue
        tensor = graph.initializer.add()
        tensor.CopyFrom(values[0].t)
        tensor.name = node.output[0]
    del graph.node[:]
    graph.node.extend(kept)


def _names_in_subgraphs(graph: onnx.GraphProto) -> set[str]:
    names: set[str] = set()
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
                names.update(name for one in inner.node for name in one.input)
                names.update(value.name for value in inner.output)
                names |= _names_in_subgraphs(inner)
    return names
