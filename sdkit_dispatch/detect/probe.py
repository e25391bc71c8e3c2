"""Everything that detection asks of the outside world, in one object that a test can replace.

`MachineProbe` is the real one. Every other module of `detect` only parses what a probe returns, so
a machine from a bug report is a handful of files and outputs. No method raises.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from sdkit_dispatch.detect.answers import DxgiAdapter, NvmlReport, PnpDevice, RunResult

Access = Literal["ok", "denied", "missing"]

MAX_FILE_BYTES = 4 * 1024 * 1024
"""Nothing that detection reads is longer; a file that is gets cut."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """What this interpreter knows of the system it runs on.

    Attributes:
        system: `sys.platform`: "linux", "win32" or "darwin".
        machine: As the interpreter sees it: "x86_64", "AMD64", "aarch64", "arm64".
        release: Kernel release ("6.8.0-48-generic") or Windows version ("10.0.26100").
        python: Version of the interpreter, major, minor, micro.
        pointer_bits: 32 or 64.
        libc: "glibc 2.36" or "musl" on Linux; empty if unknown.
    """

    system: str
    machine: str
    release: str
    python: tuple[int, int, int]
    pointer_bits: int = 64
    libc: str = ""


class Probe(Protocol):
    """What detection may ask. Nothing raises: "no", "absent" and "failed" are values."""

    @property
    def platform(self) -> Platform: ...

    @property
    def env(self) -> Mapping[str, str]: ...

    def read_file(self, path: str) -> bytes | None:
        """Returns the content, or None if it is absent or may not be read."""

    def listdir(self, path: str) -> Sequence[str]:
        """Returns the names in a folder, sorted; none if it is absent."""

    def readlink(self, path: str) -> str | None:
        """Returns where a symbolic link points, as it is stored."""

    def access(self, path: str) -> Access:
        """Says whether this process may read and write a file or device node."""

    def group(self, path: str) -> str:
        """Returns the name of the group that owns a device node; empty if unknown."""

    def run(self, command: Sequence[str], timeout_s: float) -> RunResult | None:
        """Runs a tool; None if it is absent or did not end in time."""

    def nvml(self) -> NvmlReport | None:
        """Asks NVIDIA's management library; None if it cannot be loaded."""

    def sysctl(self, name: str) -> bytes | None:
        """Returns the raw value of a sysctl of macOS."""

    def dxgi_adapters(self) -> Sequence[DxgiAdapter] | None:
        """Lists the adapters of DXGI; None if it cannot be asked (not Windows)."""

    def pnp_devices(self) -> Sequence[PnpDevice] | None:
        """Lists the present display and accelerator devices of Windows."""

    def registry(self, key: str, value: str) -> str | int | None:
        """Returns a value below HKEY_LOCAL_MACHINE."""

    def windows_memory_bytes(self) -> int | None:
        """Returns the physical memory of a Windows machine."""


class MachineProbe:
    """The machine that we run on."""

    @property
    def platform(self) -> Platform:
        libc = ""
        if sys.platform == "win32":
            version = sys.getwindowsversion()
            # What the interpreter was built for, which under emulation is not the processor.
            machine = os.environ.get("PROCESSOR_ARCHITECTURE", "AMD64")
            release = f"{version.major}.{version.minor}.{version.build}"
        else:
            uname = os.uname()
            machine, release = uname.machine, uname.release
        if sys.platform == "linux":
            libc = "musl"  # which knows no such name
            with contextlib.suppress(OSError, ValueError):
                libc = os.confstr("CS_GNU_LIBC_VERSION") or libc
        return Platform(
            system=sys.platform,
            machine=machine,
            release=release,
            python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
            pointer_bits=64 if sys.maxsize > 2**32 else 32,
            libc=libc,
        )

    @property
    def env(self) -> Mapping[str, str]:
        return os.environ

    def read_file(self, path: str) -> bytes | None:
        try:
            with open(path, "rb") as file:
                return file.read(MAX_FILE_BYTES)
        except (OSError, ValueError):
            return None

    def listdir(self, path: str) -> Sequence[str]:
        try:
            return tuple(sorted(os.listdir(path)))
        except (OSError, ValueError):
            return ()

    def readlink(self, path: str) -> str | None:
        try:
            return os.readlink(path)
        except (OSError, ValueError):
            return None

    def access(self, path: str) -> Access:
        try:
            if os.access(path, os.R_OK | os.W_OK):
                return "ok"
            return "denied" if os.path.lexists(path) else "missing"
        except (OSError, ValueError):
            return "missing"

    def group(self, path: str) -> str:
        if sys.platform == "win32":
            return ""
        import grp

        try:
            return grp.getgrgid(os.stat(path).st_gid).gr_name
        except (OSError, ValueError, KeyError):
            return ""

    def run(self, command: Sequence[str], timeout_s: float) -> RunResult | None:
        import subprocess

        from sdkit_dispatch.detect.answers import RunResult

        try:
            done = subprocess.run(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=timeout_s,
                check=False,
                # No console window from a windowed program.
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
        return RunResult(code=done.returncode, stdout=done.stdout[:MAX_FILE_BYTES])

    def nvml(self) -> NvmlReport | None:
        from sdkit_dispatch.detect.nvml_library import read_nvml

        return read_nvml()

    def sysctl(self, name: str) -> bytes | None:
        if sys.platform != "darwin":
            return None
        from sdkit_dispatch.detect.macos_library import read_sysctl

        return read_sysctl(name)

    def dxgi_adapters(self) -> Sequence[DxgiAdapter] | None:
        if sys.platform != "win32":
            return None
        from sdkit_dispatch.detect.windows_library import read_dxgi_adapters

        return read_dxgi_adapters()

    def pnp_devices(self) -> Sequence[PnpDevice] | None:
        if sys.platform != "win32":
            return None
        from sdkit_dispatch.detect.windows_library import read_pnp_devices

        return read_pnp_devices()

    def registry(self, key: str, value: str) -> str | int | None:
        if sys.platform != "win32":
            return None
        from sdkit_dispatch.detect.windows_library import read_registry

        return read_registry(key, value)

    def windows_memory_bytes(self) -> int | None:
        if sys.platform != "win32":
            return None
        from sdkit_dispatch.detect.windows_library import read_memory_bytes

        return read_memory_bytes()
