"""What only an NVIDIA card can show: engines run, their numbers are right, nothing runs elsewhere.

Never run yet. Each test skips with the reason that the vendor itself gives.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from sdkit_dispatch.contract import (
    BuildRequest,
    Device,
    Engine,
    Plan,
    Precision,
    Rejection,
    Session,
    Vendor,
    VendorSpec,
)
from sdkit_onnxruntime import CUDA
from sdkit_tensorrt import TENSORRT, TENSORRT_RTX

sys.path.insert(0, str(Path(__file__).parents[1] / "vendors"))

from vendor_harness import OUTPUTS, SAMPLE, SHAPES, feeds_for, snapshot

pytestmark = pytest.mark.device

SPECS = (TENSORRT_RTX, TENSORRT, CUDA)
MODULES = {
    "tensorrt-rtx": "tensorrt_rtx_bindings",
    "tensorrt": "tensorrt_bindings",
    "cuda": "onnxruntime",
}
TOLERANCE: Mapping[Precision, float] = {"fp32": 2e-3, "fp16": 0.02, "bf16": 0.16}
"""Largest difference on the sample, whose outputs are of the order of 1: fp32 sums in another
order, fp16 and bf16 round each layer by 2**-11 and 2**-8."""
Made = Callable[..., tuple[Vendor, Engine, Device]]


def nvidia_card() -> Device:
    from sdkit_dispatch.detect import detect

    found = [one for one in detect() if one.maker == "nvidia" and one.kind != "cpu"]
    if not found:
        pytest.skip("there is no NVIDIA card here")
    return found[0]


@pytest.fixture(params=SPECS, ids=lambda spec: spec.name)
def spec(request: pytest.FixtureRequest) -> VendorSpec:
    found: VendorSpec = request.param
    if importlib.util.find_spec(MODULES[found.name]) is None:
        pytest.skip(f"{found.runtime_packages[0]}, the runtime of {found.name}, is not installed")
    return found


@pytest.fixture
def made(spec: VendorSpec, tmp_path: Path) -> Made:
    """Builds a component of the sample on the card."""
    card = nvidia_card()
    module, _, name = spec.adapter.partition(":")
    adapter: Vendor = getattr(importlib.import_module(module), name)()
    if hasattr(adapter, "scratch"):
        adapter.scratch = tmp_path / "scratch"

    def make(
        component: str = "unet",
        precision: Precision | None = None,
        shapes: Any = None,
        **options: Any,
    ) -> tuple[Vendor, Engine, Device]:
        plan = adapter.plan(card, precision, options)
        if isinstance(plan, Rejection):
            pytest.skip(f"{plan.vendor}: {plan.reason}")
        assert isinstance(plan, Plan)
        path = SAMPLE / component / "model.onnx"
        request = BuildRequest(
            vendor=plan.vendor,
            revision=spec.revision,
            runtime=plan.runtime,
            target=plan.target,
            component=component,
            graph_digest="0" * 64,
            weights_digest="",
            precision=plan.precision,
            shapes=shapes or SHAPES[component],
            options=plan.options,
        )
        out = tmp_path / request.key
        out.mkdir()
        adapter.compile(request, path, out, device=card, report=lambda progress: None)
        engine = Engine(key=request.key, request=request, folder=str(out), onnx=str(path))
        return adapter, engine, card

    return make


def check_numbers(session: Session, engine: Engine, seed: int = 0) -> None:
    feeds = feeds_for(session.inputs, seed)
    wanted: Any = ReferenceEvaluator(engine.onnx).run(None, feeds)
    tolerance = TOLERANCE[engine.request.precision]
    for array, expected in zip(session.run(feeds).values(), wanted, strict=True):
        np.testing.assert_allclose(array, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("component", SHAPES)
def test_every_component_gives_the_right_numbers(component: str, made: Made) -> None:
    adapter, engine, card = made(component)
    session = adapter.load(engine, card)
    assert tuple((one.name, one.shape) for one in session.outputs) == OUTPUTS[component]
    check_numbers(session, engine)
    session.close()


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_every_precision_gives_its_numbers(precision: Precision, made: Made) -> None:
    adapter, engine, card = made("unet", precision)
    session = adapter.load(engine, card)
    assert session.facts["precision"] == precision
    for seed in range(3):
        check_numbers(session, engine, seed)
    session.close()


def test_outputs_belong_to_the_caller_and_repeat_exactly(made: Made) -> None:
    adapter, engine, card = made("unet")
    session = adapter.load(engine, card)
    first = session.run(feeds_for(session.inputs, 0))["out_sample"]
    kept = first.copy()
    second = session.run(feeds_for(session.inputs, 1))["out_sample"]
    assert not np.array_equal(kept, second)
    np.testing.assert_array_equal(first, kept)
    again = session.run(feeds_for(session.inputs, 0))["out_sample"]
    np.testing.assert_array_equal(again, kept)
    session.close()
    np.testing.assert_array_equal(first, kept)


def test_loading_and_running_leave_the_engine_as_it_is(made: Made) -> None:
    adapter, engine, card = made("vae_decoder")
    before = snapshot(Path(engine.folder))
    session = adapter.load(engine, card)
    check_numbers(session, engine)
    session.close()
    session.close()
    assert snapshot(Path(engine.folder)) == before


def test_two_sessions_live_side_by_side_and_give_their_memory_back(made: Made) -> None:
    from sdkit_tensorrt.device_memory import CardMemory

    adapter, engine, card = made("unet")
    adapter.load(engine, card).close()  # what a first use takes for good
    memory = CardMemory(0)
    free = memory.free_bytes()
    one, two = adapter.load(engine, card), adapter.load(engine, card)
    check_numbers(one, engine, 0)
    check_numbers(two, engine, 1)
    one.close()
    check_numbers(two, engine, 2)
    two.close()
    assert memory.free_bytes() > free - (64 << 20)
    memory.close()


def test_a_second_load_finds_its_compiled_kernels(spec: VendorSpec, made: Made) -> None:
    if spec.name != "tensorrt-rtx":
        pytest.skip("only TensorRT-RTX compiles kernels at load")
    adapter, engine, card = made("unet")
    started = time.monotonic()
    first = adapter.load(engine, card)
    cold_s = time.monotonic() - started
    assert first.facts["runtime_cache"] == "miss"
    first.close()
    started = time.monotonic()
    second = adapter.load(engine, card)
    assert second.facts["runtime_cache"] == "hit"
    assert time.monotonic() - started < cold_s
    check_numbers(second, engine)
    second.close()


def test_recorded_runs_give_the_same_numbers_as_plain_ones(spec: VendorSpec, made: Made) -> None:
    if spec.name != "tensorrt-rtx":
        pytest.skip("only TensorRT-RTX records whole runs")
    adapter, engine, card = made("unet")
    recorded = adapter.load(engine, card)
    feeds = feeds_for(recorded.inputs)
    wanted = recorded.run(feeds)["out_sample"]
    recorded.close()
    adapter.cuda_graphs = False  # type: ignore[attr-defined]
    plain = adapter.load(engine, card)
    np.testing.assert_array_equal(plain.run(feeds)["out_sample"], wanted)
    plain.close()


def test_one_engine_serves_two_sizes_of_its_profile(spec: VendorSpec, made: Made) -> None:
    if spec.name == "cuda":
        pytest.skip("its engines have one size")
    profile = {"height": [8, 8, 16], "width": [8, 8, 16]}
    for side in (8, 16):
        shapes = {"latent_sample": (1, 4, side, side)}
        adapter, engine, card = made(
            "vae_decoder", shapes=shapes, profiles={"vae_decoder": [profile]}
        )
        session = adapter.load(engine, card)
        assert session.outputs[0].shape == (1, 3, 4 * side, 4 * side)
        check_numbers(session, engine)
        session.close()


def test_an_engine_takes_other_weights_without_a_build(
    spec: VendorSpec, made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if spec.name == "cuda":
        pytest.skip("ONNX Runtime builds nothing")
    adapter, engine, card = made("vae_decoder", refit=True)
    model = onnx.load(engine.onnx)
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype == np.float32:
            other = array * np.float32(1.125)
            tensor.CopyFrom(onnx.numpy_helper.from_array(other, tensor.name))
    path, out = tmp_path / "other.onnx", tmp_path / "other"
    onnx.save(model, path)
    out.mkdir()
    request = replace(engine.request, weights_digest="1" * 64)
    with caplog.at_level("INFO"):
        adapter.compile(
            request, path, out, device=card, report=lambda progress: None, siblings=(engine,)
        )
    assert "with other weights" in caplog.text
    second = replace(engine, request=request, folder=str(out), onnx=str(path))
    session = adapter.load(second, card)
    check_numbers(session, second)
    session.close()


def test_an_engine_built_for_an_absent_card_runs_once_the_card_is_here(
    spec: VendorSpec, tmp_path: Path
) -> None:
    if spec.name != "tensorrt-rtx":
        pytest.skip("only TensorRT-RTX builds for absent cards")
    from sdkit_tensorrt.rtx_adapter import RtxAdapter

    card, adapter = nvidia_card(), RtxAdapter()
    absent = Device(
        id=f"absent:{card.arch}",
        kind="discrete",
        maker="nvidia",
        name=card.arch,
        arch=card.arch,
        is_absent=True,
    )
    plan = adapter.plan(absent, None, {})
    if isinstance(plan, Rejection):
        pytest.skip(plan.reason)
    request = BuildRequest(
        vendor=plan.vendor,
        revision=spec.revision,
        runtime=plan.runtime,
        target=plan.target,
        component="vae_decoder",
        graph_digest="0" * 64,
        weights_digest="",
        precision=plan.precision,
        shapes=SHAPES["vae_decoder"],
        options=plan.options,
    )
    path = SAMPLE / "vae_decoder" / "model.onnx"
    adapter.compile(request, path, tmp_path, device=absent, report=lambda progress: None)
    engine = Engine(key=request.key, request=request, folder=str(tmp_path), onnx=str(path))
    session = adapter.load(engine, card)
    check_numbers(session, engine)
    session.close()


def test_all_the_arithmetic_runs_on_the_card(spec: VendorSpec, made: Made) -> None:
    if spec.name != "cuda":
        pytest.skip("TensorRT has no processor to fall back on")
    adapter, engine, card = made("unet")
    session = adapter.load(engine, card)
    assert session.facts["flops_share"].startswith("100.0 %")
    assert "CPUExecutionProvider" not in session.facts["nodes"]
    session.close()


def test_a_runtime_cache_of_another_engine_is_not_taken(spec: VendorSpec, made: Made) -> None:
    if spec.name != "tensorrt-rtx":
        pytest.skip("only TensorRT-RTX compiles kernels at load")
    adapter, engine, card = made("unet")
    adapter.load(engine, card).close()
    _, other, _ = made("vae_decoder")
    session = adapter.load(other, card)
    assert session.facts["runtime_cache"] == "miss"
    check_numbers(session, other)
    session.close()
