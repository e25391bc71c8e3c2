"""A suite's own checkpoint, for peers that take one: real names and sizes, seeded weights.

As `seeded_pipeline.py` does for graphs; the names, shapes and bounds are data of this package.
"""

from __future__ import annotations

import json
import lzma
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sdkit_dispatch.benchmark.seeded_pipeline import (
    REVISION,
    SUITES,
    require_room,
    suites_folder,
    uniform,
)
from sdkit_dispatch.contract import Progress, Report
from sdkit_dispatch.errors import ConfigError

NAMES = "checkpoint.json.xz"
ITEM_BYTES = 2
"""All weights are float16: half of the disk, and a peer computes with what it converts them to."""
Row = tuple[str, Sequence[int], float]
"""Name, shape and bound of a tensor: 0 and 1 are its value."""


def has_checkpoint(name: str) -> bool:
    """Returns whether a suite can have a checkpoint of its own."""
    return (SUITES / name / NAMES).is_file()


def checkpoint_place(name: str, home: Path) -> Path:
    """Returns where a suite's checkpoint lies, or would lie."""
    return suites_folder(home) / f"{name}-{REVISION}.safetensors"


def checkpoint_bytes(name: str) -> int:
    """Returns how much a suite's checkpoint takes on the disk."""
    return sum(math.prod(shape) for _, shape, _ in _rows(name)) * ITEM_BYTES


def seeded_checkpoint(name: str, *, home: Path, report: Report) -> Path:
    """Returns a suite's checkpoint, which is written if it is not there. It appears whole.

    Raises:
        ConfigError: The disk has no room for it, or the place cannot be written.
    """
    import filelock

    place = checkpoint_place(name, home)
    if place.is_file():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(place.parent / f"{name}-checkpoint.lock"):
            if not place.is_file():
                _write(place, name, report)
    except OSError as error:
        raise ConfigError(
            f"'{place}' cannot be written: {error.strerror or error}", "name another --home"
        ) from error
    return place


def _write(place: Path, name: str, report: Report) -> None:
    for left in place.parent.glob(f".{name}-*.part"):  # by a writer that was killed
        left.unlink()
    size_bytes = checkpoint_bytes(name)
    require_room(
        place,
        size_bytes,
        what=f"the checkpoint of the suite '{name}' takes {size_bytes / 1e9:.1f} GB",
        instead="give a checkpoint of the same network: --checkpoint FILE.safetensors",
    )
    handle, part = tempfile.mkstemp(dir=place.parent, prefix=f".{name}-", suffix=".part")
    phase = f"write the checkpoint of suite {name}, {size_bytes / 1e9:.1f} GB of seeded weights"
    try:
        with os.fdopen(handle, "wb") as file:
            rows = _rows(name)
            file.write(_header(rows))
            for index, row in enumerate(rows):
                report(Progress(phase=phase, fraction=min(1.0, file.tell() / size_bytes)))
                file.write(_drawn(row, seed=[REVISION, index]).data)
        os.replace(part, place)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _rows(name: str) -> list[Row]:
    rows: list[Row] = json.loads(lzma.decompress((SUITES / name / NAMES).read_bytes()))
    return rows


def _header(rows: Sequence[Row]) -> bytes:
    """Returns the beginning of a .safetensors file. Source: its format's documentation."""
    entries, at = {}, 0
    for name, shape, _ in rows:
        end = at + math.prod(shape) * ITEM_BYTES
        entries[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _drawn(row: Row, *, seed: list[int]) -> Any:  # Any: numpy.ndarray
    _, shape, bound = row
    if bound in (0, 1):
        return np.full(shape, bound, np.float16)
    return uniform(tuple(shape), bound, dtype=np.float16, seed=seed)
