"""Engine-cache faults of one runtime each: what their own caches do, done to ours.

`ROWS` names the test of every row. Public reports are in tests/core/test_cache_bug_reports.py.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from sdkit_dispatch import Choice, Dispatcher
from sdkit_dispatch.component_build import ComponentBuild
from sdkit_dispatch.config import Config
from sdkit_dispatch.contract import GenerateRequest
from sdkit_dispatch.wanted import Wanted, wanted
from sdkit_onnxruntime import CPU as ONNXRUNTIME
from sdkit_openvino import SPEC as OPENVINO
from vendor_harness import CPU, SAMPLE, adapter_of, build, feeds_for, with_external_weights

HERE = "test_cache_bug_reports_vendors.py"
MIGRAPHX = "test_migraphx_vendor.py"
RTX = "test_tensorrt_rtx.py"
MISSES = "../core/test_cache_misses.py"
ROWS = {
    "OpenVINO: external data replaced": (HERE, "test_replaced_weights_are_used"),
    "OpenVINO: .bin of an IR replaced": (HERE, "test_an_overwritten_engine_is_built_again"),
    "OpenVINO: a file replaced, its time kept": (HERE, "test_replaced_weights_are_used"),
    "OpenVINO: 4 KiB overwritten": (HERE, "test_an_overwritten_engine_is_built_again"),
    "OpenVINO: truncated or empty": (HERE, "test_an_overwritten_engine_is_built_again"),
    "OpenVINO: full disk": ("../core/test_cache_bug_reports.py", "test_openvino_20190_"),
    "OpenVINO: 12 processes at once": ("../faults/test_faults.py", "test_a_quick_run_of_faults"),
    "MIGraphX: fp32 then fp16": (MIGRAPHX, "test_no_two_builds_share_a_folder_of_programs"),
    "MIGraphX: other weights, same name": (MISSES, "test_is_a_miss_that_explain_names_by"),
    "MIGraphX: 64, 96, 128": ("../core/test_cache_bug_reports.py", "test_webui_tensorrt_176_"),
    "MIGraphX: library upgraded": (MIGRAPHX, "test_the_version_of_the_library_is_in_the_key"),
    "ONNX Runtime: TensorRT asked of the CPU wheel": (
        "test_cuda_vendor.py",
        "test_a_session_that_the_runtime_moved_to_the_processor_is_never_returned",
    ),
    "ONNX Runtime: MIGraphX without ROCm": (
        MIGRAPHX,
        "test_the_real_wheel_without_rocm_runs_nothing_on_the_processor",
    ),
    "TensorRT-RTX: INVALID without a driver": (
        RTX,
        "test_without_a_driver_a_good_engine_is_not_called_damaged",
    ),
    "TensorRT-RTX: plans are not deterministic": (
        HERE,
        "test_a_key_holds_nothing_of_what_was_compiled",
    ),
    "TensorRT-RTX: fp8 where there is none": (
        RTX,
        "test_fp8_values_are_refused_where_a_card_has_none",
    ),
}
"""What was seen -> file and beginning of the name of the test. The OpenVINO plugin provider of
ONNX Runtime is no vendor of ours."""
FLOAT_TOLERANCE = 2e-5
"""As in test_vendor_contract.py: fp32 sums in another order."""
VENDORS = {"openvino": OPENVINO, "cpu": ONNXRUNTIME}
every_vendor = pytest.mark.parametrize("vendor", VENDORS)
COMPONENT = "unet"
REQUEST = GenerateRequest(prompt="", width_px=32, height_px=32, guidance=3.0)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_a_test(row: str) -> None:
    file, name = ROWS[row]
    tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert any(one.startswith(name) for one in names)


@pytest.fixture(scope="module")
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    # One thread: on graphs this small, two mostly wait for each other.
    with Dispatcher(home=tmp_path_factory.mktemp("home"), config=Config(threads=1)) as running:
        yield running


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """The sample; the UNet's weights are in a file of their own."""
    folder = Path(shutil.copytree(SAMPLE, tmp_path / "pipeline"))
    source = with_external_weights(COMPONENT, tmp_path / "external")
    for path in source.parent.iterdir():
        shutil.copy(path, folder / COMPONENT)
    return folder


def built(dispatcher: Dispatcher, pipeline: Path, vendor: str) -> ComponentBuild:
    """Builds the UNet alone, as `build` does; without the gate, which would catch all of it."""
    try:
        importlib.metadata.distribution(VENDORS[vendor].runtime_packages[0])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"the runtime of {vendor} is not installed")
    choice = Choice(gpu="cpu", vendor=vendor, must_check=False)
    want: Wanted = wanted(
        dispatcher.read(pipeline), REQUEST, token_chunks=1, memo=dispatcher.store.memo
    )
    want = replace(want, shapes={COMPONENT: want.shapes[COMPONENT]})
    plans = dispatcher.plan(choice).plans
    return dispatcher.builder(choice).build(want, plans, dispatcher.report).components[0]


