"""Weights read from and written to external files of an ONNX graph, a piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import uses_external_data

from sdkit_dispatch.errors import PipelineError
from sdkit_dispatch.graph.tensor_sizes import external_part, require_held, tensor_bytes

PIECE_BYTES = 16 << 20
"""Read, converted and written at once."""
INLINE_BYTES = 1024
"""Smaller tensors stay in the graph: shapes and axes must be readable without the data file."""
ALIGNMENT = 4096
"""Of tensors of a page or more, so that a runtime can map them."""

_DATA_FIELDS = (
    "raw_data",
    "float_data",
    "int32_data",
    "int64_data",
    "double_data",
    "uint64_data",
    "external_data",
    "data_location",
)
_HALF_MAX = 65504.0


def load_small_tensors(model: onnx.ModelProto, folder: Path, limit_bytes: int) -> None:
    """Moves external tensors of at most `limit_bytes` into the graph."""
    for tensor in model.graph.initializer:
        if uses_external_data(tensor) and tensor_bytes(tensor) <= limit_bytes:
            data = b"".join(bytes(piece) for piece in pieces_of(tensor, folder))
            _clear_data(tensor)
            tensor.raw_data = data


def pieces_of(tensor: onnx.TensorProto, folder: Path) -> Iterator[Any]:
    """Yields the values of a tensor as flat little-endian byte arrays (numpy.uint8).

    Raises:
        PipelineError: The external file lies outside `folder`, is missing or too short; or the
            tensor claims what it does not hold.
    """
    yield from _cut(values_of(tensor, folder))


def values_of(tensor: onnx.TensorProto, folder: Path) -> Any:  # Any: numpy.ndarray
    """Returns the values of a tensor as one flat little-endian byte array, mapped if external.

    Raises:
        PipelineError: The external file lies outside `folder`, is missing or too short.
    """
    if not uses_external_data(tensor):
        require_held(tensor)
        data = tensor.raw_data or numpy_helper.to_array(tensor).tobytes()
        return np.frombuffer(data, np.uint8)
    part = external_part(tensor)
    try:
        path = (folder / part.location).resolve()
        is_inside = path.is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, a loop of links
        raise PipelineError(f'"{tensor.name}" has its data at an odd place: {error}') from error
    if not is_inside:
        raise PipelineError(f'"{tensor.name}" has its data at "{part.location}", out of {folder}')
    size_bytes = tensor_bytes(tensor)
    if size_bytes == 0:
        return np.zeros(0, np.uint8)
    try:
        return np.memmap(path, np.uint8, "r", offset=part.start, shape=(size_bytes,))
    except (OSError, ValueError, OverflowError) as error:
        raise PipelineError(f'{path} does not hold the data of "{tensor.name}": {error}') from error


def converted(piece: Any, source: int, target: int) -> Any:  # Any: numpy.ndarray
    """Returns bytes of one float type as bytes of another, rounded to the nearest even.

    Finite values beyond float16's range become its largest: an infinity would spread.
    """
    if source == target:
        return piece
    values = _as_float32(piece, source)
    if target == TensorProto.FLOAT:
        return values.view(np.uint8)
    # Both are NaN if one value is: the common case takes no pass of its own.
    least, largest = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if target == TensorProto.FLOAT16:
        if not -_HALF_MAX <= least <= largest <= _HALF_MAX:
            clipped = np.clip(values, -_HALF_MAX, _HALF_MAX)
            values = np.where(np.isfinite(values), clipped, values)
        return values.astype(np.float16).view(np.uint8)
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    if np.isnan(least):
        # Rounding must not turn a NaN with low bits only into an infinity.
        rounded[np.isnan(values)] = 0x7FC0
    return rounded.astype(np.uint16).view(np.uint8)


class WeightWriter:
    """Appends tensors to one external file."""

    def __init__(
        self,
        stream: BinaryIO,
        location: str,
        *,
        total_bytes: int,
        on_fraction: Callable[[float], None],
    ) -> None:
        self._stream = stream
        self._location = location
        self._total_bytes = max(total_bytes, 1)
        self._read_bytes = 0
        self._on_fraction = on_fraction

    def write(self, tensor: onnx.TensorProto, folder: Path, target: int) -> onnx.TensorProto:
        """Returns `tensor` with its values as `target`, in the file or, if small, in itself."""
        result = onnx.TensorProto(name=tensor.name, dims=tensor.dims, data_type=target)
        pieces = self._converted_pieces(tensor, folder, target)
        if tensor_bytes(result) < INLINE_BYTES:
            result.raw_data = b"".join(bytes(piece) for piece in pieces)
            return result
        if tensor_bytes(result) >= ALIGNMENT:
            self._stream.write(b"\0" * (-self._stream.tell() % ALIGNMENT))
        offset = self._stream.tell()
        for piece in pieces:
            self._stream.write(memoryview(piece))
        result.data_location = TensorProto.EXTERNAL
        for key, value in (
            ("location", self._location),
            ("offset", str(offset)),
            ("length", str(self._stream.tell() - offset)),
        ):
            result.external_data.add(key=key, value=value)
        return result

    def _converted_pieces(
        self, tensor: onnx.TensorProto, folder: Path, target: int
    ) -> Iterator[Any]:  # Any: numpy.ndarray
        for piece in pieces_of(tensor, folder):
            yield np.ascontiguousarray(converted(piece, tensor.data_type, target))
            self._read_bytes += piece.nbytes
            self._on_fraction(min(self._read_bytes / self._total_bytes, 1.0))


def _as_float32(piece: Any, source: int) -> Any:  # Any: numpy.ndarray
    if source == TensorProto.FLOAT:
        return piece.view(np.float32)
    if source == TensorProto.FLOAT16:
        return piece.view(np.float16).astype(np.float32)
    return (piece.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _cut(data: Any) -> Iterator[Any]:  # Any: numpy.ndarray
    for start in range(0, data.size, PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def _clear_data(tensor: onnx.TensorProto) -> None:
    for name in _DATA_FIELDS:
        tensor.ClearField(name)
