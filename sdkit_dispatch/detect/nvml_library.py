"""Reads NVIDIA's management library (libnvidia-ml.so.1, nvml.dll) through ctypes.

Every call may fail on its own: a card that has fallen off the bus hides no other, and a fact that
a card refuses ("not supported" on a MIG slice or an integrated GPU) is left out. Source of the
names and structures: NVML API Reference, https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

from sdkit_dispatch.detect.answers import NvmlGpu, NvmlReport, NvmlSlice

TEXT_BYTES = 96
"""Longest text of NVML, with its zero."""
MAX_GPUS, MAX_SLICES = 64, 16


class _Memory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class _Pci(ctypes.Structure):
    """The structure of nvmlDeviceGetPciInfo_v3."""

    _fields_ = [
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    ]


def _library_names() -> tuple[str, ...]:
    if sys.platform == "win32":
        system = os.path.join(os.environ.get("WINDIR", r"C:\Windows"), "System32")
        old = os.path.join(os.environ.get("PROGRAMFILES", ""), "NVIDIA Corporation", "NVSMI")
        return (os.path.join(system, "nvml.dll"), os.path.join(old, "nvml.dll"))
    return (
        "libnvidia-ml.so.1",
        "/usr/lib/wsl/lib/libnvidia-ml.so.1",
        "/run/opengl-driver/lib/libnvidia-ml.so.1",  # NixOS keeps it out of the usual folders
    )


def _load() -> ctypes.CDLL | None:
    for name in _library_names():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def read_nvml() -> NvmlReport | None:
    """Returns what NVML says of every GPU; None if it cannot be loaded or started."""
    library = _load()
    return report_from_library(library) if library is not None else None


# `Any`: a loaded library, or a test's stand-in with the same functions.
def report_from_library(library: Any) -> NvmlReport | None:
    """Asks a loaded library, and closes it."""
    if not _call(library, "nvmlInit_v2"):
        return None
    try:
        count = ctypes.c_uint()
        if not _call(library, "nvmlDeviceGetCount_v2", ctypes.byref(count)):
            return None
        driver = _text(library, "nvmlSystemGetDriverVersion")
        gpus = (_gpu(library, index) for index in range(min(count.value, MAX_GPUS)))
        return NvmlReport(driver=driver, gpus=tuple(gpu for gpu in gpus if gpu is not None))
    finally:
        _call(library, "nvmlShutdown")


def _call(library: Any, name: str, *arguments: Any) -> bool:
    """Calls a function; False if an old library lacks it or if it reports an error."""
    function: Callable[..., int] | None = getattr(library, name, None)
    return function is not None and function(*arguments) == 0


def _text(library: Any, name: str, *handle: Any) -> str:
    buffer = ctypes.create_string_buffer(TEXT_BYTES)
    if not _call(library, name, *handle, buffer, ctypes.c_uint(TEXT_BYTES)):
        return ""
    return buffer.value.decode("utf-8", "replace")


def _memory_bytes(library: Any, handle: Any) -> int | None:
    memory = _Memory()
    if not _call(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)):
        return None
    return int(memory.total) or None


def _gpu(library: Any, index: int) -> NvmlGpu | None:
    handle = ctypes.c_void_p()
    if not _call(
        library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle)
    ):
        return None
    pci = _Pci()
    has_pci = _call(library, "nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci))
    major, minor = ctypes.c_int(), ctypes.c_int()
    has_capability = _call(
        library,
        "nvmlDeviceGetCudaComputeCapability",
        handle,
        ctypes.byref(major),
        ctypes.byref(minor),
    )
    mode, pending = ctypes.c_uint(), ctypes.c_uint()
    is_mig = bool(
        _call(library, "nvmlDeviceGetMigMode", handle, ctypes.byref(mode), ctypes.byref(pending))
        and mode.value
    )
    ids = pci.pci_device_id  # device id above, vendor id below
    return NvmlGpu(
        name=_text(library, "nvmlDeviceGetName", handle),
        uuid=_text(library, "nvmlDeviceGetUUID", handle),
        pci_address=pci.bus_id.decode("ascii", "replace") if has_pci else "",
        pci_id=f"{ids & 0xFFFF:04x}:{ids >> 16 & 0xFFFF:04x}" if has_pci and ids else "",
        compute_capability=(major.value, minor.value) if has_capability else None,
        memory_bytes=_memory_bytes(library, handle),
        is_mig=is_mig,
        slices=_slices(library, handle) if is_mig else (),
    )


def _slices(library: Any, parent: Any) -> tuple[NvmlSlice, ...]:
    count = ctypes.c_uint()
    if not _call(library, "nvmlDeviceGetMaxMigDeviceCount", parent, ctypes.byref(count)):
        return ()
    slices = []
    for index in range(min(count.value, MAX_SLICES)):
        handle = ctypes.c_void_p()
        if not _call(
            library,
            "nvmlDeviceGetMigDeviceHandleByIndex",
            parent,
            ctypes.c_uint(index),
            ctypes.byref(handle),
        ):
            continue  # the places of a card need not be filled in order
        uuid = _text(library, "nvmlDeviceGetUUID", handle)
        name = _text(library, "nvmlDeviceGetName", handle).rpartition("MIG ")[2]
        slices.append(NvmlSlice(uuid=uuid, name=name, memory_bytes=_memory_bytes(library, handle)))
    return tuple(slices)
