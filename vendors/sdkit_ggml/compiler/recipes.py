"""How a weight is made of an initializer, as data.

It is kept with every engine: a weight is known again in another one, and is made again of other
weights, without looking at the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
_BLOCK_ELEMENTS = 1 << 16
"""Of filters that are read at once."""


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
    return _in_blocks(array, partial(_row, index=int(form.removeprefix(_TAP))))


def _row(filters: Array, index: int) -> Array:
    row: Any = filters[:, :, index]  # Any: numpy.ndarray
    return np.asarray(row.transpose(0, 2, 1))


def _mix(weights: Sequence[float]) -> Callable[[Array], Array]:
    def mix(filters: Array) -> Array:
        mixed: Any = 0.0  # Any: numpy.ndarray
        for index, weight in enumerate(weights):
            if weight:
                mixed = mixed + weight * _row(filters, index).astype(np.float64)
        return np.asarray(mixed, np.float32)

    return lambda array: _in_blocks(array, mix)


def _in_blocks(array: Array, make: Callable[[Array], Array]) -> Array:
    """Returns what `make` makes of each filter of [OC, C, KH, KW], as [OC, n].

    A few filters at a time: what lies between stays in the processor's cache, and memory that is
    touched for the first time costs more than the arithmetic.
    """
    if array.ndim == 3:
        array = array[:, :, None, :]
    channels = array.shape[0]
    made = np.empty((channels, array.shape[1] * array.shape[3]), np.float32)
    step = max(1, _BLOCK_ELEMENTS * channels // max(1, array.size))
    for first in range(0, channels, step):
        block = make(array[first : first + step])
        made[first : first + step] = block.reshape(block.shape[0], -1)
    return made


_FORMS: Mapping[str, Callable[[Array], Array]] = {
    PLAIN: lambda array: array,
    TRANSPOSED: lambda array: array.T,
    **{form: _mix(weights) for form, weights in MIXES.items()},
}
