"""Per vendor: can it be installed here, is it, and which command comes next."""

from __future__ import annotations

import platform
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sdkit_dispatch.contract import Rejection, VendorSpec
from sdkit_dispatch.env.environment import (
    Environment,
    Pointer,
    current_environment,
    install_hint,
    managed_environment,
    read_pointer,
    vendor_folder,
)

State = Literal["unsupported", "installable", "installed", "update_required", "broken"]

_SYSTEMS = {"linux": "linux", "win32": "windows", "darwin": "macos"}
_MACHINES = {"amd64": "x86_64", "x64": "x86_64", "aarch64": "arm64"}
_STATE_OF_CODE: dict[str, State] = {
    "not-installed": "installable",
    "outdated": "update_required",
    "broken": "broken",
    "conflict": "broken",
}


@dataclass(frozen=True, kw_only=True)
class VendorState:
    """What `vendors list` says of a vendor.

    Attributes:
        message: A sentence.
        action: A command that can be run now; "" if there is nothing to do.
        version: Of the runtime: "openvino 2026.4.1"; "" unless installed.
        location: Folder of the environment; "" unless there is one.
        size_bytes: Of a managed environment, when it was made.
        build: The newest build of the runtime that was made here for this machine; "" if there is
            none. The vendor may still prefer another, and says so in its plan.
    """

    vendor: str
    state: State
    message: str
    action: str = ""
    version: str = ""
    location: str = ""
    size_bytes: int | None = None
    build: str = ""


def platform_name() -> str:
    """Returns this Python's platform as `VendorSpec.platforms` has it: "linux-x86_64"."""
    system = _SYSTEMS.get(sys.platform, sys.platform)
    # What this Python was built for decides which wheels fit, not what the machine could run.
    machine = sysconfig.get_platform().rsplit("-", 1)[-1].lower()
    if machine in ("universal2", "fat64"):
        machine = platform.machine().lower()
    return f"{system}-{_MACHINES.get(machine, machine)}"


def state(spec: VendorSpec, *, home: Path) -> VendorState:
    """Returns a vendor's state, from the files here alone."""
    served: Environment | Rejection = managed_environment(spec, home=home)
    if isinstance(served, Rejection):
        current = current_environment(spec)
        served = current if isinstance(current, Environment) else served
    if isinstance(served, Environment):
        return _installed(spec, served, home)
    if spec.platforms and platform_name() not in spec.platforms:
        return VendorState(
            vendor=spec.name,
            state="unsupported",
            message=f"{spec.name} is for {', '.join(spec.platforms)}; this is {platform_name()}",
        )
    folder = vendor_folder(spec.name, home)
    kind = _STATE_OF_CODE[served.code]
    return VendorState(
        vendor=spec.name,
        state=kind,
        message="can be installed" if kind == "installable" else served.reason,
        action=install_hint(spec),
        location="" if kind == "installable" else str(folder),
    )


def _installed(spec: VendorSpec, environment: Environment, home: Path) -> VendorState:
    pointer = read_pointer(spec, home) if environment.kind == "managed" else None
    runtime = ", ".join(f"{name} {version}" for name, version in environment.packages.items())
    where = {"managed": "an environment of its own", "current": "the current environment"}
    return VendorState(
        vendor=spec.name,
        state="installed",
        message=f"served by {where.get(environment.kind, environment.kind)}",
        version=runtime,
        location=str(environment.folder or ""),
        size_bytes=pointer.size_bytes if isinstance(pointer, Pointer) else None,
    )
