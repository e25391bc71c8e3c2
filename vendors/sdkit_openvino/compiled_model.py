"""What a model is compiled with, and what the compiled one says it really is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sdkit_dispatch.contract import Precision, TensorSpec
from sdkit_dispatch.errors import CompileError
from sdkit_openvino.runtime import RUNTIME, ov

TYPES: dict[str, str] = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
"""Our precision -> OpenVINO's element type."""


def properties_for(precision: Precision, family: str, *, threads: int | None) -> dict[str, Any]:
    """Returns the properties of a compilation or an import (Any: each has its own type).

    The precision is always said: left alone, a processor with AMX would choose bf16.
    """
    properties: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
    # An NPU computes in half precision and refuses to be told so.
    if family != "NPU":
        properties["INFERENCE_PRECISION_HINT"] = TYPES[precision]
    if family == "CPU" and threads is not None:
        properties["INFERENCE_NUM_THREADS"] = threads
    return properties


def precision_of(compiled: ov.CompiledModel) -> str:
    """Returns the precision that really runs, e.g. "fp32", or OpenVINO's word for another type."""
    try:
        kind = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    except RuntimeError:
        kind = "f16"  # the NPU's plugin has no such property, and one precision
    return next((ours for ours, theirs in TYPES.items() if theirs == kind), str(kind))


def check_runs_as_asked(compiled: ov.CompiledModel, name: str, precision: Precision) -> None:
    """Refuses a model that was compiled for another device or precision than asked.

    Precision hints that a processor cannot follow are accepted and ignored (2026.4.1).

    Raises:
        CompileError: Says what would run.
    """
    devices = [str(one) for one in compiled.get_property("EXECUTION_DEVICES")]
    # One GPU alone is listed as "GPU" and executes as "GPU.0".
    if devices not in ([name], [f"{name}.0"], [name.removesuffix(".0")]):
        raise CompileError(f"openvino: asked {RUNTIME} for {name}, it chose {', '.join(devices)}")
    runs = precision_of(compiled)
    if runs != precision:
        raise CompileError(
            f"openvino: asked {RUNTIME} for {precision} on {name}, it would run {runs}",
            hint=f"ask for {runs}",
        )


def facts_of(compiled: ov.CompiledModel, device_name: str) -> dict[str, str]:
    """Returns what runs, as the runtime reports it."""
    facts = {
        "device": device_name,
        "precision": precision_of(compiled),
        "runtime": RUNTIME,
        "openvino_device": ", ".join(compiled.get_property("EXECUTION_DEVICES")),
    }
    supported = compiled.get_property("SUPPORTED_PROPERTIES")
    for fact, key in {"threads": "INFERENCE_NUM_THREADS", "streams": "NUM_STREAMS"}.items():
        if key in supported:
            facts[fact] = str(compiled.get_property(key))
    return facts


def specs_of(names: Sequence[str], ports: Sequence[ov.Output]) -> tuple[TensorSpec, ...]:
    """Returns the inputs or outputs of a model under the names of the ONNX graph.

    Raises:
        CompileError: The shape of one depends on values, or they are not as many as `names`.
    """
    if len(names) != len(ports):
        raise CompileError(f"openvino: expected {list(names)}, the model has {len(ports)} of them")
    for name, port in zip(names, ports, strict=True):
        if port.partial_shape.is_dynamic:
            raise CompileError(
                f'openvino: the shape of "{name}" depends on values: {port.partial_shape}'
            )
    return tuple(
        TensorSpec(name=name, dtype=_dtype_name(port), shape=tuple(port.shape))
        for name, port in zip(names, ports, strict=True)
    )


def check_same_tensors(specs: Sequence[TensorSpec], ports: Iterable[ov.Output]) -> None:
    """Refuses an imported model whose inputs or outputs are not the noted ones.

    Raises:
        ValueError: Says what was noted and what the model has.
    """
    noted = [(spec.dtype, spec.shape) for spec in specs]
    have = [(_dtype_name(port), tuple(port.shape)) for port in ports]
    if noted != have:
        raise ValueError(f"noted {noted}, but the model has {have}")


def _dtype_name(port: ov.Output) -> str:
    return str(np.dtype(port.element_type.to_dtype()).name)
