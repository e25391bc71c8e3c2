"""Rewrites what exporters spell in many operators into the one that is meant.

A pattern is one function: it looks at a node, and where it ends a spelling it knows, it turns that
node into the canonical operator (in our own domain where ONNX has none) and returns True. What is
no longer used is dropped afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from sdkit_ggml.compiler.fold import drop_unused
from sdkit_ggml.compiler.graph import Array, Graph, Node

DOMAIN = "sdkit"
"""Of the operators that only this compiler knows: GroupNorm, Silu, GeGlu, Attention."""
LEAST_FINITE = -1e30
"""A mask at or below it shuts a key out."""


class Matcher:
    """Questions that patterns ask of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._producers = graph.producers()
        self._consumers = graph.consumers()

    def made_by(self, name: str, *op_types: str) -> Node | None:
        """Returns the node that computes a value if it is one of these operators."""
        node = self._producers.get(name)
        return node if node is not None and node.op_type in op_types else None

    def users(self, name: str) -> list[Node]:
        return self._consumers.get(name, [])

    def is_private(self, name: str) -> bool:
        """Whether one node alone uses the value."""
        return len(self.users(name)) == 1 and name not in self.graph.outputs

    def array(self, name: str) -> Array | None:
        constant = self.graph.constants.get(name)
        return None if constant is None else constant.array()

    def scalar(self, name: str) -> float | None:
        """Returns a constant of one element."""
        constant = self.graph.constants.get(name)
        if constant is None or constant.size != 1:
            return None
        return float(constant.array().ravel()[0])

    def shape(self, name: str) -> tuple[int, ...]:
        return self.graph.type_of(name).shape

    def is_typed(self, name: str) -> bool:
        return name in self.graph.types or name in self.graph.constants

    def times_scalar(self, name: str) -> tuple[str, float] | None:
        """Returns x and c where the value is x * c or x / c."""
        node = self.made_by(name, "Mul", "Div")
        if node is None:
            return None
        a, b = node.inputs
        c = self.scalar(b)
        if c is not None and c != 0:
            return a, c if node.op_type == "Mul" else 1 / c
        c = self.scalar(a)
        return (b, c) if c is not None and node.op_type == "Mul" else None


def canonicalise(graph: Graph) -> None:
    """Applies all patterns, in place."""
    for pattern in PATTERNS:
        matcher = Matcher(graph)
        renamed: dict[str, str] = {}
        for node in graph.nodes:
            if not all(matcher.is_typed(name) for name in (*node.inputs, *node.outputs) if name):
                continue
            same = pattern(matcher, node)
            if same and node.output not in graph.outputs:
                renamed[node.output] = same
        if renamed:
            for node in graph.nodes:
                node.inputs = [_last(renamed, name) for name in node.inputs]
        drop_unused(graph)


def _last(renamed: dict[str, str], name: str) -> str:
    while name in renamed:
        name = renamed[name]
    return name


def _become(node: Node, op_type: str, inputs: Sequence[str], **attributes: float) -> None:
    node.op_type, node.domain = op_type, DOMAIN
    node.inputs, node.attributes = list(inputs), dict(attributes)


def _nothing_done(m: Matcher, node: Node) -> str | None:
    """X * 1, x / 1, x + 0 and x - 0, which exporters leave behind where a factor is 1."""
    neutral = {"Mul": 1.0, "Div": 1.0, "Add": 0.0, "Sub": 0.0}.get(node.op_type)
    if neutral is None or node.domain:
        return None
    a, b = node.inputs
    if m.scalar(b) == neutral and m.shape(a) == m.shape(node.output):
        return a
    commutes = node.op_type in ("Mul", "Add")
    if commutes and m.scalar(a) == neutral and m.shape(b) == m.shape(node.output):
        return b
    return None


