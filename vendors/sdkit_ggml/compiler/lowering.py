"""What the functions of `ops/` work with: the values of a graph as tensors of a program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sdkit_ggml.compiler.emitter import Emitter, Ref, dense_ref, ref_of
from sdkit_ggml.compiler.graph import Constant, Graph, Node
from sdkit_ggml.compiler.layout import (
    Factor,
    Layout,
    Row,
    contiguous,
    expand,
    from_order,
    merge_rows,
    refine,
    reshape,
)
from sdkit_ggml.compiler.values import Choices, Fed, HostProgram, Unsupported, Value
from sdkit_ggml.compiler.weights import WeightTable
from sdkit_ggml.program import Ne, dense_nb, row_bytes


class Lowering:
    """Emits one variant of a program."""

    def __init__(
        self, graph: Graph, weights: WeightTable, choices: Choices, host: HostProgram
    ) -> None:
        self.graph = graph
        self.weights = weights
        self.choices = choices
        self.host = host
        self.node = Node("", [], [""])
        """The node that is being lowered."""
        self.emitter = Emitter()
        self.values: dict[str, Value] = {}
        self.feeds: dict[Fed, Ref] = {}
        self._consumers = graph.consumers()

    # What an operator gets.

    def constant(self, name: str) -> Constant | None:
        """Returns the input if it is constant."""
        return self.graph.constants.get(name)

    def scalar(self, name: str) -> float | None:
        """Returns the input if it is a constant of one element."""
        constant = self.constant(name)
        if constant is None or constant.size != 1:
            return None
        return float(constant.array().ravel()[0])

    def value(self, name: str) -> Value:
        """Returns an input as a tensor; a constant becomes a weight.

        Raises:
            Unsupported: It is no float.
        """
        if name in self.values:
            return self.values[name]
        constant = self.constant(name)
        if constant is None:
            raise Unsupported(f'"{name}" is not computed by ggml')
        return self.constant_value(constant)

    def constant_value(self, constant: Constant) -> Value:
        """Returns a constant as it is, in f32."""
        if constant.dtype not in ("float32", "float16", "bfloat16", "float64"):
            raise Unsupported(f"works on {constant.dtype}")
        ref = self.weight(constant, "", "f32", (constant.size,))
        return Value(ref.buffer, contiguous(constant.shape))

    def weight(
        self,
        constant: Constant,
        form: str,
        kind: str,
        ne: Sequence[int],
    ) -> Ref:
        """Returns a weight made of a constant; `form` of `recipes`, `ne` innermost first."""
        full: Ne = (*ne, *(1,) * (4 - len(ne)))  # type: ignore[assignment]
        index = self.weights.add(constant, form, kind, full)
        return Ref(-1 - index, 0, kind, full, dense_nb(kind, full))

    def users(self, name: str) -> list[Node]:
        """Returns the nodes that use a value."""
        return self._consumers.get(name, [])

    def is_used(self, name: str) -> bool:
        """Whether a value is an output or the input of a node."""
        return bool(name) and (name in self.graph.outputs or name in self._consumers)

    def indices(self, name: str, rows: int) -> Ref:
        """Returns i32 indices below `rows` that the host computes, as one row.

        Raises:
            Unsupported: The host does not compute them.
        """
        if name not in self.host.values:
            raise Unsupported("looks up by indices that are computed from floats")
        size = math.prod(self.graph.type_of(name).shape)
        return self.feed(Fed(name, "i32", rows), size)

    def feed(self, fed: Fed, size: int) -> Ref:
        """Returns a tensor that is filled before each run."""
        if fed not in self.feeds:
            self.feeds[fed] = self.emitter.tensor(fed.type, (size, 1, 1, 1))
        return self.feeds[fed]

    # From values to operands and back.

    def result(self, ref: Ref, layout: Layout) -> Value:
        """Returns the value that lies in the result of an operation."""
        return Value(ref.buffer, layout, ref.type)

    def fresh(self, ref: Ref, shape: Sequence[int]) -> Value:
        """Returns the value that fills the result of an operation, in ONNX's order."""
        return Value(ref.buffer, contiguous(shape), ref.type)

    def ref(self, value: Value, factors: Sequence[Factor]) -> Ref:
        """Returns an operand that walks through `value`'s buffer by at most four factors."""
        return ref_of(value.buffer, value.type, factors, value.layout.offset)

    def flat(self, value: Value, ne: Sequence[int]) -> Ref:
        """Returns a contiguous value as an operand of these sizes, innermost first."""
        if not value.layout.is_contiguous:
            value = self.contiguous(value)
        unit = row_bytes(value.type, 1)
        return dense_ref(value.buffer, value.type, ne, value.layout.offset * unit)

    def contiguous(self, value: Value) -> Value:
        """Returns the value in ONNX's order, copied if it is not."""
        layout = value.layout
        if layout.is_contiguous:
            return value
        if any(stride == 0 for axis in layout.axes for _, stride in axis):
            return self._repeated(value)
        factors = layout.factors
        if len(factors) > 4:
            return self._copied_by_parts(value)
        return self.fresh(self.emitter.emit("cont", [self.ref(value, factors)]), value.shape)

    def _repeated(self, value: Value) -> Value:
        factors = [factor for axis in value.layout.axes for factor in axis]
        kept = Layout(tuple((f,) if f[1] else () for f in factors), value.layout.offset)
        small = self.contiguous(Value(value.buffer, kept, value.type))
        # Sizes before and after; neighbours that both grow, or both do not, merge.
        pairs: list[tuple[int, int]] = []
        for (want, _), have in zip(factors, kept.shape, strict=True):
            grows = have != want
            if pairs and (pairs[-1][0] != pairs[-1][1]) == grows:
                pairs[-1] = (pairs[-1][0] * have, pairs[-1][1] * want)
            else:
                pairs.append((have, want))
        if len(pairs) > 4:
            raise Unsupported("repeats more axes than ggml has")
        source = self.flat(small, [have for have, _ in reversed(pairs)])
        sizes = [want for _, want in reversed(pairs)]
        ref = self.emitter.emit("repeat", [source], (*sizes, *(1,) * (4 - len(sizes))))
        return self.fresh(ref, value.shape)

    def _copied_by_parts(self, value: Value) -> Value:
        """Copies what has more than four factors, one index of the outermost at a time."""
        size = value.layout.size
        out = Value(self.emitter.tensor(value.type, (size, 1, 1, 1)).buffer, contiguous((size,)))
        self._copy_part(value, value.layout.factors, value.layout.offset, out, 0)
        return self.fresh(self.flat(out, (size,)), value.shape)

    def _copy_part(
        self, value: Value, factors: Sequence[Factor], offset: int, out: Value, at: int
    ) -> None:
        sizes = [size for size, _ in factors]
        if len(factors) > 4:
            count, stride = factors[0]
            step = math.prod(sizes[1:])
            for index in range(count):
                self._copy_part(value, factors[1:], offset + index * stride, out, at + index * step)
            return
        source = ref_of(value.buffer, value.type, factors, offset)
        unit = row_bytes(value.type, 1)
        self.emitter.emit(
            "cpy", [source, dense_ref(out.buffer, value.type, sizes[::-1], at * unit)]
        )

    def reshaped(self, value: Value, shape: Sequence[int]) -> Value:
        """Returns the value under another shape, copied only where memory asks for it."""
        layout = reshape(value.layout, shape)
        if layout is None:
            value = self.contiguous(value)
            layout = contiguous(shape, value.layout.offset)
        return Value(value.buffer, layout, value.type)

    # Operations by element.

    def unary(self, name: str, value: Value, *params: float) -> Value:
        """Applies an operation to each element, in whatever order they lie in memory."""
        if not value.layout.is_dense:
            value = self.contiguous(value)
        size = value.layout.size
        unit = row_bytes(value.type, 1)
        operand = dense_ref(
            value.buffer, value.type, _folded(value, size), value.layout.offset * unit
        )
        ref = self.emitter.emit(name, [operand], params)
        return Value(ref.buffer, replace(value.layout, offset=0))

    def scaled(self, value: Value, factor: float, bias: float = 0.0) -> Value:
        """Returns value * factor + bias."""
        if factor == 1 and bias == 0:
            return value
        return self.unary("scale", value, factor, bias)

    def binary(self, name: str, a: Value, b: Value, place: tuple[int, int] | None = None) -> Value:
        """Applies add, sub, mul or div by numpy's rules.

        `place`: where the result goes, as `Emitter.emit` has it; for operands of one shape.

        The result lies in ONNX's order where the operands can be walked in it, else in the order
        of the first operand's memory.
        """
        shape = np.broadcast_shapes(a.shape, b.shape)
        if a.shape != shape:
            if b.shape == shape:
                if name in ("add", "mul"):
                    return self.binary(name, b, a)
                if name == "sub":
                    return self.binary("add", self.scaled(b, -1.0), a)
            a = Value(a.buffer, expand(a.layout, shape), a.type)
            a = self.contiguous(a)
        left, right = a.layout, expand(b.layout, shape)
        if any(stride == 0 for axis in left.axes for _, stride in axis):
            return self.binary(name, self.contiguous(a), b)
        rows = refine([left, right])
        if rows is None:
            return self.binary(name, self.contiguous(a), self.contiguous(b))
        order = _order(rows)
        if order is None:
            if right.is_contiguous and not left.is_contiguous:
                return self.binary(name, self.contiguous(a), b)
            if not _ends_in_neighbours(rows, 0):
                rows_by_memory = sorted(rows, key=lambda row: -row.strides[0])
                if rows_by_memory[-1].strides[0] != 1 or len(merge_rows(rows_by_memory)) > 4:
                    return self.binary(name, self.contiguous(a), b)
            return self.binary(name, a, self._like(b, a, shape))
        walk = merge_rows(order)
        if len(walk) > 4:
            if not a.layout.is_contiguous:
                return self.binary(name, self.contiguous(a), b)
            if not b.layout.is_contiguous:
                return self.binary(name, a, self.contiguous(b))
            return self.binary(
                name, a, self.contiguous(Value(b.buffer, expand(b.layout, shape), b.type))
            )
        first = self.ref(a, [(row.size, row.strides[0]) for row in walk])
        second = ref_of(
            b.buffer,
            b.type,
            [(row.size if row.strides[1] else 1, row.strides[1] or 1) for row in walk],
            b.layout.offset,
        )
        second = _tidy(second)
        ref = self.emitter.emit(name, [first, second], place=place)
        at = 0 if place is None else place[1] // row_bytes(ref.type, 1)
        return Value(ref.buffer, replace(from_order(order, len(shape)), offset=at))

    def _like(self, b: Value, a: Value, shape: Sequence[int]) -> Value:
        """Returns `b` with its memory in the order of `a`'s."""
        whole = b.shape == tuple(shape)
        axes = sorted(
            range(len(shape)),
            key=lambda axis: -min((stride for _, stride in a.layout.axes[axis]), default=1 << 62),
        )
        if not whole:
            b = Value(b.buffer, replace(b.layout, axes=_padded(b.layout, len(shape))), b.type)
        turned = self.contiguous(
            Value(
                b.buffer,
                replace(b.layout, axes=tuple(b.layout.axes[axis] for axis in axes)),
                b.type,
            )
        )
        back = [axes.index(axis) for axis in range(len(shape))]
        return Value(
            turned.buffer,
            replace(turned.layout, axes=tuple(turned.layout.axes[axis] for axis in back)),
            turned.type,
        )