def computed(part: ComponentBuild, vendor: str) -> tuple[Any, Any]:
    """Returns what the engine computes, and what the reference evaluator does from the files."""
    session = adapter_of(VENDORS[vendor]).load(part.engine, CPU)
    feeds = feeds_for(session.inputs)
    found = session.run(feeds)["out_sample"]
    session.close()
    (right,) = ReferenceEvaluator(part.engine.onnx).run(None, feeds)
    return found, right


def is_right(part: ComponentBuild, vendor: str) -> bool:
    found, right = computed(part, vendor)
    return bool(np.allclose(found, right, rtol=0, atol=FLOAT_TOLERANCE))


def replaced(content: bytes) -> bytes:
    """The same weights, but a quarter of them the other way round: another model."""
    weights = np.frombuffer(content, np.float32).copy()
    weights[: weights.size // 4] *= -1
    return weights.tobytes()


@every_vendor
@pytest.mark.parametrize("file", ["model.onnx_data", "model.onnx"])
@pytest.mark.parametrize("time", ["new", "kept"])
def test_replaced_weights_are_used(
    vendor: str, file: str, time: str, dispatcher: Dispatcher, pipeline: Path
) -> None:
    """In one file or beside it; copied as `cp -p`, rsync and tar do, or within one second."""
    if file == "model.onnx":
        for path in (pipeline / COMPONENT).glob("*.onnx*"):
            path.unlink()
        shutil.copy(SAMPLE / COMPONENT / file, pipeline / COMPONENT / file)
    first = built(dispatcher, pipeline, vendor)
    old, _ = computed(first, vendor)
    path = pipeline / COMPONENT / file
    before = path.stat()
    if file == "model.onnx_data":
        path.write_bytes(replaced(path.read_bytes()))
    else:
        model = onnx.load(path)
        tensor = max(model.graph.initializer, key=lambda one: len(one.raw_data))
        array = numpy_helper.to_array(tensor)
        tensor.raw_data = replaced(array.tobytes())
        path.write_bytes(model.SerializeToString())
    assert path.stat().st_size == before.st_size
    if time == "kept":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = built(dispatcher, pipeline, vendor)
    assert second.engine.key != first.engine.key
    new, right = computed(second, vendor)
    assert np.abs(new - old).max() > 0.01
    np.testing.assert_allclose(new, right, rtol=0, atol=FLOAT_TOLERANCE)


@every_vendor
def test_an_overwritten_engine_is_built_again(
    vendor: str, dispatcher: Dispatcher, pipeline: Path
) -> None:
    part = built(dispatcher, pipeline, vendor)
    files = [path for path in Path(part.engine.folder).iterdir() if path.name != "manifest.json"]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    garbage = np.full(1024, 1e36, np.float32).tobytes()
    middle = len(content) // 2 // 4 * 4
    for damaged in (
        content[:middle] + garbage + content[middle + len(garbage) :],
        content[: len(content) // 2],
        b"",
    ):
        before = largest.stat()
        largest.write_bytes(damaged)
        os.utime(largest, ns=(before.st_atime_ns, before.st_mtime_ns))
        part = built(dispatcher, pipeline, vendor)
        assert not part.is_hit
        assert largest.name in part.damage
        assert is_right(part, vendor)


@every_vendor
@pytest.mark.parametrize("name", ["図 с пробелом"])
def test_windowsappsdk_6173_koboldcpp_2339_any_path_works(
    vendor: str, name: str, tmp_path: Path, pipeline: Path
) -> None:
    elsewhere = pipeline.rename(tmp_path / f"модель {name}")
    with Dispatcher(home=tmp_path / name, config=Config(threads=1)) as dispatcher:
        part = built(dispatcher, elsewhere, vendor)
        assert is_right(part, vendor)


@every_vendor
def test_a_key_holds_nothing_of_what_was_compiled(vendor: str, tmp_path: Path) -> None:
    spec = VENDORS[vendor]
    first = build(spec, tmp_path / "one", "vae_decoder")
    second = build(spec, tmp_path / "two", "vae_decoder")
    (tmp_path / "two" / "more").write_bytes(b"a compiler need not write the same twice")
    assert first.engine.key == second.engine.key


def test_onnxruntime_25747_weights_go_outside_the_graph_without_being_asked(
    tmp_path: Path,
) -> None:
    """Protobuf ends at 2 GB: no engine of ours holds its weights inside a graph."""
    engine = build(ONNXRUNTIME, tmp_path / "out").engine
    graph = onnx.load(Path(engine.folder) / "model.onnx", load_external_data=False).graph
    assert max(len(one.raw_data) for one in graph.initializer) < 1024
    inside = (Path(engine.folder) / "model.onnx").stat().st_size
    outside = (Path(engine.folder) / "weights.bin").stat().st_size
    assert outside > 0.9 * (SAMPLE / COMPONENT / "model.onnx").stat().st_size - inside
