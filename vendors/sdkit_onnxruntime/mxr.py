"""MIGraphX's compiled programs (.mxr): what stands at the head of one.

A program is a MessagePack map; only its first, small values are read, for the rest is the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

HEAD_BYTES = 64 << 10


class _CutOffError(Exception):
    """The head ends within a value."""


def mxr_header(path: Path) -> dict[str, str]:
    """Returns the numbers and texts at the head of a program: "version", "migraphx_version", ...

    Raises:
        OSError: It cannot be read.
        ValueError: It is no program.
    """
    with path.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    reader = _Reader(head)
    try:
        count = reader.map_size()
    except _CutOffError as error:
        raise ValueError(f"{path.name} has {len(head)} bytes: it is no program") from error
    found: dict[str, str] = {}
    for _ in range(count):
        try:
            key, value = reader.value(), reader.value()
        except _CutOffError:
            break
        if isinstance(key, str) and isinstance(value, str | int):
            found[key] = str(value)
    if "version" not in found:
        raise ValueError(f"{path.name} names no version: it is no program of MIGraphX")
    return found


class _Reader:
    """As much of MessagePack as a head needs. Source: its specification."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def map_size(self) -> int:
        kind = self._number(1)
        if kind & 0xF0 == 0x80:
            return kind & 0x0F
        if kind in (0xDE, 0xDF):
            return self._number(2 if kind == 0xDE else 4)
        raise ValueError(f"it starts with byte {kind:#x}: it is no program of MIGraphX")

    def value(self) -> Any:
        kind = self._number(1)
        if kind <= 0x7F or kind >= 0xE0:
            return kind if kind <= 0x7F else kind - 256
        if kind & 0xE0 == 0xA0:
            return self._text(kind & 0x1F)
        if kind & 0xF0 == 0x90:
            return [self.value() for _ in range(kind & 0x0F)]
        if kind & 0xF0 == 0x80:
            return {str(self.value()): self.value() for _ in range(kind & 0x0F)}
        return self._wide(kind)

    def _wide(self, kind: int) -> Any:
        if kind in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[kind]
        if 0xCC <= kind <= 0xD3:
            return self._number(1 << ((kind - 0xCC) % 4))
        if kind in (0xCA, 0xCB):
            return bytes(self._take(4 if kind == 0xCA else 8))
        if 0xD9 <= kind <= 0xDB:
            return self._text(self._number(1 << (kind - 0xD9)))
        if 0xC4 <= kind <= 0xC6:
            return bytes(self._take(self._number(1 << (kind - 0xC4))))
        if kind in (0xDC, 0xDD):
            return [self.value() for _ in range(self._number(2 if kind == 0xDC else 4))]
        if kind in (0xDE, 0xDF):
            count = self._number(2 if kind == 0xDE else 4)
            return {str(self.value()): self.value() for _ in range(count)}
        raise ValueError(f"byte {kind:#x} is not what a program of MIGraphX holds")

    def _text(self, size: int) -> str:
        return self._take(size).decode("utf-8", "replace")

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big")

    def _take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise _CutOffError
        self._at += size
        return self._data[self._at - size : self._at]
