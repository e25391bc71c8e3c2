"""Reads sysctl values of macOS through the C library; no process is started."""

from __future__ import annotations

import ctypes


def read_sysctl(name: str) -> bytes | None:
    """Returns the raw value; None if the kernel has no such name."""
    try:
        function = ctypes.CDLL(None).sysctlbyname
    except (OSError, AttributeError):
        return None
    size = ctypes.c_size_t(0)
    key = name.encode()
    if function(key, None, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    buffer = ctypes.create_string_buffer(size.value)
    if function(key, buffer, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    return buffer.raw[: size.value]
