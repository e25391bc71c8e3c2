"""Engines in a store without any vendor, for tests of the store itself."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from sdkit_dispatch.cache import EngineStore, Verdict, new_manifest
from sdkit_dispatch.contract import BuildRequest

REQUEST = BuildRequest(
    vendor="null",
    revision=1,
    runtime="null 1",
    target="",
    component="unet",
    graph_digest="a" * 64,
    weights_digest="b" * 64,
    precision="fp32",
    shapes={"sample": (2, 4, 8, 8), "timestep": ()},
)


def publish(
    store: EngineStore,
    request: BuildRequest = REQUEST,
    *,
    size_bytes: int = 1000,
    linked: Path | None = None,
    created_at: str = "2026-11-01T00:00:00.000+00:00",
) -> Path:
    """Puts an engine of one file into a store; with `linked`, that file is a second one."""
    with store.locked(request.key), store.workshop(request.key) as shop:
        out = shop / "engine"
        out.mkdir()
        (out / "engine.bin").write_bytes(os.urandom(size_bytes))
        if linked is not None:
            os.link(linked, out / "weights.bin")
        files = store.seal(out)
        verdict = Verdict(status="passed")
        manifest = new_manifest(request, files, verdict=verdict, started_s=time.monotonic())
        store.publish(out, replace(manifest, created_at=created_at))
    return store.folder(request.key)


def look_up(store: EngineStore, request: BuildRequest = REQUEST):
    return store.look_up(request, onnx=Path("model.onnx"))


def state_of(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Returns mode, size and time of change of everything below a folder."""
    return {
        str(path.relative_to(folder)): (found.st_mode, found.st_size, found.st_mtime_ns)
        for path in (folder, *sorted(folder.rglob("*")))
        if (found := path.lstat())
    }
