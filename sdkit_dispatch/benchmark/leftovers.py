"""What benchmarks leave in a home: gigabytes that belong to no engine.

<home>/suites/                  seeded pipelines, and checkpoints of the same networks
<home>/scratch/peers/           what peers made of a pipeline
<home>/env/peer-<name>/         their environments, shared with no vendor
<home>/scratch/benchmark.lock   held by every benchmark while it runs
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from sdkit_dispatch.benchmark.peers import PEERS, peer_files
from sdkit_dispatch.benchmark.seeded_pipeline import suites_folder
from sdkit_dispatch.contract import Report
from sdkit_dispatch.env import remove
from sdkit_dispatch.env.environment import vendor_folder
from sdkit_dispatch.errors import ConfigError, VendorEnvError
from sdkit_dispatch.store_cleaning import folder_bytes
from sdkit_dispatch.store_use import hold_file, unused_file

ENVIRONMENTS = {peer.vendor.name: peer.vendor for peer in PEERS.values() if not peer.absent}
"""Of the peers; some share one."""


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """Files of one kind.

    Attributes:
        what: "suite", "peer" or "environment".
        name: Of the file, the folder, or the peer.
        path: Where it lies.
        size_bytes: What they take on the disk.
        kept: Why they stay nevertheless; empty if they go.
    """

    what: str
    name: str
    path: str
    size_bytes: int
    kept: str = ""


@contextmanager
def benchmark_files_in_use(home: Path) -> Iterator[None]:
    """Keeps others from removing them; not in a home that cannot be written.

    Raises:
        ConfigError: They are being removed.
    """
    place = _made_lock(home)
    hold = hold_file(place)
    if hold is None and os.access(place, os.R_OK):
        raise ConfigError(
            f"the files of benchmarks in '{home}' are being removed", "run this again afterwards"
        )
    try:
        yield
    finally:
        if hold is not None:
            hold.close()


def leftovers(home: Path, *, environments: bool) -> list[Leftover]:
    """Returns what there is, the largest first.

    Args:
        home: Where it lies.
        environments: Also the peers' environments.
    """
    found = [("suite", path.name, path) for path in _inside(suites_folder(home))]
    found += [("peer", path.name, path) for path in _inside(peer_files(home))]
    if environments:
        found += [("environment", name, vendor_folder(name, home)) for name in ENVIRONMENTS]
    rows = [
        Leftover(what=what, name=name, path=str(path), size_bytes=size_bytes)
        for what, name, path in found
        if (size_bytes := _bytes(path))  # locks are empty, and stay
    ]
    return sorted(rows, key=lambda row: (-row.size_bytes, row.what, row.name))


def remove_leftovers(home: Path, rows: list[Leftover], *, report: Report) -> list[Leftover]:
    """Removes them; what cannot be removed says why.

    Raises:
        ConfigError: A benchmark runs, or nothing tells that none does.
    """
    if not rows:
        return []
    lock = _made_lock(home)
    with unused_file(lock) as is_unused:
        if not is_unused or not _can_be_moved(lock):
            raise ConfigError(
                f"a benchmark is running in '{home}', or the file system there has no locks",
                "run this again afterwards, or remove 'suites' and 'scratch/peers' there by hand",
            )
        return [_removed(home, row, report) for row in rows]


def _can_be_moved(lock: Path) -> bool:
    """False on Windows if another process has it open, which is what a hold is there."""
    if os.name != "nt":
        return True
    try:
        lock.unlink(missing_ok=True)
    except PermissionError:
        return False
    return True


def _removed(home: Path, row: Leftover, report: Report) -> Leftover:
    path = Path(row.path)
    try:
        if row.what == "environment":
            remove(ENVIRONMENTS[row.name], home=home, report=report)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(_set_aside(path))
        else:
            path.unlink(missing_ok=True)
    except VendorEnvError as error:
        return replace(row, kept=error.message)
    except OSError as error:
        return replace(row, kept=error.strerror or str(error))
    return row


def _set_aside(folder: Path) -> Path:
    """Gives a folder a name under which nobody takes half of it for the whole."""
    if folder.name.startswith("."):  # what an earlier removal, or a fill, left
        return folder
    aside = folder.with_name(f".{folder.name}-gone")
    if aside.exists():
        shutil.rmtree(aside)
    return folder.rename(aside)


def _inside(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(folder.iterdir())
    return []


def _bytes(path: Path) -> int:
    if path.is_dir() and not path.is_symlink():
        return folder_bytes(path)
    with suppress(OSError):
        return path.lstat().st_size
    return 0


def _made_lock(home: Path) -> Path:
    """Returns the file that a benchmark holds; it is there, if the home can be written."""
    lock = home / "scratch" / "benchmark.lock"
    with suppress(OSError):
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    return lock
