"""The devices of a Mac.

An Apple chip is known from sysctl alone, within microseconds. `system_profiler`, which takes up to
a second, is asked only on Intel Macs, to say by name what cannot be used.
"""

from __future__ import annotations

import json
import re
from typing import Any

from sdkit_dispatch.contract import Device, Problem
from sdkit_dispatch.detect.cpu import cpu_device, integer_from_sysctl, text_from_sysctl
from sdkit_dispatch.detect.host import Host
from sdkit_dispatch.detect.probe import Probe
from sdkit_dispatch.detect.problems import no_gpu

PROFILER = ("/usr/sbin/system_profiler", "-json", "SPDisplaysDataType")
PROFILER_TIMEOUT_S = 30.0
MAKER_WORDS = (
    ("apple", "apple"),
    ("amd", "amd"),
    ("ati", "amd"),
    ("radeon", "amd"),
    ("firepro", "amd"),
    ("nvidia", "nvidia"),
    ("geforce", "nvidia"),
    ("intel", "intel"),
    ("iris", "intel"),
)
UNITS = {"KB": 1024, "MB": 1024**2, "GB": 1024**3}


def macos_devices(probe: Probe, host: Host) -> list[Device]:
    """Returns all devices, the CPU last."""
    brand = text_from_sysctl(probe.sysctl("machdep.cpu.brand_string"))
    if (
        host.arch == "arm64"
        or integer_from_sysctl(probe.sysctl("hw.optional.arm64")) == 1
        or brand.startswith("Apple")
    ):
        return [_apple_gpu(probe, host, brand), cpu_device(probe, host.arch)]
    model = text_from_sysctl(probe.sysctl("hw.model"))
    result = probe.run(PROFILER, PROFILER_TIMEOUT_S)
    gpus = gpus_from_profiler(result.stdout if result else b"", model or "this Intel Mac")
    why_none = () if gpus else (no_gpu(f"{model or 'this Intel Mac'} has no Apple GPU"),)
    return [*gpus, cpu_device(probe, host.arch, why_none)]


def _apple_gpu(probe: Probe, host: Host, brand: str) -> Device:
    chip = re.search(r"Apple (M\d+)", brand)
    problems: list[Problem] = []
    if host.is_translated or host.arch == "x86_64":
        problems.append(
            Problem(
                code="rosetta",
                message="this is an x86_64 Python under Rosetta on an Apple chip: CPU work is slow "
                "and most engines have no x86_64 build for macOS",
                hint="install an arm64 Python and sdkit-dispatch in it",
            )
        )
    if integer_from_sysctl(probe.sysctl("kern.hv_vmm_present")) == 1:
        problems.append(
            Problem(
                code="virtual-machine",
                message="this macOS runs in a virtual machine, whose Metal is a reduced one",
            )
        )
    return Device(
        id="metal:0",
        kind="integrated",
        maker="apple",
        name=f"{brand or 'Apple'} GPU",
        arch=f"apple-{chip.group(1).lower()}" if chip else "",
        memory_bytes=0,
        problems=tuple(problems),
        sources={"name": "sysctl machdep.cpu.brand_string", "arch": "sysctl"},
    )


def gpus_from_profiler(data: bytes, model: str) -> list[Device]:
    """Parses the JSON of `system_profiler SPDisplaysDataType` on an Intel Mac."""
    try:
        document = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return []
    entries = document.get("SPDisplaysDataType") if isinstance(document, dict) else None
    devices: list[Device] = []
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict):
            devices.append(_intel_mac_gpu(len(devices), entry, model))
    return devices


def _intel_mac_gpu(index: int, entry: dict[str, Any], model: str) -> Device:
    # `Any`: values are whatever the tool wrote; each is taken as text.
    name = str(entry.get("sppci_model") or entry.get("_name") or "GPU")
    words = f"{name} {entry.get('spdisplays_vendor', '')} {entry.get('sppci_vendor', '')}".lower()
    maker = next(
        (maker for word, maker in MAKER_WORDS if re.search(rf"\b{word}|_{word}", words)), ""
    )
    vendor = {"amd": "1002", "nvidia": "10de", "intel": "8086"}.get(maker, "")
    device = re.fullmatch(r"0x([0-9a-fA-F]{4})", str(entry.get("spdisplays_device-id", "")))
    is_integrated = maker == "intel"
    return Device(
        id=f"metal:{index}",
        kind="integrated" if is_integrated else "discrete",
        maker=maker or "unknown",
        name=name,
        pci_id=f"{vendor}:{device.group(1).lower()}" if vendor and device else "",
        memory_bytes=0 if is_integrated else _bytes_from_text(str(entry.get("spdisplays_vram"))),
        problems=(
            Problem(
                code="intel-mac",
                message=f"{name} in {model}: no engine supports Metal compute on the GPU of an "
                "Intel Mac (known to give grey or wrong pictures), so the CPU serves",
            ),
        ),
        sources={"name": "system_profiler"},
    )


def _bytes_from_text(text: str) -> int | None:
    found = re.fullmatch(r"(\d{1,6}) (KB|MB|GB)", text.strip())
    return int(found.group(1)) * UNITS[found.group(2)] if found else None
