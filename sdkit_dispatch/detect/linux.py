"""The devices of a Linux machine, WSL included.

The kernel's PCI list says what is there; NVML, KFD and DRM add what they know, joined by PCI
address. Within WSL the PCI list holds only a virtual display, so NVML and `rocminfo` are the truth.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sdkit_dispatch.contract import Device, DeviceKind, Problem
from sdkit_dispatch.detect import problems
from sdkit_dispatch.detect.cpu import cpu_device, number_from_text
from sdkit_dispatch.detect.host import Host
from sdkit_dispatch.detect.pci_table import (
    DISPLAY_ONLY_VENDORS,
    VIRTUAL_VENDORS,
    maker_of,
    pci_entry,
)
from sdkit_dispatch.detect.probe import Probe

if TYPE_CHECKING:
    from sdkit_dispatch.detect.amd import KfdGpu

PCI = "/sys/bus/pci/devices"
DISPLAY, ACCELERATOR = 0x03, 0x12
NPU_CLASSES = (0x0B40, 0x1180)
"""Co-processor and signal processing: what some neural processors call themselves."""
DISCRETE_BYTES = 2 << 30
"""An AMD GPU newer than the table that owns less is taken for an integrated one."""
INTEL_IGPU_BUS = "0000:00:"
MARKETED_NAMES = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel"}


@dataclass(frozen=True, kw_only=True)
class PciDevice:
    """A PCI function that may be a device for us.

    Attributes:
        driver: Bound kernel driver; empty: none; None: the system does not say.
    """

    address: str
    vendor: str
    device: str
    pci_class: int
    driver: str | None
    is_external: bool

    @property
    def pci_id(self) -> str:
        return f"{self.vendor}:{self.device}"


def linux_devices(probe: Probe, host: Host) -> list[Device]:
    """Returns all devices, the CPU last."""
    if host.is_wsl:
        found, why_none = _wsl_devices(probe, host)
    else:
        found, why_none = _pci_machine(probe, host)
    if not any(device.maker == "nvidia" for device in found):
        found += _tegra_devices(probe)
    has_gpu = any(device.kind in ("discrete", "integrated") for device in found)
    return [*found, cpu_device(probe, host.arch, () if has_gpu else (why_none,))]


def _tegra_devices(probe: Probe) -> list[Device]:
    compatible = probe.read_file("/proc/device-tree/compatible") or b""
    if b"nvidia,tegra" not in compatible:
        return []
    from sdkit_dispatch.detect.nvidia import tegra_device

    device = tegra_device(probe, compatible)
    return [device] if device is not None else []


def pci_devices(probe: Probe) -> tuple[PciDevice, ...]:
    """Lists the PCI functions of a display, accelerator or neural processor class."""
    found = []
    for name in probe.listdir(PCI):
        folder = f"{PCI}/{name}"
        pci_class = number_from_text(probe.read_file(f"{folder}/class"))
        if pci_class is None:
            continue
        base = pci_class >> 16
        if base not in (DISPLAY, ACCELERATOR) and pci_class >> 8 not in NPU_CLASSES:
            continue
        vendor = number_from_text(probe.read_file(f"{folder}/vendor"))
        device = number_from_text(probe.read_file(f"{folder}/device"))
        if vendor is None or device is None:
            continue
        driver = _bound_driver(probe, folder)
        if not driver and probe.readlink(f"{folder}/physfn"):
            continue  # a virtual function that waits for a virtual machine
        found.append(
            PciDevice(
                address=name.lower(),
                vendor=f"{vendor & 0xFFFF:04x}",
                device=f"{device & 0xFFFF:04x}",
                pci_class=pci_class,
                driver=driver,
                is_external=(probe.read_file(f"{folder}/removable") or b"").strip() == b"removable",
            )
        )
    return tuple(found)


def _bound_driver(probe: Probe, folder: str) -> str | None:
    link = probe.readlink(f"{folder}/driver")
    if link:
        return link.rstrip("/").rpartition("/")[2]
    event = probe.read_file(f"{folder}/uevent")
    if event is None:
        return None  # a sandbox that shows neither has said nothing about the driver
    found = re.search(rb"^DRIVER=(\S+)", event, re.MULTILINE)
    return found.group(1).decode("utf-8", "replace") if found else ""


def kind_of(pci: PciDevice) -> DeviceKind | None:
    """Returns the kind of a function; None if it is no processor for us."""
    entry = pci_entry(pci.pci_id)
    if entry is not None:
        return entry.kind
    if pci.pci_class >> 8 in NPU_CLASSES:
        return None  # the class alone proves nothing, and these are rarely processors
    if pci.pci_class >> 16 == ACCELERATOR:
        return "discrete" if pci.vendor in ("1002", "10de") else "npu"
    # A display device newer than the table. Intel's own graphics sit on the first bus.
    is_igpu = pci.vendor == "8086" and pci.address.startswith(INTEL_IGPU_BUS)
    return "integrated" if is_igpu else "discrete"


def _pci_machine(probe: Probe, host: Host) -> tuple[list[Device], Problem]:
    found = pci_devices(probe)
    skipped = [pci for pci in found if _is_only_a_display(pci)]
    real = [pci for pci in found if pci not in skipped]
    kfd: tuple[KfdGpu, ...] = ()
    if any(pci.vendor == "1002" for pci in real):
        from sdkit_dispatch.detect.amd import kfd_gpus

        kfd = kfd_gpus(probe)
    devices = [_device_from_pci(probe, host, pci, kfd) for pci in real if kind_of(pci)]
    devices = _with_nvidia_facts(probe, host, devices)
    return devices, _why_no_gpu(probe, found, skipped)


def _is_only_a_display(pci: PciDevice) -> bool:
    is_display = pci.pci_class >> 16 == DISPLAY
    return is_display and pci.vendor in VIRTUAL_VENDORS | DISPLAY_ONLY_VENDORS


def _with_nvidia_facts(probe: Probe, host: Host, devices: list[Device]) -> list[Device]:
    nvidia = [device for device in devices if device.maker == "nvidia"]
    # Loading NVML wakes sleeping cards: only where there is a driver to ask.
    if not nvidia and probe.access("/dev/nvidiactl") == "missing":
        return devices
    if nvidia and all(problems.is_unusable(device) for device in nvidia):
        return devices
    from sdkit_dispatch.detect.nvidia import devices_from_report
    from sdkit_dispatch.detect.nvml import nvidia_report

    report = nvidia_report(probe)
    if report is None:
        version = probe.read_file("/proc/driver/nvidia/version") or b""
        return [
            problems.without_nvml(device, probe, host, version)
            if device.maker == "nvidia" and not problems.is_unusable(device)
            else device
            for device in devices
        ]
    return devices_from_report(report, devices)


def _device_from_pci(probe: Probe, host: Host, pci: PciDevice, kfd: tuple[KfdGpu, ...]) -> Device:
    folder = f"{PCI}/{pci.address}"
    entry = pci_entry(pci.pci_id)
    maker = maker_of(pci.vendor)
    sources = {"pci_id": folder, "kind": "PCI class"}
    if pci.driver:
        sources["driver"] = f"{folder}/driver"
    if entry is not None:
        sources |= {"name": "gpus.tsv", "kind": "gpus.tsv"} | (
            {"arch": "gpus.tsv"} if entry.arch else {}
        )
    label = MARKETED_NAMES.get(maker, maker)
    name = entry.name if entry else f"{label} {pci.pci_id}"
    device = Device(
        id=f"pci:{pci.address}",
        kind=kind_of(pci) or "discrete",
        maker=maker,
        name=name if name.startswith(label) else f"{label} {name}",
        arch=entry.arch if entry else "",
        pci_id=pci.pci_id,
        pci_address=pci.address,
        driver=_driver_version(probe, pci),
        sources=sources,
    )
    memory = number_from_text(probe.read_file(f"{folder}/mem_info_vram_total"))
    if memory is not None:
        device = replace(
            device,
            memory_bytes=memory,
            sources={**device.sources, "memory_bytes": f"{folder}/mem_info_vram_total"},
        )
    if maker == "amd":
        device = _with_kfd_facts(device, kfd)
    if (
        entry is None
        and maker == "amd"
        and (device.memory_bytes or DISCRETE_BYTES) < DISCRETE_BYTES
    ):
        device = replace(device, kind="integrated")
    if device.kind in ("integrated", "npu") and device.memory_bytes is None:
        device = replace(device, memory_bytes=0)  # it borrows the system's
    return replace(device, problems=problems.of_linux_device(probe, host, device, pci))


def _with_kfd_facts(device: Device, kfd: tuple[KfdGpu, ...]) -> Device:
    gpu = next((gpu for gpu in kfd if gpu.pci_address == device.pci_address), None)
    if gpu is None:
        # Kernels differ in how they number locations: one card of that id is it.
        same = [gpu for gpu in kfd if device.pci_id == f"1002:{gpu.device_id}"]
        gpu = same[0] if len({gpu.arch for gpu in same}) == 1 else None
    if gpu is None:
        return device
    sources = {**device.sources, "arch": "KFD"}
    memory = device.memory_bytes
    if memory is None and gpu.memory_bytes is not None:
        memory, sources["memory_bytes"] = gpu.memory_bytes, "KFD"
    return replace(device, arch=gpu.arch, uuid=gpu.uuid, memory_bytes=memory, sources=sources)


def _driver_version(probe: Probe, pci: PciDevice) -> str:
    """Returns "amdgpu 6.10.5", or the bare name of a driver that comes with the kernel."""
    if not pci.driver:
        return ""
    version = (
        probe.read_file(f"/sys/module/{pci.driver.replace('-', '_')}/version") or b""
    ).strip()
    text = version.decode("utf-8", "replace")
    if pci.driver == "nvidia":
        return text
    return f"{pci.driver} {text}".strip()


def _why_no_gpu(probe: Probe, found: Iterable[PciDevice], skipped: list[PciDevice]) -> Problem:
    if skipped:
        what = ", ".join(
            sorted({(VIRTUAL_VENDORS | DISPLAY_ONLY_VENDORS)[pci.vendor] for pci in skipped})
        )
        return problems.no_gpu(f"the only display-class PCI device is {what}")
    on_soc = sorted(
        {
            link.rpartition("/")[2]
            for card in probe.listdir("/sys/class/drm")
            if re.fullmatch(r"card\d+", card)
            and (link := probe.readlink(f"/sys/class/drm/{card}/device/driver"))
        }
    )
    if on_soc:
        return problems.no_gpu(
            f"no display-class PCI device was found; no vendor serves the GPU of {on_soc[0]}"
        )
    if not probe.listdir(PCI):
        return problems.no_gpu(
            "no PCI device can be seen in /sys/bus/pci: the machine has none, or a container "
            "or sandbox hides them"
        )
    return problems.no_gpu("no display-class PCI device was found")


def _wsl_devices(probe: Probe, host: Host) -> tuple[list[Device], Problem]:
    from sdkit_dispatch.detect.amd import rocminfo_gpus
    from sdkit_dispatch.detect.nvidia import devices_from_report
    from sdkit_dispatch.detect.nvml import nvidia_report

    report = nvidia_report(probe) if probe.access("/dev/dxg") != "missing" else None
    devices = devices_from_report(report, [], is_wsl=True) if report else []
    if not devices:
        devices = [
            _device_from_rocminfo(index, gpu) for index, gpu in enumerate(rocminfo_gpus(probe))
        ]
    return devices, problems.no_gpu_in_wsl(probe, host)


def _device_from_rocminfo(index: int, gpu: KfdGpu) -> Device:
    entry = pci_entry(f"1002:{gpu.device_id}")
    name = gpu.name or (entry.name if entry else gpu.arch)
    return Device(
        id=f"uuid:{gpu.uuid}" if re.search(r"\d", gpu.uuid) else f"dxg:{index}",
        kind=entry.kind if entry else "discrete",
        maker="amd",
        name=name if name.startswith("AMD") else f"AMD {name}",
        arch=gpu.arch,
        pci_id=f"1002:{gpu.device_id}" if gpu.device_id else "",
        uuid=gpu.uuid,
        memory_bytes=gpu.memory_bytes,
        sources={key: "rocminfo" for key in ("arch", "name", "memory_bytes")},
    )
