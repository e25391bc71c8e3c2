"""ONNX operators in numpy: for what is constant, and for integers that the host computes.

One function an operator, in the form of its newest version; `graph.py` has brought older ones
into it. Nothing here is fast: constants of a graph are small, but for its weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sdkit_dispatch.graph.tensors import numpy_dtype_name
from sdkit_ggml.compiler.graph import Array

Result = Any  # an Array, or a tuple of them: one for each output


def reshape(data: Array, shape: Array, *, allowzero: int = 0) -> Array:
    return data.reshape(resolve_shape(data.shape, shape.tolist(), allowzero))


def resolve_shape(old: Sequence[int], asked: Sequence[int], allowzero: int = 0) -> tuple[int, ...]:
    """Returns the shape that Reshape's second input means: 0 is "as before", -1 "the rest"."""
    if allowzero:
        sizes = list(asked)
    else:
        sizes = [old[i] if size == 0 else size for i, size in enumerate(asked)]
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = math.prod(old) // known if known else 0
    if math.prod(sizes) != math.prod(old):
        raise ValueError(f"{list(old)} does not reshape to {list(asked)}")
    return tuple(sizes)


def normal_axes(axes: Sequence[int], rank: int) -> list[int]:
    """Returns axes counted from the front, in order."""
    found = sorted(axis + rank if axis < 0 else axis for axis in axes)
    if any(not 0 <= axis < rank for axis in found) or len(set(found)) != len(found):
        raise ValueError(f"there are no axes {list(axes)} of {rank}")
    return found


def slices(
    shape: Sequence[int],
    starts: Array,
    ends: Array,
    axes: Array | None = None,
    steps: Array | None = None,
) -> tuple[slice, ...]:
    """Returns what Slice takes of each axis, with start, stop and step spelled out."""
    chosen = list(range(len(starts))) if axes is None else axes.tolist()
    strides = [1] * len(starts) if steps is None else steps.tolist()
    found = [slice(0, size, 1) for size in shape]
    for axis, start, end, step in zip(chosen, starts.tolist(), ends.tolist(), strides, strict=True):
        size = shape[axis]
        first, stop, stride = slice(start, end, step).indices(size)
        if step < 0 and end < -size:
            stop = -1
        found[axis] = slice(first, stop, stride)
    return tuple(found)


def take_slice(
    data: Array,
    starts: Array,
    ends: Array,
    axes: Array | None = None,
    steps: Array | None = None,
) -> Array:
    picked = slices(data.shape, starts, ends, axes, steps)
    indices = [np.arange(one.start, one.stop, one.step) for one in picked]
    return data[np.ix_(*indices)] if indices else data


def cast(data: Array, *, to: int, **_: Any) -> Array:
    target = np.dtype(numpy_dtype_name(to))
    return data.astype(target)


def squeeze(data: Array, axes: Array | None = None) -> Array:
    if axes is None:
        return np.squeeze(data)
    return np.squeeze(data, tuple(normal_axes(axes.tolist(), data.ndim)))


def unsqueeze(data: Array, axes: Array) -> Array:
    rank = data.ndim + axes.size
    for axis in normal_axes(axes.ravel().tolist(), rank):
        data = np.expand_dims(data, axis)
    return data


def gather(data: Array, indices: Array, *, axis: int = 0) -> Array:
    return np.take(data, indices, axis=axis)


def gather_nd(data: Array, indices: Array, *, batch_dims: int = 0) -> Array:
    if batch_dims:
        return np.stack(
            [gather_nd(d, i, batch_dims=batch_dims - 1) for d, i in zip(data, indices, strict=True)]
        )
    found: Array = data[tuple(np.moveaxis(indices, -1, 0))]
    return found


def concat(*parts: Array, axis: int) -> Array:
    return np.concatenate(parts, axis)


