"""A graph as IREE's importer wants it, and its weights in an archive beside it.

The importer and the compiler see the names and shapes of weights only: neither takes more memory
for a larger model of the same structure, and the archive is mapped at load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import iree.runtime as rt
import onnx
from onnx import TensorProto

from sdkit_dispatch.errors import UnsupportedOpError
from sdkit_dispatch.graph.value_types import inline_functions
from sdkit_dispatch.graph.weight_files import load_small_tensors, values_of
from sdkit_iree.folding import fold_constants

ENTRY = "main"
"""Name of the function that a graph becomes."""
SCOPE = "model"
"""Namespace of the weights within a module: the importer's default."""
OUTSIDE_ELEMENTS = 256
"""Tensors with at least so many elements are weights; smaller ones, shapes among them, are code."""
_WIDEST_BYTES = 16
"""Of an element, a complex one."""
_ONNX = ("", "ai.onnx")

Weights = Mapping[str, TensorProto]
"""Name in the archive -> a tensor with its data, or with the external file that holds it."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A graph without its weights.

    Attributes:
        graph: Fit for the importer.
        folder: Of the external files that `weights` name.
    """

    graph: onnx.ModelProto
    weights: Weights
    folder: Path


def prepare(model: onnx.ModelProto, folder: Path) -> Prepared:
    """Takes the weights out of a graph; `model` is used up.

    Raises:
        UnsupportedOpError: The graph has operators that no release of ONNX defines.
    """
    work = inline_functions(model)
    _refuse_foreign_operators(work)
    _constants_to_initializers(work.graph)
    load_small_tensors(work, folder, OUTSIDE_ELEMENTS * _WIDEST_BYTES)
    fold_constants(work)
    weights: dict[str, TensorProto] = {}
    names = _names_of(work.graph)
    outputs = {value.name for value in work.graph.output}
    new_names: dict[str, str] = {}
    for index, tensor in enumerate(work.graph.initializer):
        if _count(tensor) < OUTSIDE_ELEMENTS or tensor.name in outputs:
            continue
        # The importer drops characters of a name, and two that become alike get a number.
        new = f"w{index}"
        while new in names:
            new += "_"
        new_names[tensor.name] = new
        weights[new] = TensorProto()
        weights[new].CopyFrom(tensor)
        stub = TensorProto(name=new, dims=tensor.dims, data_type=tensor.data_type)
        stub.data_location = TensorProto.EXTERNAL
        stub.external_data.add(key="location", value="nowhere")
        tensor.CopyFrom(stub)
    _rename(work.graph, new_names)
    work.graph.name = ENTRY
    return Prepared(graph=work, weights=weights, folder=folder)


def write_archive(prepared: Prepared, path: Path) -> None:
    """Writes the weights as a parameter archive, from mapped files.

    Raises:
        PipelineError: An external file is missing or too short.
    """
    index = rt.ParameterIndex()
    for name, tensor in prepared.weights.items():
        index.add_buffer(name, values_of(tensor, prepared.folder))
    index.create_archive_file(str(path))


def without_operators(model: onnx.ModelProto, op_types: set[str]) -> onnx.ModelProto | None:
    """Returns the graph with what such operators compute as inputs instead.

    None if the type of one of these values is unknown, or if no such operator is there.
    """
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    known = {value.name: value for value in (*inferred.graph.value_info, *inferred.graph.output)}
    kept = [node for node in inferred.graph.node if node.op_type not in op_types]
    cut = [node for node in inferred.graph.node if node.op_type in op_types]
    values = [name for node in cut for name in node.output if name]
    if not kept or not values or any(name not in known for name in values):
        return None
    del inferred.graph.node[:]
    inferred.graph.node.extend(kept)
    inferred.graph.input.extend(known[name] for name in values)
    return inferred


def _refuse_foreign_operators(model: onnx.ModelProto) -> None:
    versions = {one.domain: one.version for one in model.opset_import}
    version = versions.get("", versions.get("ai.onnx", 1))
    missing = set()
    for node in model.graph.node:
        if node.domain not in _ONNX:
            missing.add(f"{node.domain}:{node.op_type}")
        elif not onnx.defs.has(node.op_type, version, ""):
            missing.add(f"{node.op_type} (opset {version})")
    if missing:
        raise UnsupportedOpError(f"IREE imports the operators of ONNX only, not {_listed(missing)}")


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _constants_to_initializers(graph: onnx.GraphProto) -> None:
    """Makes every Constant that is a tensor an initializer: it may be as large as one."""
    kept = []
    for node in graph.node:
        tensors = [one.t for one in node.attribute if one.name == "value"]
        if node.op_type != "Constant" or node.domain not in _ONNX or not tensors:
            kept.append(node)
            continue
        tensor = graph.initializer.add()
        tensor.CopyFrom(tensors[0])
        tensor.name = node.output[0]
    del graph.node[:]
    graph.node.extend(kept)


def _count(tensor: TensorProto) -> int:
    count = 1
    for size in tensor.dims:
        count *= size
    return count


def _names_of(graph: onnx.GraphProto) -> set[str]:
    names = {value.name for value in (*graph.input, *graph.output)}
    names |= {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        names |= {*node.input, *node.output}
        for attribute in node.attribute:
            if attribute.HasField("g"):
                names |= _names_of(attribute.g)
    return names


def _rename(graph: onnx.GraphProto, new_names: Mapping[str, str]) -> None:
    """Renames weights where they are used; as inputs, of before IR version 4, they are dropped."""
    kept = [value for value in graph.input if value.name not in new_names]
    del graph.input[:]
    graph.input.extend(kept)
    for node in graph.node:
        for position, name in enumerate(node.input):
            node.input[position] = new_names.get(name, name)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g, new_names)
