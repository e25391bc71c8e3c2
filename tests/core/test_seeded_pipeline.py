"""Suites that draw with weights of their own: filled whole, once, and from the graphs of today."""

import json
import lzma
import math
import shutil
from collections import namedtuple
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner

from sdkit_dispatch.benchmark import seeded_checkpoint as checkpoints
from sdkit_dispatch.benchmark import seeded_pipeline as module
from sdkit_dispatch.benchmark.seeded_pipeline import (
    SUITES,
    is_filled,
    seeded_bytes,
    seeded_pipeline,
    weights_bytes,
)
from sdkit_dispatch.benchmark.suites import SUITES as KNOWN
from sdkit_dispatch.checkpoint import read_checkpoint
from sdkit_dispatch.checkpoint.files import UNET
from sdkit_dispatch.cli import app
from sdkit_dispatch.contract import no_report
from sdkit_dispatch.errors import ConfigError
from sdkit_dispatch.pipeline_files import COMPONENTS, read_pipeline

BOUND = 0.25
WEIGHTS = 300
LARGEST_PACKED_BYTES = 100_000
"""All of it is in every wheel."""
PARAMETERS = {
    # Of the published models; the decoders without their encoders.
    ("sd15", "text_encoder"): 123.1e6,
    ("sd15", "unet"): 859.5e6,
    ("sd15", "vae_decoder"): 49.5e6,
    ("sdxl", "text_encoder"): 123.1e6,
    ("sdxl", "text_encoder_2"): 694.7e6,
    ("sdxl", "unet"): 2567.5e6,
    ("sdxl", "vae_decoder"): 49.5e6,
}


