"""Builds of a toy pipeline with the null vendor: hits, misses, faults, the gate and the ladder."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sdkit_dispatch import reference
from sdkit_dispatch.build import Builder
from sdkit_dispatch.cache import MANIFEST, EngineStore, LaterVerdict, Verdict
from sdkit_dispatch.component_build import ComponentBuilder
from sdkit_dispatch.component_gate import ComponentGate, place_of
from sdkit_dispatch.contract import (
    Device,
    GenerateRequest,
    Plan,
    Progress,
    no_report,
    record_to_json,
)
from sdkit_dispatch.detect.absent import absent_device
from sdkit_dispatch.errors import (
    CacheError,
    CancelledByUser,
    CompileError,
    NoVendorError,
    NumericError,
    RunError,
    WorkerError,
)
from sdkit_dispatch.pipeline_files import read_pipeline
from sdkit_dispatch.reference import Reference
from sdkit_dispatch.store_explain import explain
from sdkit_dispatch.wanted import build_request, wanted
from sdkit_null import SPEC
from toy_bench import CPU, REQUEST

pytestmark = pytest.mark.usefixtures("null_is_the_reference")


def test_second_build_is_a_hit_and_starts_nothing(bench, pipeline, monkeypatch):
    plan = bench.plan()
    first = bench.builder().build(bench.want(pipeline), [plan], no_report)
    assert not first.is_hit
    assert {part.manifest.verdict.status for part in first.components} == {"passed"}
    monkeypatch.setattr(bench.workers, "fresh", None)  # would fail if it were used
    monkeypatch.setattr(bench.workers, "client", None)
    second = bench.builder().build(bench.want(pipeline), [plan], no_report)
    assert second.is_hit
    assert [part.engine.key for part in second.components] == [
        part.engine.key for part in first.components
    ]


def test_a_copy_under_another_name_is_a_hit(bench, pipeline, tmp_path):
    plan = bench.plan()
    bench.builder().build(bench.want(pipeline), [plan], no_report)
    copy = Path(shutil.copytree(pipeline, tmp_path / "копия модели"))
    assert bench.builder().build(bench.want(copy), [plan], no_report).is_hit


def test_a_changed_byte_of_the_weights_is_a_miss_that_names_the_field(bench, pipeline):
    plan = bench.plan()
    bench.builder().build(bench.want(pipeline), [plan], no_report)
    data = pipeline / "unet" / "model.onnx_data"
    before = data.stat()
    with data.open("r+b") as stream:
        stream.seek(101)
        byte = stream.read(1)
        stream.seek(101)
        stream.write(bytes([byte[0] ^ 0x10]))
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    want = bench.want(pipeline)
    explanation = explain(bench.store, build_request(plan, SPEC, want, "unet"))
    assert explanation.status == "miss"
    assert [one.field for one in explanation.differences] == ["weights_digest"]
    result = bench.builder().build(want, [plan], no_report)
    assert {part.component: part.is_hit for part in result.components} == {
        "text_encoder": True,
        "unet": False,
        "vae_decoder": True,
    }


def test_a_damaged_engine_is_built_again_and_says_so(bench, pipeline):
    plan = bench.plan()
    first = bench.builder().build(bench.want(pipeline), [plan], no_report)
    unet = next(part for part in first.components if part.component == "unet")
    file = next(path for path in Path(unet.engine.folder).iterdir() if "manifest" not in path.name)
    file.write_bytes(file.read_bytes()[:-1])
    result = bench.builder().build(bench.want(pipeline), [plan], no_report)
    again = next(part for part in result.components if part.component == "unet")
    assert not again.is_hit
    assert "damaged" in again.damage
    assert bench.builder().build(bench.want(pipeline), [plan], no_report).is_hit


@pytest.mark.parametrize(
    ("fault", "words"),
    [("nan", "not finite"), ("constant", "flat"), ("drift", "off by")],
)
def test_wrong_numbers_are_caught_and_nothing_is_stored(bench, pipeline, fault, words):
    plan = bench.plan(fault=fault, only_component="vae_decoder")
    with pytest.raises(NumericError, match=words):
        bench.builder().build(bench.want(pipeline), [plan], no_report)
    stored = {entry.manifest.request.component for entry in bench.store.entries()}
    assert stored == {"text_encoder", "unet"}
    assert bench.leftovers() == []


def test_wrong_numbers_at_one_precision_are_rebuilt_at_a_safer_one(bench, pipeline):
    fp16 = bench.workers.probe(
        SPEC, CPU, "fp16", {"fault": "nan", "only_component": "unet", "only_precision": "fp16"}
    )
    result = bench.builder().build(bench.want(pipeline), [fp16], no_report)
    precisions = {part.component: part.manifest.request.precision for part in result.components}
    assert precisions == {"text_encoder": "fp16", "unet": "fp32", "vae_decoder": "fp16"}
    unet = next(part for part in result.components if part.component == "unet")
    assert unet.manifest.verdict.status == "passed"
    assert "fp16" in unet.manifest.earlier[0].reason
    again = bench.builder().build(bench.want(pipeline), [fp16], no_report)
    assert again.is_hit


@pytest.mark.parametrize(
    "fault", ["compile_error", "crash_on_compile", "crash_on_load", "load_error", "nan"]
)
def test_the_ladder_takes_its_next_step_and_says_why(bench, pipeline, fault):
    plans = [bench.plan(fault=fault, only_component="unet"), bench.plan()]
    result = bench.builder().build(bench.want(pipeline), plans, no_report)
    assert result.plan == plans[1]
    (step,) = result.steps
    assert step.vendor == "null"
    assert "unet" in step.reason or "worker died" in step.reason
    assert bench.leftovers() == []


def test_a_failure_is_remembered_until_it_is_retried(bench, pipeline, tmp_path):
    bad = bench.plan(fault="compile_error", only_component="unet")
    with pytest.raises(CompileError, match="as asked"):
        bench.builder().build(bench.want(pipeline), [bad], no_report)
    with pytest.raises(CompileError, match="not tried again") as caught:
        bench.builder().build(bench.want(pipeline), [bad], no_report)
    assert "--retry" in caught.value.hint
    with pytest.raises(CompileError) as caught:
        bench.builder(may_retry=True).build(bench.want(pipeline), [bad], no_report)
    assert "not tried again" not in caught.value.message
    other = replace(bad, device=replace(CPU, driver="2.0"))
    with pytest.raises(CompileError) as caught:
        bench.builder().build(bench.want(pipeline), [other], no_report)
    assert "not tried again" not in caught.value.message


def test_strict_makes_the_first_failure_an_error(bench, pipeline):
    plans = [bench.plan(fault="compile_error"), bench.plan()]
    with pytest.raises(CompileError, match="refuses this graph"):
        bench.builder(is_strict=True).build(bench.want(pipeline), plans, no_report)


def test_when_every_way_failed_all_reasons_are_listed(bench, pipeline):
    plans = [bench.plan(fault="compile_error"), bench.plan(fault="unsupported_op")]
    with pytest.raises(CompileError, match=r"(?s)none of 2.*refuses this graph.*Frobnicate"):
        bench.builder().build(bench.want(pipeline), plans, no_report)


def test_no_check_marks_the_engine_and_a_later_build_checks_it(bench, pipeline):
    plan = bench.plan()
    built = bench.builder(must_check=False).build(bench.want(pipeline), [plan], no_report)
    assert {part.manifest.verdict.status for part in built.components} == {"unchecked"}
    assert bench.builder(must_check=False).build(bench.want(pipeline), [plan], no_report).is_hit
    checked = bench.builder().build(bench.want(pipeline), [plan], no_report)
    assert {part.manifest.verdict.status for part in checked.components} == {"passed"}


def test_without_a_reference_engines_are_marked_unchecked_with_the_reason(
    bench, pipeline, monkeypatch
):
    monkeypatch.setattr(reference, "VENDOR", "absent")
    plan = bench.plan()
    built = bench.builder().build(bench.want(pipeline), [plan], no_report)
    verdict = built.components[0].manifest.verdict
    assert verdict.status == "unchecked"
    assert "'absent'" in verdict.reason
    assert bench.builder().build(bench.want(pipeline), [plan], no_report).is_hit


def test_a_reference_that_cannot_serve_costs_no_compile_and_is_asked_once(
    bench, pipeline, monkeypatch
):
    asked = []

    def refuse(self, *args, **kwargs):
        asked.append(args)
        self.missing = "it is broken"

    monkeypatch.setattr(Reference, "recording", refuse)
    plan = bench.plan()
    built = bench.builder().build(bench.want(pipeline), [plan], no_report)
    assert {part.manifest.verdict.reason for part in built.components} == {"it is broken"}
    assert len(asked) == 1
    assert bench.builder().build(bench.want(pipeline), [plan], no_report).is_hit


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_comfyui_tensorrt_42_the_token_axis_is_in_the_key_in_multiples_of_77(
    bench, pipeline, chunks
):
    want = wanted(read_pipeline(pipeline), REQUEST, token_chunks=chunks, memo=bench.store.memo)
    assert want.shapes["unet"]["encoder_hidden_states"][1] == 77 * chunks
    built = bench.builder().build(want, [bench.plan()], no_report)
    assert {part.manifest.verdict.status for part in built.components} == {"passed"}


def test_strict_forbids_a_safer_precision_too(bench, pipeline):
    options = {"fault": "nan", "only_component": "unet", "only_precision": "fp16"}
    fp16 = bench.workers.probe(SPEC, CPU, "fp16", options)
    with pytest.raises(NumericError, match="not finite"):
        bench.builder(is_strict=True).build(bench.want(pipeline), [fp16], no_report)


def test_explain_asks_for_the_engine_that_build_would_take(bench, pipeline):
    options = {"fault": "nan", "only_component": "unet", "only_precision": "fp16"}
    fp16 = bench.workers.probe(SPEC, CPU, "fp16", options)
    want = bench.want(pipeline)
    bench.builder().build(want, [fp16], no_report)
    with ComponentBuilder(bench.builder().tools, want, fp16, no_report) as components:
        request = components.current_request("unet")
    assert request.precision == "fp32"
    assert explain(bench.store, request).status == "hit"


def test_without_any_environment_it_is_no_vendor_and_says_what_to_install(bench, pipeline):
    plans = [replace(bench.plan(), state="installable", runtime="")] * 2
    with pytest.raises(NoVendorError, match="not in this test") as caught:
        bench.builder().build(bench.want(pipeline), plans, no_report)
    assert "vendors install null" in caught.value.hint


def test_an_installed_vendor_is_planned_as_it_really_is(bench, pipeline):
    installed = []
    plan = replace(bench.plan(), state="installable", runtime="", precision="fp16")
    builder = Builder(bench.builder().tools, install=lambda spec, report: installed.append(spec))
    result = builder.build(bench.want(pipeline), [plan], no_report)
    assert installed == [SPEC]
    assert result.plan.state == "ready"
    assert result.plan.runtime.startswith("null ")
    assert result.plan.precision == "fp32"  # the vendor's own choice: the user asked for none


def test_a_store_that_cannot_be_written_is_named(bench, pipeline):
    (bench.store.home / "tmp").write_text("a file where a folder should be")
    with pytest.raises(CacheError, match="cannot be used"):
        bench.builder().build(bench.want(pipeline), [bench.plan()], no_report)


LONG = 3000
"""Reports of a compilation that is surely not over when its first report is seen."""


def is_half_written(progress: Progress) -> bool:
    """True while the null vendor is in the middle of compiling the UNet: its files are there."""
    return progress.phase == "null: compile unet" and 0 < (progress.fraction or 0) < 1


def written_files(home: Path) -> list[Path]:
    return [path for path in (home / "tmp").rglob("*") if path.is_file()]


def test_amdmigraphx_4164_a_cancelled_build_leaves_nothing_half_written(bench, pipeline):
    def cancel_in_unet(progress: Progress) -> None:
        if is_half_written(progress):
            assert written_files(bench.store.home)
            raise CancelledByUser

    plan = bench.plan(compile_steps=LONG)
    with pytest.raises(CancelledByUser):
        bench.builder().build(bench.want(pipeline), [plan], cancel_in_unet)
    assert bench.leftovers() == []
    result = bench.builder().build(bench.want(pipeline), [plan], no_report)
    assert {part.component: part.is_hit for part in result.components}["text_encoder"]


def test_a_worker_killed_in_a_build_leaves_no_entry_and_the_next_build_is_right(bench, pipeline):
    # A worker reports ahead of its reader: this many that it cannot be through before it is killed.
    plan = bench.plan(compile_steps=20 * LONG)

    def kill_in_unet(progress: Progress) -> None:
        if is_half_written(progress):
            assert written_files(bench.store.home)
            os.kill(bench.workers.client(SPEC).pid, signal.SIGKILL)

    with pytest.raises(WorkerError, match="signal 9"):
        bench.builder().build(bench.want(pipeline), [plan], kill_in_unet)
    assert bench.leftovers() == []
    assert [bench.store.verify(entry) for entry in bench.store.entries()] == [""]
    result = bench.builder().build(bench.want(pipeline), [bench.plan()], no_report)
    assert {part.manifest.verdict.status for part in result.components} == {"passed"}


BUILD = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    sys.path += [sys.argv[1], sys.argv[1] + "/core"]
    from sdkit_dispatch import reference
    reference.VENDOR, reference.OPTIONS = "null", {}
    from toy_bench import Bench, new_workers
    home = Path(sys.argv[2])
    bench = Bench(home, new_workers(home))
    def report(progress):
        print(progress.phase, progress.fraction, flush=True)
    with bench.workers:
        plan = bench.plan(compile_steps=int(sys.argv[4]))
        result = bench.builder().build(bench.want(Path(sys.argv[3])), [plan], report)
    print("HITS", *[part.component for part in result.components if part.is_hit], flush=True)
    """
)


