"""A home folder that goes away: for a machine whose own cannot be written."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

from .store_layout import LAYOUT

PREFIX = "sdkit-dispatch-store-"
GATE, MEMBERS = "gate.lock", "member-*.lock"

log = logging.getLogger(__name__)


class TemporaryHome:
    """A private folder below the system's temporary one, shared by all processes of a user.

    As in a home that lasts, one of them builds what the others wait for, and compilers take turns.
    The last one takes it away.
    """

    def __init__(self) -> None:
        """Joins those who use it, or makes it anew, without what killed processes left.

        Raises:
            OSError: There is no place for it.
        """
        import filelock

        self._place, self._is_shared = _place()
        self.folder = self._place / "home"
        self._gate = filelock.FileLock(self._place / GATE)
        self._membership = filelock.FileLock(self._place / MEMBERS.replace("*", uuid.uuid4().hex))
        with self._gate:
            if not self._is_used():
                shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._membership.acquire()

    def close(self) -> None:
        """Leaves it, and removes it if nobody else uses it; twice is fine."""
        if not self._membership.is_locked:
            return
        with self._gate:
            self._membership.release()
            if not self._is_used():
                shutil.rmtree(self.folder, ignore_errors=True)
        if not self._is_shared:
            shutil.rmtree(self._place, ignore_errors=True)

    def _is_used(self) -> bool:
        """True if a living process is a member; the operating system frees the locks of others."""
        import filelock

        is_used = False
        for path in self._place.glob(MEMBERS):
            try:
                with filelock.FileLock(path).acquire(timeout=0):
                    pass
            except filelock.Timeout:
                is_used = True
            else:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
        return is_used


def _place() -> tuple[Path, bool]:
    """Returns a folder that nobody but this user can have filled, and whether others find it.

    The folder of all processes stays, with the lock that lets them in one by one. Should somebody
    else have made one of its name, this process has one of its own.
    """
    user = "user" if os.name == "nt" else str(os.geteuid())  # Windows has a folder a user
    place = Path(tempfile.gettempdir()) / f"{PREFIX}{LAYOUT}-{user}"
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    if _is_ours(place):
        return place, True
    log.warning("'%s' is not a private folder of this user, and is left alone", place)
    return Path(tempfile.mkdtemp(prefix=PREFIX)), False


def _is_ours(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode):
        return False
    if os.name == "nt":
        return True
    return found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
