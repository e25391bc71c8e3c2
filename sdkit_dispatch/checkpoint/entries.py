"""What the readers of both formats give, and how they check where tensors lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_TENSORS = 65_536
MAX_RANK = 4
"""Of tensors in diffusion checkpoints; ggml has no more dimensions."""
MAX_ELEMENTS = 1 << 36


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor of a checkpoint.

    Attributes:
        dtype: "f32", "f16", "bf16", "q8_0", ... in lower case.
        start: First byte, counted from the beginning of the tensor data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int


class NotACheckpointError(ValueError):
    """What is wrong with the file, in words that follow its name; never leaves this package."""


def checked_elements(name: str, shape: tuple[int, ...]) -> int:
    """Returns how many numbers a tensor has; refuses what no diffusion model has."""
    if len(shape) > MAX_RANK:
        raise NotACheckpointError(
            f"has the tensor '{name}' of {len(shape)} dimensions; at most {MAX_RANK} are known"
        )
    elements = 1
    for size in shape:
        elements *= size  # one by one: a product of made-up sizes may have millions of digits
        if size < 1 or elements > MAX_ELEMENTS:
            raise NotACheckpointError(f"has the tensor '{name}' with the shape {shown(shape)}")
    return elements


def check_places(tensors: Iterable[TensorEntry], data_bytes: int) -> None:
    """Refuses tensors that lie outside the data, or over each other."""
    end, before = 0, ""
    for one in sorted(tensors, key=lambda entry: (entry.start, entry.size_bytes)):
        if one.start < end:
            raise NotACheckpointError(f"has the tensors '{before}' and '{one.name}' in one place")
        end, before = one.start + one.size_bytes, one.name
        if end > data_bytes:
            raise NotACheckpointError(
                f"ends before its tensor '{one.name}' does: {end} bytes of data are needed and "
                f"{data_bytes} are there"
            )


def shown(value: object) -> str:
    """Returns a value of a file in a message; it may be long, or a number of a thousand digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of many digits"
    if isinstance(value, list | tuple):
        return f"[{', '.join(shown(one) for one in value[:6])}{', ...' if len(value) > 6 else ''}]"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
