"""How many engines are compiled at a time on one host, and who compiles now.

Compilers fill the memory of a card, and two at once on one host were seen to crash. A slot is a
lock that the operating system frees; the note beside it only tells those who wait.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from .contract import record_from_json, record_to_json
from .whole_file import write_whole

POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Occupant:
    """The process that holds a slot.

    Attributes:
        what: "unet for tensorrt".
        since_s: Seconds since 1970.
    """

    pid: int
    what: str
    since_s: float

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since_s).strftime("%H:%M:%S")
        return f"{self.what}, pid {self.pid}, since {since}"


@contextmanager
def build_slot(
    locks: Path, what: str, *, count: int, while_waiting: Callable[[Occupant | None], None]
) -> Iterator[None]:
    """Holds one of the `count` slots of this host below a folder of locks.

    Args:
        locks: A folder that exists; hosts that share it have slots of their own.
        what: Is being built, for those who wait.
        count: How many builds may run at a time.
        while_waiting: Called about every 50 ms with who holds the first slot; may raise.
    """
    import filelock

    slots = [_lock_file(locks, number) for number in range(count)]
    while True:
        for path in slots:
            lock = filelock.FileLock(path)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                continue
            note = path.with_suffix(".json")
            try:
                _introduce(note, what)
                yield
            finally:
                with suppress(OSError):
                    note.unlink(missing_ok=True)
                lock.release()
            return
        while_waiting(first_occupant(locks))
        time.sleep(POLL_S)


def first_occupant(locks: Path) -> Occupant | None:
    """Returns who builds on this host now, the holder of the first slot; None if nobody says so."""
    note = _lock_file(locks, 0).with_suffix(".json")
    try:
        return record_from_json(Occupant, json.loads(note.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None


def _lock_file(locks: Path, number: int) -> Path:
    host = re.sub(r"[^A-Za-z0-9-]", "-", platform.node())[:64]
    return locks / f"build-{host}-{number}.lock"


def _introduce(note: Path, what: str) -> None:
    occupant = Occupant(pid=os.getpid(), what=what, since_s=time.time())
    with suppress(OSError):
        write_whole(note, json.dumps(record_to_json(occupant)).encode())
