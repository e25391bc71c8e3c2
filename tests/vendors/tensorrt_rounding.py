"""Emulates a half-precision graph in float32: every value that would be half is rounded to it.

ONNX Runtime's CPU provider has no bfloat16 kernels, and computes float16 graphs in float32 without
rounding between nodes; a GPU rounds the result of every node, and sums in float32, as here.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def rounded_graph(path: Path) -> bytes:
    """Returns the graph of `path` in float32 with a rounding after every half-precision value."""
    model = onnx.load(path)
    graph = model.graph
    inferred = onnx.shape_inference.infer_shapes(model).graph
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in (*inferred.value_info, *graph.input, *graph.output)
    }
    nodes: list[onnx.NodeProto] = []
    for tensor in graph.initializer:
        if tensor.data_type in HALVES:
            nodes.append(helper.make_node("Cast", [tensor.name], [f"{tensor.name}_f"], to=1))
            types[tensor.name] = tensor.data_type
    for value in graph.input:
        if types[value.name] in HALVES:
            nodes.append(helper.make_node("Cast", [value.name], [f"{value.name}_f"], to=1))
    for node in graph.node:
        inputs, outputs = list(node.input), list(node.output)
        node.input[:] = [f"{n}_f" if types.get(n) in HALVES else n for n in inputs]
        half = next((types[n] for n in outputs if types.get(n) in HALVES), None)
        node.output[:] = [f"{n}_exact" if types.get(n) in HALVES else n for n in outputs]
        if node.op_type == "Cast" and half is not None:
            node.attribute[0].i = TensorProto.FLOAT
        nodes.append(node)
        for name in outputs:
            if types.get(name) in HALVES:
                to = types[name]
                nodes.append(helper.make_node("Cast", [f"{name}_exact"], [name], to=to))
                nodes.append(helper.make_node("Cast", [name], [f"{name}_f"], to=1))
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]
    return bytes(model.SerializeToString())
