"""Memory that a build will take, and what the machine has."""

from __future__ import annotations

import os
from pathlib import Path

BASE_BYTES = 200 << 20
"""Of the worker and the compiler with a graph of a few nodes."""
BYTES_PER_NODE = 64 << 10
"""The compiler's peak was 308 MB with the 1966 nodes of an SD1.5 UNet (IREE 3.13)."""
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def estimated_peak_bytes(*, nodes: int, weights_bytes: int) -> int:
    """Returns about how much memory a build takes at its peak: once the weights, and the compiler.

    Weights are mapped, never copied: 3.7 GB in all with the 3.4 GB of an SD1.5 UNet, most of which
    the system can take back.
    """
    return BASE_BYTES + BYTES_PER_NODE * nodes + weights_bytes


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
