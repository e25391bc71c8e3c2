"""What AMD's kernel driver says of its GPUs: the KFD topology, and `rocminfo` within WSL."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sdkit_dispatch.detect.probe import Probe

NODES = "/sys/class/kfd/kfd/topology/nodes"
ROCMINFO_TIMEOUT_S = 20.0
ROCMINFO_PATHS = ("/opt/rocm/bin/rocminfo", "/usr/bin/rocminfo", "/usr/local/bin/rocminfo")


@dataclass(frozen=True, kw_only=True)
class KfdGpu:
    """A GPU of the KFD topology, or of `rocminfo`.

    Attributes:
        arch: "gfx1201": the true one, whatever HSA_OVERRIDE_GFX_VERSION says.
        pci_address: "0000:03:00.0"; empty if the kernel did not say.
        uuid: "GPU-<unique id in hexadecimal>", as ROCR_VISIBLE_DEVICES takes it.
        memory_bytes: Of the memory banks that belong to the GPU; None if not listed.
    """

    arch: str
    device_id: str
    pci_address: str = ""
    name: str = ""
    uuid: str = ""
    memory_bytes: int | None = None


def gfx_from_target_version(version: int) -> str:
    """Returns the LLVM name: 90010 -> "gfx90a", 110501 -> "gfx1151"; empty for a CPU node (0).

    Source: drivers/gpu/drm/amd/amdkfd/kfd_device.c: major * 10000 + minor * 100 + stepping.
    """
    major, minor, step = version // 10000, version // 100 % 100, version % 100
    if not 0 < major < 100 or minor > 15 or step > 15:
        return ""
    return f"gfx{major}{minor:x}{step:x}"


def kfd_gpus(probe: Probe) -> tuple[KfdGpu, ...]:
    """Reads the KFD topology; a node that cannot be read hides no other."""
    gpus = []
    for node in probe.listdir(NODES):
        properties = numbers_from_properties(probe.read_file(f"{NODES}/{node}/properties") or b"")
        arch = gfx_from_target_version(properties.get("gfx_target_version", 0))
        if not arch:
            continue
        unique = properties.get("unique_id", 0)
        location, domain = properties.get("location_id"), properties.get("domain", 0)
        address = ""
        if location is not None:
            bus, slot = location >> 8 & 0xFF, location >> 3 & 0x1F
            address = f"{domain & 0xFFFF:04x}:{bus:02x}:{slot:02x}.{location & 7}"
        gpus.append(
            KfdGpu(
                arch=arch,
                device_id=f"{properties.get('device_id', 0) & 0xFFFF:04x}",
                pci_address=address,
                uuid=f"GPU-{unique & (1 << 64) - 1:016x}" if unique else "",
                memory_bytes=_node_memory(probe, f"{NODES}/{node}/mem_banks"),
            )
        )
    return tuple(gpus)


def _node_memory(probe: Probe, folder: str) -> int | None:
    banks = [
        numbers_from_properties(probe.read_file(f"{folder}/{bank}/properties") or b"")
        for bank in probe.listdir(folder)
    ]
    # Heap 1 is video memory that the host can see, 2 what it cannot; 0 is the system's.
    sizes = [bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in (1, 2)]
    return sum(sizes) if sizes else None


def numbers_from_properties(data: bytes) -> dict[str, int]:
    """Parses "key number" lines, as KFD writes them."""
    found = re.findall(rb"^(\w+) (\d{1,20})\s*$", data, re.MULTILINE)
    return {key.decode(): int(value) for key, value in found}


def rocminfo_gpus(probe: Probe) -> tuple[KfdGpu, ...]:
    """Asks `rocminfo`: the only one who knows within WSL, where there is no KFD.

    It takes a second, so it is asked only where it is installed and nothing else can answer.
    """
    path = next((p for p in ROCMINFO_PATHS if probe.access(p) != "missing"), "rocminfo")
    # Without the variable librocdxg does not look at /dev/dxg.
    is_set = "HSA_ENABLE_DXG_DETECTION" in probe.env
    commands = [[path]] if is_set else [["env", "HSA_ENABLE_DXG_DETECTION=1", path], [path]]
    for command in commands:
        result = probe.run(command, ROCMINFO_TIMEOUT_S)
        gpus = gpus_from_rocminfo(result.stdout) if result else ()
        if gpus:
            return gpus
    return ()


def gpus_from_rocminfo(data: bytes) -> tuple[KfdGpu, ...]:
    """Parses the agents of `rocminfo` that are GPUs."""
    gpus = []
    for block in re.split(r"^\*{3,}\s*\n\s*Agent \d+", data.decode("utf-8", "replace"), flags=re.M)[
        1:
    ]:
        fields: dict[str, str] = {}
        for key, value in re.findall(r"^ *([A-Z][\w ]*?): +(\S.*?) *$", block, re.MULTILINE):
            fields.setdefault(key, value)
        if fields.get("Device Type") != "GPU" or not fields.get("Name", "").startswith("gfx"):
            continue
        chip = re.search(r"\(0x([0-9a-fA-F]{1,4})\)", fields.get("Chip ID", ""))
        size = re.search(
            r"Segment: +GLOBAL.*?Size: +(\d{1,12})\(", block, re.DOTALL
        )  # in KiB; the first pool is the card's own
        gpus.append(
            KfdGpu(
                arch=fields["Name"].split(":")[0],
                device_id=chip.group(1).rjust(4, "0").lower() if chip else "",
                name=fields.get("Marketing Name", ""),
                uuid=fields.get("Uuid", ""),
                memory_bytes=int(size.group(1)) * 1024 if size else None,
            )
        )
    return tuple(gpus)
