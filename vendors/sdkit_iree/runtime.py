"""The runtime: its version, and its two devices on the processor."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import iree.runtime as rt

VERSION = version("iree-base-compiler")
RUNTIME_VERSION = version("iree-base-runtime")
RUNTIME = f"iree {VERSION}"


def driver_for(threads: int | None) -> str:
    """Returns the driver for a number of threads: one needs none of its own."""
    return "local-sync" if threads == 1 else "local-task"


def open_device(threads: int | None) -> Any:  # Any: a HalDevice
    """Opens the processor.

    A process has one pool of threads: the first number above one that is asked for counts. A
    worker asks for one only.
    """
    driver = driver_for(threads)
    if driver == "local-task" and threads is not None:
        rt.flags.parse_flags(f"--task_topology_group_count={threads}")
    return rt.get_device(driver)
