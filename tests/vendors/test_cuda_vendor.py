"""The vendor cuda: nothing runs on the processor in its name; and where nodes of a session run.

Whether CUDA computes is left to tests/device. The stub here opens sessions on the processor.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from sdkit_dispatch.contract import BuildRequest, Device, Engine, Plan, Progress, Rejection
from sdkit_dispatch.errors import CacheError, CancelledByUser, ConfigError, RunError
from sdkit_dispatch.graph.static_shapes import make_static
from sdkit_onnxruntime import CPU, CUDA, MIGRAPHX
from vendor_harness import OUTPUTS, SAMPLE, SHAPES, feeds_for, snapshot, with_external_weights

if importlib.util.find_spec("onnxruntime") is None:
    pytest.skip("onnxruntime is not installed", allow_module_level=True)

import onnxruntime as ort

from sdkit_onnxruntime import cuda
from sdkit_onnxruntime.cuda import PROVIDER, CudaAdapter
from sdkit_onnxruntime.gpu_refusals import CUDA as MEANINGS
from sdkit_onnxruntime.gpu_refusals import meaning_of
from sdkit_onnxruntime.gpu_session import NotOnGpuError, one_node_model, open_on
from sdkit_onnxruntime.placement import (
    CPU_PROVIDER,
    Placement,
    flops_by_node,
    placement_of,
    why_not_on,
)

HALF_TOLERANCE = 0.02
"""Half precision rounds each of the sample's layers by up to 2**-11, as in the other tests."""
CARD = Device(
    id="pci:0000:01:00.0",
    kind="discrete",
    maker="nvidia",
    name="GeForce RTX 4090",
    arch="sm_89",
    pci_id="10de:2684",
    pci_address="0000:01:00.0",
)
needs_the_wheel = pytest.mark.skipif(
    PROVIDER not in ort.get_available_providers(),
    reason="onnxruntime-gpu, the runtime of cuda, is not installed",
)


def has_cuda() -> bool:
    try:
        open_on(PROVIDER, {}, one_node_model(), is_strict=True)
    except Exception:
        return False
    return True


class StubProvider:
    """Opens sessions on the processor, and says that they run on the card."""

    def __init__(self) -> None:
        self.options: list[Mapping[str, str]] = []
        self.error: Exception | None = None
        self.is_strict: list[bool] = []

    def open_on(
        self,
        provider: str,
        options: Mapping[str, str],
        model: Any,
        *,
        is_strict: bool,
        **others: Any,
    ) -> tuple[ort.InferenceSession, Placement]:
        self.options.append(options)
        self.is_strict.append(is_strict)
        if self.error is not None:
            raise self.error
        session = ort.InferenceSession(model, providers=[CPU_PROVIDER])
        return session, Placement(nodes={provider: 10}, flops={provider: 99})


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubProvider:
    provider = StubProvider()
    monkeypatch.setattr(cuda, "open_on", provider.open_on)
    monkeypatch.setattr(ort, "get_available_providers", lambda: [PROVIDER, CPU_PROVIDER])
    return provider


def compiled(
    out: Path, component: str = "vae_decoder", path: Path | None = None, **changes: Any
) -> Engine:
    plan = CudaAdapter().plan(CARD, None, {})
    assert isinstance(plan, Plan), plan
    request = BuildRequest(
        vendor=plan.vendor,
        revision=CUDA.revision,
        runtime=plan.runtime,
        target=plan.target,
        component=component,
        graph_digest="0" * 64,
        weights_digest="",
        precision=plan.precision,
        shapes=SHAPES[component],
        options=plan.options,
    )
    request = replace(request, **changes)
    path = path or SAMPLE / component / "model.onnx"
    out.mkdir()
    CudaAdapter().compile(request, path, out, device=CARD, report=lambda progress: None)
    return Engine(key=request.key, request=request, folder=str(out), onnx=str(path))


@pytest.mark.parametrize("component", SHAPES)
def test_an_engine_holds_its_weights_and_gives_the_right_numbers(
    component: str, stub: StubProvider, tmp_path: Path
) -> None:
    source = with_external_weights(component, tmp_path / "source")
    engine = compiled(tmp_path / "out", component, source)
    shutil.rmtree(source.parent)
    before = snapshot(Path(engine.folder))
    session = CudaAdapter().load(engine, CARD)
    assert tuple((one.name, one.shape) for one in session.outputs) == OUTPUTS[component]
    feeds = feeds_for(session.inputs)
    original = SAMPLE / component / "model.onnx"
    wanted: Any = ReferenceEvaluator(str(original)).run(None, feeds)
    for array, expected in zip(session.run(feeds).values(), wanted, strict=True):
        np.testing.assert_allclose(array, expected, rtol=0, atol=HALF_TOLERANCE)
    session.close()
    session.close()
    with pytest.raises(RunError, match="closed"):
        session.run(feeds)
    assert snapshot(Path(engine.folder)) == before


