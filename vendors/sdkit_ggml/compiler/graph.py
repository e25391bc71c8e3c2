"""An ONNX graph as the compiler sees it: nodes, types of values, and constants read when needed."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from sdkit_dispatch.errors import CompileError
from sdkit_dispatch.graph.static_shapes import free_inputs
from sdkit_dispatch.graph.tensors import numpy_dtype_name
from sdkit_ggml.program import WeightStep

Array = np.ndarray[Any, np.dtype[Any]]  # Any: of every type that ONNX has
KEPT_BYTES = 1 << 20
"""Constants up to this size are kept once computed; larger ones are computed anew when read, so
that a model's weights are never in memory together."""


class Constant:
    """An array that is known at compile time, and read or computed only when asked for."""

    def __init__(
        self,
        dtype: str,
        shape: tuple[int, ...],
        compute: Callable[[], Array],
        *,
        origin: str = "",
        steps: tuple[WeightStep, ...] = (),
    ) -> None:
        """Keeps how to compute the array.

        Args:
            dtype: As numpy names it.
            shape: Of the array.
            compute: Returns the array.
            origin: The name of the initializer it comes from, if it is one.
            steps: What was done to that since.
        """
        self.dtype = dtype
        self.shape = shape
        self.origin = origin
        self.steps = steps
        self._compute = compute
        self._kept: Array | None = None

    @classmethod
    def of(cls, array: Array) -> Constant:
        """Returns the constant of an array at hand."""
        return cls(array.dtype.name, array.shape, lambda: array)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize

    def array(self) -> Array:
        """Returns the array; the caller must not change it."""
        if self._kept is not None:
            return self._kept
        array = self._compute()
        if self.nbytes <= KEPT_BYTES:
            self._kept = array
        return array

    def then(
        self,
        step: WeightStep,
        compute: Callable[[Array], Array],
        shape: tuple[int, ...],
        dtype: str = "",
    ) -> Constant:
        """Returns a constant that is computed from this one; `step` says the same as `compute`."""
        return Constant(
            dtype or self.dtype,
            shape,
            lambda: compute(self.array()),
            origin=self.origin,
            steps=(*self.steps, step) if self.origin else (),
        )


