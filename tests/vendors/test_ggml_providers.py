"""Which build of ggml is taken of several, and why the others are not."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ggml_harness import CPU, ggml_adapter
from sdkit_ggml import SPEC
from sdkit_ggml.runtime import examination, loader
from sdkit_ggml.runtime.binding import DeviceProps
from sdkit_ggml.runtime.devices import find_device, offered_devices
from sdkit_ggml.runtime.examination import Examined, examine_build, judged, rank
from sdkit_ggml.runtime.providers import (
    BUILT_HERE,
    WHEELS,
    Provider,
    find_library,
    find_providers,
    modules,
)
from test_ggml_runtime import gpu, run_python

LIBRARIES = ("libggml.so", "libggml-base.so", "libggml-cpu-haswell.so", "libggml-vulkan.so")
HASHED = (
    "libggml-2f623e0b.so.0.27.0",
    "libggml-base-82914aef.so.0.27.0",
    "libggml-cpu-0786c92d.so",
)
linux_names = pytest.mark.skipif(sys.platform != "linux", reason="the names of Linux libraries")


def fake_build(folder: Path, names: tuple[str, ...] = LIBRARIES) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that is looked through before the real one."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def fake_wheel(site: Path, name: str, folder: str = "", names: tuple[str, ...] = LIBRARIES) -> Path:
    info = site / f"{name.replace('-', '_')}-99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.0\n")
    return fake_build(site / folder, names) if folder else site


@linux_names
def test_an_explicit_folder_is_the_only_provider(tmp_path: Path) -> None:
    found = find_providers({"SDKIT_GGML_DIR": str(tmp_path), "SDKIT_GGML_BUILT_DIR": "/other"})
    explicit = Provider(name="SDKIT_GGML_DIR", folder=tmp_path, is_explicit=True)
    assert found.providers == (explicit,)


@linux_names
def test_a_build_of_ours_comes_before_wheels(tmp_path: Path) -> None:
    built = fake_build(tmp_path / "0123456789abcdef")
    found = find_providers({"SDKIT_GGML_BUILT_DIR": str(built)})
    assert found.providers[0] == Provider(name=BUILT_HERE, folder=built)
    assert found.providers[0].build_id == "01234567"


@linux_names
def test_a_build_of_ours_that_is_gone_is_skipped_and_named(tmp_path: Path) -> None:
    found = find_providers({"SDKIT_GGML_BUILT_DIR": str(tmp_path / "gone")})
    assert BUILT_HERE not in [one.name for one in found.providers]
    assert str(tmp_path / "gone") in found.skipped[BUILT_HERE]


@linux_names
def test_wheels_are_found_in_the_order_of_the_table(site: Path) -> None:
    fake_wheel(site, "libggml-python", "libggml/lib64")
    fake_wheel(site, "inferna-vulkan", "inferna_vulkan.libs", HASHED)
    fake_wheel(site, "cyllama-cuda12", "cyllama_cuda12.libs", HASHED)
    fake_wheel(site, "transcribe-cpp-native", "transcribe_cpp_native/_native")
    found = [one.name for one in find_providers({}).providers]
    order = ["transcribe-cpp-native", "cyllama-cuda12", "inferna-vulkan", "libggml-python"]
    assert [name for name in found if name in order] == order  # others may be installed, too


@linux_names
def test_a_wheel_that_holds_no_ggml_of_its_own_is_skipped_and_named(site: Path) -> None:
    fake_wheel(site, "cyllama")
    found = find_providers({})
    assert "cyllama" not in [one.name for one in found.providers]
    assert "cyllama.libs" in found.skipped["cyllama"]


def test_a_change_of_any_wheel_of_the_table_makes_the_vendor_be_asked_anew() -> None:
    assert set(SPEC.also_used) == {wheel.distribution for wheel in WHEELS}


@linux_names
def test_libraries_are_found_under_the_names_that_wheel_tools_give(tmp_path: Path) -> None:
    fake_build(tmp_path / "libs", (*HASHED, "libggml-vulkan-4062e2a6.so"))
    folder = tmp_path / "libs"
    assert find_library(folder, "") == folder / "libggml-2f623e0b.so.0.27.0"
    assert find_library(folder, "base") == folder / "libggml-base-82914aef.so.0.27.0"
    assert find_library(folder, "cpu") == folder / "libggml-cpu-0786c92d.so"
    assert find_library(folder, "vulkan") == folder / "libggml-vulkan-4062e2a6.so"
    assert sorted(modules(folder)) == ["cpu", "vulkan"]


WHEEL_WITH_VULKAN, WHEEL_WITH_CUDA, BUILT = (
    Provider(name=name, folder=Path(name)) for name in ("vulkan wheel", "cuda wheel", BUILT_HERE)
)


def order_of(*given: tuple[Provider, Examined]) -> tuple[list[str], str]:
    answers = {provider.name: examined for provider, examined in given}
    ranking = rank([provider for provider, _ in given], examine=lambda one: answers[one.name])
    return [one.name for one in ranking.providers], ranking.reason


def test_a_makers_own_backend_comes_before_vulkan_and_the_reason_says_so() -> None:
    names, reason = order_of(
        (WHEEL_WITH_VULKAN, Examined(devices={"vulkan": 1})),
        (WHEEL_WITH_CUDA, Examined(devices={"cuda": 2})),
    )
    assert names == ["cuda wheel", "vulkan wheel"]
    assert "cuda, NVIDIA's own, it drives 2 GPUs" in reason
    assert "vulkan wheel" in reason


def test_a_makers_backend_without_a_device_changes_nothing() -> None:
    names, reason = order_of(
        (WHEEL_WITH_VULKAN, Examined(devices={"vulkan": 1})),
        (WHEEL_WITH_CUDA, Examined(devices={"cuda": 0})),
    )
    assert names == ["vulkan wheel", "cuda wheel"]
    assert reason == ""


def test_a_build_for_the_processor_does_not_hide_a_gpu() -> None:
    with_gpu = order_of((BUILT, Examined()), (WHEEL_WITH_VULKAN, Examined(devices={"vulkan": 1})))
    assert with_gpu[0] == ["vulkan wheel", BUILT_HERE]
    without = order_of((BUILT, Examined()), (WHEEL_WITH_VULKAN, Examined(devices={"vulkan": 0})))
    assert without == ([BUILT_HERE, "vulkan wheel"], "")


def test_a_build_of_a_wrong_version_is_skipped_with_its_reason() -> None:
    old = judged({"version": "0.15.3", "missing": [], "devices": {}}, asked={})
    ranking = rank(
        [WHEEL_WITH_CUDA, WHEEL_WITH_VULKAN],
        examine=lambda one: old if one is WHEEL_WITH_CUDA else Examined(),
    )
    assert ranking.providers == (WHEEL_WITH_VULKAN,)
    assert ranking.skipped["cuda wheel"] == "it is ggml 0.15.3; 0.20 or newer is needed"


def test_a_build_that_lacks_symbols_is_skipped_with_their_names() -> None:
    answer = {"version": "0.30.0", "missing": ["ggml_pool_2d"], "devices": {}}
    assert judged(answer, asked={}).fault == "ggml 0.30.0 lacks ggml_pool_2d"


def test_a_backend_that_lacks_a_library_is_named_with_it() -> None:
    words = "x\nload_backend: failed to load /a/libggml-cuda.so: libcudart.so.12: cannot open\n"
    answer = {"version": "0.27.0", "missing": [], "devices": {}}
    lacking = judged(answer, asked={"cuda": "/a/libggml-cuda.so"}, words=words)
    ranking = rank([WHEEL_WITH_CUDA, WHEEL_WITH_VULKAN], examine=lambda _: lacking)
    assert ranking.skipped["cuda of cuda wheel"] == "libcudart.so.12: cannot open"


def test_a_single_build_is_not_examined() -> None:
    def never(_: Provider) -> Examined:
        raise AssertionError("there is nothing to choose")

    assert rank([BUILT], examine=never).providers == (BUILT,)


@linux_names
def test_files_that_are_no_libraries_are_a_fault_of_the_build(tmp_path: Path) -> None:
    folder = fake_build(tmp_path / "broken")
    fault = examine_build(Provider(name="broken", folder=folder)).fault
    assert fault.startswith("it does not load: ")
    assert "libggml-base.so" in fault


@linux_names
def test_a_gpu_driver_that_ends_the_process_costs_only_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fake_build(tmp_path / "build")

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if json.loads(command[-1])["modules"]:
            raise subprocess.CalledProcessError(-6, command, "", "")
        said = json.dumps({"version": "0.26.0", "missing": [], "devices": {}})
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(subprocess, "run", run)
    examined = examine_build(Provider(name="a wheel", folder=folder))
    assert (examined.version, examined.fault) == ("0.26.0", "")
    assert examined.unloaded == {"vulkan": "its process ended with -6"}


def test_a_trial_says_what_the_loaded_build_says() -> None:
    ggml_adapter().probe(CPU)
    runtime = loader.load_runtime()
    examined = examine_build(runtime.provider)
    assert (examined.version, examined.fault) == (runtime.version, "")


@linux_names
def test_a_broken_build_of_ours_is_skipped_and_the_plan_says_why(tmp_path: Path) -> None:
    ggml_adapter()
    built = fake_build(tmp_path / "0123456789abcdef")
    code = (
        "from sdkit_ggml.adapter import GgmlAdapter; from ggml_harness import CPU; "
        "print(*GgmlAdapter().plan(CPU, None, {}).reasons, sep='\\n')"
    )
    done = run_python(code, SDKIT_GGML_BUILT_DIR=str(built), SDKIT_GGML_DIR="")
    assert "this machine's build is not used: it does not load" in done.stdout, done.stderr
    assert "runs on CPU" in done.stdout


def test_trial_imports_the_standard_library_only() -> None:
    script = Path(examination.__file__).with_name("trial.py")
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(script), json.dumps({"folder": "", "base": "/nothing"})],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "OSError" in done.stderr
    assert "ModuleNotFoundError" not in done.stderr


@dataclass
class FakeCard:
    """What a fake binding offers."""

    name: str
    backend: str
    kind: int
    description: str
    address: str = ""
    memory_bytes: int = 0


@dataclass
class FakeLibrary:
    """A fake binding: no ggml is behind it."""

    cards: list[FakeCard]
    texts: list[bytes] = field(default_factory=list)  # C does not own what it points to

    def ggml_backend_dev_count(self) -> int:
        return len(self.cards)

    def ggml_backend_dev_get(self, index: int) -> int:
        return index

    def ggml_backend_dev_backend_reg(self, handle: int) -> int:
        return handle

    def ggml_backend_reg_name(self, registry: int) -> bytes:
        return self.cards[registry].backend.encode()

    def ggml_backend_dev_get_props(self, handle: int, pointer: Any) -> None:
        card = self.cards[handle]
        props = ctypes.cast(pointer, ctypes.POINTER(DeviceProps)).contents
        texts = [text.encode() for text in (card.name, card.description, card.address)]
        self.texts += texts
        props.name, props.description, props.device_id = texts
        props.type, props.memory_total = card.kind, card.memory_bytes


PROCESSOR = FakeCard("CPU", "CPU", 0, "a processor", memory_bytes=64 << 30)
INSIDE = FakeCard("Vulkan0", "Vulkan", 2, "AMD Graphics", "0000:09:00.0", 32 << 30)
CARD = FakeCard("Vulkan1", "Vulkan", 1, "NVIDIA RTX 4090", "0000:01:00.0", 24 << 30)
SMALL = FakeCard("Vulkan3", "Vulkan", 1, "NVIDIA GTX 1650", "0000:02:00.0", 4 << 30)
SAME_BY_CUDA = FakeCard("CUDA0", "CUDA", 1, "NVIDIA RTX 4090", "0000:01:00.0", 24 << 30)
SOFTWARE = FakeCard("Vulkan2", "Vulkan", 2, "llvmpipe (LLVM 15.0.6, 256 bits)", "", 2 << 30)


def names_of(*cards: FakeCard) -> list[str]:
    return [one.name for one in offered_devices(FakeLibrary(list(cards)))]  # type: ignore[arg-type]


def test_cards_come_before_integrated_gpus_the_processor_and_software() -> None:
    found = names_of(SOFTWARE, PROCESSOR, INSIDE, SMALL, CARD)
    assert found == ["Vulkan1", "Vulkan3", "Vulkan0", "CPU", "Vulkan2"]


def test_a_card_is_served_by_its_makers_backend_where_two_offer_it() -> None:
    offered = offered_devices(FakeLibrary([PROCESSOR, CARD, SAME_BY_CUDA]))  # type: ignore[arg-type]
    found = find_device(gpu(pci_address="0000:01:00.0"), offered)
    assert found is not None
    assert found.name == "CUDA0"


def test_a_device_is_named_with_its_address_and_memory() -> None:
    (found,) = offered_devices(FakeLibrary([CARD]))  # type: ignore[arg-type]
    assert found.words == "Vulkan1 (NVIDIA RTX 4090, discrete, 0000:01:00.0, 24.0 GiB)"


def test_software_is_never_taken_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = offered_devices(FakeLibrary([PROCESSOR, SOFTWARE]))  # type: ignore[arg-type]
    monkeypatch.delenv("GGML_VK_VISIBLE_DEVICES", raising=False)
    assert find_device(gpu("integrated"), offered) is None
    assert find_device(gpu("discrete"), offered) is None
    assert "software" in offered[-1].words
