import numpy as np
import pytest
from onnx import TensorProto, helper

from sdkit_dispatch.contract import TensorSpec
from sdkit_dispatch.errors import RunError
from sdkit_dispatch.graph.tensors import check_feeds, static_spec

INPUTS = (
    TensorSpec(name="sample", dtype="float32", shape=(2, 4)),
    TensorSpec(name="timestep", dtype="int64", shape=()),
)


def good() -> dict[str, object]:
    return {"sample": np.zeros((2, 4), np.float32), "timestep": np.array(3, np.int64)}


def test_feeds_as_declared_pass() -> None:
    check_feeds(INPUTS, good())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"sample": np.zeros((2, 5), np.float32)},
            r'"sample" is float32\[2, 5\], not float32\[2, 4\]',
        ),
        ({"sample": np.zeros((2, 4), np.float64)}, r'"sample" is float64\[2, 4\]'),
        ({"timestep": np.zeros((1,), np.int64)}, r'"timestep" is int64\[1\], not int64\[\]'),
        ({"timestep": 3}, r'"timestep" is a int, not a numpy array'),
        ({"samples": np.zeros(1)}, r'"samples" is not an input'),
    ],
)
def test_a_wrong_feed_is_named_with_what_it_is_and_should_be(
    change: dict[str, object], words: str
) -> None:
    with pytest.raises(RunError, match=words):
        check_feeds(INPUTS, good() | change)


def test_all_wrong_feeds_are_named_at_once() -> None:
    with pytest.raises(RunError, match=r'"timestep" is missing.*"sample" is float32') as caught:
        check_feeds(INPUTS, {"sample": np.zeros((1, 4), np.float32)})
    assert "timestep: int64[]" in caught.value.hint


def test_a_static_value_becomes_a_record() -> None:
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT16, [1, 3])
    assert static_spec(info) == TensorSpec(name="x", dtype="float16", shape=(1, 3))


@pytest.mark.parametrize("dims", [["batch", 3], [None], None])
def test_a_value_with_an_unknown_size_has_no_record(dims: list[str | int | None] | None) -> None:
    with pytest.raises(ValueError, match='"x" has no static shape'):
        static_spec(helper.make_tensor_value_info("x", TensorProto.FLOAT, dims))
