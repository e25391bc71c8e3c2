"""Public reports of engine caches and ladders that failed: each is a test of ours, named after it.

`REPORTS` says where. Faults of one runtime are in
tests/vendors/test_cache_bug_reports_vendors.py.
"""

import ast
import errno
import itertools
import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sdkit_dispatch.__main__ import main
from sdkit_dispatch.api import Dispatcher
from sdkit_dispatch.cache import MANIFEST, EngineStore, Verdict, new_manifest
from sdkit_dispatch.choice import Choice
from sdkit_dispatch.contract import BuildRequest, Progress, Rejection, no_report
from sdkit_dispatch.errors import CacheError, CancelledByUser, NumericError
from sdkit_null import SPEC
from sdkit_null.adapter import NullAdapter
from test_build import LONG, start_build
from toy_bench import CPU, REQUEST, Bench
from toy_pipeline import make_toy_pipeline

pytestmark = pytest.mark.usefixtures("null_is_the_reference")

REPORTS = {
    1: ("onnxruntime#32254", "core/test_cache_bug_reports.py"),
    2: ("onnxruntime#6455", "core/test_cache_bug_reports.py"),
    3: ("ROCm/onnxruntime#235", "core/test_cache_bug_reports.py"),
    4: ("ComfyUI-Upscaler-Tensorrt#22", "core/test_cache_bug_reports.py"),
    5: ("AMD-SHARK-Studio#1156", "core/test_cache_bug_reports.py"),
    6: ("onnxruntime#28158", "core/test_cache_bug_reports.py"),
    7: ("openvino#20190", "core/test_cache_bug_reports.py"),
    8: ("Qwen-Image-TensorRT#5", "core/test_cache_bug_reports.py"),
    9: ("wyoming-whisper-trt#1017, onnxruntime#10412", "core/test_build.py"),
    10: ("triton#11319", "core/test_cache_bug_reports.py"),
    11: ("WindowsAppSDK#6173, koboldcpp#2339", "core/test_cache_bug_reports.py"),
    12: ("onnxruntime#25747", "vendors/test_cache_bug_reports_vendors.py"),
    13: ("winml-cli#217", "core/test_vendor_null.py"),
    14: ("darktable#21208, AMDMIGraphX#4164", "core/test_build.py"),
    15: ("KataGo#1225", "core/test_cache_bug_reports.py"),
    16: ("winml-cli#1300", "core/test_cache_bug_reports.py"),
    17: ("stable-diffusion.cpp#1220", "core/test_cache_bug_reports.py"),
    18: ("TensorRT#3628", "core/test_loaded_pipeline.py"),
    19: ("ComfyUI_TensorRT#42", "core/test_build.py"),
    20: ("WebUI-TensorRT#176, WebUI-TensorRT#35", "core/test_cache_bug_reports.py"),
    21: ("lemonade#2422, lemonade#2609", "core/test_cache_bug_reports.py"),
    22: ("stable-diffusion.cpp#2015", "core/test_cache_bug_reports.py"),
}
"""Number -> reports, and the file of `tests` that holds a test named after each of them."""


def test_every_report_has_a_test_that_is_named_after_it():
    assert sorted(REPORTS) == list(range(1, 23))
    tests = Path(__file__).parents[1]
    for reports, file in REPORTS.values():
        tree = ast.parse((tests / file).read_text(encoding="utf-8"))
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for report in reports.split(", "):
            part = "".join(c if c.isalnum() else "_" for c in report.lower())
            assert any(name.startswith("test_") and part in name for name in names), report


UNCHECKED = Choice(vendor="null", gpu="cpu", must_check=False)


@pytest.fixture(scope="module")
def dispatcher(tmp_path_factory):
    with Dispatcher(home=tmp_path_factory.mktemp("home")) as running:
        yield running


def only(want, component="unet"):
    """The same, of one component: the others would cost time and tell nothing."""
    return replace(want, shapes={component: want.shapes[component]})


def build_unet(bench, pipeline, request=REQUEST, **options):
    """Builds the UNet, without the gate."""
    want = only(bench.want(pipeline, request))
    result = bench.builder(must_check=False).build(want, [bench.plan(**options)], no_report)
    return result.components[0]


def outputs_of(part):
    """What the engine computes on unit noise."""
    rng = np.random.default_rng(1)
    shapes = part.engine.request.shapes.items()
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes}
    return NullAdapter().load(part.engine, CPU).run(feeds)["out_sample"]


