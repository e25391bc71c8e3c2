"""What was built -> the note that stands beside it."""

from __future__ import annotations

import onnx

from sdkit_dispatch.contract import Shapes, TensorSpec
from sdkit_dispatch.graph.static_shapes import free_inputs
from sdkit_dispatch.graph.tensors import numpy_dtype_name
from sdkit_tensorrt.building import Built
from sdkit_tensorrt.engine_files import EngineNote


def note_of(built: Built, shapes: Shapes, plan_bytes: int) -> EngineNote:
    """Returns the note of an engine that serves `shapes`, and perhaps more."""
    profiles = tuple(dict(profile) for profile in built.profiles)
    is_static = (
        all(one.least == one.largest for profile in profiles for one in profile.values())
        and len(profiles) == 1
    )
    return EngineNote(
        inputs=tuple(_spec(value, tuple(shapes[value.name])) for value in free_inputs(built.graph)),
        outputs=tuple(_spec(value, built.outputs[value.name]) for value in built.graph.output),
        profiles=() if is_static else profiles,
        plan_bytes=plan_bytes,
    )


def _spec(value: onnx.ValueInfoProto, shape: tuple[int, ...]) -> TensorSpec:
    kind = numpy_dtype_name(value.type.tensor_type.elem_type)
    return TensorSpec(name=value.name, dtype=kind, shape=shape)
