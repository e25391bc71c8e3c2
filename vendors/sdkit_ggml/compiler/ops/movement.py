"""Operators that only move elements: most of them are a new layout and no operation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sdkit_ggml.compiler import evaluate as ev
from sdkit_ggml.compiler.emitter import ref_of
from sdkit_ggml.compiler.evaluate import ROW_NUMBERS, row_numbers
from sdkit_ggml.compiler.graph import Constant, ValueType
from sdkit_ggml.compiler.layout import contiguous, expand, insert_axis, take, transpose
from sdkit_ggml.compiler.lowering import Lowering
from sdkit_ggml.compiler.values import Unsupported, Value
from sdkit_ggml.program import HostStep


def reshape(low: Lowering, x: str, shape: str, *, allowzero: int = 0) -> Value:
    value = low.value(x)
    asked = ev.resolve_shape(value.shape, _integers(low, shape), allowzero)
    return low.reshaped(value, asked)


def flatten(low: Lowering, x: str, *, axis: int = 1) -> Value:
    value = low.value(x)
    return low.reshaped(value, ev.flat_shape(value.shape, axis))


def squeeze(low: Lowering, x: str, axes: str = "") -> Value:
    value = low.value(x)
    gone = (
        ev.normal_axes(_integers(low, axes), len(value.shape))
        if axes
        else [axis for axis, size in enumerate(value.shape) if size == 1]
    )
    kept = tuple(one for axis, one in enumerate(value.layout.axes) if axis not in gone)
    return _at(value, replace(value.layout, axes=kept))


def unsqueeze(low: Lowering, x: str, axes: str) -> Value:
    value = low.value(x)
    layout = value.layout
    given = _integers(low, axes)
    for axis in ev.normal_axes(given, len(layout.axes) + len(given)):
        layout = insert_axis(layout, axis)
    return _at(value, layout)


def transpose_(low: Lowering, x: str, *, perm: Sequence[int] | None = None) -> Value:
    value = low.value(x)
    order = list(range(len(value.shape)))[::-1] if perm is None else list(perm)
    return _at(value, transpose(value.layout, order))


def expand_(low: Lowering, x: str, shape: str) -> Value:
    value = low.value(x)
    wide = np.broadcast_shapes(value.shape, tuple(_integers(low, shape)))
    return _at(value, expand(value.layout, wide))


def tile(low: Lowering, x: str, repeats: str) -> Value:
    """Repeats whole axes: by an axis of stride 0 before each one that repeats."""
    value = low.value(x)
    counts = _integers(low, repeats)
    layout = value.layout
    sizes: list[int] = []
    for axis, (count, size) in enumerate(zip(counts, value.shape, strict=True)):
        layout = insert_axis(layout, 2 * axis)
        sizes += [count, size]
    grown = _at(value, expand(layout, sizes))
    shape = [count * size for count, size in zip(counts, value.shape, strict=True)]
    return low.reshaped(low.contiguous(grown), shape)


def slice_(low: Lowering, x: str, starts: str, ends: str, axes: str = "", steps: str = "") -> Value:
    value = low.value(x)
    given = [_array(low, name) for name in (starts, ends, axes, steps)]
    picked = ev.slices(value.shape, *given)
    for axis, one in enumerate(picked):
        count = len(range(one.start, one.stop, one.step))
        if one.step < 0 and count > 1:
            value = rows_of(low, value, axis, np.arange(one.start, one.stop, one.step))
        else:
            value = _taken(low, value, axis, one.start, count, abs(one.step))
    return value


def split(
    low: Lowering, x: str, sizes: str = "", *, axis: int = 0, num_outputs: int = 0
) -> list[Value]:
    value = low.value(x)
    place = axis % len(value.shape)
    parts = ev.split_sizes(
        value.shape[place],
        _integers(low, sizes) if sizes else None,
        num_outputs or len(low.node.outputs),
    )
    starts = np.cumsum([0, *parts[:-1]]).tolist()
    return [
        _taken(low, value, place, start, part) for start, part in zip(starts, parts, strict=True)
    ]


def concat(low: Lowering, *inputs: str, axis: int) -> Value:
    values = [low.value(name) for name in inputs]
    rank = len(values[0].shape)
    place = axis % rank
    shape = list(values[0].shape)
    shape[place] = sum(one.shape[place] for one in values)
    return joined(low, values, place, shape)


def joined(low: Lowering, values: Sequence[Value], axis: int, shape: Sequence[int]) -> Value:
    """Copies values side by side into a new tensor."""
    whole = contiguous(shape)
    buffer = low.emitter.tensor("f32", (whole.size, 1, 1, 1)).buffer
    at = 0
    for value in values:
        size = value.shape[axis]
        if value.layout.size == 0:
            continue
        part = take(whole, axis, at, size)
        assert part is not None
        at += size
        if any(stride == 0 for one in value.layout.axes for _, stride in one):
            value = low.contiguous(value)
        copy_into(low, value, Value(buffer, part))
    return Value(buffer, whole)


def copy_into(low: Lowering, value: Value, target: Value) -> None:
    """Copies a value over a part of another tensor."""
    from sdkit_ggml.compiler.layout import merge_rows, refine

    rows = refine([value.layout, target.layout])
    walk = None if rows is None else merge_rows(rows)
    if walk is None or len(walk) > 4:
        value = low.contiguous(value)
        rows = refine([value.layout, target.layout])
        walk = merge_rows(rows or [])
    if len(walk) > 4:
        raise Unsupported("joins tensors of more than four axes")
    source = ref_of(
        value.buffer,
        value.type,
        [(row.size, row.strides[0]) for row in walk],
        value.layout.offset,
    )
    into = ref_of(
        target.buffer,
        target.type,
        [(row.size, row.strides[1]) for row in walk],
        target.layout.offset,
    )
    low.emitter.emit("cpy", [source, into])


def gather(low: Lowering, x: str, indices: str, *, axis: int = 0) -> Value:
    place = axis % len(low.graph.type_of(x).shape)
    constant = low.constant(indices)
    if constant is not None:
        value = low.value(x)
        found = constant.array()
        size = value.shape[place]
        picked = np.where(found < 0, found + size, found)
        flat = picked.ravel()
        steps = np.diff(flat)
        if flat.size == 1 or (steps > 0).all() and len(set(steps.tolist())) == 1:
            step = int(steps[0]) if steps.size else 1
            part = _taken(low, value, place, int(flat[0]), flat.size, step)
        else:
            part = rows_of(low, value, place, flat)
        shape = (*value.shape[:place], *picked.shape, *value.shape[place + 1 :])
        return low.reshaped(part, shape)
    return _gather_fed(low, x, indices, place)


def _gather_fed(low: Lowering, x: str, indices: str, axis: int) -> Value:
    """Looks rows up by indices that the host computes."""
    shape = low.graph.type_of(indices).shape
    ids = low.indices(indices, low.graph.type_of(x).shape[axis])
    constant = low.constant(x)
    if constant is not None and axis == 0:
        width = math.prod(constant.shape[1:])
        kind = low.choices.matrix_type if width % 32 == 0 else "f32"
        table = low.weight(constant, "", kind, (width, constant.shape[0]))
        ref = low.emitter.emit("get_rows", [table, ids])
        return low.fresh(ref, (*shape, *constant.shape[1:]))
    value = low.value(x)
    moved = _front(value, axis)
    rows = moved.shape[0]
    rest = moved.shape[1:]
    ref = low.emitter.emit("get_rows", [low.flat(moved, (math.prod(rest), rows)), ids])
    found = low.fresh(ref, (*shape, *rest))
    back = [*range(len(shape), len(shape) + axis), *range(len(shape))]
    back += [len(shape) + one for one in range(axis, len(rest))]
    return _at(found, transpose(found.layout, back))


def gather_nd(low: Lowering, x: str, indices: str, *, batch_dims: int = 0) -> Value:
    """Looks slices up by indices of the host, which first turns them into row numbers."""
    value = low.value(x)
    if batch_dims:
        raise Unsupported("gathers by batches")
    constant = low.constant(indices)
    if constant is not None:
        array = constant.array()
        sizes = value.shape[: array.shape[-1]]
        flat = low.reshaped(value, (math.prod(sizes), *value.shape[len(sizes) :]))
        found = rows_of(low, flat, 0, row_numbers(array, sizes=sizes).ravel())
        return low.reshaped(found, (*array.shape[:-1], *value.shape[len(sizes) :]))
    if indices not in low.host.values:
        raise Unsupported("looks up by indices that are computed from floats")
    shape = low.graph.type_of(indices).shape
    depth = shape[-1]
    rows, rest = math.prod(value.shape[:depth]), value.shape[depth:]
    numbers = f"{indices}:rows of {list(value.shape[:depth])}"
    step = HostStep(ROW_NUMBERS, 0, (indices,), (numbers,), {"sizes": list(value.shape[:depth])})
    low.host.add(step)
    low.graph.types[numbers] = ValueType("int64", shape[:-1])
    ids = low.indices(numbers, rows)
    ref = low.emitter.emit("get_rows", [low.flat(value, (math.prod(rest), rows)), ids])
    return low.fresh(ref, (*shape[:-1], *rest))


def rows_of(low: Lowering, value: Value, axis: int, indices: Any) -> Value:
    """Returns chosen indices of an axis, in any order; `indices`: a one-dimensional array."""
    moved = _front(value, axis)
    rest = moved.shape[1:]
    ids = low.weight(Constant.of(np.asarray(indices, np.int32)), "", "i32", (len(indices),))
    ref = low.emitter.emit("get_rows", [low.flat(moved, (math.prod(rest), moved.shape[0])), ids])
    found = low.fresh(ref, (len(indices), *rest))
    return _at(
        found, transpose(found.layout, [*range(1, axis + 1), 0, *range(axis + 1, len(rest) + 1)])
    )


def depth_to_space(low: Lowering, x: str, *, blocksize: int, mode: str = "DCR") -> Value:
    value = low.value(x)
    n, c, h, w = value.shape
    b = blocksize
    if mode == "DCR":
        parts, order = (n, b, b, c // b**2, h, w), (0, 3, 4, 1, 5, 2)
    else:
        parts, order = (n, c // b**2, b, b, h, w), (0, 1, 4, 2, 5, 3)
    cut = low.reshaped(value, parts)
    moved = _at(cut, transpose(cut.layout, order))
    return low.reshaped(moved, (n, c // b**2, h * b, w * b))


def space_to_depth(low: Lowering, x: str, *, blocksize: int) -> Value:
    value = low.value(x)
    n, c, h, w = value.shape
    b = blocksize
    cut = low.reshaped(value, (n, c, h // b, b, w // b, b))
    moved = _at(cut, transpose(cut.layout, (0, 3, 5, 1, 2, 4)))
    return low.reshaped(moved, (n, c * b**2, h // b, w // b))


def pad(
    low: Lowering, x: str, pads: str, fill: str = "", axes: str = "", *, mode: str = "constant"
) -> Value:
    value = low.value(x)
    widths = ev.pad_widths(
        _integers(low, pads), len(value.shape), _integers(low, axes) if axes else None
    )
    number = low.scalar(fill) if fill else 0.0
    if mode != "constant" or number is None:
        raise Unsupported(f"pads by {mode if mode != 'constant' else 'what is computed'}")
    if number == 0:
        return padded(low, value, widths)
    cut = padded(low, value, [(min(a, 0), min(b, 0)) for a, b in widths])
    for axis, (before, after) in enumerate(widths):
        cut = _with_sides(low, cut, axis, max(before, 0), max(after, 0), number)
    return cut


def _with_sides(
    low: Lowering, value: Value, axis: int, before: int, after: int, number: float
) -> Value:
    parts = [value]
    for place, width in ((0, before), (len(parts), after)):
        if width:
            shape = [width if a == axis else size for a, size in enumerate(value.shape)]
            side = low.constant_value(Constant.of(np.full(shape, number, np.float32)))
            parts.insert(0 if place == 0 else len(parts), side)
    if len(parts) == 1:
        return value
    shape = list(value.shape)
    shape[axis] += before + after
    return joined(low, parts, axis, shape)


def padded(low: Lowering, value: Value, widths: Sequence[tuple[int, int]]) -> Value:
    """Adds zeros around (or, where a width is negative, takes away)."""
    for axis, (before, after) in enumerate(widths):
        if before < 0 or after < 0:
            size = value.shape[axis] + min(before, 0) + min(after, 0)
            value = _taken(low, value, axis, max(-before, 0), size)
    widths = [(max(a, 0), max(b, 0)) for a, b in widths]
    if not any(a or b for a, b in widths):
        return value
    # Axes that are not padded merge with their neighbours: ggml pads four at most.
    groups: list[list[int]] = []
    pads: list[tuple[int, int]] = []
    for size, width in zip(value.shape, widths, strict=True):
        if groups and width == (0, 0) and pads[-1] == (0, 0):
            groups[-1].append(size)
        else:
            groups.append([size])
            pads.append(width)
    if len(groups) > 4:
        raise Unsupported("pads more axes than ggml has")
    ne = [math.prod(group) for group in reversed(groups)]
    flat = [side for width in reversed(pads) for side in width]
    ref = low.emitter.emit("pad", [low.flat(value, ne)], (*flat, *(0,) * (8 - len(flat))))
    return low.fresh(ref, [s + a + b for s, (a, b) in zip(value.shape, widths, strict=True)])


def _at(value: Value, layout: Any) -> Value:  # Any: a Layout
    return Value(value.buffer, layout, value.type)


def _taken(low: Lowering, value: Value, axis: int, start: int, size: int, step: int = 1) -> Value:
    layout = take(value.layout, axis, start, size, step)
    if layout is None:
        value = low.contiguous(value)
        layout = take(value.layout, axis, start, size, step)
        assert layout is not None
    return _at(value, layout)


def _front(value: Value, axis: int) -> Value:
    order = [axis, *(one for one in range(len(value.shape)) if one != axis)]
    return _at(value, transpose(value.layout, order))


def _array(low: Lowering, name: str) -> Any:  # Any: an array, or None without an input
    if not name:
        return None
    constant = low.constant(name)
    if constant is None:
        raise Unsupported(f'needs "{name}" to be constant')
    return constant.array()


def _integers(low: Lowering, name: str) -> list[int]:
    return [int(one) for one in _array(low, name).ravel()]