def change_weights(pipeline):
    data = pipeline / "unet" / "model.onnx_data"
    weights = np.frombuffer(data.read_bytes(), np.float32).copy()
    weights[:144] *= -1  # the kernel; the integers behind it stay
    data.write_bytes(weights.tobytes())


def tamper(store, key, change):
    """Publishes an engine again with changed files: whole, sealed, and not what was built."""
    manifest = store.read(key).manifest
    with store.locked(key), store.workshop(key) as shop:
        out = shop / "engine"
        out.mkdir()
        for path in store.folder(key).iterdir():
            if path.name != MANIFEST:
                (out / path.name).write_bytes(path.read_bytes())
        change(out)
        store.publish(out, replace(manifest, files=store.seal(out)))


def of_an_older_version(engine_folder):
    note = engine_folder / "engine.json"
    data = json.loads(note.read_text())
    note.write_text(json.dumps({**data, "runtime": "null 0.1"}))


def test_onnxruntime_32254_same_graph_name_other_shapes_are_two_engines(bench, pipeline):
    small = build_unet(bench, pipeline)
    large = build_unet(bench, pipeline, replace(REQUEST, width_px=32, height_px=32))
    assert small.engine.key != large.engine.key
    assert (outputs_of(small).shape, outputs_of(large).shape) == ((2, 4, 8, 8), (2, 4, 16, 16))
    assert build_unet(bench, pipeline).is_hit


def test_onnxruntime_6455_same_structure_other_weights_are_two_entries(bench, pipeline, tmp_path):
    other = make_toy_pipeline(tmp_path / "other", external=True)
    change_weights(other)
    first, second = build_unet(bench, pipeline), build_unet(bench, other)
    assert not second.is_hit
    assert np.abs(outputs_of(first) - outputs_of(second)).max() > 0.01
    assert {entry.key for entry in bench.store.entries()} == {first.engine.key, second.engine.key}


def test_rocm_onnxruntime_235_shapes_of_the_same_digits_do_not_collide():
    request = BuildRequest(
        vendor="null",
        revision=1,
        runtime="null 1",
        target="",
        component="unet",
        graph_digest="a" * 64,
        weights_digest="",
        precision="fp32",
        shapes={},
    )
    sides = (1, 2, 11, 12, 25, 56, 112, 125, 256, 512)
    shapes = [dims for count in range(4) for dims in itertools.product(sides, repeat=count)]
    assert len({replace(request, shapes={"x": dims}).key for dims in shapes}) == len(shapes)
    pairs = [{"x": (1,), "y": (256,)}, {"x": (256,), "y": (1,)}, {"x": (1, 256)}, {"y": (1, 256)}]
    assert len({replace(request, shapes=one).key for one in pairs}) == len(pairs)


def test_comfyui_upscaler_tensorrt_22_a_version_mismatch_is_rebuilt_once_and_never_in_a_loop(
    dispatcher, pipeline
):
    options = {"compile_steps": 5}  # engines of its own: what it leaves behind is a failure
    loaded = loaded_with(dispatcher, pipeline, options)
    key = loaded.generate("a fox", steps=1).facts()["engines"]["unet"]
    tamper(dispatcher.store, key, of_an_older_version)
    dispatcher.workers.stop(SPEC)
    answer = loaded.generate("a fox", steps=1)
    assert answer.steps == ()
    assert {part.component: part.is_hit for part in answer.components} == {
        "text_encoder": True,
        "unet": False,
        "vae_decoder": True,
    }
    # Were it refused again in spite of that, it would be said and not built in a loop.
    tamper(dispatcher.store, key, of_an_older_version)
    dispatcher.workers.stop(SPEC)
    for again, words in ((loaded, r"null 0\.1"), (None, "not tried again")):
        with pytest.raises(CacheError, match=words):
            (again or loaded_with(dispatcher, pipeline, options)).generate("a fox", steps=1)


