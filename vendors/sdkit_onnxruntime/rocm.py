"""ROCm on this machine: its libraries found and loaded, its versions, its number of a card."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path

logger = logging.getLogger(__name__)

LIBRARIES = ("libhiprtc.so.7", "libamdhip64.so.7", "libmigraphx_c.so.3")
"""What onnxruntime-migraphx 1.27 needs, in the order in which they need each other.

ROCm 10 still has version 7 in the names of HIP's libraries.
"""
SCRUBBED_PREFIX = "ORT_MIGRAPHX_"
"""Variables that override the provider's options: an engine would not be what its key says."""


def scrub_environment(environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Removes the variables that the provider obeys behind our back; returns their names."""
    names = sorted(name for name in environment if name.startswith(SCRUBBED_PREFIX))
    for name in names:
        logger.warning("%s is ignored: set options.migraphx instead", name)
        del environment[name]
    return names


def library_folders(search_path: Iterable[str] | None = None) -> list[Path]:
    """Returns the folders that hold ROCm's libraries, those that pip installed ahead.

    Args:
        search_path: Where packages are; `sys.path` by default.
    """
    found: list[Path] = []
    for entry in sys.path if search_path is None else search_path:
        # AMD's wheels look for each other where they were built (ROCm/AMDMIGraphX#5235).
        found += sorted(Path(entry).glob("_rocm_sdk_*/lib"))
        found += sorted(Path(entry).glob("migraphx*/lib"))
    found += sorted(Path("/opt").glob("rocm*/lib"), reverse=True)
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def load_libraries(folders: Iterable[Path] | None = None) -> dict[str, Path]:
    """Loads what the provider needs from where it would not look; returns name -> file."""
    places = library_folders() if folders is None else list(folders)
    loaded: dict[str, Path] = {}
    for name in LIBRARIES:
        for path in _files(places, name):
            try:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                logger.info("%s does not load: %s", path, error)
                continue
            loaded[name] = path
            break
    return loaded


def versions(loaded: dict[str, Path]) -> str:
    """Returns what identifies ROCm and MIGraphX here: "hip=7.2.53211;migraphx=libmigraphx...".

    The provider's own cache knows the version that it was built with, not the one that runs.
    """
    parts = []
    hip = _hip_version()
    if hip:
        parts.append(f"hip={hip}")
    for name in LIBRARIES[-1:]:
        if name in loaded:
            # The C interface tells no version; the real file's name and size change with it.
            real = loaded[name].resolve()
            parts.append(f"migraphx={real.name}+{real.stat().st_size}")
    return ";".join(parts)


def card_number(pci_address: str) -> int:
    """Returns HIP's number of a card; 0 where HIP cannot be asked."""
    hip = _hip()
    number = ctypes.c_int()
    if hip is None or not pci_address:
        return 0
    hip.hipDeviceGetByPCIBusId(ctypes.byref(number), pci_address.encode())
    return number.value


def _hip_version() -> str:
    hip = _hip()
    number = ctypes.c_int()
    if hip is None or hip.hipRuntimeGetVersion(ctypes.byref(number)) != 0:
        return ""
    # Source: HIP_VERSION = major * 10000000 + minor * 100000 + patch, hip/hip_version.h.
    value = number.value
    return f"{value // 10_000_000}.{value // 100_000 % 100}.{value % 100_000}"


def _hip() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libamdhip64.so.7")
    except OSError:
        return None


def _files(folders: Iterable[Path], name: str) -> Iterator[Path]:
    for folder in folders:
        if (folder / name).is_file():
            yield folder / name
