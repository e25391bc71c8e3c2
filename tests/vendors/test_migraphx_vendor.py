"""The vendor migraphx: what it refuses, what it says, and its flow against a stub of the provider.

The stub stands in for MIGraphX's execution provider only: it opens a session on the processor and
leaves files as that provider was seen to. That MIGraphX compiles is left to tests/device.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from sdkit_dispatch.contract import BuildRequest, Device, Engine, Plan, Rejection
from sdkit_dispatch.errors import (
    CacheError,
    CancelledByUser,
    CompileError,
    ConfigError,
    RunError,
    UnsupportedOpError,
)
from sdkit_onnxruntime import MIGRAPHX as SPEC
from vendor_harness import OUTPUTS, SAMPLE, SHAPES, feeds_for, snapshot

if importlib.util.find_spec("onnxruntime") is None:
    pytest.skip("onnxruntime is not installed", allow_module_level=True)

import onnxruntime as ort

from sdkit_onnxruntime import migraphx, migraphx_parser
from sdkit_onnxruntime.gpu_refusals import MIGRAPHX, meaning_of
from sdkit_onnxruntime.gpu_session import NotOnGpuError
from sdkit_onnxruntime.migraphx import RUNTIME, MigraphxAdapter, provider_options
from sdkit_onnxruntime.migraphx_graph import UNSUPPORTED, check_graph
from sdkit_onnxruntime.migraphx_parser import ask_parser, find_parser
from sdkit_onnxruntime.mxr import mxr_header
from sdkit_onnxruntime.placement import Placement
from sdkit_onnxruntime.rocm import library_folders, load_libraries, scrub_environment

HALF_TOLERANCE = 0.02
"""Half precision rounds each of the sample's layers by up to 2**-11, as in the other tests."""
CARD = Device(
    id="pci:0000:03:00.0",
    kind="discrete",
    maker="amd",
    name="Radeon RX 9070 XT",
    arch="gfx1201",
    pci_id="1002:7550",
    pci_address="0000:03:00.0",
)
PROVIDER = "MIGraphXExecutionProvider"
needs_the_wheel = pytest.mark.skipif(
    PROVIDER not in ort.get_available_providers(),
    reason="onnxruntime-migraphx, the runtime of migraphx, is not installed",
)
without_rocm = pytest.mark.skipif(
    bool(load_libraries()), reason="ROCm is installed here: tests/device asks more"
)


class StubProvider:
    """Opens sessions on the processor and leaves a program where the provider would."""

    def __init__(self) -> None:
        self.options: list[Mapping[str, str]] = []
        self.compiled = 0
        self.version = "2.15.0"
        self.leaves_programs = True
        self.error: Exception | None = None

    def open_on(
        self, provider: str, options: Mapping[str, str], model: Any, **others: Any
    ) -> tuple[ort.InferenceSession, Placement]:
        self.options.append(options)
        if self.error is not None:
            raise self.error
        programs = options.get("migraphx_model_cache_dir")
        if programs and self.leaves_programs:
            path = Path(programs) / f"20f00-{self.version}-1-2.mxr"
            if not path.exists():
                self.compiled += 1
                path.write_bytes(program(self.version))
        session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        return session, Placement(nodes={provider: 10}, flops={provider: 99})


def program(version: str = "2.15.0") -> bytes:
    head = {"version": 7, "migraphx_version": version, "targets": ["gpu"], "x": 1.5}
    return msgspec.msgpack.encode(head | {"weights": b"\0" * 100_000})


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubProvider:
    provider = StubProvider()
    monkeypatch.setattr(migraphx, "open_on", provider.open_on)
    monkeypatch.setattr(migraphx, "offered_provider", lambda: PROVIDER)
    return provider


def compiled(
    out: Path, component: str = "vae_decoder", path: Path | None = None, **changes: Any
) -> Engine:
    adapter = MigraphxAdapter()
    plan = adapter.plan(CARD, None, {})
    assert isinstance(plan, Plan), plan
    request = BuildRequest(
        vendor=plan.vendor,
        revision=SPEC.revision,
        runtime=plan.runtime,
        target=plan.target,
        component=component,
        graph_digest="0" * 64,
        weights_digest="",
        precision=plan.precision,
        shapes=SHAPES.get(component, {}),
        options=plan.options,
    )
    request = replace(request, **changes)
    path = path or SAMPLE / component / "model.onnx"
    out.mkdir()
    adapter.compile(request, path, out, device=CARD, report=lambda progress: None)
    return Engine(key=request.key, request=request, folder=str(out), onnx=str(path))


