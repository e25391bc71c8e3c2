"""Where the elements of a tensor lie in memory, so that most of ONNX's reshaping is free.

A `Layout` holds one entry for each ONNX axis, outermost first. An entry is a tuple of factors
`(size, stride)`, outermost first: merging two axes that do not lie next to each other in memory
(heads and batch, say) gives an entry of two factors instead of a copy. Transpose, Reshape, Slice,
Split, Expand and Unsqueeze then only rewrite a layout; a copy is made where a consumer cannot
work with it. Strides and offsets count elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

Factor = tuple[int, int]
Axis = tuple[Factor, ...]


@dataclass(frozen=True)
class Layout:
    """The elements of a tensor in a buffer; `axes` are normalised: no factor of size 1."""

    axes: tuple[Axis, ...]
    offset: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(size for size, _ in axis) for axis in self.axes)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def factors(self) -> tuple[Factor, ...]:
        """All factors, outermost first, with neighbours merged where memory allows."""
        return merged(factor for axis in self.axes for factor in axis)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in memory in ONNX's order without gaps."""
        return self.factors in ((), ((self.size, 1),))

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill a stretch of memory without gaps, in any order."""
        expected = 1
        for size, stride in sorted(self.factors, key=lambda factor: factor[1]):
            if stride != expected:
                return False
            expected *= size
        return True


def contiguous(shape: Sequence[int], offset: int = 0) -> Layout:
    """Returns the layout of a freshly computed tensor."""
    axes, stride = [], 1
    for size in reversed(shape):
        axes.append(_axis([(size, stride)]))
        stride *= size
    return Layout(tuple(reversed(axes)), offset)


def strided(sizes_and_strides: Sequence[Factor], offset: int = 0) -> Layout:
    """Returns a layout of one factor an axis."""
    return Layout(tuple(_axis([factor]) for factor in sizes_and_strides), offset)


def merged(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    """Returns the factors without those of size 1, neighbours merged where memory allows."""
    found: list[Factor] = []
    for size, stride in factors:
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return tuple(found)


def transpose(layout: Layout, perm: Sequence[int]) -> Layout:
    """Reorders the axes."""
    return replace(layout, axes=tuple(layout.axes[axis] for axis in perm))


def reshape(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """Returns the layout under another shape, or None if that takes a copy."""
    pool = list(layout.factors)
    axes: list[Axis] = []
    for size in reversed(shape):
        taken: list[Factor] = []
        missing = size
        while missing > 1:
            if not pool:
                return None
            have, stride = pool.pop()
            if missing % have == 0:
                taken.append((have, stride))
                missing //= have
            elif have % missing == 0:
                taken.append((missing, stride))
                pool.append((have // missing, stride * missing))
                missing = 1
            else:
                return None
        axes.append(_axis(list(reversed(taken))))
    return None if pool else replace(layout, axes=tuple(reversed(axes)))


def take(layout: Layout, axis: int, start: int, size: int, step: int = 1) -> Layout | None:
    """Returns `size` indices of an axis, from `start` on; None if that takes a copy."""
    factors = layout.axes[axis]
    if size == layout.shape[axis] and step == 1:
        return layout
    if not factors:
        return layout
    if len(factors) > 1:
        inner = math.prod(n for n, _ in factors[1:])
        if step != 1 or start % inner or size % inner:
            return None
        (_, stride), rest = factors[0], factors[1:]
        chosen: Axis = (*_axis([(size // inner, stride)]), *rest)
        moved = layout.offset + start // inner * stride
    else:
        ((_, stride),) = factors
        chosen = _axis([(size, stride * step)])
        moved = layout.offset + start * stride
    axes = (*layout.axes[:axis], chosen, *layout.axes[axis + 1 :])
    return Layout(axes, moved)


def insert_axis(layout: Layout, axis: int) -> Layout:
    """Adds an axis of size 1."""
    return replace(layout, axes=(*layout.axes[:axis], (), *layout.axes[axis:]))


def expand(layout: Layout, shape: Sequence[int]) -> Layout:
    """Broadcasts to `shape` by numpy's rules; repeated axes have the stride 0."""
    axes: list[Axis] = [()] * (len(shape) - len(layout.axes)) + list(layout.axes)
    grown = [
        ((size, 0),) if not axis and size > 1 else axis
        for axis, size in zip(axes, shape, strict=True)
    ]
    return replace(layout, axes=tuple(grown))


@dataclass(frozen=True)
class Row:
    """Factors of several layouts that pair up: one size, a stride for each layout."""

    axis: int
    size: int
    strides: tuple[int, ...]


def refine(layouts: Sequence[Layout]) -> list[Row] | None:
    """Returns the factors of layouts of one shape, cut so that they pair up; None: they cannot."""
    rows: list[Row] = []
    for axis, parts in enumerate(zip(*(layout.axes for layout in layouts), strict=True)):
        pools = [list(part) for part in parts]
        missing = max(math.prod(n for n, _ in pool) for pool in pools)
        cut: list[Row] = []
        while missing > 1:
            step = min(pool[-1][0] for pool in pools)
            strides = []
            for pool in pools:
                size, stride = pool.pop()
                if size % step:
                    return None
                strides.append(stride)
                if size > step:
                    pool.append((size // step, stride * step))
            cut.append(Row(axis, step, tuple(strides)))
            missing //= step
        rows += reversed(cut)
    return rows


def merge_rows(rows: Sequence[Row]) -> list[Row]:
    """Merges neighbours that are neighbours in every layout."""
    found: list[Row] = []
    for row in rows:
        if found and all(
            before == row.size * now
            for before, now in zip(found[-1].strides, row.strides, strict=True)
        ):
            found[-1] = Row(row.axis, found[-1].size * row.size, row.strides)
        else:
            found.append(row)
    return found


def from_order(rows: Sequence[Row], rank: int) -> Layout:
    """Returns the layout of a new tensor whose memory runs through `rows`, the last innermost.

    Rows of one axis must be in that axis's order.
    """
    factors: dict[int, list[Factor]] = {}
    stride = 1
    for row in reversed(rows):
        factors.setdefault(row.axis, []).insert(0, (row.size, stride))
        stride *= row.size
    return Layout(tuple(_axis(factors.get(axis, [])) for axis in range(rank)))


def _axis(factors: Sequence[Factor]) -> Axis:
    return merged(factors)
