"""Frames between the caller and a worker: a JSON header and raw tensors.

A frame is the 4 bytes `SDW1`, the header's length (u32, little endian), the payload's length (u64),
the header (UTF-8 JSON, an object) and the payload (the tensors' bytes one after the other, C order,
little endian, in the order of the header's `arrays`: `[name, dtype, shape]` each).

What the other side sends is not trusted: anything that is not a frame is a `WorkerError`. Nothing
is ever unpickled.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from .contract import Arrays
from .errors import RunError, WorkerError

MAGIC = b"SDW1"
PREFIX = struct.Struct("<4sIQ")
MAX_HEADER_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 16 << 30
MAX_RANK = 16
DTYPES = frozenset(
    [
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
    ]
)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One message. `header` is JSON data (`Any`), `arrays` are owned by the receiver."""

    header: Mapping[str, Any]
    arrays: Arrays = field(default_factory=dict)


def write_frame(stream: BinaryIO, frame: Frame) -> None:
    """Writes one frame and flushes.

    Raises:
        RunError: A tensor has a dtype that does not cross the wire; nothing was written.
        OSError: The other side is gone.
    """
    listing: list[tuple[str, str, tuple[int, ...]]] = []
    parts: list[memoryview] = []
    if frame.arrays:
        import numpy as np

        for name, value in frame.arrays.items():
            shape = tuple(np.shape(value))  # ascontiguousarray turns a scalar into [1]
            array = np.ascontiguousarray(value)
            if array.dtype.name not in DTYPES:
                raise RunError(f"tensor '{name}' has dtype {array.dtype}, which cannot be sent")
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            listing.append((name, array.dtype.name, shape))
            parts.append(little.reshape(-1).view(np.uint8).data)
    header = json.dumps({**frame.header, "arrays": listing}).encode()
    stream.write(PREFIX.pack(MAGIC, len(header), sum(part.nbytes for part in parts)))
    stream.write(header)
    for part in parts:
        stream.write(part)
    stream.flush()


def read_frame(stream: BinaryIO) -> Frame | None:
    """Returns the next frame; None at the end of the stream.

    Raises:
        WorkerError: The bytes are not a frame, or the stream ends within one.
    """
    prefix = _read_exactly(stream, PREFIX.size, may_end=True)
    if prefix is None:
        return None
    magic, header_bytes, payload_bytes = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise WorkerError(f"the stream holds {bytes(magic)!r} where a frame should start")
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise WorkerError(
            f"a frame claims {header_bytes} + {payload_bytes} bytes; "
            f"at most {MAX_HEADER_BYTES} + {MAX_PAYLOAD_BYTES} are accepted"
        )
    try:
        header = json.loads(bytes(_read_exactly(stream, header_bytes) or b""))
    except (ValueError, RecursionError) as error:
        raise WorkerError(f"a frame's header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise WorkerError(f"a frame's header is a JSON {type(header).__name__}, not an object")
    layout = _checked_layout(header.pop("arrays", []), payload_bytes)
    return Frame(header=header, arrays=_read_arrays(stream, layout))


def _checked_layout(listing: Any, payload_bytes: int) -> list[tuple[str, str, tuple[int, ...]]]:
    layout: list[tuple[str, str, tuple[int, ...]]] = []
    total_bytes = 0
    entries = listing if isinstance(listing, list) else [listing]
    for entry in entries:
        match entry:
            case [str(name), str(dtype), list(dims)] if dtype in DTYPES and len(dims) <= MAX_RANK:
                if not all(type(dim) is int and 0 <= dim <= MAX_PAYLOAD_BYTES for dim in dims):
                    raise WorkerError(f"a frame's tensor '{name}' has the shape {dims}")
                layout.append((name, dtype, tuple(dims)))
                total_bytes += math.prod(dims) * _item_bytes(dtype)
            case _:
                raise WorkerError(f"a frame lists {str(entry)[:80]} where a tensor was expected")
    if total_bytes != payload_bytes:
        raise WorkerError(f"a frame's tensors add up to {total_bytes} bytes, not {payload_bytes}")
    return layout


def _item_bytes(dtype: str) -> int:
    digits = "".join(character for character in dtype if character.isdigit())
    return int(digits) // 8 if digits else 1


def _read_arrays(
    stream: BinaryIO, layout: list[tuple[str, str, tuple[int, ...]]]
) -> dict[str, Any]:  # Any: numpy.ndarray
    if not layout:
        return {}
    import numpy as np

    arrays: dict[str, Any] = {}
    for name, dtype, shape in layout:
        size_bytes = math.prod(shape) * _item_bytes(dtype)
        data = _read_exactly(stream, size_bytes) or bytearray()
        little = np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<")).reshape(shape)
        arrays[name] = little.astype(dtype, copy=False)
    return arrays


def _read_exactly(stream: BinaryIO, size_bytes: int, *, may_end: bool = False) -> bytearray | None:
    """Reads in pieces, so that a frame that lies about its size costs no memory up front."""
    data = bytearray()
    while len(data) < size_bytes:
        piece = stream.read(min(size_bytes - len(data), 8 << 20))
        if not piece:
            if may_end and not data:
                return None
            raise WorkerError(f"the stream ended {size_bytes - len(data)} bytes before a frame did")
        data += piece
    return data
