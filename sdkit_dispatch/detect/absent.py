"""Devices that an engine is built for ahead of time, on a machine that does not have them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from sdkit_dispatch.contract import Device, DeviceKind
from sdkit_dispatch.detect.pci_table import known_archs
from sdkit_dispatch.errors import ConfigError

MAKERS: Mapping[str, tuple[str, DeviceKind, str]] = {
    "sm_": ("nvidia", "discrete", "10de:0000"),
    "gfx": ("amd", "discrete", "1002:0000"),
    "apple-": ("apple", "integrated", ""),
}
"""How an architecture begins -> maker, kind, and a PCI id that says no more than the maker."""
APPLE_ARCHS = ("apple-m1", "apple-m2", "apple-m3", "apple-m4", "apple-m5")
"""They are on no PCI bus, so the table of PCI ids does not have them."""


def absent_device(arch: str) -> Device:
    """Returns a device of that architecture: "sm_89", "gfx1100", "apple-m2".

    Raises:
        ConfigError: No device of that name is known; names the nearest.
    """
    known = (*known_archs(), *APPLE_ARCHS)
    found = next((facts for prefix, facts in MAKERS.items() if arch.startswith(prefix)), None)
    if found is None or arch not in known:
        buildable = [one for one in known if one.startswith(tuple(MAKERS))]
        near = difflib.get_close_matches(arch, buildable, n=3)
        raise ConfigError(
            f"no device has the architecture '{arch}'",
            f"did you mean {' or '.join(near)}?" if near else "give one like sm_89 or gfx1100",
        )
    maker, kind, pci_id = found
    return Device(
        id=f"absent:{arch}",
        kind=kind,
        maker=maker,
        name=f"a device of {arch} elsewhere",
        arch=arch,
        pci_id=pci_id,
        is_absent=True,
        sources={"arch": "--for"},
    )
