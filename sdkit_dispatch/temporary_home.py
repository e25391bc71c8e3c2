"""A home folder that goes away: for a machine whose own cannot be written."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "sdkit-dispatch-store-"
LOCK_FILE = "in-use.lock"


class TemporaryHome:
    """A private folder below the system's temporary one; `close` removes it."""

    def __init__(self) -> None:
        """Makes the folder, and removes those that killed processes left.

        Raises:
            OSError: There is no place for it.
        """
        import filelock

        _sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = filelock.FileLock(self.folder / LOCK_FILE)
        self._lock.acquire()

    def close(self) -> None:
        """Removes it; twice is fine."""
        self._lock.release()
        shutil.rmtree(self.folder, ignore_errors=True)


def _sweep() -> None:
    """Removes folders whose process is gone: nobody holds their lock."""
    import filelock

    for leftover in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        lock = leftover / LOCK_FILE
        if not (_is_ours(leftover) and lock.is_file()):  # or it was made this very moment
            continue
        with suppress(filelock.Timeout, OSError), filelock.FileLock(lock).acquire(timeout=0):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    """True for a folder that nobody but this user can have filled; Windows has one a user."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode):
        return False
    if os.name == "nt":
        return True
    return found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
