"""The shape of what each operator returns, from the shapes and constants it gets.

Needed before anything is lowered: exporters compute shapes inside the graph (Shape, Gather,
Concat, Reshape), and all of that folds away once the shapes are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sdkit_dispatch.graph.tensors import numpy_dtype_name
from sdkit_ggml.compiler import evaluate as ev
from sdkit_ggml.compiler.graph import Array, Graph, Node, ValueType

Shape = tuple[int, ...]


class Inputs:
    """The inputs of a node, as far as they are known."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self._graph = graph
        self._node = node

    def __len__(self) -> int:
        return len(self._node.inputs)

    @property
    def output_count(self) -> int:
        return len(self._node.outputs)

    def type(self, index: int) -> ValueType:
        return self._graph.type_of(self._node.inputs[index])

    def shape(self, index: int) -> Shape:
        return self.type(index).shape

    def has(self, index: int) -> bool:
        return index < len(self._node.inputs) and bool(self._node.inputs[index])

    def constant(self, index: int) -> Array | None:
        """Returns a constant input, or None where the node has no such input.

        Raises:
            ValueError: It is not constant.
        """
        if not self.has(index):
            return None
        name = self._node.inputs[index]
        if name not in self._graph.constants:
            raise ValueError(f'input {index} ("{name}") is computed while the graph runs')
        return self._graph.constants[name].array()

    def needed(self, index: int) -> Array:
        found = self.constant(index)
        if found is None:
            raise ValueError(f"input {index} is missing")
        return found


def output_types(graph: Graph, node: Node) -> list[ValueType]:
    """Returns the types of the outputs of a node.

    Raises:
        ValueError: The node contradicts its inputs, or needs an input to be constant.
        KeyError: The operator is unknown.
    """
    inputs = Inputs(graph, node)
    shapes = SHAPES[node.op_type](inputs, **node.attributes)
    type_of: Callable[..., str] = DTYPES.get(node.op_type, _first)
    dtype = type_of(inputs, **node.attributes)
    return [ValueType(dtype, shape) for shape in shapes]


def _first(i: Inputs, **_: Any) -> str:
    return i.type(0).dtype


def _same(i: Inputs, **_: Any) -> list[Shape]:
    return [i.shape(0)]


def _broadcast(i: Inputs, **_: Any) -> list[Shape]:
    return [np.broadcast_shapes(*(i.shape(k) for k in range(len(i))))]


def _mat_mul(i: Inputs) -> list[Shape]:
    a, b = i.shape(0), i.shape(1)
    left, right = (a if len(a) > 1 else (1, *a)), (b if len(b) > 1 else (*b, 1))
    if left[-1] != right[-2]:
        raise ValueError(f"{list(a)} and {list(b)} do not multiply")
    batch = np.broadcast_shapes(left[:-2], right[:-2])
    return [(*batch, *(left[-2:-1] if len(a) > 1 else ()), *(right[-1:] if len(b) > 1 else ()))]


def _gemm(i: Inputs, *, transA: int = 0, transB: int = 0, **_: Any) -> list[Shape]:  # noqa: N803
    a, b = i.shape(0), i.shape(1)
    if transA:
        a = a[::-1]
    if transB:
        b = b[::-1]
    if len(a) != 2 or len(b) != 2 or a[1] != b[0]:
        raise ValueError(f"{list(i.shape(0))} and {list(i.shape(1))} do not multiply")
    return [(a[0], b[1])]


def conv_padding(
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int] | None,
    auto_pad: str,
) -> list[tuple[int, int]]:
    """Returns the padding before and after each spatial axis of a convolution or pooling."""
    count = len(sizes)
    if auto_pad in ("NOTSET", ""):
        given = list(pads or [0] * (2 * count))
        return [(given[axis], given[axis + count]) for axis in range(count)]
    if auto_pad == "VALID":
        return [(0, 0)] * count
    found = []
    for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        small = total // 2
        is_upper = auto_pad == "SAME_UPPER"
        found.append((small, total - small) if is_upper else (total - small, small))
    return found


