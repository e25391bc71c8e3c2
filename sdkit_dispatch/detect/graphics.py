"""What tells two states of a machine's GPU drivers apart where no version of a device does.

A driver that comes with the kernel has no version of its own, and the drivers of Vulkan and OpenCL
are installed apart from it. Each has a small file that says where it is, and is new with it.

Source: https://github.com/KhronosGroup/Vulkan-Loader/blob/main/docs/LoaderDriverInterface.md
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

SYSTEM_FOLDERS = (
    "/etc/OpenCL/vendors",
    "/etc/vulkan/icd.d",
    "/etc/xdg/vulkan/icd.d",
    "/run/opengl-driver/share/vulkan/icd.d",
    "/usr/local/share/vulkan/icd.d",
    "/usr/share/vulkan/icd.d",
)
DRIVER_FILES = ("VK_DRIVER_FILES", "VK_ADD_DRIVER_FILES", "VK_ICD_FILENAMES")
"""Variables that list such files, or folders of them."""
PREFIXES, SUFFIX = ("VK_", "HSA_", "ZE_"), "_VISIBLE_DEVICES"
"""Of the variables that choose drivers and hide devices from runtimes."""


def graphics_state(environ: Mapping[str, str]) -> list[list[str | int]]:
    """Returns what is different after a driver was installed, removed, replaced or hidden."""
    rows: list[list[str | int]] = [["kernel", platform.release()]]
    for name in sorted(environ):
        if name.startswith(PREFIXES) or name.endswith(SUFFIX):
            rows.append([name, environ[name]])
    for path in _driver_files(environ):
        with suppress(OSError):
            found = path.stat()
            rows.append([str(path), found.st_size, found.st_mtime_ns])
    return rows


def _driver_files(environ: Mapping[str, str]) -> Iterator[Path]:
    own = environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    named = [name for key in DRIVER_FILES for name in environ.get(key, "").split(os.pathsep)]
    for place in (*SYSTEM_FOLDERS, f"{own}/vulkan/icd.d", *filter(None, named)):
        path = Path(place)
        with suppress(OSError):
            yield from sorted(path.iterdir()) if path.is_dir() else [path]
