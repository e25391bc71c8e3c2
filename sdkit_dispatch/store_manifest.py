"""What stands beside an engine's files: the manifest, and how it is read and written."""

from __future__ import annotations

import hashlib
import json
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from .contract import SCHEMA_VERSION, BuildRequest, Record, record_from_json, record_to_json

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 4 << 20

VerdictStatus = Literal["passed", "failed", "unchecked", "unchecked-target"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the numeric gate said of an engine.

    Attributes:
        metrics: Output name -> metric name -> value, the worst over all checked inputs.
        limits: Metric name -> the value that was allowed.
        device: Where it was checked: id, what is there, and driver.
    """

    status: VerdictStatus
    reason: str = ""
    reference: str = ""
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class LaterVerdict:
    """What the gate said of a stored engine that it had not passed on the device at hand.

    Attributes:
        facts: What the session said of itself, as in `Manifest`.
    """

    verdict: Verdict
    facts: Mapping[str, str] = field(default_factory=dict)


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


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no manifest, or was changed.
        RecursionError: It is nested beyond reason.
    """
    return read_sealed(path, Manifest)


def read_sealed(path: Path, kind: type[Record]) -> Record:
    """Reads a record that `write_sealed` wrote.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no manifest, or was changed.
        RecursionError: It is nested beyond reason.
    """
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a plain file")
    if found.st_size > MAX_MANIFEST_BYTES:
        raise ValueError(f"{found.st_size} bytes are too many")
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or set(document) != {"sha256", "manifest"}:
        raise ValueError("it is not a manifest")
    if document["sha256"] != seal_of(document["manifest"]):
        raise ValueError("its content has changed")
    return record_from_json(kind, document["manifest"])


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes a manifest with the seal that `read_manifest` compares."""
    write_sealed(path, manifest)


def write_sealed(path: Path, record: Any) -> None:  # Any: any record
    """Writes a record with its seal."""
    content = record_to_json(record)
    text = json.dumps({"sha256": seal_of(content), "manifest": content}, indent=1)
    path.write_text(text, encoding="utf-8")


def seal_of(content: Any) -> str:  # Any: JSON data
    """Returns the sha256 of a manifest's content."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
