"""The content-addressed engine store.

    <home>/engines/ab/<key>/manifest.json and the vendor's files; never modified once there
    <home>/locks/<key>.lock                one builder a key; the operating system frees it
    <home>/tmp/<key>-<random>/             an engine being built; swept by the next builder
    <home>/scratch/                        memos that may be lost at any time

An entry appears by one rename, after its files are on the disk. A manifest records the size and
sha256 of every file; they are compared before an engine is handed out, because no vendor's runtime
notices a flipped byte in the weights: OpenVINO, ONNX Runtime and IREE all load it. (A large file is
hashed again only when its size, inode or times changed: `pipeline_files.file_digest`.)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from .contract import (
    SCHEMA_VERSION,
    BuildRequest,
    Engine,
    record_from_json,
    record_to_json,
)
from .errors import CacheError, PipelineError
from .pipeline_files import file_digest
from .whole_file import read_note, sweep_partials, write_note

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 4 << 20
LOCK_POLL_S = 0.05

VerdictStatus = Literal["passed", "failed", "unchecked", "unchecked-target"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the numeric gate said of an engine.

    Attributes:
        metrics: Output name -> metric name -> value, the worst over all checked inputs.
        limits: Metric name -> the value that was allowed.
        device: Where it was checked: id and driver.
    """

    status: VerdictStatus
    reason: str = ""
    reference: str = ""
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """Size and sha256 of one file of an engine."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What stands beside an engine's files.

    Attributes:
        files: Relative POSIX path -> size and digest; complete.
        facts: What the loaded session said of itself: device, precision, runtime.
        earlier: Verdicts of attempts at other precisions that failed, oldest first.
        created_at: UTC, ISO 8601.
    """

    key: str
    request: BuildRequest
    files: Mapping[str, StoredFile]
    verdict: Verdict
    build_s: float
    created_at: str
    tool: str
    facts: Mapping[str, str] = field(default_factory=dict)
    earlier: tuple[Verdict, ...] = ()
    schema: int = SCHEMA_VERSION

    @property
    def size_bytes(self) -> int:
        """Size of all files of the engine."""
        return sum(entry.size_bytes for entry in self.files.values())


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One folder of the store: its manifest, or what is wrong with it."""

    key: str
    folder: Path
    manifest: Manifest | None
    damage: str = ""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A field in which a request differs from the nearest engine in the store."""

    field: str
    wanted: str
    stored: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Whether an engine is stored, and what differs from the nearest one if it is not."""

    component: str
    key: str
    status: Literal["hit", "miss", "damaged"]
    message: str
    differences: tuple[Difference, ...] = ()


class EngineStore:
    """The engines below one home folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._engines = home / "engines"
        self._locks = home / "locks"
        self._tmp = home / "tmp"
        self.memo = home / "scratch"

    def folder(self, key: str) -> Path:
        """Where the engine with this key is, or would be."""
        return self._engines / key[:2] / key

    def look_up(self, request: BuildRequest, *, onnx: Path) -> tuple[Engine, Manifest] | None:
        """Returns the engine of `request`, its files compared with the manifest; None on a miss.

        Args:
            request: What the engine must have been built from.
            onnx: The component's graph on this machine, for an engine that maps its weights.

        Raises:
            CacheError: There is an entry, and it is damaged.
        """
        entry = self.read(request.key)
        if entry is None:
            return None
        damage = entry.damage or self._damage(entry)
        if damage or entry.manifest is None:
            raise CacheError(
                f"the stored engine {entry.key[:12]} is damaged: {damage}",
                f"sdkit-dispatch cache remove {entry.key[:12]}",
            )
        engine = Engine(key=entry.key, request=request, folder=str(entry.folder), onnx=str(onnx))
        return engine, entry.manifest

    def read(self, key: str) -> Entry | None:
        """Returns the entry with this key without reading its files; None if there is none."""
        folder = self.folder(key)
        if not os.path.lexists(folder):
            return None
        manifest, damage = None, ""
        try:
            manifest = _read_manifest(folder / MANIFEST)
        except (OSError, ValueError, RecursionError) as error:
            return Entry(key=key, folder=folder, manifest=None, damage=f"{MANIFEST}: {error}")
        if manifest.schema != SCHEMA_VERSION:
            damage = f"{MANIFEST} has the schema {manifest.schema}, not {SCHEMA_VERSION}"
        elif manifest.verdict.status == "failed":
            damage = "it failed the numeric gate"
        elif not manifest.key == key == manifest.request.key:
            damage = f"{MANIFEST} belongs to the engine {manifest.request.key[:12]}"
        return Entry(key=key, folder=folder, manifest=manifest, damage=damage)

    def entries(self) -> Iterator[Entry]:
        """Yields every entry, damaged ones too, in the order of their keys."""
        for folder in sorted(self._engines.glob("??/*")):
            entry = self.read(folder.name)
            if entry is not None:
                yield entry

    def find(self, prefix: str) -> list[Entry]:
        """Returns the entries whose key starts with `prefix`."""
        if not prefix or set(prefix) - set("0123456789abcdef"):
            return []
        shelf = prefix[:2] if len(prefix) > 1 else f"{prefix}?"
        keys = [path.name for path in sorted(self._engines.glob(f"{shelf}/{prefix}*"))]
        return [entry for key in keys if (entry := self.read(key)) is not None]

    def verify(self, entry: Entry) -> str:
        """Hashes every file of an entry. Returns what is wrong with it; empty if nothing is."""
        return entry.damage or self._damage(entry, memo=None)

    def _damage(self, entry: Entry, *, memo: Path | None | Literal["own"] = "own") -> str:
        assert entry.manifest is not None
        there = {
            path.relative_to(entry.folder).as_posix()
            for path in entry.folder.rglob("*")
            if not path.is_dir() or path.is_symlink()
        } - {MANIFEST}
        expected = entry.manifest.files
        for name in sorted(there ^ set(expected)):
            return f"'{name}' is {'missing' if name in expected else 'not in the manifest'}"
        for name, stored in expected.items():
            path = entry.folder / name
            if path.is_symlink() or not path.is_file():
                return f"'{name}' is not a plain file"
            size_bytes = path.stat().st_size
            if size_bytes != stored.size_bytes:
                return f"'{name}' has {size_bytes} bytes, not {stored.size_bytes}"
            try:
                digest = file_digest(path, memo=self.memo if memo == "own" else memo)
            except PipelineError as error:
                return error.message
            if digest != stored.sha256:
                return f"the content of '{name}' has changed (sha256 {digest[:12]})"
        return ""

    @contextlib.contextmanager
    def locked(
        self, key: str, *, while_waiting: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Holds the one lock of a key; the operating system frees it if we die.

        Args:
            key: Of the engine to be built.
            while_waiting: Called every 50 ms while another process holds it; may raise.
        """
        import filelock

        self._locks.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self._locks / f"{key}.lock")
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

    @contextlib.contextmanager
    def workshop(self, key: str) -> Iterator[Path]:
        """Gives an empty folder to build in; hold the key's lock. It is gone afterwards."""
        self._tmp.mkdir(parents=True, exist_ok=True)
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

        removed = sum(sweep_partials(place) for place in (self.home / "references", self.memo))
        for leftover in list(self._tmp.glob("*-*")):
            key = leftover.name.partition("-")[0]
            lock = filelock.FileLock(self._locks / f"{key}.lock")
            with contextlib.suppress(filelock.Timeout, OSError), lock.acquire(timeout=0):
                shutil.rmtree(leftover, ignore_errors=True)
                removed += 1
        return removed

    def seal(self, folder: Path) -> dict[str, StoredFile]:
        """Returns size and digest of every file that a vendor wrote, forced to the disk.

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
            files[name] = StoredFile(size_bytes=path.stat().st_size, sha256=file_digest(path))
        if not files:
            raise CacheError("the vendor wrote no file")
        return files

    def publish(self, folder: Path, manifest: Manifest) -> None:
        """Moves a finished engine from its workshop into the store; hold the key's lock."""
        content = record_to_json(manifest)
        text = json.dumps({"sha256": _seal(content), "manifest": content}, indent=1)
        (folder / MANIFEST).write_text(text, encoding="utf-8")
        _flush(folder / MANIFEST)
        for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            _flush(place)
        target = self.folder(manifest.key)
        self.remove(manifest.key)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(folder, target)
        _flush(target.parent)

    def later_verdict(self, key: str, device: str) -> Verdict | None:
        """Returns what the gate said of an unchecked engine when `device` first loaded it."""
        with contextlib.suppress(ValueError):
            return record_from_json(Verdict, read_note(self._later_note(key, device)))
        return None

    def keep_later_verdict(self, key: str, device: str, verdict: Verdict) -> None:
        """Remembers it beside the engine, which is never modified; losing it costs a check."""
        with contextlib.suppress(OSError):
            write_note(self._later_note(key, device), record_to_json(verdict))

    def _later_note(self, key: str, device: str) -> Path:
        name = hashlib.sha256(device.encode()).hexdigest()[:16]
        return self.memo / "verdicts" / f"{key}-{name}.json"

    def remove(self, key: str) -> bool:
        """Takes an entry out of the store by one rename; False if there was none."""
        folder = self.folder(key)
        if not os.path.lexists(folder):
            return False
        self._tmp.mkdir(parents=True, exist_ok=True)
        grave = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=self._tmp))
        try:
            os.replace(folder, grave / "removed")
        finally:
            shutil.rmtree(grave, ignore_errors=True)
        return True


