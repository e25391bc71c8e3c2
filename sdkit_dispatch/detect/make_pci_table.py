"""Makes gpus.tsv, the table that detection reads, from pci.ids and chips.tsv.

Run it with a pci.ids file; on Debian: `apt-get install pci.ids`, then

    python -m sdkit_dispatch.detect.make_pci_table /usr/share/misc/pci.ids

pci.ids may be used under the GPL or the 3-clause BSD licence; we use it under the latter, whose
notice the table carries (gpus.LICENSE).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
NOT_DISPLAY = re.compile(
    r"audio|hdmi|usb|bridge|host|port\b|memory hub|gaussian|gna\b|scoring|imaging|signal processor"
    r"|thermal|smbus|root complex|controller hub|ethernet|sata|ide controller|lpc|crash|platform",
    re.IGNORECASE,
)
"""Functions of a chip that carry its name and are no display device."""
INTEL_DISPLAY = re.compile(r"graphics|\barc\b|\bGPU\b|ponte vecchio|\bDG1\b", re.IGNORECASE)
"""Intel names whole platforms after a chip; only these entries are its graphics."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One row of chips.tsv."""

    vendor: str
    chip: str
    arch: str
    kind: str
    name: str

    @property
    def is_device_id(self) -> bool:
        return bool(self.name)


def chips_from_text(text: str) -> tuple[Chip, ...]:
    """Parses chips.tsv."""
    rows = (line.split("\t") for line in text.splitlines() if line and not line.startswith("#"))
    return tuple(
        Chip(vendor=row[0], chip=row[1], arch=row[2], kind=row[3], name="".join(row[4:5]))
        for row in rows
    )


def devices_from_pci_ids(text: str) -> Iterator[tuple[str, str, str]]:
    """Yields vendor id, device id and name of every device in a pci.ids file."""
    vendor = ""
    for line in text.splitlines():
        if line.startswith("C "):  # the device classes follow
            return
        if re.match(r"[0-9a-f]{4}  ", line):
            vendor = line[:4]
        elif re.match(r"\t[0-9a-f]{4}  ", line):
            yield vendor, line[1:5], line[7:].strip()


def chip_of(name: str, chips: tuple[Chip, ...]) -> Chip | None:
    """Returns the row with the longest chip that `name` begins with."""
    found = [
        chip
        for chip in chips
        if name.startswith(chip.chip)
        # "Navi 1" is not "Navi 10", and "Sun" is not "Sunset"; but "GK10" stands for GK104.
        and (not chip.chip[-1].isalpha() or not name[len(chip.chip) :][:1].islower())
    ]
    return max(found, key=lambda chip: len(chip.chip), default=None)


def display_name(name: str) -> str:
    """Returns the marketing name in brackets where there is one: "GeForce RTX 4090"."""
    brackets = re.findall(r"\[([^\]]+)\]", name)
    return str(brackets[-1]) if brackets else name


def table_from_sources(pci_ids: str, chips_text: str) -> str:
    """Returns the text of gpus.tsv."""
    version = re.search(r"^#\s*Version:\s*(\S+)", pci_ids, re.MULTILINE)
    chips = chips_from_text(chips_text)
    rows = {
        f"{chip.vendor}:{chip.chip}": (chip.arch, chip.kind, chip.name)
        for chip in chips
        if chip.is_device_id
    }
    families = {
        vendor: tuple(c for c in chips if c.vendor == vendor and not c.is_device_id)
        for vendor in {chip.vendor for chip in chips}
    }
    for vendor, device, name in devices_from_pci_ids(pci_ids):
        key = f"{vendor}:{device}"
        if vendor not in families or key in rows or NOT_DISPLAY.search(name):
            continue
        if vendor == "8086" and not INTEL_DISPLAY.search(name):
            continue
        chip = chip_of(name, families[vendor])
        if chip is not None:
            rows[key] = (chip.arch, chip.kind, display_name(name))
    head = (
        f"# Made by make_pci_table.py from pci.ids {version.group(1) if version else 'unknown'}\n"
        "# and chips.tsv. Do not edit. Copyright Martin Mares and Albert Pool; 3-clause BSD\n"
        "# licence, see gpus.LICENSE. PCI id <TAB> arch <TAB> kind (d, i, n) <TAB> name\n"
    )
    return head + "".join(
        f"{key}\t{arch}\t{kind[0]}\t{name}\n" for key, (arch, kind, name) in sorted(rows.items())
    )


def main() -> None:
    """Writes gpus.tsv beside this file."""
    pci_ids = Path(sys.argv[1]).read_text(encoding="utf-8")
    chips = (FOLDER / "chips.tsv").read_text(encoding="utf-8")
    (FOLDER / "gpus.tsv").write_text(
        table_from_sources(pci_ids, chips), encoding="utf-8", newline="\n"
    )


if __name__ == "__main__":
    main()
