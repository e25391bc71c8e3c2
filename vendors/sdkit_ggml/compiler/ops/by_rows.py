"""Convolution by rows: matrix products that read the picture where it lies.

The picture is turned once, to [rows, columns + padding, C]. There the KW x C numbers that a patch
reads from one of its KH rows are neighbours, and the next patch's begin C further on: a matrix
whose rows overlap, which a product reads in place. So KH products are added up. Columns that begin
in the padding are computed too, and left out when the sum is taken. A picture that would need too
much memory is convolved by blocks of rows.

Three rows of a filter need six products for two rows of the picture; Winograd's F(2, 3) needs four,
of sums of rows. Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015,
section 4.1, here along one axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sdkit_ggml.compiler.emitter import Ref, dense_ref
from sdkit_ggml.compiler.graph import Constant
from sdkit_ggml.compiler.layout import Layout, contiguous, strided, take
from sdkit_ggml.compiler.lowering import Lowering
from sdkit_ggml.compiler.ops.movement import copy_into, padded
from sdkit_ggml.compiler.recipes import MIXES, tap
from sdkit_ggml.compiler.values import Value
from sdkit_ggml.program import row_bytes

ROW_MULTIPLE = 16
"""What ggml's fast matrix product likes the number of rows of its first operand to be."""


@dataclass(frozen=True, kw_only=True)
class Filter:
    """A convolution: weights [OC, C, KH, KW] and how they move; two spatial axes, one group."""

    weights: Constant
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pads: tuple[tuple[int, int], tuple[int, int]]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        oc, c, *kernel = self.weights.shape
        return (oc, c, *([1] * (2 - len(kernel))), *kernel)  # type: ignore[return-value]

    @property
    def is_plain(self) -> bool:
        return self.strides == (1, 1) and self.dilations == (1, 1)

    @property
    def is_pointwise(self) -> bool:
        return self.is_plain and self.shape[2:] == (1, 1) and not any(map(any, self.pads))


def planes(n: int, oc: int, h: int, w: int, row: int, plane: int) -> Layout:
    """Returns the layout of [OC][N, H, row]: what a product with positions outermost gives."""
    return strided(((n, h * row), (oc, plane), (h, row), (w, 1)))


@dataclass(frozen=True, kw_only=True)
class _Turned:
    """A block of the picture as [rows, wide, C].

    Attributes:
        first: The first row that the block reads.
        rows: How many rows of the result the block gives.
        out_w: How many columns of the result are real.
    """

    buffer: int
    kind: str
    channels: int
    wide: int
    first: int
    rows: int
    out_w: int
    kernel_w: int

    @property
    def unit(self) -> int:
        """Bytes of one pixel."""
        return self.channels * row_bytes(self.kind, 1)

    @property
    def slack_bytes(self) -> int:
        """How far products read past the end of their rows."""
        return (ROW_MULTIPLE + self.kernel_w) * self.unit


