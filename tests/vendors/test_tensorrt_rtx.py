"""TensorRT-RTX for real, on a machine without a card: ahead-of-time builds and every refusal."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sdkit_dispatch import Choice, Dispatcher
from sdkit_dispatch.config import Config
from sdkit_dispatch.contract import (
    BuildRequest,
    Device,
    Engine,
    Plan,
    Precision,
    Progress,
    Rejection,
)
from sdkit_dispatch.errors import (
    CacheError,
    CancelledByUser,
    CompileError,
    ConfigError,
    PipelineError,
    RunError,
    UnsupportedOpError,
)
from sdkit_tensorrt import TENSORRT_RTX, build_memory, driver
from sdkit_tensorrt.plan_header import HEADER_BYTES, read_plan_header
from vendor_harness import OUTPUTS, SAMPLE, SHAPES, snapshot, with_external_weights

if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
    pytest.skip(
        "tensorrt-rtx-cu13-bindings, the runtime of tensorrt-rtx, is not installed",
        allow_module_level=True,
    )

from sdkit_tensorrt.engine_files import read_note
from sdkit_tensorrt.rtx_adapter import RUNTIME, VERSION, RtxAdapter

PIPELINES = Path(__file__).parents[1] / "models" / "pipelines"
SDXL_SHAPES = {
    "text_encoder": {"input_ids": (2, 77)},
    "text_encoder_2": {"input_ids": (2, 77)},
    "unet": {
        "sample": (2, 4, 16, 16),
        "timestep": (),
        "encoder_hidden_states": (2, 77, 40),
        "text_embeds": (2, 24),
        "time_ids": (2, 6),
    },
    "vae_decoder": {"latent_sample": (1, 4, 16, 16)},
}
CARD = Device(
    id="pci:0000:01:00.0",
    kind="discrete",
    maker="nvidia",
    name="GeForce RTX 4090",
    arch="sm_89",
    pci_address="0000:01:00.0",
)
BUILD_TIMEOUT_S = 240
"""For a build that takes a second on a quiet machine, in a process of its own."""
LONGEST_SILENCE = 0.5
"""Of another thread, over the time of a build: a builder that held the interpreter's lock would
silence it for nearly all of it. A busy machine may well take a second."""


def absent(arch: str) -> Device:
    return Device(id=arch, kind="discrete", maker="nvidia", name=arch, arch=arch, is_absent=True)


def planned(arch: str = "sm_89,sm_120", precision: Precision | None = None, **options: Any) -> Plan:
    plan = RtxAdapter().plan(absent(arch), precision, options)
    assert isinstance(plan, Plan), plan
    return plan


def request_for(
    plan: Plan, component: str = "vae_decoder", shapes: Any = None, **changes: Any
) -> BuildRequest:
    request = BuildRequest(
        vendor=plan.vendor,
        revision=TENSORRT_RTX.revision,
        runtime=plan.runtime,
        target=plan.target,
        component=component,
        graph_digest="0" * 64,
        weights_digest="",
        precision=plan.precision,
        shapes=SHAPES[component] if shapes is None else shapes,
        options=plan.options,
    )
    return replace(request, **changes)


def compiled(
    request: BuildRequest,
    out: Path,
    path: Path | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Engine:
    path = path or SAMPLE / request.component / "model.onnx"
    out.mkdir(parents=True, exist_ok=True)
    device = absent(request.target)
    RtxAdapter().compile(request, path, out, device=device, report=report)
    return Engine(key=request.key, request=request, folder=str(out), onnx=str(path))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A decoder for two cards, which tests only read."""
    return compiled(request_for(planned()), tmp_path_factory.mktemp("engine"))


