"""Merged pipelines in the home folder: which there are, and whether they are whole.

<home>/merged/<key>/    a pipeline folder, and a manifest.json with the sha256 of every file

As an engine does, one appears whole, is never modified afterwards, is compared with its manifest
before it is used, and is in use while somebody holds it.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sdkit_dispatch.cache import EngineStore, Entry, StoredFile
from sdkit_dispatch.contract import SCHEMA_VERSION
from sdkit_dispatch.errors import PipelineError
from sdkit_dispatch.pipeline_files import file_digest
from sdkit_dispatch.store_layout import merged_folder
from sdkit_dispatch.store_manifest import MANIFEST, read_sealed
from sdkit_dispatch.store_use import Hold, hold_engine, record_use

from .wish import AppliedLora

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MergedManifest:
    """What stands beside the files of a merged pipeline; `files` as in an engine's manifest."""

    key: str
    files: Mapping[str, StoredFile]
    loras: tuple[AppliedLora, ...]
    created_at: str
    tool: str
    schema: int = SCHEMA_VERSION


def merged_entries(store: EngineStore) -> Iterator[Entry]:
    """Yields the merged pipelines of the store's own home, in the order of their keys."""
    for folder in sorted(merged_folder(store.home).glob("*")):
        if folder.is_dir():
            yield Entry(key=folder.name, folder=folder, manifest=None, what="merged")


def merged_damage(entry: Entry, *, memo: Path | None = None) -> str:
    """Compares a merged pipeline with its manifest; empty if nothing is wrong.

    Args:
        entry: Of `merged_entries`.
        memo: Where digests of unchanged files are remembered; None: every file is hashed.
    """
    try:
        manifest = read_sealed(entry.folder / MANIFEST, MergedManifest)
    except (OSError, ValueError, RecursionError) as error:
        return f"{MANIFEST}: {error}"
    if manifest.key != entry.key or manifest.schema != SCHEMA_VERSION:
        return f"{MANIFEST} belongs to another pipeline"
    there = {
        path.relative_to(entry.folder).as_posix()
        for path in entry.folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    } - {MANIFEST}
    for name in sorted(there ^ set(manifest.files)):
        return f"'{name}' is {'missing' if name in manifest.files else 'not in the manifest'}"
    for name, stored in manifest.files.items():
        path = entry.folder / name
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            return f"'{name}' is not a plain file"
        if found.st_size != stored.size_bytes:
            return f"'{name}' has {found.st_size} bytes, not {stored.size_bytes}"
        try:
            digest = file_digest(path, memo=memo)
        except PipelineError as error:
            return error.message
        if digest != stored.sha256:
            return f"the content of '{name}' has changed (sha256 {digest[:12]})"
    return ""


def look_up(store: EngineStore, key: str) -> tuple[Path, MergedManifest, Hold] | None:
    """Returns a whole merged pipeline, which is in use until the hold is closed; None if none."""
    for home in store.homes:
        folder = merged_folder(home) / key
        hold = hold_engine(folder)
        if hold is None:
            continue
        damage = merged_damage(
            Entry(key=key, folder=folder, manifest=None, what="merged"), memo=store.memo
        )
        if not damage:
            record_use(store.memo, key, onnx=folder)
            return folder, read_sealed(folder / MANIFEST, MergedManifest), hold
        hold.close()
        log.warning("the merged pipeline %s in '%s' is damaged: %s", key[:12], home, damage)
    return None
