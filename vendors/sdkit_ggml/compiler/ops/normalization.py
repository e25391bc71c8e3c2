"""Normalisations, softmax and reductions."""

from __future__ import annotations

import math
from typing import Any

from sdkit_ggml.compiler import evaluate as ev
from sdkit_ggml.compiler.layout import contiguous, transpose
from sdkit_ggml.compiler.lowering import Lowering
from sdkit_ggml.compiler.values import Unsupported, Value


def group_norm(low: Lowering, x: str, *, groups: int, epsilon: float) -> Value:
    return _grouped(low, low.value(x), groups, epsilon)


def _grouped(low: Lowering, value: Value, groups: int, epsilon: float) -> Value:
    n, c, *spatial = value.shape
    size = math.prod(spatial)
    inner = spatial[-1] if spatial else 1
    operand = low.flat(value, (inner, size // inner, c, n))
    ref = low.emitter.emit("group_norm", [operand], (groups, epsilon))
    return low.fresh(ref, value.shape)


def _affine(low: Lowering, value: Value, scale: str, bias: str) -> Value:
    """Multiplies and adds one number a channel (axis 1)."""
    for name, operation in ((scale, "mul"), (bias, "add")):
        if name:
            one = low.value(name)
            wide = low.reshaped(one, (one.layout.size, *(1,) * (len(value.shape) - 2)))
            value = low.binary(operation, value, wide)
    return value


def instance_normalization(
    low: Lowering, x: str, scale: str, bias: str, *, epsilon: float = 1e-5
) -> Value:
    value = low.value(x)
    return _affine(low, _grouped(low, value, value.shape[1], epsilon), scale, bias)


def group_normalization(
    low: Lowering,
    x: str,
    scale: str,
    bias: str,
    *,
    num_groups: int,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Value:
    value = low.value(x)
    if low.graph.type_of(scale).shape != (value.shape[1],):
        raise Unsupported("scales groups, not channels (before opset 21)")
    return _affine(low, _grouped(low, value, num_groups, epsilon), scale, bias)


def normalize(low: Lowering, x: str, *, epsilon: float) -> Value:
    """Subtracts the mean of the last axis and divides by its deviation."""
    value = low.value(x)
    inner = value.shape[-1]
    operand = low.flat(value, (inner, value.layout.size // inner))
    return low.fresh(low.emitter.emit("norm", [operand], (epsilon,)), value.shape)


def layer_normalization(
    low: Lowering,
    x: str,
    scale: str,
    bias: str = "",
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> list[Value]:
    result = _normalized(low, "norm", x, scale, bias, axis, epsilon)
    if not any(low.is_used(name) for name in low.node.outputs[1:]):
        return [result]
    value = low.value(x)
    place = axis % len(value.shape)
    inner = math.prod(value.shape[place:])
    shape = (*value.shape[:place], *(1,) * (len(value.shape) - place))
    rows = (inner, value.layout.size // inner)
    mean = low.fresh(low.emitter.emit("mean", [low.flat(value, rows)]), shape)
    square = low.unary("sqr", low.binary("sub", value, mean))
    variance = low.fresh(low.emitter.emit("mean", [low.flat(square, rows)]), shape)
    deviation = low.unary("sqrt", low.scaled(variance, 1.0, epsilon))
    ones = low.scaled(deviation, 0.0, 1.0)
    return [result, mean, low.binary("div", ones, deviation)]


def rms_normalization(
    low: Lowering,
    x: str,
    scale: str,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Value:
    return _normalized(low, "rms_norm", x, scale, "", axis, epsilon)


def _normalized(
    low: Lowering, name: str, x: str, scale: str, bias: str, axis: int, epsilon: float
) -> Value:
    value = low.value(x)
    place = axis % len(value.shape)
    inner = math.prod(value.shape[place:])
    operand = low.flat(value, (inner, value.layout.size // inner))
    result = low.fresh(low.emitter.emit(name, [operand], (epsilon,)), value.shape)
    result = low.binary("mul", result, low.value(scale))
    return low.binary("add", result, low.value(bias)) if bias else result


def softmax(low: Lowering, x: str, *, axis: int = -1, flattens: bool = False) -> Value:
    value = low.value(x)
    rank = len(value.shape)
    place = axis % rank
    if flattens:
        outer, inner = ev.flat_shape(value.shape, place)
        flat = low.flat(value, (inner, outer))
        return low.fresh(low.emitter.emit("soft_max", [flat], (1.0,)), value.shape)
    moved = _last(value, place)
    inner = moved.shape[-1]
    operand = low.flat(moved, (inner, moved.layout.size // inner))
    result = low.fresh(low.emitter.emit("soft_max", [operand], (1.0,)), moved.shape)
    return _back(result, place)


def reduce(name: str, scale_of: Any = None) -> Any:  # Any: the type of a function of this module
    """Returns the function of a reduction that ggml has over rows."""

    def lower(
        low: Lowering, x: str, axes: str = "", *, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Value:
        value = low.value(x)
        rank = len(value.shape)
        constant = low.constant(axes) if axes else None
        if axes and constant is None:
            raise Unsupported("reduces axes that are not constant")
        given = [] if constant is None else constant.array().ravel().tolist()
        if not given and noop_with_empty_axes:
            return value
        gone = ev.normal_axes(given, rank) if given else list(range(rank))
        kept = [axis for axis in range(rank) if axis not in gone]
        moved = Value(value.buffer, transpose(value.layout, [*kept, *gone]), value.type)
        inner = math.prod(value.shape[axis] for axis in gone)
        ref = low.emitter.emit(name, [low.flat(moved, (inner, value.layout.size // inner))])
        shape = [value.shape[axis] for axis in kept]
        if keepdims:
            shape = [1 if axis in gone else size for axis, size in enumerate(value.shape)]
        return Value(ref.buffer, contiguous(shape))

    return lower


def global_average_pool(low: Lowering, x: str) -> Value:
    value = low.value(x)
    n, c, *spatial = value.shape
    ref = low.emitter.emit("mean", [low.flat(value, (math.prod(spatial), n * c))])
    return Value(ref.buffer, contiguous((n, c, *(1,) * len(spatial))))


def _last(value: Value, axis: int) -> Value:
    order = [*(one for one in range(len(value.shape)) if one != axis), axis]
    return Value(value.buffer, transpose(value.layout, order), value.type)


def _back(value: Value, axis: int) -> Value:
    rank = len(value.shape)
    order = [*range(axis), rank - 1, *range(axis, rank - 1)]
    return Value(value.buffer, transpose(value.layout, order), value.type)