def graph_of(component: str) -> onnx.ModelProto:
    """A graph that says `y = x * w + b`, without w and b."""
    tensors = []
    for name, at, note in (("w", 0, ("uniform", str(BOUND))), ("b", 1216, ("value", "1"))):
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[WEIGHTS])
        tensor.data_location = TensorProto.EXTERNAL
        places = {"location": "model.onnx.data", "offset": at, "length": 4 * WEIGHTS}
        for key, value in places.items():
            tensor.external_data.add(key=key, value=str(value))
        tensor.metadata_props.add(key=note[0], value=note[1])
        tensors.append(tensor)
    nodes = [helper.make_node("Mul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["y"])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [WEIGHTS]) for name in "xy"]
    graph = helper.make_graph(nodes, component, ends[:1], ends[1:], initializer=tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """The name of a suite of small graphs, with the real one's configurations."""
    folder = tmp_path / "packed"
    for part in COMPONENTS["sd"]:
        (folder / "small" / part).mkdir(parents=True)
        shutil.copy(SUITES / "sd15" / part / "config.json", folder / "small" / part)
        packed = lzma.compress(graph_of(part).SerializeToString())
        (folder / "small" / part / "model.onnx.xz").write_bytes(packed)
    monkeypatch.setattr(module, "SUITES", folder)
    return "small"


def test_a_suite_is_a_pipeline_with_weights_between_their_bounds(suite, tmp_path):
    seen = []
    place = seeded_pipeline(suite, "sd", home=tmp_path, report=seen.append)
    pipeline = read_pipeline(place)
    assert set(pipeline.components) == set(COMPONENTS["sd"])
    weights = np.fromfile(place / "unet" / "model.onnx.data", np.float32)
    drawn, ones = weights[:WEIGHTS], weights[1216 // 4 :]
    assert np.abs(drawn).max() <= BOUND
    assert drawn.std() == pytest.approx(BOUND / np.sqrt(3), rel=0.1)
    assert ones.tolist() == [1.0] * WEIGHTS
    onnx.checker.check_model(str(place / "unet" / "model.onnx"))
    fractions = [one.fraction for one in seen]
    assert fractions == sorted(fractions)
    assert "GB of seeded weights: unet" in " ".join(one.phase for one in seen)


def test_it_is_filled_once_and_the_same_everywhere(suite, tmp_path):
    place = seeded_pipeline(suite, "sd", home=tmp_path / "a", report=no_report)
    data = place / "unet" / "model.onnx.data"
    before = data.stat().st_mtime_ns
    assert seeded_pipeline(suite, "sd", home=tmp_path / "a", report=no_report) == place
    assert data.stat().st_mtime_ns == before
    other = seeded_pipeline(suite, "sd", home=tmp_path / "b", report=no_report)
    assert (other / "unet" / "model.onnx.data").read_bytes() == data.read_bytes()


def test_a_fill_that_was_ended_leaves_nothing_that_is_taken_for_one(suite, tmp_path):
    def end(progress):
        if "vae_decoder" in progress.phase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        seeded_pipeline(suite, "sd", home=tmp_path, report=end)
    assert not is_filled(suite, "sd", home=tmp_path)
    left = tmp_path / "suites" / f".{suite}-killed"  # as a kill leaves it
    (left / "new").mkdir(parents=True)
    seeded_pipeline(suite, "sd", home=tmp_path, report=no_report)
    assert is_filled(suite, "sd", home=tmp_path)
    assert not left.exists()


def test_what_is_cut_off_or_of_other_graphs_is_filled_again(suite, tmp_path):
    place = seeded_pipeline(suite, "sd", home=tmp_path, report=no_report)
    data = place / "unet" / "model.onnx.data"
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    assert not is_filled(suite, "sd", home=tmp_path)
    seeded_pipeline(suite, "sd", home=tmp_path, report=no_report)
    assert data.read_bytes() == whole
    seal = place / "seeded.json"
    seal.write_text(json.dumps({**json.loads(seal.read_text()), "of": "other graphs"}))
    assert not is_filled(suite, "sd", home=tmp_path)


def test_a_disk_without_room_is_told_before_anything_is_written(suite, tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")(5 << 20)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"0\.0 GB of weights .* and 0\.0 GB are free") as caught:
        seeded_pipeline(suite, "sd", home=tmp_path, report=no_report)
    assert "bench FOLDER --suite small" in caught.value.hint
    assert [path.name for path in (tmp_path / "suites").iterdir()] == ["small.lock"]


def test_a_suite_of_full_size_needs_no_folder(suite, tmp_path):
    known = replace(KNOWN["sd15"], name=suite)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KNOWN, suite, known)
        words = ["--home", str(tmp_path), "bench", "--suite", suite, "--vendors", "null"]
        done = CliRunner().invoke(app, [*words, "--no-install"])
    assert "GB of seeded weights of its own" in done.stderr
    assert is_filled(suite, "sd", home=tmp_path)
    # It was read, is of the right family, and would be measured, if it were a real one.
    assert "input 'x' is not one we can feed" in str(done.exception)


@pytest.mark.parametrize("name", [name for name, suite in KNOWN.items() if not suite.pipeline])
def test_graphs_of_a_suite_are_of_the_real_size_and_small_to_ship(name):
    family = KNOWN[name].family
    packed = [SUITES / name / part / "model.onnx.xz" for part in COMPONENTS[family]]
    assert sum(path.stat().st_size for path in packed) < LARGEST_PACKED_BYTES
    total = 0
    for path in packed:
        graph = onnx.ModelProto.FromString(lzma.decompress(path.read_bytes()))
        missing = [one for one in graph.graph.initializer if one.data_location == 1]
        assert all(one.metadata_props[0].key in ("uniform", "value") for one in missing)
        parameters = sum(np.prod(one.dims) for one in missing)
        assert parameters == pytest.approx(PARAMETERS[name, path.parent.name], rel=0.01)
        total += weights_bytes(graph)
        onnx.shape_inference.infer_shapes(graph, check_type=True, strict_mode=True)
        assert not graph.metadata_props
        assert not any(node.metadata_props or node.doc_string for node in graph.graph.node)
    assert seeded_bytes(name, family) == total


def test_the_checkpoint_of_a_suite_is_sound_of_the_real_size_and_written_once(
    suite, tmp_path, monkeypatch
):
    rows = [
        ["model.diffusion_model.out.2.weight", [4, 320, 3, 3], BOUND],
        ["cond_stage_model.norm.weight", [768], 1.0],
    ]
    packed = lzma.compress(json.dumps(rows).encode())
    (module.SUITES / suite / "checkpoint.json.xz").write_bytes(packed)
    monkeypatch.setattr(checkpoints, "SUITES", module.SUITES)
    left = tmp_path / "suites" / f".{suite}-killed.part"
    left.parent.mkdir()
    left.write_bytes(b"half")
    path = checkpoints.seeded_checkpoint(suite, home=tmp_path, report=no_report)
    assert not left.exists()
    found = read_checkpoint(path)
    assert {one.name: one.shape for one in found.tensors} == {
        name: tuple(shape) for name, shape, _ in rows
    }
    numbers = np.fromfile(path, np.float16)[-4 * 320 * 9 - 768 :]
    assert np.abs(numbers[:-768]).max() <= BOUND
    assert numbers[-768:].tolist() == [1.0] * 768
    before = path.stat().st_mtime_ns
    assert checkpoints.seeded_checkpoint(suite, home=tmp_path, report=no_report) == path
    assert path.stat().st_mtime_ns == before


def test_the_packed_checkpoint_is_of_the_same_network_as_the_graphs():
    rows = json.loads(lzma.decompress((SUITES / "sd15" / "checkpoint.json.xz").read_bytes()))
    sizes = {name: math.prod(shape) for name, shape, _ in rows}
    unet = sum(size for name, size in sizes.items() if name.startswith(UNET))
    assert unet == pytest.approx(PARAMETERS["sd15", "unet"], rel=0.01)
    assert all(0 <= bound <= 1 for _, _, bound in rows)


def test_a_checkpoint_that_was_not_written_to_its_end_is_not_there(tmp_path):
    def end(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.seeded_checkpoint("sd15", home=tmp_path, report=end)
    assert not checkpoints.checkpoint_place("sd15", tmp_path).exists()
    assert not list((tmp_path / "suites").glob("*.part"))
    assert not list((tmp_path / "suites").glob(".*.part"))
