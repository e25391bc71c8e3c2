"""Which stored engines were built from which graph: a memo that may be lost, and is made again.

Without it the manifest of every engine would be read before each build, to find those that a new
engine may build upon: half a millisecond an engine.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

COMPLETE = "complete"
KEY = re.compile(r"[0-9a-f]{64}")


def note_engine(memo: Path, graph_digest: str, key: str) -> None:
    """Remembers an engine; one that is gone is simply not found later."""
    path = _file(memo, graph_digest)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="ascii") as stream:
            stream.write(f"{key}\n")


def note_all(memo: Path, engines: Iterable[tuple[str, str]]) -> None:
    """Remembers all engines of a store: their graphs' digests and keys."""
    for graph_digest, key in engines:
        note_engine(memo, graph_digest, key)
    with suppress(OSError):
        (memo / "by-graph" / COMPLETE).touch()


def are_noted(memo: Path) -> bool:
    """True if every engine of the store is remembered."""
    return (memo / "by-graph" / COMPLETE).is_file()


def keys_of_graph(memo: Path, graph_digest: str) -> list[str]:
    """Returns the keys of engines of a graph, some of which may be gone, in their order."""
    try:
        text = _file(memo, graph_digest).read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return sorted({line for line in text.splitlines() if KEY.fullmatch(line)})


def _file(memo: Path, graph_digest: str) -> Path:
    # Hashed again: a digest from a bundle may be any text.
    name = hashlib.sha256(graph_digest.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return memo / "by-graph" / name
