"""Memory that a build will take, and what the machine has."""

from __future__ import annotations

import os
from pathlib import Path

BASE_BYTES = 700 << 20
BYTES_PER_NODE = 400 << 10
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def estimated_peak_bytes(nodes: int) -> int:
    """Returns about how much memory compiling a graph of so many nodes takes at its peak."""
    return BASE_BYTES + BYTES_PER_NODE * nodes


def machine_bytes() -> int | None:
    """Returns the memory that this process may use at most; None if it cannot be known."""
    limits = []
    try:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, AttributeError):  # not on Windows
        return None
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(limits)
