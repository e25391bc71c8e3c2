"""The engine store, used directly."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sdkit_dispatch.cache import MANIFEST, EngineStore, Verdict, new_manifest
from sdkit_dispatch.contract import SCHEMA_VERSION, BuildRequest
from sdkit_dispatch.errors import CacheError
from sdkit_dispatch.store_explain import explain
from sdkit_dispatch.store_manifest import seal_of

REQUEST = BuildRequest(
    vendor="null",
    revision=1,
    runtime="null 1",
    target="isa=avx2",
    component="unet",
    graph_digest="a" * 64,
    weights_digest="b" * 64,
    precision="fp32",
    shapes={"sample": (2, 4, 8, 8), "timestep": ()},
    options={"level": "all", "nested": {"x": 1}},
)
FILES = {"engine.bin": b"engine" * 100, "weights/part 1.bin": b"weights" * 1000}


@pytest.fixture
def store(tmp_path: Path) -> EngineStore:
    return EngineStore(tmp_path / "home")


def publish(store: EngineStore, request: BuildRequest = REQUEST) -> Path:
    with store.locked(request.key), store.workshop(request.key) as shop:
        out = shop / "engine"
        for name, data in FILES.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(data)
        files = store.seal(out)
        verdict = Verdict(status="passed")
        manifest = new_manifest(request, files, verdict=verdict, started_s=time.monotonic())
        store.publish(out, manifest)
    return store.folder(request.key)


def look_up(store: EngineStore, request: BuildRequest = REQUEST):
    return store.look_up(request, onnx=Path("model.onnx"))


def test_what_is_published_is_found_with_its_files(store):
    assert look_up(store) is None
    folder = publish(store)
    engine, manifest = look_up(store)
    assert engine.folder == str(folder)
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert manifest.request == REQUEST
    assert manifest.size_bytes == sum(map(len, FILES.values()))
    assert not list((store.home / "tmp").iterdir())


CHANGES = {
    "vendor": "other",
    "revision": 2,
    "runtime": "null 2",
    "target": "isa=avx512",
    "component": "vae_decoder",
    "graph_digest": "c" * 64,
    "weights_digest": "d" * 64,
    "precision": "fp16",
    "shapes": {"sample": (1, 4, 8, 8), "timestep": ()},
    "options": {"level": "basic", "nested": {"x": 1}},
    "passes": 7,
}


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_of_a_request_is_part_of_its_key(store, field):
    publish(store)
    other = replace(REQUEST, **{field: CHANGES[field]})
    assert other.key != REQUEST.key
    assert look_up(store, other) is None


def test_every_field_of_a_request_is_tested_above():
    assert {*CHANGES, "schema"} == set(BuildRequest.__dataclass_fields__)


def test_key_does_not_depend_on_the_order_of_mappings():
    shapes = dict(reversed(REQUEST.shapes.items()))
    options = dict(reversed(REQUEST.options.items()))
    assert replace(REQUEST, shapes=shapes, options=options).key == REQUEST.key


KNOWN_KEY = "8cb0138ddb4b809c07a02a7228c59009f1131937d78285d631c02acd48871e7a"


def test_key_stays_what_it_was():
    """A change of the key orphans every engine of every user: raise SCHEMA_VERSION with it."""
    assert SCHEMA_VERSION == 1
    assert REQUEST.key == KNOWN_KEY


@pytest.mark.parametrize("field", sorted(set(CHANGES) - {"component"}))
def test_explain_names_the_field_that_differs(store, field):
    publish(store)
    explanation = explain(store, replace(REQUEST, **{field: CHANGES[field]}))
    assert explanation.status == "miss"
    assert [one.field.split(".")[0] for one in explanation.differences] == [field]
    assert field in explanation.message


def test_explain_shows_the_nearest_of_several_engines(store):
    publish(store, replace(REQUEST, vendor="other", runtime="other 1", options={}))
    publish(store)
    explanation = explain(store, replace(REQUEST, shapes={"sample": (2, 4, 16, 8), "timestep": ()}))
    (difference,) = explanation.differences
    assert difference.field == "shapes.sample"
    assert (difference.stored, difference.wanted) == ("[2, 4, 8, 8]", "[2, 4, 16, 8]")


def test_explain_of_a_hit_and_of_an_empty_store(store):
    assert explain(store, REQUEST).message == "no engine of this component is stored yet"
    publish(store)
    assert explain(store, REQUEST).status == "hit"


def test_explain_survives_damaged_neighbours(store):
    (publish(store) / MANIFEST).write_text("{")
    assert explain(store, replace(REQUEST, runtime="null 2")).status == "miss"
    assert explain(store, REQUEST).status == "damaged"


def truncate(folder: Path) -> None:
    os.truncate(folder / "engine.bin", 10)


def flip(folder: Path) -> None:
    data = bytearray((folder / "weights/part 1.bin").read_bytes())
    data[4000] ^= 1
    (folder / "weights/part 1.bin").write_bytes(data)


def flip_keeping_times(folder: Path) -> None:
    before = (folder / "weights/part 1.bin").stat()
    flip(folder)
    os.utime(folder / "weights/part 1.bin", ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_link(folder: Path) -> None:
    (folder / "engine.bin").rename(folder.parent / "elsewhere")
    (folder / "engine.bin").symlink_to(folder.parent / "elsewhere")


def edit_manifest(*, is_resealed: bool = True, **changes):
    """Changes fields; with its seal made anew, so that each check is tried by itself."""

    def edit(folder: Path) -> None:
        document = json.loads((folder / MANIFEST).read_text())
        for path, value in changes.items():
            *parents, last = path.split("__")
            place = document["manifest"]
            for parent in parents:
                place = place[parent]
            place[last] = value
        if is_resealed:
            document["sha256"] = seal_of(document["manifest"])
        (folder / MANIFEST).write_text(json.dumps(document))

    return edit


def replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file where the folder should be")


DAMAGES = {
    "file truncated": truncate,
    "file emptied": lambda folder: (folder / "engine.bin").write_bytes(b""),
    "byte flipped": flip,
    "byte flipped, times kept": flip_keeping_times,
    "file missing": lambda folder: (folder / "engine.bin").unlink(),
    "file added": lambda folder: (folder / "extra.bin").write_bytes(b"x"),
    "file is a link": replace_by_link,
    "manifest missing": lambda folder: (folder / MANIFEST).unlink(),
    "manifest emptied": lambda folder: (folder / MANIFEST).write_bytes(b""),
    "manifest is binary": lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe\x00"),
    "manifest is nested": lambda folder: (folder / MANIFEST).write_text("[" * 100_000),
    "manifest is a list": lambda folder: (folder / MANIFEST).write_text("[]"),
    "manifest huge": lambda folder: os.truncate(folder / MANIFEST, 1 << 30),
    "manifest of another schema": edit_manifest(schema=SCHEMA_VERSION + 1),
    "manifest of another request": edit_manifest(request__runtime="null 2"),
    "manifest of another key": edit_manifest(key="0" * 64),
    "manifest edited": edit_manifest(is_resealed=False, build_s=1.0),
    "manifest of a failed engine": edit_manifest(verdict__status="failed"),
    "manifest without its seal": lambda folder: (folder / MANIFEST).write_text(
        json.dumps(json.loads((folder / MANIFEST).read_text())["manifest"])
    ),
    "a file in place of the folder": replace_by_file,
    "manifest names a path outside": edit_manifest(
        files={"../../../etc/passwd": {"size_bytes": 1, "sha256": ""}}
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_engine_is_reported_not_loaded(store, damage):
    folder = publish(store)
    damage(folder)
    with pytest.raises(CacheError, match="damaged") as caught:
        look_up(store)
    assert REQUEST.key[:12] in caught.value.hint
    (entry,) = store.entries()
    assert store.verify(entry)
    publish(store)  # building again repairs it
    assert look_up(store) is not None


def test_an_engine_that_holds_a_link_is_not_sealed(store, tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "link").symlink_to("/etc/passwd")
    with pytest.raises(CacheError, match="may not hold"):
        store.seal(tmp_path / "engine")


def test_an_empty_engine_is_not_sealed(store, tmp_path):
    with pytest.raises(CacheError, match="no file"):
        store.seal(tmp_path)


def test_engines_are_found_by_the_beginning_of_their_key(store):
    publish(store)
    key = REQUEST.key
    assert [entry.key for entry in store.find(key[:6])] == [key]
    assert [entry.key for entry in store.find(key[:1])] == [key]
    for wrong in ("", "*", "../x", "zz", "?" * 6):
        assert store.find(wrong) == []


def test_removing_takes_the_engine_out_whole(store):
    publish(store)
    assert store.remove(REQUEST.key)
    assert not store.remove(REQUEST.key)
    assert look_up(store) is None
    assert not list((store.home / "tmp").iterdir())


def test_a_failed_build_leaves_nothing(store):
    def fail():
        with store.workshop(REQUEST.key) as shop:
            (shop / "half").write_bytes(b"x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not list((store.home / "tmp").iterdir())


BUILDER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from sdkit_dispatch.cache import EngineStore
    store = EngineStore(Path(sys.argv[1]))
    with store.locked(sys.argv[2]), store.workshop(sys.argv[2]) as shop:
        (shop / "half-written").write_bytes(b"x" * 1000)
        print("building", flush=True)
        sys.stdin.read()
    """
)


