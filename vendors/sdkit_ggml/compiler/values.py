"""What is known of a graph while it is lowered: values, how to compute, and what the host does."""

from __future__ import annotations

from dataclasses import dataclass, field

from sdkit_ggml.compiler.graph import Constant
from sdkit_ggml.compiler.layout import Layout
from sdkit_ggml.program import HostStep


class Unsupported(Exception):  # noqa: N818 - caught and counted, never shown alone
    """An operator cannot be lowered as it stands; the message is the reason."""


@dataclass(frozen=True)
class Value:
    """A tensor of the graph while it is lowered: f32 (or i32 indices) somewhere in a buffer."""

    buffer: int
    layout: Layout
    type: str = "f32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape


@dataclass(frozen=True, kw_only=True)
class Choices:
    """How a program is to compute.

    Attributes:
        matrix_type: Type of the weights of matrix products.
        filter_type: Type of the weights of convolutions.
        has_flash: Whether attention is one operation (`flash_attn_ext`).
        is_dense: Whether both operands of a matrix product are contiguous: Vulkan copies others
            to float16 first, so that they cost as much and lose digits; a processor reads them
            where they are.
        has_winograd: Whether 3x3 convolutions take four products for two rows of the picture
            instead of six; their weights take a third more room.
        block_bytes: About how much memory a convolution may take at a time beyond its input and
            output, if that is more than a quarter of its input; larger ones go by blocks of rows.
    """

    matrix_type: str = "f32"
    filter_type: str = "f32"
    has_flash: bool = True
    is_dense: bool = False
    block_bytes: int = 64 << 20
    has_winograd: bool = True

    def block_rows(self, rows: int, *, row_bytes: int, input_bytes: int) -> int:
        """Returns how many rows of a picture a convolution takes at a time.

        As many blocks serve a large picture as a smaller one: each costs its operations.

        Args:
            rows: Of the result.
            row_bytes: What one takes.
            input_bytes: Size of the input.
        """
        return max(1, min(rows, max(self.block_bytes, input_bytes // 4) // row_bytes))


@dataclass(frozen=True)
class Fed:
    """What goes into a tensor before each run: a value of the host, and the limit of indices."""

    name: str
    type: str
    limit: int = 0


@dataclass
class HostProgram:
    """What numpy computes before the graph runs: integers, from integer inputs.

    Attributes:
        values: Every value that it has: inputs and results.
    """

    values: set[str] = field(default_factory=set)
    steps: dict[str, HostStep] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)

    def add(self, step: HostStep) -> None:
        """Adds a step under the name of its first result."""
        self.steps.setdefault(step.outputs[0], step)
        self.values.update(name for name in step.outputs if name)
