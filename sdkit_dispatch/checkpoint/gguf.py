"""The header of a `.gguf` file, version 2 and 3: keys and values, then where the tensors lie.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from typing import Any, BinaryIO

from .entries import (
    MAX_RANK,
    MAX_TENSORS,
    NotACheckpointError,
    TensorEntry,
    check_places,
    checked_elements,
    shown,
)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 65_536
MAX_TEXT_BYTES = 1 << 20
MAX_NAME_BYTES = 127
"""stable-diffusion.cpp compiles ggml for names of 128 bytes."""
MAX_ARRAY = 1 << 24
MAX_DEPTH = 4
ALIGNMENT_KEY = "general.alignment"
TEXT, ARRAY = 8, 9
NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
TYPES: dict[int, tuple[str, int, int]] = {
    # ggml_type: name, numbers in a block, bytes of a block
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    30: ("bf16", 1, 2),
}


def read_gguf(stream: BinaryIO, size_bytes: int) -> tuple[TensorEntry, ...]:
    """Returns the tensors that the file lists, all of them inside it and none over another.

    Raises:
        NotACheckpointError: The file is not as the format says.
    """
    source = _Source(stream, size_bytes)
    source.take(len(MAGIC), "its magic")
    version = source.number("<I")
    if version not in VERSIONS:
        raise NotACheckpointError(
            f"is GGUF of version {version}; known are {', '.join(map(str, VERSIONS))}"
        )
    count, keys = source.number("<Q"), source.number("<Q")
    if not 1 <= count <= MAX_TENSORS or keys > MAX_KEYS:
        raise NotACheckpointError(
            f"claims {count} tensors and {keys} keys; 1 to {MAX_TENSORS} and at most {MAX_KEYS} "
            "can be read"
        )
    alignment = _alignment(source, keys)
    tensors = [_entry(source, alignment) for _ in range(count)]
    names = {one.name for one in tensors}
    if len(names) != len(tensors):
        raise NotACheckpointError(f"has {len(tensors) - len(names)} tensors twice")
    start = -(-source.at // alignment) * alignment
    check_places(tensors, size_bytes - start)
    return tuple(tensors)


def _alignment(source: _Source, keys: int) -> int:
    """Reads all keys and values; returns the only one that says where tensors lie."""
    seen: set[str] = set()
    alignment: Any = 32  # Any: whatever the file says, checked below
    for _ in range(keys):
        key = source.text(MAX_TEXT_BYTES)
        if key in seen:
            raise NotACheckpointError(f"has the key {shown(key)} twice")
        seen.add(key)
        kind = source.number("<I")
        value = _value(source, kind, depth=0)
        if key == ALIGNMENT_KEY:
            alignment = value if kind == 4 else None
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise NotACheckpointError(f"has {ALIGNMENT_KEY} {shown(alignment)}, not a power of two")
    if alignment > 1 << 20:
        raise NotACheckpointError(f"has {ALIGNMENT_KEY} {alignment}; that is no alignment")
    return alignment


def _value(source: _Source, kind: int, *, depth: int) -> Any:  # Any: a number, a text or None
    if kind in NUMBERS:
        return source.number(NUMBERS[kind])
    if kind == TEXT:
        return source.text(MAX_TEXT_BYTES)
    if kind != ARRAY or depth >= MAX_DEPTH:
        raise NotACheckpointError(f"has a value of type {kind}, which GGUF does not have here")
    inner, count = source.number("<I"), source.number("<Q")
    if count > MAX_ARRAY:
        raise NotACheckpointError(f"has an array of {count} values; at most {MAX_ARRAY} are read")
    if inner in NUMBERS:
        source.take(count * struct.calcsize(NUMBERS[inner]), "an array")
        return None
    for _ in range(count):
        _value(source, inner, depth=depth + 1)
    return None


def _entry(source: _Source, alignment: int) -> TensorEntry:
    name = source.text(MAX_NAME_BYTES)
    rank = source.number("<I")
    if not name or rank > MAX_RANK:
        raise NotACheckpointError(
            f"has the tensor {shown(name)} of {rank} dimensions; at most {MAX_RANK} are known"
        )
    # The innermost dimension comes first.
    shape = tuple(source.number("<Q") for _ in range(rank))[::-1]
    kind, start = source.number("<I"), source.number("<Q")
    if kind not in TYPES:
        raise NotACheckpointError(f"has the tensor {shown(name)} of the unknown type {kind}")
    dtype, block, block_bytes = TYPES[kind]
    elements = checked_elements(name, shape)
    if (shape[-1] if shape else 1) % block:
        raise NotACheckpointError(
            f"has the tensor {shown(name)} of {dtype} with rows of {shape[-1:]} numbers, which "
            f"are no whole blocks of {block}"
        )
    if start % alignment:
        raise NotACheckpointError(f"has the tensor {shown(name)} at {start}, between places")
    return TensorEntry(
        name=name,
        dtype=dtype,
        shape=shape,
        start=start,
        size_bytes=elements // block * block_bytes,
    )


class _Source:
    """Reads a file from its beginning, never past its end and never more than is asked for."""

    def __init__(self, stream: BinaryIO, size_bytes: int) -> None:
        self._stream = stream
        self._size_bytes = size_bytes
        self.at = 0

    def take(self, size_bytes: int, what: str) -> bytes:
        if size_bytes > self._size_bytes - self.at:
            raise NotACheckpointError(f"ends within {what}, after {self._size_bytes} bytes")
        self.at += size_bytes
        return self._stream.read(size_bytes)

    def number(self, form: str) -> Any:  # Any: int, float or bool, as `form` says
        (value,) = struct.unpack(form, self.take(struct.calcsize(form), "a number"))
        return value

    def text(self, limit_bytes: int) -> str:
        size_bytes = self.number("<Q")
        if size_bytes > limit_bytes:
            raise NotACheckpointError(
                f"has a name of {size_bytes} bytes; at most {limit_bytes} are read"
            )
        try:
            return self.take(size_bytes, "a name").decode()
        except UnicodeDecodeError as error:
            raise NotACheckpointError(f"has a name that is no text: {error}") from error
