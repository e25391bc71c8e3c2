"""The weights of an engine: each constant once, in the order and type that its operation reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sdkit_ggml.compiler.graph import KEPT_BYTES, Array, Constant
from sdkit_ggml.program import Ne, dense_nb


@dataclass(frozen=True)
class Weight:
    """One tensor of the weights file.

    Attributes:
        origin: The initializer of the ONNX graph that it is made of; empty if computed.
        form: How: "", "transposed", "taps 0", ...; with `origin`, what a LoRA must follow.
        compute: Returns the array, float32 or int32, in C order: `ne` reversed.
    """

    origin: str
    form: str
    type: str
    ne: Ne
    compute: Callable[[], Array]

    @property
    def nbytes(self) -> int:
        return dense_nb(self.type, self.ne)[3] * self.ne[3]


class WeightTable:
    """Hands out one index for each different weight."""

    def __init__(self) -> None:
        self.weights: list[Weight] = []
        self._known: dict[tuple[object, ...], int] = {}

    def add(
        self,
        constant: Constant,
        form: str,
        kind: str,
        ne: Ne,
        compute: Callable[[Array], Array],
    ) -> int:
        """Returns the index of `compute(constant)` as a tensor of type `kind`."""
        key = (_identity(constant), form, kind, ne)
        if key not in self._known:
            self._known[key] = len(self.weights)
            self.weights.append(
                Weight(constant.origin, form, kind, ne, lambda: compute(_plain(constant)))
            )
        return self._known[key]


def _identity(constant: Constant) -> object:
    """Returns what tells constants apart: what each variant makes anew is known by its content."""
    if constant.origin or constant.nbytes > KEPT_BYTES:
        return id(constant)
    array = constant.array()
    return (array.dtype.name, array.shape, hashlib.sha256(array.tobytes()).digest())


def _plain(constant: Constant) -> Array:
    array = constant.array()
    if array.dtype.kind in "iub":
        return array.astype(np.int32) if array.dtype.kind != "b" else array.astype(np.float32)
    return array.astype(np.float32, copy=False)
