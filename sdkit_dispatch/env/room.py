"""Free space, looked at where it will be used, and sizes in words."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path

from sdkit_dispatch.errors import VendorEnvError

BLOCK_BYTES = 4096
"""What a file takes at least, and in steps of, on the usual file systems."""


def size_in_words(size_bytes: int) -> str:
    """Returns 61_000_000 as "61 MB", in units of 1000 as disks are sold."""
    size = float(size_bytes)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def check_room(wanted: Iterable[tuple[Path, int]], *, what: str) -> None:
    """Raises an error if a disk has less free space than all that is wanted of it together.

    Args:
        wanted: (folder, bytes): the folder need not exist yet.
        what: Name of the thing to be written, for the message.

    Raises:
        VendorEnvError: Says the folder, the bytes needed and the bytes free.
    """
    disks: dict[int, tuple[Path, int]] = {}
    for folder, size_bytes in wanted:
        existing = existing_folder(folder)
        disk = os.stat(existing).st_dev
        first, before = disks.get(disk, (folder, 0))
        disks[disk] = (first, before + size_bytes)
    for folder, needed in disks.values():
        free = free_bytes(folder)
        if free < needed:
            raise not_enough_room(what, folder, needed=needed, free=free)


def not_enough_room(
    what: str, folder: Path, *, needed: int, free: int, detail: str = ""
) -> VendorEnvError:
    """Returns the error for a disk that is full (with the installer's words), or will be."""
    return VendorEnvError(
        f"not enough room for {what}: about {size_in_words(needed)} are needed in {folder}, "
        f"{size_in_words(free)} are free" + (f" ({detail})" if detail else ""),
        "free some space there, or put the home folder on another disk with SDKIT_DISPATCH_HOME",
    )


def free_bytes(folder: Path) -> int:
    """Returns the bytes that this user may still write on the disk of a folder."""
    return shutil.disk_usage(existing_folder(folder)).free


def is_same_disk(one: Path, other: Path) -> bool:
    """Returns whether files can be linked between two folders, which need not exist yet."""
    return os.stat(existing_folder(one)).st_dev == os.stat(existing_folder(other)).st_dev


def existing_folder(folder: Path) -> Path:
    """Returns the folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def unpacked_bytes(wheel: Path) -> int:
    """Returns what the files of a wheel take on disk.

    Raises:
        VendorEnvError: It is not a zip file.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            return sum(_on_disk(entry.file_size) for entry in archive.infolist())
    except (OSError, zipfile.BadZipFile) as error:
        raise VendorEnvError(f"{wheel} is not a wheel: {error}", "download it again") from error


def folder_bytes(folder: Path) -> int:
    """Returns what the files below a folder take on disk, links not followed."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += _on_disk(os.lstat(os.path.join(parent, name)).st_size)
            except OSError:  # gone meanwhile
                continue
    return total


def _on_disk(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