@pytest.mark.parametrize("component", SHAPES)
def test_every_component_of_the_sample_is_built_for_two_absent_cards(
    component: str, tmp_path: Path
) -> None:
    source = SAMPLE / component
    before = snapshot(source)
    seen: list[Progress] = []
    compiled(request_for(planned(), component), tmp_path / "out", report=seen.append)
    assert set(snapshot(tmp_path / "out")) == {"engine.plan", "engine.json"}
    header = read_plan_header(tmp_path / "out" / "engine.plan")
    assert (header.version, header.archs) == (VERSION, ("sm_89", "sm_120"))
    assert snapshot(source) == before
    assert seen[0].phase == f"read {component}"
    assert seen[-1] == Progress(phase=f"compile {component}", fraction=1.0)
    assert all(component in one.phase for one in seen)
    assert all(one.fraction is None or 0 <= one.fraction <= 1 for one in seen)


@pytest.mark.parametrize("component", SDXL_SHAPES)
def test_every_component_of_the_tiny_sdxl_is_built(component: str, tmp_path: Path) -> None:
    path = PIPELINES / "sdxl-dynamo" / component / "model.onnx"
    request = request_for(planned("sm_120"), component, SDXL_SHAPES[component])
    compiled(request, tmp_path / "out", path)
    assert read_plan_header(tmp_path / "out" / "engine.plan").archs == ("sm_120",)


@pytest.mark.parametrize(
    ("arch", "precision"),
    [
        ("sm_75", "fp16"),
        ("sm_86", "bf16"),
        ("sm_89", "fp32"),
        ("sm_120", "bf16"),
        ("sm_121", "fp16"),
    ],
)
def test_each_target_is_built_in_what_it_computes_in(
    arch: str, precision: Precision, tmp_path: Path
) -> None:
    compiled(request_for(planned(arch, precision), "text_encoder"), tmp_path / "out")
    assert read_plan_header(tmp_path / "out" / "engine.plan").archs == (arch,)


def test_external_weights_are_found_and_left_alone(tmp_path: Path) -> None:
    path = with_external_weights("text_encoder", tmp_path / "a name with spaces and ü", 2)
    before = snapshot(path.parent)
    for precision in ("fp16", "fp32"):
        request = request_for(planned("sm_89", precision), "text_encoder")
        compiled(request, tmp_path / precision, path)
    assert snapshot(path.parent) == before


def test_the_note_tells_inputs_and_outputs_without_the_runtime(engine: Engine) -> None:
    from sdkit_tensorrt.engine_files import read_note

    note = read_note(Path(engine.folder))
    assert {one.name: one.shape for one in note.inputs} == SHAPES["vae_decoder"]
    assert tuple((one.name, one.shape) for one in note.outputs) == OUTPUTS["vae_decoder"]
    assert note.profiles == ()


def test_one_engine_serves_the_ranges_of_its_profiles(tmp_path: Path) -> None:
    from sdkit_tensorrt.engine_files import read_note

    ranges = [{"height": [8, 8, 16], "width": [8, 8, 16]}, {"batch": [1, 2, 4]}]
    plan = planned("sm_89", profiles={"vae_decoder": ranges})
    compiled(request_for(plan), tmp_path / "out")
    note = read_note(tmp_path / "out")
    largest = [one["latent_sample"].largest for one in note.profiles]
    assert largest == [(1, 4, 16, 16), (4, 4, 8, 8)]
    assert note.outputs[0].shape == (-1, 3, -1, -1)


def test_the_interpreter_lives_while_the_builder_works(tmp_path: Path) -> None:
    ticks, is_over = [time.monotonic()], threading.Event()

    def tick() -> None:
        while not is_over.wait(0.02):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        compiled(request_for(planned("sm_89"), "unet"), tmp_path / "out")
    finally:
        is_over.set()
        thread.join()
    assert max(np.diff(ticks)) < LONGEST_SILENCE * (ticks[-1] - ticks[0])


