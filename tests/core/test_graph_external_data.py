from pathlib import Path

import onnx
from onnx import TensorProto, helper

from sdkit_dispatch.graph.external_data import external_locations


def external(name: str, location: str) -> onnx.TensorProto:
    tensor = helper.make_tensor(name, TensorProto.FLOAT, [1], [1.0])
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def test_every_file_is_listed_once_wherever_a_tensor_sits() -> None:
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    constant = helper.make_node("Constant", [], ["c"], value=external("c", "b.bin"))
    branch = helper.make_graph(
        [helper.make_node("Identity", ["v"], ["r"])],
        "branch",
        [],
        [helper.make_tensor_value_info("r", TensorProto.FLOAT, [1])],
        initializer=[external("v", "c.bin")],
    )
    choice = helper.make_node("If", ["cond"], ["y"], then_branch=branch, else_branch=branch)
    graph = helper.make_graph(
        [constant, choice],
        "g",
        [],
        [y],
        initializer=[external("w", "a.bin"), external("x", "a.bin")],
    )
    assert external_locations(helper.make_model(graph)) == ("a.bin", "b.bin", "c.bin")


def test_weights_inside_the_graph_are_in_no_file(tmp_path: Path) -> None:
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    graph = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["y"])], "g", [], [y], initializer=[weight]
    )
    assert external_locations(helper.make_model(graph)) == ()
