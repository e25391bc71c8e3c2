"""Each operation of a program as the call of ggml that the executor makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from sdkit_ggml.instructions import MAX_POOL, UNARY
from sdkit_ggml.program import Op

Params = Sequence[int | float]
Call = Callable[[Sequence[str], Params], str]

_UNARY_NAMES = {number: name for name, number in UNARY.items()} | {UNARY["sign"]: "sgn"}

PLAIN = (
    *("add", "sub", "mul", "div"),
    *("sqr", "sqrt", "log", "sin", "cos", "sum_rows", "mean", "cont"),
)
"""Operations without parameters that are named as in C."""


def number(value: float) -> str:
    """Returns a float32 literal that reads back as the same number."""
    single = np.float32(value)
    if math.isnan(single):
        return "NAN"
    if math.isinf(single):
        return "INFINITY" if single > 0 else "-INFINITY"
    text = str(single)
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def ggml_type(kind: str) -> str:
    """Returns the constant of a type: "q8_0" -> "GGML_TYPE_Q8_0"."""
    return f"GGML_TYPE_{kind.upper()}"


def call_of(op: Op, inputs: Sequence[str]) -> str:
    """Returns the call, given the names of its operands."""
    return CALLS[op.name](inputs, op.params)


def _call(name: str, *arguments: str) -> str:
    return f"ggml_{name}({', '.join(('g.ctx', *arguments))})"


def _plain(name: str) -> Call:
    return lambda t, p: _call(name, *t)


def _integers(params: Params) -> tuple[str, ...]:
    return tuple(str(int(one)) for one in params)


CALLS: dict[str, Call] = {
    "unary": lambda t, p: _call(_UNARY_NAMES[int(p[0])], t[0]),
    "glu": lambda t, p: _call("geglu_erf_split", t[0], t[1]),
    "leaky_relu": lambda t, p: _call("leaky_relu", t[0], number(p[0]), "false"),
    "clamp": lambda t, p: _call("clamp", t[0], number(p[0]), number(p[1])),
    "scale": lambda t, p: _call("scale_bias", t[0], number(p[0]), number(p[1])),
    "norm": lambda t, p: _call("norm", t[0], number(p[0])),
    "rms_norm": lambda t, p: _call("rms_norm", t[0], number(p[0])),
    "group_norm": lambda t, p: _call("group_norm", t[0], str(int(p[0])), number(p[1])),
    "soft_max": lambda t, p: _call(
        "soft_max_ext", t[0], t[1] if len(t) > 1 else "nullptr", number(p[0]), "0.0f"
    ),
    "flash": lambda t, p: _call(
        "flash_attn_ext", t[0], t[1], t[2], "nullptr", number(p[0]), "0.0f", "0.0f"
    ),
    "repeat": lambda t, p: _call("repeat_4d", t[0], *_integers(p)),
    "im2col": lambda t, p: _call(
        "im2col", t[0], t[1], *_integers(p[:6]), "true", ggml_type("f16" if p[6] else "f32")
    ),
    "pool_2d": lambda t, p: _call(
        "pool_2d",
        t[0],
        f"GGML_OP_POOL_{'MAX' if int(p[0]) == MAX_POOL else 'AVG'}",
        *_integers(p[1:5]),
        number(p[5]),
        number(p[6]),
    ),
    "upscale": lambda t, p: _call("upscale", t[0], str(int(p[0])), "GGML_SCALE_MODE_NEAREST"),
    "pad": lambda t, p: _call("pad_ext", t[0], *_integers(p)),
    "add_into": lambda t, p: _call("add_inplace", t[0], t[1]),
    "get_rows": lambda t, p: _call("get_rows", t[0], t[1]),
    "mul_mat": lambda t, p: _call("mul_mat", t[0], t[1]),
    "cpy": lambda t, p: _call("cpy", t[0], t[1]),
    **{name: _plain(name) for name in PLAIN},
}
"""Operation -> its call; `runtime/executor.py` has the same table for Python."""
