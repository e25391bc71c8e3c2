"""The half-precision pass: what it changes, what it leaves, and that it needs little memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import sdkit_dispatch
from sdkit_dispatch.errors import CompileError, PipelineError
from sdkit_dispatch.graph.precision import GraphPrecision, is_half_graph, write_at_precision
from sdkit_dispatch.graph.static_shapes import read_graph
from sdkit_dispatch.graph.weight_files import PIECE_BYTES, converted

SAMPLE = Path(sdkit_dispatch.__file__).parent / "_data" / "sample" / "digits-sd"
COMPONENTS = ("text_encoder", "unet", "vae_decoder", "vae_encoder")
HALF_TOLERANCE = 2e-3
"""Relative to the largest value: a few roundings by 2**-11."""
FLOAT, HALF, BRAIN = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
TYPES = {"fp32": FLOAT, "fp16": HALF, "bf16": BRAIN}

every_component = pytest.mark.parametrize("component", COMPONENTS)
every_half = pytest.mark.parametrize("precision", ["fp16", "bf16"])


def graph_of(
    nodes: list[onnx.NodeProto],
    weights: dict[str, Any] | None = None,
    *,
    opset: int = 18,
    shape: tuple[int, ...] = (2, 4),
    inputs: tuple[str, ...] = ("x",),
    kind: int = FLOAT,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kind, shape) for name in inputs],
        [helper.make_tensor_value_info("y", kind, ("rows", "columns"))],
        [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def write(
    model: onnx.ModelProto,
    folder: Path,
    precision: GraphPrecision = "fp16",
    *,
    keep: tuple[str, ...] = (),
) -> onnx.ModelProto:
    out = folder / "out.onnx"
    write_at_precision(model, folder, out, precision, keep=keep)
    onnx.checker.check_model(str(out), full_check=True)
    return onnx.load(out)


def types_of(model: onnx.ModelProto) -> dict[str, int]:
    graph = onnx.shape_inference.infer_shapes(model).graph
    values = (*graph.value_info, *graph.input, *graph.output)
    return {v.name: v.type.tensor_type.elem_type for v in values} | {
        tensor.name: tensor.data_type for tensor in graph.initializer
    }


def node_types(model: onnx.ModelProto) -> dict[str, set[int]]:
    """Operator type -> the element types of its first outputs."""
    types, found = types_of(model), dict[str, set[int]]()
    for node in model.graph.node:
        found.setdefault(node.op_type, set()).add(types[node.output[0]])
    return found


@every_component
@every_half
def test_convolutions_and_products_are_half_and_the_graph_is_valid(
    component: str, precision: GraphPrecision, tmp_path: Path
) -> None:
    path = SAMPLE / component / "model.onnx"
    out = tmp_path / "model.onnx"
    conversion = write_at_precision(read_graph(path), path.parent, out, precision)
    onnx.checker.check_model(str(out), full_check=True)
    found = node_types(onnx.load(out))
    for op_type in {"Conv", "MatMul", "Gemm"} & set(found):
        assert found[op_type] == {TYPES[precision]}, op_type
    assert conversion.low_nodes > 5 * conversion.full_nodes
    assert out.stat().st_size + out.with_name("model.onnx_data").stat().st_size < (
        0.75 * path.stat().st_size
    )


@every_component
@every_half
def test_inputs_and_outputs_keep_their_names_types_and_shapes(
    component: str, precision: GraphPrecision, tmp_path: Path
) -> None:
    path = SAMPLE / component / "model.onnx"
    before = read_graph(path)
    write_at_precision(before, path.parent, tmp_path / "out.onnx", precision)
    after = read_graph(tmp_path / "out.onnx")
    assert list(after.graph.input) == list(before.graph.input)
    assert list(after.graph.output) == list(before.graph.output)


def test_everything_before_the_sines_of_the_timestep_is_float32(tmp_path: Path) -> None:
    path = SAMPLE / "unet" / "model.onnx"
    write_at_precision(read_graph(path), path.parent, tmp_path / "out.onnx", "fp16")
    model = onnx.load(tmp_path / "out.onnx")
    types = types_of(model)
    made_by = {name: node for node in model.graph.node for name in node.output}
    waiting = [node for node in model.graph.node if node.op_type in ("Sin", "Cos")]
    assert len(waiting) == 2
    seen: set[str] = set()
    while waiting:
        node = waiting.pop()
        assert HALF not in {types.get(name) for name in (*node.input, *node.output)}, node.name
        for name in set(node.input) & set(made_by) - seen:
            seen.add(name)
            waiting.append(made_by[name])
    assert "timestep" in {name for n in model.graph.node for name in n.input}


@every_half
def test_softmax_norm_statistics_and_resize_are_float32(
    precision: GraphPrecision, tmp_path: Path
) -> None:
    path = SAMPLE / "unet" / "model.onnx"
    write_at_precision(read_graph(path), path.parent, tmp_path / "out.onnx", precision)
    model = onnx.load(tmp_path / "out.onnx")
    found = node_types(model)
    for op_type in ("Softmax", "InstanceNormalization", "Resize", "Sqrt", "Sin", "Cos"):
        assert found[op_type] == {FLOAT}, op_type
    for node in model.graph.node:
        if node.op_type == "LayerNormalization":
            stash = [one.i for one in node.attribute if one.name == "stash_type"]
            assert stash == [FLOAT]


def test_a_mask_of_the_least_float_reaches_the_softmax_unclipped(tmp_path: Path) -> None:
    mask = np.full((4, 4), np.finfo(np.float32).min, np.float32)
    mask[:, 0] = 0
    model = graph_of(
        [
            helper.make_node("MatMul", ["x", "w"], ["s"]),
            helper.make_node("Unsqueeze", ["mask", "axes"], ["m1"]),
            helper.make_node("Squeeze", ["m1", "axes"], ["m2"]),
            helper.make_node("Add", ["s", "m2"], ["a"]),
            helper.make_node("Softmax", ["a"], ["p"]),
            helper.make_node("MatMul", ["p", "w"], ["y"]),
        ],
        {"w": np.eye(4, dtype=np.float32), "mask": mask, "axes": np.array([0])},
        shape=(4, 4),
    )
    result = write(model, tmp_path)
    types = types_of(result)
    assert [types[name] for name in ("mask", "s", "a", "p")] == [FLOAT, HALF, FLOAT, FLOAT]
    x = {"x": np.ones((4, 4), np.float32)}
    (got,) = ReferenceEvaluator(result).run(None, x)  # type: ignore[misc]
    (wanted,) = ReferenceEvaluator(model).run(None, x)  # type: ignore[misc]
    np.testing.assert_allclose(got, wanted, atol=HALF_TOLERANCE)


def test_a_decomposed_norm_does_not_overflow_between_its_float32_parts(tmp_path: Path) -> None:
    model = graph_of(
        [
            helper.make_node("Pow", ["x", "two"], ["square"]),
            helper.make_node("ReduceMean", ["square", "axes"], ["mean"]),
            helper.make_node("Add", ["mean", "epsilon"], ["safe"]),
            helper.make_node("Sqrt", ["safe"], ["root"]),
            helper.make_node("Div", ["x", "root"], ["y"]),
        ],
        {
            "two": np.array(2, np.float32),
            "epsilon": np.array(1e-6, np.float32),
            "axes": np.array([-1]),
        },
    )
    result = write(model, tmp_path)
    assert types_of(result)["safe"] == FLOAT
    x = np.array([[900, -700, 500, 600], [1e-4, 2e-4, -1e-4, 3e-4]], np.float32)
    (got,) = ReferenceEvaluator(result).run(None, {"x": x})  # type: ignore[misc]
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})  # type: ignore[misc]
    # The second row's mean square is as small as epsilon: in float16 both would be zero.
    np.testing.assert_allclose(got[0], wanted[0], atol=HALF_TOLERANCE)
    assert np.isfinite(got).all()


def test_sizes_that_are_computed_in_float_stay_exact(tmp_path: Path) -> None:
    model = graph_of(
        [
            helper.make_node("Shape", ["x"], ["shape"]),
            helper.make_node("Cast", ["shape"], ["sizes"], to=FLOAT),
            helper.make_node("Mul", ["sizes", "scale"], ["scaled"]),
            helper.make_node("Cast", ["scaled"], ["whole"], to=TensorProto.INT64),
            helper.make_node("Expand", ["x", "whole"], ["y"]),
        ],
        {"scale": np.array([1, 2051], np.float32)},
        shape=(1, 1),
    )
    result = write(model, tmp_path)
    (got,) = ReferenceEvaluator(result).run(None, {"x": np.ones((1, 1), np.float32)})  # type: ignore[misc]
    assert got.shape == (1, 2051)


def test_a_weight_that_two_precisions_read_is_kept_in_both(tmp_path: Path) -> None:
    model = graph_of(
        [
            helper.make_node("Mul", ["x", "w"], ["a"]),
            helper.make_node("Pow", ["a", "w"], ["y"]),
        ],
        {"w": np.array([1.1, 2.0, 3.0, 1.0], np.float32)},
    )
    result = write(model, tmp_path)
    assert sorted(tensor.data_type for tensor in result.graph.initializer) == [FLOAT, HALF]


def test_what_a_pattern_names_stays_in_float32(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["a"], name="/up/0/mul"),
        helper.make_node("Mul", ["a", "w"], ["b"], name="/up/1/mul"),
        helper.make_node("Tanh", ["b"], ["y"], name="/last"),
    ]
    model = graph_of(nodes, {"w": np.array([1.5, 2, 3, 4], np.float32)})
    types = types_of(write(model, tmp_path, keep=("/up/1/*", "Tanh")))
    assert types["a"] == HALF
    assert types["b"] == FLOAT


def test_a_graph_that_is_half_already_keeps_its_own_islands(tmp_path: Path) -> None:
    model = graph_of(
        [
            helper.make_node("Mul", ["x", "w"], ["a"]),
            helper.make_node("Cast", ["a"], ["f"], to=FLOAT),
            helper.make_node("Tanh", ["f"], ["t"]),
            helper.make_node("Cast", ["t"], ["y"], to=HALF),
        ],
        {"w": np.ones(4, np.float16)},
        kind=HALF,
    )
    assert is_half_graph(model)
    same = types_of(write(model, tmp_path))
    assert (same["a"], same["t"]) == (HALF, FLOAT)
    full = write(model, tmp_path, "fp32")
    types = types_of(full)
    assert (types["a"], types["t"], types["x"], types["y"]) == (FLOAT, FLOAT, HALF, HALF)
    brain = types_of(write(model, tmp_path, "bf16"))
    assert (brain["a"], brain["t"], brain["x"]) == (BRAIN, FLOAT, HALF)


def test_quantised_weights_pass_through_and_tiny_scales_stay_float32(tmp_path: Path) -> None:
    def types(scale: float) -> dict[str, int]:
        model = graph_of(
            [
                helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"]),
                helper.make_node("MatMul", ["x", "w"], ["y"]),
            ],
            {
                "q": np.arange(16, dtype=np.int8).reshape(4, 4),
                "s": np.array(scale, np.float32),
                "z": np.array(0, np.int8),
            },
            opset=21,
        )
        return types_of(write(model, tmp_path))

    assert (types(0.02)["q"], types(0.02)["w"]) == (TensorProto.INT8, HALF)
    assert types(1e-6)["w"] == FLOAT


def test_a_value_that_a_subgraph_reads_keeps_its_type(tmp_path: Path) -> None:
    branch = [
        helper.make_graph(
            [helper.make_node("Neg", ["a"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, FLOAT, (2, 4))],
        )
        for name in ("yes", "no")
    ]
    model = graph_of(
        [
            helper.make_node("Mul", ["x", "x"], ["a"]),
            helper.make_node("If", ["c"], ["b"], then_branch=branch[0], else_branch=branch[1]),
            helper.make_node("Mul", ["b", "x"], ["y"]),
        ],
        {"c": np.array(True)},
    )
    types = types_of(write(model, tmp_path))
    assert (types["a"], types["b"]) == (FLOAT, FLOAT)


def test_bf16_of_an_old_opset_is_refused_with_what_to_do(tmp_path: Path) -> None:
    model = graph_of([helper.make_node("Relu", ["x"], ["y"])], opset=13)
    with pytest.raises(CompileError, match="opset 22.*13") as caught:
        write(model, tmp_path, "bf16")
    assert "opset 18" in caught.value.hint


def test_an_operator_of_another_maker_gets_what_it_had(tmp_path: Path) -> None:
    model = graph_of(
        [
            helper.make_node("Mul", ["x", "x"], ["a"]),
            helper.make_node("Odd", ["a"], ["b"], domain="their.domain"),
            helper.make_node("Mul", ["b", "x"], ["y"]),
        ]
    )
    model.opset_import.append(helper.make_opsetid("their.domain", 1))
    out = tmp_path / "out.onnx"
    write_at_precision(model, tmp_path, out, "fp16")
    graph = onnx.load(out).graph
    (odd,) = [node for node in graph.node if node.op_type == "Odd"]
    assert odd.input[0] == "a_as_float"


@pytest.mark.parametrize("target", [HALF, BRAIN])
def test_rounding_is_to_the_nearest_even_and_never_makes_an_infinity(target: int) -> None:
    values = np.array(
        [1.00048828125, 1 + 3 * 2**-9, 65519.0, 1e9, -np.inf, np.nan, 1e-30, -0.0], np.float32
    )
    nan_with_low_bits = np.array([0x7F800001], np.uint32).view(np.float32)
    values = np.concatenate([values, nan_with_low_bits])
    result = np.frombuffer(converted(values.view(np.uint8), FLOAT, target).tobytes(), np.uint16)
    back = converted(result.view(np.uint8), target, FLOAT).view(np.float32)
    kind = helper.tensor_dtype_to_np_dtype(target)
    with np.errstate(all="ignore"):
        expected = values.astype(kind).astype(np.float32)
    if target == HALF:
        expected[3] = 65504
    np.testing.assert_array_equal(back, expected)


def external(folder: Path, megabytes: int) -> Path:
    """A graph with one weight of that size in a file, and a small one that decides a shape."""
    rows = megabytes * 256
    weight = np.random.default_rng(0).standard_normal((rows, 1024), np.float32)
    folder.mkdir(exist_ok=True)
    model = graph_of(
        [
            helper.make_node("Reshape", ["x", "rows"], ["r"]),
            helper.make_node("MatMul", ["r", "w"], ["y"]),
        ],
        {"w": weight, "rows": np.array([1, rows])},
        shape=(rows, 1),
    )
    onnx.save_model(
        model, folder / "model.onnx", save_as_external_data=True, location="w", size_threshold=0
    )
    return folder / "model.onnx"


def test_external_weights_are_converted_a_piece_at_a_time(tmp_path: Path) -> None:
    path = external(tmp_path / "in", 96)
    model, fractions = read_graph(path), list[float]()
    before = path.with_name("w").read_bytes()[:4096]
    tracemalloc.start()
    write_at_precision(
        model, path.parent, tmp_path / "out.onnx", "fp16", on_fraction=fractions.append
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A piece in float32, its finite mask, clipped copy and result; the file is mapped.
    assert peak < 5 * PIECE_BYTES
    assert (tmp_path / "out.onnx_data").stat().st_size == pytest.approx(48 << 20, rel=1e-3)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert len(fractions) >= 6
    assert path.with_name("w").read_bytes()[:4096] == before
    weight = {t.name: t for t in onnx.load(tmp_path / "out.onnx").graph.initializer}["w"]
    wanted = np.random.default_rng(0).standard_normal((96 * 256, 1024), np.float32)
    np.testing.assert_array_equal(numpy_helper.to_array(weight), wanted.astype(np.float16))


def test_a_cancellation_comes_out_of_the_conversion_as_it_is(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(fraction: float) -> None:
        raise StopError

    path = external(tmp_path / "in", 1)
    with pytest.raises(StopError):
        write_at_precision(
            read_graph(path), path.parent, tmp_path / "out.onnx", "fp16", on_fraction=stop
        )


def test_external_data_that_is_too_short_is_named(tmp_path: Path) -> None:
    path = external(tmp_path / "in", 1)
    with path.with_name("w").open("r+b") as stream:
        stream.truncate(1000)
    with pytest.raises(PipelineError, match="does not hold the data of"):
        write_at_precision(read_graph(path), path.parent, tmp_path / "out.onnx", "fp16")
