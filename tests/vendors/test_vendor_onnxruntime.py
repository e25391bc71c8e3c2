"""What is particular to ONNX Runtime: the numeric reference."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from sdkit_dispatch.contract import Plan
from sdkit_onnxruntime import CPU as SPEC
from sdkit_onnxruntime.isa import isa_of_this_cpu
from vendor_harness import CPU, SAMPLE, SHAPES, adapter_of, build, feeds_for, plan_of

ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

HALF_TOLERANCE = 0.02
"""Half precision rounds each of the sample's layers by up to 2**-11; 0.005 was measured."""


def bare_session(component: str) -> ort.InferenceSession:
    """The runtime without us: the same fixed shapes, optimised at load."""
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    model = onnx.load(SAMPLE / component / "model.onnx")
    for value in model.graph.input:
        sizes = SHAPES[component][value.name]
        for dim, size in zip(value.type.tensor_type.shape.dim, sizes, strict=True):
            dim.dim_value = size
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return ort.InferenceSession(
        model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )


@pytest.mark.parametrize("component", SHAPES)
def test_an_engine_gives_bit_for_bit_what_the_runtime_alone_gives(
    component: str, tmp_path: Path
) -> None:
    session = build(SPEC, tmp_path / "out", component).load()
    feeds = feeds_for(session.inputs)
    expected = bare_session(component).run(None, feeds)
    for array, wanted in zip(session.run(feeds).values(), expected, strict=True):
        np.testing.assert_array_equal(array, wanted)


def test_a_processor_bound_engine_says_so_and_a_portable_one_is_not() -> None:
    adapter = adapter_of(SPEC)
    assert plan_of(SPEC, adapter).target == f"isa={isa_of_this_cpu()}"
    assert plan_of(SPEC, adapter, options={"graph_optimization": "extended"}).target == ""


@pytest.mark.parametrize("level", ["disabled", "basic", "extended"])
def test_every_level_of_optimisation_builds_and_agrees(level: str, tmp_path: Path) -> None:
    one = build(SPEC, tmp_path / "one", "unet", options={"graph_optimization": level}).load()
    feeds = feeds_for(one.inputs)
    expected = build(SPEC, tmp_path / "all", "unet").load().run(feeds)["out_sample"]
    np.testing.assert_allclose(one.run(feeds)["out_sample"], expected, rtol=0, atol=2e-5)


def op_types(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}


def test_an_unoptimised_engine_has_no_operator_that_the_export_does_not_have(
    tmp_path: Path,
) -> None:
    exported = op_types(SAMPLE / "vae_decoder" / "model.onnx")
    build(SPEC, tmp_path / "raw", "vae_decoder", options={"graph_optimization": "disabled"})
    build(SPEC, tmp_path / "all", "vae_decoder")
    assert op_types(tmp_path / "raw" / "model.onnx") <= exported
    assert op_types(tmp_path / "all" / "model.onnx") - exported


def test_threads_are_a_matter_of_loading_and_change_no_engine(tmp_path: Path) -> None:
    one = build(SPEC, tmp_path / "out", "unet")
    key = one.engine.key
    one.adapter.threads = 1  # type: ignore[attr-defined]
    assert one.load().facts["threads"] == "1"
    again = one.adapter.plan(CPU, None, {})
    assert isinstance(again, Plan)
    assert replace(one.engine.request, options=again.options).key == key


def test_a_half_precision_graph_keeps_its_types_and_is_said_to_run_in_fp32(tmp_path: Path) -> None:
    path = half_precision("vae_decoder", tmp_path)
    session = build(SPEC, tmp_path / "out", "vae_decoder", onnx_file=path).load()
    assert session.inputs[0].dtype == "float16"
    assert (session.facts["precision"], session.facts["graph_dtype"]) == ("fp32", "float16")
    full = build(SPEC, tmp_path / "full", "vae_decoder").load()
    feeds = feeds_for(full.inputs)
    half = {name: array.astype(np.float16) for name, array in feeds.items()}
    np.testing.assert_allclose(
        session.run(half)["sample"], full.run(feeds)["sample"], rtol=0, atol=HALF_TOLERANCE
    )


def half_precision(component: str, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the converter warns of every weight below 2**-24
        from onnxruntime.transformers.float16 import convert_float_to_float16

        model = convert_float_to_float16(onnx.load(SAMPLE / component / "model.onnx"))
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path
