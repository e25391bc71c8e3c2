"""Bundles for tests: sound ones, and the same with something done to them."""

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from sdkit_dispatch import bundle_file
from sdkit_dispatch.bundle import ExportResult, ImportResult, export_bundle, import_bundle
from sdkit_dispatch.bundle_file import EPOCH, INDEX, MODE
from sdkit_dispatch.bundle_fit import Fit
from sdkit_dispatch.cache import EngineStore, Verdict, new_manifest
from sdkit_dispatch.check import Case, Recording, recording_bytes
from sdkit_dispatch.contract import BuildRequest, no_report
from sdkit_null import SPEC

REQUEST = BuildRequest(
    vendor="null",
    revision=SPEC.revision,
    runtime="null 1",
    target="sm_89",
    component="unet",
    graph_digest="a" * 64,
    weights_digest="b" * 64,
    precision="fp32",
    shapes={"sample": (2, 4, 8, 8), "timestep": ()},
    options={"level": "all"},
)
FILES = {"engine.bin": b"engine" * 100, "weights/part 1.bin": b"weights" * 1000}
RECORDING = Recording(
    reference="null 1",
    cases={
        "unet": (
            Case(
                feeds={"sample": np.ones((1, 2), np.float32), "timestep": np.array(7)},
                outputs={"out_sample": np.arange(3, dtype=np.float16)},
            ),
        )
    },
)
RECORDING_NAME = "9" * 64


def publish(
    home: Path,
    request: BuildRequest = REQUEST,
    files: dict[str, bytes] = FILES,
    verdict: Verdict = Verdict(status="passed", reference="null 1"),  # noqa: B008 - frozen
    **facts: object,
) -> EngineStore:
    """Returns a store with one more engine in it."""
    store = EngineStore(home)
    with store.locked(request.key), store.workshop(request.key) as shop:
        out = shop / "engine"
        for name, data in files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(data)
        manifest = new_manifest(request, store.seal(out), verdict=verdict, started_s=0.0)
        manifest = replace(manifest, build_s=1.0, created_at="2026-01-01T00:00:00", **facts)
        store.publish(out, manifest)
    return store


def export(store: EngineStore, out: Path, **settings) -> ExportResult:
    settings = {"references": {RECORDING_NAME: recording_bytes(RECORDING)}, **settings}
    given = {"secret": None, "report": no_report, **settings}
    return export_bundle(out, list(store.entries()), store=store, **given)


def take(path: Path, home: Path, **settings) -> ImportResult:
    given = {
        "fit": lambda request: Fit(status="fits"),
        "trusted": (),
        "must_be_trusted": False,
        "may_misfit": False,
        "report": no_report,
        **settings,
    }
    return import_bundle(path, store=EngineStore(home), **given)


def entries_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def write_zip(
    path: Path, entries: list[tuple[str, bytes]], *, change: Callable = lambda info: None
) -> Path:
    """Writes entries as an export does; `change` may do something to each entry's header."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries:
            info = zipfile.ZipInfo(name, EPOCH)
            info.create_system, info.external_attr = 3, MODE << 16
            change(info)
            archive.writestr(info, data)
    return path


def with_index(path: Path, out: Path, edit: Callable[[dict], object]) -> Path:
    """Copies a bundle with its index edited and sealed again: what a forger would do."""
    entries = entries_of(path)
    content = json.loads(entries[INDEX])["bundle"]
    edit(content)
    entries[INDEX] = sealed(content)
    return write_zip(out, list(entries.items()))


def sealed(content: object) -> bytes:
    document = {"sha256": bundle_file._seal(content), "bundle": content}
    return json.dumps(document).encode()


def npz(arrays: dict[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in arrays.items():
            archive.writestr(zipfile.ZipInfo(name), data, compress_type=compression)
    return buffer.getvalue()


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, to show that nothing else appeared."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }
