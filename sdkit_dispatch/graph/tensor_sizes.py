"""How many bytes a tensor claims, and whether it has them.

A graph is somebody else's file. What a tensor says of its size is compared with what is there
before anything takes memory for it: dims of 2^50, or two of 2^32 whose product wraps around to
nothing, cost no more than an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx
from onnx import TensorProto
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from sdkit_dispatch.errors import PipelineError

_PACKED = frozenset({TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT4E2M1})
_COMPLEX = frozenset({TensorProto.COMPLEX64, TensorProto.COMPLEX128})
MAX_RANK = 64
"""More dimensions than numpy, or any runtime, takes."""
MAX_CELLS = 1 << 48
"""Of a shape in which a 0 counts as 1: numpy refuses [0, 2^63 - 1], which holds nothing."""


@dataclass(frozen=True, kw_only=True)
class ExternalPart:
    """Which bytes of which file hold a tensor; `location` is relative, and as the graph has it."""

    location: str
    start: int
    end: int


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Returns the size of a tensor's values.

    Raises:
        PipelineError: The shape cannot be, or the element type is unknown.
    """
    is_odd = len(tensor.dims) > MAX_RANK or any(dim < 0 for dim in tensor.dims)
    if is_odd or math.prod(max(dim, 1) for dim in tensor.dims) > MAX_CELLS:
        raise PipelineError(
            f"the tensor '{tensor.name}' has the shape {list(tensor.dims)[:8]} in "
            f"{len(tensor.dims)} dimensions"
        )
    count = math.prod(tensor.dims)
    if tensor.data_type in _PACKED:
        return (count + 1) // 2
    try:
        return count * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    except (KeyError, ValueError, TypeError) as error:
        raise PipelineError(
            f"the tensor '{tensor.name}' has the element type {tensor.data_type}, which is unknown"
        ) from error


def external_part(tensor: onnx.TensorProto) -> ExternalPart:
    """Returns where the values of an external tensor are; reads no file.

    Raises:
        PipelineError: Its offset, length or size cannot be.
    """
    size_bytes = tensor_bytes(tensor)
    try:
        info = ExternalDataInfo(tensor)
    except ValueError as error:
        raise PipelineError(f"the tensor '{tensor.name}' has odd external data: {error}") from error
    start = info.offset or 0
    if info.length is not None and info.length < size_bytes:
        raise PipelineError(
            f"the tensor '{tensor.name}' has {info.length} bytes of external data, and its shape "
            f"{list(tensor.dims)[:8]} needs {size_bytes}"
        )
    return ExternalPart(
        location=info.location, start=start, end=start + (info.length or size_bytes)
    )


def require_held(tensor: onnx.TensorProto) -> None:
    """Refuses a tensor in the graph file that does not hold what it claims.

    Raises:
        PipelineError: Names it, with both sizes.
    """
    if uses_external_data(tensor):
        return
    needed_bytes, count = tensor_bytes(tensor), math.prod(tensor.dims)
    if tensor.raw_data:
        held, unit, is_held = len(tensor.raw_data), "bytes", len(tensor.raw_data) == needed_bytes
    else:
        field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
        held, unit = len(getattr(tensor, field)), f"items of {field}"
        # Of 4-bit numbers, writers put two or eight into an item.
        is_packed = tensor.data_type in _PACKED
        wanted = 2 * count if tensor.data_type in _COMPLEX else count
        is_held = held * 8 >= count if is_packed else held == wanted
    if not is_held:
        raise PipelineError(
            f"the tensor '{tensor.name}' has the shape {list(tensor.dims)[:8]}, that is "
            f"{needed_bytes} bytes, and holds {held} {unit}"
        )
