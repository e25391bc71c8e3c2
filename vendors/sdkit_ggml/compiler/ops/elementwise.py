"""Operators that work element by element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sdkit_ggml.compiler.graph import Constant
from sdkit_ggml.compiler.lowering import Lowering
from sdkit_ggml.compiler.values import Unsupported, Value
from sdkit_ggml.instructions import GEGLU_ERF, UNARY

LARGEST = 3.4028234663852886e38
"""Of float32: stands for no bound, which JSON cannot write."""


def _arithmetic(name: str, low: Lowering, a: str, b: str) -> Value:
    right = low.scalar(b)
    if right is not None and low.constant(a) is None:
        grown = low.graph.type_of(b).shape
        if len(grown) <= len(low.value(a).shape):
            scaled = {
                "add": (1.0, right),
                "sub": (1.0, -right),
                "mul": (right, 0.0),
                "div": (1 / right if right else math.inf, 0.0),
            }[name]
            if all(map(math.isfinite, scaled)):
                return low.scaled(low.value(a), *scaled)
    left = low.scalar(a)
    if left is not None and name in ("add", "mul"):
        return _arithmetic(name, low, b, a) if low.scalar(b) is None else _both(name, low, a, b)
    if left is not None and name == "sub" and not low.graph.type_of(a).shape:
        return low.scaled(low.value(b), -1.0, left)
    return _both(name, low, a, b)


def _both(name: str, low: Lowering, a: str, b: str) -> Value:
    return low.binary(name, low.value(a), low.value(b))


def add(low: Lowering, a: str, b: str, **_: Any) -> Value:
    return _arithmetic("add", low, a, b)


def sub(low: Lowering, a: str, b: str, **_: Any) -> Value:
    return _arithmetic("sub", low, a, b)


def mul(low: Lowering, a: str, b: str, **_: Any) -> Value:
    return _arithmetic("mul", low, a, b)


def div(low: Lowering, a: str, b: str, **_: Any) -> Value:
    return _arithmetic("div", low, a, b)


def sum_of(low: Lowering, *inputs: str) -> Value:
    total = low.value(inputs[0])
    for name in inputs[1:]:
        total = low.binary("add", total, low.value(name))
    return total


def mean_of(low: Lowering, *inputs: str) -> Value:
    return low.scaled(sum_of(low, *inputs), 1 / len(inputs))


def power(low: Lowering, a: str, b: str) -> Value:
    exponent = low.scalar(b)
    x = low.value(a)
    if exponent == 1:
        return x
    if exponent == 2:
        return low.unary("sqr", x)
    if exponent == 3:
        return low.binary("mul", low.unary("sqr", x), x)
    if exponent == 0.5:
        return low.unary("sqrt", x)
    if exponent is None:
        raise Unsupported("raises to powers that are tensors")
    raise Unsupported(f"raises to the power of {exponent}")


def maximum(low: Lowering, *inputs: str) -> Value:
    return _extreme(low, inputs, is_largest=True)


def minimum(low: Lowering, *inputs: str) -> Value:
    return _extreme(low, inputs, is_largest=False)


def _extreme(low: Lowering, inputs: Sequence[str], *, is_largest: bool) -> Value:
    bounds = [low.scalar(name) for name in inputs]
    kept = [name for name, bound in zip(inputs, bounds, strict=True) if bound is None]
    result = low.value(kept[0])
    for name in kept[1:]:
        other = low.value(name)
        first, second = (result, other) if is_largest else (other, result)
        larger = low.unary("unary", low.binary("sub", first, second), UNARY["step"])
        result = _chosen(low, larger, result, other)
    for bound in bounds:
        if bound is not None:
            span = (bound, LARGEST) if is_largest else (-LARGEST, bound)
            result = low.unary("clamp", result, *span)
    return result


def _chosen(low: Lowering, mask: Value, yes: Value, no: Value) -> Value:
    """Returns `yes` where the mask is 1 and `no` where it is 0; both are finite, so it is exact."""
    other = low.scaled(mask, -1.0, 1.0)
    return low.binary("add", low.binary("mul", yes, mask), low.binary("mul", no, other))


def where(low: Lowering, condition: str, yes: str, no: str) -> Value:
    """Takes a constant condition; infinite constants become the largest number."""
    constant = low.constant(condition)
    if constant is None:
        raise Unsupported("chooses by a condition that is computed from floats")
    mask = Constant.of(constant.array().astype(np.float32))
    return _chosen(low, low.constant_value(mask), _finite(low, yes), _finite(low, no))


def _finite(low: Lowering, name: str) -> Value:
    constant = low.constant(name)
    if constant is None or constant.dtype not in ("float32", "float16", "float64"):
        return low.value(name)
    array = np.nan_to_num(
        constant.array().astype(np.float32), nan=0.0, posinf=LARGEST, neginf=-LARGEST
    )
    return low.constant_value(Constant.of(array))


def clip(low: Lowering, x: str, low_bound: str = "", high_bound: str = "") -> Value:
    bounds = [(low_bound, -LARGEST), (high_bound, LARGEST)]
    if any(name and low.scalar(name) is None for name, _ in bounds):
        raise Unsupported("clips to what is computed")
    least, most = (low.scalar(name) if name else default for name, default in bounds)
    assert least is not None
    assert most is not None
    if least > most:
        least = most
    return low.unary("clamp", low.value(x), least, most)


def unary(kind: str) -> Any:  # Any: the type of a function of this module
    """Returns the function of an operator that is one unary operation of ggml."""

    def lower(low: Lowering, x: str, **_: Any) -> Value:
        return low.unary("unary", low.value(x), UNARY[kind])

    return lower


def named(name: str) -> Any:  # Any: the type of a function of this module
    """Returns the function of an operator that ggml has under an own name."""

    def lower(low: Lowering, x: str, **_: Any) -> Value:
        return low.unary(name, low.value(x))

    return lower


def relu(low: Lowering, x: str) -> Value:
    return low.unary("unary", low.value(x), UNARY["relu"])


def leaky_relu(low: Lowering, x: str, *, alpha: float = 0.01) -> Value:
    return low.unary("leaky_relu", low.value(x), alpha)


def elu(low: Lowering, x: str, *, alpha: float = 1.0) -> Value:
    """Alpha (exp(min(x, 0)) - 1) + max(x, 0)."""
    value = low.value(x)
    bent = low.unary("unary", low.unary("clamp", value, -LARGEST, 0.0), UNARY["exp"])
    straight = low.unary("unary", value, UNARY["relu"])
    return low.binary("add", low.scaled(bent, alpha, -alpha), straight)


def selu(
    low: Lowering,
    x: str,
    *,
    alpha: float = 1.67326319217681884765625,
    gamma: float = 1.05070102214813232421875,
) -> Value:
    return low.scaled(elu(low, x, alpha=alpha), gamma)


def hard_sigmoid(low: Lowering, x: str, *, alpha: float = 0.2, beta: float = 0.5) -> Value:
    return low.unary("clamp", low.scaled(low.value(x), alpha, beta), 0.0, 1.0)


def silu(low: Lowering, x: str) -> Value:
    return low.unary("unary", low.value(x), UNARY["silu"])


def swish(low: Lowering, x: str, *, alpha: float = 1.0) -> Value:
    value = low.value(x)
    gate = low.unary("unary", low.scaled(value, alpha), UNARY["sigmoid"])
    return low.binary("mul", value, gate)


def mish(low: Lowering, x: str) -> Value:
    value = low.value(x)
    soft = low.unary("unary", value, UNARY["softplus"])
    return low.binary("mul", value, low.unary("unary", soft, UNARY["tanh"]))


def softsign(low: Lowering, x: str) -> Value:
    value = low.value(x)
    size = low.unary("unary", value, UNARY["abs"])
    return low.binary("div", value, low.scaled(size, 1.0, 1.0))


def gelu(low: Lowering, x: str, *, approximate: str = "none") -> Value:
    value = low.value(x)
    if approximate == "none":
        return low.unary("unary", value, UNARY["gelu_erf"])
    # 0.5 (1 + tanh u) is sigmoid(2 u); ggml's own gelu looks tanh up in a float16 table.
    root = 2 * math.sqrt(2 / math.pi)
    cubic = low.scaled(low.unary("sqr", value), 0.044715 * root, root)
    gate = low.unary("unary", low.binary("mul", cubic, value), UNARY["sigmoid"])
    return low.binary("mul", value, gate)


def ge_glu(low: Lowering, x: str, gate: str) -> Value:
    """X * gelu(gate); both are taken in place if their rows are contiguous."""
    left, right = low.value(x), low.value(gate)
    refs = [_rows(low, one) for one in (right, left)]
    ref = low.emitter.emit("glu", refs, (GEGLU_ERF,))
    return low.fresh(ref, left.shape)


def _rows(low: Lowering, value: Value) -> Any:  # Any: a Ref
    factors = value.layout.factors
    if len(factors) == 2 and factors[1][1] == 1 and factors[1][0] == value.shape[-1]:
        return low.ref(value, factors)
    inner = value.shape[-1] if value.shape else 1
    return low.flat(value, (inner, value.layout.size // inner))


def reciprocal(low: Lowering, x: str) -> Value:
    """1 / x as exp(-log x) would lose digits; ggml divides tensors only, so ones are made."""
    value = low.value(x)
    ones = low.scaled(value, 0.0, 1.0)
    return low.binary("div", ones, value)