def split(
    data: Array, sizes: Array | None = None, *, axis: int = 0, num_outputs: int = 0
) -> tuple[Array, ...]:
    parts = split_sizes(data.shape[axis], None if sizes is None else sizes.tolist(), num_outputs)
    return tuple(np.split(data, np.cumsum(parts)[:-1], axis))


def split_sizes(size: int, sizes: Sequence[int] | None, count: int) -> list[int]:
    """Returns the sizes of the parts; the last one is smaller where `count` does not divide."""
    if sizes is not None:
        if sum(sizes) != size:
            raise ValueError(f"parts of {list(sizes)} are not {size}")
        return list(sizes)
    part = -(-size // count)
    return [part] * (count - 1) + [size - part * (count - 1)]


def where(condition: Array, a: Array, b: Array) -> Array:
    return np.where(condition, a, b)


def expand(data: Array, shape: Array) -> Array:
    wide = np.broadcast_shapes(data.shape, tuple(shape.tolist()))
    return np.broadcast_to(data, wide)


def constant_of_shape(shape: Array, *, value: Any = None) -> Array:
    from onnx.numpy_helper import to_array

    fill = np.zeros(1, np.float32) if value is None else to_array(value)
    return np.full(tuple(shape.tolist()), fill.ravel()[0], fill.dtype)


def arange(start: Array, limit: Array, delta: Array) -> Array:
    return np.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


def trilu(data: Array, k: Array | None = None, *, upper: int = 1) -> Array:
    offset = 0 if k is None else int(k.item())
    return np.triu(data, offset) if upper else np.tril(data, offset)


def arg_max(data: Array, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Array:
    if select_last_index:
        found = data.shape[axis] - 1 - np.argmax(np.flip(data, axis), axis)
    else:
        found = np.argmax(data, axis)
    return np.asarray(np.expand_dims(found, axis) if keepdims else found, np.int64)


def divide(a: Array, b: Array) -> Array:
    if np.issubdtype(a.dtype, np.integer):
        # ONNX's integer division truncates as C's does.
        quotient = np.abs(a) // np.abs(b)
        return np.asarray(np.sign(a) * np.sign(b) * quotient, a.dtype)
    return np.asarray(np.divide(a, b), a.dtype)


def power(a: Array, b: Array) -> Array:
    return np.power(a, b).astype(a.dtype)


def modulo(a: Array, b: Array, *, fmod: int = 0) -> Array:
    return np.fmod(a, b) if fmod else np.mod(a, b)


def clip(data: Array, low: Array | None = None, high: Array | None = None) -> Array:
    if low is not None:
        data = np.maximum(data, low)
    return data if high is None else np.minimum(data, high)


def pad(
    data: Array,
    pads: Array,
    value: Array | None = None,
    axes: Array | None = None,
    *,
    mode: str = "constant",
) -> Array:
    if mode != "constant":
        raise ValueError(f"pads with {mode}")
    widths = pad_widths(pads.tolist(), data.ndim, None if axes is None else axes.tolist())
    fill = 0 if value is None else value.item()
    return np.pad(data, widths, constant_values=fill)


def pad_widths(pads: Sequence[int], rank: int, axes: Sequence[int] | None) -> list[tuple[int, int]]:
    """Returns the padding before and after each axis."""
    chosen = list(range(rank)) if axes is None else [a % rank for a in axes]
    widths = [(0, 0)] * rank
    for place, axis in enumerate(chosen):
        widths[axis] = (pads[place], pads[place + len(chosen)])
    return widths


def _reduce(function: Callable[..., Array]) -> Callable[..., Array]:
    def reduce(
        data: Array, axes: Array | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Array:
        if axes is None or not axes.size:
            if noop_with_empty_axes:
                return data
            chosen = tuple(range(data.ndim))
        else:
            chosen = tuple(normal_axes(axes.tolist(), data.ndim))
        return np.asarray(function(data, axis=chosen, keepdims=bool(keepdims)), data.dtype)

    return reduce


def sigmoid(data: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-data)), data.dtype)


def erf(data: Array) -> Array:
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(data), data.dtype)


