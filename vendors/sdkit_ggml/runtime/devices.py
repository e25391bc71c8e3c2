"""The devices that a loaded ggml offers, and which of them is the one that was planned."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass

from sdkit_dispatch.contract import Device
from sdkit_ggml.runtime.binding import DeviceProps, Library

KINDS = {0: "cpu", 1: "discrete", 2: "integrated"}
"""`enum ggml_backend_dev_type` -> kind of ours; accelerators and meta devices are no devices."""
_SOFTWARE = ("llvmpipe", "lavapipe", "swiftshader", "software")
"""Parts of the names of Vulkan drivers that compute on the processor."""
GENERAL_BACKEND = "Vulkan"
"""Serves the GPUs of any maker; a maker's own backend is better at its own."""
ASKED_FOR = "GGML_VK_VISIBLE_DEVICES"
"""Whoever sets it names Vulkan devices by number: then one of software is asked for."""


@dataclass(frozen=True, kw_only=True)
class OfferedDevice:
    """A device as ggml lists it.

    Attributes:
        name: "CPU", "Vulkan0", "CUDA0".
        backend: "CPU", "Vulkan", "CUDA".
        pci_address: "0000:c1:00.0"; empty if ggml does not say.
        handle: What ggml calls it.
    """

    name: str
    backend: str
    kind: str
    description: str
    pci_address: str
    memory_bytes: int
    free_bytes: int
    handle: int
    has_host_memory: bool

    @property
    def is_software(self) -> bool:
        """Whether it is a GPU driver that computes on the processor."""
        words = self.description.lower()
        return self.kind != "cpu" and any(sign in words for sign in _SOFTWARE)

    @property
    def words(self) -> str:
        """Which device it is: "Vulkan0 (AMD RX 7900, discrete, 0000:03:00.0, 8.0 GiB)"."""
        facts = (
            self.description,
            "software" if self.is_software else self.kind,
            self.pci_address,
            f"{self.memory_bytes / 2**30:.1f} GiB" if self.memory_bytes else "",
        )
        return f"{self.name} ({', '.join(filter(None, facts))})"


def offered_devices(library: Library) -> tuple[OfferedDevice, ...]:
    """Returns the devices of all loaded backends, discrete GPUs first.

    A card that two backends offer is its maker's first, then Vulkan's.
    """
    found = [
        _offered(library, library.ggml_backend_dev_get(index))
        for index in range(library.ggml_backend_dev_count())
    ]
    order = ("discrete", "integrated", "cpu")
    known = [one for one in found if one.kind in order]
    return tuple(
        sorted(
            known,
            key=lambda one: (
                one.is_software,
                order.index(one.kind),
                one.backend == GENERAL_BACKEND,
                -one.memory_bytes,
            ),
        )
    )


def _offered(library: Library, handle: int) -> OfferedDevice:
    props = DeviceProps()
    library.ggml_backend_dev_get_props(handle, ctypes.byref(props))
    registry = library.ggml_backend_dev_backend_reg(handle)
    return OfferedDevice(
        name=_text(props.name),
        backend=_text(library.ggml_backend_reg_name(registry)),
        kind=KINDS.get(props.type, "other"),
        description=_text(props.description),
        pci_address=_text(props.device_id).lower(),
        memory_bytes=int(props.memory_total),
        free_bytes=int(props.memory_free),
        handle=handle,
        has_host_memory=bool(props.caps.buffer_from_host_ptr),
    )


def _text(value: bytes | None) -> str:
    return value.decode(errors="replace") if value else ""


def find_device(device: Device, offered: Iterable[OfferedDevice]) -> OfferedDevice | None:
    """Returns which of ggml's devices is the given one.

    By PCI address where both sides know it; else by kind, if one alone is left. A driver of
    software serves only who asked for it (`GGML_VK_VISIBLE_DEVICES`).
    """
    if device.kind == "cpu":
        return next((one for one in offered if one.kind == "cpu"), None)
    gpus = [
        one
        for one in offered
        if one.kind != "cpu" and (not one.is_software or os.environ.get(ASKED_FOR, "").strip())
    ]
    address = device.pci_address.lower()
    if address and any(one.pci_address for one in gpus):
        return next((one for one in gpus if one.pci_address == address), None)
    same_kind = [one for one in gpus if one.kind == device.kind] or (
        # Vulkan calls every GPU without memory of its own integrated; ours may know better.
        gpus if len(gpus) == 1 else []
    )
    named = [one for one in same_kind if _shares_name(device.name, one.description)]
    candidates = named or same_kind
    return candidates[0] if len({one.description for one in candidates}) == 1 else None


def _shares_name(ours: str, theirs: str) -> bool:
    return bool(ours) and (ours.lower() in theirs.lower() or theirs.lower() in ours.lower())
