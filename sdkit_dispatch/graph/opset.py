"""Raises the opset of a graph where that changes nothing but the types that operators may have."""

from __future__ import annotations

import onnx

LEAST_OPSET = 18
"""From an older one, reductions and Split would change their meaning."""
IR_VERSION_OF_OPSET_22 = 10
_CHANGED_MEANING = frozenset({"GroupNormalization"})
"""Same inputs and attributes, other meaning: its scale is per group in opset 18, per channel in 21.

Source: ONNX operator GroupNormalization-18 and -21.
"""


def raise_opset(model: onnx.ModelProto, version: int) -> bool:
    """Declares opset `version` if every operator means the same there; False leaves it as it is."""
    own = next((one for one in model.opset_import if one.domain in ("", "ai.onnx")), None)
    if own is None or own.version >= version:
        return own is not None
    if own.version < LEAST_OPSET:
        return False
    op_types = {node.op_type for node in model.graph.node if node.domain in ("", "ai.onnx")}
    if not all(_is_same(op_type, own.version, version) for op_type in op_types):
        return False
    own.version = version
    model.ir_version = max(model.ir_version, IR_VERSION_OF_OPSET_22)
    return True


def _is_same(op_type: str, old_version: int, new_version: int) -> bool:
    old = onnx.defs.get_schema(op_type, old_version)
    new = onnx.defs.get_schema(op_type, new_version)
    if old.since_version == new.since_version:
        return True
    if op_type in _CHANGED_MEANING:
        return False
    names = [one.name for one in old.inputs]
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    return (
        [one.name for one in new.inputs][: len(names)] == names
        and all(one.option == optional for one in new.inputs[len(names) :])
        and [one.name for one in old.outputs] == [one.name for one in new.outputs]
        and set(old.attributes) <= set(new.attributes)
        and not any(
            one.required for key, one in new.attributes.items() if key not in old.attributes
        )
    )