def _safe_softmax(m: Matcher, node: Node) -> str | None:
    """Where(IsNaN(p), 0, p) for p = Softmax(x + mask), if no row of the mask shuts out all keys."""
    if node.op_type != "Where":
        return None
    condition, zero, kept = node.inputs
    is_nan = m.made_by(condition, "IsNaN")
    softmax = m.made_by(kept, "Softmax")
    if is_nan is None or softmax is None or is_nan.inputs[0] != kept or m.scalar(zero) != 0:
        return None
    added = m.made_by(softmax.inputs[0], "Add")
    if added is None:
        return kept
    for name in added.inputs:
        mask = m.array(name)
        if mask is not None and mask.ndim and mask.size:
            widest = mask.astype(np.float64).max(axis=-1)
            return kept if bool((widest > LEAST_FINITE).all()) else None
    return None


def _bounded(m: Matcher, node: Node) -> None:
    """Where(x < c, c, x) and Where(c < x, c, x): the larger and the smaller of x and c."""
    if node.op_type != "Where":
        return
    less = m.made_by(node.inputs[0], "Less")
    bound, x = node.inputs[1:]
    if less is None or m.scalar(bound) is None or m.shape(x) != m.shape(node.output):
        return
    if less.inputs in ([x, bound], [bound, x]):
        node.op_type = "Max" if less.inputs == [x, bound] else "Min"
        node.inputs, node.attributes = [x, bound], {}


def _group_norm(m: Matcher, node: Node) -> None:
    """Reshape to groups, InstanceNormalization without affine, Reshape back."""
    if node.op_type != "Reshape" or node.inputs[0] in m.graph.constants:
        return
    norm = m.made_by(node.inputs[0], "InstanceNormalization")
    if norm is None:
        return
    into = m.made_by(norm.inputs[0], "Reshape")
    scale, bias = m.array(norm.inputs[1]), m.array(norm.inputs[2])
    if into is None or scale is None or bias is None or (scale != 1).any() or bias.any():
        return
    x = into.inputs[0]
    shape, grouped = m.shape(x), m.shape(norm.inputs[0])
    if len(shape) < 3 or m.shape(node.output) != shape or grouped[0] != shape[0]:
        return
    if shape[1] % grouped[1] == 0:
        eps = norm.attributes.get("epsilon", 1e-5)
        _become(node, "GroupNorm", [x], groups=grouped[1], epsilon=eps)


def _layer_norm(m: Matcher, node: Node) -> None:
    """(x - mean) / sqrt(mean((x - mean)^2) + eps), as exporters wrote it before opset 17."""
    if node.op_type != "Div" or node.domain:
        return
    centred, root = node.inputs
    minus, sqrt = m.made_by(centred, "Sub"), m.made_by(root, "Sqrt")
    plus = m.made_by(sqrt.inputs[0], "Add") if sqrt else None
    if minus is None or plus is None:
        return
    eps = m.scalar(plus.inputs[1])
    variance = m.made_by(plus.inputs[0], "ReduceMean")
    mean = m.made_by(minus.inputs[1], "ReduceMean")
    if eps is None or variance is None or mean is None or mean.inputs[0] != minus.inputs[0]:
        return
    square = m.made_by(variance.inputs[0], "Pow", "Mul")
    if square is None or square.inputs[0] not in (centred, *_twins(m, minus)):
        return
    is_square = (
        m.scalar(square.inputs[1]) == 2
        if square.op_type == "Pow"
        else square.inputs[1] == square.inputs[0]
    )
    x = minus.inputs[0]
    rank = len(m.shape(x))
    for reduce in (mean, variance):
        axes = m.array(reduce.inputs[1]) if len(reduce.inputs) > 1 else None
        if axes is None or [int(a) % rank for a in axes] != [rank - 1]:
            return
        if not reduce.attributes.get("keepdims", 1):
            return
    if is_square:
        _become(node, "Normalize", [x], epsilon=eps)


def _twins(m: Matcher, minus: Node) -> list[str]:
    """Some exporters compute x - mean twice."""
    return [
        user.output
        for user in m.users(minus.inputs[0])
        if user.op_type == "Sub" and user.inputs == minus.inputs
    ]


def _silu(m: Matcher, node: Node) -> None:
    if node.op_type != "Mul" or node.domain:
        return
    for x, gate in (node.inputs, node.inputs[::-1]):
        sigmoid = m.made_by(gate, "Sigmoid")
        if sigmoid is not None and sigmoid.inputs[0] == x:
            _become(node, "Silu", [x])
            return


