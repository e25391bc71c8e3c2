"""The pass that lets doublings meet odd skip connections, on graphs of a few nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from sdkit_dispatch.contract import Shapes
from sdkit_dispatch.graph.static_shapes import make_static
from sdkit_dispatch.graph.upsampling import is_cropped

MODELS = Path(__file__).parents[1] / "models"
DEEP = MODELS / "odd" / "deep-dynamo" / "unet" / "model.onnx"


def integers(name: str, values: Sequence[int]) -> TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def unet(*, by_size: bool = False, mode: str = "nearest", axis: int = 1) -> onnx.ModelProto:
    """Halves a picture (every second pixel), doubles it and joins it with itself.

    `by_size`: the Resize is told twice the size of what it gets.
    """
    constants = [
        integers("starts", [0, 0]),
        integers("ends", [1 << 30, 1 << 30]),
        integers("axes", [2, 3]),
        integers("steps", [2, 2]),
        numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales"),
        integers("twice", [1, 1, 2, 2]),
        numpy_helper.from_array(np.array(1, np.float32), "one"),
    ]
    attributes = {
        "mode": mode,
        "coordinate_transformation_mode": "asymmetric",
        "nearest_mode": "floor",
    }
    sizes = [
        helper.make_node("Shape", ["half"], ["shape"]),
        helper.make_node("Mul", ["shape", "twice"], ["sizes"]),
    ]
    inputs = ["half", "", "", "sizes"] if by_size else ["half", "", "scales"]
    nodes = [
        helper.make_node("Slice", ["x", "starts", "ends", "axes", "steps"], ["half"]),
        *(sizes if by_size else ()),
        helper.make_node("Resize", inputs, ["double"], name="up", **attributes),
        helper.make_node("Mul", ["double", "one"], ["after"]),
        helper.make_node("Concat", ["after", "x"], ["y"], axis=axis),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "unet",
        [value("x", TensorProto.FLOAT, ["n", 1, "h", "w"])],
        [value("y", TensorProto.FLOAT, ["n", 2, "h", "w"])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    return model


def doubled(picture: np.ndarray) -> np.ndarray:
    half = picture[:, :, ::2, ::2]
    high, wide = picture.shape[2:]
    return half.repeat(2, 2).repeat(2, 3)[:, :, :high, :wide]


@pytest.mark.parametrize("by_size", [False, True], ids=["by scales", "by sizes"])
@pytest.mark.parametrize("sides", [(5, 7), (4, 7), (5, 6), (4, 6), (1, 3)])
def test_a_doubling_takes_the_size_of_its_skip_connection(
    sides: tuple[int, int], by_size: bool
) -> None:
    picture = np.random.default_rng(0).standard_normal((2, 1, *sides)).astype(np.float32)
    static = make_static(unet(by_size=by_size), {"x": picture.shape})
    onnx.checker.check_model(static)
    (found,) = ReferenceEvaluator(static).run(None, {"x": picture})
    assert np.array_equal(found, np.concatenate([doubled(picture), picture], axis=1))


def test_a_doubling_before_a_quantisation_is_one() -> None:
    model = unet()
    model.opset_import[0].version = 19  # the oldest that the evaluator quantises by
    model.graph.initializer.append(numpy_helper.from_array(np.array(1, np.float32), "scale"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(0, np.int8), "zero"))
    rounded = [
        helper.make_node("QuantizeLinear", ["double", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["dq"]),
    ]
    after = next(node for node in model.graph.node if node.output[0] == "after")
    after.input[0] = "dq"
    for node in rounded:
        model.graph.node.insert(list(model.graph.node).index(after), node)
    static = make_static(model, {"x": (1, 1, 5, 7)})
    picture = np.arange(35, dtype=np.float32).reshape(1, 1, 5, 7)
    (result,) = ReferenceEvaluator(static).run(None, {"x": picture})
    assert (result[:, :1] == doubled(picture)).all()


def test_leaving_the_last_row_out_is_pytorchs_interpolation_to_an_odd_size() -> None:
    # ATen's nearest_neighbor_compute_source_index, in its float32.
    for half in range(1, 1025):
        odd = 2 * half - 1
        scale = np.float32(half) / np.float32(odd)
        rows = np.floor(np.arange(odd, dtype=np.float32) * scale).astype(int)
        assert np.array_equal(np.minimum(rows, half - 1), np.arange(odd) // 2), odd


def test_even_sides_leave_the_graph_as_it_is() -> None:
    static = make_static(unet(), {"x": (1, 1, 4, 6)})
    assert not is_cropped(static)
    assert [node.op_type for node in static.graph.node] == [
        node.op_type for node in unet().graph.node
    ]


def test_what_is_no_doubling_before_a_skip_connection_is_left_alone() -> None:
    for model in (unet(mode="linear"), unet(axis=0)):
        assert not is_cropped(make_static(model, {"x": (1, 1, 5, 7)}))


@pytest.mark.parametrize(
    "folder",
    [
        "pipelines/sd15-optimum",
        "pipelines/sd15-dynamo",
        "pipelines/sd15-dynamo-fp16",
        "pipelines/sdxl-torchscript",
        "pipelines/sdxl-dynamo",
        "odd/deep-torchscript",
        "odd/deep-dynamo",
    ],
)
def test_every_exporters_unet_is_found_out(folder: str) -> None:
    path = MODELS / folder / "unet" / "model.onnx"
    assert is_cropped(make_static(path, unet_shapes(path, 1, 17, 23)))
    assert not is_cropped(make_static(path, unet_shapes(path, 1, 16, 24)))


def unet_shapes(path: Path, batch: int, height: int, width: int) -> Shapes:
    """Returns shapes of all inputs of a UNet."""
    found = {"sample": (batch, 4, height, width), "timestep": (), "time_ids": (batch, 6)}
    names = {}
    for value in onnx.load(path, load_external_data=False).graph.input:
        last = value.type.tensor_type.shape.dim[-1:]
        width_of = {"encoder_hidden_states": (batch, 77), "text_embeds": (batch,)}
        if value.name in width_of:
            found[value.name] = (*width_of[value.name], last[0].dim_value)
        names[value.name] = found[value.name]
    return names


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("sides", [(17, 23), (24, 9), (20, 20), (12, 31), (3, 5)])
def test_shapes_that_dynamo_computed_of_the_sides_are_corrected(
    sides: tuple[int, int], batch: int
) -> None:
    # It writes 2 + 2 * ((height - 1) // 8) where SD1.5's second level ends, and so on.
    static = make_static(DEEP, unet_shapes(DEEP, batch, *sides))
    feeds = {
        value.name: np.zeros([dim.dim_value for dim in value.type.tensor_type.shape.dim], "f")
        for value in static.graph.input
    }
    (found,) = ReferenceEvaluator(static).run(None, feeds)
    assert found.shape == (batch, 4, *sides)
