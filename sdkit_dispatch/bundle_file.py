"""The bundle: engines of the store, and what another machine checks them with, in one zip file.

    bundle.json              the index: every engine's manifest, every other file's size and sha256
    signature.json           optional: an ed25519 signature of bundle.json
    engines/<key>/...        the vendor's files, in the order of their names
    references/<name>.npz    recordings that the numeric gate compares with

A zip file, because anybody can look into one. Its entries are stored, not deflated: weights do not
shrink; the bytes do not depend on the version of a compressor, so the same content is the same
file; and an entry is exactly as large as it says, so that there is no bomb to guard against. The
zip format leaves much room for games (names twice, links, overlapping entries, sizes that lie). All
of it is refused by one rule: the entries must be, in order, those that the index lists.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self, TypeVar

from .bundle_names import collision, name_fault
from .bundle_signature import Signature
from .cache import MANIFEST, Manifest, StoredFile
from .contract import SCHEMA_VERSION, record_from_json, record_to_json
from .errors import CacheError, ConfigError

BUNDLE_SCHEMA = 1
INDEX = "bundle.json"
SIGNATURE = "signature.json"
MAX_INDEX_BYTES = 16 << 20
MAX_SIGNATURE_BYTES = 4096
MAX_READ_BYTES = 16 << 20
"""At once. zipfile reads the directory of an archive, however large, in one piece."""
MAX_ENGINES = 256
MAX_FILES = 4096
MAX_RECORDINGS = 64
MAX_RECORDING_BYTES = 1 << 30
"""It is read as a whole. Four calls of every component at 1024 x 1024 are about 100 MB."""
PIECE_BYTES = 1 << 20
MODE = 0o100644
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can hold: it says nothing."""
HEX = frozenset("0123456789abcdef")

Record = TypeVar("Record")


def _ignore(size_bytes: int) -> None:
    """Takes the number of bytes that were read, for callers that show no progress."""


class Sink(Protocol):
    """Where the pieces of a file go."""

    def write(self, data: bytes, /) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Index:
    """What a bundle holds.

    Attributes:
        tool: What made it.
        engines: Key -> manifest; `manifest.files` lists the engine's files.
        references: Name of a recording -> size and digest.
    """

    tool: str
    engines: Mapping[str, Manifest]
    references: Mapping[str, StoredFile] = field(default_factory=dict)
    schema: int = BUNDLE_SCHEMA

    @property
    def files(self) -> dict[str, StoredFile]:
        """Entry of the zip file -> size and digest, in the order in which they stand there."""
        listed = {
            engine_entry(key, name): self.engines[key].files[name]
            for key in sorted(self.engines)
            for name in sorted(self.engines[key].files)
        }
        return listed | {
            reference_entry(name): self.references[name] for name in sorted(self.references)
        }


def engine_entry(key: str, name: str) -> str:
    """Returns where a file of an engine stands in a bundle."""
    return f"engines/{key}/{name}"


def reference_entry(name: str) -> str:
    """Returns where a recording stands in a bundle."""
    return f"references/{name}.npz"


def index_bytes(index: Index) -> bytes:
    """Returns the index as it stands in a bundle, with its own sha256.

    Raises:
        CacheError: It could not be read back.
    """
    content = record_to_json(index)
    text = json.dumps({"sha256": _seal(content), "bundle": content}, sort_keys=True, indent=1)
    data = text.encode()
    _index_from_bytes(data)
    return data


def signature_bytes(signature: Signature) -> bytes:
    """Returns a signature as it stands in a bundle."""
    return json.dumps(record_to_json(signature), sort_keys=True, indent=1).encode()


class BundleWriter:
    """Writes the entries of a bundle one after the other. A context manager."""

    def __init__(self, stream: BinaryIO) -> None:
        self._zip = zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, strict_timestamps=True)

    def write(self, name: str, stored: StoredFile, pieces: Iterator[bytes]) -> None:
        """Adds an entry.

        Raises:
            CacheError: The pieces are not what was announced.
        """
        info = zipfile.ZipInfo(name, date_time=EPOCH)
        info.create_system = 3  # else it tells Windows from the rest
        info.external_attr = MODE << 16
        info.file_size = stored.size_bytes
        digest, size_bytes = hashlib.sha256(), 0
        with self._zip.open(info, "w") as entry:
            for piece in pieces:
                size_bytes += len(piece)
                if size_bytes > stored.size_bytes:
                    break
                digest.update(piece)
                entry.write(piece)
        if (size_bytes, digest.hexdigest()) != (stored.size_bytes, stored.sha256):
            raise CacheError(
                f"'{name}' has changed since it was stored", "sdkit-dispatch cache verify"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Writes the directory; after an error it does not matter what is written."""
        with contextlib.suppress(*(() if kind is None else (OSError, ValueError))):
            self._zip.close()


class BundleReader:
    """An opened bundle, whose index and entries agree; contents are checked as they are read."""

    def __init__(self, archive: zipfile.ZipFile, size_bytes: int) -> None:
        """Use `open_bundle`."""
        self._zip = archive
        infos = archive.infolist()
        names = [info.filename for info in infos]
        if not names or names[0] != INDEX:
            raise CacheError(f"the first entry is not {INDEX}: it is another zip file")
        for info in infos:
            _check_entry(info)
        self.index_bytes = self._small(infos[0], MAX_INDEX_BYTES)
        self.index = _index_from_bytes(self.index_bytes)
        self.signature: Signature | None = None
        plain = infos[1:]
        if plain and plain[0].filename == SIGNATURE:
            text = self._small(plain.pop(0), MAX_SIGNATURE_BYTES)
            self.signature = _parsed(Signature, _json(text, SIGNATURE), SIGNATURE)
        self._infos = {info.filename: info for info in plain}
        self.files = expected = self.index.files
        if [info.filename for info in plain] != list(expected):
            odd = sorted(set(expected) ^ set(self._infos))
            what = f"'{odd[0][:200]}' is in one only" if odd else "a name is there twice, or moved"
            raise CacheError(f"its entries are not those of its index: {what}")
        for name, stored in expected.items():
            if self._infos[name].file_size != stored.size_bytes:
                raise CacheError(
                    f"'{name}' has {self._infos[name].file_size} bytes, not {stored.size_bytes}"
                )
        self.size_bytes = sum(stored.size_bytes for stored in expected.values())
        if self.size_bytes > size_bytes:
            raise CacheError(
                f"it claims {self.size_bytes} bytes of content and has {size_bytes} itself"
            )

    def copy(self, name: str, sink: Sink, on_bytes: Callable[[int], None] = _ignore) -> None:
        """Reads an entry to its end.

        Raises:
            CacheError: Its content is not what the index says.
        """
        stored = self.files[name]
        digest, left = hashlib.sha256(), stored.size_bytes
        with reading():
            entry = self._zip.open(self._infos[name])
        with entry:
            while True:
                with reading():  # not around the sink: a full disk is no damaged bundle
                    piece = entry.read(min(PIECE_BYTES, left + 1))
                left -= len(piece)
                if not piece or left < 0:
                    break
                digest.update(piece)
                sink.write(piece)
                on_bytes(len(piece))
        if left or digest.hexdigest() != stored.sha256:
            raise CacheError(
                f"the bundle is damaged: the content of '{name}' is not what its index says",
                "fetch it again; nothing overrides this",
            )

    def read(self, name: str, on_bytes: Callable[[int], None] = _ignore) -> bytes:
        """Returns an entry that is small enough for memory; raises as `copy` does."""
        sink = io.BytesIO()
        self.copy(name, sink, on_bytes)
        return sink.getvalue()

    def _small(self, info: zipfile.ZipInfo, limit_bytes: int) -> bytes:
        if info.file_size > limit_bytes:
            raise CacheError(
                f"{info.filename} has {info.file_size} bytes; at most {limit_bytes} are read"
            )
        with self._zip.open(info) as entry:
            return entry.read(limit_bytes + 1)


@contextlib.contextmanager
def open_bundle(path: Path) -> Iterator[BundleReader]:
    """Opens a bundle and reads its index; its contents are not yet verified.

    Raises:
        ConfigError: There is no such file.
        CacheError: It is no bundle, a damaged one, or of another version.
    """
    try:
        if not path.is_file():  # a pipe or a device could be opened, and never end
            raise ConfigError(f"'{path}' is not there, or not a plain file")
        stream = path.open("rb")
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{path}' cannot be read: {error}") from error
    with stream:
        try:
            with reading():
                size_bytes = path.stat().st_size
                archive = zipfile.ZipFile(_Bounded(stream))
                reader = BundleReader(archive, size_bytes)
        except CacheError as error:
            raise CacheError(
                f"'{path}' is not a bundle that can be used: {error.message}"
            ) from error
        with archive:
            yield reader


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Names what zipfile says of a broken file; it raises a dozen kinds of errors.

    Raises:
        CacheError: In place of them.
    """
    try:
        yield
    except (
        *(zipfile.BadZipFile, zipfile.LargeZipFile, struct.error, EOFError, OSError),
        *(NotImplementedError, RuntimeError, ValueError, OverflowError, KeyError, IndexError),
    ) as error:
        raise CacheError(
            f"the zip file is damaged: {error or type(error).__name__}", "fetch it again"
        ) from error


class _Bounded(io.RawIOBase):
    """A file that refuses to be read in one enormous piece."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def read(self, size: int = -1, /) -> bytes:
        # zipfile reads the end of the file with no size.
        data = self._stream.read(MAX_READ_BYTES + 1 if size < 0 else min(size, MAX_READ_BYTES + 1))
        if len(data) > MAX_READ_BYTES:
            raise ValueError(f"a part of it has more than {MAX_READ_BYTES} bytes")
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


def _check_entry(info: zipfile.ZipInfo) -> None:
    fault = name_fault(info.filename)
    # zipfile cuts a name at a zero byte, and keeps the original.
    if fault or info.orig_filename != info.filename:
        raise CacheError(f"it has an entry {info.orig_filename[:200]!r}: {fault or 'a zero byte'}")
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise CacheError(f"'{info.filename}' is compressed; a bundle's entries never are")
    if info.flag_bits & ~0x800:  # 0x800: the name is UTF-8
        raise CacheError(f"'{info.filename}' is encrypted, or has other flags ({info.flag_bits})")
    if info.external_attr >> 16 != MODE:
        raise CacheError(f"'{info.filename}' is a link, a folder or a special file")


def _index_from_bytes(data: bytes) -> Index:
    """Returns the index, all of whose names and keys are sound.

    Raises:
        CacheError: It is not.
    """
    document = _json(data, INDEX)
    if not isinstance(document, dict) or set(document) != {"sha256", "bundle"}:
        raise CacheError(f"{INDEX} is not the index of a bundle")
    content = document["bundle"]
    if not isinstance(content, dict) or document["sha256"] != _seal(content):
        raise CacheError(f"the content of {INDEX} has changed")
    schema = content.get("schema")
    if schema != BUNDLE_SCHEMA:
        raise CacheError(
            f"it has the schema {str(schema)[:20]}, and this version reads {BUNDLE_SCHEMA}",
            "use the version that made it, or have it made again with this one",
        )
    index = _parsed(Index, content, INDEX)
    _check_counts(index)
    for key, manifest in index.engines.items():
        _check_manifest(key, manifest)
    for name, stored in index.references.items():
        if not _is_digest(name) or stored.size_bytes > MAX_RECORDING_BYTES:
            raise CacheError(
                f"{name[:80]!r} with {stored.size_bytes} bytes is not a recording; at most "
                f"{MAX_RECORDING_BYTES} bytes are read"
            )
    for name, stored in index.files.items():
        if stored.size_bytes < 0 or not _is_digest(stored.sha256):
            raise CacheError(f"{INDEX} has no size and sha256 of '{name}'")
    return index


def _check_counts(index: Index) -> None:
    files = sum(len(manifest.files) for manifest in index.engines.values())
    counts = (
        ("engines", len(index.engines), MAX_ENGINES),
        ("files", files, MAX_FILES),
        ("recordings", len(index.references), MAX_RECORDINGS),
    )
    for what, count, most in counts:
        if count > most:
            raise CacheError(f"it lists {count} {what}; at most {most} are read")
    if not index.engines:
        raise CacheError("it holds no engine")


def _check_manifest(key: str, manifest: Manifest) -> None:
    request = manifest.request
    if manifest.schema != SCHEMA_VERSION or request.schema != SCHEMA_VERSION:
        raise CacheError(
            f"the engine {key[:12]} has the schema {manifest.schema}, and this version reads "
            f"{SCHEMA_VERSION}",
            "have the bundle made again with this version",
        )
    if not key == manifest.key == request.key:
        raise CacheError(f"the engine {key[:12]} has the key {request.key[:12]} by its own request")
    texts = (request.vendor, request.runtime, request.target, request.component, manifest.tool)
    if not all(text.isprintable() and len(text) <= 200 for text in texts):
        raise CacheError(f"the manifest of {key[:12]} holds text that cannot be shown")
    if not manifest.files:
        raise CacheError(f"the engine {key[:12]} has no file")
    for name in manifest.files:
        fault = name_fault(name)
        if fault or name.casefold() == MANIFEST:
            raise CacheError(
                f"the engine {key[:12]} has a file {name[:200]!r}: {fault or 'reserved'}"
            )
    twice = collision(manifest.files)
    if twice:
        raise CacheError(f"the engine {key[:12]} has '{twice}' twice on a system that folds case")


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= HEX


def _json(data: bytes, name: str) -> Any:  # Any: JSON data
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CacheError(f"{name} is not JSON: {error}") from error


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _parsed(kind: type[Record], data: Any, name: str) -> Record:  # Any: JSON data
    try:
        return record_from_json(kind, data)
    except (ValueError, RecursionError, OverflowError) as error:
        raise CacheError(f"{name} is not what this version writes: {error}") from error


def _seal(content: Any) -> str:  # Any: JSON data
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