def test_fp32_is_not_computed_with_ten_bits_of_mantissa(stub: StubProvider, tmp_path: Path) -> None:
    CudaAdapter().load(compiled(tmp_path / "full", precision="fp32"), CARD)
    assert stub.options[-1]["use_tf32"] == "0"


def test_no_node_may_run_on_the_processor_unless_that_is_allowed(
    stub: StubProvider, tmp_path: Path
) -> None:
    engine = compiled(tmp_path / "out")
    CudaAdapter().load(engine, CARD)
    assert stub.is_strict[-1]
    options = {**engine.request.options, "allow_cpu_nodes": True}
    loose = replace(engine, request=replace(engine.request, options=options))
    CudaAdapter().load(loose, CARD)
    assert not stub.is_strict[-1]


@pytest.mark.parametrize("damage", ["halved", "emptied", "removed", "garbage"])
def test_a_damaged_engine_is_reported_with_its_folder(
    damage: str, stub: StubProvider, tmp_path: Path
) -> None:
    engine = compiled(tmp_path / "whole")
    for name in snapshot(Path(engine.folder)):
        folder = Path(shutil.copytree(engine.folder, tmp_path / f"damaged-{name}"))
        content = (folder / name).read_bytes()
        spoilt = {"halved": content[: len(content) // 2], "garbage": b"\xff\xfegarbage" * 9}
        (folder / name).write_bytes(spoilt.get(damage, b""))
        if damage == "removed":
            (folder / name).unlink()
        with pytest.raises(CacheError, match=folder.name.replace(".", r"\.")):
            CudaAdapter().load(replace(engine, folder=str(folder)), CARD)


def test_a_cancellation_comes_out_as_it_is(stub: StubProvider, tmp_path: Path) -> None:
    engine = compiled(tmp_path / "first")
    (tmp_path / "second").mkdir()
    calls: list[Progress] = []

    def cancel(progress: Progress) -> None:
        calls.append(progress)
        if len(calls) == 2:
            raise CancelledByUser

    with pytest.raises(CancelledByUser):
        CudaAdapter().compile(
            engine.request, Path(engine.onnx), tmp_path / "second", device=CARD, report=cancel
        )


WORDS = [
    # As ONNX Runtime 1.31 or the loader say it -> code, in the reason, in the hint.
    (
        "Failed to load library /x/libonnxruntime_providers_cuda.so with error: "
        "libcublasLt.so.13: cannot open shared object file: No such file or directory",
        "no-cuda-libraries",
        "libcublasLt.so.13",
        "vendors install cuda",
    ),
    (
        "libcudnn.so.9: cannot open shared object file",
        "no-cuda-libraries",
        "libcudnn.so.9",
        "vendors install cuda",
    ),
    ("libcuda.so.1: cannot open shared object file", "no-driver", "libcuda.so.1", "580"),
    ("CUDA failure 35: CUDA driver version is insufficient", "driver-too-old", "older", "update"),
    ("CUDA failure 100: no CUDA-capable device is detected", "no-card", "no card", "nvidia-smi"),
    ("CUDA failure 2: out of memory ; GPU=0", "memory", "not enough free memory", "smaller image"),
    (
        "asked for CUDAExecutionProvider, ONNX Runtime gave CPUExecutionProvider",
        "on-cpu",
        "on the processor",
        "vendors install cuda",
    ),
    (
        "This session contains graph nodes that are assigned to the default CPU EP, but fallback "
        "to CPU EP has been explicitly disabled by the user.",
        "on-cpu",
        "on the processor",
        "vendors install cuda",
    ),
]


@pytest.mark.parametrize(("words", "code", "reason", "hint"), WORDS, ids=[r[0][:40] for r in WORDS])
def test_each_error_of_the_provider_has_its_meaning(
    words: str, code: str, reason: str, hint: str
) -> None:
    found = meaning_of(words, MEANINGS)
    assert found is not None
    assert found.code == code
    assert reason in found.reason
    assert hint in found.hint


def test_a_failing_card_is_a_run_error_and_a_failing_file_a_cache_error(
    stub: StubProvider, tmp_path: Path
) -> None:
    engine = compiled(tmp_path / "out")
    stub.error = RuntimeError("CUDA failure 2: out of memory ; GPU=0")
    with pytest.raises(RunError, match="free memory"):
        CudaAdapter().load(engine, CARD)
    stub.error = RuntimeError("INVALID_GRAPH : something is odd")
    with pytest.raises(CacheError, match="something is odd"):
        CudaAdapter().load(engine, CARD)


@pytest.mark.parametrize(
    ("device", "code"),
    [
        (replace(CARD, maker="amd", name="Radeon"), "arch"),
        (replace(CARD, is_absent=True), "absent-device"),
    ],
)
def test_other_devices_are_refused(device: Device, code: str) -> None:
    for answer in (CudaAdapter().probe(device), CudaAdapter().plan(device, None, {})):
        assert isinstance(answer, Rejection)
        assert (answer.vendor, answer.code, answer.device) == ("cuda", code, device.id)


def test_precisions_and_options_are_checked(stub: StubProvider) -> None:
    answer = CudaAdapter().plan(CARD, "bf16", {})
    assert isinstance(answer, Rejection)
    assert answer.code == "precision"
    with pytest.raises(ConfigError, match="keep_fp32"):
        CudaAdapter().plan(CARD, None, {"keep_fp": []})
    plan = CudaAdapter().plan(CARD, None, {})
    assert isinstance(plan, Plan)
    assert CudaAdapter().plan(CARD, plan.precision, plan.options) == plan


@needs_the_wheel
@pytest.mark.skipif(has_cuda(), reason="CUDA works here: tests/device asks more")
def test_the_real_wheel_without_cuda_says_what_is_missing_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = CudaAdapter().probe(CARD)
    assert isinstance(answer, Rejection)
    assert answer.code in ("no-cuda-libraries", "no-driver", "no-card")
    assert answer.hint
    with monkeypatch.context() as patched:
        patched.setattr(cuda, "open_on", StubProvider().open_on)
        engine = compiled(tmp_path / "out")
    with pytest.raises(RunError) as caught:
        CudaAdapter().load(engine, CARD)
    assert caught.value.hint == answer.hint


@needs_the_wheel
@pytest.mark.skipif(has_cuda(), reason="CUDA works here")
def test_a_session_that_the_runtime_moved_to_the_processor_is_never_returned() -> None:
    """1.31.1 does so in spite of enable_fallback=0, with nothing but a line in its own log."""
    with pytest.raises(NotOnGpuError, match="gave CPUExecutionProvider"):
        open_on(PROVIDER, {}, one_node_model(), is_strict=False)


def test_the_processors_wheel_is_no_cuda() -> None:
    if PROVIDER in ort.get_available_providers():
        pytest.skip("onnxruntime-gpu is installed")
    answer = CudaAdapter().probe(CARD)
    assert isinstance(answer, Rejection)
    assert answer.code == "no-provider"


def test_wheels_that_overwrite_each_other_are_said_to() -> None:
    for one in (CPU, CUDA, MIGRAPHX):
        assert not set(one.runtime_packages) & set(one.conflicts)
        for other in (CPU, CUDA, MIGRAPHX):
            if other is not one:
                assert set(other.runtime_packages) <= set(one.conflicts)


@dataclass(frozen=True)
class StubNode:
    name: str
    op_type: str


@dataclass(frozen=True)
class StubSubgraph:
    ep_name: str
    nodes: tuple[StubNode, ...]

    def get_nodes(self) -> tuple[StubNode, ...]:
        return self.nodes


def placed(*parts: tuple[str, str, str]) -> Placement:
    flops = {"big": 900, "small": 100}
    return placement_of([StubSubgraph(ep, (StubNode(n, op),)) for ep, n, op in parts], flops)


def test_a_placement_is_counted_in_nodes_and_in_arithmetic() -> None:
    placement = placed((PROVIDER, "big", "Conv"), (CPU_PROVIDER, "small", "Mul"))
    assert placement.nodes == {PROVIDER: 1, CPU_PROVIDER: 1}
    assert placement.share_of(PROVIDER) == 0.9
    assert placement.facts(PROVIDER)["flops_share"] == f"90.0 % on {PROVIDER}"
    assert why_not_on(placement, PROVIDER) == ""


def test_heavy_nodes_on_the_processor_are_refused() -> None:
    placement = placed((PROVIDER, "small", "Conv"), (CPU_PROVIDER, "big", "MatMul"))
    assert "1 MatMul run on the processor, and 10 %" in why_not_on(placement, PROVIDER)
    nothing = placed((CPU_PROVIDER, "big", "Mul"))
    assert "no node runs on" in why_not_on(nothing, PROVIDER)
    assert "none" in why_not_on(placed(), PROVIDER)


def test_what_a_real_session_records_is_read() -> None:
    settings = ort.SessionOptions()
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(one_node_model(), settings, providers=[CPU_PROVIDER])
    placement = placement_of(session.get_provider_graph_assignment_info(), {})
    assert placement.nodes == {CPU_PROVIDER: 1}


def test_arithmetic_is_counted_from_the_shapes() -> None:
    model = make_static(SAMPLE / "vae_decoder" / "model.onnx", SHAPES["vae_decoder"])
    flops = flops_by_node(model)
    convolutions = [node for node in model.graph.node if node.op_type == "Conv"]
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    first = convolutions[1]
    out_channels, in_channels, height, width = shapes[first.input[1]]
    assert flops[first.name] == 2 * out_channels * 8 * 8 * in_channels * height * width
    assert sum(flops.values()) > 1e6
