"""The first 64 bytes of a TensorRT-RTX plan: what can be said of one without a GPU.

Undocumented; seen with 1.6.1 and 1.7.1. It is a check that a build gave what was asked for and
that a file is whole at its head, never a key.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sdkit_tensorrt.targets import TARGETS

HEADER_BYTES = 64
_MAGIC = b"vtrt"
_SIZE = slice(0x10, 0x18)
_VERSION = slice(0x18, 0x1C)
_TARGETS = 0x20


@dataclass(frozen=True, kw_only=True)
class PlanHeader:
    """Version of the builder ("1.7.1.116"), the architectures of a plan, and its size."""

    version: str
    archs: tuple[str, ...]
    size_bytes: int


def read_plan_header(plan: Path) -> PlanHeader:
    """Returns the header of a plan.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no plan, or not all of it is there.
    """
    with plan.open("rb") as stream:
        header = header_from_bytes(stream.read(HEADER_BYTES))
    size_bytes = plan.stat().st_size
    if size_bytes != header.size_bytes:
        raise ValueError(f"the plan has {size_bytes} bytes of {header.size_bytes}")
    return header


def header_from_bytes(head: bytes) -> PlanHeader:
    """Returns the header that `head` starts with.

    Raises:
        ValueError: It is no plan.
    """
    if len(head) < HEADER_BYTES or not head.startswith(_MAGIC):
        raise ValueError(f"it is no TensorRT-RTX plan: it starts with {head[:8]!r}")
    bits = head[_TARGETS]
    return PlanHeader(
        version=".".join(str(part) for part in head[_VERSION]),
        archs=tuple(arch for arch, one in TARGETS.items() if bits & one.header_bit),
        size_bytes=int.from_bytes(head[_SIZE], "little"),
    )


def differences(header: PlanHeader, *, version: str, archs: Iterable[str]) -> str:
    """Returns what a plan is that it should not be; "" if it is as asked for."""
    wanted = set(archs)
    if header.version != version:
        return f"it was made by version {header.version}, this is {version}"
    if set(header.archs) != wanted:
        return f"it is for {', '.join(header.archs) or 'nothing'}, not {', '.join(sorted(wanted))}"
    return ""
