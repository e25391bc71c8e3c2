"""Collects operations and buffers while a graph is lowered, and turns them into a variant."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sdkit_ggml.compiler.memory import plan_memory
from sdkit_ggml.instructions import IN_PLACE, INTO, ProgramError, Result, check
from sdkit_ggml.program import (
    TYPES,
    Feed,
    Ne,
    Op,
    Operand,
    Output,
    Variant,
    dense_nb,
)


@dataclass(frozen=True)
class Ref:
    """A tensor in a buffer whose address is not known yet.

    Attributes:
        buffer: Of the arena (0 and up) or the weights (-1 and down, `-1 - index`).
        offset: In bytes, from the start of the buffer.
    """

    buffer: int
    offset: int
    type: str
    ne: Ne
    nb: Ne


@dataclass
class Emitter:
    """The operations of one variant, in order."""

    sizes: list[int] = field(default_factory=list)
    ops: list[tuple[str, tuple[Ref, ...], Ref, tuple[int | float, ...]]] = field(
        default_factory=list
    )
    origins: list[int] = field(default_factory=list)
    origin: int = -1
    """Index of the node that is being lowered."""
    _results: dict[Hashable, Result] = field(default_factory=dict)
    """What was asked of `check`, and what it said."""

    def buffer(self, size_bytes: int) -> int:
        """Returns a new buffer of the arena."""
        self.sizes.append(size_bytes)
        return len(self.sizes) - 1

    def tensor(self, kind: str, ne: Ne, slack_bytes: int = 0) -> Ref:
        """Returns a contiguous tensor in a new buffer; `slack_bytes` may be read past its end."""
        nb = dense_nb(kind, ne)
        return Ref(self.buffer(nb[3] * ne[3] + slack_bytes), 0, kind, ne, nb)

    def emit(
        self,
        name: str,
        inputs: Sequence[Ref],
        params: Sequence[int | float] = (),
        *,
        slack_bytes: int = 0,
        place: tuple[int, int] | None = None,
    ) -> Ref:
        """Adds an operation and returns its result.

        Args:
            name: Of the operation.
            inputs: Its operands.
            params: Its parameters.
            slack_bytes: How much may be read past the end of the result.
            place: Buffer, and offset in bytes, of the result; None for a new buffer.

        Raises:
            ProgramError: ggml would refuse it.
        """
        # Blocks of a picture differ in where they lie alone.
        asked = (name, tuple((ref.type, ref.ne, ref.nb) for ref in inputs), tuple(params))
        if asked not in self._results:
            self._results[asked] = check(name, [_operand(ref) for ref in inputs], params)
        kind, ne = self._results[asked]
        if name in INTO:
            result = inputs[INTO[name]]
        elif place is not None:
            result = Ref(*place, kind, ne, dense_nb(kind, ne))
        else:
            result = self.tensor(kind, ne, slack_bytes)
        self.ops.append((name, tuple(inputs), result, tuple(params)))
        self.origins.append(self.origin)
        return result

    def finish(
        self,
        device: Literal["cpu", "gpu"],
        *,
        has_flash: bool,
        weights: Sequence[int],
        feeds: Mapping[str, Ref],
        outputs: Mapping[str, Ref | None],
    ) -> Variant:
        """Plans the memory. `weights`: the offset of each in the data section of the file."""
        alive = self._needed(outputs)
        ops = [op for op, used in zip(self.ops, alive, strict=True) if used]
        spans = _spans(ops, feeds, outputs)
        sizes = {buffer: self.sizes[buffer] for buffer in spans}
        offsets, arena_bytes = plan_memory(sizes, spans, self._taken_over(ops, spans, feeds))
        operands: dict[Operand, int] = {}

        def place(ref: Ref) -> int:
            base = weights[-1 - ref.buffer] if ref.buffer < 0 else offsets[ref.buffer]
            space = "w" if ref.buffer < 0 else "a"
            one = Operand(space, base + ref.offset, ref.type, ref.ne, ref.nb)  # type: ignore[arg-type]
            return operands.setdefault(one, len(operands))

        placed = [
            Op(op, tuple(place(ref) for ref in inputs), place(result), params)
            for op, inputs, result, params in ops
        ]
        return Variant(
            device=device,
            has_flash=has_flash,
            arena_bytes=arena_bytes,
            feeds=tuple(Feed(key, place(ref)) for key, ref in feeds.items()),
            ops=tuple(placed),
            outputs=tuple(
                Output(key, None if ref is None else place(ref)) for key, ref in outputs.items()
            ),
            operands=tuple(operands),
            origins=tuple(origin for origin, used in zip(self.origins, alive, strict=True) if used),
        )

    def _needed(self, outputs: Mapping[str, Ref | None]) -> list[bool]:
        """Whether each operation serves an output."""
        wanted = {ref.buffer for ref in outputs.values() if ref is not None}
        used = [False] * len(self.ops)
        for index in reversed(range(len(self.ops))):
            _, inputs, result, _ = self.ops[index]
            if result.buffer in wanted:
                used[index] = True
                wanted.update(ref.buffer for ref in inputs)
        return used

    def _taken_over(
        self,
        ops: Sequence[tuple[str, tuple[Ref, ...], Ref, tuple[int | float, ...]]],
        spans: Mapping[int, tuple[int, int]],
        feeds: Mapping[str, Ref],
    ) -> dict[int, int]:
        """Returns result -> first operand, where the result may take that one's place."""
        fed = {ref.buffer for ref in feeds.values()}
        found: dict[int, int] = {}
        for step, (name, inputs, result, _) in enumerate(ops):
            if name not in IN_PLACE:
                continue
            first = inputs[0]
            if (
                first.buffer >= 0
                and first.buffer not in fed
                and spans[first.buffer][1] == step
                and spans[result.buffer][0] == step
                and first.offset == 0
                and (first.ne, first.nb) == (result.ne, result.nb)
                and self.sizes[first.buffer] == self.sizes[result.buffer]
                and all(other.buffer != first.buffer for other in inputs[1:])
            ):
                found[result.buffer] = first.buffer
        return found


