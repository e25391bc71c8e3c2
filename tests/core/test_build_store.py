"""Builds and their store: where it cannot be written, quotas, forecasts, turns, deep checks."""

import errno
import json
import logging
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from sdkit_dispatch.api import Dispatcher
from sdkit_dispatch.build_slots import build_slot
from sdkit_dispatch.cache import MANIFEST, EngineStore
from sdkit_dispatch.choice import Choice
from sdkit_dispatch.contract import Device, no_report
from sdkit_dispatch.deep_check import check_deeply
from sdkit_dispatch.errors import CacheError, CancelledByUser, CompileError, NoVendorError
from sdkit_dispatch.failures import Failures, standing
from sdkit_dispatch.store_explain import explain_entry
from sdkit_dispatch.store_layout import UNWRITABLE
from sdkit_dispatch.store_use import last_use
from sdkit_null import SPEC
from store_examples import REQUEST, publish, state_of
from toy_bench import CPU, Bench
from toy_bench import REQUEST as SIZE

pytestmark = pytest.mark.usefixtures("null_is_the_reference", "refuge_of_its_own")

GPU = Device(
    id="pci:0000:01:00.0", kind="discrete", maker="nvidia", name="A card", pci_address="01:00.0"
)


def build(bench, pipeline, report=no_report, *, options=None, **settings):
    plan = bench.plan(**(options or {}))
    return bench.builder(**settings).build(bench.want(pipeline), [plan], report)


def test_a_home_that_cannot_exist_builds_and_keeps_nothing(recorded_bench, pipeline, caplog):
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /proc, in which nobody can make a folder")
    lone = Bench(Path("/proc/no-home"), recorded_bench.workers)
    result = build(lone, pipeline, must_check=False)
    assert not result.is_stored
    assert "not kept" in caplog.text
    assert "/proc/no-home" in caplog.text
    refuge = lone.store.home
    assert build(lone, pipeline, must_check=False).is_hit  # as long as the process lives
    lone.store.close()
    assert not refuge.exists()


def test_two_runs_without_a_home_build_once_and_in_turns(recorded_bench, pipeline):
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /proc, in which nobody can make a folder")
    first, second = (Bench(Path("/proc/no-home"), recorded_bench.workers) for _ in range(2))
    assert not build(first, pipeline, must_check=False).is_hit
    result = build(second, pipeline, must_check=False)
    assert result.is_hit
    assert not result.is_stored  # it is gone with the last of them
    assert first.store.locks == second.store.locks
    first.store.close()
    assert build(second, pipeline, must_check=False).is_hit
    second.store.close()
    assert not second.store.home.exists()


def fail_to_write_below_mock(monkeypatch, home: Path, error: OSError) -> None:
    """Makes the disk of one home refuse every folder; root can write even where nobody may."""
    from sdkit_dispatch import cache

    real = cache.prepare

    def refuse(place: Path) -> None:
        if place == home:
            raise error
        real(place)

    monkeypatch.setattr(cache, "prepare", refuse)


def test_what_cannot_be_checked_in_a_read_only_home_is_checked_beside_it(
    bench, pipeline, monkeypatch
):
    build(bench, pipeline, must_check=False)
    shutil.rmtree(bench.store.home / "references")
    bench.store.let_go()
    read_only = OSError(errno.EROFS, "Read-only file system")
    fail_to_write_below_mock(monkeypatch, bench.store.home, read_only)
    result = build(bench, pipeline)
    bench.store.close()
    assert [part.manifest.verdict.status for part in result.components] == ["passed"] * 3


def test_a_store_that_cannot_be_written_still_serves_what_it_has(
    bench,
    pipeline,
    monkeypatch,
):
    build(bench, pipeline)
    own, engines = bench.store.home, state_of(bench.store.home / "engines")
    bench.store.let_go()
    fail_to_write_below_mock(monkeypatch, own, OSError(errno.EROFS, "Read-only file system"))
    assert build(bench, pipeline).is_stored  # hits: nothing need be written
    options = {"compile_steps": 4, "only_component": "unet"}
    result = build(bench, pipeline, options=options)
    assert not result.is_stored
    assert {part.manifest.verdict.status for part in result.components} == {"passed"}
    assert build(bench, pipeline).is_stored
    bench.store.close()
    assert state_of(own / "engines") == engines


