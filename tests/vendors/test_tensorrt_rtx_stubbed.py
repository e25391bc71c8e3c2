"""What the vendor tensorrt-rtx does on a machine with a card, against stubs of card and runtime.

That TensorRT-RTX itself runs an engine is left to tests/device.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from sdkit_dispatch.contract import Device, Engine, Plan, Rejection
from sdkit_dispatch.errors import CacheError, DispatchError, RunError
from sdkit_tensorrt import driver
from sdkit_tensorrt.engine_files import EngineNote, read_note, write_note
from tensorrt_stubs import REFITTABLE, StubCuda, stub_runtime
from vendor_harness import SAMPLE, SHAPES, feeds_for

if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
    pytest.skip(
        "tensorrt-rtx-cu13-bindings, the runtime of tensorrt-rtx, is not installed",
        allow_module_level=True,
    )

from sdkit_tensorrt import rtx_adapter
from sdkit_tensorrt.rtx_adapter import VERSION, RtxAdapter
from test_tensorrt_rtx import CARD, planned, request_for

HALF_TOLERANCE = 0.02
"""Half precision rounds each of the sample's layers by up to 2**-11, as in the other tests."""
HEAD = bytes.fromhex("76747274") + bytes(0x14) + bytes(int(p) for p in VERSION.split("."))


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = stub_runtime(is_rtx=True, version=VERSION, magic=stub_header(0))
    monkeypatch.setattr(rtx_adapter, "trt", module)
    monkeypatch.setattr(driver, "load_cuda", StubCuda)
    return module


def stub_header(size_bytes: int) -> bytes:
    head = bytearray(64)
    head[: len(HEAD)] = HEAD
    head[0x20] = 0x18  # sm_89 and sm_120
    head[0x10:0x18] = size_bytes.to_bytes(8, "little")
    return bytes(head)


