"""Finds the processors of this machine: operating system -> list of devices.

`detect()` asks the operating system, needs no external tool, imports no vendor and takes a few
milliseconds where there is no GPU. The CPU is always there, and last. What keeps a device from
being used is in `Device.problems`; where each fact came from is in `Device.sources`. See README.md
in this folder for the environment variables that it honours.
"""

from __future__ import annotations

from sdkit_dispatch.contract import Device
from sdkit_dispatch.detect.host import Host, host_from_probe
from sdkit_dispatch.detect.probe import MachineProbe, Probe

__all__ = ["Host", "MachineProbe", "Probe", "detect", "host"]


def host(probe: Probe | None = None) -> Host:
    """Describes the operating system and the interpreter."""
    return host_from_probe(probe or MachineProbe())


def detect(probe: Probe | None = None) -> list[Device]:
    """Lists every device of this machine in the order of the buses, the CPU last."""
    from sdkit_dispatch.detect.overrides import with_overrides

    probe = probe or MachineProbe()
    machine = host_from_probe(probe)
    return with_overrides(_with_own_ids(_devices(probe, machine)), probe.env)


def _with_own_ids(devices: list[Device]) -> list[Device]:
    """Numbers devices that would share an id, as two cards that no one gives an address."""
    from dataclasses import replace

    result: list[Device] = []
    for device in devices:
        taken = {other.id for other in result}
        copies = (f"{device.id}#{number}" for number in range(2, len(devices) + 2))
        free = next(copy for copy in (device.id, *copies) if copy not in taken)
        result.append(device if free == device.id else replace(device, id=free))
    return result


def _devices(probe: Probe, machine: Host) -> list[Device]:
    if machine.os == "windows":
        from sdkit_dispatch.detect.windows import windows_devices

        return windows_devices(probe, machine)
    if machine.os == "macos":
        from sdkit_dispatch.detect.macos import macos_devices

        return macos_devices(probe, machine)
    from sdkit_dispatch.detect.linux import linux_devices

    return linux_devices(probe, machine)