def test_an_engine_refused_in_a_store_that_cannot_be_written_is_built_elsewhere(
    bench, pipeline, dispatcher, monkeypatch
):
    choice, size = Choice(vendor="null", gpu="cpu"), {"width_px": 16, "height_px": 16}
    unet = dispatcher.build(pipeline, choice, **size).components[1].engine
    own = dispatcher.store
    with own.locked(unet.key), own.workshop(unet.key) as shop:
        out = Path(shutil.copytree(unet.folder, shop / "engine"))
        (out / MANIFEST).unlink()
        specs = json.loads((out / "engine.json").read_text())
        (out / "engine.json").write_text(json.dumps({**specs, "runtime": "null 0"}))
        manifest = own.read(unet.key).manifest
        own.publish(out, replace(manifest, files=own.seal(out)))
    error = OSError(errno.EROFS, "Read-only file system")
    fail_to_write_below_mock(monkeypatch, own.home, error)
    answer = dispatcher.load(pipeline, choice).generate("a fox", steps=1, **size)
    assert not answer.is_stored
    assert answer.steps == ()


def test_a_full_disk_and_a_missing_permission_are_nobody_s_mistake():
    assert {errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT} <= UNWRITABLE
    assert not {errno.ENOTDIR, errno.EEXIST} & UNWRITABLE


def test_a_disk_that_is_too_small_is_named_with_numbers(
    bench,
    pipeline,
    monkeypatch,
    caplog,
):
    from sdkit_dispatch import forecast

    monkeypatch.setattr(forecast, "free_bytes", lambda folder: 1000)
    with pytest.raises(CacheError, match=r"too full.*\d MB of disk \(0\.0 MB free\)") as caught:
        build(bench, pipeline)
    assert caught.value.concerns_store
    assert "not kept" in caplog.text  # the temporary folder was tried too
    bench.store.close()


def test_a_build_says_beforehand_what_it_takes(bench, pipeline):
    phases = []
    first = build(bench, pipeline, lambda progress: phases.append(progress.phase))
    assert first.forecast.components == ("text_encoder", "unet", "vae_decoder")
    assert first.forecast.estimate_s is None
    assert phases[0] == str(first.forecast)
    assert "time unknown" in phases[0]
    again = build(bench, pipeline)
    assert again.forecast is None
    other = build(bench, pipeline, options={"compile_steps": 4})
    built_s = sum(part.manifest.build_s for part in first.components)
    assert other.forecast.estimate_s == pytest.approx(built_s)
    assert other.forecast.disk_bytes > 0
    assert other.forecast.free_disk_bytes > 10**6
    assert "about" in str(other.forecast)


def test_a_store_over_its_quota_evicts_what_is_not_in_use_and_says_so(bench, pipeline, caplog):
    first = build(bench, pipeline)
    with caplog.at_level(logging.WARNING):
        second = build(bench, pipeline, options={"compile_steps": 4}, quota_bytes=1)
    old = {part.engine.key for part in first.components}
    new = {part.engine.key for part in second.components}
    assert {one.key for one in second.evicted} == old
    assert {entry.key for entry in bench.store.entries()} == new
    assert all(f"{key[:12]}" in caplog.text for key in old)


def test_the_quota_counts_for_engines_that_the_new_one_was_built_upon(bench, pipeline):
    first = build(bench, pipeline)
    want = bench.want(pipeline, replace(SIZE, width_px=32, height_px=32))
    second = bench.builder(quota_bytes=1).build(want, [bench.plan()], no_report)
    new = {part.engine.key for part in second.components}
    old = {part.engine.key for part in first.components} - new
    assert len(old) == 2  # the text encoder serves every size
    assert {one.key for one in second.evicted} == old
    assert {entry.key for entry in bench.store.entries()} == new


def test_building_upon_an_engine_is_no_use_of_it(bench, pipeline, tmp_path):
    unet = build(bench, pipeline).components[1].engine
    used = last_use(bench.store.memo, unet.key)
    other = Path(shutil.copytree(pipeline, tmp_path / "other"))
    weights = other / "unet" / "model.onnx_data"
    data = np.frombuffer(weights.read_bytes(), np.float32) * np.float32(1.01)
    weights.write_bytes(data.tobytes())
    assert not build(bench, other).components[1].is_hit
    assert last_use(bench.store.memo, unet.key) == used
    assert used.onnx == unet.onnx