def conv_size(
    size: int, kernel: int, stride: int, dilation: int, pads: tuple[int, int], ceil: bool = False
) -> int:
    """Returns the size of one spatial axis after a convolution or pooling."""
    span = size + sum(pads) - dilation * (kernel - 1) - 1
    if span < 0:
        raise ValueError(f"a kernel of {kernel} is larger than {size} with its padding")
    if not ceil:
        return span // stride + 1
    count = -(-span // stride) + 1
    # The last window must start inside the input or its left padding.
    return count - 1 if (count - 1) * stride >= size + pads[0] else count


def _conv(
    i: Inputs,
    *,
    kernel_shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    auto_pad: str = "NOTSET",
    group: int = 1,
) -> list[Shape]:
    x, w = i.shape(0), i.shape(1)
    kernel = w[2:]
    count = len(kernel)
    if len(x) != count + 2 or x[1] != w[1] * group or w[0] % group:
        raise ValueError(f"{list(x)} does not convolve with {list(w)} in {group} groups")
    stride, dilation = list(strides or [1] * count), list(dilations or [1] * count)
    padding = conv_padding(x[2:], kernel, stride, dilation, pads, auto_pad)
    sizes = map(conv_size, x[2:], kernel, stride, dilation, padding)
    return [(x[0], w[0], *sizes)]


def _pool(
    i: Inputs,
    *,
    kernel_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    **_: Any,
) -> list[Shape]:
    x = i.shape(0)
    count = len(kernel_shape)
    stride, dilation = list(strides or [1] * count), list(dilations or [1] * count)
    padding = conv_padding(x[2:], kernel_shape, stride, dilation, pads, auto_pad)
    sizes = [
        conv_size(*one, ceil=bool(ceil_mode))
        for one in zip(x[2:], kernel_shape, stride, dilation, padding, strict=True)
    ]
    return [(*x[:2], *sizes)]


def _concat(i: Inputs, *, axis: int) -> list[Shape]:
    parts = [i.shape(k) for k in range(len(i))]
    place = axis % len(parts[0])
    for part in parts[1:]:
        if [*part[:place], *part[place + 1 :]] != [*parts[0][:place], *parts[0][place + 1 :]]:
            raise ValueError(f"{[list(p) for p in parts]} do not concatenate along {axis}")
    total = sum(part[place] for part in parts)
    return [(*parts[0][:place], total, *parts[0][place + 1 :])]


def _slice(i: Inputs) -> list[Shape]:
    picked = ev.slices(i.shape(0), i.needed(1), i.needed(2), i.constant(3), i.constant(4))
    return [tuple(len(range(one.start, one.stop, one.step)) for one in picked)]


def _split(i: Inputs, *, axis: int = 0, num_outputs: int = 0) -> list[Shape]:
    shape = i.shape(0)
    place = axis % len(shape)
    sizes = i.constant(1)
    count = num_outputs or i.output_count
    parts = ev.split_sizes(shape[place], None if sizes is None else sizes.tolist(), count)
    return [(*shape[:place], part, *shape[place + 1 :]) for part in parts]


def _gather(i: Inputs, *, axis: int = 0) -> list[Shape]:
    data, indices = i.shape(0), i.shape(1)
    place = axis % len(data)
    return [(*data[:place], *indices, *data[place + 1 :])]


def _gather_nd(i: Inputs, *, batch_dims: int = 0) -> list[Shape]:
    data, indices = i.shape(0), i.shape(1)
    return [(*indices[:-1], *data[batch_dims + indices[-1] :])]


def _squeeze(i: Inputs) -> list[Shape]:
    shape, axes = i.shape(0), i.constant(1)
    if axes is None:
        return [tuple(size for size in shape if size != 1)]
    gone = ev.normal_axes(axes.ravel().tolist(), len(shape))
    if any(shape[axis] != 1 for axis in gone):
        raise ValueError(f"axes {gone} of {list(shape)} are not all 1")
    return [tuple(size for axis, size in enumerate(shape) if axis not in gone)]


def _unsqueeze(i: Inputs) -> list[Shape]:
    axes = i.needed(1).ravel().tolist()
    shape = list(i.shape(0))
    for axis in ev.normal_axes(axes, len(shape) + len(axes)):
        shape.insert(axis, 1)
    return [tuple(shape)]


def _reduced(
    i: Inputs, *, keepdims: int = 1, noop_with_empty_axes: int = 0, axes: Any = None
) -> list[Shape]:
    shape, given = i.shape(0), i.constant(1)
    if given is None or not given.size:
        if noop_with_empty_axes:
            return [shape]
        gone = list(range(len(shape)))
    else:
        gone = ev.normal_axes(given.tolist(), len(shape))
    if keepdims:
        return [tuple(1 if axis in gone else size for axis, size in enumerate(shape))]
    return [tuple(size for axis, size in enumerate(shape) if axis not in gone)]


def _arg_max(i: Inputs, *, axis: int = 0, keepdims: int = 1, **_: Any) -> list[Shape]:
    shape = i.shape(0)
    place = axis % len(shape)
    middle = (1,) if keepdims else ()
    return [(*shape[:place], *middle, *shape[place + 1 :])]


def _layer_norm(i: Inputs, *, axis: int = -1, **_: Any) -> list[Shape]:
    shape = i.shape(0)
    place = axis % len(shape)
    rows = (*shape[:place], *(1,) * (len(shape) - place))
    return [shape, rows, rows]


def _resize(
    i: Inputs,
    *,
    axes: Sequence[int] | None = None,
    keep_aspect_ratio_policy: str = "stretch",
    **_: Any,
) -> list[Shape]:
    shape = i.shape(0)
    place = 3 if i.has(3) else 2 if i.has(2) else 1
    given = i.needed(place)
    chosen = list(range(len(shape))) if axes is None else [axis % len(shape) for axis in axes]
    sizes = list(shape)
    if place == 3 and keep_aspect_ratio_policy != "stretch":
        ratios = [size / shape[axis] for axis, size in zip(chosen, given.tolist(), strict=True)]
        kept = min(ratios) if keep_aspect_ratio_policy == "not_larger" else max(ratios)
        given = np.floor([kept * shape[axis] + 0.5 for axis in chosen])
    for axis, value in zip(chosen, given.tolist(), strict=True):
        sizes[axis] = int(value) if place == 3 else math.floor(shape[axis] * value)
    return [tuple(sizes)]


def _upsample(i: Inputs, **_: Any) -> list[Shape]:
    scales = i.needed(1).tolist()
    return [tuple(math.floor(s * x) for s, x in zip(i.shape(0), scales, strict=True))]


def _pad(i: Inputs, *, mode: str = "constant") -> list[Shape]:
    shape, axes = i.shape(0), i.constant(3)
    widths = ev.pad_widths(
        i.needed(1).tolist(), len(shape), None if axes is None else axes.tolist()
    )
    return [tuple(size + sum(width) for size, width in zip(shape, widths, strict=True))]


def einsum_letters(equation: str, count: int) -> tuple[list[str], str]:
    """Returns the letters of each operand and of the result.

    Raises:
        ValueError: There are ellipses, or another number of operands.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    if "." in equation or len(operands) != count:
        raise ValueError(f"{equation!r} is no equation of {count} operands without ellipses")
    if not arrow:
        joined = "".join(operands)
        right = "".join(sorted(one for one in set(joined) if joined.count(one) == 1))
    return operands, right


def _einsum(i: Inputs, *, equation: str) -> list[Shape]:
    operands, right = einsum_letters(equation, len(i))
    sizes: dict[str, int] = {}
    for index, letters in enumerate(operands):
        sizes.update(zip(letters, i.shape(index), strict=True))
    return [tuple(sizes[letter] for letter in right)]


def _tile(i: Inputs) -> list[Shape]:
    return [tuple(a * b for a, b in zip(i.shape(0), i.needed(1).tolist(), strict=True))]


def _depth_to_space(i: Inputs, *, blocksize: int, mode: str = "DCR") -> list[Shape]:
    n, c, h, w = i.shape(0)
    return [(n, c // blocksize**2, h * blocksize, w * blocksize)]


def _space_to_depth(i: Inputs, *, blocksize: int) -> list[Shape]:
    n, c, h, w = i.shape(0)
    return [(n, c * blocksize**2, h // blocksize, w // blocksize)]


_SAME_SHAPE = (
    *("Abs", "Cast", "CastLike", "Ceil", "Clip", "Cos", "CumSum", "Dropout", "Elu", "Erf", "Exp"),
    *("Floor", "Gelu", "GroupNormalization", "HardSigmoid", "HardSwish", "Identity"),
    *("InstanceNormalization", "IsNaN", "LeakyRelu", "Log", "LogSoftmax", "Mish", "Neg", "Not"),
    *("RMSNormalization", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin"),
    *("Softmax", "Softplus", "Softsign", "Sqrt", "Swish", "Tanh", "Trilu"),
)
_BROADCASTING = (
    *("Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max"),
    *("Mean", "Min", "Mod", "Mul", "Or", "Pow", "Sub", "Sum", "Where"),
)

SHAPES: dict[str, Callable[..., list[Shape]]] = {
    **dict.fromkeys(_SAME_SHAPE, _same),
    **dict.fromkeys(_BROADCASTING, _broadcast),
    "ArgMax": _arg_max,
    "AveragePool": _pool,
    "Concat": _concat,
    "Conv": _conv,
    "DepthToSpace": _depth_to_space,
    "Einsum": _einsum,
    "Expand": lambda i: [np.broadcast_shapes(i.shape(0), tuple(i.needed(1).tolist()))],
    "Flatten": lambda i, *, axis=1: [ev.flat_shape(i.shape(0), axis)],
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "GlobalAveragePool": lambda i: [(*i.shape(0)[:2], *(1,) * (len(i.shape(0)) - 2))],
    "LayerNormalization": _layer_norm,
    "MatMul": _mat_mul,
    "MaxPool": _pool,
    "Pad": _pad,
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"), _reduced),
    "Reshape": lambda i, *, allowzero=0: [
        ev.resolve_shape(i.shape(0), i.needed(1).tolist(), allowzero)
    ],
    "Resize": _resize,
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": lambda i, *, perm=None: [
        tuple(i.shape(0)[axis] for axis in (perm or range(len(i.shape(0)))[::-1]))
    ],
    "Unsqueeze": _unsqueeze,
    "Upsample": _upsample,
}

DTYPES: dict[str, Callable[..., str]] = {
    **dict.fromkeys(
        ["And", "Equal", "Greater", "GreaterOrEqual", "IsNaN", "Less", "LessOrEqual", "Not", "Or"],
        lambda i, **_: "bool",
    ),
    "ArgMax": lambda i, **_: "int64",
    "Cast": lambda i, *, to, **_: numpy_dtype_name(to),
    "CastLike": lambda i, **_: i.type(1).dtype,
    "Where": lambda i, **_: i.type(1).dtype,
}
"""Operators whose result is of another type than their first input."""
