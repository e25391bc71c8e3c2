"""The content-addressed engine store.

`store_layout` draws its folders. An entry appears by one rename, after its files are on the disk.
A manifest records the size and sha256 of every file; they are compared before an engine is handed
out, because no vendor's runtime notices a flipped byte in the weights: OpenVINO, ONNX Runtime and
IREE all load it. (A large file is hashed again only when its size, inode or times changed:
`pipeline_files.file_digest`.)

Shared stores lie below the user's: their engines are handed out with the same checks, and never
written. A store that cannot be written retreats into a temporary folder, and becomes a shared one.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .contract import SCHEMA_VERSION, BuildRequest, Engine, record_from_json, record_to_json
from .errors import CacheError, PipelineError
from .pipeline_files import file_digest
from .store_graphs import are_noted, keys_of_graph, note_all, note_engine
from .store_layout import (
    engine_folder,
    engines_folder,
    intruder,
    layout_problem,
    make_private,
    merged_folder,
    prepare,
    store_error,
)
from .store_manifest import (
    MANIFEST,
    LaterVerdict,
    Manifest,
    StoredFile,
    Verdict,
    VerdictStatus,
    new_manifest,
    read_manifest,
    write_manifest,
)
from .store_use import Hold, forget_use, hold_engine, record_use, unused_engine
from .temporary_home import TemporaryHome
from .whole_file import read_note, sweep_partials, write_note

__all__ = [
    "MANIFEST",
    "EngineStore",
    "Entry",
    "LaterVerdict",
    "Manifest",
    "StoredFile",
    "Verdict",
    "VerdictStatus",
    "new_manifest",
]

LOCK_POLL_S = 0.05
KEY_DIGITS = frozenset("0123456789abcdef")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One folder of the store: its manifest, or what is wrong with it.

    Attributes:
        is_shared: It is in a store that is not ours to write.
        what: "merged": a pipeline with LoRAs in its weights, which has another kind of manifest.
    """

    key: str
    folder: Path
    manifest: Manifest | None
    damage: str = ""
    is_shared: bool = False
    what: Literal["engine", "merged"] = "engine"