def test_garbage_of_an_earlier_build_does_not_stop_the_next(tmp_path: Path) -> None:
    """It did for ever: a builder in a cycle, found by the collector under the runtime's lock."""
    code = f"""
import gc, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import tensorrt_rtx_bindings as trt
from pathlib import Path
from sdkit_tensorrt import building
from test_tensorrt_rtx import compiled, planned, request_for
class Log(trt.ILogger):
    def __init__(self): trt.ILogger.__init__(self)
    def log(self, severity, message): pass
request = request_for(planned("sm_89"), "text_encoder")
gc.disable()
cycle = [trt.Builder(Log())]
cycle.append(cycle)
del cycle
seen = []
def collecting_log(trt, lines):
    class Collector(trt.ILogger):
        def __init__(self): trt.ILogger.__init__(self)
        def log(self, severity, message):
            if len(seen) < 3: seen.append(gc.collect())
    return Collector()
building.new_log = collecting_log
compiled(request, Path({str(tmp_path / "out")!r}))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=BUILD_TIMEOUT_S)


@pytest.mark.parametrize("phase", ["read", "write", "parse", "compile"])
def test_a_cancellation_in_any_phase_leaves_nothing(phase: str, tmp_path: Path) -> None:
    def cancel(progress: Progress) -> None:
        if progress.phase.startswith(phase):
            raise CancelledByUser

    with pytest.raises(CancelledByUser):
        compiled(request_for(planned("sm_89"), "unet"), tmp_path / "out", report=cancel)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("arch", ["sm_75", "sm_86", "sm_89", "sm_120", "sm_121"])
def test_every_supported_card_is_planned_in_fp16(arch: str) -> None:
    plan = planned(arch)
    assert (plan.target, plan.precision, plan.runtime) == (arch, "fp16", RUNTIME)
    assert RtxAdapter().plan(absent(arch), plan.precision, plan.options) == plan


@pytest.mark.parametrize(
    ("arch", "named"),
    [
        ("sm_90", "tensorrt"),
        ("sm_100", "tensorrt"),
        ("sm_110", "tensorrt"),
        ("sm_70", "ggml"),
        ("sm_61", "cuda"),
    ],
)
def test_a_card_that_it_does_not_serve_names_the_vendor_that_does(arch: str, named: str) -> None:
    for answer in (RtxAdapter().probe(absent(arch)), RtxAdapter().plan(absent(arch), None, {})):
        assert isinstance(answer, Rejection)
        assert arch in answer.reason
        assert "sm_89" in answer.reason
        assert answer.hint == f"--vendor {named}"


def test_a_target_outside_the_support_matrix_needs_force() -> None:
    answer = RtxAdapter().plan(absent("sm_80"), None, {})
    assert isinstance(answer, Rejection)
    assert "support matrix" in answer.reason
    assert "force" in answer.hint
    forced = planned("sm_80", force=True)
    assert forced.target == "sm_80"
    assert any("support matrix" in reason for reason in forced.reasons)


@pytest.mark.parametrize(
    ("arch", "precision"), [("sm_75", "bf16"), ("sm_75", "fp32"), ("sm_89", "q4_0")]
)
def test_a_precision_that_the_card_does_not_compute_in_is_rejected(
    arch: str, precision: Precision
) -> None:
    answer = RtxAdapter().plan(absent(arch), precision, {})
    assert isinstance(answer, Rejection)
    assert answer.code == "precision"
    assert arch in answer.reason
    assert answer.hint == "ask for fp16"


def test_cards_that_share_an_engine_share_a_precision() -> None:
    answer = RtxAdapter().plan(absent("sm_75,sm_89"), "bf16", {})
    assert isinstance(answer, Rejection)
    assert planned("sm_120,sm_75").target == "sm_75,sm_120"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"no_such_thing": 1}, "no_such_thing.*profiles"),
        (
            {"profiles": {"unet": [{"tokens": [77, 100, 154]}]}},
            r"unet\[0\].tokens.*multiples of 77",
        ),
        ({"profiles": {"unet": [{"height": [64, 32, 128]}]}}, r"unet\[0\].height.*\[64, 32, 128\]"),
        ({"profiles": {"unet": [{"depth": [1, 1, 1]}]}}, r"unet\[0\].*depth.*batch, height"),
    ],
)
def test_options_that_cannot_be_are_config_errors(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RtxAdapter().plan(absent("sm_89"), None, options)


def test_a_card_that_is_here_needs_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(driver, "load_cuda", load)
    answer = RtxAdapter().probe(CARD)
    assert isinstance(answer, Rejection)
    assert (answer.code, answer.hint) == ("no-driver", "install NVIDIA driver 580 or newer")


def graph_file(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    weights: dict[str, Any] | None = None,
    *,
    opset: int = 19,
    dims: Sequence[int | str] = (4, 4),
) -> Path:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in ("x", "y")]
    constants = [
        one if isinstance(one, onnx.TensorProto) else numpy_helper.from_array(one, name)
        for name, one in (weights or {}).items()
    ]
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "g", value[:1], value[1:], constants)
    folder.mkdir(exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), folder / "model.onnx")
    return folder / "model.onnx"


def refusal_of(path: Path, out: Path, plan: Plan, **changes: Any) -> CompileError:
    request = request_for(plan, "odd", {"x": (4, 4)}, **changes)
    with pytest.raises(CompileError) as caught:
        compiled(request, out, path)
    assert not list(out.iterdir())
    return caught.value


def fp8_graph(folder: Path) -> Path:
    scale = helper.make_tensor("s", TensorProto.FLOAT, [], [0.5])
    zero = helper.make_tensor("z", TensorProto.FLOAT8E4M3FN, [], [0.0])
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("MatMul", ["d", "w"], ["y"]),
    ]
    weights = {"s": scale, "z": zero, "w": np.eye(4, dtype=np.float32)}
    return graph_file(folder, nodes, weights)


@pytest.mark.parametrize("arch", ["sm_75", "sm_86", "sm_86,sm_89"])
def test_fp8_values_are_refused_where_a_card_has_none(arch: str, tmp_path: Path) -> None:
    error = refusal_of(fp8_graph(tmp_path / "in"), tmp_path / "out", planned(arch))
    assert "FP8" in error.message
    assert "sm_89" in error.hint


def test_fp8_values_are_built_where_every_card_has_them(tmp_path: Path) -> None:
    path = fp8_graph(tmp_path / "in")
    request = request_for(planned("sm_89,sm_120"), "odd", {"x": (4, 4)})
    compiled(request, tmp_path / "out", path)


def test_quantised_int8_passes_through_and_a_plain_graph_is_no_int8(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("MatMul", ["d", "w"], ["y"]),
    ]
    weights = {
        "s": np.array(0.05, np.float32),
        "z": np.array(0, np.int8),
        "w": np.eye(4, dtype=np.float32),
    }
    plan = planned("sm_89", "int8")
    path = graph_file(tmp_path / "quantised", nodes, weights)
    compiled(request_for(plan, "odd", {"x": (4, 4)}), tmp_path / "out", path)
    plain = graph_file(tmp_path / "plain", [helper.make_node("Tanh", ["x"], ["y"])])
    error = refusal_of(plain, tmp_path / "no", plan)
    assert "QuantizeLinear" in error.message


def test_the_builders_own_words_on_a_datatype_are_translated(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    path = graph_file(tmp_path / "in", nodes, {"w": np.eye(4, dtype=np.float32)}, opset=22)
    # Past the plan, which would have said no.
    error = refusal_of(path, tmp_path / "out", planned("sm_75"), precision="bf16")
    assert "sm75 does not compute in b16" in error.message
    assert "fp16" in error.hint


def test_all_unsupported_operators_are_named_with_their_nodes(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Frobnicate", ["x"], ["a"], name="first", domain="our.domain"),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Wibble", ["b"], ["y"], name="second", domain="our.domain"),
    ]
    path = graph_file(tmp_path / "in", nodes)
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("our.domain", 1))
    onnx.save(model, path)
    error = refusal_of(path, tmp_path / "out", planned("sm_89"))
    assert isinstance(error, UnsupportedOpError)
    for word in ("our.domain:Frobnicate", "first", "our.domain:Wibble", "second"):
        assert word in error.message
    assert "Relu" not in error.message


def test_fusions_of_onnx_runtime_are_refused_with_what_to_do(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("QuickGelu", ["x"], ["a"], name="gelu", domain="com.microsoft"),
        helper.make_node("FusedMatMul", ["a", "x"], ["y"], name="mm", domain="com.microsoft"),
    ]
    error = refusal_of(graph_file(tmp_path / "in", nodes), tmp_path / "out", planned("sm_89"))
    assert isinstance(error, UnsupportedOpError)
    assert "com.microsoft:QuickGelu" in error.message
    assert "com.microsoft:FusedMatMul" in error.message
    assert "as it was exported" in error.hint


def test_a_graph_that_contradicts_itself_names_the_node(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["x", "w"], ["y"], name="the_sum")]
    path = graph_file(tmp_path / "in", nodes, {"w": np.ones(3, np.float32)})
    error = refusal_of(path, tmp_path / "out", planned("sm_89", "fp32"))
    assert "the_sum" in error.message


def test_a_request_outside_all_profiles_is_a_sentence(tmp_path: Path) -> None:
    plan = planned("sm_89", profiles={"vae_decoder": [{"height": [16, 16, 32]}]})
    with pytest.raises(CompileError, match=r"\[1, 4, 8, 8\].*outside all 1 profiles.*\[16, 16, 32"):
        compiled(request_for(plan), tmp_path / "out")


def test_a_profile_of_a_size_that_the_graph_fixes_is_refused(tmp_path: Path) -> None:
    path = graph_file(tmp_path / "in", [helper.make_node("Tanh", ["x"], ["y"])])
    model = onnx.load(path)
    model.graph.input[0].name = model.graph.node[0].input[0] = "encoder_hidden_states"
    onnx.save(model, path)
    plan = planned("sm_89", profiles={"odd": [{"batch": [4, 4, 8]}]})
    shapes = {"encoder_hidden_states": (4, 4)}
    compiled(request_for(plan, "odd", shapes), tmp_path / "two axes have no names", path)
    model.graph.input[0].name = model.graph.node[0].input[0] = "text_embeds"
    onnx.save(model, path)
    with pytest.raises(CompileError, match='fixes axis 0 of "text_embeds" at 4'):
        compiled(request_for(plan, "odd", {"text_embeds": (4, 4)}), tmp_path / "out", path)


def test_a_build_that_cannot_fit_is_refused_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_memory, "BASE_BYTES", 6 << 30)
    monkeypatch.setattr("sdkit_tensorrt.building.machine_bytes", lambda: 4 << 30)
    with pytest.raises(CompileError, match=r"about 6\.4 GB.*3\.4 times.*4\.3") as caught:
        compiled(request_for(planned("sm_89")), tmp_path / "out")
    assert "force" in caught.value.hint
    compiled(request_for(planned("sm_89", force=True)), tmp_path / "forced")


def test_a_file_that_is_not_onnx_is_a_pipeline_error(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"this is no graph")
    with pytest.raises(PipelineError, match=r"model\.onnx"):
        compiled(request_for(planned("sm_89")), tmp_path / "out", path)


def test_without_a_driver_a_good_engine_is_not_called_damaged(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(driver, "load_cuda", load)
    before = snapshot(Path(engine.folder))
    with pytest.raises(RunError, match="driver"):
        RtxAdapter().load(engine, CARD)
    assert snapshot(Path(engine.folder)) == before


@pytest.mark.skipif(
    isinstance(driver.find_card(CARD, cuda_major=13), driver.Card), reason="there is a card here"
)
def test_the_runtime_itself_would_call_it_invalid(engine: Engine) -> None:
    """Why we ask the driver first: this is what 1.7.1 answers on a machine without one."""
    import tensorrt_rtx_bindings as trt

    runtime = trt.Runtime(trt.Logger(trt.Logger.INTERNAL_ERROR))
    plan = (Path(engine.folder) / "engine.plan").read_bytes()
    validity, diagnosis = runtime.get_engine_validity(plan)
    assert (validity, int(diagnosis)) == (trt.EngineValidity.INVALID, 0)


@pytest.mark.skipif(
    isinstance(driver.find_card(CARD, cuda_major=13), driver.Card), reason="there is a card here"
)
def test_an_error_of_cuda_is_the_machines_fault_not_the_engines(engine: Engine) -> None:
    import tensorrt_rtx_bindings as trt

    from sdkit_tensorrt.builder_log import Lines, new_log
    from sdkit_tensorrt.opened_engine import open_engine

    lines = Lines()
    runtime = trt.Runtime(new_log(trt, lines))
    with pytest.raises(RunError, match="cudaError"):
        open_engine(trt, runtime, Path(engine.folder) / "engine.plan", lines, who="it")


def test_an_engine_of_an_absent_card_is_built_not_run(engine: Engine) -> None:
    with pytest.raises(RunError, match="not in this machine"):
        RtxAdapter().load(engine, absent("sm_89"))


@pytest.mark.parametrize("damage", ["halved", "emptied", "garbage", "removed", "cut by a byte"])
@pytest.mark.parametrize("name", ["engine.plan", "engine.json"])
def test_a_damaged_engine_is_reported_with_its_folder(
    damage: str, name: str, engine: Engine, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(engine.folder, tmp_path / "damaged"))
    content = (folder / name).read_bytes()
    spoilt = {
        "halved": content[: len(content) // 2],
        "garbage": b"\xff\xfegarbage" * 9,
        "cut by a byte": content[:-1],
    }
    (folder / name).write_bytes(spoilt.get(damage, b""))
    if damage == "removed":
        (folder / name).unlink()
    if damage == "cut by a byte" and name == "engine.json":
        (folder / name).write_bytes(content[:-2])  # the last byte is white space
    with pytest.raises(CacheError, match="damaged"):
        RtxAdapter().load(replace(engine, folder=str(folder)), CARD)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"runtime": "tensorrt-rtx 1.6.1.120"}, r"1\.6\.1\.120.*1\.7\.1|1\.6\.1\.120.*this is"),
        ({"target": "sm_86"}, "for sm_89, sm_120, not sm_86"),
    ],
)
def test_an_engine_built_elsewhere_is_refused_with_both_names(
    change: dict[str, str], words: str, engine: Engine
) -> None:
    foreign = replace(engine, request=replace(engine.request, **change))
    with pytest.raises(CacheError, match=words):
        RtxAdapter().load(foreign, CARD)


def test_an_engine_for_other_cards_is_refused(engine: Engine) -> None:
    with pytest.raises(CacheError, match="sm_89,sm_120.*sm_86"):
        RtxAdapter().load(engine, replace(CARD, arch="sm_86"))


def test_a_header_of_another_version_is_seen_in_the_file_itself(
    engine: Engine, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(engine.folder, tmp_path / "older"))
    with (folder / "engine.plan").open("r+b") as stream:
        head = bytearray(stream.read(HEADER_BYTES))
        head[0x19] = 6
        stream.seek(0)
        stream.write(head)
    with pytest.raises(CacheError, match=r"version 1\.6\.1\.116, this is"):
        RtxAdapter().load(replace(engine, folder=str(folder)), CARD)


def test_one_build_with_size_ranges_serves_other_sizes_without_another(tmp_path: Path) -> None:
    profile = tmp_path / "ranges.yaml"
    profile.write_text(
        "options:\n  tensorrt-rtx:\n    profiles:\n"
        "      unet: [{height: [4, 8, 16], width: [4, 8, 16]}]\n"
        "      vae_decoder: [{height: [4, 8, 16], width: [4, 8, 16]}]\n"
    )
    choice = Choice(vendor="tensorrt-rtx", profile=str(profile))
    with Dispatcher(home=tmp_path / "home", config=Config(may_install="no")) as dispatcher:
        sizes = [{"width_px": width, "height_px": 32} for width in (32, 64, 128)]
        (built,) = dispatcher.build_for(["sm_89"], "sample", choice, **sizes[0])
        (again,) = dispatcher.build_for(["sm_89"], "sample", choice, **sizes[1])
        with pytest.raises(CompileError, match="outside the size ranges"):
            dispatcher.build_for(["sm_89"], "sample", choice, **sizes[2])
    assert not built.is_hit
    assert again.is_hit
    unet = next(one.engine for one in again.components if one.component == "unet")
    assert unet.shapes["sample"] != unet.request.shapes["sample"]
    note = read_note(Path(unet.folder))
    assert note.profiles[0]["sample"].holds(unet.shapes["sample"])
