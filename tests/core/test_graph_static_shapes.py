from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sdkit_dispatch.errors import PipelineError
from sdkit_dispatch.graph.static_shapes import make_static


def value(
    name: str, dims: list[int | str | None] | None, kind: int = TensorProto.FLOAT
) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def model_of(
    *inputs: onnx.ValueInfoProto, output: onnx.ValueInfoProto | None = None
) -> onnx.ModelProto:
    names = [one.name for one in inputs]
    graph = helper.make_graph(
        [
            helper.make_node("Concat", names, ["mid"], axis=0),
            helper.make_node("Relu", ["mid"], ["y"]),
        ],
        "g",
        list(inputs),
        [output or value("y", ["batch", "width"])],
        value_info=[value("mid", ["batch", "width"])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def dims_of(info: onnx.ValueInfoProto) -> list[int | str]:
    return [dim.dim_value or dim.dim_param for dim in info.type.tensor_type.shape.dim]


def test_symbolic_sizes_of_inputs_become_the_sizes_asked_for() -> None:
    static = make_static(
        model_of(value("a", ["batch", 4]), value("b", ["batch", "width"])),
        {"a": (2, 4), "b": (2, 8)},
    )
    assert [dims_of(one) for one in static.graph.input] == [[2, 4], [2, 8]]


def test_a_scalar_input_stays_a_scalar() -> None:
    static = make_static(model_of(value("t", [])), {"t": ()})
    assert static.graph.input[0].type.tensor_type.HasField("shape")
    assert dims_of(static.graph.input[0]) == []


def test_an_input_without_any_declared_shape_gets_one() -> None:
    bare = helper.make_tensor_value_info("a", TensorProto.FLOAT, None)
    static = make_static(model_of(bare), {"a": (3, 5)})
    assert dims_of(static.graph.input[0]) == [3, 5]


def test_the_model_that_was_given_is_not_changed() -> None:
    model = model_of(value("a", ["batch", 4]))
    before = model.SerializeToString(deterministic=True)
    make_static(model, {"a": (2, 4)})
    assert model.SerializeToString(deterministic=True) == before


def test_recorded_intermediate_shapes_are_dropped() -> None:
    assert not make_static(model_of(value("a", ["batch", 4])), {"a": (2, 4)}).graph.value_info


def test_recorded_shapes_inside_a_branch_are_dropped() -> None:
    branch = helper.make_graph(
        [helper.make_node("Relu", ["a"], ["r"])],
        "branch",
        [],
        [value("r", ["batch"])],
        value_info=[value("r", ["batch"])],
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    graph = helper.make_graph(
        [node],
        "g",
        [value("a", ["batch"]), value("c", [], TensorProto.BOOL)],
        [value("y", ["batch"])],
    )
    static = make_static(helper.make_model(graph), {"a": (3,), "c": ()})
    assert all(not attribute.g.value_info for attribute in static.graph.node[0].attribute)


def test_symbols_of_outputs_are_dropped_and_fixed_sizes_are_kept() -> None:
    # One symbol for two sizes, as exporters write it: batch 1 and height 32 of a decoder.
    output = value("y", ["dim_0", 3, "dim_0", "dim_3"])
    static = make_static(model_of(value("a", ["batch", 4]), output=output), {"a": (1, 4)})
    dims = static.graph.output[0].type.tensor_type.shape.dim
    assert [dim.WhichOneof("value") for dim in dims] == [None, "dim_value", None, None]
    assert dims[1].dim_value == 3


def test_a_size_that_the_graph_fixes_differently_is_refused_with_both() -> None:
    with pytest.raises(PipelineError, match=r'"a".*\[2, 5\].*fixes \[\'batch\', 4\]'):
        make_static(model_of(value("a", ["batch", 4])), {"a": (2, 5)})


def test_one_symbol_with_two_sizes_is_refused_and_both_inputs_are_named() -> None:
    model = model_of(value("a", ["batch", 4]), value("b", ["batch", 4]))
    with pytest.raises(PipelineError, match=r'"b".*"batch" is 2 in input "a"'):
        make_static(model, {"a": (2, 4), "b": (1, 4)})


def test_a_wrong_number_of_dimensions_is_refused() -> None:
    with pytest.raises(PipelineError, match=r'"a".*\[2\].*declares 2 dimensions'):
        make_static(model_of(value("a", ["batch", 4])), {"a": (2,)})


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_refused(size: int) -> None:
    with pytest.raises(PipelineError, match=r'"a".*positive'):
        make_static(model_of(value("a", ["batch", 4])), {"a": (size, 4)})


def test_missing_and_unknown_names_are_both_listed() -> None:
    model = model_of(value("a", ["batch"]), value("b", ["batch"]))
    with pytest.raises(PipelineError, match=r"missing: \['b'\]; unknown: \['c'\]"):
        make_static(model, {"a": (1,), "c": (1,)})


def test_initializers_listed_as_inputs_need_no_shape() -> None:
    model = model_of(value("a", ["batch", 1]), value("w", [1, 1]))
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.FLOAT, [1, 1], [1.0]))
    static = make_static(model, {"a": (2, 1)})
    assert dims_of(static.graph.input[0]) == [2, 1]


def test_external_weights_are_not_read(tmp_path: Path) -> None:
    model = model_of(value("a", ["batch", 4]), value("w", [1, 4]))
    model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 4), np.float32), "w"))
    path = tmp_path / "model.onnx"
    onnx.save_model(
        model, path, save_as_external_data=True, location="model.onnx_data", size_threshold=0
    )
    (tmp_path / "model.onnx_data").unlink()
    (weight,) = make_static(path, {"a": (2, 4)}).graph.initializer
    assert weight.data_location == TensorProto.EXTERNAL
    assert {entry.key: entry.value for entry in weight.external_data}[
        "location"
    ] == "model.onnx_data"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"gone\.onnx.*No such file"):
        make_static(tmp_path / "gone.onnx", {})


@pytest.mark.parametrize("content", [b"", b"hello, I am not a graph", b"\x00" * 64])
def test_a_file_that_is_not_onnx_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "junk.onnx"
    path.write_bytes(content)
    with pytest.raises(PipelineError, match=r"junk\.onnx"):
        make_static(path, {})
