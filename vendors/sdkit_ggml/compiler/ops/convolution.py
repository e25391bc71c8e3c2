"""Convolutions and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdkit_ggml.compiler.emitter import dense_ref
from sdkit_ggml.compiler.layout import contiguous, take, transpose
from sdkit_ggml.compiler.lowering import Lowering
from sdkit_ggml.compiler.ops.by_rows import Filter, by_rows, picture, planes, with_planes
from sdkit_ggml.compiler.ops.linear import fitting
from sdkit_ggml.compiler.ops.movement import joined, padded
from sdkit_ggml.compiler.shapes import conv_padding
from sdkit_ggml.compiler.values import Unsupported, Value
from sdkit_ggml.instructions import MAX_POOL, MEAN_POOL
from sdkit_ggml.program import WeightStep, row_bytes

CHANNEL_MULTIPLE = 8
"""Convolving by rows wants whole vectors a channel: ggml's fast matrix product needs a summed size
that is a multiple of 8 (AVX2) or 16 (AVX-512)."""


def conv(
    low: Lowering,
    x: str,
    w: str,
    b: str = "",
    *,
    kernel_shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    auto_pad: str = "NOTSET",
    group: int = 1,
) -> Value:
    weights = low.constant(w)
    if weights is None:
        raise Unsupported("convolves with weights that are not constant")
    value = low.value(x)
    spatial = len(value.shape) - 2
    if spatial not in (1, 2):
        raise Unsupported(f"convolves {spatial} axes")
    stride, dilation = list(strides or [1] * spatial), list(dilations or [1] * spatial)
    padding = conv_padding(value.shape[2:], weights.shape[2:], stride, dilation, pads, auto_pad)
    lead = 2 - spatial
    value = low.reshaped(value, (*value.shape[:2], *([1] * lead), *value.shape[2:]))
    kernel = Filter(
        weights=weights,
        strides=_pair([1] * lead + stride),
        dilations=_pair([1] * lead + dilation),
        pads=((0, 0),) * lead + tuple(padding),  # type: ignore[arg-type]
    )
    result = _convolve(low, value, kernel, group)
    if b:
        bias = low.value(b)
        result = low.binary("add", result, low.reshaped(bias, (bias.layout.size, 1, 1)))
    if spatial == 1:
        n, c, _, size = result.shape
        result = low.reshaped(result, (n, c, size))
    return result


def _pair(sizes: Sequence[int]) -> tuple[int, int]:
    first, second = sizes
    return first, second


def _convolve(low: Lowering, x: Value, kernel: Filter, group: int) -> Value:
    if group > 1:
        return _in_groups(low, x, kernel, group)
    kind = low.choices.filter_type
    if kernel.is_pointwise:
        wants_channels_last = _turns_next(low)
        lies_channels_last = transpose(x.layout, (0, 2, 3, 1)).is_contiguous
        matrix = fitting(low.choices.matrix_type, kernel.shape[1])
        if lies_channels_last or wants_channels_last or matrix != kind:
            is_last = wants_channels_last or matrix != "f32"
            return _pointwise(low, x, kernel, is_channels_last=is_last)
    if kernel.is_plain and kernel.shape[1] % CHANNEL_MULTIPLE == 0:
        return by_rows(low, x, kernel, kind)
    return _by_columns(low, x, kernel, kind)


def _turns_next(low: Lowering) -> bool:
    """Whether whatever follows wants the channels innermost."""
    users = low.users(low.node.output)
    return bool(users) and all(
        user.op_type == "Transpose" and user.attributes.get("perm") == [0, 2, 3, 1]
        for user in users
    )


def _in_groups(low: Lowering, x: Value, kernel: Filter, group: int) -> Value:
    outer, inner = kernel.shape[0] // group, kernel.shape[1]
    parts = []
    for index in range(group):
        start = index * outer
        step = WeightStep("Slice", tuple(((1,), (at,)) for at in (start, start + outer, 0)))
        weights = kernel.weights.then(
            step,
            lambda array, start=start: array[start : start + outer],  # type: ignore[misc]
            (outer, *kernel.weights.shape[1:]),
        )
        layout = take(x.layout, 1, index * inner, inner)
        part = x if layout is None else Value(x.buffer, layout)
        one = Filter(
            weights=weights,
            strides=kernel.strides,
            dilations=kernel.dilations,
            pads=kernel.pads,
        )
        parts.append(_convolve(low, part, one, 1))
    shape = (*parts[0].shape[:1], kernel.shape[0], *parts[0].shape[2:])
    return joined(low, parts, 1, shape)


def _pointwise(low: Lowering, x: Value, kernel: Filter, *, is_channels_last: bool) -> Value:
    """A 1x1 convolution as a product with rows of channels."""
    n, c, h, w = x.shape
    oc = kernel.shape[0]
    kind = fitting(low.choices.matrix_type, c) if is_channels_last else "f32"
    table = low.weight(kernel.weights, "", kind, (c, oc))
    rows = low.flat(Value(x.buffer, transpose(x.layout, (0, 2, 3, 1))), (c, n * h * w))
    if is_channels_last:
        ref = low.emitter.emit("mul_mat", [table, rows])
        return low.result(ref, transpose(contiguous((n, h, w, oc)), (0, 3, 1, 2)))
    ref = low.emitter.emit("mul_mat", [rows, table])
    return low.result(ref, planes(n, oc, h, w, w, n * h * w))


def _by_columns(low: Lowering, x: Value, kernel: Filter, kind: str) -> Value:
    """Convolves anything: writes every patch out (im2col) and multiplies once."""
    (s1, s0), (d1, d0) = kernel.strides, kernel.dilations
    (top, bottom), (left, right) = kernel.pads
    oc, c, kh, kw = kernel.shape
    half = int(kind == "f16")
    kind = "f16" if half else "f32"
    inner = c * kh * kw
    table = low.weight(kernel.weights, "", kind, (inner, oc))
    n, _, h, w = x.shape
    out_h = (h + top + bottom - d1 * (kh - 1) - 1) // s1 + 1
    out_w = (w + left + right - d0 * (kw - 1) - 1) // s0 + 1
    row_cost = n * out_w * (inner * row_bytes(kind, 1) + oc * 4)
    block = low.choices.block_rows(out_h, row_bytes=row_cost, input_bytes=n * c * h * w * 4)
    block = -(-out_h // -(-out_h // block))
    if top != bottom or left != right or block < out_h:
        x = padded(low, x, ((0, 0), (0, 0), *kernel.pads))
        top = left = 0
    x = with_planes(low, x)
    parts = []
    for at in range(0, out_h, block):
        rows = min(block, out_h - at)
        part = x
        if block < out_h:
            layout = take(x.layout, 2, at * s1, (rows - 1) * s1 + d1 * (kh - 1) + 1)
            assert layout is not None
            part = Value(x.buffer, layout)
        columns = low.emitter.emit(
            "im2col",
            [dense_ref(table.buffer, kind, (kw, kh, c)), picture(low, part)],
            (s0, s1, left, top, d0, d1, half),
        )
        count = n * rows * out_w
        flat = dense_ref(columns.buffer, kind, (inner, count))
        ref = low.emitter.emit("mul_mat", [flat, table])
        parts.append(low.result(ref, planes(n, oc, rows, out_w, out_w, count)))
    if len(parts) == 1:
        return parts[0]
    return joined(low, parts, 2, (n, oc, out_h, out_w))


def max_pool(low: Lowering, x: str, *, storage_order: int = 0, **attributes: Any) -> Value:
    return _pool(low, x, MAX_POOL, **attributes)


def average_pool(low: Lowering, x: str, *, count_include_pad: int = 0, **attributes: Any) -> Value:
    if any(attributes.get("pads") or ()) or attributes.get("auto_pad", "NOTSET") != "NOTSET":
        raise Unsupported("averages over a padding")
    return _pool(low, x, MEAN_POOL, **attributes)


def _pool(
    low: Lowering,
    x: str,
    kind: int,
    *,
    kernel_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
) -> Value:
    value = low.value(x)
    if len(value.shape) != 4 or ceil_mode or any(one != 1 for one in dilations or ()):
        raise Unsupported("pools other than two axes, with dilations or ceil_mode")
    n, c, h, w = value.shape
    stride = list(strides or (1, 1))
    padding = conv_padding((h, w), kernel_shape, stride, (1, 1), pads, auto_pad)
    if any(before != after for before, after in padding):
        raise Unsupported("pools with a padding that differs from side to side")
    (p1, _), (p0, _) = padding
    k1, k0 = kernel_shape
    if p0 >= k0 or p1 >= k1:
        raise Unsupported("pools with a padding as large as its window")
    ref = low.emitter.emit(
        "pool_2d", [low.flat(value, (w, h, c, n))], (kind, k0, k1, stride[1], stride[0], p0, p1)
    )
    return low.fresh(ref, (n, c, ref.ne[1], ref.ne[0]))
