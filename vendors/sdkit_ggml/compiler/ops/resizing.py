"""Resize and Upsample: every mode is a linear map along each axis, known at compile time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sdkit_ggml.compiler.graph import Array, Constant
from sdkit_ggml.compiler.layout import transpose
from sdkit_ggml.compiler.lowering import Lowering
from sdkit_ggml.compiler.ops.linear import product
from sdkit_ggml.compiler.ops.movement import rows_of
from sdkit_ggml.compiler.values import Unsupported, Value


def resize(
    low: Lowering,
    x: str,
    roi: str = "",
    scales: str = "",
    sizes: str = "",
    *,
    mode: str = "nearest",
    coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    antialias: int = 0,
    axes: Sequence[int] | None = None,
    keep_aspect_ratio_policy: str = "stretch",
    extrapolation_value: float = 0.0,
) -> Value:
    """Source: ONNX Resize-19, whose formulas these are."""
    value = low.value(x)
    shape = low.graph.types[low.node.output].shape
    rank = len(value.shape)
    chosen = list(range(rank)) if axes is None else [axis % rank for axis in axes]
    given = low.constant(scales) if scales else None
    factors = [new / old for new, old in zip(shape, value.shape, strict=True)]
    if given is not None and given.size:
        for axis, factor in zip(chosen, given.array().tolist(), strict=True):
            factors[axis] = factor
    elif keep_aspect_ratio_policy != "stretch" and chosen:
        asked = low.constant(sizes)
        assert asked is not None
        ratios = [
            size / value.shape[axis]
            for axis, size in zip(chosen, asked.array().tolist(), strict=True)
        ]
        kept = min(ratios) if keep_aspect_ratio_policy == "not_larger" else max(ratios)
        for axis in chosen:
            factors[axis] = kept
    if _doubles(factors, mode, coordinate_transformation_mode, nearest_mode):
        return _upscaled(low, value, int(factors[-1]))
    crop = coordinate_transformation_mode == "tf_crop_and_resize"
    window = low.constant(roi) if crop and roi else None
    ends = None if window is None else window.array().reshape(2, -1)
    for axis, (size, factor) in enumerate(zip(shape, factors, strict=True)):
        if size == value.shape[axis] and factor == 1 and not crop:
            continue
        old = value.shape[axis]
        place = chosen.index(axis) if axis in chosen else None
        span = (0.0, 1.0) if ends is None or place is None else tuple(ends[:, place].tolist())
        at = _coordinates(coordinate_transformation_mode, size, old, factor, span)
        if crop and ((at < 0) | (at > old - 1)).any():
            raise Unsupported("extrapolates beyond the picture")
        if mode == "nearest":
            value = rows_of(low, value, axis, _nearest(at, old, nearest_mode))
        else:
            shrink = min(factor, 1.0) if antialias else 1.0
            matrix = _matrix(at, old, mode, cubic_coeff_a, shrink, bool(exclude_outside))
            value = _along(low, value, axis, matrix)
    return value


def upsample(low: Lowering, x: str, scales: str, *, mode: str = "nearest") -> Value:
    return resize(
        low,
        x,
        scales=scales,
        mode=mode,
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )


def _doubles(factors: Sequence[float], mode: str, coordinates: str, rounding: str) -> bool:
    """Whether ggml's own operation does it: nearest neighbours, one whole factor, two axes."""
    same = len(factors) >= 2 and factors[-1] == factors[-2] and set(factors[:-2]) <= {1.0}
    if mode != "nearest" or not same or not float(factors[-1]).is_integer():
        return False
    exact = coordinates == "asymmetric" and rounding == "floor"
    centred = coordinates in ("half_pixel", "half_pixel_symmetric") and rounding.startswith("round")
    return factors[-1] >= 1 and (exact or centred)


def _upscaled(low: Lowering, value: Value, factor: int) -> Value:
    if factor == 1:
        return value
    *outer, h, w = value.shape
    ref = low.emitter.emit("upscale", [low.flat(value, (w, h, math.prod(outer)))], (factor,))
    return low.fresh(ref, (*outer, h * factor, w * factor))


def _coordinates(mode: str, size: int, old: int, factor: float, span: tuple[float, ...]) -> Array:
    """Returns where each new index lies among the old ones."""
    index = np.arange(size, dtype=np.float64)
    start, end = span
    length = factor * old
    if mode == "asymmetric":
        return index / factor
    if mode == "align_corners":
        return index * (old - 1) / (length - 1) if length != 1 else np.zeros(size)
    if mode == "tf_crop_and_resize":
        if size == 1:
            return np.full(1, 0.5 * (start + end) * (old - 1))
        return start * (old - 1) + index * (end - start) * (old - 1) / (size - 1)
    if mode == "pytorch_half_pixel":
        return (index + 0.5) / factor - 0.5 if size > 1 else np.zeros(size)
    if mode == "half_pixel_symmetric":
        offset = old / 2 * (1 - size / length)
        return offset + (index + 0.5) / factor - 0.5
    if mode == "half_pixel":
        return (index + 0.5) / factor - 0.5
    raise Unsupported(f"places pixels by {mode}")


def _nearest(at: Array, old: int, rounding: str) -> Array:
    rounded = {
        "round_prefer_floor": lambda: np.ceil(at - 0.5),
        "round_prefer_ceil": lambda: np.floor(at + 0.5),
        "floor": lambda: np.floor(at),
        "ceil": lambda: np.ceil(at),
    }[rounding]()
    return np.clip(rounded, 0, old - 1).astype(np.int32)


def _matrix(at: Array, old: int, mode: str, a: float, shrink: float, excludes: bool) -> Array:
    """Returns how much of each old index (columns) goes into each new one (rows)."""
    if mode not in ("linear", "cubic"):
        raise Unsupported(f"resizes by {mode}")
    reach = (1 if mode == "linear" else 2) / shrink
    matrix = np.zeros((len(at), old))
    for row, center in enumerate(at):
        first = math.floor(center - reach) + 1
        taps = np.arange(first, math.ceil(center + reach))
        distance = np.abs(taps - center) * shrink
        weight = np.maximum(1 - distance, 0) if mode == "linear" else _cubic(distance, a)
        if excludes:
            weight = np.where((taps < 0) | (taps >= old), 0, weight)
        weight = weight / weight.sum()
        np.add.at(matrix[row], np.clip(taps, 0, old - 1), weight)
    return matrix


def _cubic(distance: Array, a: float) -> Array:
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


def _along(low: Lowering, value: Value, axis: int, matrix: Array) -> Value:
    """Returns the product with a matrix along one axis."""
    rank = len(value.shape)
    order = [*(one for one in range(rank) if one != axis), axis]
    moved = Value(value.buffer, transpose(value.layout, order), value.type)
    weights = low.constant_value(Constant.of(np.ascontiguousarray(matrix.T, np.float32)))
    result = product(low, moved, weights)
    back = [*range(axis), rank - 1, *range(axis, rank - 1)]
    return Value(result.buffer, transpose(result.layout, back), result.type)
