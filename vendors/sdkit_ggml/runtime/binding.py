"""The part of ggml's C API that is used here, as one table of signatures.

The table holds for ggml 0.20 to 0.27: ggml promises no ABI, so `bind` looks every symbol up and
`loader.py` compares the version. Nothing here checks arguments: ggml's assertions abort the
process, so whoever calls has validated shapes and types before (`program.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
)
from typing import Any

MAX_DIMS = 4


class InitParams(Structure):
    """`struct ggml_init_params`."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class DeviceCaps(Structure):
    """`struct ggml_backend_dev_caps`; a field more than 0.20 has, for later versions."""

    _fields_ = (
        ("is_async", c_bool),
        ("host_buffer", c_bool),
        ("buffer_from_host_ptr", c_bool),
        ("events", c_bool),
        ("reserved", c_bool * 12),
    )


class DeviceProps(Structure):
    """`struct ggml_backend_dev_props`."""

    _fields_ = (
        ("name", c_char_p),
        ("description", c_char_p),
        ("memory_free", c_size_t),
        ("memory_total", c_size_t),
        ("type", c_int),
        ("device_id", c_char_p),
        ("caps", DeviceCaps),
        ("reserved", ctypes.c_uint8 * 64),
    )


class TensorHead(Structure):
    """The first fields of `struct ggml_tensor`: what is read back to compare with the program."""

    _fields_ = (
        ("type", c_int),
        ("buffer", c_void_p),
        ("ne", c_int64 * MAX_DIMS),
        ("nb", c_size_t * MAX_DIMS),
    )


TENSOR = CONTEXT = GRAPH = BUFFER = BACKEND = DEVICE = REGISTRY = c_void_p
LOG_CALLBACK = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
ABORT_CALLBACK = ctypes.CFUNCTYPE(None, c_char_p)

_NE = (c_int64,) * MAX_DIMS