def _padded(layout: Layout, rank: int) -> tuple[tuple[Factor, ...], ...]:
    return (*((),) * (rank - len(layout.axes)), *layout.axes)


def _folded(value: Value, size: int) -> tuple[int, ...]:
    """Returns sizes for an operation by element: rows, so that threads can share them."""
    inner = next(
        (n for n, stride in reversed(value.layout.factors) if stride == 1 and n < size), size
    )
    if inner == size:
        for n in (*reversed(value.shape),):
            if n > 1:
                inner = n
                break
    return (inner, size // inner)


def _ends_in_neighbours(rows: Sequence[Row], which: int) -> bool:
    return bool(rows) and rows[-1].strides[which] == 1


def _order(rows: Sequence[Row]) -> list[Row] | None:
    """Returns an order in which ggml can walk both operands: innermost elements are neighbours."""
    if not rows:
        return []
    for order in (list(rows), sorted(rows, key=lambda row: -row.strides[0])):
        if order[-1].strides[0] == 1 and order[-1].strides[1] in (0, 1):
            by_axis = [row for row in order]
            if _keeps_axes(rows, by_axis):
                return by_axis
    return None


def _keeps_axes(rows: Sequence[Row], order: Sequence[Row]) -> bool:
    """Whether the rows of each axis keep their order, which a new tensor's layout relies on."""
    for axis in {row.axis for row in rows}:
        if [r for r in rows if r.axis == axis] != [r for r in order if r.axis == axis]:
            return False
    return True


def _tidy(ref: Ref) -> Ref:
    """Gives axes of size 1 the strides of a contiguous tensor, for checks of contiguous rows."""
    nb = [ref.nb[0] if ref.ne[0] > 1 else dense_nb(ref.type, ref.ne)[0]]
    for axis in range(1, 4):
        nb.append(ref.nb[axis] if ref.ne[axis] > 1 else nb[axis - 1] * ref.ne[axis - 1])
    return replace(ref, nb=tuple(nb))  # type: ignore[arg-type]