def _plain(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *inputs: np.asarray(function(*inputs))


ROW_NUMBERS = "RowNumbers"
"""Our own operator: indices as GatherND has them -> numbers of rows."""


def row_numbers(indices: Array, *, sizes: Sequence[int]) -> Array:
    limits = np.asarray(sizes, np.int64)
    positive = np.where(indices < 0, indices + limits, indices)
    if ((positive < 0) | (positive >= limits)).any():
        raise ValueError(f"indices beyond {list(sizes)}")
    return np.asarray(np.ravel_multi_index(tuple(np.moveaxis(positive, -1, 0)), tuple(sizes)))


EVALUATE: dict[str, Callable[..., Result]] = {
    "Abs": _plain(np.abs),
    "Add": _plain(np.add),
    "And": _plain(np.logical_and),
    "ArgMax": arg_max,
    "Cast": cast,
    "CastLike": lambda data, like, **_: data.astype(like.dtype),
    "Ceil": _plain(np.ceil),
    "Clip": clip,
    "Concat": concat,
    "ConstantOfShape": constant_of_shape,
    "Cos": _plain(np.cos),
    "CumSum": lambda data, axis, **_: np.cumsum(data, int(axis), dtype=data.dtype),
    "Div": divide,
    "Equal": _plain(np.equal),
    "Erf": erf,
    "Exp": _plain(np.exp),
    "Expand": expand,
    "Flatten": lambda data, *, axis=1: data.reshape(flat_shape(data.shape, axis)),
    "Floor": _plain(np.floor),
    "Gather": gather,
    "GatherND": gather_nd,
    "Greater": _plain(np.greater),
    "GreaterOrEqual": _plain(np.greater_equal),
    "Identity": lambda data: data,
    "IsNaN": _plain(np.isnan),
    "Less": _plain(np.less),
    "LessOrEqual": _plain(np.less_equal),
    "Log": _plain(np.log),
    "MatMul": _plain(np.matmul),
    "Max": lambda *inputs: np.asarray(np.maximum.reduce(np.broadcast_arrays(*inputs))),
    "Min": lambda *inputs: np.asarray(np.minimum.reduce(np.broadcast_arrays(*inputs))),
    "Mod": modulo,
    "Mul": _plain(np.multiply),
    "Neg": _plain(np.negative),
    "Not": _plain(np.logical_not),
    "Or": _plain(np.logical_or),
    "Pad": pad,
    "Pow": power,
    "Range": arange,
    "Reciprocal": lambda data: np.asarray(1 / data, data.dtype),
    "ReduceMax": _reduce(np.max),
    "ReduceMean": _reduce(np.mean),
    "ReduceMin": _reduce(np.min),
    "ReduceProd": _reduce(np.prod),
    "ReduceSum": _reduce(np.sum),
    "Reshape": reshape,
    ROW_NUMBERS: row_numbers,
    "Sigmoid": sigmoid,
    "Sign": _plain(np.sign),
    "Sin": _plain(np.sin),
    "Slice": take_slice,
    "Split": split,
    "Sqrt": _plain(np.sqrt),
    "Squeeze": squeeze,
    "Sub": _plain(np.subtract),
    "Tanh": _plain(np.tanh),
    "Tile": lambda data, repeats: np.tile(data, repeats.tolist()),
    "Transpose": lambda data, *, perm=None: np.transpose(data, perm),
    "Trilu": trilu,
    "Unsqueeze": unsqueeze,
    "Where": where,
}
"""Operator -> its function; inputs are positional, attributes keywords."""


def flat_shape(shape: Sequence[int], axis: int) -> tuple[int, int]:
    """Returns the two sizes that Flatten gives."""
    place = axis + len(shape) if axis < 0 else axis
    return math.prod(shape[:place]), math.prod(shape[place:])
