"""Prints the processors of this machine, importing nothing that takes time."""

from __future__ import annotations

import json

from .detect import detect

SCHEMA_VERSION = 1
"""Of every JSON document that the command line prints."""


def show_devices(*, as_json: bool) -> None:
    """Prints what `detect` finds: a line for each device and for each problem, or JSON."""
    devices = detect()
    if as_json:
        from .contract import record_to_json

        rows = [record_to_json(device) for device in devices]
        print(json.dumps({"schema_version": SCHEMA_VERSION, "devices": rows}, indent=2))
        return
    for device in devices:
        details = [device.kind, device.arch, device.pci_id]
        if device.memory_bytes:
            details.append(f"{device.memory_bytes / 2**30:.1f} GiB")
        if device.driver:
            details.append(f"driver {device.driver}")
        print(f"{device.id}  {device.name} ({', '.join(filter(None, details))})")
        for problem in device.problems:
            print(f"    ! {problem.message}" + (f" -> {problem.hint}" if problem.hint else ""))
