"""OpenVINO's convolutions with half the multiplications: same numbers, and where they are used."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from sdkit_dispatch.contract import Session
from sdkit_dispatch.errors import CompileError, ConfigError
from sdkit_openvino import SPEC
from vendor_harness import adapter_of, build, feeds_for, plan_of, with_external_weights

# Not importorskip: that would import openvino before the adapter has silenced it.
if importlib.util.find_spec("openvino") is None:
    pytest.skip("openvino is not installed", allow_module_level=True)

from sdkit_openvino.runtime import ov as openvino
from sdkit_openvino.winograd import use_winograd

NEAR = 2e-5
"""How far a convolution may be off, over the largest value: three times what was seen."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A convolution: batch x channels_in x height x width -> channels_out."""

    batch: int = 1
    channels_in: int = 8
    channels_out: int = 12
    height: int = 8
    width: int = 8
    pads: tuple[int, int, int, int] = (1, 1, 1, 1)
    kernel: tuple[int, int] = (3, 3)
    stride: int = 1
    dilation: int = 1
    group: int = 1
    auto_pad: str = ""
    dtype: type[np.floating[Any]] = np.float32

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.channels_in, self.height, self.width)

    def write(self, path: Path) -> Path:
        """Writes SiLU, the convolution with a bias, and a sum: neighbours as in a UNet."""
        rng = np.random.default_rng(0)
        inside = self.channels_in // self.group
        weights = rng.standard_normal((self.channels_out, inside, *self.kernel))
        weights /= np.sqrt(weights[0].size)
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        pads = {"auto_pad": self.auto_pad} if self.auto_pad else {"pads": self.pads}
        nodes = [
            helper.make_node("Sigmoid", ["x"], ["gate"]),
            helper.make_node("Mul", ["x", "gate"], ["silu"]),
            helper.make_node(
                "Conv",
                ["silu", "w", "b"],
                ["conv"],
                strides=[self.stride] * 2,
                dilations=[self.dilation] * 2,
                group=self.group,
                **pads,
            ),
            helper.make_node("Add", ["conv", "one"], ["y"]),
        ]
        tensors = {
            "w": weights.astype(self.dtype),
            "b": rng.standard_normal(self.channels_out).astype(self.dtype),
            "one": np.ones((), self.dtype),
        }
        graph = helper.make_graph(
            nodes,
            "convolution",
            [helper.make_tensor_value_info("x", kind, self.shape)],
            [helper.make_tensor_value_info("y", kind, None)],
            [numpy_helper.from_array(value, name) for name, value in tensors.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        model.ir_version = 8
        onnx.save(onnx.shape_inference.infer_shapes(model), path)
        return path


def session_of(path: Path, out: Path, case: Case, winograd: str) -> Session:
    shapes = {"x": case.shape}
    return build(SPEC, out, onnx_file=path, options={"winograd": winograd}, shapes=shapes).load()


def largest_error(got: Any, expected: Any) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


CASES = {
    "plain": Case(),
    "a height that is no multiple of four": Case(height=7),
    "one row": Case(height=1, width=5),
    "two rows": Case(height=2),
    "a batch": Case(batch=2, height=10, width=6),
    "without padding": Case(height=9, pads=(0, 0, 0, 0)),
    "another padding on every side": Case(height=6, pads=(2, 0, 1, 3)),
    "more padding than rows": Case(height=1, width=2, pads=(3, 1, 2, 1)),
    "same": Case(height=11, auto_pad="SAME_UPPER"),
    "one channel": Case(channels_in=1, channels_out=1),
    "many channels": Case(channels_in=96, channels_out=64, height=16, width=16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_convolution_has_the_same_numbers(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path / "model.onnx")
    session = session_of(path, tmp_path / "out", case, "all")
    feeds = feeds_for(session.inputs)
    expected = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
    got = session.run(feeds)["y"]
    assert session.facts["winograd"] == "1"
    assert got.shape == expected.shape
    assert largest_error(got, expected) < NEAR


OTHERS = {
    "1x1": Case(kernel=(1, 1), pads=(0, 0, 0, 0)),
    "3x1": Case(kernel=(3, 1), pads=(1, 0, 1, 0)),
    "5x5": Case(kernel=(5, 5)),
    "every other pixel": Case(stride=2),
    "dilated": Case(dilation=2),
    "groups": Case(group=4),
}


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_other_convolutions_are_left_alone(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path / "model.onnx")
    assert session_of(path, tmp_path / "out", case, "all").facts["winograd"] == "0"


def test_a_graph_in_fp16_that_runs_in_fp32_keeps_its_digits(tmp_path: Path) -> None:
    case = Case(channels_in=64, channels_out=64, height=10, dtype=np.float16)
    path = case.write(tmp_path / "model.onnx")
    direct, winograd = (session_of(path, tmp_path / kind, case, kind) for kind in ("none", "all"))
    assert winograd.facts["winograd"] == "1"
    feeds = feeds_for(direct.inputs)
    # Results are rounded to fp16, a step of at most 1e-3 of a value.
    one, other = (session.run(feeds)["y"].astype(np.float32) for session in (direct, winograd))
    assert largest_error(other, one) < 1e-3
    assert np.mean(one != other) < 0.02


@pytest.mark.parametrize("kind", ["BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2", "INT4"])
def test_weights_of_other_types_are_left_alone(kind: str, tmp_path: Path) -> None:
    case = Case()
    path = case.write(tmp_path / "model.onnx")
    model = onnx.load(path)
    weights = next(one for one in model.graph.initializer if one.name == "w")
    values = np.round(2 * numpy_helper.to_array(weights))  # all of these types hold them
    dtype = helper.tensor_dtype_to_np_dtype(getattr(onnx.TensorProto, kind))
    weights.CopyFrom(numpy_helper.from_array(values.astype(dtype), "small"))
    cast = helper.make_node("Cast", ["small"], ["w"], to=onnx.TensorProto.FLOAT)
    model.graph.node.insert(0, cast)
    model.opset_import[0].version, model.ir_version = 21, 10
    onnx.save(model, path)
    try:
        direct = session_of(path, tmp_path / "none", case, "none")
    except CompileError as error:
        pytest.skip(f"this OpenVINO has no such weights: {error}")
    session = session_of(path, tmp_path / "all", case, "all")
    assert session.facts["winograd"] == "0"
    feeds = feeds_for(session.inputs)
    np.testing.assert_array_equal(session.run(feeds)["y"], direct.run(feeds)["y"])


def test_each_convolution_of_a_chain_is_rewritten(tmp_path: Path) -> None:
    case = Case(channels_in=8, channels_out=8)
    path = case.write(tmp_path / "model.onnx")
    model = onnx.load(path)
    first = next(node for node in model.graph.node if node.op_type == "Conv")
    del first.input[2:]  # a bias would stand between the two
    again = helper.make_node("Conv", ["conv", "w"], ["again"], pads=case.pads)
    last = next(node for node in model.graph.node if node.op_type == "Add")
    last.input[0] = "again"
    model.graph.node.insert(3, again)
    onnx.save(model, path)
    read = openvino.Core().read_model(path)
    read.reshape({"x": list(case.shape)})
    assert use_winograd(read, everywhere=True) == 2
    kernels = [
        tuple(node.input_value(1).get_shape()[2:])
        for node in read.get_ordered_ops()
        if node.get_type_name() == "Convolution"
    ]
    assert kernels == [(1, 3)] * 12
    session = session_of(path, tmp_path / "out", case, "all")
    feeds = feeds_for(session.inputs)
    expected = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
    assert largest_error(session.run(feeds)["y"], expected) < NEAR


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        pytest.param(Case(channels_in=256, channels_out=256, height=32, width=32), "1", id="large"),
        pytest.param(Case(channels_in=128, channels_out=256, height=32, width=32), "0", id="thin"),
        pytest.param(Case(channels_in=256, channels_out=256, height=16, width=16), "0", id="small"),
        pytest.param(
            Case(batch=4, channels_in=256, channels_out=256, height=16, width=16), "1", id="batch"
        ),
    ],
)
def test_auto_takes_those_of_many_channels_and_pixels(
    case: Case, expected: str, tmp_path: Path
) -> None:
    path = case.write(tmp_path / "model.onnx")
    assert session_of(path, tmp_path / "out", case, "auto").facts["winograd"] == expected


@pytest.mark.parametrize("component", ["unet", "vae_decoder", "vae_encoder"])
def test_a_network_has_the_same_numbers(component: str, tmp_path: Path) -> None:
    direct, winograd = (
        build(SPEC, tmp_path / kind, component, options={"winograd": kind}).load()
        for kind in ("none", "all")
    )
    assert int(winograd.facts["winograd"]) > 5
    feeds = feeds_for(direct.inputs)
    one, other = direct.run(feeds), winograd.run(feeds)
    for name, expected in one.items():
        assert largest_error(other[name], expected) < 1e-4


def test_other_weights_stay_mapped(tmp_path: Path) -> None:
    path = with_external_weights("unet", tmp_path / "source")
    light = build(SPEC, tmp_path / "light", onnx_file=path, options={"winograd": "all"})
    heavy = build(
        SPEC, tmp_path / "heavy", onnx_file=path, options={"winograd": "all", "map_weights": False}
    )
    one, other = light.load(), heavy.load()
    if one.facts["weights"] != "mapped":
        pytest.skip(f"{one.facts['runtime']} does not read back an engine without weights")
    sizes = [(tmp_path / name / "model.blob").stat().st_size for name in ("light", "heavy")]
    assert sizes[0] < 0.9 * sizes[1]
    feeds = feeds_for(one.inputs)
    np.testing.assert_array_equal(one.run(feeds)["out_sample"], other.run(feeds)["out_sample"])


def test_it_is_part_of_the_key(tmp_path: Path) -> None:
    keys = {
        build(SPEC, tmp_path / kind, "vae_decoder", options={"winograd": kind}).engine.key
        for kind in ("none", "all")
    }
    assert len(keys) == 2


def test_arm_has_such_convolutions_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    case = Case()
    path = case.write(tmp_path / "model.onnx")
    assert session_of(path, tmp_path / "out", case, "all").facts["winograd"] == "0"


def test_a_wrong_value_names_the_option() -> None:
    with pytest.raises(ConfigError, match=r"options\.openvino: .*winograd"):
        plan_of(SPEC, adapter_of(SPEC), options={"winograd": "some"})
