"""Devices that an engine is built for ahead of time, on a machine that does not have them."""

from __future__ import annotations

import difflib

from sdkit_dispatch.contract import Device
from sdkit_dispatch.detect.pci_table import known_archs
from sdkit_dispatch.errors import ConfigError

MAKERS = {"sm_": ("nvidia", "10de:0000"), "gfx": ("amd", "1002:0000")}
"""How an architecture begins -> its maker, and a PCI id that says no more than that."""


def absent_device(arch: str) -> Device:
    """Returns a device of that architecture: "sm_89", "gfx1100".

    Raises:
        ConfigError: No device of that name is known; names the nearest.
    """
    known = known_archs()
    maker = next((found for prefix, found in MAKERS.items() if arch.startswith(prefix)), None)
    if maker is None or arch not in known:
        buildable = [one for one in known if one.startswith(tuple(MAKERS))]
        near = difflib.get_close_matches(arch, buildable, n=3)
        raise ConfigError(
            f"no device has the architecture '{arch}'",
            f"did you mean {' or '.join(near)}?" if near else "give one like sm_89 or gfx1100",
        )
    return Device(
        id=f"absent:{arch}",
        kind="discrete",
        maker=maker[0],
        name=f"a device of {arch} elsewhere",
        arch=arch,
        pci_id=maker[1],
        is_absent=True,
        sources={"arch": "--for"},
    )
