"""Engines that share a weights file, or keep a program over other weights."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import sdkit_dispatch
from ggml_harness import CPU, PIPELINES, GgmlEngine, differences, ggml_adapter, shapes_for
from sdkit_dispatch import Choice, Dispatcher
from sdkit_dispatch.build import BuildResult
from sdkit_dispatch.config import Config
from sdkit_dispatch.contract import BuildRequest, Engine, Shapes
from sdkit_dispatch.errors import CacheError
from sdkit_dispatch.siblings import disk_bytes
from sdkit_ggml import SPEC
from sdkit_ggml.engine_files import EXTRA_FILE, PROGRAM_FILE, WEIGHTS_FILE, read_program
from vendor_harness import snapshot, with_external_weights

TOLERANCE = 5e-6
"""Largest difference from ONNX Runtime of UNets in fp32; 1e-6 to 4e-6 was measured."""
MATRIX_TOLERANCE = 2e-4
"""The same of two products of 8 x 8 normal numbers and a factor of 3: values up to 200."""
SECONDS_A_PROGRAM = 2.0
SAMPLE = Path(sdkit_dispatch.__file__).parent / "_data" / "sample" / "digits-sd"
UNET = PIPELINES / "sd15-dynamo" / "unet" / "model.onnx"


def compiled(
    path: Path,
    shapes: Shapes,
    out: Path,
    siblings: tuple[GgmlEngine, ...] = (),
    weights_digest: str = "",
) -> GgmlEngine:
    """Compiles beside engines of the same graph."""
    adapter = ggml_adapter()
    plan = adapter.plan(CPU, "fp32", {})
    request = BuildRequest(
        vendor="ggml",
        revision=SPEC.revision,
        runtime=plan.runtime,
        target=plan.target,
        component=path.parent.name,
        graph_digest="0" * 64,
        weights_digest=weights_digest,
        precision="fp32",
        shapes=shapes,
        options=plan.options,
    )
    out.mkdir(parents=True)
    others = [one.engine for one in siblings]
    adapter.compile(request, path, out, device=CPU, report=lambda progress: None, siblings=others)
    engine = Engine(key=request.key, request=request, folder=str(out), onnx=str(path))
    return GgmlEngine(adapter, engine, CPU)


def is_same_file(a: GgmlEngine, b: GgmlEngine) -> bool:
    return (a.folder / WEIGHTS_FILE).samefile(b.folder / WEIGHTS_FILE)


@pytest.mark.parametrize("size", [(1, 17, 16), (4, 12, 31)])
def test_another_size_takes_the_weights_file_of_the_first(
    size: tuple[int, int, int], tmp_path: Path
) -> None:
    first = compiled(UNET, shapes_for(UNET), tmp_path / "first")
    before = snapshot(first.folder)
    batch, height, width = size
    shapes = shapes_for(UNET, batch=batch, height=height, width=width)
    start = time.process_time()
    second = compiled(UNET, shapes, tmp_path / "second", (first,))
    assert time.process_time() - start < SECONDS_A_PROGRAM
    assert is_same_file(first, second)
    alone = compiled(UNET, shapes, tmp_path / "alone")
    assert snapshot(second.folder).keys() == snapshot(alone.folder).keys()
    for name in (PROGRAM_FILE, WEIGHTS_FILE):
        assert (second.folder / name).read_bytes() == (alone.folder / name).read_bytes(), name
    assert snapshot(first.folder) == before


def resizing(folder: Path) -> Path:
    """A product with many weights, then a linear Resize, whose table has the picture's size."""
    rng = np.random.default_rng(3)
    weights = 0.3 * rng.standard_normal((64, 1, 3, 3)).astype(np.float32)
    large = 0.04 * rng.standard_normal((64, 64, 3, 3)).astype(np.float32)
    attributes = {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["a", "v"], ["b"], pads=[1, 1, 1, 1]),
        helper.make_node("Resize", ["b", "", "scales"], ["y"], **attributes),
    ]
    graph = helper.make_graph(
        nodes,
        "resizing",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, "h", "w"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 64, "h2", "w2"])],
        [
            numpy_helper.from_array(weights, "w"),
            numpy_helper.from_array(large, "v"),
            numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales"),
        ],
    )
    path = folder / "resizing" / "model.onnx"
    path.parent.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)
    return path


