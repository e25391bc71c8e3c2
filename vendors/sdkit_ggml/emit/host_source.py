"""The host's part of a program in C++: integers in, indices out, and what goes into each tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sdkit_dispatch.errors import UnsupportedOpError
from sdkit_dispatch.graph.tensors import numpy_dtype_name
from sdkit_ggml.compiler.evaluate import EVALUATE, ROW_NUMBERS
from sdkit_ggml.compiler.graph import Array
from sdkit_ggml.emit.names import comment, literal
from sdkit_ggml.program import HostStep, Program

DTYPES: Mapping[str, str] = {
    "float16": "float16",
    "float32": "float32",
    "float64": "float64",
    "bool": "boolean",
    **{name: name for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32")},
    "int64": "int64",
}
"""Of numpy -> of `enum Dtype` in arrays.h."""
SHAPED = frozenset({"Reshape", "Squeeze", "Unsqueeze"})
"""Operators whose second input says what shape their result has."""
_LINE = 100
_C_TYPES = {name: f"{name}_t" for name in DTYPES if "int" in name} | {"bool": "bool"}


@dataclass(frozen=True)
class FeedField:
    """A tensor that is filled before each run: its field of `Inputs`, and by what."""

    field: str
    name: str
    type: str
    limit: int


@dataclass(frozen=True)
class _Known:
    """A value of the host: its variable, and an example of it, which has its type and shape."""

    variable: str
    example: Array
    is_constant: bool = False

    @property
    def dtype(self) -> str:
        return self.example.dtype.name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.example.shape)

    @property
    def size(self) -> int:
        return self.example.size


class _Refused(Exception):  # noqa: N818 - caught here, never shown alone
    """There is no C++ for an operator as it stands."""


Attributes = Mapping[str, Any]  # Any: as ONNX has them
Writer = Callable[[Sequence[_Known], _Known, Attributes], str]


def set_inputs_source(
    program: Program,
    *,
    component: str,
    feeds: Sequence[FeedField],
    files: Mapping[str, str],
    results: Mapping[str, str],
) -> list[str]:
    """Returns the lines of `set_inputs`.

    Args:
        program: Of the engine.
        component: For messages.
        feeds: Every tensor to fill.
        files: Input of the component -> name of its file.
        results: Output that the host computes -> name of its file.

    Raises:
        UnsupportedOpError: The host computes what this does not write; names all such operators.
    """
    values: dict[str, _Known] = {}
    lines: list[str] = []
    dtypes = {spec.name: spec.dtype for spec in program.inputs}
    for spec in program.inputs:
        if spec.dtype not in DTYPES:
            raise _unsupported(component, [f"the input of {spec.dtype}"])
        if not spec.dtype.startswith("float"):
            variable = f"h{len(values)}"
            values[spec.name] = _Known(variable, np.zeros(spec.shape, spec.dtype))
            file = literal(files[spec.name])
            lines.append(f"    const Integers {variable} = integers(given.at({file}));")
    for name, constant in program.constants.items():
        variable = f"h{len(values)}"
        example = np.array(constant.values, constant.dtype).reshape(constant.shape)
        values[name] = _Known(variable, example, is_constant=True)
        lines += _constant(variable, constant.values)
    refused: list[str] = []
    for step in program.host:
        try:
            lines += _step(step, values)
        except _Refused as reason:
            refused.append(f"{step.op_type}{f' ({reason})' if str(reason) else ''}")
            break  # what follows reads its result
    if refused:
        raise _unsupported(component, refused)
    for feed in feeds:
        if feed.name in dtypes and feed.name not in values:
            source = f"given.at({literal(files[feed.name])})"
        else:
            source = values[feed.name].variable
        if feed.type == "i32":
            words = f"{feed.limit}, {literal(feed.name)}"
            lines.append(f"    set_indices(in.{feed.field}, {source}, {words});")
        else:
            lines.append(f"    set_floats(in.{feed.field}, {source});")
    lines.append("    Arrays results;")
    places = {spec.name: place for place, spec in enumerate(program.outputs)}
    for name, file in results.items():
        array = f"array_of(outputs[{places[name]}], {values[name].variable})"
        lines.append(f"    results[{literal(file)}] = {array};")
    return [*lines, "    return results;"]


def _unsupported(component: str, refused: Sequence[str]) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"ggml: {component}: emit writes no C++ for {', '.join(refused)}, which the host computes",
        "export the component without it, or run it with sdkit-dispatch generate",
    )


def _constant(variable: str, numbers: Sequence[int | float | bool]) -> list[str]:
    lines, line = [], f"    const Integers {variable} = {{"
    for place, number in enumerate(numbers):
        word = f"{int(number)}{', ' if place < len(numbers) - 1 else ''}"
        if len(line) + len(word) > _LINE:
            lines.append(line.rstrip())
            line = "        "
        line += word
    return [*lines, line + "};"]


def _step(step: HostStep, values: dict[str, _Known]) -> list[str]:
    """Returns the lines of an operator, and adds its results to `values`."""
    writer = WRITERS.get(step.op_type)
    inputs = [values[name] for name in step.inputs if name in values]
    if writer is None or len(inputs) != len(step.inputs) or len(step.outputs) != 1:
        raise _Refused
    if step.op_type in SHAPED and not all(one.is_constant for one in inputs[1:]):
        raise _Refused("to a shape that is computed")
    try:
        result = EVALUATE[step.op_type](*(one.example for one in inputs), **step.attributes)
    except (ValueError, IndexError, TypeError) as error:
        raise _Refused(str(error)) from error
    known = _Known(f"h{len(values)}", np.asarray(result))
    if known.dtype not in DTYPES or known.dtype == "float16":
        raise _Refused(f"gives {known.dtype}")
    values[step.outputs[0]] = known
    text = writer(inputs, known, step.attributes)
    words = comment(f'{step.op_type} "{step.outputs[0]}"')
    line = f"    const Integers {known.variable} = {text};"
    return [f"{line}  // {words} {known.dtype} {list(known.shape)}"]


def _wrapped(text: str, kind: str) -> str:
    # Floats are made of integers last of all: where they go into a tensor.
    return text if kind in ("int64", "float32", "float64") else f"cast<{_C_TYPES[kind]}>({text})"


def _same(inputs: Sequence[_Known], result: _Known, attributes: Attributes) -> str:
    return inputs[0].variable


def _cast(inputs: Sequence[_Known], result: _Known, attributes: Attributes) -> str:
    if numpy_dtype_name(int(attributes["to"])) != result.dtype:
        raise _Refused(f"to {attributes['to']}")
    return _wrapped(inputs[0].variable, result.dtype)


def _combined(operator: str) -> Writer:
    def write(inputs: Sequence[_Known], result: _Known, attributes: Attributes) -> str:
        a, b = inputs
        if any(one.size not in (1, result.size) for one in inputs):
            raise _Refused(f"of {list(a.shape)} and {list(b.shape)}")
        body = f"[](int64_t x, int64_t y) -> int64_t {{ return x {operator} y; }}"
        return _wrapped(f"combine({a.variable}, {b.variable}, {body})", result.dtype)

    return write


def _arg_max(inputs: Sequence[_Known], result: _Known, attributes: Attributes) -> str:
    (data,) = inputs
    axis = attributes.get("axis", 0) % len(data.shape)
    inner = math.prod(data.shape[axis + 1 :])
    last = "true" if attributes.get("select_last_index") else "false"
    return f"arg_max({data.variable}, {data.shape[axis]}, {inner}, {last})"


def _concat(inputs: Sequence[_Known], result: _Known, attributes: Attributes) -> str:
    axis = attributes["axis"] % len(result.shape)
    outer = math.prod(result.shape[:axis])
    parts = ", ".join(f"{{{one.variable}, {math.prod(one.shape[axis:])}}}" for one in inputs)
    return f"concat({outer}, {{{parts}}})"


def _row_numbers(inputs: Sequence[_Known], result: _Known, attributes: Attributes) -> str:
    sizes = ", ".join(map(str, attributes["sizes"]))
    return f"row_numbers({inputs[0].variable}, {{{sizes}}})"


WRITERS: Mapping[str, Writer] = {
    "Add": _combined("+"),
    "And": _combined("&&"),
    "ArgMax": _arg_max,
    "Cast": _cast,
    "Concat": _concat,
    "Equal": _combined("=="),
    "Flatten": _same,
    "Greater": _combined(">"),
    "GreaterOrEqual": _combined(">="),
    "Identity": _same,
    "Less": _combined("<"),
    "LessOrEqual": _combined("<="),
    "Mul": _combined("*"),
    "Or": _combined("||"),
    "Reshape": _same,
    ROW_NUMBERS: _row_numbers,
    "Squeeze": _same,
    "Sub": _combined("-"),
    "Unsqueeze": _same,
}
"""Operator of ONNX -> the expression that computes it."""
