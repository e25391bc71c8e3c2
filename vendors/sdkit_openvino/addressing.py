"""A device of ours -> the name OpenVINO has for it: "CPU", "GPU.1", "NPU"."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from sdkit_dispatch.contract import Device, Rejection

_FAMILIES = {"cpu": "CPU", "integrated": "GPU", "discrete": "GPU", "npu": "NPU"}


@dataclass(frozen=True, kw_only=True)
class OfferedDevice:
    """A device as OpenVINO lists it; what its plugin does not say is empty.

    Attributes:
        name: "CPU", "GPU", "GPU.1", "NPU".
        pci_address: "0000:03:00.0".
        luid: 16 hex digits, byte by byte as in memory.
        uuid: 32 hex digits.
        device_id: PCI device id, four hex digits: "56a0".
    """

    name: str
    full_name: str = ""
    pci_address: str = ""
    luid: str = ""
    uuid: str = ""
    device_id: str = ""


@dataclass(frozen=True, kw_only=True)
class _Cause:
    """A reason why a family of devices is not offered, told by a sign in OpenVINO's words."""

    sign: str
    code: str
    reason: str
    hints: dict[str, str]


_CAUSES = {
    "GPU": (
        _Cause(
            sign="libOpenCL",
            code="no-opencl-loader",
            reason="the OpenCL loader libOpenCL.so.1 is not installed",
            hints={"linux": "sudo apt install ocl-icd-libopencl1 intel-opencl-icd"},
        ),
        _Cause(
            sign="",
            code="no-gpu-driver",
            reason="the OpenCL loader shows it no Intel GPU",
            hints={
                "linux": "sudo apt install intel-opencl-icd && sudo usermod -aG render $USER",
                "win32": "install Intel's graphics driver",
            },
        ),
    ),
    "NPU": (
        _Cause(
            sign="",
            code="no-npu-driver",
            reason="no driver of an NPU answers",
            hints={
                "linux": "install Intel's linux-npu-driver, then log in again",
                "win32": "install Intel's NPU driver",
            },
        ),
    ),
}


def family_of(device: Device) -> str:
    """Returns "CPU", "GPU" or "NPU"."""
    return _FAMILIES[device.kind]


def find_device(device: Device, offered: Iterable[OfferedDevice]) -> OfferedDevice | None:
    """Returns the offered device that is `device`, or None.

    By address, LUID or UUID; by the PCI device id only where no two devices share it.
    """
    family = family_of(device)
    candidates = [one for one in offered if one.name.split(".")[0] == family]
    if family == "CPU":
        return candidates[0] if candidates else None
    ours = {
        "pci_address": device.pci_address.lower(),
        "luid": luid_bytes(device.luid),
        "uuid": _hex_digits(device.uuid),
        "device_id": device.pci_id.lower().partition(":")[2],
    }
    for field, value in ours.items():
        found = [one for one in candidates if value and getattr(one, field) == value]
        if len(found) == 1:
            return found[0]
    return None


def why_not_offered(device: Device, offered: Iterable[OfferedDevice], words: str) -> Rejection:
    """Returns why `device` is not among `offered`; `words` is what its plugin says when asked."""
    family = family_of(device)
    seen = [one for one in offered if one.name.split(".")[0] == family]
    if seen:
        listed = ", ".join(
            f"{one.name} at {one.pci_address or '?'} ({one.full_name})" for one in seen
        )
        return Rejection(
            vendor="openvino",
            code="device-not-found",
            reason=f"OpenVINO offers {listed}, but not {device.name} ({device.id})",
            hint="sdkit-dispatch doctor",
            device=device.id,
        )
    cause = next((one for one in _CAUSES.get(family, ()) if one.sign in words), None)
    return Rejection(
        vendor="openvino",
        code=cause.code if cause else "no-plugin",
        reason=f"OpenVINO offers no {family}: {cause.reason if cause else words} ({words})"
        if cause
        else f"OpenVINO offers no {family}: {words}",
        hint=cause.hints.get(sys.platform, "") if cause else "",
        device=device.id,
    )


def luid_bytes(luid: str) -> str:
    """Returns a LUID, "00000000:0000c4f3" (high:low), as OpenVINO writes it: "f3c4000000000000"."""
    high, _, low = luid.removeprefix("luid:").partition(":")
    if not low:
        return ""
    return ((int(high, 16) << 32) | int(low, 16)).to_bytes(8, "little").hex()


def _hex_digits(uuid: str) -> str:
    return "".join(char for char in uuid.lower() if char in "0123456789abcdef")