def start_build(home: Path, pipeline: Path, *, steps: int = 3) -> subprocess.Popen:
    tests = str(Path(__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, tests, str(home), str(pipeline), str(steps)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_wyoming_whisper_trt_1017_onnxruntime_10412_two_processes_repair_an_entry_once(
    tmp_path, pipeline
):
    """The UNet is damaged, the rest is missing: each is built by one, and waited for by the other.

    The report of onnxruntime has two processes that fill one cache at once.
    """
    home = tmp_path / "home"
    start_build(home, pipeline).communicate()
    store = EngineStore(home)
    for entry in list(store.entries()):
        if entry.manifest.request.component == "unet":
            os.truncate(entry.folder / "graph.onnx", 100)
        else:
            store.remove(entry.key)
    builds = [start_build(home, pipeline) for _ in range(2)]
    outputs = [build.communicate()[0] for build in builds]
    assert [build.returncode for build in builds] == [0, 0]
    for component in ("text_encoder", "unet", "vae_decoder"):
        assert sum(f"null: compile {component} None\n" in text for text in outputs) == 1
    hits = sorted(word for text in outputs for word in text.partition("HITS ")[2].split())
    assert hits == ["text_encoder", "unet", "vae_decoder"]
    assert [store.verify(entry) for entry in store.entries()] == [""] * 3


def test_darktable_21208_a_build_whose_caller_is_killed_leaves_no_half_entry(
    tmp_path, pipeline, bench
):
    build = start_build(bench.store.home, pipeline, steps=LONG)
    for line in build.stdout:
        if line.startswith("null: compile unet 0.0") and not line.endswith(" 0.0\n"):
            assert written_files(bench.store.home)
            build.send_signal(signal.SIGKILL)
            break
    build.communicate()
    assert all(bench.store.verify(entry) == "" for entry in bench.store.entries())
    result = bench.builder().build(bench.want(pipeline), [bench.plan()], no_report)
    assert {part.manifest.verdict.status for part in result.components} == {"passed"}
    assert bench.leftovers() == []


def test_a_killed_reference_is_an_error_and_not_an_unchecked_engine(bench, pipeline):
    shutil.rmtree(bench.store.home / "references")
    started = []
    real = bench.workers.fresh

    def fresh(spec, **settings):
        started.append(real(spec, **settings))
        return started[-1]

    def kill(progress: Progress) -> None:
        if progress.phase == "reference: denoise":
            os.kill(started[-1].pid, signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.workers, "fresh", fresh)
        with pytest.raises(WorkerError, match="signal 9"):
            bench.builder().build(bench.want(pipeline), [bench.plan()], kill)
    assert list(bench.store.entries()) == []
    built = bench.builder().build(bench.want(pipeline), [bench.plan()], no_report)
    assert {part.manifest.verdict.status for part in built.components} == {"passed"}


def test_a_damaged_recording_is_made_again(bench, pipeline):
    bench.builder().build(bench.want(pipeline), [bench.plan()], no_report)
    (recording,) = (bench.store.home / "references").rglob("*.npz")
    content = recording.read_bytes()
    recording.write_bytes(content[: len(content) // 2])
    for entry in list(bench.store.entries()):
        bench.store.remove(entry.key)
    result = bench.builder().build(bench.want(pipeline), [bench.plan()], no_report)
    assert {part.manifest.verdict.status for part in result.components} == {"passed"}


def test_engines_compute_what_the_graph_says(bench, pipeline):
    """The null vendor and a recording made by another process agree to the last bit."""
    built = bench.builder().build(bench.want(pipeline), [bench.plan()], no_report)
    for part in built.components:
        for metrics in part.manifest.verdict.metrics.values():
            assert np.isclose(metrics["max_abs"], 0)


def test_an_engine_for_an_absent_device_is_checked_when_a_device_first_loads_it(bench, pipeline):
    absent = absent_device("sm_89")
    there = replace(absent, id="pci:0000:01:00.0", name="A card", is_absent=False, driver="580")

    def plan_for(device, **options):
        plan = bench.workers.probe(SPEC, device, None, {"target": "sm_89", **options})
        assert isinstance(plan, Plan)
        return plan

    built = bench.builder().build(bench.want(pipeline), [plan_for(absent)], no_report)
    verdicts = {part.manifest.verdict.status for part in built.components}
    assert verdicts == {"unchecked-target"}
    again = bench.builder().build(bench.want(pipeline), [plan_for(absent)], no_report)
    assert again.is_hit
    first = bench.builder().build(bench.want(pipeline), [plan_for(there)], no_report)
    assert first.is_hit
    assert {part.manifest.verdict.status for part in first.components} == {"passed"}
    assert [bench.store.verify(entry) for entry in bench.store.entries()] == [""] * 3


def test_an_engine_built_for_an_absent_device_that_is_wrong_there_is_refused(bench, pipeline):
    absent = absent_device("sm_89")
    there = replace(absent, id="pci:0000:01:00.0", name="A card", is_absent=False)
    options = {"fault": "drift", "only_component": "unet"}
    plans = {
        device.id: bench.workers.probe(SPEC, device, None, options) for device in (absent, there)
    }
    bench.builder().build(bench.want(pipeline), [plans[absent.id]], no_report)
    for _ in range(2):
        with pytest.raises(NumericError, match="unet"):
            bench.builder(may_retry=True).build(bench.want(pipeline), [plans[there.id]], no_report)


RANGES = {
    "unet": [
        {"batch": [1, 2, 4], "height": [4, 8, 16], "width": [4, 8, 16]},
        {"batch": [2, 2, 2], "height": [4, 6, 8], "width": [4, 6, 8]},
    ],
    "vae_decoder": [{"height": [4, 8, 16], "width": [4, 8, 16]}],
}
"""In cells of latents: of the toy pipeline, 2 pixels each."""


def sized(width_px: int, height_px: int) -> GenerateRequest:
    return replace(REQUEST, width_px=width_px, height_px=height_px)


def test_an_engine_with_size_ranges_serves_every_size_within_them(bench, pipeline):
    plan = bench.plan(profiles=RANGES)
    builder = bench.builder()
    first = builder.build(bench.want(pipeline, sized(32, 16)), [plan], no_report)
    assert not first.is_hit
    second = builder.build(bench.want(pipeline, sized(20, 32)), [plan], no_report)
    assert second.is_hit
    unets = [one.components[1].engine for one in (first, second)]
    assert unets[0].key == unets[1].key
    assert unets[0].request.shapes["sample"] == (2, 4, 8, 8)
    assert [one.shapes["sample"] for one in unets] == [(2, 4, 8, 16), (2, 4, 16, 10)]


def test_the_narrowest_range_that_holds_a_size_is_built_for(bench, pipeline):
    plan = bench.plan(profiles=RANGES)
    narrow = build_request(plan, SPEC, bench.want(pipeline, sized(16, 12)), "unet")
    assert narrow.shapes["sample"] == (2, 4, 6, 6)
    wide = build_request(plan, SPEC, bench.want(pipeline, sized(16, 18)), "unet")
    assert wide.shapes["sample"] == (2, 4, 8, 8)


def test_a_size_outside_all_ranges_is_a_step_of_the_ladder_with_a_sentence(bench, pipeline):
    ranged, free = bench.plan(profiles=RANGES), bench.plan()
    want = bench.want(pipeline, sized(40, 16))
    result = bench.builder().build(want, [ranged, free], no_report)
    assert result.plan == free
    (step,) = result.steps
    assert step.kind == "CompileError"
    assert "sample [2, 4, 8, 20]" in step.reason
    assert "height [4, 6, 8], width [4, 6, 8] of options.null.profiles" in step.reason
    # It is the request that does not fit: nothing is remembered against the vendor.
    assert not list(bench.builder().tools.failures.all())


def test_a_side_that_does_not_halve_evenly_is_in_no_range(bench, pipeline, tmp_path):
    # The graph of such an engine has "twice as large" in it: TensorRT fails as it is opened.
    folder = shutil.copytree(pipeline, tmp_path / "of two levels")
    config = folder / "unet" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"block_out_channels": [4, 4]}))
    plan = bench.plan(profiles=RANGES)
    assert build_request(plan, SPEC, bench.want(folder, sized(16, 20)), "unet")
    with pytest.raises(CompileError, match=r"sample \[2, 4, 9, 8\] has sides that do not divide"):
        build_request(plan, SPEC, bench.want(folder, sized(16, 18)), "unet")


def test_pictures_of_an_engine_with_ranges_are_those_of_engines_for_each_size(bench, pipeline):
    pictures = []
    for options in ({}, {"profiles": RANGES}):
        for request in (sized(32, 16), sized(16, 16), sized(32, 16)):
            want = bench.want(pipeline, request)
            built = bench.builder().build(want, [bench.plan(**options)], no_report)
            params = {
                "pipeline": str(pipeline),
                "memo": None,
                "engines": [record_to_json(part.engine) for part in built.components],
                "device": record_to_json(CPU),
                "request": record_to_json(request),
                "keep_loaded": True,
            }
            answer = bench.workers.client(SPEC).generate(params, {}, no_report)
            pictures.append(answer.arrays["images"])
    for free, ranged in zip(pictures[:3], pictures[3:], strict=True):
        np.testing.assert_array_equal(free, ranged)


def refuse_when_opened(store: EngineStore, key: str) -> None:
    """Replaces an engine by one that is whole and unchecked, and that its runtime refuses."""
    entry = store.read(key)
    with store.locked(key), store.workshop(key) as shop:
        out = shop / "engine"
        shutil.copytree(entry.folder, out, ignore=shutil.ignore_patterns(MANIFEST))
        specs = json.loads((out / "engine.json").read_text())
        (out / "engine.json").write_text(json.dumps({**specs, "runtime": "null 0"}))
        verdict = Verdict(status="unchecked", reason="imported")
        store.publish(out, replace(entry.manifest, files=store.seal(out), verdict=verdict))


def test_a_stored_engine_that_the_gate_cannot_open_is_built_again(bench, pipeline):
    want, plan = bench.want(pipeline), bench.plan()
    key = bench.builder().build(want, [plan], no_report).components[1].engine.key
    refuse_when_opened(bench.store, key)
    result = bench.builder().build(want, [plan], no_report)
    assert [part.is_hit for part in result.components] == [True, False, True]
    assert "was built by null 0" in result.components[1].damage
    assert result.components[1].manifest.verdict.status == "passed"
    assert not list(bench.builder().tools.failures.all())
    assert bench.builder().build(want, [plan], no_report).is_hit


def test_another_card_in_the_same_slot_has_a_verdict_of_its_own(bench, pipeline):
    slot = {"id": "pci:0000:03:00.0", "kind": "discrete", "maker": "amd", "driver": "25.2"}
    one = Device(**slot, name="a card", arch="gfx1030", pci_id="1002:73bf")
    two = Device(**slot, name="another card", arch="gfx1100", pci_id="1002:744c")
    for device, checks in ((one, 3), (two, 3), (one, 0), (two, 0)):
        phases = []
        plan = bench.plan(device=device)
        result = bench.builder().build(
            bench.want(pipeline), [plan], lambda progress, seen=phases: seen.append(progress.phase)
        )
        assert len([phase for phase in phases if phase.startswith("null: check")]) == checks
        assert {part.manifest.verdict.status for part in result.components} == {"passed"}


def test_retry_asks_the_gate_again_about_a_stored_engine_that_it_refused(bench, pipeline):
    want, plan = bench.want(pipeline), bench.plan()
    first = bench.builder(must_check=False).build(want, [plan], no_report)
    verdict = Verdict(status="failed", reason="the driver of yesterday")
    refused = LaterVerdict(verdict=verdict)
    bench.store.keep_later_verdict(first.components[1].engine.key, place_of(CPU), refused)
    with pytest.raises(NumericError):
        bench.builder().build(want, [plan], no_report)
    again = bench.builder(may_retry=True).build(want, [plan], no_report)
    assert again.is_hit
    assert {part.manifest.verdict.status for part in again.components} == {"passed"}
    assert bench.builder().build(want, [plan], no_report).is_hit


def test_every_size_of_a_range_passes_the_gate_before_it_is_used(bench, pipeline):
    plan = bench.plan(profiles=RANGES)

    def checked(request: GenerateRequest) -> list[str]:
        phases = []
        want = bench.want(pipeline, request)
        bench.builder().build(want, [plan], lambda progress: phases.append(progress.phase))
        return [phase for phase in phases if phase.startswith("null: check")]

    assert len(checked(sized(20, 32))) == 3
    assert checked(sized(32, 16)) == ["null: check unet", "null: check vae_decoder"]
    assert checked(sized(20, 32)) == checked(sized(32, 16)) == []


def test_a_size_of_a_range_that_fails_takes_no_other_size_with_it(bench, pipeline, monkeypatch):
    plan, real = bench.plan(profiles=RANGES), ComponentGate.check

    def run_out_of_memory(self, engine, device):
        if engine.shapes.get("sample") == (2, 4, 8, 16):
            raise RunError("no memory for so large a picture")
        return real(self, engine, device)

    monkeypatch.setattr(ComponentGate, "check", run_out_of_memory)
    with pytest.raises(RunError, match="no memory"):
        bench.builder().build(bench.want(pipeline, sized(32, 16)), [plan], no_report)
    small = bench.builder().build(bench.want(pipeline, sized(20, 32)), [plan], no_report)
    assert small.plan == plan
    with pytest.raises(RunError, match="no memory"):
        bench.builder().build(bench.want(pipeline, sized(32, 16)), [plan], no_report)
