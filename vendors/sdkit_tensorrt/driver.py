"""The CUDA driver, asked through its C interface: what it is, and whether a card answers.

Nothing here can crash: a runtime of NVIDIA's is imported or called only after this said yes.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sdkit_dispatch.contract import Device, Problem

CudaLibrary = Any
"""A loaded libcuda, or something of the same shape (`Any`: its functions are found at run time)."""

_MAJOR, _MINOR, _PROCESSORS = 75, 76, 16
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR and _MULTIPROCESSOR_COUNT."""
_LEAST_DRIVER = {12: "525.60", 13: "580"}
"""CUDA major version -> the oldest driver that it runs on. Source: CUDA release notes."""
_ERRORS = {
    3: "the driver is not initialised",
    34: "the driver's library is a stub",
    35: "the driver is older than the runtime needs",
    100: "the driver finds no card",
    101: "there is no such card",
    803: "the driver's library and its kernel module have different versions",
    999: "the driver does not say why",
}


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card as the CUDA driver sees it.

    Attributes:
        ordinal: Its number for the driver.
        cuda: CUDA version of the driver, (13, 0).
        processors: How many streaming multiprocessors it has.
    """

    ordinal: int
    name: str
    arch: str
    processors: int
    cuda: tuple[int, int]


def cuda_library_name() -> str:
    """Returns the file name of the driver's library."""
    return "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def load_cuda() -> CudaLibrary:
    """Loads the driver's library.

    Raises:
        OSError: There is no driver.
    """
    if sys.platform == "win32":
        return ctypes.WinDLL(cuda_library_name())
    return ctypes.CDLL(cuda_library_name())


def find_card(
    device: Device, *, cuda_major: int, load: Callable[[], CudaLibrary] | None = None
) -> Card | Problem:
    """Returns the card that `device` is, or why it cannot be used by a CUDA runtime.

    Args:
        device: Found by its PCI address; the first card if it has none.
        cuda_major: CUDA version that the runtime was built with.
        load: Loads the driver's library; `load_cuda` by default.
    """
    try:
        library = (load or load_cuda)()
    except OSError as error:
        return _no_driver(cuda_major, f"the NVIDIA driver is not here: {error}")
    code = library.cuInit(0)
    if code != 0:
        return _no_driver(cuda_major, f"the NVIDIA driver does not start: {_said(code)}")
    number = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    cuda = (number.value // 1000, number.value % 1000 // 10)
    if cuda[0] < cuda_major:
        return Problem(
            code="driver-too-old",
            message=f"the NVIDIA driver {device.driver} has CUDA {cuda[0]}.{cuda[1]}, and the "
            f"runtime was built with CUDA {cuda_major}".replace("  ", " "),
            hint=f"update the NVIDIA driver to {_LEAST_DRIVER[cuda_major]} or newer",
        )
    ordinal = ctypes.c_int(0)
    if device.pci_address:
        code = library.cuDeviceGetByPCIBusId(
            ctypes.byref(ordinal), device.pci_address.encode("ascii")
        )
    else:
        code = library.cuDeviceGet(ctypes.byref(ordinal), 0)
    if code != 0:
        where = device.pci_address or "0"
        return Problem(
            code="not-in-cuda",
            message=f"the NVIDIA driver does not know {device.name} ({where}): {_said(code)}",
            hint="check CUDA_VISIBLE_DEVICES and `nvidia-smi`",
        )
    return _card(library, ordinal.value, cuda)


def _card(library: CudaLibrary, ordinal: int, cuda: tuple[int, int]) -> Card:
    values = []
    for attribute in (_MAJOR, _MINOR, _PROCESSORS):
        value = ctypes.c_int()
        library.cuDeviceGetAttribute(ctypes.byref(value), attribute, ordinal)
        values.append(value.value)
    name = ctypes.create_string_buffer(256)
    library.cuDeviceGetName(name, len(name), ordinal)
    return Card(
        ordinal=ordinal,
        name=name.value.decode("utf-8", "replace"),
        arch=f"sm_{values[0]}{values[1]}",
        processors=values[2],
        cuda=cuda,
    )


def _no_driver(cuda_major: int, message: str) -> Problem:
    return Problem(
        code="no-driver",
        message=message,
        hint=f"install NVIDIA driver {_LEAST_DRIVER[cuda_major]} or newer",
    )


def _said(code: int) -> str:
    return f"{_ERRORS.get(code, 'an error')} (CUDA error {code})"
