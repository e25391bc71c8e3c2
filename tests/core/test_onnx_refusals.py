"""ONNX files that somebody made to do harm: named and refused when the pipeline is read."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sdkit_dispatch.errors import PipelineError
from sdkit_dispatch.graph.tensor_sizes import tensor_bytes
from sdkit_dispatch.graph.weight_files import pieces_of
from sdkit_dispatch.pipeline_files import component_digests, read_pipeline
from toy_pipeline import make_toy_pipeline


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return make_toy_pipeline(tmp_path_factory.mktemp("toy") / "pipeline", external=True)


@pytest.fixture
def pipeline(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "pipeline"))


def edit(pipeline: Path, change: Callable[[onnx.ModelProto], object], name: str = "unet") -> Path:
    file = pipeline / name / "model.onnx"
    model = onnx.load(file, load_external_data=False)
    change(model)
    file.write_bytes(model.SerializeToString())
    return pipeline


def external(key: str, value: str) -> Callable[[onnx.ModelProto], object]:
    def change(model: onnx.ModelProto) -> None:
        rows = model.graph.initializer[0].external_data
        for row in rows:
            if row.key == key:
                row.value = value
                return
        rows.add(key=key, value=value)

    return change


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("../unet/model.onnx_data", "outside its folder"),
        ("../text_encoder/model.onnx", "outside its folder"),
        ("/dev/zero", "outside its folder"),
        ("", "outside its folder"),
        ("a" * 5000, "File name too long|missing"),
        ("model.onnx_data\0x", "null byte|null character"),
        ("C:\\model.onnx_data", "missing|outside its folder"),
    ],
)
def test_external_data_in_an_odd_place_is_refused(pipeline, location, words):
    with pytest.raises(PipelineError, match=words):
        read_pipeline(edit(pipeline, external("location", location)))


@pytest.mark.skipif(os.name == "nt", reason="links and pipes as POSIX has them")
@pytest.mark.parametrize("kind", ["link to a device", "link out", "loop", "pipe", "folder"])
def test_what_is_not_a_plain_file_inside_is_not_read_as_weights(pipeline, tmp_path, kind):
    data = pipeline / "unet" / "model.onnx_data"
    data.rename(tmp_path / "secret")
    makers = {
        "link to a device": lambda: data.symlink_to("/dev/zero"),
        "link out": lambda: data.symlink_to(tmp_path / "secret"),
        "loop": lambda: data.symlink_to(data),
        "pipe": lambda: os.mkfifo(data),
        "folder": lambda: data.mkdir(),
    }
    makers[kind]()
    words = "outside its folder|missing|loop"
    with pytest.raises(PipelineError, match=words):
        read_pipeline(pipeline)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("offset", "abc"),
        ("offset", "-5"),
        ("offset", "9" * 5000),
        ("offset", str(2**63)),
        ("length", "-1"),
        ("length", "1"),
        ("length", "1" * 30),
    ],
)
def test_external_data_with_odd_numbers_is_refused(pipeline, key, value):
    with pytest.raises(PipelineError, match="external data|end at byte|needs"):
        read_pipeline(edit(pipeline, external(key, value)))


ABSURD = {
    "a petabyte": [1 << 50],
    "negative": [-1, 4],
    "2^63 - 1, eight times": [2**63 - 1] * 8,
    "a product that wraps around to nothing": [2**32, 2**32],
    "nothing, 2^63 - 1 times": [0, 2**63 - 1],
    "a hundred thousand dimensions": [2] * 100_000,
}


@pytest.mark.parametrize("where", ["unet", "text_encoder"])
@pytest.mark.parametrize("what", ABSURD)
def test_an_absurd_shape_costs_no_more_than_an_error(pipeline, what, where):
    """In the UNet the data is external, in the text encoder inside the graph."""

    def change(model):
        del model.graph.initializer[0].dims[:]
        model.graph.initializer[0].dims.extend(ABSURD[what])

    started_s = time.process_time()
    with pytest.raises(PipelineError, match="has the shape|end at byte|its shape"):
        read_pipeline(edit(pipeline, change, where))
    assert time.process_time() - started_s < 5  # a bound, not a measurement: it takes 0.1 s


@pytest.mark.parametrize("dims", ABSURD.values(), ids=ABSURD)
def test_the_graph_passes_refuse_it_too(tmp_path, dims):
    tensor = onnx.TensorProto(name="w", dims=dims, data_type=TensorProto.FLOAT)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    (tmp_path / "w.bin").write_bytes(bytes(16))
    with pytest.raises(PipelineError):
        list(pieces_of(tensor, tmp_path))


def test_an_absurd_shape_in_an_attribute_or_a_branch_is_seen(pipeline):
    def change(model):
        value = numpy_helper.from_array(np.zeros(1, np.float32))
        value.dims[0] = 1 << 50
        inner = helper.make_graph(
            [helper.make_node("Constant", [], ["c"], value=value)], "branch", [], []
        )
        model.graph.node.append(
            helper.make_node("If", ["cond"], ["d"], then_branch=inner, else_branch=inner)
        )

    with pytest.raises(PipelineError, match="has the shape"):
        read_pipeline(edit(pipeline, change))


def test_values_in_the_field_of_another_type_are_refused(pipeline, tmp_path):
    """Found by fuzzing: a float tensor whose values are in int32_data."""
    tensor = onnx.TensorProto(name="w", dims=[2], data_type=TensorProto.FLOAT, int32_data=[1, 2])
    with pytest.raises(PipelineError, match="holds 0 items of float_data"):
        list(pieces_of(tensor, tmp_path))


def test_an_unknown_element_type_is_named(pipeline):
    def change(model):
        model.graph.initializer[0].data_type = 99

    with pytest.raises(PipelineError, match="element type 99"):
        read_pipeline(edit(pipeline, change))


def test_hundreds_of_thousands_of_inputs_are_refused_at_once(pipeline):
    def change(model):
        for number in range(200_000):
            model.graph.input.add(name=str(number)).type.tensor_type.elem_type = 1

    with pytest.raises(PipelineError, match="200003 inputs"):
        read_pipeline(edit(pipeline, change))


def test_deep_nesting_is_not_followed_down(pipeline):
    graph = b""
    for _ in range(20_000):
        attribute = field(1, b"b") + field(6, graph)
        graph = field(1, field(5, attribute))
    (pipeline / "unet" / "model.onnx").write_bytes(field(7, graph))
    with pytest.raises(PipelineError, match="not an ONNX file"):
        read_pipeline(pipeline)


def test_a_gigantic_file_is_not_opened(pipeline):
    with (pipeline / "unet" / "model.onnx").open("r+b") as stream:
        stream.truncate(1 << 42)  # a hole: it takes no room
    with pytest.raises(PipelineError, match="above 2 GiB"):
        read_pipeline(pipeline)


@pytest.mark.parametrize("suffix", [".ckpt", ".bin", ".pt", ".pth", ".PKL"])
def test_a_pickled_checkpoint_is_refused_with_what_to_take_instead(tmp_path, suffix):
    checkpoint = tmp_path / f"model{suffix}"
    checkpoint.write_bytes(b"cos\nsystem\n(S'touch harm'\ntR.")
    with pytest.raises(PipelineError, match="pickled checkpoint") as caught:
        read_pipeline(checkpoint)
    assert ".safetensors" in caught.value.hint


def test_sound_sizes_are_as_numpy_has_them():
    for dtype in (np.float16, np.int64, np.bool_, np.float32):
        array = np.zeros((3, 0, 2) if dtype is np.bool_ else (3, 2), dtype)
        assert tensor_bytes(numpy_helper.from_array(array)) == array.nbytes


def test_the_pipeline_that_is_spoilt_above_is_sound(sound):
    component = read_pipeline(sound).components["unet"]
    assert [path.name for path in component.external] == ["model.onnx_data"]
    assert all(component_digests(component))


def field(number: int, data: bytes) -> bytes:
    """A protobuf field of bytes."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    groups = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        groups.append(low | (0x80 if value else 0))
        if not value:
            return bytes(groups)
