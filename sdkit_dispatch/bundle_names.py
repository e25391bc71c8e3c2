"""Which file names a bundle may hold: those that mean one file on every system."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

MAX_NAME_BYTES = 400
MAX_PART_BYTES = 200
"""Of one folder or file: most file systems take 255."""
MAX_PARTS = 8
FORBIDDEN = frozenset('<>:"\\|?*')
"""Windows forbids them; a colon also begins a drive or a stream."""
DEVICES = frozenset(
    ["CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"]
    + [f"{port}{number}" for port in ("COM", "LPT") for number in "0123456789¹²³"]
)
"""Windows opens a device under these names, whatever follows the first dot."""


def name_fault(name: str) -> str:
    """Returns what is wrong with the relative POSIX path of a file; empty if nothing is."""
    try:
        size_bytes = len(name.encode())
    except UnicodeEncodeError:
        return "it is not Unicode text"
    parts = name.split("/")
    if size_bytes > MAX_NAME_BYTES or len(parts) > MAX_PARTS:
        return f"it has {size_bytes} bytes in {len(parts)} parts"
    for part in parts:
        fault = _part_fault(part)
        if fault:
            return fault
    return ""


def collision(names: Iterable[str]) -> str:
    """Returns the first name that is another's on a system that folds case; empty if none is."""
    spelling: dict[str, tuple[str, bool]] = {}
    for name in names:
        parts = name.split("/")
        for depth in range(1, len(parts) + 1):
            place, is_file = "/".join(parts[:depth]), depth == len(parts)
            folded = unicodedata.normalize("NFC", unicodedata.normalize("NFD", place).casefold())
            if folded not in spelling:
                spelling[folded] = (place, is_file)
            elif is_file or spelling[folded] != (place, False):
                return name
    return ""


def _part_fault(part: str) -> str:
    if part in ("", ".", ".."):
        return "it is not a plain relative path"
    if len(part.encode()) > MAX_PART_BYTES:
        return f"a part of it is longer than {MAX_PART_BYTES} bytes"
    # Also ends escape sequences and text that runs from right to left: names are printed.
    if not part.isprintable() or FORBIDDEN & set(part):
        return "it holds a character that not every system allows"
    if part[-1] in ". " or part[0] == " ":
        return "a part of it begins with a space, or ends with a space or a dot"
    if part.partition(".")[0].rstrip().upper() in DEVICES:
        return "it names a device on Windows"
    return ""
