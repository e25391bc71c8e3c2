"""How a weight is made of an initializer, as data.

It is kept with every engine: a weight is known again in another one, and is made again of other
weights, without looking at the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sdkit_ggml.compiler.evaluate import EVALUATE
from sdkit_ggml.compiler.graph import Array
from sdkit_ggml.program import WeightStep

PLAIN, TRANSPOSED = "", "transposed"
MIXES: Mapping[str, tuple[float, float, float]] = {
    "pair 0": (1, 0, 0),
    "pair 1": (0.5, 0.5, 0.5),
    "pair 2": (0.5, -0.5, 0.5),
    "pair 3": (0, 0, 1),
}
"""The four filters of F(2, 3), each from the three rows of the real one. Source: Lavin and Gray,
"Fast Algorithms for Convolutional Neural Networks", 2015, section 4.1."""
_TAP = "tap "


def tap(index: int) -> str:
    """Returns the form that is one row of a filter."""
    return f"{_TAP}{index}"


def stepped(array: Array, steps: Sequence[WeightStep]) -> Array:
    """Returns what operators of the graph make of an initializer."""
    for step in steps:
        inputs = [
            None if one is None else np.array(one[1], np.int64).reshape(one[0])
            for one in step.inputs
        ]
        array = EVALUATE[step.op_type](array, *inputs, **dict(step.attributes))
    return array


def formed(array: Array, form: str) -> Array:
    """Returns a weight as its operation reads it, float32 or int32, `ne` reversed in C order."""
    return _FORMS[form](_plain(array)) if form in _FORMS else _tap(_plain(array), form)


def _plain(array: Array) -> Array:
    if array.dtype.kind in "iu":
        return array.astype(np.int32)
    return array.astype(np.float32, copy=False)


def _tap(array: Array, form: str) -> Array:
    """Returns a row of a filter [OC, C, KH, KW] as [OC, KW * C]."""
    if array.ndim == 3:
        array = array[:, :, None, :]
    row: Any = array[:, :, int(form.removeprefix(_TAP))]  # Any: numpy.ndarray
    return np.asarray(row.transpose(0, 2, 1).reshape(array.shape[0], -1))


def _mix(weights: Sequence[float]) -> Callable[[Array], Array]:
    def mix(array: Array) -> Array:
        rows = [_tap(array, tap(index)).astype(np.float64) for index in range(3)]
        mixed = sum(weight * row for weight, row in zip(weights, rows, strict=True))
        return np.asarray(mixed, np.float32)

    return mix


_FORMS: Mapping[str, Callable[[Array], Array]] = {
    PLAIN: lambda array: array,
    TRANSPOSED: lambda array: array.T,
    **{form: _mix(weights) for form, weights in MIXES.items()},
}
