"""NVIDIA devices: what NVML reports, joined with what PCI shows; MIG slices; Tegra."""

from __future__ import annotations

import re
from dataclasses import replace

from sdkit_dispatch.contract import Device, Problem
from sdkit_dispatch.detect.answers import NvmlGpu, NvmlReport, NvmlSlice
from sdkit_dispatch.detect.nvml import address_from_text
from sdkit_dispatch.detect.pci_table import pci_entry
from sdkit_dispatch.detect.probe import Probe

TEGRA_ARCHS = {
    "nvidia,tegra210": "sm_53",
    "nvidia,tegra186": "sm_62",
    "nvidia,tegra194": "sm_72",
    "nvidia,tegra234": "sm_87",
    "nvidia,tegra264": "sm_110",
}
"""Device tree name of a Jetson's chip -> compute capability. Source: NVIDIA, "CUDA GPUs"."""


def devices_from_report(
    report: NvmlReport, devices: list[Device], *, is_wsl: bool = False
) -> list[Device]:
    """Adds what the driver says to the devices found on PCI.

    A GPU that NVML has and PCI does not show (WSL, a container without /sys) is added; one that PCI
    shows and NVML does not have is kept with a problem.
    """
    by_address = {address_from_text(gpu.pci_address): gpu for gpu in report.gpus}
    by_address.pop("", None)
    merged: list[Device] = []
    used: list[NvmlGpu] = []
    for device in devices:
        gpu = by_address.get(device.pci_address)
        if device.maker == "nvidia" and gpu is None:
            gpu = _only_match(device, devices, report)
        if device.maker != "nvidia" or device.kind == "npu":
            merged.append(device)
        elif gpu is None:
            merged.append(_not_in_report(device, report))
        else:
            used.append(gpu)
            merged += _merge(device, gpu, report)
    for index, gpu in enumerate(report.gpus):
        if gpu not in used:
            merged += _merge(_bare_device(index, gpu, is_wsl), gpu, report)
    return merged


def _only_match(device: Device, devices: list[Device], report: NvmlReport) -> NvmlGpu | None:
    """Joins the one NVIDIA card with the one GPU of a report that has no addresses."""
    cards = [other for other in devices if other.maker == "nvidia"]
    bare = [gpu for gpu in report.gpus if not gpu.pci_address]
    return bare[0] if len(cards) == len(bare) == 1 and device in cards else None


def _bare_device(index: int, gpu: NvmlGpu, is_wsl: bool) -> Device:
    # Within WSL the address is one of the Windows host, and no bus here has it.
    address = "" if is_wsl else address_from_text(gpu.pci_address)
    uuid_id = f"uuid:{gpu.uuid}" if gpu.uuid else f"nvml:{index}"
    return Device(
        id=f"pci:{address}" if address else uuid_id,
        kind="discrete",
        maker="nvidia",
        name="NVIDIA GPU",
        pci_id=gpu.pci_id,
        pci_address=address,
    )


def _merge(device: Device, gpu: NvmlGpu, report: NvmlReport) -> list[Device]:
    entry = pci_entry(device.pci_id or gpu.pci_id)
    sources = {**device.sources, "driver": report.source}
    arch, name, memory = device.arch, device.name, device.memory_bytes
    if gpu.compute_capability is not None:
        arch = "sm_{}{}".format(*gpu.compute_capability)
        sources["arch"] = report.source
    elif entry is not None and not arch:
        arch, sources["arch"] = entry.arch, "gpus.tsv"
    if gpu.name:
        name = gpu.name if gpu.name.startswith("NVIDIA") else f"NVIDIA {gpu.name}"
        sources["name"] = report.source
    if gpu.memory_bytes is not None:
        memory, sources["memory_bytes"] = gpu.memory_bytes, report.source
    whole = replace(
        device,
        kind=entry.kind if entry else device.kind,
        name=name,
        arch=arch,
        uuid=gpu.uuid,
        memory_bytes=memory,
        driver=report.driver or device.driver,
        sources=sources,
    )
    if not gpu.is_mig and not gpu.slices:
        return [whole]
    slices = [_slice_device(whole, part) for part in gpu.slices]
    hint = (
        f"use a slice: --gpu {slices[0].id}"
        if slices
        else "make slices: `sudo nvidia-smi mig -cgi <profile> -C`, or leave MIG mode: "
        "`sudo nvidia-smi -mig 0`"
    )
    problem = Problem(
        code="mig-parent",
        message=f"{whole.name} is in MIG mode: only its slices compute, and it has {len(slices)}",
        hint=hint,
    )
    return [*slices, replace(whole, problems=(*whole.problems, problem))]


def _slice_device(whole: Device, part: NvmlSlice) -> Device:
    note = Problem(
        code="mig-slice",
        message=f"a slice of {whole.name}: CUDA sees it as CUDA_VISIBLE_DEVICES={part.uuid}",
    )
    return replace(
        whole,
        id=f"uuid:{part.uuid}",
        name=f"{whole.name} MIG {part.name}".strip(),
        uuid=part.uuid,
        memory_bytes=part.memory_bytes,
        problems=(*whole.problems, note),
    )


def _not_in_report(device: Device, report: NvmlReport) -> Device:
    if device.problems:  # bound elsewhere: said already
        return device
    problem = Problem(
        code="not-in-nvml",
        message=f"the NVIDIA driver {report.driver} does not list {device.name}: it failed, is too "
        "old for this driver, or is hidden from this container",
        hint="look at `sudo dmesg | grep NVRM`",
    )
    return replace(device, problems=(problem,))


def tegra_device(probe: Probe, compatible: bytes) -> Device | None:
    """Returns the GPU of a Jetson, which is on no PCI bus, from its device tree."""
    names = [name.decode("utf-8", "replace") for name in compatible.split(b"\0")]
    chip = next((name for name in names if name in TEGRA_ARCHS), None)
    if chip is None:
        return None
    model = (probe.read_file("/proc/device-tree/model") or b"").strip(b"\0 \n")
    release = probe.read_file("/etc/nv_tegra_release") or b""
    found = re.search(rb"R(\d+) .*REVISION: ([\d.]+)", release)
    return Device(
        id="tegra:0",
        kind="integrated",
        maker="nvidia",
        name=model.decode("utf-8", "replace") or "NVIDIA Jetson",
        arch=TEGRA_ARCHS[chip],
        memory_bytes=0,
        # Of Jetson Linux, which is not numbered as the drivers of cards are.
        driver=f"L4T {b'.'.join(found.groups()).decode()}" if found else "",
        sources={"arch": "/proc/device-tree/compatible", "name": "/proc/device-tree/model"},
    )