@dataclass(frozen=True)
class ValueType:
    """dtype (as numpy has it) and static shape of a value."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        return self.dtype in ("float32", "float16", "bfloat16", "float64")


@dataclass(eq=False)
class Node:
    """One operator. `attributes` are Python and numpy values; absent optional inputs are ""."""

    op_type: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any] = field(default_factory=dict)  # Any: as ONNX has them
    domain: str = ""
    name: str = ""

    @property
    def output(self) -> str:
        return self.outputs[0]

    def __str__(self) -> str:
        return f'{self.op_type} "{self.name or self.output}"'


@dataclass
class Graph:
    """Nodes in an order in which they can run. A value is a constant or has a type."""

    opset: int
    nodes: list[Node]
    inputs: list[str]
    outputs: list[str]
    constants: dict[str, Constant]
    types: dict[str, ValueType]

    def producers(self) -> dict[str, Node]:
        return {name: node for node in self.nodes for name in node.outputs if name}

    def consumers(self) -> dict[str, list[Node]]:
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                found.setdefault(name, []).append(node)
        return found

    def type_of(self, name: str) -> ValueType:
        """Returns the type of a value, constant or not."""
        if name in self.constants:
            constant = self.constants[name]
            return ValueType(constant.dtype, constant.shape)
        return self.types[name]


_TO_INPUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    # operator: (first opset that has these as inputs, attributes that became inputs)
    "Squeeze": (13, ("axes",)),
    "Unsqueeze": (13, ("axes",)),
    "Slice": (10, ("starts", "ends", "axes")),
    "Split": (13, ("split",)),
    "Pad": (11, ("pads", "value")),
    "Clip": (11, ("min", "max")),
    "ReduceSum": (13, ("axes",)),
    "ReduceMean": (18, ("axes",)),
    "ReduceMax": (18, ("axes",)),
    "Upsample": (9, ("scales",)),
}
_FLOATS = frozenset({"value", "min", "max", "scales"})


def graph_from_model(
    model: onnx.ModelProto,
    folder: Path,
    on_read: Callable[[str, Array], None] = lambda name, array: None,
) -> Graph:
    """Returns the graph of a model whose inputs have static shapes.

    Args:
        model: Without the contents of external files.
        folder: Where the external files are.
        on_read: Told the name and numbers of each initializer that is read from them.
    """
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    opset = opsets.get("", opsets.get("ai.onnx", 1))
    proto = model.graph
    reader = _ExternalFiles(folder, on_read)
    graph = Graph(
        opset=opset,
        nodes=[],
        inputs=[value.name for value in free_inputs(proto)],
        outputs=[value.name for value in proto.output],
        constants={tensor.name: _constant(tensor, reader) for tensor in proto.initializer},
        types={value.name: _type_of(value) for value in free_inputs(proto)},
    )
    for entry in proto.node:
        _add_node(graph, entry, reader)
    return graph


def _type_of(value: onnx.ValueInfoProto) -> ValueType:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        raise CompileError(f'ggml: the input "{value.name}" is no tensor')
    return ValueType(
        numpy_dtype_name(tensor.elem_type), tuple(dim.dim_value for dim in tensor.shape.dim)
    )


def _add_node(graph: Graph, entry: onnx.NodeProto, reader: _ExternalFiles) -> None:
    attributes = {
        one.name: _python(onnx.helper.get_attribute_value(one)) for one in entry.attribute
    }
    domain = "" if entry.domain == "ai.onnx" else entry.domain
    if entry.op_type == "Constant" and not domain:
        graph.constants[entry.output[0]] = _constant_of_node(entry, attributes, reader)
        return
    inputs = list(entry.input)
    while inputs and not inputs[-1]:
        inputs.pop()
    since, moved = _TO_INPUTS.get(entry.op_type, (0, ()))
    if graph.opset < since and not domain:
        for position, key in enumerate(moved, start=1):
            if key in attributes:
                array = np.asarray(attributes.pop(key), np.float32 if key in _FLOATS else np.int64)
                name = f"{entry.output[0]}:{key}"
                graph.constants[name] = Constant.of(array)
                inputs += [""] * (position + 1 - len(inputs))
                inputs[position] = name
    if entry.op_type in ("Softmax", "LogSoftmax") and graph.opset < 13:
        attributes["flattens"] = True
        attributes.setdefault("axis", 1)
    graph.nodes.append(
        Node(entry.op_type, inputs, list(entry.output), attributes, domain, entry.name)
    )


def _python(value: Any) -> Any:  # Any: an attribute is of a dozen types
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Iterable) and not isinstance(value, (str, onnx.TensorProto)):
        return [_python(one) for one in value]
    return value


def _constant_of_node(
    node: onnx.NodeProto, attributes: dict[str, Any], reader: _ExternalFiles
) -> Constant:
    for key, value in attributes.items():
        if key == "value":
            return _constant(value, reader, node.output[0])
        if key in ("value_float", "value_floats"):
            return Constant.of(np.asarray(value, np.float32))
        if key in ("value_int", "value_ints"):
            return Constant.of(np.asarray(value, np.int64))
    raise CompileError(f"ggml: a Constant holds {sorted(attributes)}, not numbers")


def _constant(tensor: onnx.TensorProto, reader: _ExternalFiles, name: str = "") -> Constant:
    """Returns a constant; `name` is the one of a tensor that is no initializer."""
    dtype = numpy_dtype_name(tensor.data_type)
    shape = tuple(tensor.dims)
    origin = name or tensor.name
    if not uses_external_data(tensor):
        return Constant(dtype, shape, lambda: onnx.numpy_helper.to_array(tensor), origin=origin)
    return Constant(dtype, shape, lambda: reader.read(origin, tensor), origin=origin)


class _ExternalFiles:
    """Maps files of weights, once each."""

    def __init__(self, folder: Path, on_read: Callable[[str, Array], None]) -> None:
        self._folder = folder
        self._on_read = on_read
        self._maps: dict[str, mmap.mmap] = {}

    def read(self, name: str, tensor: onnx.TensorProto) -> Array:
        info = ExternalDataInfo(tensor)
        location, offset = info.location, info.offset or 0
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        count = int(np.prod(tensor.dims, dtype=np.int64))
        try:
            if location not in self._maps:
                with (self._folder / location).open("rb") as stream:
                    self._maps[location] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            flat = np.frombuffer(self._maps[location], dtype, count, offset)
        except (OSError, ValueError) as error:
            raise CompileError(
                f"ggml: {count} weights at {offset} of {self._folder / location} cannot be read: "
                f"{error}"
            ) from error
        array = flat.reshape(tuple(tensor.dims))
        self._on_read(name, array)
        return array