class EngineStore:
    """The engines below one home folder, and those of the shared stores below it."""

    def __init__(self, home: Path, *, shared: Sequence[Path] = ()) -> None:
        self.home = home
        self._shared = tuple(shared)
        self._holds: dict[str, Hold] = {}
        self._removed: set[str] = set()
        self._refuge: TemporaryHome | None = None

    @property
    def memo(self) -> Path:
        """Folder of memos that may be lost at any time."""
        return self.home / "scratch"

    @property
    def homes(self) -> tuple[Path, ...]:
        """Home folders in the order in which engines are looked for; only the first is written."""
        return (self.home, *self._shared)

    @property
    def is_temporary(self) -> bool:
        """True if nothing that is built now is kept."""
        return self._refuge is not None

    def folder(self, key: str) -> Path:
        """Where the engine with this key is, or would be built; or the merged pipeline."""
        merged = merged_folder(self.home) / key
        return merged if merged.is_dir() else engine_folder(self.home, key)

    def look_up(
        self, request: BuildRequest, *, onnx: Path, is_use: bool = True
    ) -> tuple[Engine, Manifest] | None:
        """Returns the engine of `request`, its files compared with the manifest; None on a miss.

        It is in use until `let_go`, so that nobody evicts it.

        Args:
            request: What the engine must have been built from.
            onnx: The component's graph on this machine, for an engine that maps its weights.
            is_use: False: it is not asked for itself, and does not count as used now.

        Raises:
            CacheError: There is an entry of ours, and it is damaged.
        """
        for home in self.homes:
            entry = self._read(home, request.key)
            if entry is None or (entry.is_shared and entry.key in self._removed):
                continue
            if not entry.damage and not self._hold(entry):
                continue  # it is being removed right now
            damage, hint = (entry.damage, "") if entry.damage else self._damage(entry)
            if damage and entry.is_shared:
                log.warning("the engine %s in '%s' is not used: %s", entry.key[:12], home, damage)
            elif damage or entry.manifest is None:
                raise CacheError(
                    f"the stored engine {entry.key[:12]} is damaged: {damage}",
                    hint or f"sdkit-dispatch cache remove {entry.key[:12]}",
                )
            else:
                if is_use:
                    record_use(self.memo, entry.key, onnx=onnx)
                folder = str(entry.folder)
                engine = Engine(key=entry.key, request=request, folder=folder, onnx=str(onnx))
                return engine, entry.manifest
        return None

    def _hold(self, entry: Entry) -> bool:
        hold = hold_engine(entry.folder)
        if hold is None:
            return False
        self._let_go(entry.key)
        self._holds[entry.key] = hold
        return True

    def _let_go(self, key: str) -> None:
        hold = self._holds.pop(key, None)
        if hold is not None:
            hold.close()

    def let_go(self, keys: Iterable[str] | None = None) -> None:
        """Ends the use of engines that were looked up or published; of all by default."""
        for key in list(self._holds if keys is None else keys):
            self._let_go(key)

    def read(self, key: str) -> Entry | None:
        """Returns the entry with this key without reading its files; None if there is none."""
        for home in self.homes:
            entry = self._read(home, key)
            if entry is not None:
                return entry
        return None

    def _read(self, home: Path, key: str) -> Entry | None:
        folder, is_shared = engine_folder(home, key), home != self.home
        if not os.path.lexists(folder) or layout_problem(home):
            return None
        manifest, damage = None, ""
        try:
            manifest = read_manifest(folder / MANIFEST)
        except (OSError, ValueError, RecursionError) as error:
            if not os.path.lexists(folder):  # it was removed meanwhile
                return None
            damage = f"{MANIFEST}: {error}"
        else:
            if manifest.schema != SCHEMA_VERSION:
                damage = f"{MANIFEST} has the schema {manifest.schema}, not {SCHEMA_VERSION}"
            elif manifest.verdict.status == "failed":
                damage = "it failed the numeric gate"
            elif not manifest.key == key == manifest.request.key:
                damage = f"{MANIFEST} belongs to the engine {manifest.request.key[:12]}"
        return Entry(key=key, folder=folder, manifest=manifest, damage=damage, is_shared=is_shared)

    def entries(self) -> Iterator[Entry]:
        """Yields every entry, damaged and shared ones too, in the order of homes and keys."""
        for home in self.homes:
            problem = layout_problem(home)
            if problem:
                log.warning("%s", problem)
                continue
            for folder in sorted(engines_folder(home).glob("??/*")):
                entry = self._read(home, folder.name)
                if entry is not None:
                    yield entry

    def of_graph(self, graph_digest: str) -> Iterator[Entry]:
        """Yields the entries of ours that were built from a graph, damaged ones too."""
        if not are_noted(self.memo):
            note_all(
                self.memo,
                (
                    (entry.manifest.request.graph_digest, entry.key)
                    for entry in self.entries()
                    if entry.manifest is not None and not entry.is_shared
                ),
            )
        for key in keys_of_graph(self.memo, graph_digest):
            entry = self._read(self.home, key)
            if entry is not None:
                yield entry

    def find(self, prefix: str) -> list[Entry]:
        """Returns the entries whose key starts with `prefix`."""
        if not prefix or set(prefix) - KEY_DIGITS:
            return []
        shelf = prefix[:2] if len(prefix) > 1 else f"{prefix}?"
        found = {
            path.name: entry
            for home in reversed(self.homes)
            for path in engines_folder(home).glob(f"{shelf}/{prefix}*")
            if (entry := self._read(home, path.name)) is not None
        }
        return [found[key] for key in sorted(found)]

    def verify(self, entry: Entry) -> str:
        """Hashes every file of an entry. Returns what is wrong with it; empty if nothing is."""
        return entry.damage or self._damage(entry, must_hash=True)[0]

    def _damage(self, entry: Entry, *, must_hash: bool = False) -> tuple[str, str]:
        """Returns what is wrong with the files of an entry, and a hint; empty if nothing is."""
        assert entry.manifest is not None
        there = {
            path.relative_to(entry.folder).as_posix()
            for path in entry.folder.rglob("*")
            if not path.is_dir() or path.is_symlink()
        } - {MANIFEST}
        expected = entry.manifest.files
        for name in sorted(there ^ set(expected)):
            return f"'{name}' is {'missing' if name in expected else 'not in the manifest'}", ""
        who, hint = intruder(entry.folder)
        if who:
            return who, hint
        memo = None if must_hash else self.memo
        for name, stored in expected.items():
            path = entry.folder / name
            if path.is_symlink() or not path.is_file():
                return f"'{name}' is not a plain file", ""
            size_bytes = path.stat().st_size
            if size_bytes != stored.size_bytes:
                return f"'{name}' has {size_bytes} bytes, not {stored.size_bytes}", ""
            try:
                digest = file_digest(path, memo=memo)
            except PipelineError as error:
                return error.message, ""
            if digest != stored.sha256:
                return f"the content of '{name}' has changed (sha256 {digest[:12]})", ""
        return "", ""

    @contextlib.contextmanager
    def locked(
        self, key: str, *, while_waiting: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Holds the one lock of a key; the operating system frees it if we die.

        Args:
            key: Of the engine to be built.
            while_waiting: Called every 50 ms while another process holds it; may raise.

        Raises:
            CacheError: The store has another layout.
            OSError: It cannot be written.
        """
        import filelock

        prepare(self.home)
        lock = filelock.FileLock(self.locks / f"{key}.lock")
        while True:
            try:
                lock.acquire(timeout=LOCK_POLL_S, poll_interval=LOCK_POLL_S)
                break
            except filelock.Timeout:
                while_waiting()
        try:
            yield
        finally:
            lock.release()

    @property
    def locks(self) -> Path:
        """Folder of locks."""
        return self.home / "locks"

    @property
    def _tmp(self) -> Path:
        return self.home / "tmp"

    @contextlib.contextmanager
    def workshop(self, key: str) -> Iterator[Path]:
        """Gives an empty folder to build in; hold the key's lock. It is gone afterwards."""
        prepare(self.home)
        for leftover in self._tmp.glob(f"{key}-*"):  # its builder was killed: we have its lock
            shutil.rmtree(leftover, ignore_errors=True)
        self.sweep()
        folder = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=self._tmp))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def sweep(self) -> int:
        """Removes what killed processes left: folders in `tmp`, files half written; how many."""
        import filelock

        noted = ("locks", "failures", "references", self.memo.name)
        removed = sum(sweep_partials(self.home / name) for name in noted)
        # What is below these is large, and holds no notes.
        for place in (self.home, engines_folder(self.home)):
            removed += sweep_partials(place, is_deep=False)
        for leftover in list(self._tmp.glob("*-*")):
            key = leftover.name.partition("-")[0]
            lock = filelock.FileLock(self.locks / f"{key}.lock")
            with contextlib.suppress(filelock.Timeout, OSError), lock.acquire(timeout=0):
                shutil.rmtree(leftover, ignore_errors=True)
                removed += 1
        return removed

    def seal(
        self, folder: Path, known: Mapping[tuple[int, int, int, int], StoredFile] | None = None
    ) -> dict[str, StoredFile]:
        """Returns size and digest of every file that a vendor wrote, forced to the disk.

        Args:
            folder: That the vendor wrote.
            known: Device, inode, size and mtime of files whose digest is known: hard links.

        Raises:
            CacheError: There is none, or one that is not a plain file.
        """
        files: dict[str, StoredFile] = {}
        for path in sorted(folder.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                continue
            name = path.relative_to(folder).as_posix()
            if path.is_symlink() or not path.is_file() or name == MANIFEST:
                raise CacheError(f"the vendor wrote '{name}', which an engine may not hold")
            _flush(path)
            found = path.stat()
            linked = (known or {}).get(
                (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            )
            files[name] = linked or StoredFile(size_bytes=found.st_size, sha256=file_digest(path))
        if not files:
            raise CacheError("the vendor wrote no file")
        return files

    def publish(self, folder: Path, manifest: Manifest) -> None:
        """Moves a finished engine from its workshop into the store; hold the key's lock.

        It is in use until `let_go`.
        """
        note_engine(self.memo, manifest.request.graph_digest, manifest.key)
        write_manifest(folder / MANIFEST, manifest)
        make_private(folder)
        target = self.folder(manifest.key)
        self.remove(manifest.key)  # with what the gate said of it later
        self.move_in(folder, target)
        self._removed.discard(manifest.key)
        self._hold(Entry(key=manifest.key, folder=target, manifest=manifest))

    @staticmethod
    def move_in(folder: Path, target: Path) -> None:
        """Moves a folder with a manifest, whose files are on the disk, into the store."""
        _flush(folder / MANIFEST)
        for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            _flush(place)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(folder, target)
        _flush(target.parent)

    def later_verdict(self, key: str, device: str) -> LaterVerdict | None:
        """Returns what the gate said of an unchecked engine when `device` first loaded it."""
        return _read_later(self._later_note(key, device))

    def has_failed(self, key: str) -> bool:
        """True if the gate refused an engine on some device that loaded it later."""
        notes = (self.memo / "verdicts" / key[:2]).glob(f"{key}-*.json")
        known = filter(None, map(_read_later, notes))
        return any(later.verdict.status == "failed" for later in known)

    def keep_later_verdict(self, key: str, device: str, later: LaterVerdict) -> None:
        """Remembers it beside the engine, which is never modified; losing it costs a check."""
        with contextlib.suppress(OSError):
            write_note(self._later_note(key, device), record_to_json(later))

    def _later_note(self, key: str, device: str) -> Path:
        name = hashlib.sha256(device.encode()).hexdigest()[:16]
        return self.memo / "verdicts" / key[:2] / f"{key}-{name}.json"

    def remove(self, key: str) -> bool:
        """Takes an entry of ours out of the store by one rename; False if there was none.

        One of a shared store stays where it is, and is not handed out to this process any more.

        Raises:
            OSError: It cannot be moved: the store is read-only, or (Windows) it is in use.
        """
        self._let_go(key)
        self._removed.add(key)
        folder = self.folder(key)
        is_there = os.path.lexists(folder)
        if is_there:
            prepare(self.home)
            grave = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=self._tmp))
            try:
                os.replace(folder, grave / "removed")
            finally:
                shutil.rmtree(grave, ignore_errors=True)
        forget_use(self.memo, key)
        for note in (self.memo / "verdicts" / key[:2]).glob(f"{key}-*.json"):
            note.unlink(missing_ok=True)  # the next engine of this key has its own verdict
        return is_there

    def evict(self, key: str) -> bool:
        """Removes an entry of ours unless it is in use or being built; False if it stays."""
        import filelock

        try:
            prepare(self.home)
            with (
                filelock.FileLock(self.locks / f"{key}.lock").acquire(timeout=0),
                unused_engine(self.folder(key)) as is_unused,
            ):
                return is_unused and self.remove(key)
        except (filelock.Timeout, OSError, CacheError):
            return False

    def retreat(self, reason: str) -> None:
        """Builds in a temporary folder from now on; what is stored is still handed out.

        Raises:
            CacheError: There is no temporary folder either.
        """
        try:
            refuge = TemporaryHome()
        except OSError as error:
            raise store_error(f"{reason}; and no temporary folder can be made: {error}") from error
        log.warning("%s; engines are built in '%s' and not kept", reason, refuge.folder)
        self._shared = self.homes
        self._refuge, self.home = refuge, refuge.folder

    def close(self) -> None:
        """Ends the use of all engines, and takes a temporary store away; twice is fine."""
        self.let_go()
        if self._refuge is not None:
            self._refuge.close()


def _read_later(note: Path) -> LaterVerdict | None:
    with contextlib.suppress(ValueError):
        return record_from_json(LaterVerdict, read_note(note))
    return None


def _flush(path: Path) -> None:
    """Forces a file, or the entries of a folder, to the disk. Windows cannot open a folder."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
