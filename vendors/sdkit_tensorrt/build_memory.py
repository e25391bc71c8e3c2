"""Memory that a build will take, and what the machine has."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

PEAK_PER_WEIGHT_BYTE = 3.4
"""Peak of the process over the size of the weights: 5.7 GB with the 1.72 GB of an SD1.5 UNet in
float16 (TensorRT-RTX 1.7.1 on a processor)."""
BASE_BYTES = 300 << 20
"""Of a builder without a model."""
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def estimated_peak_bytes(weights_bytes: int) -> int:
    """Returns about how much memory a build takes at its peak."""
    return BASE_BYTES + int(PEAK_PER_WEIGHT_BYTE * weights_bytes)


def machine_bytes() -> int | None:
    """Returns the memory that this process may use at most; None if it cannot be known."""
    total = _windows_bytes() if sys.platform == "win32" else _posix_bytes()
    limits = [total] if total else []
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(limits, default=None)


def _posix_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def _windows_bytes() -> int | None:
    class Status(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_uint32),
            ("load", ctypes.c_uint32),
            *((name, ctypes.c_uint64) for name in ("total", "free", "a", "b", "c", "d", "e")),
        )

    status = Status(length=ctypes.sizeof(Status))
    windll = getattr(ctypes, "windll", None)
    if windll is None or not windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None
    return int(status.total)
