"""The element type of every value of a graph, and the types that an operator may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto

_NAMES: Mapping[int, str] = {
    TensorProto.FLOAT: "tensor(float)",
    TensorProto.FLOAT16: "tensor(float16)",
    TensorProto.BFLOAT16: "tensor(bfloat16)",
}


@dataclass(frozen=True, kw_only=True)
class TypeVariables:
    """For each input and output of a node: may it be the type that was asked about?

    A value may if its type is a variable of the operator, not fixed, and the variable may be that
    type. Outputs whose variable no input shares may not: nothing would say so to the operator.
    """

    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Returns value name -> element type, of initializers, inputs and everything computed."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=False).graph
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in (*inferred.value_info, *inferred.output, *inferred.input)
        if value.type.HasField("tensor_type")
    }
    types |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    for node in model.graph.node:
        if any(name and name not in types for name in node.output):
            floats = [types[n] for n in node.input if types.get(n) in _NAMES]
            # An operator that the package does not know: it most likely keeps its type.
            types |= {name: floats[0] for name in node.output if name not in types and floats}
    return types


def inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model without functions of its own: their bodies stand where they were called."""
    if not model.functions:
        return model
    from onnx.inliner import inline_local_functions

    return inline_local_functions(model)


def type_variables(
    node: onnx.NodeProto, opsets: Mapping[str, int], target: int
) -> TypeVariables | None:
    """Returns where a node may hold the element type `target`; None if its operator is unknown."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    try:
        version = opsets.get(domain, opsets.get("ai.onnx", 1))
        schema = onnx.defs.get_schema(node.op_type, version, domain)
    except onnx.defs.SchemaError:
        return None
    allowed = {
        one.type_param_str: _NAMES[target] in one.allowed_type_strs
        for one in schema.type_constraints
    }
    inputs = _spread(schema.inputs, len(node.input))
    bound = set(inputs)
    return TypeVariables(
        inputs=tuple(allowed.get(name, False) for name in inputs),
        outputs=tuple(
            allowed.get(name, False) and (name in bound or node.op_type == "Cast")
            for name in _spread(schema.outputs, len(node.output))
        ),
    )


def _spread(formal: Sequence[onnx.defs.OpSchema.FormalParameter], count: int) -> list[str]:
    """Returns the type variable of each actual parameter; the last formal one may be variadic."""
    names = [one.type_str for one in formal]
    return [names[min(index, len(names) - 1)] for index in range(count)]
