"""Which stored engines a new one may build upon, and files that entries share."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdkit_dispatch import pipeline_files
from sdkit_dispatch.cache import EngineStore, LaterVerdict, Manifest, Verdict, new_manifest
from sdkit_dispatch.contract import BuildRequest, Engine
from sdkit_dispatch.forecast import forecast
from sdkit_dispatch.siblings import disk_bytes, known_files, remember_files, siblings_of
from sdkit_dispatch.store_manifest import read_manifest
from sdkit_null import SPEC

REQUEST = BuildRequest(
    vendor="null",
    revision=1,
    runtime="null 1",
    target="",
    component="unet",
    graph_digest="a" * 64,
    weights_digest="b" * 64,
    precision="fp32",
    shapes={"sample": (2, 4, 8, 8)},
    options={"level": "all"},
)
OTHER_SIZE = replace(REQUEST, shapes={"sample": (2, 4, 9, 8)})
OTHER_WEIGHTS = replace(REQUEST, weights_digest="c" * 64)
ONNX = Path("model.onnx")
LARGE_BYTES = pipeline_files.MEMO_FROM_BYTES


@pytest.fixture
def store(tmp_path: Path) -> EngineStore:
    return EngineStore(tmp_path / "home")


def publish(store: EngineStore, request: BuildRequest, siblings: Sequence[Engine] = ()) -> Path:
    """Publishes an engine as a builder does; its weights are the first sibling's, if any."""
    with store.locked(request.key), store.workshop(request.key) as shop:
        out = shop / "engine"
        out.mkdir()
        (out / "program").write_text(request.key)
        known = known_files(store, siblings)
        if siblings:
            os.link(Path(siblings[0].folder) / "weights", out / "weights")
        else:
            (out / "weights").write_bytes(b"w" * LARGE_BYTES)
        sealed_ns = time.time_ns()
        files = store.seal(out, known)
        verdict = Verdict(status="passed")
        manifest = new_manifest(request, files, verdict=verdict, started_s=time.monotonic())
        store.publish(out, manifest)
    folder = store.folder(request.key)
    remember_files(store, files, folder, siblings=siblings, sealed_ns=sealed_ns)
    return folder


def test_siblings_differ_in_shapes_or_in_weights_alone(store: EngineStore) -> None:
    for request in (
        REQUEST,
        OTHER_SIZE,
        OTHER_WEIGHTS,
        replace(OTHER_SIZE, weights_digest="c" * 64),
        replace(OTHER_SIZE, precision="fp16"),
        replace(OTHER_SIZE, component="vae_decoder"),
        replace(OTHER_SIZE, graph_digest="d" * 64),
        replace(OTHER_SIZE, options={"level": "none"}),
        replace(OTHER_SIZE, passes=99),
    ):
        publish(store, request)
    found = [engine.request for engine in siblings_of(store, REQUEST, onnx=ONNX)]
    assert found == [OTHER_SIZE, OTHER_WEIGHTS]


