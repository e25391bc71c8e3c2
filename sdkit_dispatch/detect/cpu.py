"""The CPU of this machine: the one device that is always there."""

from __future__ import annotations

import re

from sdkit_dispatch.contract import Device, Problem
from sdkit_dispatch.detect.probe import Probe

ARM_PARTS = {
    ("0x41", "0xd03"): "Cortex-A53",
    ("0x41", "0xd05"): "Cortex-A55",
    ("0x41", "0xd07"): "Cortex-A57",
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse N1",
    ("0x41", "0xd40"): "Neoverse V1",
    ("0x41", "0xd42"): "Cortex-A78AE",
    ("0x41", "0xd49"): "Neoverse N2",
    ("0x41", "0xd4f"): "Neoverse V2",
    ("0x61", "0x022"): "Apple M1",
    ("0x61", "0x023"): "Apple M1",
    ("0x61", "0x032"): "Apple M2",
    ("0x61", "0x033"): "Apple M2",
    ("0xc0", "0xac3"): "Ampere-1",
}
"""(implementer, part) of /proc/cpuinfo -> name. Source: MIDR_EL1, Linux asm/cputype.h."""

MAKERS = (("intel", "intel"), ("amd", "amd"), ("apple", "apple"), ("qualcomm", "qualcomm"))
NO_LIMIT_BYTES = 1 << 60
"""Control groups of version 1 say "no limit" with a number near 2**63."""


def cpu_device(probe: Probe, arch: str, problems: tuple[Problem, ...] = ()) -> Device:
    """Returns the CPU; `problems` says why nothing better was found, if that is so."""
    system = probe.platform.system
    read = {"linux": _linux_cpu, "darwin": _macos_cpu, "win32": _windows_cpu}.get(system)
    name, memory_bytes, source, flags = read(probe) if read else ("", None, "", frozenset())
    # The flags of a machine whose flags cannot be read prove nothing.
    if arch == "x86_64" and flags and "avx2" not in flags:
        problems += (
            Problem(
                code="no-avx2",
                message="this CPU has no AVX2, which prebuilt CPU engines are compiled for",
                hint="expect a slow run, or an engine built for this CPU",
            ),
        )
    return Device(
        id="cpu",
        kind="cpu",
        maker=_maker(name),
        name=name or f"{arch} CPU",
        arch=arch,
        memory_bytes=memory_bytes,
        problems=problems,
        sources={"name": source or "the interpreter", "memory_bytes": source} if source else {},
    )


def _maker(name: str) -> str:
    lower = name.lower()
    found = next((maker for word, maker in MAKERS if word in lower), "")
    return found or ("arm" if re.search(r"cortex|neoverse|raspberry", lower) else "unknown")


Facts = tuple[str, int | None, str, frozenset[str]]
"""Name, memory in bytes, source, instruction set flags."""


def _linux_cpu(probe: Probe) -> Facts:
    fields = fields_from_cpuinfo(probe.read_file("/proc/cpuinfo") or b"")
    board = (probe.read_file("/proc/device-tree/model") or b"").decode("utf-8", "replace")
    part = ARM_PARTS.get((fields.get("CPU implementer", ""), fields.get("CPU part", "")), "")
    board = fields.get("Model") or board.strip("\0 \n")
    name = fields.get("model name") or " / ".join(filter(None, (board, part)))
    limits = (
        memory_from_meminfo(probe.read_file("/proc/meminfo") or b""),
        number_from_text(probe.read_file("/sys/fs/cgroup/memory.max")),
        number_from_text(probe.read_file("/sys/fs/cgroup/memory/memory.limit_in_bytes")),
    )
    # A container owns what its control group allows it, not what the machine has.
    known = [limit for limit in limits if limit is not None and 0 < limit < NO_LIMIT_BYTES]
    flags = frozenset((fields.get("flags") or fields.get("Features") or "").split())
    return name, min(known, default=None), "/proc", flags


def fields_from_cpuinfo(data: bytes) -> dict[str, str]:
    """Parses /proc/cpuinfo; the first processor wins, later ones only add ("Model" comes last)."""
    fields: dict[str, str] = {}
    for line in data.decode("utf-8", "replace").splitlines():
        key, colon, value = line.partition(":")
        if colon and value.strip():
            fields.setdefault(key.strip(), " ".join(value.split()))
    return fields


def memory_from_meminfo(data: bytes) -> int | None:
    """Returns MemTotal in bytes."""
    found = re.search(rb"^MemTotal:\s*(\d{1,15}) kB", data, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def number_from_text(data: bytes | None) -> int | None:
    """Parses a file that holds one decimal or 0x number, as sysfs has them; else None."""
    text = (data or b"").strip()
    if re.fullmatch(rb"\d{1,20}", text):
        return int(text)
    return int(text, 16) if re.fullmatch(rb"0[xX][0-9a-fA-F]{1,16}", text) else None


def text_from_sysctl(data: bytes | None) -> str:
    """Decodes a string value of sysctl."""
    return (data or b"").split(b"\0")[0].decode("utf-8", "replace").strip()


def integer_from_sysctl(data: bytes | None) -> int | None:
    """Decodes an integer value of sysctl: 4 or 8 bytes, or the text that its tool prints."""
    raw = data or b""
    if re.fullmatch(rb"\s*\d{1,20}\s*", raw):
        return int(raw)
    return int.from_bytes(raw, "little") if len(raw) in (4, 8) else None


def _macos_cpu(probe: Probe) -> Facts:
    name = text_from_sysctl(probe.sysctl("machdep.cpu.brand_string"))
    return name, integer_from_sysctl(probe.sysctl("hw.memsize")), "sysctl", frozenset()


def _windows_cpu(probe: Probe) -> Facts:
    key = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
    name = probe.registry(key, "ProcessorNameString")
    text = " ".join(name.split()) if isinstance(name, str) else ""
    return text, probe.windows_memory_bytes(), "registry", frozenset()