def explain(store: EngineStore, request: BuildRequest) -> Explanation:
    """Says whether the engine of `request` is stored; if not, what differs from the nearest."""
    entry = store.read(request.key)
    if entry is not None:
        damage = store.verify(entry)
        return Explanation(
            component=request.component,
            key=request.key,
            status="damaged" if damage else "hit",
            message=damage or "stored, and its files are as they were built",
        )
    differences = _nearest(store, request)
    if differences is None:
        message = "no engine of this component is stored yet"
    else:
        names = ", ".join(difference.field for difference in differences)
        message = f"differs from the nearest stored engine in {names}"
    return Explanation(
        component=request.component,
        key=request.key,
        status="miss",
        message=message,
        differences=differences or (),
    )


def _nearest(store: EngineStore, request: BuildRequest) -> tuple[Difference, ...] | None:
    wanted = _flat(record_to_json(request))
    nearest: tuple[int, str, tuple[Difference, ...]] | None = None
    for entry in store.entries():
        if entry.manifest is None or entry.manifest.request.component != request.component:
            continue
        stored = _flat(record_to_json(entry.manifest.request))
        names = sorted(name for name in {*wanted, *stored} if wanted.get(name) != stored.get(name))
        differences = tuple(
            Difference(field=name, wanted=wanted.get(name, "-"), stored=stored.get(name, "-"))
            for name in names
        )
        # The newest of equally near entries: it is the one that the user just had.
        rank = (-len(differences), entry.manifest.created_at, differences)
        if nearest is None or rank[:2] > nearest[:2]:
            nearest = rank
    return None if nearest is None else nearest[2]