def test_a_table_of_the_pictures_size_lies_beside_the_shared_weights(tmp_path: Path) -> None:
    path = resizing(tmp_path)
    first = compiled(path, {"x": (1, 1, 8, 8)}, tmp_path / "first")
    second = compiled(path, {"x": (1, 1, 6, 9)}, tmp_path / "second", (first,))
    third = compiled(path, {"x": (1, 1, 9, 6)}, tmp_path / "third", (second,))
    for engine in (second, third):
        assert is_same_file(first, engine)
        extra_bytes = (engine.folder / EXTRA_FILE).stat().st_size
        assert extra_bytes < (engine.folder / WEIGHTS_FILE).stat().st_size / 10
        assert max(differences(path, engine.load()).values()) <= TOLERANCE
    (second.folder / EXTRA_FILE).write_bytes(b"GGUF")
    with pytest.raises(CacheError, match=EXTRA_FILE):
        second.load()


def changed(path: Path, out: Path) -> Path:
    """Returns a copy of a model with external weights, those larger by half."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        # A mask, of the lowest number that there is, is no weight.
        is_weight = array.dtype == np.float32 and array.nbytes >= 1024
        if is_weight and np.abs(array).max() < 1e4:
            tensor.CopyFrom(numpy_helper.from_array(array * np.float32(1.5), tensor.name))
    out.mkdir(parents=True)
    file = out / "model.onnx"
    onnx.save_model(
        model,
        file,
        save_as_external_data=True,
        location="model.onnx_data",
        size_threshold=1024,
    )
    return file


@pytest.mark.parametrize("component", ["unet", "text_encoder"])
def test_other_weights_keep_the_program_as_a_fresh_build_would_have_it(
    component: str, tmp_path: Path
) -> None:
    path = with_external_weights(component, tmp_path / "old" / component)
    other = changed(path, tmp_path / "new" / component)
    shapes = shapes_for(path)
    first = compiled(path, shapes, tmp_path / "first", weights_digest="a")
    swapped = compiled(other, shapes, tmp_path / "swapped", (first,), weights_digest="b")
    fresh = compiled(other, shapes, tmp_path / "fresh", weights_digest="b")
    assert snapshot(swapped.folder).keys() == {PROGRAM_FILE, WEIGHTS_FILE}
    for name in (PROGRAM_FILE, WEIGHTS_FILE):
        assert (swapped.folder / name).read_bytes() == (fresh.folder / name).read_bytes(), name
    assert not is_same_file(first, swapped)
    old, new = ((one.folder / WEIGHTS_FILE).read_bytes() for one in (first, swapped))
    assert old != new
    programs = [(one.folder / PROGRAM_FILE).read_bytes() for one in (first, swapped)]
    assert programs[0] == programs[1]


def with_a_number_that_the_program_holds(path: Path, factor: float) -> Path:
    """A graph whose scalar is no weight: the compiler writes it into an operation."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Mul", ["a", "c"], ["b"]),
        helper.make_node("Reshape", ["t", "shape"], ["u"]),
        helper.make_node("Transpose", ["u"], ["v"], perm=[1, 0]),
        helper.make_node("MatMul", ["b", "v"], ["y"]),
    ]
    rng = np.random.default_rng(int(factor))
    graph = helper.make_graph(
        nodes,
        "scaled",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 8])],
        [
            numpy_helper.from_array(rng.standard_normal((8, 8)).astype(np.float32), "w"),
            numpy_helper.from_array(rng.standard_normal((64,)).astype(np.float32), "t"),
            numpy_helper.from_array(np.array([8, 8]), "shape"),
            numpy_helper.from_array(np.array([factor // 2], np.float32), "c"),
        ],
    )
    path.parent.mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    # Only the number and the weights lie outside: a shape is never there.
    for tensor in model.graph.initializer:
        if tensor.name != "shape":
            onnx.external_data_helper.set_external_data(tensor, "model.onnx_data")
    onnx.save(model, path)
    return path


def test_a_number_that_the_program_holds_makes_it_anew(tmp_path: Path) -> None:
    shapes = {"x": (2, 8)}
    paths = {
        factor: with_a_number_that_the_program_holds(
            tmp_path / f"{factor}" / "scaled" / "model.onnx", factor
        )
        for factor in (4.0, 5.0, 6.0)
    }
    first = compiled(paths[4.0], shapes, tmp_path / "first", weights_digest="a")
    assert set(read_program(first.folder).read) == {"c"}
    same, other = (
        compiled(path, shapes, tmp_path / f"out {factor}", (first,), weights_digest="b")
        for factor, path in ((5.0, paths[5.0]), (6.0, paths[6.0]))
    )
    programs = [(one.folder / PROGRAM_FILE).read_bytes() for one in (first, same, other)]
    assert programs[0] == programs[1] != programs[2]
    for path, engine in ((paths[5.0], same), (paths[6.0], other)):
        assert max(differences(path, engine.load()).values()) <= MATRIX_TOLERANCE


@pytest.fixture(scope="module")
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    ggml_adapter()
    home = tmp_path_factory.mktemp("home")
    with Dispatcher(home=home, config=Config(threads=1)) as running:
        yield running


def test_the_store_keeps_one_copy_and_each_entry_whole(dispatcher: Dispatcher) -> None:
    store, choice = dispatcher.store, Choice(gpu="cpu", vendor="ggml")

    def build(width_px: int, height_px: int) -> BuildResult:
        return dispatcher.build(
            PIPELINES / "sd15-dynamo", choice, width_px=width_px, height_px=height_px
        )

    def folders(*results: BuildResult) -> list[Path]:
        return [Path(one.engine.folder) for result in results for one in result.components]

    first = build(64, 64)
    alone = disk_bytes(folders(first))
    second = build(68, 60)
    weights = [
        next(Path(one.engine.folder) for one in result.components if one.component == "unet")
        / WEIGHTS_FILE
        for result in (first, second)
    ]
    assert weights[0].samefile(weights[1])
    together = disk_bytes(folders(first, second))
    programs = sum((one / PROGRAM_FILE).stat().st_size for one in set(folders(second)))
    assert together - alone < programs + 64 * 1024
    assert second.forecast is not None  # of what is linked it counts nothing
    assert list(SPEC.shared_files) == [WEIGHTS_FILE]
    own = sum(
        stored.size_bytes
        for one in first.components
        for name, stored in one.manifest.files.items()
        if one.component in second.forecast.components and name != WEIGHTS_FILE
    )
    assert second.forecast.disk_bytes == round(own * SPEC.disk_factor)
    entries = {entry.key: entry for entry in store.entries()}
    assert [store.verify(entry) for entry in entries.values()] == [""] * len(entries)
    unets = [
        next(one for one in result.components if one.component == "unet")
        for result in (first, second)
    ]
    # One goes, the other stays whole; its file does not know of the other name.
    assert store.remove(unets[0].engine.key)
    kept = store.read(unets[1].engine.key)
    assert kept is not None
    assert store.verify(kept) == ""
    assert os.stat(weights[1]).st_nlink == 1
    again = build(64, 64)
    assert not again.is_hit
    assert weights[0].samefile(weights[1])
    # What is damaged is lent to nobody, and both are made anew.
    with weights[1].open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x55")
    rebuilt = build(68, 60)
    assert any(one.damage for one in rebuilt.components)
    assert not weights[0].samefile(weights[1])
    assert build(64, 64).components[1].damage
