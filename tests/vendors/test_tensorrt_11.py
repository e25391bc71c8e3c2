"""The vendor tensorrt against a stub of TensorRT 11: its wheels need a card and NVIDIA's index.

What a stub cannot show, whether TensorRT itself does as we think, is left to tests/device.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from sdkit_dispatch.contract import BuildRequest, Device, Engine, Plan, Rejection
from sdkit_dispatch.errors import CacheError, CancelledByUser, CompileError, RunError
from sdkit_tensorrt import TENSORRT, driver
from sdkit_tensorrt.tensorrt_adapter import TensorRtAdapter
from tensorrt_stubs import StubCuda, stub_runtime
from vendor_harness import OUTPUTS, SAMPLE, SHAPES, feeds_for, snapshot

CARD = Device(
    id="pci:0000:01:00.0",
    kind="discrete",
    maker="nvidia",
    name="Stub 4090",
    arch="sm_89",
    pci_address="0000:01:00.0",
    driver="580.95",
)
HALF_TOLERANCE = 0.02
"""Half precision rounds each of the sample's layers by up to 2**-11, as in its other tests."""


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with a stubbed card, driver and TensorRT 11."""
    module: Any = stub_runtime(is_rtx=False, version="11.4.0.106-stub")
    monkeypatch.setitem(sys.modules, "tensorrt_bindings", module)
    use_cuda(monkeypatch, StubCuda())
    return module


def use_cuda(monkeypatch: pytest.MonkeyPatch, cuda: StubCuda | None) -> None:
    def load() -> StubCuda:
        if cuda is None:
            raise OSError("libcuda.so.1: cannot open shared object file")
        return cuda

    monkeypatch.setattr(driver, "load_cuda", load)


def planned(adapter: TensorRtAdapter, **options: Any) -> Plan:
    plan = adapter.plan(CARD, None, options)
    assert isinstance(plan, Plan), plan
    return plan


def compiled(
    adapter: TensorRtAdapter, out: Path, component: str = "unet", **options: Any
) -> Engine:
    plan = planned(adapter, **options)
    path = SAMPLE / component / "model.onnx"
    request = BuildRequest(
        vendor=plan.vendor,
        revision=TENSORRT.revision,
        runtime=plan.runtime,
        target=plan.target,
        component=component,
        graph_digest="0" * 64,
        weights_digest="",
        precision=plan.precision,
        shapes=SHAPES[component],
        options=plan.options,
    )
    out.mkdir()
    adapter.compile(request, path, out, device=CARD, report=lambda progress: None)
    return Engine(key=request.key, request=request, folder=str(out), onnx=str(path))


@pytest.mark.parametrize("component", SHAPES)
def test_an_engine_runs_through_the_cards_memory(component: str, stub: Any, tmp_path: Path) -> None:
    adapter = TensorRtAdapter()
    engine = compiled(adapter, tmp_path / "out", component)
    session = adapter.load(engine, CARD)
    feeds = feeds_for(session.inputs)
    outputs = session.run(feeds)
    assert tuple((one.name, one.shape) for one in session.outputs) == OUTPUTS[component]
    path = SAMPLE / component / "model.onnx"
    wanted: Any = ReferenceEvaluator(str(path)).run(None, feeds)
    for array, expected in zip(outputs.values(), wanted, strict=True):
        np.testing.assert_allclose(array, expected, rtol=0, atol=HALF_TOLERANCE)
    kept = {name: array.copy() for name, array in outputs.items()}
    session.run(feeds_for(session.inputs, seed=1))
    for name, array in kept.items():
        np.testing.assert_array_equal(outputs[name], array)
    session.close()
    session.close()
    with pytest.raises(RunError, match="closed"):
        session.run(feeds)


def test_an_engine_with_size_ranges_is_opened_at_the_size_that_is_asked(
    stub: Any, tmp_path: Path
) -> None:
    adapter = TensorRtAdapter()
    ranges = [{"height": [4, 8, 16], "width": [4, 8, 16]}, {"height": [8, 8, 8]}]
    engine = compiled(adapter, tmp_path / "out", "vae_decoder", profiles={"vae_decoder": ranges})
    asked = {"latent_sample": (1, 4, 16, 12)}
    session = adapter.load(replace(engine, opened_at=asked), CARD)
    assert session.facts["profile"] == "0"
    assert [one.shape for one in session.inputs] == [(1, 4, 16, 12)]
    assert [one.shape for one in session.outputs] == [(1, 3, 64, 48)]
    feeds = feeds_for(session.inputs)
    wanted: Any = ReferenceEvaluator(engine.onnx).run(None, feeds)
    (got,) = session.run(feeds).values()
    np.testing.assert_allclose(got, wanted[0], rtol=0, atol=HALF_TOLERANCE)
    session.close()
    with pytest.raises(CacheError, match="no profile of vae_decoder holds"):
        adapter.load(replace(engine, opened_at={"latent_sample": (1, 4, 64, 64)}), CARD)


def test_closing_gives_the_cards_memory_and_context_back(
    stub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = StubCuda()
    use_cuda(monkeypatch, cuda)
    adapter = TensorRtAdapter()
    session = adapter.load(compiled(adapter, tmp_path / "out", "vae_decoder"), CARD)
    assert cuda.buffers
    assert cuda.is_retained
    session.close()
    assert not cuda.buffers
    assert not cuda.is_retained


def test_too_little_memory_on_the_card_is_a_run_error_and_leaves_nothing_taken(
    stub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = TensorRtAdapter()
    engine = compiled(adapter, tmp_path / "out", "vae_decoder")
    cuda = StubCuda(memory_bytes=2000)
    use_cuda(monkeypatch, cuda)
    with pytest.raises(RunError, match="not enough free memory"):
        adapter.load(engine, CARD)
    assert not cuda.is_retained


def test_an_engine_is_bound_to_the_model_of_the_card_and_its_size(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = planned(TensorRtAdapter()).target
    use_cuda(monkeypatch, StubCuda(processors=70))
    second = planned(TensorRtAdapter()).target
    assert first != second
    assert "multiprocessors=70" in second
    assert "card=NVIDIA Stub 4090" in second


@pytest.mark.parametrize(
    ("level", "start"), [("ampere_plus", "sm_80+"), ("same_compute_capability", "sm_89")]
)
def test_a_compatible_engine_is_not_bound_to_the_model(
    level: str, start: str, stub: Any, tmp_path: Path
) -> None:
    adapter = TensorRtAdapter()
    engine = compiled(adapter, tmp_path / "out", "vae_decoder", hardware_compatibility=level)
    assert engine.request.target.startswith(start)
    assert "4090" not in engine.request.target
    assert stub.seen["config"].hardware_compatibility_level.name == level.upper()


def test_timings_are_kept_for_the_next_build_outside_the_engine(stub: Any, tmp_path: Path) -> None:
    adapter = TensorRtAdapter()
    adapter.scratch = tmp_path / "scratch"
    engine = compiled(adapter, tmp_path / "one", "vae_decoder")
    assert set(snapshot(Path(engine.folder))) == {"engine.plan", "engine.json"}
    compiled(adapter, tmp_path / "two", "text_encoder")
    assert stub.seen["timings"] == [b"", b"timings"]


def test_timings_that_do_not_fit_are_measured_again(stub: Any, tmp_path: Path) -> None:
    adapter = TensorRtAdapter()
    adapter.scratch = tmp_path / "scratch"
    compiled(adapter, tmp_path / "one", "vae_decoder")
    (path,) = (tmp_path / "scratch").rglob("*.timings")
    path.write_bytes(b"of another version")
    compiled(adapter, tmp_path / "two", "vae_decoder")
    assert path.read_bytes() == b"timings"


def test_a_cancelled_build_leaves_nothing(stub: Any, tmp_path: Path) -> None:
    adapter = TensorRtAdapter()
    engine = compiled(adapter, tmp_path / "first", "vae_decoder")
    out = tmp_path / "second"
    out.mkdir()

    def cancel(progress: Any) -> None:
        if progress.phase.startswith("compile"):
            raise CancelledByUser

    with pytest.raises(CancelledByUser):
        adapter.compile(engine.request, Path(engine.onnx), out, device=CARD, report=cancel)
    assert not list(out.iterdir())


def test_an_absent_card_is_refused_with_the_vendor_that_can(stub: Any) -> None:
    answer = TensorRtAdapter().plan(replace(CARD, is_absent=True), None, {})
    assert isinstance(answer, Rejection)
    assert answer.code == "absent-device"
    assert "tensorrt-rtx" in answer.hint


def test_nothing_of_the_runtime_is_touched_without_a_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_bindings", None)  # an import would raise
    use_cuda(monkeypatch, None)
    answer = TensorRtAdapter().probe(CARD)
    assert isinstance(answer, Rejection)
    assert answer.code == "no-driver"
    assert "580" in answer.hint


def test_bindings_without_libraries_say_where_those_come_from(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_bindings", None)
    answer = TensorRtAdapter().probe(CARD)
    assert isinstance(answer, Rejection)
    assert answer.code == "runtime-broken"
    assert "NVIDIA's own package index" in answer.hint


def test_a_null_pointer_of_the_bindings_is_a_rejection(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def builder(log: Any) -> None:
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(stub, "Builder", builder)
    answer = TensorRtAdapter().probe(CARD)
    assert isinstance(answer, Rejection)
    assert "nullptr" in answer.reason


@pytest.mark.parametrize(
    ("arch", "precision", "is_served"),
    [((7, 5), "bf16", False), ((7, 5), "fp16", True), ((8, 0), "bf16", True), ((9, 0), None, True)],
)
def test_precision_follows_the_architecture(
    arch: tuple[int, int],
    precision: Any,
    is_served: bool,
    stub: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_cuda(monkeypatch, StubCuda(arch=arch))
    answer = TensorRtAdapter().plan(CARD, precision, {})
    assert isinstance(answer, Plan) == is_served


def test_an_engine_of_another_card_or_version_is_refused_with_both_names(
    stub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = TensorRtAdapter()
    engine = compiled(adapter, tmp_path / "out", "vae_decoder")
    older = replace(engine, request=replace(engine.request, runtime="tensorrt 10.16"))
    with pytest.raises(CacheError, match=r"tensorrt 10\.16.*11\.4\.0\.106-stub"):
        adapter.load(older, CARD)
    use_cuda(monkeypatch, StubCuda(processors=70))
    with pytest.raises(CacheError, match="multiprocessors=128.*multiprocessors=70"):
        adapter.load(engine, CARD)


@pytest.mark.parametrize("damage", ["halved", "emptied", "removed"])
@pytest.mark.parametrize("name", ["engine.plan", "engine.json"])
def test_a_damaged_engine_is_reported_with_its_folder(
    damage: str, name: str, stub: Any, tmp_path: Path
) -> None:
    adapter = TensorRtAdapter()
    engine = compiled(adapter, tmp_path / "whole", "vae_decoder")
    folder = Path(shutil.copytree(engine.folder, tmp_path / "damaged"))
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2] if damage == "halved" else b"")
    if damage == "removed":
        (folder / name).unlink()
    with pytest.raises(CacheError, match="damaged"):
        adapter.load(replace(engine, folder=str(folder)), CARD)


def test_all_unsupported_operators_are_named_at_once(stub: Any, tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    adapter = TensorRtAdapter()
    engine = compiled(adapter, tmp_path / "out", "vae_decoder")
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    nodes = [
        helper.make_node("Frobnicate", ["x"], ["a"], domain="our.domain"),
        helper.make_node("Wibble", ["a"], ["y"], domain="our.domain"),
    ]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("our.domain", 1)]
    graph = helper.make_graph(nodes, "g", [value], [out])
    path = tmp_path / "odd.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    request = replace(engine.request, component="odd", shapes={"x": (2,)})
    folder = tmp_path / "odd"
    folder.mkdir()
    with pytest.raises(CompileError, match="our.domain:Frobnicate, our.domain:Wibble"):
        adapter.compile(request, path, folder, device=CARD, report=lambda progress: None)


def with_other_weights(engine: Engine, path: Path) -> Engine:
    """Returns the request for a graph whose weights are a little larger."""
    import onnx

    model = onnx.load(engine.onnx)
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype == np.float32:
            tensor.CopyFrom(onnx.numpy_helper.from_array(array * np.float32(1.125), tensor.name))
    onnx.save(model, path)
    return replace(engine, onnx=str(path), request=replace(engine.request, weights_digest="1" * 64))


def compiled_beside(adapter: TensorRtAdapter, wanted: Engine, sibling: Engine, out: Path) -> Engine:
    out.mkdir()
    adapter.compile(
        wanted.request,
        Path(wanted.onnx),
        out,
        device=CARD,
        report=lambda progress: None,
        siblings=(sibling,),
    )
    return replace(wanted, folder=str(out))


def test_other_weights_are_put_into_an_engine_that_was_built_for_that(
    stub: Any, tmp_path: Path
) -> None:
    adapter = TensorRtAdapter()
    first = compiled(adapter, tmp_path / "one", "vae_decoder", refit=True)
    wanted = with_other_weights(first, tmp_path / "other.onnx")
    second = compiled_beside(adapter, wanted, first, tmp_path / "two")
    assert stub.seen["refits"] == 1
    assert set(snapshot(Path(second.folder))) == {"engine.plan", "engine.json"}
    session = adapter.load(second, CARD)
    feeds = feeds_for(session.inputs)
    (got,) = session.run(feeds).values()
    session.close()
    new: Any = ReferenceEvaluator(second.onnx).run(None, feeds)
    old: Any = ReferenceEvaluator(first.onnx).run(None, feeds)
    np.testing.assert_allclose(got, new[0], rtol=0, atol=HALF_TOLERANCE)
    assert np.abs(got - old[0]).max() > 2 * HALF_TOLERANCE


@pytest.mark.parametrize("reason", ["without refit", "other shapes", "other sizes", "damaged"])
def test_an_engine_that_does_not_take_other_weights_is_built(
    reason: str, stub: Any, tmp_path: Path
) -> None:
    import onnx

    adapter = TensorRtAdapter()
    first = compiled(adapter, tmp_path / "one", "vae_decoder", refit=True)
    wanted = with_other_weights(first, tmp_path / "other.onnx")
    if reason == "without refit":
        wanted = replace(wanted, request=replace(wanted.request, options=planned(adapter).options))
    elif reason == "other shapes":
        first = replace(
            first, request=replace(first.request, shapes={"latent_sample": (1, 4, 8, 16)})
        )
    elif reason == "other sizes":
        plan = Path(first.folder) / "engine.plan"
        model = onnx.load_model_from_string(plan.read_bytes())
        model.graph.initializer[0].dims.append(1)
        plan.write_bytes(model.SerializeToString())
    else:
        (Path(first.folder) / "engine.plan").write_bytes(b"")
    second = compiled_beside(adapter, wanted, first, tmp_path / "two")
    assert "refits" not in stub.seen
    adapter.load(second, CARD).close()
