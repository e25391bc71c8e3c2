"""What a PCI id says of a device: maker, architecture, kind, name.

The table is gpus.tsv (see make_pci_table.py). It is read when the first GPU is met, and searched
as text: parsing it would cost more than the one or two look-ups of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sdkit_dispatch.contract import DeviceKind

MAKERS = {
    "10de": "nvidia",
    "1002": "amd",
    "1022": "amd",
    "8086": "intel",
    "106b": "apple",
    "1ed5": "moorethreads",
    "5143": "qualcomm",
    "17cb": "qualcomm",
}
"""PCI vendor id -> maker; any other maker is known by its id."""

VIRTUAL_VENDORS = {
    "1013": "an emulated Cirrus Logic VGA",
    "1234": "the emulated display of QEMU",
    "1414": "the virtual display of Hyper-V",
    "15ad": "the virtual display of VMware",
    "1ab8": "the virtual display of Parallels",
    "1af4": "a virtio display",
    "1b36": "the QXL display of QEMU",
    "80ee": "the virtual display of VirtualBox",
}
"""Displays of virtual machines: they draw, and compute nothing."""

DISPLAY_ONLY_VENDORS = {
    "102b": "a Matrox display controller",
    "1a03": "the ASPEED display of a server's management controller",
    "19e5": "the display of a server's management controller",
    "1d0f": "the display of a cloud instance",
}
"""Display controllers without a processor that any engine could use."""

KINDS: dict[str, DeviceKind] = {"d": "discrete", "i": "integrated", "n": "npu"}


@dataclass(frozen=True, kw_only=True)
class PciEntry:
    """One row of gpus.tsv; `arch` is empty where the row has none."""

    arch: str
    kind: DeviceKind
    name: str


@cache
def _table() -> str:
    try:
        return (Path(__file__).parent / "gpus.tsv").read_text(encoding="utf-8")
    except OSError:  # a card without a table is still a card
        return ""


def pci_entry(pci_id: str) -> PciEntry | None:
    """Looks up "10de:2684"; None if the table is older than the card."""
    table = _table()
    start = table.find(f"\n{pci_id}\t") + 1
    if not start:
        return None
    _, arch, kind, name = table[start : table.find("\n", start)].split("\t")
    return PciEntry(arch=arch, kind=KINDS[kind], name=name)


def known_archs() -> tuple[str, ...]:
    """Returns every architecture of the table, sorted."""
    rows = (line.split("\t") for line in _table().splitlines() if not line.startswith("#"))
    return tuple(sorted({row[1] for row in rows if len(row) > 1 and row[1]}))


def maker_of(vendor_id: str) -> str:
    """Returns the maker's name, or the PCI vendor id of a maker that we do not know."""
    return MAKERS.get(vendor_id, vendor_id)
