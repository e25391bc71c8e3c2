"""Asks a device to compute a little of everything whose number we know.

ggml promises no stable interface. What could change silently (the numbers of operations, the
layout of a struct) shows here, before an engine gives a wrong picture.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from sdkit_ggml.compiler.emitter import Emitter
from sdkit_ggml.compiler.evaluate import erf
from sdkit_ggml.instructions import GEGLU_ERF, UNARY
from sdkit_ggml.program import Program
from sdkit_ggml.runtime.binding import Library
from sdkit_ggml.runtime.devices import OfferedDevice
from sdkit_ggml.runtime.executor import Array, Executor

TOLERANCE = 2e-2
"""Wide enough for a device that computes in half precision, and far below what another operation
would give."""
ROWS, COLUMNS = 16, 32


def fault_of(library: Library, device: OfferedDevice) -> str:
    """Returns what the device computes wrongly, or "" if all is well."""
    values = np.linspace(-2, 2, ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    expected = _expected(values)
    program = _program(tuple(expected), "cpu" if device.kind == "cpu" else "gpu")
    executor = Executor(library, device, program, (memoryview(bytearray(256)),), threads=1)
    try:
        found = executor.run({"x": values})
    finally:
        executor.close()
    for name, wanted in expected.items():
        difference = float(np.abs(found[name] - wanted.ravel()).max())
        if not difference <= TOLERANCE:
            return f"{name} is off by {difference:.3g}"
    return ""


def _expected(x: Array) -> dict[str, Array]:
    sigmoid = 1 / (1 + np.exp(-x))
    gelu = 0.5 * x * (1 + erf(x / np.sqrt(2)))
    return {
        "abs": np.abs(x),
        "neg": -x,
        "tanh": np.tanh(x),
        "relu": np.maximum(x, 0),
        "sigmoid": sigmoid,
        "silu": x * sigmoid,
        "exp": np.exp(x),
        "gelu_erf": gelu,
        "glu": gelu * x,
        "add": x + x,
        "mul_mat": x @ x.T,
        "soft_max": np.exp(x) / np.exp(x).sum(-1, keepdims=True),
    }


def _program(names: tuple[str, ...], device: Literal["cpu", "gpu"]) -> Program:
    emitter = Emitter()
    x = emitter.tensor("f32", (COLUMNS, ROWS, 1, 1))
    outputs = {}
    for name in names:
        if name in UNARY:
            outputs[name] = emitter.emit("unary", [x], (UNARY[name],))
        elif name == "glu":
            outputs[name] = emitter.emit("glu", [x, x], (GEGLU_ERF,))
        elif name == "soft_max":
            outputs[name] = emitter.emit("soft_max", [x], (1.0,))
        else:
            outputs[name] = emitter.emit(name, [x, x])
    variant = emitter.finish(
        device, has_flash=False, weights=(), feeds={"x": x}, outputs=dict(outputs)
    )
    return Program(
        inputs=(),
        outputs=(),
        precision="fp32",
        weights_bytes=256,
        weights_digest="",
        host=(),
        constants={},
        variants=(variant,),
    )
