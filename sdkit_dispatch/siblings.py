"""Engines that a new one may build upon: of the same graph and options, of another size or weights.

A vendor may give a new engine a file of theirs, as a hard link: then size buckets share one copy of
the weights. What a file holds is known by its digest all the same, and each entry of the store
stays whole when another one goes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from .cache import EngineStore, Entry, StoredFile
from .contract import BuildRequest, Engine
from .errors import CacheError
from .pipeline_files import remember_digest

MOST = 4
"""Siblings that are looked at: each is compared with its manifest first."""

FileId = tuple[int, int, int, int]
"""Device, inode, size and modification time: what tells that a file is a sibling's, unchanged."""


def siblings_of(store: EngineStore, request: BuildRequest, *, onnx: Path) -> tuple[Engine, ...]:
    """Returns checked engines that differ from `request` in shapes or in weights, not in both.

    Those of the same weights come first, then the newest. They are in use until the caller lets
    them go, but do not count as used: neither the quota nor `last_use` may take them for engines
    that somebody runs. Left out is one that computes wrong numbers on some device here.
    """
    engines = []
    for entry in checked_siblings(store, request)[:MOST]:
        assert entry.manifest is not None
        try:
            hit = store.look_up(entry.manifest.request, onnx=onnx, is_use=False)
        except CacheError:
            continue
        if hit is not None:
            engines.append(hit[0])
    return tuple(engines)


def checked_siblings(store: EngineStore, request: BuildRequest) -> list[Entry]:
    """Returns the entries of `siblings_of`, best first; their files are not looked at."""
    found = []
    for entry in store.of_graph(request.graph_digest):
        if entry.manifest is None or entry.damage:
            continue
        # What nobody checked, an import say, must not pass a file on to what is built here.
        if entry.manifest.verdict.status != "passed" or store.has_failed(entry.key):
            continue
        other = entry.manifest.request
        is_same = {
            "weights": other.weights_digest == request.weights_digest,
            "shapes": dict(other.shapes) == dict(request.shapes),
        }
        alike = replace(other, shapes=request.shapes, weights_digest=request.weights_digest)
        if sum(is_same.values()) == 1 and alike.key == request.key:
            found.append((is_same["weights"], entry.manifest.created_at, entry))
    return [entry for _, _, entry in sorted(found, key=lambda one: one[:2], reverse=True)]


def known_files(store: EngineStore, engines: Iterable[Engine]) -> dict[FileId, StoredFile]:
    """Returns what the manifests of verified engines say of their files: it needs no new look."""
    known = {}
    for engine in engines:
        entry = store.read(engine.key)
        if entry is not None and entry.manifest is not None:
            for name, stored in entry.manifest.files.items():
                known[file_id(entry.folder / name)] = stored
    return known


def file_id(path: Path) -> FileId:
    """Returns what tells a file from every other, and from itself after a change."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def remember_files(
    store: EngineStore,
    files: Mapping[str, StoredFile],
    folder: Path,
    *,
    siblings: Sequence[Engine],
    sealed_ns: int,
) -> None:
    """Spares the next look at files that were hashed just now, and at the siblings' that they are.

    A new link changes a file's status, after which every name of it would be hashed again.
    """
    ours = {file_id(folder / name): stored for name, stored in files.items()}
    paths = [folder / name for name in files]
    for engine in siblings:
        paths += [path for path in Path(engine.folder).rglob("*") if path.is_file()]
    for path in paths:
        stored = ours.get(file_id(path))
        if stored is not None:
            remember_digest(path, stored.sha256, memo=store.memo, hashed_ns=sealed_ns)


def disk_bytes(folders: Iterable[Path]) -> int:
    """Returns how much all files below some folders take, a shared one counted once."""
    sizes = {}
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                found = (Path(parent) / name).lstat()
                sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())