def by_rows(low: Lowering, x: Value, kernel: Filter, kind: str) -> Value:
    """Returns the convolution of a picture with a filter without strides or dilations."""
    (top, bottom), (left, right) = kernel.pads
    if top != bottom or left != right:
        x = padded(low, x, ((0, 0), (0, 0), *kernel.pads))
        top = left = 0
    n, c, h, w = x.shape
    oc, _, kh, kw = kernel.shape
    wide = w + 2 * left
    out_h, out_w = h + 2 * top - kh + 1, wide - kw + 1
    half = int(kind == "f16")
    kind = "f16" if half else "f32"
    # In float16 the sums of rows would lose digits that single rows do not.
    in_pairs = low.choices.has_winograd and kh == 3 and not half
    forms = tuple(MIXES) if in_pairs else tuple(tap(index) for index in range(kh))
    taps = [low.weight(kernel.weights, form, kind, (kw * c, oc)) for form in forms]
    x = with_planes(low, x)
    row_cost = wide * (2 * c * row_bytes(kind, 1) + 3 * oc * 4)
    block = low.choices.block_rows(out_h, row_bytes=row_cost, input_bytes=n * c * h * w * 4)
    block = max(2, block // 2 * 2)
    count = -(-out_h // block)
    block = -(-out_h // count)
    block += block % 2 if count > 1 else 0

    def part(image: int, at: int) -> Value:
        rows = min(block, out_h - at)
        first, last = max(0, at - top), min(h, at + rows + kh - 1 - top)
        is_edge = first > at - top or last < at + rows + kh - 1 - top
        pad_h = top if is_edge else 0
        layout = take(x.layout, 2, first, last - first)
        assert layout is not None
        layout = take(layout, 0, image, 1) or layout
        turned = _Turned(
            buffer=-1,
            kind=kind,
            channels=c,
            wide=wide,
            first=(at - top) - (first - pad_h),
            rows=rows,
            out_w=out_w,
            kernel_w=kw,
        )
        # The last pair of an odd number of rows reads a row that is not there, for nothing.
        slack_bytes = turned.slack_bytes + wide * turned.unit
        image_ref = picture(low, Value(x.buffer, layout))
        if left or pad_h or half:
            kernel_ref = dense_ref(taps[0].buffer, kind, (1, 1, c))
            padding = (1, 1, left, pad_h, 1, 1, half)
            ref = low.emitter.emit(
                "im2col", [kernel_ref, image_ref], padding, slack_bytes=slack_bytes
            )
        else:
            ref = low.emitter.emit("cont", [_channels_first(image_ref)], slack_bytes=slack_bytes)
        turned = replace(turned, buffer=ref.buffer)
        return _pairs(low, turned, taps) if in_pairs else _sum(low, turned, taps)

    starts = [(image, at) for image in range(n) for at in range(0, out_h, block)]
    if len(starts) == 1:
        return part(0, 0)
    whole = contiguous((n, oc, out_h, out_w))
    buffer = low.emitter.tensor("f32", (whole.size, 1, 1, 1)).buffer
    for image, at in starts:
        one = part(image, at)
        place = take(take(whole, 0, image, 1) or whole, 2, at, one.shape[2])
        assert place is not None
        copy_into(low, one, Value(buffer, place))
    return Value(buffer, whole)


def _channels_first(image: Ref) -> Ref:
    """Returns [W, H, C, N] as [C, W, H, N]."""
    (w, h, c, n), (by_w, by_h, by_c, by_n) = image.ne, image.nb
    return Ref(image.buffer, image.offset, image.type, (c, w, h, n), (by_c, by_w, by_h, by_n))


def _sum(low: Lowering, turned: _Turned, taps: Sequence[Ref]) -> Value:
    """Adds up one product for each row of the filter."""
    total: Value | None = None
    for index, weights in enumerate(taps):
        start = (turned.first + index) * turned.wide * turned.unit
        one = _product(low, turned, turned.buffer, start, turned.rows, weights)
        total = one if total is None else low.binary("add", total, one)
    assert total is not None
    return total


def _pairs(low: Lowering, turned: _Turned, taps: Sequence[Ref]) -> Value:
    """Takes four products for two rows of the result.

    With d the rows of the picture and m the products: y[0] = m0 + m1 + m2, y[1] = m1 - m2 - m3.
    """
    pairs = -(-turned.rows // 2)
    width = turned.wide * turned.channels

    def rows(index: int) -> Ref:
        size, step = width * 4, 2 * width * 4
        start = (turned.first + index) * size
        return Ref(
            turned.buffer, start, "f32", (width, pairs, 1, 1), (4, step, step * pairs, step * pairs)
        )

    def product(which: int, operation: str, a: int, b: int) -> Value:
        mixed = low.emitter.emit(operation, [rows(a), rows(b)], slack_bytes=turned.slack_bytes)
        return _product(low, turned, mixed.buffer, 0, pairs, taps[which])

    m1, m2 = product(1, "add", 1, 2), product(2, "sub", 2, 1)
    oc = m1.shape[1]
    half_bytes = oc * pairs * turned.out_w * 4
    both = low.emitter.buffer(2 * half_bytes)
    even = low.binary("add", m1, product(0, "sub", 0, 2))
    low.binary("add", even, m2, place=(both, 0))
    odd = low.binary("sub", m1, m2)
    low.binary("sub", odd, product(3, "sub", 1, 3), place=(both, half_bytes))
    # Even and odd rows lie apart; whoever adds the bias next puts them in order.
    w = turned.out_w
    plane = pairs * w
    halves = tuple(f for f in ((pairs, w), (2, oc * plane)) if f[0] > 1)
    axes = (
        (),
        *(((s, t),) if s > 1 else () for s, t in ((oc, plane),)),
        halves,
        ((w, 1),) if w > 1 else (),
    )
    value = Value(both, Layout(axes))
    if turned.rows % 2 == 0:
        return value
    value = low.contiguous(value)
    layout = take(value.layout, 2, 0, turned.rows)
    assert layout is not None
    return Value(value.buffer, layout)


def _product(
    low: Lowering, turned: _Turned, buffer: int, start: int, rows: int, weights: Ref
) -> Value:
    """Multiplies patches, which begin at every pixel, with a row of the filter."""
    unit = turned.unit
    count = -(-rows * turned.wide // ROW_MULTIPLE) * ROW_MULTIPLE
    first = row_bytes(turned.kind, 1)
    patches = Ref(
        buffer,
        start,
        turned.kind,
        (turned.kernel_w * turned.channels, count, 1, 1),
        (first, unit, unit * count, unit * count),
    )
    if low.choices.is_dense and turned.kernel_w > 1:
        patches = low.emitter.emit("cont", [patches])
    ref = low.emitter.emit("mul_mat", [patches, weights])
    return low.result(ref, planes(1, weights.ne[1], rows, turned.out_w, turned.wide, count))


def with_planes(low: Lowering, x: Value) -> Value:
    """Returns the picture with contiguous planes; channels and images may lie anywhere."""
    n, c, h, w = x.shape
    row, column = x.layout.axes[2:]
    is_plane = (w == 1 or column == ((w, 1),)) and (h == 1 or row == ((h, w),))
    single = len(x.layout.axes[0]) <= 1 and len(x.layout.axes[1]) <= 1
    return x if is_plane and single else low.contiguous(x)


def picture(low: Lowering, x: Value) -> Ref:
    """Returns a picture with contiguous planes as [W, H, C, N]."""
    n, c, h, w = x.shape
    far = [axis[0][1] if axis else 0 for axis in x.layout.axes[:2]]
    plane = far[1] or h * w
    unit = row_bytes(x.type, 1)
    return Ref(
        x.buffer,
        x.layout.offset * unit,
        x.type,
        (w, h, c, n),
        (unit, unit * w, unit * plane, unit * (far[0] or plane * c)),
    )