def ref_of(buffer: int, kind: str, factors: Sequence[tuple[int, int]], offset: int) -> Ref:
    """Returns a tensor from at most four (size, stride in elements), outermost first.

    Raises:
        ProgramError: There are more than four.
    """
    if len(factors) > 4:
        raise ProgramError(f"{len(factors)} axes that do not merge; ggml has 4")
    unit = TYPES[kind][2]
    sizes = [size for size, _ in reversed(factors)]
    strides = [stride * unit for _, stride in reversed(factors)]
    while len(sizes) < 4:
        # The stride of an axis of size 1 is what a contiguous tensor has there.
        strides.append(strides[-1] * sizes[-1] if sizes else unit)
        sizes.append(1)
    return Ref(buffer, offset * unit, kind, tuple(sizes), tuple(strides))  # type: ignore[arg-type]


def dense_ref(buffer: int, kind: str, ne: Sequence[int], offset_bytes: int = 0) -> Ref:
    """Returns a contiguous tensor; `ne` innermost first, padded with ones."""
    full: Ne = (*ne, *(1,) * (4 - len(ne)))  # type: ignore[assignment]
    return Ref(buffer, offset_bytes, kind, full, dense_nb(kind, full))


def _operand(ref: Ref) -> Operand:
    return Operand("a", ref.offset, ref.type, ref.ne, ref.nb)


def _spans(
    ops: Sequence[tuple[str, tuple[Ref, ...], Ref, tuple[int | float, ...]]],
    feeds: Mapping[str, Ref],
    outputs: Mapping[str, Ref | None],
) -> dict[int, tuple[int, int]]:
    spans: dict[int, tuple[int, int]] = {}

    def touch(ref: Ref, step: int) -> None:
        if ref.buffer >= 0:
            first, last = spans.get(ref.buffer, (step, step))
            spans[ref.buffer] = (min(first, step), max(last, step))

    for ref in feeds.values():
        touch(ref, 0)
    for step, (_, inputs, result, _) in enumerate(ops):
        for ref in (*inputs, result):
            touch(ref, step)
    for ref_or_none in outputs.values():
        if ref_or_none is not None:
            touch(ref_or_none, len(ops))
            first, _ = spans[ref_or_none.buffer]
            spans[ref_or_none.buffer] = (first, len(ops))
    return spans