def test_an_engine_that_a_worker_has_open_is_not_evicted(bench, pipeline):
    built = build(bench, pipeline).components[0]
    session = bench.workers.client(SPEC).load(built.engine, CPU)
    bench.store.let_go()
    assert not bench.store.evict(built.engine.key)
    session.close()
    assert bench.store.evict(built.engine.key)


def test_a_build_waits_for_the_other_build_of_the_host_and_says_for_which(bench, pipeline):
    def cancel(progress):
        if progress.phase.startswith("wait for another build"):
            raise CancelledByUser(progress.phase)

    bench.store.locks.mkdir(parents=True)
    with (
        build_slot(bench.store.locks, "unet for x", count=1, while_waiting=lambda _: None),
        pytest.raises(CancelledByUser, match=f"unet for x, pid {os.getpid()}, since"),
    ):
        build(bench, pipeline, cancel)
    with build_slot(bench.store.locks, "unet for x", count=1, while_waiting=lambda _: None):
        assert not build(bench, pipeline, cancel, parallel_builds=2).is_hit


def test_a_stored_engine_is_explained_beside_its_nearest(bench, pipeline):
    first = build(bench, pipeline).components[1]
    assert explain_entry(bench.store, bench.store.read(first.engine.key)).nearest == ""
    other = build(bench, pipeline, options={"compile_steps": 4}).components[1]
    found = explain_entry(bench.store, bench.store.read(other.engine.key))
    assert (found.status, found.nearest) == ("sound", first.engine.key)
    (difference,) = found.differences
    assert (difference.field, difference.wanted, difference.stored) == (
        "options.compile_steps",
        "4",
        "3",
    )


@pytest.fixture
def dispatcher(bench):
    """A dispatcher on the bench's home; its workers are its own."""
    with Dispatcher(home=bench.store.home) as running:
        running._devices = [CPU]
        yield running


def test_a_deep_check_tells_right_wrong_and_unknown_engines_apart(bench, pipeline, dispatcher):
    right = build(bench, pipeline)
    drift = {"fault": "drift", "only_component": "unet"}
    wrong = build(bench, pipeline, options=drift, must_check=False)
    keys = {part.engine.key: part.component for part in wrong.components}
    found = {one.key: one for one in check_deeply(dispatcher, list(dispatcher.store.entries()))}
    assert {found[part.engine.key].status for part in right.components} == {"passed"}
    assert {keys[key]: found[key].status for key in keys} == {
        "text_encoder": "passed",
        "unet": "failed",
        "vae_decoder": "passed",
    }
    assert len(found) == 6


def test_a_deep_check_says_what_it_could_not_check_and_why(bench, pipeline, dispatcher):
    unet = build(bench, pipeline).components[1]
    for note in (bench.store.home / "references").rglob("*.json"):
        note.unlink()
    entries = [bench.store.read(unet.engine.key)]
    (opened,) = check_deeply(dispatcher, entries)
    assert (opened.status, "no stored recording" in opened.message) == ("opened", True)
    for note in (bench.store.memo / "uses").rglob("*.json"):
        note.unlink()  # where its graph is: the null vendor maps the weights
    (lost,) = check_deeply(dispatcher, entries)
    assert (lost.status, "without its model" in lost.message) == ("unknown", True)
    publish(bench.store)
    (foreign,) = check_deeply(dispatcher, [bench.store.read(REQUEST.key)])
    assert (foreign.status, "built with null 1 for" in foreign.message) == ("unknown", True)
    dispatcher.specs = {}
    (unknown,) = check_deeply(dispatcher, entries)
    assert (unknown.status, "not part of" in unknown.message) == ("unknown", True)


def test_a_deep_check_goes_on_past_an_engine_whose_options_are_not_known(
    bench, pipeline, dispatcher
):
    build(bench, pipeline)
    stored = publish(bench.store, replace(REQUEST, options={"of_yesterday": 1}))
    found = {one.key: one for one in check_deeply(dispatcher, list(dispatcher.store.entries()))}
    assert [one.status for one in found.values()].count("passed") == 3
    assert found[stored.name].status == "unknown"
    assert "of_yesterday" in found[stored.name].message