def new_manifest(
    request: BuildRequest, files: Mapping[str, StoredFile], *, verdict: Verdict, started_s: float
) -> Manifest:
    """Returns the manifest of an engine that was just built; `started_s` is of `time.monotonic`."""
    from .version import __version__

    return Manifest(
        key=request.key,
        request=request,
        files=files,
        verdict=verdict,
        build_s=round(time.monotonic() - started_s, 3),
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        tool=f"sdkit-dispatch {__version__}",
    )


def _read_manifest(path: Path) -> Manifest:
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise ValueError(f"{path.stat().st_size} bytes are too many")
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or set(document) != {"sha256", "manifest"}:
        raise ValueError("it is not a manifest")
    if document["sha256"] != _seal(document["manifest"]):
        raise ValueError("its content has changed")
    return record_from_json(Manifest, document["manifest"])


def _seal(content: Any) -> str:  # Any: JSON data
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _flat(data: Any, prefix: str = "") -> dict[str, str]:  # Any: JSON data
    """Nested JSON objects -> {"shapes.sample": "[1, 4, 8, 8]"}."""
    if not isinstance(data, dict):
        return {prefix: data if isinstance(data, str) else json.dumps(data)}
    flat: dict[str, str] = {}
    for name, value in data.items():
        flat |= _flat(value, f"{prefix}.{name}" if prefix else name)
    return flat


def _flush(path: Path) -> None:
    """Forces a file, or the entries of a folder, to the disk. Windows cannot open a folder."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