def start_builder(store: EngineStore) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(store.home), REQUEST.key],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "building\n"
    return process


def finish(process: subprocess.Popen) -> None:
    process.stdin.close()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("sweeper", ["the next builder", "sweep"])
def test_what_a_killed_builder_left_is_removed_and_its_lock_is_free(store, sweeper):
    process = start_builder(store)
    process.send_signal(signal.SIGKILL)
    finish(process)
    (leftover,) = (store.home / "tmp").iterdir()
    if sweeper == "sweep":
        assert store.sweep() == 1
    else:
        publish(store)
    assert not leftover.exists()


@pytest.mark.parametrize(
    "place",
    [
        "measured-order.json",
        "engines/LAYOUT",
        "locks/build-here-0.json",
        "failures/note.json",
        "references/a/b.npz",
        "scratch/verdicts/ab/note.json",
    ],
)
def test_what_killed_writers_left_is_swept_wherever_notes_are_kept(store, place):
    path = store.home / place
    path.parent.mkdir(parents=True, exist_ok=True)
    old, young = path.parent / "tmpold.tmp", path.parent / "tmpyoung.tmp"
    for partial in (old, young):
        partial.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert store.sweep() == 1
    assert not old.exists()
    assert young.exists()


def test_sweep_spares_a_running_build(store):
    process = start_builder(store)
    try:
        assert store.sweep() == 0
        assert len(list((store.home / "tmp").iterdir())) == 1
    finally:
        finish(process)