def make_half(graph: Path) -> None:
    """Makes most weights of a graph bfloat16, by a tensor that no node reads."""
    model = onnx.load(graph, load_external_data=False)
    count = 1000
    model.graph.initializer.append(
        onnx.helper.make_tensor(
            "half", onnx.TensorProto.BFLOAT16, [count], bytes(2 * count), raw=True
        )
    )
    onnx.save(model, graph)


def test_a_deep_check_allows_a_half_precision_graph_what_the_gate_allows_it(
    bench, pipeline, dispatcher
):
    make_half(pipeline / "unet" / "model.onnx")
    build(bench, pipeline)  # records the reference
    options = {"fault": "drift", "only_component": "unet", "holds_weights": True}
    drifting = build(bench, pipeline, options=options, must_check=False)
    entries = [bench.store.read(drifting.components[1].engine.key)]
    assert not entries[0].manifest.verdict.limits
    (found,) = check_deeply(dispatcher, entries)
    assert (found.status, found.component) == ("passed", "unet")
    for note in (bench.store.memo / "uses").rglob("*.json"):
        note.unlink()  # where its graph is; what its weights are is remembered by its digest
    (found,) = check_deeply(dispatcher, entries)
    assert found.status == "passed"
    shutil.rmtree(bench.store.memo / "graphs")
    (found,) = check_deeply(dispatcher, entries)
    assert (found.status, "a graph of full precision" in found.message) == ("unknown", True)


def test_require_gpu_makes_the_step_to_the_cpu_an_error_of_its_own(dispatcher, pipeline, tmp_path):
    profile = tmp_path / "bad.yaml"
    profile.write_text("options: {null: {fault: compile_error}}\n")
    dispatcher._devices = [GPU, CPU]
    choice = Choice(vendor="null", profile=str(profile), must_check=False)
    with pytest.raises(CompileError, match=r"(?s)none of 2.*on cpu"):
        dispatcher.build(pipeline, choice)
    gpu_only = Choice(vendor="null", profile=str(profile), must_check=False, must_use_gpu=True)
    for run in (dispatcher.build, lambda *args: dispatcher.load(*args).generate("a fox", steps=1)):
        with pytest.raises(NoVendorError, match="--require-gpu forbids the CPU") as caught:
            run(pipeline, gpu_only)
        assert "on cpu" not in caught.value.message
        assert caught.value.exit_code == 3
    dispatcher._devices = [CPU]
    with pytest.raises(NoVendorError, match="--require-gpu forbids a processor"):
        dispatcher.build(pipeline, gpu_only)


def test_a_plan_shows_the_failures_that_still_count(bench, pipeline, dispatcher):
    with pytest.raises(CompileError):
        build(bench, pipeline, options={"fault": "compile_error"})
    report = dispatcher.plan_report(Choice(vendor="null"))
    (failure,) = report.failures
    assert (failure.component, failure.kind) == ("text_encoder", "CompileError")
    assert failure.graph_digest == bench.want(pipeline).digests["text_encoder"][0]
    known = list(Failures(bench.store.home).all())
    newer = Device(id="cpu", kind="cpu", maker="unknown", name="a processor", driver="2")
    assert standing(known, [newer], []) == ()
    other = bench.plan()
    assert standing(known, [CPU], [other]) == tuple(known)
    assert standing(known, [CPU], [replace(other, runtime="null 99")]) == ()


def test_engines_of_a_shared_store_serve_a_build(bench, pipeline, tmp_path):
    build(bench, pipeline)
    before = state_of(bench.store.home / "engines")
    mine = Bench(tmp_path / "mine", bench.workers)
    mine.store = EngineStore(tmp_path / "mine", shared=[bench.store.home])
    assert build(mine, pipeline).is_hit
    other = build(mine, pipeline, options={"compile_steps": 4})
    assert not other.is_hit
    assert all(
        Path(part.engine.folder).is_relative_to(mine.store.home) for part in other.components
    )
    assert state_of(bench.store.home / "engines") == before