@pytest.mark.parametrize("component", SHAPES)
def test_an_engine_holds_its_own_programs_and_gives_the_right_numbers(
    component: str, stub: StubProvider, tmp_path: Path
) -> None:
    engine = compiled(tmp_path / "out", component)
    before = snapshot(Path(engine.folder))
    assert any(name.startswith("programs/") for name in before)
    session = MigraphxAdapter().load(engine, CARD)
    assert tuple((one.name, one.shape) for one in session.outputs) == OUTPUTS[component]
    feeds = feeds_for(session.inputs)
    wanted: Any = ReferenceEvaluator(engine.onnx).run(None, feeds)
    for array, expected in zip(session.run(feeds).values(), wanted, strict=True):
        np.testing.assert_allclose(array, expected, rtol=0, atol=HALF_TOLERANCE)
    session.close()
    assert session.facts["flops_share"] == f"100.0 % on {PROVIDER}"
    assert snapshot(Path(engine.folder)) == before
    assert stub.compiled == 1


def test_no_two_builds_share_a_folder_of_programs(stub: StubProvider, tmp_path: Path) -> None:
    compiled(tmp_path / "one")
    compiled(tmp_path / "two", precision="fp32")
    folders = [one["migraphx_model_cache_dir"] for one in stub.options if len(one) > 1]
    assert len(set(folders)) == 2
    assert stub.compiled == 2


def test_the_head_of_a_program_is_recorded(stub: StubProvider, tmp_path: Path) -> None:
    engine = compiled(tmp_path / "out")
    note = msgspec.json.decode((Path(engine.folder) / "programs.json").read_bytes())
    (one,) = note.values()
    assert one["header"] == {"version": "7", "migraphx_version": "2.15.0"}


def test_a_compiler_that_leaves_no_program_has_failed(stub: StubProvider, tmp_path: Path) -> None:
    stub.leaves_programs = False
    with pytest.raises(CompileError, match="left no program"):
        compiled(tmp_path / "out")


def test_compiling_again_at_load_is_refused(stub: StubProvider, tmp_path: Path) -> None:
    engine = compiled(tmp_path / "out")
    stub.version = "2.16.0"  # an update of MIGraphX looks for another file
    with pytest.raises(CacheError, match="compiled vae_decoder again"):
        MigraphxAdapter().load(engine, CARD)


