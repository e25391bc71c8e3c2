"""Which engines are in use, and when each was used last.

An engine is in use while a process holds its manifest: by a shared lock (POSIX), which the
operating system frees when the process ends however it ends, or by having it open (Windows, where
a folder with an open file in it cannot be moved). Nothing is written into the engine's folder.
Only the standard library is imported: workers run this in the vendor's environment.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .contract import Arrays, Session
from .store_manifest import MANIFEST
from .whole_file import write_whole

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.EBADF, errno.ENOSYS})
"""What a file system without locks says."""
READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
"""Not to wait for the writer of a pipe that stands in place of the file."""


@dataclass(frozen=True)
class Hold:
    """What is in use until `close`: an engine, or what another file stands for."""

    descriptor: int

    def close(self) -> None:
        """Lets it go; call it once."""
        os.close(self.descriptor)


def hold_engine(folder: Path) -> Hold | None:
    """Marks an engine as in use; None if there is none, or it is being removed right now."""
    return hold_file(folder / MANIFEST)


def hold_file(path: Path) -> Hold | None:
    """Marks what a file stands for as in use; None if it is not there, or is being removed."""
    try:
        descriptor = os.open(path, READ)
    except OSError:
        return None
    try:
        if _is_locked(descriptor, is_shared=True) is not False and _is_still(descriptor, path):
            return Hold(descriptor)
    except OSError:
        pass
    os.close(descriptor)
    return None


def unused_engine(folder: Path) -> AbstractContextManager[bool]:
    """Gives True if nobody uses an engine, and keeps it so; False if somebody may."""
    return unused_file(folder / MANIFEST)


@contextmanager
def unused_file(path: Path) -> Iterator[bool]:
    """Gives True if nobody uses what a file stands for, and keeps it so; False if somebody may."""
    try:
        descriptor = os.open(path, READ)
    except OSError:  # not there or damaged: nobody can use it
        yield True
        return
    try:
        if os.name == "nt":  # moving it will tell; our own open file would be in the way
            os.close(descriptor)
            descriptor = -1
            yield True
        else:
            yield _is_locked(descriptor, is_shared=False) is True
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _is_locked(descriptor: int, *, is_shared: bool) -> bool | None:
    """Takes a lock; False if another holds it, None where there are no locks."""
    if os.name == "nt":
        return None
    import fcntl

    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _is_still(descriptor: int, path: Path) -> bool:
    """True if the file was not moved away between opening and locking it."""
    return os.path.samestat(os.fstat(descriptor), path.stat())


class HeldSession:
    """A session whose engine is in use until it is closed."""

    def __init__(self, session: Session, hold: Hold) -> None:
        self.inputs = session.inputs
        self.outputs = session.outputs
        self.facts: Mapping[str, str] = session.facts
        self._session = session
        self._hold: Hold | None = hold

    def run(self, feeds: Arrays) -> dict[str, Any]:  # Any: numpy.ndarray
        """As the session's."""
        return self._session.run(feeds)

    def close(self) -> None:
        """As the session's; then others may remove the engine."""
        self._session.close()
        if self._hold is not None:
            self._hold.close()
            self._hold = None


@dataclass(frozen=True, kw_only=True)
class LastUse:
    """When an engine was asked for, and the graph that it was asked for with.

    Attributes:
        at_s: Seconds since 1970.
        onnx: Path of the component's graph then; empty if unknown.
    """

    at_s: float
    onnx: str = ""


def record_use(memo: Path, key: str, *, onnx: Path) -> None:
    """Remembers that an engine is used now; losing it only makes the engine look older."""
    note = _note(memo, key)
    with suppress(OSError):
        if _read(note) == str(onnx):
            os.utime(note)
        else:
            write_whole(note, json.dumps({"onnx": str(onnx)}).encode("utf-8", "surrogatepass"))


def last_use(memo: Path, key: str) -> LastUse | None:
    """Returns when an engine was used last; None if that is not known."""
    note = _note(memo, key)
    try:
        return LastUse(at_s=note.stat().st_mtime, onnx=_read(note) or "")
    except OSError:
        return None


def forget_use(memo: Path, key: str) -> None:
    """Forgets an engine that is gone."""
    with suppress(OSError):
        _note(memo, key).unlink(missing_ok=True)


def _note(memo: Path, key: str) -> Path:
    return memo / "uses" / key[:2] / f"{key}.json"


def _read(note: Path) -> str | None:
    try:
        saved = json.loads(note.read_text(encoding="utf-8"))
        return str(saved["onnx"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
