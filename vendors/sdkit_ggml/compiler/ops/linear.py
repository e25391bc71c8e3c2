"""Matrix products and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sdkit_ggml.compiler.emitter import Ref
from sdkit_ggml.compiler.graph import Constant
from sdkit_ggml.compiler.layout import Layout, expand, merge_rows, refine, transpose
from sdkit_ggml.compiler.lowering import Lowering
from sdkit_ggml.compiler.recipes import PLAIN, TRANSPOSED
from sdkit_ggml.compiler.shapes import einsum_letters
from sdkit_ggml.compiler.values import Unsupported, Value
from sdkit_ggml.program import TYPES


def mat_mul(low: Lowering, a: str, b: str) -> Value:
    weights = low.constant(b)
    if weights is not None and len(weights.shape) == 2:
        return by_weights(low, low.value(a), weights, is_transposed=False)
    return product(low, low.value(a), low.value(b))


def einsum(low: Lowering, *inputs: str, equation: str) -> Value:
    """Permutations, and products of two operands that share letters as MatMul's do."""
    operands, right = einsum_letters(equation, len(inputs))
    if any(len(set(letters)) != len(letters) for letters in operands):
        raise Unsupported(f"takes diagonals ({equation})")
    if len(operands) == 1 and sorted(operands[0]) == sorted(right):
        value = low.value(inputs[0])
        order = [operands[0].index(letter) for letter in right]
        return Value(value.buffer, transpose(value.layout, order), value.type)
    if len(operands) != 2:
        raise Unsupported(f"is no permutation or product of two ({equation})")
    one, other = operands
    batch = [c for c in one if c in other and c in right]
    summed = [c for c in one if c in other and c not in right]
    rows, columns = ([c for c in letters if c in right and c not in batch] for letters in operands)
    if sorted([*batch, *summed, *rows]) != sorted(one) or sorted(
        [*batch, *summed, *columns]
    ) != sorted(other):
        raise Unsupported(f"sums over one operand alone ({equation})")
    sizes = dict(zip(one, low.value(inputs[0]).shape, strict=True))
    sizes |= dict(zip(other, low.value(inputs[1]).shape, strict=True))

    def arranged(name: str, letters: str, *groups: Sequence[str]) -> Value:
        value = low.value(name)
        order = [letters.index(c) for c in (*batch, *(c for group in groups for c in group))]
        moved = Value(value.buffer, transpose(value.layout, order), value.type)
        ends = [math.prod(sizes[c] for c in group) for group in groups]
        return low.reshaped(moved, (*(sizes[c] for c in batch), *ends))

    result = product(
        low, arranged(inputs[0], one, rows, summed), arranged(inputs[1], other, summed, columns)
    )
    letters = [*batch, *rows, *columns]
    spread = low.reshaped(result, [sizes[c] for c in letters])
    return Value(spread.buffer, transpose(spread.layout, [letters.index(c) for c in right]))


def gemm(
    low: Lowering,
    a: str,
    b: str,
    c: str = "",
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,  # noqa: N803 - ONNX's name
    transB: int = 0,  # noqa: N803
) -> Value:
    left = low.value(a)
    if transA:
        left = Value(left.buffer, transpose(left.layout, (1, 0)), left.type)
    weights = low.constant(b)
    if weights is not None:
        result = by_weights(low, left, weights, is_transposed=bool(transB))
    else:
        right = low.value(b)
        if transB:
            right = Value(right.buffer, transpose(right.layout, (1, 0)), right.type)
        result = product(low, left, right)
    result = low.scaled(result, alpha)
    if not c:
        return result
    return low.binary("add", result, low.scaled(low.value(c), beta))


def by_weights(low: Lowering, x: Value, weights: Constant, *, is_transposed: bool) -> Value:
    """Returns x @ weights; the weights are stored with the summed axis innermost."""
    inner, outer = weights.shape[::-1] if is_transposed else weights.shape
    kind = fitting(low.choices.matrix_type, inner)
    table = low.weight(
        weights,
        PLAIN if is_transposed else TRANSPOSED,
        kind,
        (inner, outer),
    )
    rows = x.layout.size // inner
    ref = low.emitter.emit("mul_mat", [table, low.flat(x, (inner, rows))])
    return low.fresh(ref, (*x.shape[:-1], outer))


def fitting(kind: str, inner: int) -> str:
    """Returns the type, or f16 where rows of this length are no whole blocks of it."""
    return kind if inner % TYPES[kind][1] == 0 else "f16"


def product(low: Lowering, a: Value, b: Value) -> Value:
    """Returns a @ b by numpy's rules."""
    if len(a.shape) == 1:
        row = product(low, low.reshaped(a, (1, *a.shape)), b)
        ends = row.shape[-1:] if len(b.shape) > 1 else ()
        return low.reshaped(row, (*row.shape[: len(row.shape) - 1 - len(ends)], *ends))
    if len(b.shape) == 1:
        column = product(low, a, low.reshaped(b, (*b.shape, 1)))
        return low.reshaped(column, column.shape[:-1])
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    turned = Value(b.buffer, _swapped(b.layout), b.type)
    left = _expanded(a, batch)
    right = _expanded(turned, batch)
    if _repeats(left):
        # ggml repeats the left operand only; here that is the second matrix.
        left = low.contiguous(left)
    operands = _matrices(low, right, left)
    ref = low.emitter.emit("mul_mat", operands)
    return low.fresh(ref, (*batch, a.shape[-2], b.shape[-1]))