def _gelu(m: Matcher, node: Node) -> None:
    """X * 0.5 * (1 + erf(x / sqrt 2)), multiplied in any order."""
    if node.op_type != "Mul" or node.domain:
        return
    factors = _factors(m, node, depth=2)
    scale = math.prod(c for c in map(m.scalar, factors) if c is not None)
    rest = [name for name in factors if m.scalar(name) is None]
    if len(rest) != 2 or not math.isclose(scale, 0.5, rel_tol=1e-4):
        return
    for x, other in (rest, rest[::-1]):
        plus = m.made_by(other, "Add")
        if plus is None:
            continue
        one, erf_name = plus.inputs if m.scalar(plus.inputs[0]) is not None else plus.inputs[::-1]
        erf = m.made_by(erf_name, "Erf")
        inner = m.times_scalar(erf.inputs[0]) if erf else None
        if m.scalar(one) == 1 and inner is not None and inner[0] == x:
            if math.isclose(inner[1], math.sqrt(0.5), rel_tol=1e-4):
                _become(node, "GeluErf", [x])
            return


def _factors(m: Matcher, node: Node, depth: int) -> list[str]:
    """Returns what a product is made of, through products that serve nothing else."""
    found: list[str] = []
    for name in node.inputs:
        inner = m.made_by(name, "Mul")
        has_scalar = inner is not None and any(m.scalar(one) is not None for one in inner.inputs)
        if inner is not None and depth and m.is_private(name) and (has_scalar or depth == 2):
            found += _factors(m, inner, depth - 1)
        else:
            found.append(name)
    return found


def _geglu(m: Matcher, node: Node) -> None:
    """X * gelu(gate): one operation in ggml, which takes both halves of a Split in place."""
    if node.op_type != "Mul" or node.domain:
        return
    for x, gate in (node.inputs, node.inputs[::-1]):
        gelu = m.made_by(gate, "Gelu", "GeluErf")
        if gelu is None or not m.is_private(gate) or m.shape(x) != m.shape(gate):
            continue
        if gelu.attributes.get("approximate", "none") == "none" and x not in m.graph.constants:
            _become(node, "GeGlu", [x, gelu.inputs[0]])
            return


def _attention(m: Matcher, node: Node) -> None:
    """Softmax(q k^T * scale) v, without a mask."""
    if node.op_type != "MatMul":
        return
    softmax = m.made_by(node.inputs[0], "Softmax")
    if softmax is None or not m.is_private(node.inputs[0]):
        return
    scores = softmax.inputs[0]
    rank = len(m.shape(scores))
    if rank not in (3, 4) or softmax.attributes.get("axis", -1) % rank != rank - 1:
        return
    if softmax.attributes.get("flattens"):
        return
    scale = 1.0
    scaled = m.times_scalar(scores)
    if scaled is not None and m.is_private(scores):
        scores, scale = scaled
    product = m.made_by(scores, "MatMul")
    value = node.inputs[1]
    if product is None or not m.is_private(scores):
        return
    query, key = product.inputs
    batches = {m.shape(name)[:-2] for name in (query, key, value)}
    if len(batches) != 1 or any(name in m.graph.constants for name in (query, key, value)):
        return
    query, by_query = _without_scale(m, query)
    key, by_key = _without_scale(m, key)
    _become(node, "Attention", [query, key, value], scale=scale * by_query * by_key)


def _without_scale(m: Matcher, name: str) -> tuple[str, float]:
    """Pulls a scalar factor out of a value, also from under a Transpose."""
    found = m.times_scalar(name)
    if found is not None:
        return found
    moved = m.made_by(name, "Transpose")
    if moved is not None and m.is_private(name):
        found = m.times_scalar(moved.inputs[0])
        if found is not None:
            moved.inputs = [found[0]]
            return name, found[1]
    return name, 1.0


PATTERNS: tuple[Callable[[Matcher, Node], str | None], ...] = (
    _nothing_done,
    _safe_softmax,
    _bounded,
    _group_norm,
    _layer_norm,
    _silu,
    _gelu,
    _geglu,
    _attention,
)
