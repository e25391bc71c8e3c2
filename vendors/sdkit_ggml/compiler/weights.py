"""The weights of an engine: each once, in the order and type that its operation reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from sdkit_ggml.compiler.graph import Array, Constant
from sdkit_ggml.compiler.recipes import formed
from sdkit_ggml.program import Ne, Program, StoredWeight, stored_bytes

WEIGHT_ALIGNMENT = 256
"""Of every weight in its file: what any device's driver asks of a storage buffer's offset."""
EXTRA_SHARE = 16
"""Weights that another engine's file lacks go into a second file if they are at most this small a
part of it; else all are written."""


@dataclass(frozen=True)
class Weight:
    """One tensor of the weights file; `compute` returns it, float32 or int32, `ne` reversed."""

    stored: StoredWeight
    compute: Callable[[], Array]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the weights of a program lie.

    Attributes:
        offsets: Of each weight of the table, in the data section of the weights file, which that of
            the extra file follows.
        stored: All that the weights file holds.
        weights: What is to be written into it; None: it is another engine's.
        extras: What is to be written into the extra file.
    """

    offsets: tuple[int, ...]
    stored: tuple[StoredWeight, ...]
    weights: tuple[Weight, ...] | None
    extras: tuple[Weight, ...] = ()


class WeightTable:
    """Hands out one index for each different weight."""

    def __init__(self) -> None:
        self.weights: list[Weight] = []
        self._known: dict[StoredWeight, int] = {}

    def add(self, constant: Constant, form: str, kind: str, ne: Ne) -> int:
        """Returns the index of a constant in some form as a tensor of type `kind`."""
        key = StoredWeight(
            type=kind,
            ne=ne,
            form=form,
            origin=constant.origin,
            # Numbers of a kind have one spelling here, or a second engine would not know it again.
            steps=constant.steps,
            content="" if constant.origin else _content(constant.array()),
        )
        if key not in self._known:
            self._known[key] = len(self.weights)
            self.weights.append(Weight(key, lambda: formed(constant.array(), form)))
        return self._known[key]


def placed(weights: Sequence[Weight], shared: Program | None) -> Placement:
    """Gives every weight its place: where `shared` has it, or in a file of their own."""
    if shared is not None:
        known = {_at(one, 0): one.offset for one in shared.weights}
        missing = [one for one in weights if one.stored not in known]
        extras = _in_a_row(missing)
        if section_bytes([one.stored for one in extras]) * EXTRA_SHARE <= shared.weights_bytes:
            for one, extra in zip(missing, extras, strict=True):
                known[one.stored] = shared.weights_bytes + extra.stored.offset
            return Placement(
                offsets=tuple(known[one.stored] for one in weights),
                stored=shared.weights,
                weights=None,
                extras=extras,
            )
    own = _in_a_row(weights)
    stored = tuple(one.stored for one in own)
    return Placement(offsets=tuple(one.offset for one in stored), stored=stored, weights=own)


def section_bytes(weights: Sequence[StoredWeight]) -> int:
    """Returns the size of the data section of a file that holds these."""
    return sum(_aligned(stored_bytes(one)) for one in weights)


def layout_digest(weights: Sequence[StoredWeight]) -> str:
    """Returns the sha256 of what a weights file holds, and where, whatever the numbers."""
    return hashlib.sha256(msgspec.json.encode(weights)).hexdigest()


def _in_a_row(weights: Sequence[Weight]) -> tuple[Weight, ...]:
    found, at = [], 0
    for one in weights:
        found.append(Weight(_at(one.stored, at), one.compute))
        at += _aligned(stored_bytes(one.stored))
    return tuple(found)


def _at(weight: StoredWeight, offset: int) -> StoredWeight:
    return msgspec.structs.replace(weight, offset=offset)


def _aligned(size: int) -> int:
    return -(-size // WEIGHT_ALIGNMENT) * WEIGHT_ALIGNMENT


def _content(array: Array) -> str:
    head = f"{array.dtype.name}{list(array.shape)}"
    digest = hashlib.sha256(head.encode())
    digest.update(bytes_of(array))
    return digest.hexdigest()


def bytes_of(array: Array) -> memoryview:
    """Returns the bytes of an array in C order, without a copy of what is in that order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
