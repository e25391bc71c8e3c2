"""The program of an engine: ggml operations in order, every operand placed, as JSON.

A program is already lowered and its memory planned: an operand is an address in the weights or in
the arena (one buffer for everything that is computed), a type, and ggml's `ne` (sizes, innermost
first) and `nb` (strides in bytes). It is independent of the device. What ggml asserts is checked
here by `instructions.py`, for a wrong program must not abort the process.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sdkit_dispatch.contract import TensorSpec

Ne = tuple[int, int, int, int]

TYPES: dict[str, tuple[int, int, int]] = {
    # name: (ggml's number, elements a block, bytes a block)
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "q4_0": (2, 32, 18),
    "q5_0": (6, 32, 22),
    "q8_0": (8, 32, 34),
    "i32": (26, 1, 4),
    "bf16": (30, 1, 2),
}


class Operand(msgspec.Struct, frozen=True, array_like=True):
    """A tensor at an address."""

    space: Literal["w", "a"]
    """The weights, or the arena."""
    offset: int
    """In bytes."""
    type: str
    ne: Ne
    nb: Ne


class Op(msgspec.Struct, frozen=True, array_like=True):
    """One operation. `inputs` and `output` are indices into `Program.operands`."""

    name: str
    inputs: tuple[int, ...]
    output: int
    params: tuple[int | float, ...] = ()


class HostStep(msgspec.Struct, frozen=True):
    """One ONNX operator on integers that numpy computes before the graph runs."""

    op_type: str
    version: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any] = {}  # Any: as ONNX has them


class HostConstant(msgspec.Struct, frozen=True):
    """A small array that host steps read."""

    dtype: str
    shape: tuple[int, ...]
    values: tuple[int | float | bool, ...]


class Feed(msgspec.Struct, frozen=True):
    """An input of the graph, or a result of the host steps, that goes into the arena."""

    name: str
    operand: int
    limit: int = 0
    """Of indices: they must be below it, or ggml aborts. 0 for what are no indices."""


class Output(msgspec.Struct, frozen=True):
    """An output of the graph: an operand, or (`operand` None) a value of the host."""

    name: str
    operand: int | None = None


class Variant(msgspec.Struct, frozen=True):
    """One way to compute the component; a device runs the first that it supports.

    `nodes` and `copies` count operations, and those among them that only move data.
    """

    device: Literal["cpu", "gpu"]
    has_flash: bool
    """Whether attention is one operation."""
    arena_bytes: int
    operands: tuple[Operand, ...]
    ops: tuple[Op, ...]
    feeds: tuple[Feed, ...]
    outputs: tuple[Output, ...]
    origins: tuple[int, ...] = ()
    """Of each operation: the index in `Program.nodes` of what it computes; -1 for none."""

    @property
    def name(self) -> str:
        return f"{self.device}, {'flash' if self.has_flash else 'plain'} attention"

    @property
    def nodes(self) -> int:
        return len(self.ops)

    @property
    def copies(self) -> int:
        return sum(op.name in COPIES for op in self.ops)


COPIES = frozenset({"cont", "cpy", "repeat"})
"""Operations that move data and compute nothing."""


class WeightStep(msgspec.Struct, frozen=True, array_like=True):
    """An operator of the graph that moves what is in a weight."""

    op_type: str
    inputs: tuple[tuple[tuple[int, ...], tuple[int, ...]] | None, ...] = ()
    """Shape and values of its other inputs, which are integers."""
    attributes: tuple[tuple[str, int | str | tuple[int, ...]], ...] = ()


class StoredWeight(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a weights file, and how it comes of the graph."""

    type: str
    ne: Ne
    form: str
    """What was done to it last (`compiler.recipes`): "", "transposed", "tap 0", ..."""
    origin: str
    """The initializer that it is made of; empty for what the graph says by itself."""
    steps: tuple[WeightStep, ...] = ()
    """What operators of the graph do to the initializer before."""
    content: str = ""
    """sha256 of what has no origin."""
    offset: int = 0
    """In bytes, in the data section of its file."""


class Program(msgspec.Struct, frozen=True):
    """Everything of an engine but the weights.

    Two files may hold weights: `weights`, which engines of one component share, and `extras`, what
    this one has beside them. An operand of the latter lies behind the former's data section.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    precision: str
    weights_bytes: int
    """Size of the data section of the weights file."""
    weights_digest: str
    """sha256 of `weights`: ties the two files together."""
    host: tuple[HostStep, ...]
    constants: dict[str, HostConstant]
    variants: tuple[Variant, ...]
    nodes: tuple[str, ...] = ()
    """The ONNX graph as it was lowered: 'Conv "/conv_in/Conv"'; for whoever reads the program."""
    weights: tuple[StoredWeight, ...] = ()
    """All that the weights file holds, by offset, also what this program does not read."""
    extra_bytes: int = 0
    """Size of the data section of the extra file; 0: there is none."""
    extra_digest: str = ""
    extras: tuple[StoredWeight, ...] = ()
    read: dict[str, str] = {}
    """External initializer -> sha256 of its numbers, of those that the program depends on: other
    weights with the same numbers there have the same program."""

    @property
    def all_weights_bytes(self) -> int:
        """Size of both data sections: what operands may address."""
        return self.weights_bytes + self.extra_bytes


def row_bytes(kind: str, elements: int) -> int:
    """Returns the size of `elements` neighbours; whole blocks only.

    Raises:
        ValueError: `elements` is no multiple of the block of a quantised type.
    """
    _, block, size = TYPES[kind]
    if elements % block:
        raise ValueError(f"{elements} elements are no whole blocks of {block} of {kind}")
    return elements // block * size


def dense_nb(kind: str, ne: Ne) -> Ne:
    """Returns the strides of a tensor without gaps."""
    first = TYPES[kind][2]
    second = row_bytes(kind, ne[0])
    return (first, second, second * ne[1], second * ne[1] * ne[2])


def stored_bytes(weight: StoredWeight) -> int:
    """Returns the size of a tensor of a weights file."""
    return dense_nb(weight.type, weight.ne)[3] * weight.ne[3]


def extent_bytes(operand: Operand) -> int:
    """Returns how many bytes lie between the first and the end of the last element."""
    _, block, size = TYPES[operand.type]
    first = (operand.ne[0] // block - 1) * operand.nb[0] + size
    return first + sum(
        (n - 1) * stride for n, stride in zip(operand.ne[1:], operand.nb[1:], strict=True)
    )
