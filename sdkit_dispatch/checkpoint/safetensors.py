"""The header of a `.safetensors` file: its length (u64), JSON, and behind it the tensors.

Source: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
from typing import Any, BinaryIO

from .entries import (
    MAX_TENSORS,
    NotACheckpointError,
    TensorEntry,
    check_places,
    checked_elements,
    shown,
)

MAX_HEADER_BYTES = 100_000_000
"""As the format's own library has it."""
BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
}


def starts_like_safetensors(start: bytes) -> bool:
    """True if the first bytes are the length of a header and the brace that opens it."""
    return len(start) >= 9 and start[8:9] == b"{"


def read_safetensors(stream: BinaryIO, size_bytes: int) -> tuple[TensorEntry, ...]:
    """Returns the tensors that the file lists, all of them inside it and none over another.

    Raises:
        NotACheckpointError: The file is not as the format says.
    """
    length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, size_bytes - 8):
        raise NotACheckpointError(
            f"claims a header of {length} bytes; it may have at most {MAX_HEADER_BYTES}, and "
            f"{max(size_bytes - 8, 0)} follow"
        )
    try:
        header = json.loads(stream.read(length), object_pairs_hook=_without_doubles)
    except NotACheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise NotACheckpointError(f"has a header that is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise NotACheckpointError(f"has a JSON {type(header).__name__} for a header, not an object")
    _check_metadata(header.pop("__metadata__", {}))
    if not 1 <= len(header) <= MAX_TENSORS:
        raise NotACheckpointError(f"lists {len(header)} tensors; 1 to {MAX_TENSORS} can be read")
    tensors = tuple(_entry(name, row) for name, row in header.items())
    check_places(tensors, size_bytes - 8 - length)
    return tensors


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: JSON data
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise NotACheckpointError(f"has {shown(twice)} twice in its header")
    return found


def _check_metadata(metadata: object) -> None:
    is_text = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not is_text:
        raise NotACheckpointError("has __metadata__ that is not an object of texts")


def _entry(name: str, row: object) -> TensorEntry:
    match row:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, end]}:
            numbers = (*shape, start, end)
        case _:
            raise NotACheckpointError(f"has no type, shape and place for the tensor {shown(name)}")
    if dtype not in BITS:
        raise NotACheckpointError(
            f"has the tensor {shown(name)} of type {shown(dtype)}; known are {', '.join(BITS)}"
        )
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise NotACheckpointError(f"has the tensor {shown(name)} with {shown(row)}")
    if not name:
        raise NotACheckpointError("has a tensor without a name")
    elements = checked_elements(name, tuple(shape))
    if end - start != elements * BITS[dtype] // 8:
        raise NotACheckpointError(
            f"has the tensor {shown(name)} of {elements * BITS[dtype] // 8} bytes in "
            f"{shown([start, end])}"
        )
    return TensorEntry(
        name=name, dtype=dtype.lower(), shape=tuple(shape), start=start, size_bytes=end - start
    )