def test_amd_shark_studio_1156_a_restart_serves_no_wrong_engine_and_clearing_clears(
    bench, pipeline
):
    want, plan = only(bench.want(pipeline)), bench.plan()
    spoiled = bench.plan(fault="nan")
    for _ in range(2):  # the second is a restart: all objects are new
        with pytest.raises(NumericError, match="not finite"):
            bench.builder().build(want, [spoiled], no_report)
        assert list(bench.store.entries()) == []
    built = bench.builder().build(want, [plan], no_report).components[0]
    failed = replace(built.manifest, verdict=Verdict(status="failed", reason="black"))
    with bench.store.locked(built.engine.key), bench.store.workshop(built.engine.key) as shop:
        os.rename(bench.store.folder(built.engine.key), shop / "engine")
        (shop / "engine" / MANIFEST).unlink()
        bench.store.publish(shop / "engine", failed)
    again = bench.builder().build(want, [plan], no_report).components[0]
    assert "numeric gate" in again.damage
    assert again.manifest.verdict.status == "passed"
    for entry in list(bench.store.entries()):
        bench.store.remove(entry.key)
    assert not bench.builder().build(want, [plan], no_report).is_hit


def test_onnxruntime_28158_what_does_not_open_in_a_fresh_process_is_not_published(bench, pipeline):
    plan = bench.plan(fault="load_error")
    with pytest.raises(CacheError, match="does not open"):
        bench.builder().build(only(bench.want(pipeline)), [plan], no_report)
    assert list(bench.store.entries()) == []
    assert bench.leftovers() == []


class StoreOnAFullDiskStandIn(EngineStore):
    """Stands in for a full disk, which takes root to make; tests/faults fills real ones."""

    def __init__(self, home):
        super().__init__(home)
        self.full = home

    def publish(self, folder, manifest):
        (folder / MANIFEST).write_text("{")
        if folder.is_relative_to(self.full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / MANIFEST))
        super().publish(folder, manifest)


def test_openvino_20190_a_full_disk_leaves_no_partial_file(bench, pipeline):
    home = bench.store.home
    bench.store = StoreOnAFullDiskStandIn(home)
    with suppress(CacheError):  # refused by name, or served from elsewhere: see the next test
        build_unet(bench, pipeline)
    assert list(EngineStore(home).entries()) == []
    assert bench.leftovers() == []
    bench.store = EngineStore(home)
    assert build_unet(bench, pipeline).manifest.verdict.status == "unchecked"


def test_openvino_20190_a_full_disk_serves_all_the_same(bench, pipeline, caplog):
    bench.store = StoreOnAFullDiskStandIn(bench.store.home)
    part = build_unet(bench, pipeline)
    assert outputs_of(part).shape == (2, 4, 8, 8)
    assert "No space left" in caplog.text


@pytest.mark.parametrize("left", [0, 1, -1], ids=["nothing", "one byte", "all but one byte"])
def test_qwen_image_tensorrt_5_a_short_file_is_never_a_hit(bench, pipeline, left):
    built = build_unet(bench, pipeline)
    request, onnx = built.engine.request, Path(built.engine.onnx)
    for path in sorted(Path(built.engine.folder).iterdir()):
        content = path.read_bytes()
        path.write_bytes(content[:left])
        with pytest.raises(CacheError, match="damaged"):
            bench.store.look_up(request, onnx=onnx)
        path.write_bytes(content)
    assert bench.store.look_up(request, onnx=onnx) is not None


def test_triton_11319_files_of_two_writers_are_never_mixed(tmp_path, bench, pipeline):
    request = build_unet(bench, pipeline).engine.request
    store = EngineStore(tmp_path / "store")
    folders = []
    for writer in ("one", "two"):  # without the lock, as on a network drive that has none
        folder = tmp_path / writer
        folder.mkdir()
        (folder / "cubin").write_text(writer)
        (folder / f"only {writer}").write_text(writer)
        folders.append(folder)
    manifests = [
        new_manifest(request, store.seal(folder), verdict=Verdict(status="passed"), started_s=0)
        for folder in folders
    ]
    assert store.read(request.key) is None
    for writer, folder, manifest in zip(("one", "two"), folders, manifests, strict=True):
        store.publish(folder, manifest)
        entry = store.read(request.key)
        assert store.verify(entry) == ""
        assert set(entry.manifest.files) == {"cubin", f"only {writer}"}
        assert (entry.folder / "cubin").read_text() == writer


@pytest.mark.parametrize("name", ["キャッシュ 図", "кэш движков", "with a space"])
def test_windowsappsdk_6173_koboldcpp_2339_any_path_works(bench, tmp_path, name):
    pipeline = make_toy_pipeline(tmp_path / f"модель {name}", external=True)
    home = tmp_path / name
    os.rename(bench.store.home, home)
    bench = Bench(home, bench.workers)
    want = only(bench.want(pipeline))
    built = bench.builder().build(want, [bench.plan(holds_weights=True)], no_report)
    assert built.components[0].manifest.verdict.status == "passed"
    assert name in built.components[0].engine.folder