BASE: dict[str, tuple[Any, tuple[Any, ...]]] = {  # Any: ctypes has no common type of its types
    "ggml_version": (c_char_p, ()),
    "ggml_commit": (c_char_p, ()),
    "ggml_log_set": (None, (LOG_CALLBACK, c_void_p)),
    "ggml_init": (CONTEXT, (InitParams,)),
    "ggml_free": (None, (CONTEXT,)),
    "ggml_tensor_overhead": (c_size_t, ()),
    "ggml_graph_overhead_custom": (c_size_t, (c_size_t, c_bool)),
    "ggml_new_graph_custom": (GRAPH, (CONTEXT, c_size_t, c_bool)),
    "ggml_build_forward_expand": (None, (GRAPH, TENSOR)),
    "ggml_graph_n_nodes": (c_int, (GRAPH,)),
    "ggml_graph_node": (TENSOR, (GRAPH, c_int)),
    "ggml_nbytes": (c_size_t, (TENSOR,)),
    "ggml_op_desc": (c_char_p, (TENSOR,)),
    "ggml_new_tensor_4d": (TENSOR, (CONTEXT, c_int, *_NE)),
    "ggml_view_4d": (TENSOR, (CONTEXT, TENSOR, *_NE, c_size_t, c_size_t, c_size_t, c_size_t)),
    "ggml_permute": (TENSOR, (CONTEXT, TENSOR, c_int, c_int, c_int, c_int)),
    "ggml_add": (TENSOR, (CONTEXT, TENSOR, TENSOR)),
    "ggml_add_inplace": (TENSOR, (CONTEXT, TENSOR, TENSOR)),
    "ggml_sub": (TENSOR, (CONTEXT, TENSOR, TENSOR)),
    "ggml_mul": (TENSOR, (CONTEXT, TENSOR, TENSOR)),
    "ggml_div": (TENSOR, (CONTEXT, TENSOR, TENSOR)),
    "ggml_sqr": (TENSOR, (CONTEXT, TENSOR)),
    "ggml_sqrt": (TENSOR, (CONTEXT, TENSOR)),
    "ggml_log": (TENSOR, (CONTEXT, TENSOR)),
    "ggml_sin": (TENSOR, (CONTEXT, TENSOR)),
    "ggml_cos": (TENSOR, (CONTEXT, TENSOR)),
    "ggml_sum_rows": (TENSOR, (CONTEXT, TENSOR)),
    "ggml_mean": (TENSOR, (CONTEXT, TENSOR)),
    "ggml_unary": (TENSOR, (CONTEXT, TENSOR, c_int)),
    "ggml_glu_split": (TENSOR, (CONTEXT, TENSOR, TENSOR, c_int)),
    "ggml_leaky_relu": (TENSOR, (CONTEXT, TENSOR, c_float, c_bool)),
    "ggml_clamp": (TENSOR, (CONTEXT, TENSOR, c_float, c_float)),
    "ggml_scale_bias": (TENSOR, (CONTEXT, TENSOR, c_float, c_float)),
    "ggml_norm": (TENSOR, (CONTEXT, TENSOR, c_float)),
    "ggml_rms_norm": (TENSOR, (CONTEXT, TENSOR, c_float)),
    "ggml_group_norm": (TENSOR, (CONTEXT, TENSOR, c_int, c_float)),
    "ggml_soft_max_ext": (TENSOR, (CONTEXT, TENSOR, TENSOR, c_float, c_float)),
    "ggml_mul_mat": (TENSOR, (CONTEXT, TENSOR, TENSOR)),
    "ggml_mul_mat_set_prec": (None, (TENSOR, c_int)),
    "ggml_flash_attn_ext": (
        TENSOR,
        (CONTEXT, TENSOR, TENSOR, TENSOR, TENSOR, c_float, c_float, c_float),
    ),
    "ggml_flash_attn_ext_set_prec": (None, (TENSOR, c_int)),
    "ggml_get_rows": (TENSOR, (CONTEXT, TENSOR, TENSOR)),
    "ggml_cont": (TENSOR, (CONTEXT, TENSOR)),
    "ggml_cpy": (TENSOR, (CONTEXT, TENSOR, TENSOR)),
    "ggml_repeat_4d": (TENSOR, (CONTEXT, TENSOR, *_NE)),
    "ggml_im2col": (
        TENSOR,
        (CONTEXT, TENSOR, TENSOR, c_int, c_int, c_int, c_int, c_int, c_int, c_bool, c_int),
    ),
    "ggml_pool_2d": (
        TENSOR,
        (CONTEXT, TENSOR, c_int, c_int, c_int, c_int, c_int, c_float, c_float),
    ),
    "ggml_upscale": (TENSOR, (CONTEXT, TENSOR, c_int, c_int)),
    "ggml_pad_ext": (TENSOR, (CONTEXT, TENSOR, *(c_int,) * 8)),
    "ggml_backend_buft_alloc_buffer": (BUFFER, (c_void_p, c_size_t)),
    "ggml_backend_buft_get_alignment": (c_size_t, (c_void_p,)),
    "ggml_backend_buft_get_max_size": (c_size_t, (c_void_p,)),
    "ggml_backend_buft_get_alloc_size": (c_size_t, (c_void_p, TENSOR)),
    "ggml_backend_buffer_free": (None, (BUFFER,)),
    "ggml_backend_buffer_get_base": (c_void_p, (BUFFER,)),
    "ggml_backend_buffer_get_size": (c_size_t, (BUFFER,)),
    "ggml_backend_buffer_clear": (None, (BUFFER, ctypes.c_uint8)),
    "ggml_backend_buffer_set_usage": (None, (BUFFER, c_int)),
    "ggml_set_output": (None, (TENSOR,)),
    "ggml_backend_view_init": (c_int, (TENSOR,)),
    "ggml_backend_tensor_alloc": (c_int, (BUFFER, TENSOR, c_void_p)),
    "ggml_backend_tensor_set": (None, (TENSOR, c_void_p, c_size_t, c_size_t)),
    "ggml_backend_tensor_get": (None, (TENSOR, c_void_p, c_size_t, c_size_t)),
    "ggml_backend_synchronize": (None, (BACKEND,)),
    "ggml_backend_graph_compute": (c_int, (BACKEND, GRAPH)),
    "ggml_backend_free": (None, (BACKEND,)),
    "ggml_backend_dev_init": (BACKEND, (DEVICE, c_char_p)),
    "ggml_backend_dev_type": (c_int, (DEVICE,)),
    "ggml_backend_dev_get_props": (None, (DEVICE, POINTER(DeviceProps))),
    "ggml_backend_dev_backend_reg": (REGISTRY, (DEVICE,)),
    "ggml_backend_dev_buffer_type": (c_void_p, (DEVICE,)),
    "ggml_backend_dev_supports_op": (c_bool, (DEVICE, TENSOR)),
    "ggml_backend_dev_buffer_from_host_ptr": (BUFFER, (DEVICE, c_void_p, c_size_t, c_size_t)),
    "ggml_backend_reg_name": (c_char_p, (REGISTRY,)),
    "ggml_backend_reg_get_proc_address": (c_void_p, (REGISTRY, c_char_p)),
}
"""Functions of libggml-base: name -> result type, argument types."""

REGISTRY_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {  # Any: as above
    "ggml_backend_load": (REGISTRY, (c_char_p,)),
    "ggml_backend_reg_by_name": (REGISTRY, (c_char_p,)),
    "ggml_backend_dev_count": (c_size_t, ()),
    "ggml_backend_dev_get": (DEVICE, (c_size_t,)),
}
"""Functions of libggml, which knows the loaded backends."""

SET_THREADS = ctypes.CFUNCTYPE(None, BACKEND, c_int32)
SCORE = ctypes.CFUNCTYPE(c_int)


class Library:
    """Bound functions of one libggml as attributes, named as in C."""

    def __init__(self, base: ctypes.CDLL, registry: ctypes.CDLL) -> None:
        """Binds all functions.

        Raises:
            AttributeError: A symbol is missing; names all that are.
        """
        missing = [
            *_missing(base, BASE),
            *_missing(registry, REGISTRY_FUNCTIONS),
        ]
        if missing:
            raise AttributeError(f"lacks {', '.join(missing)}")
        for library, table in ((base, BASE), (registry, REGISTRY_FUNCTIONS)):
            for name, (result, arguments) in table.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:  # Any: a ctypes function
        # Only reached for what the tables do not hold.
        raise AttributeError(f"{name} is not in the table of bound functions")


def _missing(library: ctypes.CDLL, names: Iterable[str]) -> list[str]:
    return [name for name in names if not hasattr(library, name)]
