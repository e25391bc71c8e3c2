"""The inputs and outputs of a graph as records, and feeds checked against them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx

from sdkit_dispatch.contract import Arrays, TensorSpec
from sdkit_dispatch.errors import RunError


def numpy_dtype_name(element_type: int) -> str:
    """Returns an ONNX element type as numpy names it: 1 is "float32"."""
    return str(onnx.helper.tensor_dtype_to_np_dtype(element_type).name)


def static_spec(value: onnx.ValueInfoProto) -> TensorSpec:
    """Returns the record of an input or output whose shape is static.

    Raises:
        ValueError: A size is unknown.
    """
    tensor = value.type.tensor_type
    dims = tuple(int(dim.dim_value) for dim in tensor.shape.dim)
    if not tensor.HasField("shape") or 0 in dims:
        raise ValueError(f'"{value.name}" has no static shape')
    return TensorSpec(name=value.name, dtype=numpy_dtype_name(tensor.elem_type), shape=dims)


def check_feeds(inputs: Iterable[TensorSpec], feeds: Arrays) -> None:
    """Refuses feeds that differ from `inputs` in name, dtype or shape: nothing is cast silently.

    Raises:
        RunError: Names every input that is wrong, what was fed and what is declared.
    """
    declared = {spec.name: spec for spec in inputs}
    faults = [f'"{name}" is missing' for name in declared if name not in feeds]
    faults += [f'"{name}" is not an input' for name in feeds if name not in declared]
    for name, array in feeds.items():
        spec = declared.get(name)
        if spec is None:
            continue
        dtype, shape = getattr(array, "dtype", None), getattr(array, "shape", None)
        if dtype is None or shape is None:
            faults.append(f'"{name}" is a {type(array).__name__}, not a numpy array')
        elif _name(dtype) != spec.dtype or tuple(shape) != spec.shape:
            faults.append(f'"{name}" is {dtype.name}{list(shape)}, not {_written(spec)}')
    if faults:
        raise RunError(
            f"wrong feeds: {'; '.join(faults)}",
            hint=f"feed {', '.join(f'{s.name}: {_written(s)}' for s in declared.values())}",
        )


@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    """Numpy makes the name anew each time, in 8 us: as long as all else that a step checks."""
    return str(dtype.name)


def _written(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"
