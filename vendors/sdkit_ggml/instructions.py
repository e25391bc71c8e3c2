"""What each operation of a program demands of its operands, and what it gives.

One function an operation: it takes operands and parameters, returns type and `ne` of the result,
and raises `ProgramError` where ggml (0.20 to 0.27) would assert, which aborts the process. The
compiler asks them while it writes a program, and the loader again for every program it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sdkit_ggml.program import TYPES, Ne, Operand, dense_nb

Params = Sequence[int | float]
Result = tuple[str, Ne]
Rule = Callable[[Sequence[Operand], Params], Result]

UNARY: dict[str, int] = {
    "abs": 0,
    "sign": 1,
    "neg": 2,
    "step": 3,
    "tanh": 4,
    "relu": 6,
    "sigmoid": 7,
    "silu": 10,
    "hardswish": 11,
    "hardsigmoid": 12,
    "exp": 13,
    "softplus": 15,
    "gelu_erf": 16,
    "floor": 18,
    "ceil": 19,
    "round": 20,
}
"""Name -> `enum ggml_unary_op`, the same from ggml 0.20 to 0.27. elu is left out: ONNX's has an
alpha; so are gelu and gelu_quick, which look their values up in a float16 table."""
GEGLU_ERF = 4
"""Of `enum ggml_glu_op`."""
MAX_POOL, MEAN_POOL = 0, 1


class ProgramError(ValueError):
    """A program that ggml would not take."""


def check(name: str, inputs: Sequence[Operand], params: Params) -> Result:
    """Returns type and `ne` of the result of an operation.

    Raises:
        ProgramError: ggml would refuse it.
    """
    rule = RULES.get(name)
    if rule is None:
        raise ProgramError(f'there is no operation "{name}"')
    try:
        if any(min(one.ne) < 1 for one in inputs):
            raise ProgramError("takes no empty operand")
        return rule(inputs, params)
    except ProgramError as error:
        shapes = ", ".join(f"{one.type}{list(one.ne)}/{list(one.nb)}" for one in inputs)
        raise ProgramError(f"{name}({shapes}; {list(params)}): {error}") from None
    except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
        raise ProgramError(f"{name}: wrong operands or parameters: {error}") from None


def is_dense(operand: Operand) -> bool:
    """Whether the operand is contiguous as ggml has it; strides of axes of size 1 do not count."""
    expected = dense_nb(operand.type, operand.ne)
    return all(
        size == 1 or have == want
        for size, have, want in zip(operand.ne[1:], operand.nb[1:], expected[1:], strict=True)
    ) and (operand.ne[0] == 1 or operand.nb[0] == expected[0])


def has_rows(operand: Operand) -> bool:
    """Whether the innermost elements are neighbours."""
    return operand.nb[0] == TYPES[operand.type][2]


def _need(condition: bool, words: str) -> None:
    if not condition:
        raise ProgramError(words)


def _float(*operands: Operand) -> None:
    _need(all(one.type == "f32" for one in operands), "takes f32")


def _same(inputs: Sequence[Operand], params: Params) -> Result:
    (a,) = inputs
    _float(a)
    _need(is_dense(a), "takes a contiguous operand")
    return "f32", a.ne


def _unary(inputs: Sequence[Operand], params: Params) -> Result:
    (kind,) = params
    _need(kind in UNARY.values(), f"there is no unary operation {kind}")
    return _same(inputs, params)


def _counted(count: int) -> Rule:
    def rule(inputs: Sequence[Operand], params: Params) -> Result:
        _need(len(params) == count, f"takes {count} parameters")
        return _same(inputs, params)

    return rule


def _binary(inputs: Sequence[Operand], params: Params) -> Result:
    a, b = inputs
    _float(a, b)
    _need(has_rows(a) and has_rows(b), "takes neighbours as innermost elements")
    _need(_repeats(b.ne, a.ne), "the second operand does not repeat to the first")
    return "f32", a.ne


def _repeats(small: Ne, large: Ne) -> bool:
    return all(big % one == 0 for one, big in zip(small, large, strict=True))


def _glu(inputs: Sequence[Operand], params: Params) -> Result:
    a, b = inputs
    _float(a, b)
    _need(params == (GEGLU_ERF,) or list(params) == [GEGLU_ERF], "knows geglu_erf only")
    _need(a.ne == b.ne, "takes two operands of one shape")
    for one in inputs:
        _need(has_rows(one) and _dense_above_rows(one), "takes contiguous rows at one distance")
    return "f32", a.ne


def _dense_above_rows(operand: Operand) -> bool:
    ne, nb = operand.ne, operand.nb
    return (ne[2] == 1 or nb[2] == nb[1] * ne[1]) and (ne[3] == 1 or nb[3] == nb[2] * ne[2])


def _norm(inputs: Sequence[Operand], params: Params) -> Result:
    (eps,) = params
    _need(eps >= 0, "takes an epsilon of 0 or more")
    return _same(inputs, ())


def _group_norm(inputs: Sequence[Operand], params: Params) -> Result:
    groups, eps = params
    _need(eps >= 0, "takes an epsilon of 0 or more")
    _need(groups >= 1 and inputs[0].ne[2] % groups == 0, "groups do not divide the channels")
    return _same(inputs, ())


def _soft_max(inputs: Sequence[Operand], params: Params) -> Result:
    _need(len(params) == 1, "takes a scale")
    a = inputs[0]
    if len(inputs) == 2:
        mask = inputs[1]
        _need(mask.type in ("f32", "f16") and is_dense(mask), "takes a contiguous mask")
        _need(
            mask.ne[0] == a.ne[0] and mask.ne[1] >= a.ne[1] and _repeats(mask.ne[2:], a.ne[2:]),  # type: ignore[arg-type]
            "the mask does not fit",
        )
    return _same(inputs[:1], ())


def _mul_mat(inputs: Sequence[Operand], params: Params) -> Result:
    a, b = inputs
    _need(b.type == "f32" or (b.type == "f16" and a.type == "f16"), "takes f32 on the right")
    _need(a.type != "i32", "takes floats on the left")
    _need(has_rows(a) and has_rows(b), "takes neighbours as innermost elements")
    _need(a.nb[1] >= a.nb[0] and b.nb[1] >= b.nb[0], "takes no transposed operand")
    _need(TYPES[a.type][1] == 1 or is_dense(a), "takes contiguous quantised weights")
    _need(a.ne[0] == b.ne[0], "the inner sizes differ")
    _need(b.ne[2] % a.ne[2] == 0 and b.ne[3] % a.ne[3] == 0, "the batches do not repeat")
    return "f32", (a.ne[1], b.ne[1], b.ne[2], b.ne[3])


def _flash(inputs: Sequence[Operand], params: Params) -> Result:
    q, k, v = inputs
    _need(len(params) == 1, "takes a scale")
    _float(q, k, v)
    _need(has_rows(q) and has_rows(k) and has_rows(v), "takes contiguous heads")
    _need(q.ne[0] == k.ne[0] and k.ne[1] == v.ne[1], "queries, keys and values do not fit")
    _need(k.ne[2:] == v.ne[2:] and q.ne[2:] == k.ne[2:], "takes one number of heads")
    return "f32", (v.ne[0], q.ne[2], q.ne[1], q.ne[3])


def _get_rows(inputs: Sequence[Operand], params: Params) -> Result:
    a, ids = inputs
    _need(ids.type == "i32" and has_rows(ids), "takes i32 indices")
    _need(is_dense(a) and a.type != "i32", "takes a contiguous table")
    _need(a.ne[2] == ids.ne[1] and a.ne[3] == ids.ne[2] and ids.ne[3] == 1, "the batches differ")
    return "f32", (a.ne[0], ids.ne[0], ids.ne[1], ids.ne[2])


def _cont(inputs: Sequence[Operand], params: Params) -> Result:
    (a,) = inputs
    _need(a.type in ("f32", "f16", "i32"), "takes f32, f16 or i32")
    return a.type, a.ne


def _cpy(inputs: Sequence[Operand], params: Params) -> Result:
    source, into = inputs
    _float(source, into)
    _need(source.ne == into.ne, "takes two operands of one shape")
    return "f32", into.ne


def _repeat(inputs: Sequence[Operand], params: Params) -> Result:
    (a,) = inputs
    ne = _ne(params)
    _float(a)
    _need(has_rows(a), "takes neighbours as innermost elements")
    _need(_repeats(a.ne, ne), "does not repeat to the result")
    return "f32", ne


def _ne(params: Params) -> Ne:
    a, b, c, d = (int(size) for size in params)
    return (a, b, c, d)


def _im2col(inputs: Sequence[Operand], params: Params) -> Result:
    kernel, data = inputs
    s0, s1, p0, p1, d0, d1, half = (int(one) for one in params)
    _float(data)
    _need(kernel.type == ("f16" if half else "f32"), "the kernel has another type")
    _need(kernel.ne[2] == data.ne[2], "the channels differ")
    _need(has_rows(data) and data.nb[1] == data.nb[0] * data.ne[0], "takes contiguous planes")
    _need(min(s0, s1, d0, d1) >= 1 and min(p0, p1) >= 0, "takes positive strides")
    wide = (data.ne[0] + 2 * p0 - d0 * (kernel.ne[0] - 1) - 1) // s0 + 1
    high = (data.ne[1] + 2 * p1 - d1 * (kernel.ne[1] - 1) - 1) // s1 + 1
    _need(wide > 0 and high > 0, "the kernel is larger than the picture")
    inner = kernel.ne[0] * kernel.ne[1] * kernel.ne[2]
    return ("f16" if half else "f32"), (inner, wide, high, data.ne[3])


def _pool_2d(inputs: Sequence[Operand], params: Params) -> Result:
    kind, k0, k1, s0, s1, p0, p1 = (int(one) for one in params)
    _need(kind in (MAX_POOL, MEAN_POOL), f"there is no pooling {kind}")
    _, (w, h, c, n) = _same(inputs, ())
    _need(min(k0, k1, s0, s1) >= 1 and 0 <= p0 < k0 and 0 <= p1 < k1, "takes a smaller padding")
    return "f32", ((w + 2 * p0 - k0) // s0 + 1, (h + 2 * p1 - k1) // s1 + 1, c, n)


def _upscale(inputs: Sequence[Operand], params: Params) -> Result:
    (factor,) = (int(one) for one in params)
    _need(factor >= 1, "takes a whole factor")
    _, (w, h, c, n) = _same(inputs, ())
    return "f32", (w * factor, h * factor, c, n)


def _pad(inputs: Sequence[Operand], params: Params) -> Result:
    left0, right0, left1, right1, left2, right2, left3, right3 = (int(one) for one in params)
    _need(min(int(one) for one in params) >= 0, "takes no negative padding")
    _, (a, b, c, d) = _same(inputs, ())
    return "f32", (a + left0 + right0, b + left1 + right1, c + left2 + right2, d + left3 + right3)


def _rows_to_one(inputs: Sequence[Operand], params: Params) -> Result:
    _, (_, b, c, d) = _same(inputs, ())
    return "f32", (1, b, c, d)


RULES: dict[str, Rule] = {
    "add": _binary,
    "sub": _binary,
    "mul": _binary,
    "div": _binary,
    "add_into": _binary,
    "sqr": _counted(0),
    "sqrt": _counted(0),
    "log": _counted(0),
    "sin": _counted(0),
    "cos": _counted(0),
    "unary": _unary,
    "glu": _glu,
    "leaky_relu": _counted(1),
    "clamp": _counted(2),
    "scale": _counted(2),
    "norm": _norm,
    "rms_norm": _norm,
    "group_norm": _group_norm,
    "soft_max": _soft_max,
    "mul_mat": _mul_mat,
    "flash": _flash,
    "get_rows": _get_rows,
    "cont": _cont,
    "cpy": _cpy,
    "repeat": _repeat,
    "im2col": _im2col,
    "pool_2d": _pool_2d,
    "upscale": _upscale,
    "pad": _pad,
    "sum_rows": _rows_to_one,
    "mean": _rows_to_one,
}

INTO = {"add_into": 0, "cpy": 1}
"""Operations that write into one of their operands: name -> which."""
IN_PLACE = frozenset(
    {"add", "sub", "mul", "div", "scale", "unary", "soft_max", "sqr", "sqrt", "log"}
)
"""Operations whose result may take the place of their first operand, as ggml's own allocator has
it (`ggml_op_can_inplace`)."""
