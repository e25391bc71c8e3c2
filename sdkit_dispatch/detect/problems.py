"""What can keep a device from being used: each problem, its sentence, its remedy.

Which engines a problem rules out is data: `problems` in support.yaml. A problem is reported only
on evidence; what the system does not say is not held against a device.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from sdkit_dispatch.contract import Device, Problem
from sdkit_dispatch.detect.host import Host
from sdkit_dispatch.detect.probe import Probe

if TYPE_CHECKING:
    from sdkit_dispatch.detect.linux import PciDevice

PASSTHROUGH_DRIVERS = ("vfio-pci", "pci-stub", "xen-pciback", "pciback")
DRM_DRIVERS = ("amdgpu", "i915", "xe")
"""Drivers that always make a render node; NVIDIA's makes one only if it was told to."""
FREE_NVIDIA_DRIVERS = ("nouveau", "nova", "nova-core")
UNUSABLE = frozenset({"passthrough", "no-driver", "stopped"})
"""Codes of problems that leave a driver nothing to say about its device."""
WSL_DRIVERS = (
    (r"nv.*\.inf_", "NVIDIA"),
    (r"[uc]\d{6,7}\.inf_", "AMD"),
    (r"(iigd|ki\d|igdlh).*\.inf_", "Intel"),
)
"""Folder names below /usr/lib/wsl/drivers: the display drivers of the Windows host."""


def is_unusable(device: Device) -> bool:
    """Says whether no engine at all can reach the device."""
    return any(problem.code in UNUSABLE for problem in device.problems)


def no_gpu(reason: str, hint: str = "") -> Problem:
    """Why only the CPU is left; it is carried by the CPU device."""
    return Problem(code="no-gpu", message=reason, hint=hint)


def no_gpu_in_wsl(probe: Probe, host: Host) -> Problem:
    """Why WSL shows no GPU, naming the drivers of the Windows host if they are mounted."""
    if probe.access("/dev/dxg") == "missing":
        hint = (
            "start the container with `--gpus all`"
            if host.is_container
            else "use WSL 2 (`wsl --set-version <distribution> 2`) and a current Windows driver"
        )
        return no_gpu(
            "this is WSL without /dev/dxg, so no GPU of the Windows host can be reached", hint
        )
    names = probe.listdir("/usr/lib/wsl/drivers")
    makers = sorted(
        {maker for shape, maker in WSL_DRIVERS for name in names if re.match(shape, name)}
    )
    who = f"the Windows host has a driver of {', '.join(makers)}, but " if makers else ""
    return no_gpu(
        f"WSL 2: {who}neither NVML nor rocminfo reports a GPU here, and the only Vulkan driver "
        "within WSL is a CPU one (llvmpipe)",
        "run sdkit-dispatch on Windows itself; for an AMD card, ROCm for WSL also serves"
        if "AMD" in makers or not makers
        else "run sdkit-dispatch on Windows itself",
    )


def without_nvml(device: Device, probe: Probe, host: Host, proc_version: bytes) -> Device:
    """Returns an NVIDIA device as it stands when its driver cannot be asked."""
    found = re.search(rb"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", proc_version)
    if found and not device.driver:
        device = replace(
            device,
            driver=found.group(1).decode(),
            sources={**device.sources, "driver": "/proc/driver/nvidia/version"},
        )
    if host.is_container and probe.access("/dev/nvidiactl") == "missing":
        problem = Problem(
            code="not-in-container",
            message=f"{device.name} is there, but this container has no /dev/nvidiactl and no "
            "NVIDIA libraries",
            hint="start the container with `--gpus all` (NVIDIA Container Toolkit)",
        )
    else:
        problem = Problem(
            code="no-nvml",
            message="NVIDIA's management library (libnvidia-ml.so.1) cannot be loaded, so memory "
            "and driver are not known for certain",
            hint="check that `nvidia-smi` runs",
        )
    return replace(device, problems=(*device.problems, problem))


