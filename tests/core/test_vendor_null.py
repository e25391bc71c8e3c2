import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sdkit_dispatch.contract import BuildRequest, Device, Engine, Plan, Progress, Rejection
from sdkit_dispatch.errors import (
    CacheError,
    CancelledByUser,
    CompileError,
    ConfigError,
    RunError,
    UnsupportedOpError,
)
from sdkit_null import SPEC
from sdkit_null.adapter import NullAdapter
from sdkit_null.faults import DRIFT, show_fault

DEVICE = Device(id="cpu", kind="cpu", maker="amd", name="the processor")
WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """y = x @ w and n = size of x: a float and an integer output."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])
    n = helper.make_tensor_value_info("n", TensorProto.INT64, [])
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Size", ["x"], ["n"])]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y, n], [numpy_helper.from_array(WEIGHT, "w")]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    path = tmp_path / "source" / "model.onnx"
    path.parent.mkdir()
    onnx.save(model, path)
    return path


def engine_for(
    graph: Path, out: Path, *, report: Any = lambda progress: None, **options: Any
) -> Engine:
    adapter = NullAdapter()
    plan = adapter.plan(DEVICE, None, options)
    assert isinstance(plan, Plan)
    request = BuildRequest(
        vendor="null",
        revision=SPEC.revision,
        runtime=plan.runtime,
        target=plan.target,
        component="unet",
        graph_digest="0",
        weights_digest="",
        precision=plan.precision,
        shapes={"x": (2, 3)},
        options=plan.options,
    )
    out.mkdir()
    adapter.compile(request, graph, out, device=DEVICE, report=report)
    return Engine(key=request.key, request=request, folder=str(out), onnx=str(graph))


def outputs_of(engine: Engine) -> dict[str, Any]:
    return NullAdapter().load(engine, DEVICE).run({"x": np.ones((2, 3), np.float32)})


def test_a_healthy_engine_computes_the_graph(graph: Path, tmp_path: Path) -> None:
    outputs = outputs_of(engine_for(graph, tmp_path / "out"))
    np.testing.assert_array_equal(outputs["y"], np.ones((2, 3), np.float32) @ WEIGHT)
    assert outputs["n"] == 6


def test_outputs_that_are_inputs_of_the_graph_are_copies(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])
    node = helper.make_node("Identity", ["x"], ["y"])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(helper.make_graph([node], "g", [x], [y])), path)
    session = NullAdapter().load(engine_for(path, tmp_path / "out"), DEVICE)
    feed = np.ones((2, 3), np.float32)
    kept = session.run({"x": feed})["y"]
    feed[...] = 7
    assert (kept == 1).all()


def test_progress_is_reported_as_often_as_asked_and_ends_at_one(
    graph: Path, tmp_path: Path
) -> None:
    seen: list[Progress] = []
    engine_for(graph, tmp_path / "out", report=seen.append, compile_steps=5)
    assert [one.fraction for one in seen] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]


def test_nan_fills_float_outputs_and_leaves_integers(graph: Path, tmp_path: Path) -> None:
    outputs = outputs_of(engine_for(graph, tmp_path / "out", fault="nan"))
    assert np.isnan(outputs["y"]).all()
    assert outputs["n"] == 6


def test_constant_is_flat(graph: Path, tmp_path: Path) -> None:
    assert np.ptp(outputs_of(engine_for(graph, tmp_path / "out", fault="constant"))["y"]) == 0


def test_drift_is_within_its_bound_and_no_rescaling(graph: Path, tmp_path: Path) -> None:
    right = outputs_of(engine_for(graph, tmp_path / "right"))["y"]
    ratio = outputs_of(engine_for(graph, tmp_path / "wrong", fault="drift"))["y"] / right
    np.testing.assert_allclose(np.abs(ratio - 1).max(), DRIFT, rtol=1e-3)
    assert np.ptp(ratio) > DRIFT


@pytest.mark.parametrize(
    ("fault", "error"),
    [("compile_error", CompileError), ("unsupported_op", UnsupportedOpError)],
)
def test_a_compiler_that_refuses(
    fault: str, error: type[Exception], graph: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match="unet"):
        engine_for(graph, tmp_path / "out", fault=fault)


def test_an_engine_that_does_not_open(graph: Path, tmp_path: Path) -> None:
    engine = engine_for(graph, tmp_path / "out", fault="load_error")
    with pytest.raises(CacheError, match="unet"):
        NullAdapter().load(engine, DEVICE)


def test_a_device_that_fails_while_running(graph: Path, tmp_path: Path) -> None:
    engine = engine_for(graph, tmp_path / "out", fault="run_error")
    with pytest.raises(RunError, match="unet"):
        outputs_of(engine)


def test_waiting_for_a_cancellation_ends_with_it(graph: Path, tmp_path: Path) -> None:
    calls = 0

    def cancel_at_the_fifth_report(progress: Progress) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise CancelledByUser

    with pytest.raises(CancelledByUser):
        engine_for(
            graph, tmp_path / "out", report=cancel_at_the_fifth_report, fault="wait_for_cancel"
        )
    assert not list((tmp_path / "out").iterdir())


def test_a_fault_can_be_kept_to_one_component_or_precision(graph: Path, tmp_path: Path) -> None:
    for number, other in enumerate(({"only_component": "vae"}, {"only_precision": "fp16"})):
        outputs = outputs_of(engine_for(graph, tmp_path / str(number), fault="nan", **other))
        assert np.isfinite(outputs["y"]).all()
    meant = {"only_component": "unet", "only_precision": "fp32"}
    assert np.isnan(outputs_of(engine_for(graph, tmp_path / "x", fault="nan", **meant))["y"]).all()


def test_a_plan_can_be_rejected() -> None:
    answer = NullAdapter().plan(DEVICE, None, {"fault": "reject"})
    assert isinstance(answer, Rejection)
    assert answer.device == "cpu"


def test_an_unknown_fault_lists_no_plan() -> None:
    with pytest.raises(ConfigError, match="explode"):
        NullAdapter().plan(DEVICE, None, {"fault": "explode"})


def test_the_target_asked_for_is_the_target_planned() -> None:
    plan = NullAdapter().plan(replace(DEVICE, kind="discrete"), "fp16", {"target": "sm_89"})
    assert isinstance(plan, Plan)
    assert (plan.target, plan.precision) == ("sm_89", "fp16")


def run_in_a_process(fault: str, stage: str) -> subprocess.CompletedProcess[str]:
    code = f"from sdkit_null.faults import show_fault; show_fault({fault!r}, {stage!r}, 'unet')"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("stage", ["compile", "load", "run"])
def test_a_crash_ends_the_process_and_says_where(stage: str) -> None:
    done = run_in_a_process(f"crash_on_{stage}", stage)
    assert done.returncode != 0
    assert f"crashing in {stage} of unet" in done.stderr


def test_a_crash_waits_for_its_stage() -> None:
    assert run_in_a_process("crash_on_run", "compile").returncode == 0


def test_talking_on_stdout_goes_past_python() -> None:
    assert "talks on stdout" in run_in_a_process("print_to_stdout", "load").stdout


def test_an_engine_may_hold_its_weights_in_files_of_its_own(graph: Path, tmp_path: Path) -> None:
    engine = engine_for(graph, tmp_path / "out", holds_weights=True)
    assert (tmp_path / "out" / "weights-0.bin").read_bytes() == WEIGHT.tobytes()
    graph.write_bytes(b"the pipeline is not needed any more")
    np.testing.assert_array_equal(outputs_of(engine)["y"], np.ones((2, 3), np.float32) @ WEIGHT)


def test_winml_cli_217_an_engine_of_another_version_is_refused_with_both_names(
    graph: Path, tmp_path: Path
) -> None:
    engine = engine_for(graph, tmp_path / "out")
    note = tmp_path / "out" / "engine.json"
    note.write_text(note.read_text().replace(engine.request.runtime, "null 0.1"))
    with pytest.raises(CacheError, match=rf"null 0\.1.*{engine.request.runtime}"):
        outputs_of(engine)


@pytest.mark.parametrize("stage", ["compile", "load", "run"])
def test_memory_runs_out_where_it_is_asked_to(stage: str) -> None:
    with pytest.raises(MemoryError, match=stage):
        show_fault(f"out_of_memory_on_{stage}", stage, "unet")  # type: ignore[arg-type]


def test_a_lost_device_is_lost_to_the_whole_process(graph: Path, tmp_path: Path) -> None:
    healthy = engine_for(graph, tmp_path / "healthy")
    adapter = NullAdapter()
    session = adapter.load(engine_for(graph, tmp_path / "out", fault="device_lost"), DEVICE)
    with pytest.raises(RunError, match="lost"):
        session.run({"x": np.ones((2, 3), np.float32)})
    with pytest.raises(RunError, match="lost"):
        adapter.load(healthy, DEVICE)
    assert NullAdapter().load(healthy, DEVICE)


def test_a_fault_can_be_kept_to_one_kind_of_device(graph: Path, tmp_path: Path) -> None:
    engine = engine_for(graph, tmp_path / "out", fault="load_error", only_on="discrete")
    assert NullAdapter().load(engine, DEVICE)
    with pytest.raises(CacheError, match="as asked"):
        NullAdapter().load(engine, replace(DEVICE, kind="discrete"))
