"""What OpenVINO says of the devices that it offers here."""

from __future__ import annotations

from typing import Any

from sdkit_openvino.addressing import OfferedDevice
from sdkit_openvino.runtime import RUNTIME, ov, words_of

_TELLING = {"CPU": "FULL_DEVICE_NAME", "GPU": "FULL_DEVICE_NAME", "NPU": "NPU_DRIVER_VERSION"}
"""Family -> the property whose refusal says best what is missing."""


def offered_devices(core: ov.Core) -> tuple[OfferedDevice, ...]:
    """Returns the devices whose plugins load and find hardware."""
    return tuple(
        OfferedDevice(
            name=name,
            full_name=property_text(core, name, "FULL_DEVICE_NAME"),
            pci_address=_pci_address(_property(core, name, "DEVICE_PCI_INFO")),
            luid=property_text(core, name, "DEVICE_LUID"),
            uuid=property_text(core, name, "DEVICE_UUID"),
            device_id=property_text(core, name, "GPU_DEVICE_ID").removeprefix("0x"),
        )
        for name in core.available_devices
    )


def complaint_of(core: ov.Core, family: str) -> str:
    """Returns what the plugin of an unavailable family of devices says when it is asked."""
    try:
        core.get_property(family, _TELLING[family])
    except Exception as error:  # a plugin raises anything
        return words_of(error)
    return "it is not among core.available_devices"


def target_of(core: ov.Core, name: str) -> str:
    """Returns what an engine for this device is bound to, as OpenVINO checks it on import.

    "meta=1.0;ov=2026.4.1;isa=Intel AVX2", or the driver, architecture and execution units of a
    GPU. Only a compiled model tells, so a one-node model is compiled.
    """
    compiled = core.compile_model(_tiny_model(), name)
    try:
        return str(compiled.get_property("RUNTIME_REQUIREMENTS"))
    except RuntimeError:
        # OpenVINO 2026.0 has no such property yet; bound to everything that might matter.
        parts = {
            "ov": RUNTIME.removeprefix("openvino "),
            "arch": property_text(core, name, "DEVICE_ARCHITECTURE"),
            "driver": property_text(core, name, "GPU_DRIVER_VERSION")
            or property_text(core, name, "NPU_DRIVER_VERSION"),
            "eus": property_text(core, name, "GPU_EXECUTION_UNITS_COUNT"),
            "caps": "+".join(sorted(capabilities(core, name))),
        }
        return ";".join(f"{key}={value}" for key, value in parts.items() if value)


def capabilities(core: ov.Core, name: str) -> frozenset[str]:
    """Returns {"FP32", "FP16", "EXPORT_IMPORT", ...}."""
    return frozenset(_property(core, name, "OPTIMIZATION_CAPABILITIES") or ())


def property_text(core: ov.Core, name: str, key: str) -> str:
    """Returns a property of a device as text; empty where its plugin does not have it."""
    value = _property(core, name, key)
    return "" if value is None else str(value)


# Any: the type depends on the property.
def _property(core: ov.Core, name: str, key: str) -> Any:
    try:
        return core.get_property(name, key)
    except Exception:  # a missing property is a RuntimeError, an unconverted one a TypeError
        return None


# Any: a class of the bindings with the integers domain, bus, device and function.
def _pci_address(info: Any) -> str:
    if info is None:
        return ""
    parts = (info.domain, info.bus, info.device, info.function)
    # All zero is what a driver without the extension leaves.
    return "{:04x}:{:02x}:{:02x}.{:x}".format(*parts) if any(parts) else ""


def _tiny_model() -> ov.Model:
    value = ov.opset8.parameter([1], dtype=ov.Type.f32)
    return ov.Model([ov.opset8.relu(value)], [value])