def test_katago_1225_builds_are_serial_on_a_host(bench, pipeline):
    first = start_build(bench.store.home, pipeline, steps=LONG)

    def decide(progress: Progress) -> None:
        if "wait" in progress.phase or "compile" in progress.phase:
            seen.append(progress.phase)
            raise CancelledByUser

    seen = []
    try:
        assert any("compile" in line and " 0.0" in line for line in first.stdout)
        with pytest.raises(CancelledByUser):
            bench.builder(must_check=False).build(
                only(bench.want(pipeline)), [bench.plan(precision="fp16")], decide
            )
    finally:
        first.kill()
        first.communicate()
    assert "wait" in seen[0]


@pytest.fixture
def command(monkeypatch, capsys, bench):
    """Runs a command on the bench's home; returns its exit code and what it printed."""

    def run(*words):
        arguments = ["sdkit-dispatch", "--home", str(bench.store.home), *words]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().out

    return run


def test_winml_cli_1300_the_size_of_every_engine_and_of_all_is_shown(bench, pipeline, command):
    built = build_unet(bench, pipeline, holds_weights=True)
    code, printed = command("cache", "list", "--json")
    assert code == 0
    (row,) = json.loads(printed)["engines"]
    sizes = [one["size_bytes"] for one in row["manifest"]["files"].values()]
    assert sum(sizes) == built.manifest.size_bytes > 500
    assert "1 engines, 0.0 MB" in command("cache", "list")[1]


def test_winml_cli_1300_a_store_is_pruned_to_a_size(bench, pipeline, command):
    build_unet(bench, pipeline)
    bench.store.let_go()  # or it is in use, and stays
    code, _ = command("cache", "prune", "--max-size", "0")
    assert code == 0
    assert list(bench.store.entries()) == []


def loaded_with(dispatcher, pipeline, *options):
    """A pipeline whose ladder is the null vendor with these options, one after the other."""
    loaded = dispatcher.load(pipeline, UNCHECKED)
    cpu = loaded.plans[0].device
    loaded.plans = [dispatcher.workers.probe(SPEC, cpu, None, one) for one in options]
    assert not any(isinstance(plan, Rejection) for plan in loaded.plans)
    return loaded


def test_stable_diffusion_cpp_1220_a_grey_image_is_an_error(dispatcher, pipeline):
    grey = {"fault": "constant", "only_component": "vae_decoder"}
    with pytest.raises(NumericError, match="one flat colour"):
        loaded_with(dispatcher, pipeline, grey).generate("a fox", steps=1)


def test_webui_tensorrt_176_webui_tensorrt_35_each_size_runs_an_engine_of_its_own(
    dispatcher, pipeline
):
    loaded = dispatcher.load(pipeline, UNCHECKED)
    answers = [loaded.generate("a fox", steps=1, width_px=side) for side in (16, 32, 16)]
    assert [answer.images.shape[1:3] for answer in answers] == [(16, 16), (16, 32), (16, 16)]
    keys = [answer.facts()["engines"]["unet"] for answer in answers]
    assert keys[0] == keys[2] != keys[1]
    assert all(part.is_hit for part in answers[2].components)
    assert {answer.steps for answer in answers} == {()}


def test_lemonade_2422_lemonade_2609_a_crash_takes_the_next_step_once_and_is_remembered(
    dispatcher, pipeline
):
    crash = {"fault": "crash_on_run", "only_component": "unet"}
    first = loaded_with(dispatcher, pipeline, crash, {}).generate("a fox", steps=1)
    assert "crashing in run" in first.steps[0].reason
    again = loaded_with(dispatcher, pipeline, crash, {}).generate("a fox", steps=1)
    (step,) = again.steps
    assert "not tried again" in step.reason


def test_stable_diffusion_cpp_2015_after_a_lost_device_comes_a_new_process(dispatcher, pipeline):
    lost = {"fault": "device_lost", "only_component": "unet"}
    loaded = loaded_with(dispatcher, pipeline, lost, {})
    before = dispatcher.workers.client(SPEC).pid
    answer = loaded.generate("a fox", steps=1)
    assert "the device was lost" in answer.steps[0].reason
    assert dispatcher.workers.client(SPEC).pid != before