def manifests_read(store: EngineStore, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns how many manifests a look for siblings reads; it finds the one that there is."""
    read: list[Path] = []

    def counting(path: Path) -> Manifest:
        read.append(path)
        return read_manifest(path)

    with monkeypatch.context() as patch:
        patch.setattr("sdkit_dispatch.cache.read_manifest", counting)
        assert [one.request for one in siblings_of(store, OTHER_SIZE, onnx=ONNX)] == [REQUEST]
    return len(read)


def test_engines_of_other_graphs_are_not_read_for_siblings(
    store: EngineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, REQUEST)
    assert siblings_of(store, OTHER_SIZE, onnx=ONNX)
    alone = manifests_read(store, monkeypatch)
    for digit in "def":
        publish(store, replace(REQUEST, graph_digest=digit * 64))
    assert manifests_read(store, monkeypatch) == alone


def test_siblings_are_found_though_the_memos_of_the_store_were_lost(store: EngineStore) -> None:
    publish(store, REQUEST)
    publish(store, replace(REQUEST, graph_digest="d" * 64))
    shutil.rmtree(store.memo)
    publish(store, OTHER_WEIGHTS)  # noted, which does not make the memo complete
    assert [one.request for one in siblings_of(store, OTHER_SIZE, onnx=ONNX)] == [REQUEST]
    for note in (store.memo / "by-graph").iterdir():
        note.write_text(note.read_text() + "no key\n" + "f" * 64)  # nor is this of any engine
    assert [one.request for one in siblings_of(store, OTHER_SIZE, onnx=ONNX)] == [REQUEST]


def test_an_engine_that_was_removed_is_nobodys_sibling(store: EngineStore) -> None:
    publish(store, REQUEST)
    assert siblings_of(store, OTHER_SIZE, onnx=ONNX)
    store.remove(REQUEST.key)
    assert siblings_of(store, OTHER_SIZE, onnx=ONNX) == ()


def test_a_damaged_engine_is_nobodys_sibling(store: EngineStore) -> None:
    folder = publish(store, OTHER_SIZE)
    (folder / "weights").write_bytes(b"x" * LARGE_BYTES)
    assert siblings_of(store, REQUEST, onnx=ONNX) == ()


def test_a_shared_file_is_counted_once_and_each_entry_goes_alone(store: EngineStore) -> None:
    first = publish(store, REQUEST)
    alone = disk_bytes([first])
    siblings = siblings_of(store, OTHER_SIZE, onnx=ONNX)
    second = publish(store, OTHER_SIZE, siblings)
    assert (first / "weights").samefile(second / "weights")
    assert disk_bytes([first, second]) < alone + LARGE_BYTES / 100
    assert store.remove(REQUEST.key)
    entry = store.read(OTHER_SIZE.key)
    assert entry is not None
    assert store.verify(entry) == ""
    assert disk_bytes([second]) > LARGE_BYTES


def test_a_forecast_counts_no_file_that_a_sibling_lends(store: EngineStore) -> None:
    spec = replace(SPEC, shared_files=("weights",))
    sizes = {"unet": LARGE_BYTES}

    def forecast_bytes(request: BuildRequest) -> int:
        found = forecast(store, spec, [request], sizes)
        assert found is not None
        return found.disk_bytes

    alone = forecast_bytes(OTHER_SIZE)
    assert alone > LARGE_BYTES
    publish(store, REQUEST)
    assert 0 < forecast_bytes(OTHER_SIZE) < LARGE_BYTES / 100
    assert forecast_bytes(OTHER_WEIGHTS) == alone
    spec = SPEC  # which links nothing
    assert forecast_bytes(OTHER_SIZE) == alone


def test_a_linked_file_is_not_hashed_and_one_in_its_place_is(
    store: EngineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, REQUEST)
    siblings = siblings_of(store, OTHER_SIZE, onnx=ONNX)
    hashed: list[str] = []
    digest = pipeline_files.file_digest

    def counting(path: Path, **rest: Any) -> str:
        hashed.append(path.name)
        return digest(path, **rest)

    monkeypatch.setattr("sdkit_dispatch.cache.file_digest", counting)
    second = publish(store, OTHER_SIZE, siblings)
    assert hashed == ["program"]
    # A copy has the same name and content, but nobody has looked at it.
    hashed.clear()
    weights = (second / "weights").read_bytes()
    (second / "weights").unlink()
    (second / "weights").write_bytes(weights)
    assert store.look_up(OTHER_SIZE, onnx=ONNX) is not None
    assert "weights" in hashed


@pytest.mark.skipif(os.name == "nt", reason="Windows has no time of a status change")
def test_a_new_link_does_not_make_the_old_names_be_hashed_again(
    store: EngineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the files had been written and checked long before.
    monkeypatch.setattr(pipeline_files, "RACY_S", -60)
    publish(store, REQUEST)
    publish(store, OTHER_SIZE, siblings_of(store, OTHER_SIZE, onnx=ONNX))
    read: list[Path] = []
    opened = Path.open

    def counting(path: Path, *rest: Any, **more: Any) -> Any:
        read.append(path)
        return opened(path, *rest, **more)

    monkeypatch.setattr(Path, "open", counting)
    for request in (REQUEST, OTHER_SIZE):
        assert store.look_up(request, onnx=ONNX) is not None
    assert [path for path in read if path.name == "weights"] == []


def test_an_engine_that_failed_the_gate_later_is_not_built_upon(store: EngineStore) -> None:
    publish(store, REQUEST)
    assert siblings_of(store, OTHER_SIZE, onnx=ONNX)
    passed, failed = (LaterVerdict(verdict=Verdict(status=one)) for one in ("passed", "failed"))
    store.keep_later_verdict(REQUEST.key, "a card 1.0", passed)
    assert siblings_of(store, OTHER_SIZE, onnx=ONNX)
    store.keep_later_verdict(REQUEST.key, "a card 2.0", failed)
    assert siblings_of(store, OTHER_SIZE, onnx=ONNX) == ()
