r"""The devices of a Windows machine: SetupAPI says what is there, DXGI what memory it has.

Nothing here depends on the language of the system, on WMI (whose AdapterRAM stops at 4 GiB) or on
a tool. Names that a driver wrote are shown, never read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from sdkit_dispatch.contract import Device, DeviceKind, Problem
from sdkit_dispatch.detect.answers import DxgiAdapter, PnpDevice
from sdkit_dispatch.detect.cpu import cpu_device
from sdkit_dispatch.detect.host import Host
from sdkit_dispatch.detect.nvidia import devices_from_report
from sdkit_dispatch.detect.nvml import address_from_text, nvidia_report
from sdkit_dispatch.detect.pci_table import (
    DISPLAY_ONLY_VENDORS,
    VIRTUAL_VENDORS,
    PciEntry,
    maker_of,
    pci_entry,
)
from sdkit_dispatch.detect.probe import Probe
from sdkit_dispatch.detect.problems import is_unusable, no_gpu

BASIC_SERVICES = ("basicdisplay", "basicrender", "vgasave", "vga")
"""Windows' own drivers for a card without a driver of its maker."""
QUALCOMM = 0x4D4F4351
"""How Qualcomm signs its adapters, which are on no PCI bus ("QCOM")."""
ACCELERATOR_CLASS = "1200"
DISCRETE_BYTES = 1 << 30
"""An adapter of a maker of both kinds that owns less is taken for an integrated one."""
STOP_REASONS = {
    10: "it cannot start",
    22: "it is disabled",
    28: "its driver is not installed",
    31: "its driver cannot be loaded",
    43: "its driver stopped it after a failure",
    45: "it is not connected",
    52: "its driver is not signed",
}
"""Problem codes of the device manager that are met. Source: Microsoft, "Device Manager error
messages"."""
INTEGRATED_NAME = re.compile(
    r"radeon(\(tm\))? (vega \d+ )?(graphics|\d{3}m|\d{4}s)\b|\b(u?hd|iris)\b.*graphics|adreno"
    r"|intel(\(r\))? (arc\(tm\) )?graphics$",
    re.IGNORECASE,
)


def windows_devices(probe: Probe, host: Host) -> list[Device]:
    """Returns all devices, the CPU last."""
    adapters = [
        adapter
        for adapter in _unique(probe.dxgi_adapters() or ())
        if not adapter.is_software and f"{adapter.vendor_id & 0xFFFF:04x}" not in VIRTUAL_VENDORS
    ]
    devices: list[Device] = []
    for pnp in probe.pnp_devices() or ():
        device = device_from_pnp(pnp, _take_adapter(adapters, pnp))
        if device is not None:
            devices.append(device)
    # What SetupAPI did not show, DXGI may: Adreno, or a system that forbids one of the two.
    devices += [_device_from_adapter(adapter) for adapter in adapters]
    if any(device.maker == "nvidia" and not is_unusable(device) for device in devices):
        report = nvidia_report(probe)
        if report is not None:
            devices = devices_from_report(report, devices)
    has_gpu = any(device.kind in ("discrete", "integrated") for device in devices)
    why_none = no_gpu("Windows shows no display adapter but its own basic or a virtual one")
    return [*devices, cpu_device(probe, host.arch, () if has_gpu else (why_none,))]


def driver_from_windows_version(version: str) -> str:
    """Returns NVIDIA's own version: the last five digits, "32.0.15.7652" -> "576.52"."""
    parts = version.split(".")
    if len(parts) != 4 or not all(part.isascii() and part.isdigit() for part in parts):
        return version
    digits = parts[2][-1] + parts[3].rjust(4, "0")[-4:]
    return f"{int(digits[:3])}.{digits[3:]}"


def ids_from_pnp(pnp: PnpDevice) -> tuple[str, str, str]:
    """Returns vendor, device and subsystem id in hexadecimal; empty if it is not on PCI."""
    for text in (pnp.instance_id, *pnp.hardware_ids):
        found = re.match(
            r"PCI\\VEN_([0-9A-F]{4})&DEV_([0-9A-F]{4})(?:&SUBSYS_([0-9A-F]{8}))?",
            text,
            re.IGNORECASE,
        )
        if found:
            vendor, device, subsystem = found.groups()
            return vendor.lower(), device.lower(), (subsystem or "").lower()
    return "", "", ""


def device_from_pnp(pnp: PnpDevice, adapter: DxgiAdapter | None) -> Device | None:
    """Returns the device; None for what is no processor: virtual and root-enumerated displays."""
    vendor, device_id, _ = ids_from_pnp(pnp)
    if not vendor or vendor in VIRTUAL_VENDORS or vendor in DISPLAY_ONLY_VENDORS:
        return None
    pci_id = f"{vendor}:{device_id}"
    entry = pci_entry(pci_id)
    maker = maker_of(vendor)
    is_basic = pnp.service.lower() in BASIC_SERVICES
    address = address_from_text(pnp.pci_address) or (
        address_from_text(adapter.pci_address) if adapter else ""
    )
    kind = _kind(entry, pnp, maker, adapter, address)
    # The description of a basic driver names itself, in the language of the system.
    described = "" if is_basic else pnp.description.strip()
    driver = "" if is_basic else pnp.driver_version
    device = Device(
        id=_device_id(address, adapter, pnp.instance_id),
        kind=kind,
        maker=maker,
        name=described or (entry.name if entry else f"{maker} {pci_id}"),
        arch=entry.arch if entry else "",
        pci_id=pci_id,
        pci_address=address,
        luid=adapter.luid if adapter else "",
        memory_bytes=_owned_bytes(kind, maker, adapter),
        driver=driver_from_windows_version(driver) if maker == "nvidia" else driver,
        sources={"pci_id": "SetupAPI", "driver": "SetupAPI"}
        | ({"arch": "gpus.tsv", "kind": "gpus.tsv"} if entry else {})
        | ({"memory_bytes": "DXGI"} if adapter else {}),
    )
    return replace(device, problems=_problems(device, pnp, is_basic=is_basic))


def _device_from_adapter(adapter: DxgiAdapter) -> Device:
    vendor = f"{adapter.vendor_id & 0xFFFF:04x}"
    is_qualcomm = adapter.vendor_id == QUALCOMM
    pci_id = "" if is_qualcomm else f"{vendor}:{adapter.device_id & 0xFFFF:04x}"
    maker = "qualcomm" if is_qualcomm else maker_of(vendor)
    entry = pci_entry(pci_id) if pci_id else None
    address = address_from_text(adapter.pci_address)
    name = adapter.description.strip()
    if entry is not None:
        kind = entry.kind
    else:
        kind = "integrated" if _looks_integrated(name, maker, adapter, address) else "discrete"
    return Device(
        id=_device_id(address, adapter, name),
        kind=kind,
        maker=maker,
        name=name or (entry.name if entry else f"{maker} {pci_id}"),
        arch=entry.arch if entry else "",
        pci_id=pci_id,
        pci_address=address,
        luid=adapter.luid,
        memory_bytes=_owned_bytes(kind, maker, adapter),
        sources={"pci_id": "DXGI", "name": "DXGI", "memory_bytes": "DXGI"}
        | ({"arch": "gpus.tsv"} if entry else {}),
    )


def _device_id(address: str, adapter: DxgiAdapter | None, fallback: str) -> str:
    if address:
        return f"pci:{address}"
    return f"luid:{adapter.luid}" if adapter and adapter.luid else f"pnp:{fallback}"


def _kind(
    entry: PciEntry | None, pnp: PnpDevice, maker: str, adapter: DxgiAdapter | None, address: str
) -> DeviceKind:
    if entry is not None:
        return entry.kind
    if any(f"CC_{ACCELERATOR_CLASS}" in text.upper() for text in pnp.hardware_ids):
        return "npu"
    if _looks_integrated(pnp.description, maker, adapter, address):
        return "integrated"
    return "discrete"


def _looks_integrated(name: str, maker: str, adapter: DxgiAdapter | None, address: str) -> bool:
    """Judges an adapter that is newer than the table."""
    if maker == "nvidia":
        return False
    if maker == "intel" and address.startswith("0000:00:"):
        return True
    if INTEGRATED_NAME.search(name):
        return True
    return adapter is not None and adapter.dedicated_bytes < DISCRETE_BYTES


def _owned_bytes(kind: DeviceKind, maker: str, adapter: DxgiAdapter | None) -> int | None:
    if kind == "npu" or (kind == "integrated" and maker != "amd"):
        return 0  # what its driver calls dedicated is a piece of the system's memory
    return adapter.dedicated_bytes if adapter else None


def _problems(device: Device, pnp: PnpDevice, *, is_basic: bool) -> tuple[Problem, ...]:
    if is_basic or pnp.problem == 28:
        return (
            Problem(
                code="no-driver",
                message=f"{device.name} ({device.pci_id}) runs on Windows' basic display driver",
                hint=f"install the driver of its maker ({device.maker})",
            ),
        )
    if pnp.problem:
        reason = STOP_REASONS.get(pnp.problem, "it does not work")
        return (
            Problem(
                code="stopped",
                message=f"Windows says of {device.name} that {reason} (code {pnp.problem})",
                hint="look at it in the device manager: `devmgmt.msc`",
            ),
        )
    return ()


def _unique(adapters: Iterable[DxgiAdapter]) -> list[DxgiAdapter]:
    """Drops second entries of an adapter, as laptops with two GPUs show them."""
    found: dict[object, DxgiAdapter] = {}
    for index, adapter in enumerate(adapters):
        found.setdefault(adapter.luid or index, adapter)
    return list(found.values())


def _take_adapter(adapters: list[DxgiAdapter], pnp: PnpDevice) -> DxgiAdapter | None:
    """Removes and returns the adapter that is this device: by address, else by ids, in order."""
    vendor, device, subsystem = ids_from_pnp(pnp)
    if not vendor:
        return None
    ids = (int(vendor, 16), int(device, 16))
    same = [a for a in adapters if (a.vendor_id, a.device_id) == ids]
    address = address_from_text(pnp.pci_address)
    here = [a for a in same if address and address_from_text(a.pci_address) == address]
    if not here:
        same = [a for a in same if not (address and a.pci_address)]
        here = [a for a in same if subsystem and a.subsystem_id == int(subsystem, 16)] or same
    if not here:
        return None
    adapters.remove(here[0])
    return here[0]