def _matrices(low: Lowering, first: Value, second: Value) -> list[Ref]:
    """Returns two stacks of rows for mul_mat, the second one contiguous."""
    second = low.contiguous(second)
    if low.choices.is_dense:
        first = low.contiguous(first) if not _repeats(first) else first
    if _repeats(first) and any(s for axis in first.layout.axes[:-2] for _, s in axis):
        first = low.contiguous(first)
    for _ in range(2):
        stack = _stack([first, second])
        if stack is not None and _has_rows(first):
            return [
                low.ref(first, [*stack[0], *_matrix(first)]),
                low.ref(second, [*stack[1], *_matrix(second)]),
            ]
        first = low.contiguous(first)
    raise Unsupported("multiplies stacks of matrices that ggml cannot walk")


def _stack(values: Sequence[Value]) -> list[list[tuple[int, int]]] | None:
    """Returns the factors of the batch of each value, at most two, or None."""
    rows = refine([Layout(one.layout.axes[:-2]) for one in values])
    if rows is None:
        return None
    walk = merge_rows(rows)
    if len(walk) > 2:
        return None
    return [
        [(row.size if row.strides[k] else 1, row.strides[k] or 1) for row in walk]
        for k in range(len(values))
    ]


def _matrix(value: Value) -> list[tuple[int, int]]:
    """Returns the factors of the last two axes."""
    found = []
    for axis, size in zip(value.layout.axes[-2:], value.shape[-2:], strict=True):
        found.append(axis[0] if axis else (size, 0))
    outer, inner = found
    if inner[0] == 1:
        inner = (1, 1)
    if outer[0] == 1:
        outer = (1, inner[0] * inner[1])
    return [outer, inner]


def _has_rows(value: Value) -> bool:
    outer, inner = value.layout.axes[-2:]
    return (
        len(outer) <= 1
        and len(inner) <= 1
        and (not inner or inner[0][1] == 1)
        and (not outer or outer[0][1] >= (inner[0][0] if inner else 1))
    )


def _swapped(layout: Layout) -> Layout:
    rank = len(layout.axes)
    return transpose(layout, [*range(rank - 2), rank - 1, rank - 2])


def _expanded(value: Value, batch: Sequence[int]) -> Value:
    return Value(value.buffer, expand(value.layout, (*batch, *value.shape[-2:])), value.type)


def _repeats(value: Value) -> bool:
    return any(stride == 0 for axis in value.layout.axes for _, stride in axis)


def attention(low: Lowering, query: str, key: str, value: str, *, scale: float) -> Value:
    """softmax(query key scale) value; `key` comes as [..., d, tokens], as MatMul takes it."""
    q, v = low.value(query), low.value(value)
    k = low.value(key)
    k = Value(k.buffer, _swapped(k.layout), k.type)
    if low.choices.has_flash:
        return _flash(low, q, k, v, scale)
    scores = product(low, q, Value(k.buffer, _swapped(k.layout), k.type))
    shape = scores.shape
    flat = low.flat(scores, (shape[-1], math.prod(shape[:-1])))
    weights = low.fresh(low.emitter.emit("soft_max", [flat], (scale,)), shape)
    return product(low, weights, v)


def _flash(low: Lowering, q: Value, k: Value, v: Value, scale: float) -> Value:
    values = [
        one if _has_rows(one) and not _repeats(one) else low.contiguous(one) for one in (q, k, v)
    ]
    stack = _stack(values)
    if stack is None:
        values = [low.contiguous(one) for one in values]
        stack = _stack(values)
    if stack is None:
        raise Unsupported("attends over more axes than ggml has")
    refs = [
        low.ref(one, [*_two(factors), *_matrix(one)])
        for one, factors in zip(values, stack, strict=True)
    ]
    ref = low.emitter.emit("flash", refs, (scale,))
    # The result has the heads inside of the tokens: [d, heads, tokens, batch].
    batch = [size for size, _ in _two(stack[0])]
    tokens, depth = q.shape[-2], v.shape[-1]
    heads = batch[1]
    factors = ((batch[0], tokens * heads * depth), (heads, depth))
    outer = _regrouped(factors, q.shape[:-2])
    axes = (*outer, _one(tokens, heads * depth), _one(depth, 1))
    return low.result(ref, Layout(axes))


def _two(factors: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [*[(1, 1)] * (2 - len(factors)), *factors]


def _one(size: int, stride: int) -> tuple[tuple[int, int], ...]:
    return ((size, stride),) if size > 1 else ()


def _regrouped(factors: Sequence[tuple[int, int]], shape: Sequence[int]) -> Any:
    """Returns the batch factors as the axes of `shape`. Any: axes of a Layout."""
    from sdkit_ggml.compiler.layout import reshape

    flat = Layout((tuple(f for f in factors if f[0] > 1),))
    layout = reshape(flat, shape)
    if layout is None:
        raise Unsupported("attends over a batch that does not split into its axes")
    return layout.axes