@pytest.fixture
def engine(stub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that the stub opens: a header, then the graph."""
    import onnx

    from sdkit_dispatch.contract import TensorSpec
    from sdkit_dispatch.graph.precision import write_at_precision
    from sdkit_dispatch.graph.static_shapes import make_static

    path = SAMPLE / "vae_decoder" / "model.onnx"
    model = make_static(path, SHAPES["vae_decoder"])
    write_at_precision(model, path.parent, tmp_path / "half.onnx", "fp16")
    graph = onnx.load(tmp_path / "half.onnx").SerializeToString()
    plan = planned()
    folder = tmp_path / "engine"
    folder.mkdir()
    size_bytes = 64 + len(graph)
    (folder / "engine.plan").write_bytes(stub_header(size_bytes) + graph)
    write_note(
        folder,
        EngineNote(
            inputs=(TensorSpec(name="latent_sample", dtype="float32", shape=(1, 4, 8, 8)),),
            outputs=(TensorSpec(name="sample", dtype="float32", shape=(1, 3, 32, 32)),),
            plan_bytes=size_bytes,
        ),
    )
    monkeypatch.setattr(stub, "Runtime", _skipping_the_header(stub.Runtime))
    request = request_for(plan)
    return Engine(key=request.key, request=request, folder=str(folder), onnx=str(path))


def _skipping_the_header(runtime: Any) -> Any:
    class StubRuntime(runtime):  # type: ignore[misc]
        def deserialize_cuda_engine(self, data: Any) -> Any:
            return super().deserialize_cuda_engine(stub_header(0) + bytes(data)[64:])

    return StubRuntime


def test_a_card_that_is_here_is_probed_and_planned(stub: Any) -> None:
    assert RtxAdapter().probe(CARD) == rtx_adapter.RUNTIME
    plan = RtxAdapter().plan(CARD, None, {})
    assert isinstance(plan, Plan)
    assert plan.target == "sm_89"


def test_a_card_that_the_driver_calls_otherwise_is_rejected(stub: Any) -> None:
    answer = RtxAdapter().probe(replace(CARD, arch="sm_86"))
    assert isinstance(answer, Rejection)
    assert "sm_89 for the driver, not sm_86" in answer.reason


def test_an_engine_runs_and_its_compiled_kernels_are_kept(
    engine: Engine, stub: Any, tmp_path: Path
) -> None:
    adapter = RtxAdapter()
    adapter.scratch = tmp_path / "scratch"
    session = adapter.load(engine, CARD)
    assert session.facts["runtime_cache"] == "miss"
    assert session.facts["cuda_graphs"] == "on"
    config = stub.seen["runtime_config"]
    assert config.cuda_graph_strategy == stub.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    feeds = feeds_for(session.inputs)
    wanted: Any = ReferenceEvaluator(engine.onnx).run(None, feeds)
    got = session.run(feeds)["sample"]
    np.testing.assert_allclose(got, wanted[0], rtol=0, atol=HALF_TOLERANCE)
    session.close()
    second = adapter.load(engine, CARD)
    assert second.facts["runtime_cache"] == "hit"
    second.close()


def test_a_damaged_cache_of_kernels_is_no_harm(engine: Engine, stub: Any, tmp_path: Path) -> None:
    adapter = RtxAdapter()
    adapter.scratch = tmp_path / "scratch"
    adapter.load(engine, CARD).close()
    (path,) = (tmp_path / "scratch").rglob("*.cache")
    path.write_bytes(b"rubbish")
    session = adapter.load(engine, CARD)
    assert session.facts["runtime_cache"] == "miss"
    session.close()
    assert path.read_bytes() == b"kernels"


@pytest.mark.parametrize(
    ("diagnosis", "kind", "words"),
    [
        ("VERSION_MISMATCH", CacheError, "another version"),
        ("MALFORMED_ENGINE", CacheError, "damaged"),
        ("UNSUPPORTED_CC", CacheError, "another card"),
        ("OLD_CUDA_DRIVER", RunError, "driver is too old"),
        ("OLD_CUDA_RUNTIME", RunError, "CUDA runtime is too old"),
        ("INSUFFICIENT_GPU_MEMORY", RunError, "free memory"),
        ("CUDA_ERROR", RunError, "driver fails"),
    ],
)
def test_what_the_runtime_diagnoses_says_whether_the_engine_is_at_fault(
    diagnosis: str, kind: type[DispatchError], words: str, engine: Engine, stub: Any
) -> None:
    stub.seen["diagnosis"] = int(stub.EngineInvalidityDiagnostics[diagnosis])
    plan = Path(engine.folder) / "engine.plan"
    plan.write_bytes(plan.read_bytes()[:64] + b"\xff" * (plan.stat().st_size - 64))
    with pytest.raises(kind, match=words):
        RtxAdapter().load(engine, CARD)


def test_a_device_without_an_address_is_the_first_card(stub: Any) -> None:
    plain: Device = replace(CARD, pci_address="")
    assert RtxAdapter().probe(plain) == rtx_adapter.RUNTIME


def test_other_weights_are_put_into_an_engine_on_its_card(
    engine: Engine, stub: Any, tmp_path: Path
) -> None:
    import onnx

    path = Path(engine.folder) / "engine.plan"
    model = onnx.load_model_from_string(path.read_bytes()[64:])
    model.producer_name = REFITTABLE
    content = stub_header(0) + model.SerializeToString()
    note = read_note(Path(engine.folder))
    path.write_bytes(stub_header(len(content)) + content[64:])
    write_note(Path(engine.folder), replace(note, plan_bytes=len(content)))
    plan = RtxAdapter().plan(CARD, None, {"refit": True})
    assert isinstance(plan, Plan)
    request = replace(engine.request, options=plan.options, weights_digest="1" * 64)
    out = tmp_path / "out"
    out.mkdir()
    RtxAdapter().compile(
        request,
        Path(engine.onnx),
        out,
        device=CARD,
        report=lambda progress: None,
        siblings=(engine,),
    )
    assert stub.seen["refits"] == 1
    assert sorted(one.name for one in out.iterdir()) == ["engine.json", "engine.plan"]


def test_an_engine_for_an_absent_card_takes_no_other_weights(stub: Any) -> None:
    answer = RtxAdapter().plan(replace(CARD, is_absent=True), None, {"refit": True})
    assert isinstance(answer, Rejection)
    assert answer.code == "refit"
    assert "refit: false" in answer.hint
