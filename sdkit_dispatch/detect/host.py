"""The system around the devices: what a vendor's support table asks of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from sdkit_dispatch.detect.cpu import integer_from_sysctl
from sdkit_dispatch.detect.probe import Probe

SYSTEMS: dict[str, Literal["linux", "windows", "macos"]] = {
    "linux": "linux",
    "win32": "windows",
    "cygwin": "windows",
    "darwin": "macos",
}
MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "x64": "x86_64", "aarch64": "arm64"}


@dataclass(frozen=True, kw_only=True)
class Host:
    """Operating system and interpreter.

    Attributes:
        os: "linux" also within WSL; then `is_wsl` is true.
        arch: Of this interpreter: "x86_64", "arm64", "i686", "armv7l", ...
        python: "3.11".
        kernel: Leading numbers of the kernel or Windows version: "6.8.0", "10.0.26100".
        libc: "glibc 2.36" or "musl"; empty if unknown, and outside Linux.
        rocm: Version of a ROCm installed on the system: "7.2.4"; empty if there is none.
        is_translated: An x86_64 interpreter under Rosetta on an Apple chip.
    """

    os: Literal["linux", "windows", "macos"]
    arch: str
    python: str
    kernel: str = ""
    is_wsl: bool = False
    is_container: bool = False
    is_translated: bool = False
    libc: str = ""
    rocm: str = ""

    @property
    def platform(self) -> str:
        """As `VendorSpec.platforms` spells it: "linux-x86_64"."""
        return f"{self.os}-{self.arch}"


def host_from_probe(probe: Probe) -> Host:
    """Asks the probe what it takes to fill a `Host`; about ten small files."""
    platform = probe.platform
    system = SYSTEMS.get(platform.system, "linux")
    machine = platform.machine.lower()
    arch = MACHINES.get(machine, machine)
    if platform.pointer_bits == 32 and arch in ("x86_64", "arm64"):
        arch = {"x86_64": "i686", "arm64": "armv7l"}[arch]
    is_linux = system == "linux"
    return Host(
        os=system,
        arch=arch,
        python=f"{platform.python[0]}.{platform.python[1]}",
        kernel=_leading_numbers(platform.release),
        is_wsl=is_linux and _is_wsl(probe),
        is_container=is_linux and _is_container(probe),
        is_translated=system == "macos"
        and integer_from_sysctl(probe.sysctl("sysctl.proc_translated")) == 1,
        libc=platform.libc,
        rocm=_rocm_version(probe) if is_linux else "",
    )


def _leading_numbers(release: str) -> str:
    found = re.match(r"\d+(\.\d+)*", release)
    return found.group(0) if found else ""


def _is_wsl(probe: Probe) -> bool:
    release = probe.platform.release.encode() + (
        probe.read_file("/proc/sys/kernel/osrelease") or b""
    )
    return b"microsoft" in release.lower() or probe.access("/dev/dxg") != "missing"


def _is_container(probe: Probe) -> bool:
    marks = ("/.dockerenv", "/run/.containerenv")
    if any(probe.access(mark) != "missing" for mark in marks) or probe.env.get("container"):
        return True
    groups = probe.read_file("/proc/1/cgroup") or b""
    return bool(re.search(rb"docker|kubepods|containerd|lxc", groups))


def _rocm_version(probe: Probe) -> str:
    folders = [probe.env.get("ROCM_PATH", ""), "/opt/rocm"]
    folders += [f"/opt/{name}" for name in probe.listdir("/opt") if name.startswith("rocm-")][::-1]
    for folder in filter(None, folders):
        version = _leading_numbers(
            (probe.read_file(f"{folder}/.info/version") or b"").decode("utf-8", "replace").strip()
        )
        if version:
            return version
    return ""
