"""One variant of a program as the function `build_graph` in C++."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sdkit_ggml.emit.calls import call_of, ggml_type
from sdkit_ggml.emit.names import comment
from sdkit_ggml.instructions import INTO, is_dense
from sdkit_ggml.program import Ne, Operand, Program, Variant, dense_nb, extent_bytes
from sdkit_ggml.runtime.executor import read_in_part


@dataclass(frozen=True)
class Stored:
    """A tensor of the weights file.

    Attributes:
        tensor: Its name in the file: "w12".
        name: Its field of the struct `Weights`.
        note: What it is, for a comment.
    """

    tensor: str
    name: str
    note: str
    offset: int
    type: str
    ne: Ne


def namespace_of(variant: Variant) -> str:
    """Returns the namespace of a variant: "cpu", "gpu_flash"."""
    return f"{variant.device}_{'flash' if variant.has_flash else 'plain'}"


def graph_source(
    program: Program,
    variant: Variant,
    *,
    weights: Sequence[Stored],
    inputs: Mapping[int, str],
    outputs: Mapping[str, str],
) -> str:
    """Returns the source file of a variant.

    Args:
        program: Of the engine.
        variant: One of its.
        weights: By offset.
        inputs: Index of a feed -> its field of the struct `Inputs`.
        outputs: Name of an output that the device computes -> its field of `Outputs`.
    """
    writer = _Writer(variant, weights)
    fields = [f"    in.{inputs[i]} = {writer.feed(i)};" for i in range(len(variant.feeds))]
    steps = list(writer.steps(program.nodes, [f"in.{one}" for one in inputs.values()]))
    ends = [
        f"    out.{outputs[one.name]} = {writer.operand(one.operand)};"
        for one in variant.outputs
        if one.operand is not None
    ]
    lines = [
        f"// {variant.name}: {variant.nodes} operations, {variant.copies} of them copies.",
        "// Sizes are in ggml's order, innermost first.",
        "#include <cmath>",
        "",
        '#include "component.h"',
        "",
        f"namespace {namespace_of(variant)} {{",
        "",
        "Inputs make_inputs([[maybe_unused]] Graph & g) {",
        "    Inputs in = {};",
        *fields,
        "    return in;",
        "}",
        "",
        "Outputs build_graph(Graph & g, [[maybe_unused]] const Weights & w, "
        "[[maybe_unused]] const Inputs & in) {",
        *(step if isinstance(step, str) else writer.result(step) for step in steps),
        "",
        "    Outputs out = {};",
        *writer.pending(),
        *ends,
        "    return out;",
        "}",
        "",
        f"}}  // namespace {namespace_of(variant)}",
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Result:
    """An operation whose result has a place of its own."""

    name: str
    text: str
    shape: str


@dataclass(frozen=True)
class _Written:
    """What lies in a part of the arena: who wrote it, from where to where."""

    name: str
    operand: int
    start: int
    end: int


class _Writer:
    """Names tensors while it goes through the operations."""

    def __init__(self, variant: Variant, weights: Sequence[Stored]) -> None:
        self._variant = variant
        self._weights = weights
        self._starts = [one.offset for one in weights]
        self._content: list[_Written] = []
        self._views: dict[tuple[int, str], str] = {}
        self._declared: list[str] = []
        self._used: set[str] = set()
        self._count = 0

    def feed(self, index: int) -> str:
        """Returns the expression that makes the tensor of a feed."""
        return self._place(self._variant.operands[self._variant.feeds[index].operand])

    def steps(self, nodes: Sequence[str], inputs: Sequence[str]) -> Iterator[str | _Result]:
        """Yields the lines of all operations; how a result's reads is known after the last."""
        variant = self._variant
        for name, feed in zip(inputs, variant.feeds, strict=True):
            self._write(name, feed.operand)
        shared = read_in_part(variant)
        origin: int | None = None
        for step, op in enumerate(variant.ops):
            source = variant.origins[step] if variant.origins else -1
            if source != origin:
                origin = source
                words = comment(nodes[source]) if source >= 0 else "as the outputs are wanted"
                yield ""
                if variant.origins:
                    yield f"    // {words}"
            into = INTO.get(op.name)
            names = [
                self._target(index) if place == into else self.operand(index)
                for place, index in enumerate(op.inputs)
            ]
            yield from self.pending()
            result, shape = variant.operands[op.output], _shape(variant.operands[op.output])
            if into is None:
                name = f"t{step}"
                put = "put_shared" if step in shared else "put"
                call = call_of(op, names)
                yield _Result(name, f"g.{put}({result.offset}, {call});", shape)
            else:
                name = names[into]
                yield f"    g.write({call_of(op, names)});  // {shape}"
            self._write(name, op.output)

    def result(self, one: _Result) -> str:
        """Returns the line of a result: with a variable, if anything reads it by its name."""
        if one.name in self._used:
            return f"    ggml_tensor * {one.name} = {one.text}  // {one.shape}"
        return f"    {one.text}  // {one.name}: {one.shape}"

    def operand(self, index: int) -> str:
        """Returns the expression of an operand that is read; may declare a view of it."""
        one = self._variant.operands[index]
        if one.space == "w":
            return self._weight(index, one)
        over = self._overlapping(one)
        if over and over[-1].operand == index:
            self._used.add(over[-1].name)
            return over[-1].name
        if over and over[-1].start <= one.offset:
            # Rows that overlap may be read a little past the last.
            whole = self._variant.operands[over[-1].operand]
            if is_dense(whole):
                self._used.add(over[-1].name)
                return self._view(index, over[-1].name, whole.type, one.offset - whole.offset)
        # What several operations wrote side by side.
        names = [part.name for part in over]
        parts = ", ".join(names[-4:]) if len(names) < 5 else f"{names[-4]} to {names[-1]}"
        return self._declare(index, parts, f"{self._place(one)};  // {_shape(one)} of {parts}")

    def pending(self) -> list[str]:
        """Returns the declarations that the operands asked for since the last call."""
        lines, self._declared = self._declared, []
        return lines

    def _target(self, index: int) -> str:
        """Returns the expression of an operand that is written into."""
        one = self._variant.operands[index]
        over = self._overlapping(one)
        # The views and results of an addition in place stay what they are; a copy needs its own.
        if over and over[-1].operand == index and over[-1].name.startswith("v"):
            return over[-1].name
        return self._declare(index, f"at {self._count}", f"{self._place(one)};  // {_shape(one)}")

    def _weight(self, index: int, one: Operand) -> str:
        base = self._weights[bisect_right(self._starts, one.offset) - 1]
        name = f"w.{base.name}"
        is_whole = (one.offset, one.type, one.ne, one.nb) == (
            *(base.offset, base.type, base.ne),
            dense_nb(base.type, base.ne),
        )
        return name if is_whole else self._view(index, name, base.type, one.offset - base.offset)

    def _view(self, index: int, base: str, base_type: str, offset: int) -> str:
        one = self._variant.operands[index]
        kind = "" if one.type == base_type else f"{ggml_type(one.type)}, "
        is_plain = not kind and one.nb == dense_nb(one.type, one.ne)
        strides = "" if is_plain else f", {_braced(one.nb)}"
        text = f"g.view({base}, {offset}, {kind}{_braced(one.ne)}{strides})"
        return self._declare(index, base, f"{text};  // {_shape(one)}")

    def _place(self, one: Operand) -> str:
        strides = "" if one.nb == dense_nb(one.type, one.ne) else f", {_braced(one.nb)}"
        return f"g.at({one.offset}, {ggml_type(one.type)}, {_braced(one.ne)}{strides})"

    def _declare(self, index: int, of: str, text: str) -> str:
        key = (index, of)
        if key not in self._views:
            self._views[key] = f"v{self._count}"
            self._declared.append(f"    ggml_tensor * v{self._count} = {text}")
            self._count += 1
        return self._views[key]

    def _overlapping(self, one: Operand) -> list[_Written]:
        """Returns what lies where an operand does, the last written last."""
        start, end = one.offset, one.offset + extent_bytes(one)
        found: list[_Written] = []
        for part in reversed(self._content):
            # Operands with gaps, as of a concatenation, lie within each other's reach.
            is_hidden = is_dense(self._variant.operands[part.operand]) and any(
                part.start < later.end and part.end > later.start for later in found
            )
            if part.start < end and part.end > start and not is_hidden:
                found.append(part)
        return found[::-1]

    def _write(self, name: str, index: int) -> None:
        one = self._variant.operands[index]
        start, end = one.offset, one.offset + extent_bytes(one)
        # What is left of an earlier result is not read any more; its neighbours may be.
        self._content = [part for part in self._content if part.start < start or part.end > end]
        self._content.append(_Written(name, index, start, end))


def _shape(one: Operand) -> str:
    sizes = list(one.ne)
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return f"{one.type} {sizes}"


def _braced(sizes: Sequence[int]) -> str:
    return "{" + ", ".join(map(str, sizes)) + "}"