def test_a_waiting_builder_can_be_cancelled(store):
    process = start_builder(store)

    def cancel():
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt), store.locked(REQUEST.key, while_waiting=cancel):
            pass
    finally:
        finish(process)


def race(home: Path, results: multiprocessing.Queue) -> None:
    store = EngineStore(home)
    with store.locked(REQUEST.key):
        if look_up(store) is not None:
            results.put("hit")
            return
    try:
        with store.locked(REQUEST.key):
            if look_up(store) is None:
                with store.workshop(REQUEST.key) as shop:
                    out = shop / "engine"
                    out.mkdir()
                    (out / "engine.bin").write_bytes(os.urandom(1000))
                    files = store.seal(out)
                    verdict = Verdict(status="passed")
                    started_s = time.monotonic()
                    manifest = new_manifest(REQUEST, files, verdict=verdict, started_s=started_s)
                    store.publish(out, manifest)
                results.put("built")
            else:
                results.put("hit")
    except BaseException as error:
        results.put(repr(error))


def test_racing_processes_build_once(store):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    racers = [context.Process(target=race, args=(store.home, results)) for _ in range(4)]
    for racer in racers:
        racer.start()
    outcomes = sorted(results.get(timeout=60) for _ in racers)
    for racer in racers:
        racer.join()
    assert outcomes == ["built", "hit", "hit", "hit"]
    assert look_up(store) is not None


@pytest.mark.parametrize("name", ["with space", "кэш", "キャッシュ"])
def test_any_home_folder_works(tmp_path, name):
    store = EngineStore(tmp_path / name)
    publish(store)
    assert look_up(store) is not None
