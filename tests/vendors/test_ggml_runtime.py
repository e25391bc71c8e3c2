"""Which ggml is loaded, which device serves, and what keeps a bad program from ending us."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ggml_harness import CPU, SAMPLE, compiled, feeds_of, ggml_adapter, shapes_for
from sdkit_dispatch.contract import Device, Rejection
from sdkit_dispatch.errors import CacheError, RunError
from sdkit_ggml.engine_files import PROGRAM_FILE, read_program
from sdkit_ggml.runtime.devices import OfferedDevice, find_device


def offered(name: str, kind: str, **facts: Any) -> OfferedDevice:
    values = {
        "backend": name.rstrip("0123456789"),
        "description": name,
        "pci_address": "",
        "memory_bytes": 8 << 30,
        "free_bytes": 8 << 30,
        "handle": 0,
        "has_host_memory": kind == "cpu",
    }
    return OfferedDevice(name=name, kind=kind, **{**values, **facts})


PROCESSOR = offered("CPU", "cpu")
CARD = offered("Vulkan0", "discrete", description="AMD RX 7900", pci_address="0000:03:00.0")
OTHER = offered("Vulkan1", "discrete", description="NVIDIA RTX 4090", pci_address="0000:04:00.0")
INSIDE = offered("Vulkan2", "integrated", description="AMD Graphics", pci_address="0000:09:00.0")
SOFTWARE = offered("Vulkan3", "integrated", description="llvmpipe (LLVM 15.0.6, 256 bits)")


def gpu(kind: str = "discrete", **facts: str) -> Device:
    return Device(id="gpu", kind=kind, maker="amd", name="a card", **facts)  # type: ignore[arg-type]


def test_a_folder_without_ggml_is_a_rejection_that_names_it(tmp_path: Path) -> None:
    ggml_adapter()
    code = (
        "from sdkit_ggml.adapter import GgmlAdapter; from ggml_harness import CPU; "
        "print(GgmlAdapter().probe(CPU))"
    )
    done = run_python(code, SDKIT_GGML_DIR=str(tmp_path))
    assert "Rejection(vendor='ggml', code='no-ggml'" in done.stdout
    assert str(tmp_path) in done.stdout


@pytest.mark.parametrize(
    "package",
    [
        "transcribe_cpp_native/_native",
        "cyllama_vulkan.libs",
        "inferna_vulkan.libs",
        "libggml/lib64",
    ],
)
def test_each_build_gives_the_same_numbers(package: str, tmp_path: Path) -> None:
    ggml_adapter()
    root = next(
        (Path(entry) for entry in sys.path if (Path(entry or ".") / package).is_dir()), None
    )
    if root is None:
        pytest.skip(f"{package} is not installed")
    code = (
        "import sys; from pathlib import Path; from ggml_harness import *; "
        "path = SAMPLE / 'unet' / 'model.onnx'; "
        "session = compiled(path, shapes_for(path), Path(sys.argv[1])).load(); "
        "print(session.facts['provider'], max(differences(path, session).values()))"
    )
    folder = {"SDKIT_GGML_DIR": str(root / package)}
    probe = run_python("from ggml_harness import *; print(ggml_adapter().probe(CPU))", **folder)
    if "or newer is needed" in probe.stdout:
        pytest.skip(f"{package} is of an older release: {probe.stdout.strip()}")
    done = run_python(code, str(tmp_path / "out"), **folder)
    assert done.returncode == 0, done.stderr[-2000:]
    name, difference = done.stdout.split()
    assert name == "SDKIT_GGML_DIR"
    assert float(difference) <= 5e-6


def run_python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parent), *sys.path]
    environ = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_card_is_found_by_its_address() -> None:
    all_of_them = (PROCESSOR, CARD, OTHER, INSIDE)
    assert find_device(gpu(pci_address="0000:04:00.0"), all_of_them) == OTHER
    assert find_device(gpu(pci_address="0000:05:00.0"), all_of_them) is None


def test_two_cards_without_an_address_are_not_guessed_between() -> None:
    bare = [replace(one, pci_address="") for one in (CARD, OTHER)]
    assert find_device(gpu(), (PROCESSOR, *bare)) is None
    assert find_device(gpu(), (PROCESSOR, bare[0])) == bare[0]


def test_an_integrated_gpu_does_not_stand_in_for_a_card() -> None:
    assert find_device(gpu("integrated"), (PROCESSOR, CARD, INSIDE)) == INSIDE


def test_a_software_driver_serves_only_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GGML_VK_VISIBLE_DEVICES", raising=False)
    assert find_device(gpu("integrated"), (PROCESSOR, SOFTWARE)) is None
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    assert find_device(gpu("integrated"), (PROCESSOR, SOFTWARE)) == SOFTWARE


def test_a_gpu_that_is_not_there_is_rejected_with_what_is(tmp_path: Path) -> None:
    answer = ggml_adapter().probe(gpu(pci_address="ffff:ff:1f.7"))
    assert isinstance(answer, Rejection)
    assert answer.code == "device-not-found"
    assert "CPU" in answer.reason


F16 = "GGML_VK_DISABLE_F16"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Devices, with what ggml would have read as each of them was opened; no GPU is needed."""
    import sdkit_ggml.adapter as adapter
    from sdkit_ggml.runtime.loader import Runtime
    from sdkit_ggml.runtime.providers import Provider

    seen: list[tuple[str, str | None]] = []

    def open_mock(_library: object, device: OfferedDevice) -> str:
        seen.append((device.name, os.environ.get(F16)))
        return ""

    ggml_adapter()
    library: Any = None
    provider = Provider(name="a mock", folder=Path("nowhere"))
    runtime = Runtime(library=library, provider=provider, version="0.26.0")
    monkeypatch.setattr(adapter, "load_runtime", lambda: runtime)
    monkeypatch.setattr(adapter, "offered_devices", lambda _: (PROCESSOR, CARD, OTHER, INSIDE))
    monkeypatch.setattr(adapter, "fault_of", open_mock)
    monkeypatch.setattr(runtime, "load_gpu_backends", lambda: None)
    monkeypatch.setenv(F16, "")
    monkeypatch.delenv(F16)  # and restored afterwards, whatever is set meanwhile
    return seen


