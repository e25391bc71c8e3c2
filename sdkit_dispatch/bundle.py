"""Engines out of the store into a bundle, and out of a bundle into the store.

This is how an engine that was compiled ahead of time for a device elsewhere reaches it, and how a
machine without network gets engines at all.

What an import believes. A hash only says that the bundle is what its maker packed; a trusted
signature also says who that was. Neither says that an engine computes the right numbers with *this*
device and driver, whatever its maker measured on theirs. So every imported engine lands as
`unchecked`, signed or not, and the numeric gate runs when it is first loaded here: against this
machine's own reference, or, without one, against the recording that came in the bundle. That
recording is as good as its maker: it finds a wrong driver or device, not a forged engine, and the
verdict names it. Whoever needs the origin to be sure asks for a signature by a key they trust:
an engine is input to a vendor's native code.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from .bundle_file import (
    INDEX,
    PIECE_BYTES,
    SIGNATURE,
    BundleReader,
    BundleWriter,
    Index,
    engine_entry,
    index_bytes,
    open_bundle,
    reference_entry,
    signature_bytes,
)
from .bundle_fit import Fit, refusal_of
from .bundle_signature import Signer, judge_signer, sign
from .cache import EngineStore, Entry, Manifest, StoredFile, Verdict
from .check import recording_from_bytes
from .contract import BuildRequest, Progress, Report, record_to_json
from .errors import CacheError, ConfigError
from .private_paths import PathFinder
from .reference import imported_path
from .store_layout import as_store_error, store_error
from .version import __version__
from .whole_file import write_whole


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What was packed.

    Attributes:
        signer: The public key; empty if unsigned.
    """

    path: str
    size_bytes: int
    index: Index
    signer: str = ""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What became of one engine of a bundle.

    Attributes:
        state: "kept": the store had it already, undamaged.
        message: What could not be confirmed, or was overridden; usually empty.
    """

    key: str
    request: BuildRequest
    size_bytes: int
    state: Literal["added", "kept"]
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class ImportResult:
    """What became of a bundle."""

    signer: Signer
    engines: tuple[Imported, ...]
    references: int


def export_bundle(
    out: Path,
    entries: Sequence[Entry],
    *,
    store: EngineStore,
    references: Mapping[str, bytes],
    secret: str | None,
    report: Report,
) -> ExportResult:
    """Writes a bundle whole or not at all; the same content gives the same bytes.

    Args:
        out: The file; replaced if it is there.
        entries: What to pack.
        store: Holds them.
        references: `reference.portable_name` -> recording, as `check.recording_bytes` has it.
        secret: A secret key to sign with.
        report: Told of the progress.

    Raises:
        CacheError: An engine is damaged or names a folder of this machine, or the disk is full.
        ConfigError: The key is none.
    """
    sources = {
        engine_entry(entry.key, name): entry.folder / name
        for entry in entries
        for name in _sound(entry).files
    }
    index = Index(
        tool=f"sdkit-dispatch {__version__}",
        engines={entry.key: _travelling(_sound(entry)) for entry in entries},
        references={name: _stored(data) for name, data in references.items()},
    )
    listing = index_bytes(index)
    private = PathFinder([Path(os.path.expanduser("~")), store.home])
    for key, manifest in index.engines.items():
        texts = (text.encode("utf-8", "replace") for text in _texts(record_to_json(manifest)))
        private.require_none(texts, f"the manifest of {key[:12]}")
    signature = None if secret is None else sign(listing, secret)
    progress = _Progress(report, "pack", sum(one.size_bytes for one in index.files.values()))
    recordings = {reference_entry(name): data for name, data in references.items()}

    def pieces(name: str) -> Iterator[bytes]:
        source = [recordings[name]] if name in recordings else _pieces(sources[name])
        for piece in private.checked(source, f"'{name}'"):
            progress.add(len(piece))
            yield piece

    with _as_ours(store.home):
        _require_room(out.parent, progress.total_bytes)
    with (
        _as_ours(out),
        _appearing(out) as partial,
        partial.open("w+b") as stream,
        BundleWriter(stream) as writer,
    ):
        writer.write(INDEX, _stored(listing), iter([listing]))
        if signature is not None:
            text = signature_bytes(signature)
            writer.write(SIGNATURE, _stored(text), iter([text]))
        for name, stored in index.files.items():
            writer.write(name, stored, pieces(name))
    return ExportResult(
        path=str(out),
        size_bytes=out.stat().st_size,
        index=index,
        signer="" if signature is None else signature.public_key,
    )


def import_bundle(
    path: Path,
    *,
    store: EngineStore,
    fit: Callable[[BuildRequest], Fit],
    trusted: Sequence[str],
    must_be_trusted: bool,
    may_misfit: bool,
    report: Report,
) -> ImportResult:
    """Puts the engines of a bundle into the store, all of them or none.

    Everything is unpacked and compared before the first engine appears. An engine that the store
    has already is kept; a damaged one is replaced.

    Args:
        path: The bundle.
        store: Takes them.
        fit: Says whether an engine can be of use here.
        trusted: Public keys.
        must_be_trusted: Refuses a bundle that none of `trusted` signed.
        may_misfit: Also takes engines for another device or version.
        report: Told of the progress.

    Raises:
        ConfigError: There is no such file, or a signature must be checked and cannot be.
        CacheError: The bundle is damaged, not trusted or for something else; the disk is full.
    """
    with open_bundle(path) as bundle:
        signer = judge_signer(
            bundle.signature,
            bundle.index_bytes,
            trusted=trusted,
            must_be_trusted=must_be_trusted,
        )
        fits = {key: fit(one.request) for key, one in bundle.index.engines.items()}
        if not may_misfit and (refusal := refusal_of(bundle.index, fits)):
            raise CacheError(f"'{path}' is refused:{refusal}", "take it all the same with --force")
        progress = _Progress(report, "unpack", bundle.size_bytes)
        with _as_ours(store.home), ExitStack() as stack:
            _require_room(store.home, _new_bytes(bundle.index, store))
            # In the order of the keys, so that two imports never wait for each other.
            staged = {
                key: _staged(bundle, key, store=store, stack=stack, progress=progress)
                for key in sorted(bundle.index.engines)
            }
            recordings = {
                name: _recording(bundle, name, progress) for name in bundle.index.references
            }
            for key, folder in staged.items():
                if folder is not None:
                    store.publish(folder, _arrived(bundle.index.engines[key], signer))
            for name, data in recordings.items():
                place = imported_path(store.home, name)
                if not place.exists():
                    write_whole(place, data)
        return ImportResult(
            signer=signer,
            engines=tuple(
                Imported(
                    key=key,
                    request=bundle.index.engines[key].request,
                    size_bytes=bundle.index.engines[key].size_bytes,
                    state="kept" if folder is None else "added",
                    message=fits[key].message,
                )
                for key, folder in staged.items()
            ),
            references=len(recordings),
        )


def verify_bundle(path: Path, *, trusted: Sequence[str], report: Report) -> tuple[Index, Signer]:
    """Reads a bundle to its end without taking anything out of it; raises as an import does."""
    with open_bundle(path) as bundle:
        signer = judge_signer(
            bundle.signature, bundle.index_bytes, trusted=trusted, must_be_trusted=False
        )
        progress = _Progress(report, "verify", bundle.size_bytes)
        for name in bundle.index.files:
            bundle.copy(name, _Nowhere(), progress.add)
        return bundle.index, signer


class _Nowhere:
    def write(self, data: bytes, /) -> int:
        return len(data)


class _Progress:
    """Counts bytes and reports their share of the whole."""

    def __init__(self, report: Report, verb: str, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._report = report
        self._phase = f"{verb} {total_bytes / 1e6:.1f} MB"
        self._done_bytes = 0

    def say(self, phase: str) -> None:
        self._report(Progress(phase=phase))

    def add(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        fraction = min(self._done_bytes / max(self.total_bytes, 1), 1.0)
        self._report(Progress(phase=self._phase, fraction=fraction))


def _sound(entry: Entry) -> Manifest:
    if entry.damage or entry.manifest is None:
        raise CacheError(
            f"the stored engine {entry.key[:12]} is damaged: {entry.damage}",
            f"sdkit-dispatch cache remove {entry.key[:12]}",
        )
    return entry.manifest


def _texts(data: Any) -> Iterator[str]:  # Any: JSON data
    """Yields every text in JSON data, each with an end of its own."""
    if isinstance(data, dict):
        for name, value in data.items():
            yield f"{name}\n"
            yield from _texts(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _texts(value)
    elif isinstance(data, str):
        yield f"{data}{os.sep}\n"  # a folder at the end of a text counts too


def _travelling(manifest: Manifest) -> Manifest:
    """Returns a manifest without what names files or devices of this machine."""
    verdict = replace(manifest.verdict, reason="", device="")
    return replace(manifest, verdict=verdict, earlier=(), facts={})


def _arrived(manifest: Manifest, signer: Signer) -> Manifest:
    """Returns the manifest under which an engine of a bundle is stored here."""
    before = manifest.verdict.status
    verdict = Verdict(
        status="unchecked-target" if before == "unchecked-target" else "unchecked",
        reason=f"imported, {signer.words}; '{before}' where it was built",
    )
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return replace(manifest, verdict=verdict, earlier=(), facts={}, created_at=now)


def _staged(
    bundle: BundleReader, key: str, *, store: EngineStore, stack: ExitStack, progress: _Progress
) -> Path | None:
    """Unpacks one engine beside the store and compares it; None if the store has it already."""

    def wait() -> None:
        progress.say(f"wait: another process builds {bundle.index.engines[key].request.component}")

    stack.enter_context(store.locked(key, while_waiting=wait))
    there = store.read(key)
    files = bundle.index.engines[key].files
    if there is not None and not store.verify(there):
        for name in files:
            bundle.copy(engine_entry(key, name), _Nowhere(), progress.add)
        return None
    folder = stack.enter_context(store.workshop(key)) / "engine"
    folder.mkdir()
    for name in files:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("xb") as stream:
            bundle.copy(engine_entry(key, name), stream, progress.add)
    if store.seal(folder) != files:
        raise CacheError(f"what was unpacked of {key[:12]} is not what is on the disk")
    return folder


def _recording(bundle: BundleReader, name: str, progress: _Progress) -> bytes:
    data = bundle.read(reference_entry(name), progress.add)
    if recording_from_bytes(data) is None:
        raise CacheError(f"the bundle's recording {name[:12]} is damaged", "have it made again")
    return data


def _new_bytes(index: Index, store: EngineStore) -> int:
    """Returns what an import needs on the disk: what is there already is not unpacked again."""
    return sum(
        manifest.size_bytes for key, manifest in index.engines.items() if store.read(key) is None
    ) + sum(stored.size_bytes for stored in index.references.values())


def _stored(data: bytes) -> StoredFile:
    return StoredFile(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while piece := stream.read(PIECE_BYTES):
            yield piece


def _require_room(folder: Path, needed_bytes: int) -> None:
    place = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < needed_bytes:
        raise store_error(
            f"the disk of '{folder}' is full: {needed_bytes / 1e6:.1f} MB are needed, "
            f"{free_bytes / 1e6:.1f} MB are free"
        )


@contextlib.contextmanager
def _as_ours(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise as_store_error(error, place) from error


@contextlib.contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """Gives a file beside `out` that becomes it at the end, or is gone."""
    if out.is_dir():
        raise ConfigError(f"'{out}' is a folder; the name of a file is needed")
    out.parent.mkdir(parents=True, exist_ok=True)
    shop = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name[:40]}-"))
    try:
        yield shop / "partial"
        with (shop / "partial").open("rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(shop / "partial", out)
    finally:
        shutil.rmtree(shop, ignore_errors=True)
