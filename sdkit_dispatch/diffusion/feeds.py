"""Values of a pipeline -> what a session declares, and back to float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sdkit_dispatch.contract import Session, TensorSpec
from sdkit_dispatch.errors import NumericError, PipelineError, RunError

Floats = NDArray[np.float32]
Value = NDArray[np.float32] | NDArray[np.int64]


def run_component(
    name: str, session: Session, values: Mapping[str, Value], *, where: str = ""
) -> dict[str, Floats]:
    """Runs a session and returns its outputs in float32, in the order that it declares.

    Args:
        name: The component, for messages.
        session: Its loaded engine.
        values: Everything the component might ask for; only what it declares is fed, in the dtype
            and form that it declares. A timestep may be a scalar, `[1]` or `[batch]`.
        where: For messages: " at step 3 of 8".

    Raises:
        PipelineError: The session declares an input that there is no value for.
        RunError: A value does not fit the declared shape.
        NumericError: An output has values that are not finite.
    """
    feeds = {spec.name: _feed(name, spec, values) for spec in session.inputs}
    outputs = session.run(feeds)
    ready = {spec.name: np.asarray(outputs[spec.name]) for spec in session.outputs}
    return {key: _finite(name, key, value, where) for key, value in ready.items()}


def first_output(
    component: str, outputs: Mapping[str, Floats], names: Sequence[str], rank: int
) -> Floats:
    """Returns the output with the first name that exists, else the first of that rank.

    Raises:
        PipelineError: There is none; names the outputs.
    """
    for name in names:
        if name in outputs:
            return outputs[name]
    for value in outputs.values():
        if value.ndim == rank:
            return value
    raise PipelineError(
        f"{component}: no output {' or '.join(names)}; its outputs are {', '.join(outputs)}",
        "export the pipeline in the layout of optimum (`optimum-cli export onnx`)",
    )


def _feed(component: str, spec: TensorSpec, values: Mapping[str, Value]) -> NDArray[np.generic]:
    if spec.name not in values:
        raise PipelineError(
            f"{component}: input {spec.name!r} is not one we can feed; known are "
            f"{', '.join(values)}",
            "export the pipeline in the layout of optimum (`optimum-cli export onnx`)",
        )
    value = values[spec.name]
    if value.ndim == 0 and spec.shape:
        value = np.full(spec.shape, value)
    if value.shape != spec.shape:
        raise RunError(
            f"{component}: input {spec.name!r} was built for {spec.shape}, "
            f"and the request gives {value.shape}",
            "build the component for the shapes of the request",
        )
    dtype = _numpy_dtype(component, spec)
    if value.dtype == dtype:
        return np.ascontiguousarray(value).reshape(spec.shape)
    if dtype.kind in "iu" and value.dtype.kind == "f":
        value = np.rint(value)  # samplers between two timesteps, a graph that takes whole ones
    with np.errstate(over="ignore"):  # what float16 cannot hold shows in the outputs
        return np.ascontiguousarray(value.astype(dtype)).reshape(spec.shape)


def _numpy_dtype(component: str, spec: TensorSpec) -> np.dtype[np.generic]:
    try:
        return np.dtype(spec.dtype)
    except TypeError as error:
        raise RunError(
            f"{component}: input {spec.name!r} has dtype {spec.dtype!r}, which numpy lacks",
            "build the component with float32 or float16 inputs",
        ) from error


def _finite(component: str, output: str, value: NDArray[np.generic], where: str) -> Floats:
    floats = np.ascontiguousarray(value, dtype=np.float32)
    is_finite = np.isfinite(floats)
    if not is_finite.all():
        bad = floats.size - int(is_finite.sum())
        raise NumericError(
            f"{component}: output {output!r} has {bad} of {floats.size} values that are not "
            f"finite{where}",
            f"build {component} at a safer precision (fp32)",
        )
    return floats
