"""What is particular to OpenVINO: telemetry, mapped weights, precision, absent devices."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sdkit_dispatch.contract import Device, Rejection
from sdkit_dispatch.errors import CacheError, CompileError
from sdkit_openvino import SPEC
from vendor_harness import (
    CPU,
    SAMPLE,
    adapter_of,
    build,
    feeds_for,
    plan_of,
    request_of,
    with_external_weights,
)

# Not importorskip: that would import openvino before the adapter has silenced it.
if importlib.util.find_spec("openvino") is None:
    pytest.skip("openvino is not installed", allow_module_level=True)

ARC = Device(
    id="pci:0000:03:00.0",
    kind="discrete",
    maker="intel",
    name="Arc B580",
    arch="xe2-hpg",
    pci_id="8086:e20b",
    pci_address="0000:03:00.0",
)
NPU = Device(
    id="pci:0000:00:0b.0",
    kind="npu",
    maker="intel",
    name="Intel AI Boost",
    pci_id="8086:7d1d",
    pci_address="0000:00:0b.0",
)
WATCH = """
import atexit, sys
seen = set()
speaking = ("socket.", "os.fork", "os.posix_spawn", "subprocess.")
# Telemetry is sent by a thread, from a forked process: look when everything has ended.
atexit.register(lambda: print(sorted(seen)))
sys.addaudithook(lambda event, args: seen.add(event) if event.startswith(speaking) else None)
import {module}
"""


def what_an_import_does(module: str, home: Path) -> tuple[str, list[str]]:
    """Returns the network and process events of an import, and the files it leaves at home."""
    home.mkdir()
    environment = {**os.environ, "HOME": str(home), "USERPROFILE": str(home)}
    # Continuous integration switches this telemetry off by itself.
    for variable in ("CI", "TF_BUILD", "JENKINS_URL", "GITHUB_ACTIONS"):
        environment.pop(variable, None)
    done = subprocess.run(
        [sys.executable, "-c", WATCH.format(module=module)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip(), [str(path.relative_to(home)) for path in home.rglob("*")]


def test_importing_the_adapter_talks_to_nobody_and_writes_nothing_at_home(tmp_path: Path) -> None:
    events, files = what_an_import_does("sdkit_openvino.adapter", tmp_path / "home")
    assert events == "[]"
    assert files == []


def test_the_telemetry_package_is_out_of_reach() -> None:
    try:
        importlib.metadata.version("openvino-telemetry")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("openvino-telemetry is not installed, so there is nothing to keep out")
    code = "import sdkit_openvino.adapter, openvino_telemetry"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert "ModuleNotFoundError" in done.stderr


def test_weights_in_one_external_file_stay_there_and_are_mapped(tmp_path: Path) -> None:
    path = with_external_weights("unet", tmp_path / "source")
    light = build(SPEC, tmp_path / "light", onnx_file=path)
    heavy = build(SPEC, tmp_path / "heavy", onnx_file=path, options={"map_weights": False})
    weights = path.with_name("model.onnx_data").stat().st_size
    light_bytes = (tmp_path / "light" / "model.blob").stat().st_size
    heavy_bytes = (tmp_path / "heavy" / "model.blob").stat().st_size
    one, other = light.load(), heavy.load()
    if one.facts["weights"] != "mapped":
        pytest.skip(f"{one.facts['runtime']} does not read back an engine without weights")
    assert heavy_bytes - light_bytes > 0.9 * weights
    assert other.facts["weights"] == "in the engine"
    feeds = feeds_for(one.inputs)
    np.testing.assert_array_equal(one.run(feeds)["out_sample"], other.run(feeds)["out_sample"])
    assert light.engine.key != heavy.engine.key


def test_mapped_weights_that_are_gone_or_cut_are_named(tmp_path: Path) -> None:
    path = with_external_weights("unet", tmp_path / "source")
    one = build(SPEC, tmp_path / "out", onnx_file=path)
    if one.load().facts["weights"] != "mapped":
        pytest.skip("this OpenVINO does not read back an engine without weights")
    data = path.with_name("model.onnx_data")
    os.truncate(data, data.stat().st_size - 4096)
    with pytest.raises(CacheError, match=r"model\.onnx_data has \d+ bytes, the engine expects"):
        one.load()
    data.unlink()
    with pytest.raises(CacheError, match=r"model\.onnx_data"):
        one.load()


def test_a_moved_pipeline_is_found_through_the_engine_record(tmp_path: Path) -> None:
    path = with_external_weights("unet", tmp_path / "source")
    one = build(SPEC, tmp_path / "out", onnx_file=path)
    before = one.load()
    feeds = feeds_for(before.inputs)
    expected = before.run(feeds)["out_sample"]
    before.close()
    path.parent.rename(tmp_path / "elsewhere")
    moved = replace(one.engine, onnx=str(tmp_path / "elsewhere" / "model.onnx"))
    session = one.adapter.load(moved, CPU)
    np.testing.assert_array_equal(session.run(feeds)["out_sample"], expected)


def test_weights_of_one_file_a_tensor_go_into_the_engine(tmp_path: Path) -> None:
    path = with_external_weights("vae_decoder", tmp_path / "source", files=2)
    session = build(SPEC, tmp_path / "out", "vae_decoder", onnx_file=path).load()
    assert session.facts["weights"] == "in the engine"


def test_an_engine_outlives_the_folder_it_was_loaded_from(tmp_path: Path) -> None:
    # The mapping of the blob is held by the session: a freed one was a segmentation fault.
    session = build(SPEC, tmp_path / "out", "vae_decoder").load()
    if sys.platform != "win32":
        (tmp_path / "out" / "model.blob").unlink()
    feeds = feeds_for(session.inputs)
    first = session.run(feeds)["sample"]
    for _ in range(3):
        np.testing.assert_array_equal(session.run(feeds)["sample"], first)


def test_facts_are_what_the_runtime_reports(tmp_path: Path) -> None:
    one = build(SPEC, tmp_path / "out", "vae_decoder")
    one.adapter.threads = 1  # type: ignore[attr-defined]
    facts = one.load().facts
    assert facts["precision"] == "fp32"
    assert facts["openvino_device"] == "CPU"
    assert facts["threads"] == "1"
    assert facts["streams"] == "1"


def test_a_precision_that_would_not_run_is_no_plan_and_no_engine(tmp_path: Path) -> None:
    adapter = adapter_of(SPEC)
    answer = adapter.plan(CPU, "fp16", {})
    if not isinstance(answer, Rejection):
        pytest.skip("this processor computes in fp16")
    assert "fp32" in answer.reason
    # A hint that the processor cannot follow is accepted by OpenVINO and ignored.
    request = request_of(SPEC, plan_of(SPEC, adapter), "vae_decoder", precision="fp16")
    with pytest.raises(CompileError, match="asked .* for fp16 on CPU, it would run fp32"):
        adapter.compile(
            request,
            SAMPLE / "vae_decoder" / "model.onnx",
            tmp_path,
            device=CPU,
            report=lambda progress: None,
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", [ARC, NPU], ids=["gpu", "npu"])
def test_a_device_that_openvino_does_not_see_is_rejected_with_a_reason(device: Device) -> None:
    adapter = adapter_of(SPEC)
    import openvino  # by now without its telemetry

    family = "NPU" if device.kind == "npu" else "GPU"
    if any(name.startswith(family) for name in openvino.Core().available_devices):
        pytest.skip(f"this machine has an {family} that OpenVINO sees")
    for answer in (adapter.probe(device), adapter.plan(device, None, {})):
        assert isinstance(answer, Rejection)
        assert answer.code in ("no-opencl-loader", "no-gpu-driver", "no-npu-driver")
        assert f"no {family}" in answer.reason


def test_the_target_is_what_openvino_checks_on_import() -> None:
    target = plan_of(SPEC, adapter_of(SPEC)).target
    import openvino  # by now without its telemetry

    assert openvino.get_version().split("-")[0] in target
    assert "isa=" in target or "arch=" in target


def test_warming_up_can_be_left_out_and_changes_no_number(tmp_path: Path) -> None:
    one = build(SPEC, tmp_path / "out", "vae_decoder")
    warm = one.load()
    feeds = feeds_for(warm.inputs)
    expected = warm.run(feeds)["sample"]
    one.adapter.warm_up = False  # type: ignore[attr-defined]
    np.testing.assert_array_equal(one.load().run(feeds)["sample"], expected)