def of_linux_device(
    probe: Probe, host: Host, device: Device, pci: PciDevice
) -> tuple[Problem, ...]:
    """Returns the problems of a PCI device, most serious first."""
    driver = pci.driver
    if driver in PASSTHROUGH_DRIVERS:
        return (
            Problem(
                code="passthrough",
                message=f"{device.pci_id} is bound to {driver}: it is set aside for a virtual "
                "machine",
                hint=f"take {device.pci_id} out of vfio-pci.ids on the kernel command line",
            ),
        )
    if driver == "":
        return (_no_driver(device, host),)
    found: list[Problem] = []
    if driver in FREE_NVIDIA_DRIVERS:
        found.append(
            Problem(
                code="free-nvidia-driver",
                message=f"{device.name} runs on {driver}; CUDA needs NVIDIA's own driver",
                hint="install NVIDIA's driver (580 or newer)",
            )
        )
    if driver == "radeon":
        found.append(
            Problem(
                code="radeon-driver",
                message=f"{device.name} runs on the old radeon driver, which has no Vulkan",
                hint="boot with radeon.si_support=0 radeon.cik_support=0 amdgpu.si_support=1 "
                "amdgpu.cik_support=1",
            )
        )
    if driver in DRM_DRIVERS and device.kind != "npu":
        found += _render_node(probe, host, pci)
    if device.maker == "amd" and device.kind != "npu":
        found += _kfd(probe, host)
        found += _override(probe, device)
    if device.kind == "npu":
        found += _accelerator_node(probe, host)
    if pci.is_external:
        found.append(
            Problem(
                code="external",
                message=f"{device.name} is an external GPU: unplugging it ends a run",
            )
        )
    return tuple(found)


def _no_driver(device: Device, host: Host) -> Problem:
    hints = {
        "nvidia": "install NVIDIA's driver (580 or newer)",
        "amd": "load amdgpu: `sudo modprobe amdgpu`",
        "intel": f"use a kernel that knows it (this is {host.kernel}; Arc needs 6.2 or newer)",
    }
    return Problem(
        code="no-driver",
        message=f"no kernel driver is bound to {device.name} ({device.pci_id})",
        hint=hints.get(device.maker, ""),
    )


def _render_node(probe: Probe, host: Host, pci: PciDevice) -> list[Problem]:
    names = [
        name
        for name in probe.listdir(f"/sys/bus/pci/devices/{pci.address}/drm")
        if name.startswith("renderD")
    ]
    wanted = [f"/dev/dri/{name}" for name in names] or [
        f"/dev/dri/{name}" for name in probe.listdir("/dev/dri") if name.startswith("renderD")
    ]
    states = {path: probe.access(path) for path in wanted}
    if "ok" in states.values():
        return []
    denied = next((path for path, state in states.items() if state == "denied"), "")
    if denied:
        return [_denied(probe, denied, "render-denied")]
    return [
        Problem(
            code="no-render-node",
            message=f"{wanted[0] if wanted else '/dev/dri'} is missing, so no program here can "
            "reach the GPU",
            hint="start the container with --device=/dev/dri"
            if host.is_container
            else "check that the kernel driver started: `sudo dmesg`",
        )
    ]


def _kfd(probe: Probe, host: Host) -> list[Problem]:
    state = probe.access("/dev/kfd")
    if state == "denied":
        return [_denied(probe, "/dev/kfd", "kfd-denied")]
    if state == "missing":
        return [
            Problem(
                code="no-kfd",
                message="there is no /dev/kfd, which ROCm and MIGraphX need",
                hint="start the container with --device=/dev/kfd --device=/dev/dri and "
                "--group-add render"
                if host.is_container
                else "in a container, pass --device=/dev/kfd --device=/dev/dri and the group "
                "render; else `sudo modprobe amdgpu`",
            )
        ]
    return []


def _accelerator_node(probe: Probe, host: Host) -> list[Problem]:
    nodes = [name for name in probe.listdir("/dev/accel") if name.startswith("accel")]
    states = {f"/dev/accel/{name}": probe.access(f"/dev/accel/{name}") for name in nodes}
    if "denied" in states.values() and "ok" not in states.values():
        path = next(path for path, state in states.items() if state == "denied")
        return [_denied(probe, path, "accel-denied")]
    return []


def _denied(probe: Probe, path: str, code: str) -> Problem:
    group = probe.group(path) or "render"
    return Problem(
        code=code,
        message=f"no permission on {path}: it belongs to the group {group}",
        hint=f"sudo usermod -aG {group} $USER, then log in again",
    )


def _override(probe: Probe, device: Device) -> list[Problem]:
    value = probe.env.get("HSA_OVERRIDE_GFX_VERSION", "")
    if not value:
        return []
    return [
        Problem(
            code="hsa-override",
            message=f"HSA_OVERRIDE_GFX_VERSION={value} makes ROCm take {device.name} "
            f"({device.arch or 'unknown'}) for another chip; the true one decides here",
            hint="unset HSA_OVERRIDE_GFX_VERSION",
        )
    ]
