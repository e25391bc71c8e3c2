"""Finds the folders of this machine, and the user names in them, in what is to leave it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from .errors import CacheError

MIN_NEEDLE_BYTES = 7
"""A shorter run of bytes turns up in gigabytes of weights by chance."""


class PathFinder:
    """Looks for folders as text, in UTF-8 and as Windows writes it."""

    def __init__(self, folders: Iterable[Path]) -> None:
        """`folders` are looked for with what their links lead to."""
        names: set[str] = set()
        for folder in folders:
            for place in (folder.absolute(), Path(os.path.realpath(folder))):
                names |= {f"{place}{os.sep}", f"{place.as_posix()}/"}
        codings = ("utf-8", "utf-16-le")
        needles = [
            (name, name.encode(coding, "surrogatepass")) for name in names for coding in codings
        ]
        self._needles = [(n, raw) for n, raw in sorted(needles) if len(raw) >= MIN_NEEDLE_BYTES]

    def checked(self, pieces: Iterable[bytes], what: str) -> Iterator[bytes]:
        """Passes pieces on, and compares across their borders too.

        Raises:
            CacheError: A folder is named in them.
        """
        keep = max((len(raw) for _, raw in self._needles), default=1) - 1
        tail = b""
        for piece in pieces:
            # What lies across the border, then the piece itself: no copy of a whole piece.
            self._compare(tail + piece[:keep], what)
            self._compare(piece, what)
            tail = (tail + piece[-keep:])[-keep:]
            yield piece

    def require_none(self, pieces: Iterable[bytes], what: str) -> None:
        """Raises as `checked` does."""
        for _ in self.checked(pieces, what):
            pass

    def _compare(self, data: bytes, what: str) -> None:
        for name, raw in self._needles:
            if raw in data:
                raise CacheError(
                    f"{what} names a folder of this machine, '{name}', and would tell it to others",
                    "build the engine again from a folder, and with a --home, that may be known",
                )
