"""The compiler by itself: layouts, memory, folding, patterns, and what it refuses."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ggml_harness import by_onnxruntime, compiled, ggml_adapter
from sdkit_dispatch.errors import UnsupportedOpError
from sdkit_ggml.compiler.compile import compile_model
from sdkit_ggml.compiler.layout import (
    Layout,
    contiguous,
    expand,
    from_order,
    refine,
    reshape,
    take,
    transpose,
)
from sdkit_ggml.compiler.memory import ALIGNMENT, plan_memory

TOLERANCE = 5e-6
SHAPE = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4).map(tuple)


def elements(layout: Layout) -> Any:
    """Returns the addresses of all elements, in the shape of the layout."""
    found = np.full((), layout.offset)
    for axis in layout.axes:
        addresses = np.zeros(1, int)
        for size, stride in axis:
            addresses = (addresses[:, None] + np.arange(size) * stride).ravel()
        found = found[..., None] + addresses
    return found


@given(SHAPE, st.data())
def test_a_transposed_layout_addresses_what_numpy_does(shape: Any, data: Any) -> None:
    perm = data.draw(st.permutations(range(len(shape))))
    wanted = np.arange(math.prod(shape)).reshape(shape).transpose(perm)
    np.testing.assert_array_equal(elements(transpose(contiguous(shape), perm)), wanted)


@given(SHAPE, st.data())
def test_a_reshaped_layout_addresses_what_numpy_does_or_asks_for_a_copy(
    shape: Any, data: Any
) -> None:
    perm = data.draw(st.permutations(range(len(shape))))
    moved = transpose(contiguous(shape), perm)
    wanted = np.arange(math.prod(shape)).reshape(shape).transpose(perm)
    for new in {(math.prod(shape),), tuple(sorted(shape)), (*wanted.shape[:-1], 1, shape[-1])}:
        if math.prod(new) == math.prod(shape):
            found = reshape(moved, new)
            if found is not None:
                np.testing.assert_array_equal(elements(found), wanted.reshape(new))


def test_heads_and_batch_merge_without_a_copy() -> None:
    split = reshape(contiguous((2, 77, 8 * 40)), (2, 77, 8, 40))
    assert split is not None
    merged = reshape(transpose(split, (0, 2, 1, 3)), (16, 77, 40))
    assert merged is not None
    wanted = np.arange(2 * 77 * 320).reshape(2, 77, 8, 40).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(elements(merged), wanted.reshape(16, 77, 40))


@given(SHAPE, st.data())
def test_a_slice_addresses_what_numpy_does(shape: Any, data: Any) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[axis] - 1))
    size = data.draw(st.integers(1, shape[axis] - start))
    found = take(contiguous(shape), axis, start, size)
    assert found is not None
    index = [slice(None)] * len(shape)
    index[axis] = slice(start, start + size)
    wanted = np.arange(math.prod(shape)).reshape(shape)[tuple(index)]
    np.testing.assert_array_equal(elements(found), wanted)


def test_an_expanded_layout_repeats_its_elements() -> None:
    found = expand(contiguous((3, 1)), (2, 3, 4))
    np.testing.assert_array_equal(
        elements(found), np.broadcast_to(np.arange(3).reshape(3, 1), (2, 3, 4))
    )


@given(SHAPE, st.data())
def test_paired_factors_walk_both_layouts(shape: Any, data: Any) -> None:
    perms = [data.draw(st.permutations(range(len(shape)))) for _ in range(2)]
    layouts = [
        transpose(contiguous([shape[axis] for axis in perm]), np.argsort(perm).tolist())
        for perm in perms
    ]
    rows = refine(layouts)
    assert rows is not None
    for which, layout in enumerate(layouts):
        walked = np.zeros(1, int)
        for row in rows:
            walked = (walked[:, None] + np.arange(row.size) * row.strides[which]).ravel()
        np.testing.assert_array_equal(walked, elements(layout).ravel())
    assert from_order(rows, len(shape)).shape == shape


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.integers(0, 30), st.integers(0, 12)),
        min_size=1,
        max_size=40,
    )
)
def test_buffers_alive_together_never_overlap(asked: list[tuple[int, int, int]]) -> None:
    sizes = {index: size for index, (size, _, _) in enumerate(asked)}
    spans = {index: (first, first + life) for index, (_, first, life) in enumerate(asked)}
    offsets, total = plan_memory(sizes, spans, {})
    for one in sizes:
        assert offsets[one] % ALIGNMENT == 0
        assert offsets[one] + sizes[one] <= total
        for other in range(one):
            alive = spans[one][0] <= spans[other][1] and spans[other][0] <= spans[one][1]
            apart = (
                offsets[one] + sizes[one] <= offsets[other]
                or offsets[other] + sizes[other] <= offsets[one]
            )
            assert apart or not alive


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, ...]],
    weights: dict[str, Any] | None = None,
    opset: int = 18,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, v) for k, v in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def operations(model: onnx.ModelProto) -> Counter[str]:
    found = compile_model(model, Path(), component="test")
    (variant,) = (one for one in found.program.variants if one.device == "cpu")
    return Counter(op.name for op in variant.ops)


def check(model: onnx.ModelProto, folder: Path) -> None:
    """Compares an engine of the model with ONNX Runtime."""
    ggml_adapter()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    onnx.save(model, path)
    shapes = {
        value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for value in model.graph.input
    }
    session = compiled(path, shapes, folder / "out").load()
    rng = np.random.default_rng(3)
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    found, wanted = session.run(feeds)["y"], by_onnxruntime(path, feeds)["y"]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


def node(op_type: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(), [output], **attributes)


ROOT, HALF, ONE = (np.float32(v) for v in (math.sqrt(2), 0.5, 1))
GELUS = {
    "x*0.5*(1+erf)": [
        node("Div", "x root", "a"),
        node("Erf", "a", "b"),
        node("Add", "b one", "c"),
        node("Mul", "x c", "d"),
        node("Mul", "d half", "y"),
    ],
    "(0.5*x)*(1+erf)": [
        node("Div", "x root", "a"),
        node("Erf", "a", "b"),
        node("Add", "one b", "c"),
        node("Mul", "half x", "d"),
        node("Mul", "d c", "y"),
    ],
    "x*(0.5*(1+erf))": [
        node("Mul", "x inverse", "a"),
        node("Erf", "a", "b"),
        node("Add", "b one", "c"),
        node("Mul", "c half", "d"),
        node("Mul", "x d", "y"),
    ],
}


@pytest.mark.parametrize("nodes", GELUS.values(), ids=GELUS)
def test_every_spelling_of_gelu_is_one_operation(
    nodes: list[onnx.NodeProto], tmp_path: Path
) -> None:
    weights = {"root": ROOT, "half": HALF, "one": ONE, "inverse": np.float32(1 / math.sqrt(2))}
    model = model_of(nodes, {"x": (4, 32)}, weights)
    assert operations(model) == {"unary": 1}
    check(model, tmp_path)


def test_a_layer_norm_spelt_out_is_one_normalisation(tmp_path: Path) -> None:
    nodes = [
        node("ReduceMean", "x", "mean", axes=[-1]),
        node("Sub", "x mean", "c"),
        node("Pow", "c two", "s"),
        node("ReduceMean", "s", "v", axes=[-1]),
        node("Add", "v eps", "e"),
        node("Sqrt", "e", "r"),
        node("Div", "c r", "n"),
        node("Mul", "n scale", "m"),
        node("Add", "m bias", "y"),
    ]
    weights = {
        "two": np.float32(2),
        "eps": np.float32(1e-5),
        "scale": np.linspace(1, 2, 32, dtype=np.float32),
        "bias": np.linspace(-1, 1, 32, dtype=np.float32),
    }
    model = model_of(nodes, {"x": (2, 5, 32)}, weights, opset=13)
    assert operations(model) == {"norm": 1, "mul": 1, "add": 1}
    check(model, tmp_path)


@pytest.mark.parametrize("shape", [(1, 16, 9, 7), (3, 16, 8, 8), (2, 12, 5, 6)], ids=str)
@pytest.mark.parametrize(
    ("kernel", "attributes"),
    [
        ((3, 3), {"pads": [1, 1, 1, 1]}),
        ((3, 3), {"pads": [0, 0, 1, 1], "strides": [2, 2]}),
        ((1, 1), {}),
        ((5, 3), {"pads": [2, 0, 1, 1]}),
        ((3, 3), {"dilations": [2, 2], "pads": [2, 2, 2, 2]}),
        ((2, 3), {"strides": [2, 1], "auto_pad": "SAME_UPPER"}),
        ((2, 2), {"group": 4}),
    ],
    ids=str,
)
def test_convolutions_of_every_kind(
    shape: tuple[int, ...], kernel: tuple[int, int], attributes: dict[str, Any], tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    group = attributes.get("group", 1)
    weights = {
        "w": (rng.standard_normal((8, shape[1] // group, *kernel)) / 8).astype(np.float32),
        "b": rng.standard_normal(8).astype(np.float32),
    }
    check(model_of([node("Conv", "x w b", "y", **attributes)], {"x": shape}, weights), tmp_path)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 3, 4), (4, 5)),
        ((2, 3, 4, 8), (2, 3, 8, 5)),
        ((3, 4, 8), (1, 8, 5)),
        ((1, 4, 8), (3, 8, 5)),
        ((8,), (8, 5)),
        ((2, 4, 8), (8,)),
    ],
    ids=str,
)
def test_products_broadcast_as_numpy_does(a: Any, b: Any, tmp_path: Path) -> None:
    check(model_of([node("MatMul", "x z", "y")], {"x": a, "z": b}), tmp_path)


@given(
    st.permutations(range(4)),
    st.permutations(range(4)),
    st.sampled_from(["Add", "Mul", "Sub", "Div"]),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
@settings(max_examples=40, deadline=None)
def test_arithmetic_of_any_two_layouts_compiles_without_an_assertion(
    left: list[int], right: list[int], op_type: str, broadcast: list[bool]
) -> None:
    shape = (2, 3, 4, 5)
    other = tuple(1 if one else size for one, size in zip(broadcast, shape, strict=True))
    nodes = [
        node("Transpose", "x", "a", perm=np.argsort(left).tolist()),
        node("Transpose", "z", "b", perm=np.argsort(right).tolist()),
        node(op_type, "a b", "y"),
    ]
    inputs = {
        "x": tuple(shape[axis] for axis in left),
        "z": tuple(other[axis] for axis in right),
    }
    assert operations(model_of(nodes, inputs))


def test_arithmetic_of_any_two_layouts_gives_numpys_numbers(tmp_path: Path) -> None:
    shape = (2, 3, 4, 5)
    cases = [
        ((0, 2, 3, 1), (0, 1, 2, 3), "Sub", (2, 3, 4, 5)),
        ((0, 2, 3, 1), (3, 2, 1, 0), "Div", (2, 3, 4, 5)),
        ((3, 0, 1, 2), (1, 0, 2, 3), "Sub", (1, 3, 1, 5)),
        ((1, 3, 0, 2), (0, 2, 3, 1), "Mul", (2, 1, 4, 1)),
    ]
    for index, (left, right, op_type, other) in enumerate(cases):
        nodes = [
            node("Transpose", "x", "a", perm=np.argsort(left).tolist()),
            node("Transpose", "z", "b", perm=np.argsort(right).tolist()),
            node("Exp", "b", "c"),
            node(op_type, "a c" if op_type == "Div" else "c a", "y"),
        ]
        inputs = {
            "x": tuple(shape[axis] for axis in left),
            "z": tuple(other[axis] for axis in right),
        }
        check(model_of(nodes, inputs), tmp_path / str(index))


def test_shapes_that_are_computed_in_the_graph_fold_away() -> None:
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "n", axis=0),
        node("Unsqueeze", "n zero1", "n1"),
        node("Concat", "n1 rest", "shape", axis=0),
        node("Reshape", "x shape", "r"),
        node("Relu", "r", "y"),
    ]
    weights = {
        "zero": np.int64(0),
        "zero1": np.array([0], np.int64),
        "rest": np.array([-1], np.int64),
    }
    assert operations(model_of(nodes, {"x": (3, 4, 5)}, weights)) == {"unary": 1}


def test_attention_with_heads_takes_no_copy(tmp_path: Path) -> None:
    shape = np.array([2, 10, 4, 16], np.int64)
    nodes = [
        *(
            one
            for name in "qkv"
            for one in (
                node("MatMul", f"x w{name}", f"{name}0"),
                node("Reshape", f"{name}0 heads", f"{name}1"),
            )
        ),
        node("Transpose", "q1", "q", perm=[0, 2, 1, 3]),
        node("Transpose", "k1", "k", perm=[0, 2, 3, 1]),
        node("Transpose", "v1", "v", perm=[0, 2, 1, 3]),
        node("MatMul", "q k", "scores"),
        node("Mul", "scores scale", "scaled"),
        node("Softmax", "scaled", "weights", axis=-1),
        node("MatMul", "weights v", "o"),
        node("Transpose", "o", "o1", perm=[0, 2, 1, 3]),
        node("Reshape", "o1 flat", "y"),
    ]
    rng = np.random.default_rng(0)
    weights = {
        "heads": shape,
        "flat": np.array([2, 10, 64], np.int64),
        "scale": np.float32(0.25),
        **{f"w{n}": (rng.standard_normal((64, 64)) / 8).astype(np.float32) for n in "qkv"},
    }
    model = model_of(nodes, {"x": (2, 10, 64)}, weights)
    assert operations(model) == {"mul_mat": 3, "flash": 1}
    check(model, tmp_path)


def test_all_refused_operators_are_named_at_once_with_reasons() -> None:
    nodes = [
        node("Resize", "x roi scales", "a", mode="linear", coordinate_transformation_mode="moon"),
        node("Erf", "a", "b"),
        node("Acosh", "b", "c"),
        node("Relu", "c", "y"),
    ]
    weights = {"roi": np.zeros(0, np.float32), "scales": np.array([1, 1, 2, 2], np.float32)}
    with pytest.raises(UnsupportedOpError) as caught:
        compile_model(model_of(nodes, {"x": (1, 4, 4, 4)}, weights), Path(), component="odd")
    message = caught.value.message
    assert "odd: cannot lower the operators Acosh, Erf, Resize" in message
    assert "places pixels by moon" in message
    assert "Relu" not in message