@pytest.mark.parametrize("damage", ["halved", "emptied", "removed", "garbage"])
def test_a_damaged_engine_is_reported_with_its_folder(
    damage: str, stub: StubProvider, tmp_path: Path
) -> None:
    engine = compiled(tmp_path / "whole")
    for number, name in enumerate(snapshot(Path(engine.folder))):
        folder = Path(shutil.copytree(engine.folder, tmp_path / f"damaged-{number}"))
        content = (folder / name).read_bytes()
        spoilt = {"halved": content[: len(content) // 2], "garbage": b"\xff\xfegarbage" * 9}
        (folder / name).write_bytes(spoilt.get(damage, b""))
        if damage == "removed":
            (folder / name).unlink()
        with pytest.raises(CacheError, match=folder.name):
            MigraphxAdapter().load(replace(engine, folder=str(folder)), CARD)


@pytest.mark.parametrize("change", [{"runtime": "elder 0.1"}, {"target": "gfx900"}])
def test_an_engine_built_elsewhere_is_refused_with_both_names(
    change: dict[str, str], stub: StubProvider, tmp_path: Path
) -> None:
    engine = compiled(tmp_path / "out")
    foreign = replace(engine, request=replace(engine.request, **change))
    with pytest.raises(CacheError) as caught:
        MigraphxAdapter().load(foreign, CARD)
    (field,) = change
    assert change[field] in caught.value.message
    assert getattr(engine.request, field) in caught.value.message


def test_a_cancellation_comes_out_as_it_is(stub: StubProvider, tmp_path: Path) -> None:
    engine = compiled(tmp_path / "first")
    (tmp_path / "second").mkdir()

    def cancel(progress: Any) -> None:
        if progress.phase.startswith("compile"):
            raise CancelledByUser

    with pytest.raises(CancelledByUser):
        MigraphxAdapter().compile(
            engine.request, Path(engine.onnx), tmp_path / "second", device=CARD, report=cancel
        )


WORDS = [
    # As onnxruntime-migraphx 1.27.1 and MIGraphX say it -> code, in the reason, in the hint.
    (
        "[ONNXRuntimeError] : 1 : FAIL : Failed to load library /x/libonnxruntime_providers_"
        "migraphx.so with error: libmigraphx_c.so.3: cannot open shared object file: No such file",
        "no-migraphx",
        "libmigraphx_c.so.3",
        "AMD's package repository",
    ),
    (
        "libamdhip64.so.7: cannot open shared object file: No such file or directory",
        "no-hip",
        "libamdhip64.so.7",
        "--vendor ggml",
    ),
    (
        "libhiprtc.so.7: cannot open shared object file: No such file or directory",
        "no-hip",
        "libhiprtc.so.7",
        "ROCm 7",
    ),
    (
        "librocblas.so.5: cannot open shared object file: No such file or directory",
        "no-rocm-library",
        "librocblas.so.5",
        "ROCm 7",
    ),
    (
        "HIP failure 100: no ROCm-capable device is detected ; GPU=0 ; hostname=x",
        "no-card",
        "no card",
        "groups render and video",
    ),
    ("get_device_id: No device", "no-card", "no card", "rocminfo"),
    (
        'Unknown provider option: "migraphx_save_compiled_model"',
        "option",
        "migraphx_save_compiled_model",
        "vendors install",
    ),
    ("INVALID_ARGUMENT : Conflicting session configuration", "option", "at once", ""),
    ("parse_graph: Unknown operator: STFT", "operator", "STFT", "opset 18"),
    ("No solutions provided for gpu::mlir_op", "no-kernel", "gpu::mlir_op", "ggml"),
]


@pytest.mark.parametrize(("words", "code", "reason", "hint"), WORDS, ids=[r[0][:40] for r in WORDS])
def test_each_error_of_the_provider_has_its_meaning(
    words: str, code: str, reason: str, hint: str, stub: StubProvider
) -> None:
    found = meaning_of(words, MIGRAPHX)
    assert found is not None
    assert found.code == code
    assert reason in found.reason
    assert hint in found.hint
    stub.error = RuntimeError(words)
    answer = MigraphxAdapter().probe(CARD)
    assert isinstance(answer, Rejection)
    assert (answer.code, answer.reason) == (code, found.reason)


def test_an_operator_that_the_compiler_finds_missing_is_named(
    stub: StubProvider, tmp_path: Path
) -> None:
    plan = compiled(tmp_path / "first").request
    stub.error = RuntimeError("parse_graph: Unknown operator: STFT")
    (tmp_path / "second").mkdir()
    with pytest.raises(UnsupportedOpError, match="STFT"):
        MigraphxAdapter().compile(
            plan,
            SAMPLE / "vae_decoder" / "model.onnx",
            tmp_path / "second",
            device=CARD,
            report=lambda progress: None,
        )


def test_a_session_that_runs_elsewhere_is_a_rejection(stub: StubProvider) -> None:
    stub.error = NotOnGpuError("no node runs on MIGraphXExecutionProvider; nodes: CPU 1")
    answer = MigraphxAdapter().probe(CARD)
    assert isinstance(answer, Rejection)
    assert "no node runs on" in answer.reason


def graph_with(op_types: list[str], opset: int) -> onnx.ModelProto:
    names = ["x", *(f"v{k}" for k in range(1, len(op_types))), "y"]
    nodes = [helper.make_node(op, [names[k]], [names[k + 1]]) for k, op in enumerate(op_types)]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def test_operators_that_it_lacks_are_all_named_before_anything_is_compiled() -> None:
    with pytest.raises(UnsupportedOpError) as caught:
        check_graph("unet", graph_with(["Relu", "Mish", "Det", "STFT"], 20))
    for name in ("Mish", "Det", "STFT"):
        assert f"{name} ({UNSUPPORTED[name]})" in caught.value.message
    assert "Relu" not in caught.value.message


def test_an_opset_that_it_does_not_take_is_refused() -> None:
    check_graph("unet", graph_with(["Relu"], 22))
    with pytest.raises(UnsupportedOpError, match="opset 22 and older, this is 23"):
        check_graph("unet", graph_with(["Relu"], 23))


def test_fusions_of_onnx_runtime_are_refused() -> None:
    model = graph_with(["Relu", "NhwcConv"], 18)
    model.graph.node[1].domain = "com.microsoft"
    with pytest.raises(UnsupportedOpError, match="com.microsoft:NhwcConv"):
        check_graph("unet", model)


@pytest.mark.parametrize(
    ("provider", "wanted"),
    [
        (
            PROVIDER,
            {
                "device_id": "1",
                "migraphx_model_cache_dir": "/p",
                "migraphx_exhaustive_tune": "1",
            },
        ),
        ("AMDGPUExecutionProvider", {"device_id": "1", "cache_dir": "/p", "exhaustive_tune": "1"}),
    ],
)
def test_options_are_said_in_the_words_of_each_provider(
    provider: str, wanted: dict[str, str]
) -> None:
    assert provider_options(provider, card=1, programs=Path("/p"), tune=True) == wanted
    assert set(provider_options(provider)) == {"device_id"}


def test_variables_that_override_options_are_removed(caplog: pytest.LogCaptureFixture) -> None:
    environment = {"ORT_MIGRAPHX_FP16_ENABLE": "1", "ORT_MIGRAPHX_MODEL_CACHE_PATH": "/x", "A": "b"}
    assert len(scrub_environment(environment)) == 2
    assert environment == {"A": "b"}
    assert "ORT_MIGRAPHX_FP16_ENABLE is ignored" in caplog.text


def test_an_adapter_scrubs_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_MIGRAPHX_EXHAUSTIVE_TUNE", "1")
    MigraphxAdapter()
    assert "ORT_MIGRAPHX_EXHAUSTIVE_TUNE" not in os.environ


def test_libraries_that_pip_installed_are_found(tmp_path: Path) -> None:
    for name in ("_rocm_sdk_core", "_rocm_sdk_libraries_gfx120X_all"):
        (tmp_path / name / "lib").mkdir(parents=True)
    (tmp_path / "other" / "lib").mkdir(parents=True)
    found = [folder.parent.name for folder in library_folders([str(tmp_path)])]
    assert found[:2] == ["_rocm_sdk_core", "_rocm_sdk_libraries_gfx120X_all"]
    assert "other" not in found


def test_a_library_that_does_not_load_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "libamdhip64.so.7").write_bytes(b"no library")
    assert load_libraries([tmp_path]) == {}


@pytest.mark.parametrize(
    "content",
    [b"", b"\x93\x01\x02\x03", b"\x81\xa1a\x01", b"ONNX", b"\xc1"],
    ids=["empty", "a list", "no version", "text", "never used"],
)
def test_what_is_no_program_is_said_to_be_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.mxr"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="no program|not what a program"):
        mxr_header(path)


def test_the_head_of_a_large_program_is_read_without_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "x.mxr"
    path.write_bytes(program("2.14.0"))
    assert mxr_header(path) == {"version": "7", "migraphx_version": "2.14.0"}
    data = {"a": [1, -1, 300, 70000, 1 << 40], "b": {"c": True}, "d": None, "e": "x" * 300}
    path.write_bytes(msgspec.msgpack.encode(data | {"version": 8}))
    assert mxr_header(path)["version"] == "8"


@pytest.mark.parametrize(
    ("device", "code"),
    [
        (replace(CARD, maker="nvidia", name="RTX 4090"), "arch"),
        (replace(CARD, is_absent=True), "absent-device"),
    ],
)
def test_other_devices_are_refused(device: Device, code: str) -> None:
    for answer in (MigraphxAdapter().probe(device), MigraphxAdapter().plan(device, None, {})):
        assert isinstance(answer, Rejection)
        assert (answer.vendor, answer.code, answer.device) == ("migraphx", code, device.id)


def test_precisions_and_options_are_checked(stub: StubProvider) -> None:
    answer = MigraphxAdapter().plan(CARD, "q4_0", {})
    assert isinstance(answer, Rejection)
    assert answer.code == "precision"
    with pytest.raises(ConfigError, match="exhaustive_tune"):
        MigraphxAdapter().plan(CARD, None, {"exhaustive_tun": True})
    plan = MigraphxAdapter().plan(CARD, None, {})
    assert isinstance(plan, Plan)
    assert plan.target.startswith("gfx1201")
    assert MigraphxAdapter().plan(CARD, plan.precision, plan.options) == plan


def test_the_processors_wheel_is_no_migraphx() -> None:
    if PROVIDER in ort.get_available_providers():
        pytest.skip("onnxruntime-migraphx is installed")
    answer = MigraphxAdapter().probe(CARD)
    assert isinstance(answer, Rejection)
    assert answer.code == "no-provider"


@needs_the_wheel
@without_rocm
def test_the_real_wheel_without_rocm_names_the_library_that_is_missing() -> None:
    answer = MigraphxAdapter().probe(CARD)
    assert isinstance(answer, Rejection)
    assert answer.code == "no-migraphx"
    assert "libmigraphx_c.so.3" in answer.reason
    assert "AMD's package repository" in answer.hint


@needs_the_wheel
@without_rocm
def test_the_real_wheel_without_rocm_runs_nothing_on_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        stand_in = StubProvider()
        patched.setattr(migraphx, "open_on", stand_in.open_on)
        engine = compiled(tmp_path / "out")
    (tmp_path / "again").mkdir()
    with pytest.raises(CompileError, match="libmigraphx_c"):
        MigraphxAdapter().compile(
            engine.request,
            Path(engine.onnx),
            tmp_path / "again",
            device=CARD,
            report=lambda progress: None,
        )
    with pytest.raises(RunError, match="libmigraphx_c"):
        MigraphxAdapter().load(engine, CARD)


@needs_the_wheel
@without_rocm
def test_the_real_wheel_would_run_on_the_processor_if_it_were_asked_loosely() -> None:
    """Why sessions are opened with enable_fallback=0: this is what 1.27.1 does without it."""
    code = (
        "import onnxruntime as ort; from sdkit_onnxruntime.gpu_session import one_node_model as m\n"
        f"s = ort.InferenceSession(m(), providers=[{PROVIDER!r}]); print(s.get_providers())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("['CPUExecutionProvider']")
    assert RUNTIME.startswith("onnxruntime-migraphx ")


def test_the_version_of_the_library_is_in_the_key(
    stub: StubProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provider's own key holds the version that it was built against, not the one that runs."""
    targets = []
    for version in ("migraphx=2.15.0", "migraphx=2.16.0"):
        monkeypatch.setattr(migraphx, "versions", lambda libraries, version=version: version)
        plan = MigraphxAdapter().plan(CARD, None, {})
        assert isinstance(plan, Plan)
        targets.append(plan.target)
    assert targets == ["gfx1201;migraphx=2.15.0", "gfx1201;migraphx=2.16.0"]


def fake_parser(folder: Path, words: str, code: int = 0) -> Path:
    """A shell script in place of migraphx-driver, which keeps how it was called."""
    tool = folder / "rocm" / "bin" / "migraphx-driver"
    tool.parent.mkdir(parents=True)
    (folder / "rocm" / "lib").mkdir()
    tool.write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {folder}/asked\n"
        f"cat <<'END'\n{words}\nEND\nexit {code}\n"
    )
    tool.chmod(0o755)
    return tool


@pytest.mark.parametrize(
    ("words", "code", "kind", "said"),
    [
        ("Unknown operator: STFT\nUnknown operator: Det", 0, UnsupportedOpError, "Det, STFT"),
        (
            "src/onnx/onnx_parser.cpp:417: parse_graph: num_heads attribute required",
            1,
            CompileError,
            "num_heads attribute required",
        ),
    ],
)
def test_the_parser_of_rocm_is_asked_before_the_minutes(
    words: str, code: int, kind: type[CompileError], said: str, tmp_path: Path
) -> None:
    tool = fake_parser(tmp_path, words, code)
    assert find_parser([tmp_path / "rocm" / "lib"]) == tool
    with pytest.raises(kind, match=said) as caught:
        ask_parser("unet", tmp_path / "graph.onnx", tool=tool)
    assert type(caught.value) is kind
    assert "--vendor ggml" in caught.value.hint
    asked = (tmp_path / "asked").read_text().split()
    assert asked == ["read", "--onnx", str(tmp_path / "graph.onnx"), "--skip-unknown-operators"]


@pytest.mark.parametrize(
    ("words", "code", "is_asked"),
    [
        ("module: main\n@0 = parameter", 0, True),
        ("libhip.so.7: cannot open shared object", 127, False),
    ],
)
def test_a_parser_that_says_nothing_of_the_graph_is_no_obstacle(
    words: str, code: int, is_asked: bool, tmp_path: Path
) -> None:
    tool = fake_parser(tmp_path, words, code)
    assert ask_parser("unet", tmp_path / "graph.onnx", tool=tool) is is_asked
    assert ask_parser("unet", tmp_path / "graph.onnx", tool=tmp_path / "gone") is False


def test_a_build_ends_with_the_operators_that_the_parser_does_not_know(
    stub: StubProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = fake_parser(tmp_path, "Unknown operator: Conv")
    monkeypatch.setattr(migraphx_parser, "find_parser", lambda: tool)
    with pytest.raises(UnsupportedOpError, match="vae_decoder; its parser does not know Conv"):
        compiled(tmp_path / "out")
    assert stub.compiled == 0