def test_each_gpu_of_a_worker_computes_as_it_was_planned(
    opened: list[tuple[str, str | None]],
) -> None:
    adapter = ggml_adapter()
    for card, precision in ((CARD, "fp16"), (OTHER, "fp32"), (INSIDE, "fp16")):
        plan = adapter.plan(gpu(card.kind, pci_address=card.pci_address), precision, {})
        assert plan.precision == precision
    assert opened == [("Vulkan0", None), ("Vulkan1", "1"), ("Vulkan2", None)]


def test_what_the_user_says_of_half_precision_stands(
    opened: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(F16, "yes")
    adapter = ggml_adapter()
    for card, precision in ((CARD, "fp32"), (OTHER, "fp16")):
        adapter.plan(gpu(card.kind, pci_address=card.pci_address), precision, {})
    assert opened == [("Vulkan0", "yes"), ("Vulkan1", "yes")]


def _cut_operand(program: dict[str, Any]) -> None:
    program["variants"][0]["operands"][0][1] = 1 << 40


def _other_shape(program: dict[str, Any]) -> None:
    operand = program["variants"][0]["operands"][program["variants"][0]["ops"][0][2]]
    operand[3] = [operand[3][0] + 1, *operand[3][1:]]


def _unknown_operation(program: dict[str, Any]) -> None:
    program["variants"][0]["ops"][0][0] = "frobnicate"


def _missing_operand(program: dict[str, Any]) -> None:
    program["variants"][0]["ops"][0][1] = [99999]


def _wrong_parameter(program: dict[str, Any]) -> None:
    for op in program["variants"][0]["ops"]:
        if op[0] == "group_norm":
            op[3] = [7, 1e-5]


def _into_weights(program: dict[str, Any]) -> None:
    program["variants"][0]["operands"][program["variants"][0]["ops"][0][2]][0] = "w"


@pytest.mark.parametrize(
    "damage",
    [
        _cut_operand,
        _other_shape,
        _unknown_operation,
        _missing_operand,
        _wrong_parameter,
        _into_weights,
    ],
)
def test_a_program_that_ggml_would_abort_on_is_an_error_of_ours(
    damage: Any, tmp_path: Path
) -> None:
    path = SAMPLE / "vae_decoder" / "model.onnx"
    engine = compiled(path, shapes_for(path, batch=1), tmp_path / "out")
    file = engine.folder / PROGRAM_FILE
    program = msgspec.json.decode(file.read_bytes())
    damage(program)
    file.write_bytes(msgspec.json.encode(program))
    with pytest.raises(CacheError, match="out"):
        engine.load()


def test_weights_of_another_engine_are_refused(tmp_path: Path) -> None:
    unet, vae = (SAMPLE / name / "model.onnx" for name in ("unet", "vae_decoder"))
    one = compiled(unet, shapes_for(unet), tmp_path / "one")
    two = compiled(vae, shapes_for(vae), tmp_path / "two")
    shutil.copy(two.folder / "weights.gguf", one.folder / "weights.gguf")
    with pytest.raises(CacheError, match=r"weights\.gguf"):
        one.load()


@pytest.mark.parametrize("token", [1 << 30, -(1 << 20)])
def test_a_token_beyond_the_vocabulary_is_refused_before_ggml_sees_it(
    token: int, tmp_path: Path
) -> None:
    path = SAMPLE / "text_encoder" / "model.onnx"
    session = compiled(path, shapes_for(path), tmp_path / "out").load()
    feeds = feeds_of(session)
    feeds["input_ids"][0, 3] = token
    with pytest.raises(RunError, match=r"input_ids.*rows"):
        session.run(feeds)


def test_threads_change_no_number_beyond_rounding(tmp_path: Path) -> None:
    path = SAMPLE / "unet" / "model.onnx"
    one = compiled(path, shapes_for(path), tmp_path / "one", threads=1).load()
    two = compiled(path, shapes_for(path), tmp_path / "two", threads=2).load()
    assert (one.facts["threads"], two.facts["threads"]) == ("1", "2")
    feeds = feeds_of(one)
    np.testing.assert_allclose(
        one.run(feeds)["out_sample"], two.run(feeds)["out_sample"], rtol=0, atol=5e-6
    )


def test_an_engine_is_a_gguf_file_that_other_readers_open(tmp_path: Path) -> None:
    path = SAMPLE / "vae_decoder" / "model.onnx"
    engine = compiled(path, shapes_for(path, batch=1), tmp_path / "out")
    gguf = pytest.importorskip("gguf", reason="reads the file as others would")
    reader = gguf.GGUFReader(engine.folder / "weights.gguf")
    fields = {field.name: field for field in reader.fields.values()}
    origins = fields["sdkit.origins"].contents()
    assert len(origins) == len(reader.tensors)
    assert read_program(engine.folder).weights_digest == fields["sdkit.layout"].contents()
    bias = next(i for i, name in enumerate(origins) if name.endswith("conv_out.bias"))
    import onnx

    graph = onnx.load(path).graph
    (wanted,) = (
        onnx.numpy_helper.to_array(one) for one in graph.initializer if one.name == origins[bias]
    )
    np.testing.assert_array_equal(reader.tensors[bias].data.ravel(), wanted.ravel())


def test_the_processor_is_always_offered() -> None:
    assert isinstance(ggml_adapter().probe(CPU), str)
