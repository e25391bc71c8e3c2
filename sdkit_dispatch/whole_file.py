"""Files that appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

PARTIAL_S = 3600.0


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file beside its place, forces it to the disk, and renames it into place.

    Raises:
        OSError: The disk is full or read-only; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def sweep_partials(folder: Path, *, is_deep: bool = True) -> int:
    """Removes what killed writers left in a folder, or below it; returns how many files.

    A younger one may still be written to: nothing takes longer than `PARTIAL_S`.
    """
    removed = 0
    for partial in list(folder.rglob("*.tmp") if is_deep else folder.glob("*.tmp")):
        with suppress(OSError):
            if time.time() - partial.stat().st_mtime > PARTIAL_S:
                partial.unlink()
                removed += 1
    return removed


def write_note(path: Path, value: Any) -> None:  # Any: JSON data
    """Writes JSON data behind its own sha256.

    Raises:
        OSError: The disk is full or read-only; nothing is left behind.
    """
    data = json.dumps(value).encode()
    write_whole(path, hashlib.sha256(data).hexdigest().encode() + b"\n" + data)


def read_note(path: Path) -> Any:  # Any: JSON data
    """Returns what `write_note` wrote; None if there is nothing, or it is damaged."""
    try:
        digest, _, data = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return json.loads(data) if hashlib.sha256(data).hexdigest().encode() == digest else None
