"""Windows machines: SetupAPI and DXGI joined, in any language."""

from __future__ import annotations

import ctypes

import pytest

from detect_machines import BASIC_RENDER, FakeProbe, dxgi, nvml, nvml_gpu, pnp, windows
from sdkit_dispatch.contract import Device
from sdkit_dispatch.detect import detect, host
from sdkit_dispatch.detect import windows_library as library
from sdkit_dispatch.detect.answers import DxgiAdapter, PnpDevice
from sdkit_dispatch.detect.support import Candidate, engines_for
from sdkit_dispatch.detect.windows import driver_from_windows_version


def engines(probe: FakeProbe, device: Device) -> list[str]:
    return [e.name for e in engines_for(device, host(probe)) if isinstance(e, Candidate)]


@pytest.mark.parametrize(
    ("windows_version", "own"),
    [
        ("32.0.15.7652", "576.52"),
        ("31.0.15.5222", "552.22"),
        ("27.21.14.5671", "456.71"),
        ("32.0.15.0012", "500.12"),
        ("", ""),
        ("banana", "banana"),
    ],
)
def test_the_driver_of_nvidia_is_the_last_five_digits(windows_version: str, own: str) -> None:
    assert driver_from_windows_version(windows_version) == own


def test_a_laptop_with_two_gpus_joins_each_with_its_own_memory() -> None:
    probe = windows(
        pnp("8086:a7a0", address="0000:00:02.0", driver="32.0.101.5768", service="igfxn"),
        pnp("10de:28e0", address="0000:01:00.0", driver="32.0.15.8129", service="nvlddmkm"),
        adapters=[
            dxgi("10de:28e0", "NVIDIA GeForce RTX 4060 Laptop GPU", 7.8, luid="0:2"),
            dxgi("8086:a7a0", "Intel(R) Iris(R) Xe Graphics", 0.125, luid="0:1"),
            BASIC_RENDER,
        ],
        nvml=nvml(
            nvml_gpu("00000000:01:00.0", "NVIDIA GeForce RTX 4060 Laptop GPU", (8, 9), 8),
            driver="581.29",
        ),
    )
    intel, card, cpu = detect(probe)
    assert (intel.kind, intel.memory_bytes, intel.luid) == ("integrated", 0, "0:1")
    assert (card.id, card.arch, card.driver) == ("pci:0000:01:00.0", "sm_89", "581.29")
    assert card.luid == "0:2"
    assert engines(probe, card)[0] == "tensorrt-rtx"
    assert cpu.name == "13th Gen Intel(R) Core(TM) i7-13700K"


def test_two_equal_cards_are_joined_by_their_address() -> None:
    probe = windows(
        pnp("1002:744c", address="0000:03:00.0", service="amdkmdag"),
        pnp("1002:744c", address="0000:43:00.0", service="amdkmdag"),
        adapters=[
            dxgi("1002:744c", "AMD Radeon RX 7900 XTX", 24, luid="0:9", pci_address="0000:43:00.0"),
            dxgi("1002:744c", "AMD Radeon RX 7900 XTX", 23, luid="0:8", pci_address="0000:03:00.0"),
        ],
    )
    assert [device.luid for device in detect(probe)[:-1]] == ["0:8", "0:9"]


def test_an_adapter_listed_twice_is_one_device() -> None:
    card = dxgi("10de:2684", "NVIDIA GeForce RTX 4090", 24, luid="0:2")
    probe = windows(pnp("10de:2684"), adapters=[card, card])
    assert len(detect(probe)) == 2


def test_the_basic_display_driver_is_no_driver_in_any_language() -> None:
    for name in (
        "Microsoft Basic Display Adapter",
        "Microsoft 基本显示适配器",
        "Carte graphique de base",
    ):
        probe = windows(
            pnp("1002:7550", service="BasicDisplay", name=name, driver="10.0.26100.1"),
            adapters=[BASIC_RENDER],
        )
        gpu = detect(probe)[0]
        assert {problem.code for problem in gpu.problems} == {"no-driver"}
        assert (gpu.name, gpu.driver, gpu.arch) == (
            "Radeon RX 9070/9070 XT/9070 GRE",
            "",
            "gfx1201",
        )
        assert engines(probe, gpu) == []


def test_a_driver_in_another_language_changes_nothing() -> None:
    probe = windows(
        pnp(
            "8086:e20b",
            driver="32.0.101.6874",
            service="igfxnd",
            name="Графический адаптер Intel(R) Arc(TM) B580",
        ),
        adapters=[dxgi("8086:e20b", "Intel(R) Arc(TM) B580 グラフィックス", 11.9, luid="0:3")],
    )
    gpu = detect(probe)[0]
    assert (gpu.kind, gpu.arch) == ("discrete", "xe2-hpg")
    assert gpu.memory_bytes == int(11.9 * 2**30)
    assert engines(probe, gpu)[0] == "openvino"


@pytest.mark.parametrize("problem", [22, 43, 31, 999])
def test_a_card_that_windows_has_stopped_is_not_used(problem: int) -> None:
    probe = windows(pnp("10de:2684", service="nvlddmkm", problem=problem))
    gpu = detect(probe)[0]
    assert gpu.problems[0].code == "stopped"
    assert str(problem) in gpu.problems[0].message
    assert engines(probe, gpu) == []
    assert probe.asked == []


def test_a_virtual_machine_of_hyper_v_has_only_a_cpu() -> None:
    probe = windows(
        PnpDevice(instance_id=r"VMBUS\{DA0A7802-E377-4AAC-8E77-0558EB1073F8}"),
        pnp("1414:5353"),
        adapters=[BASIC_RENDER],
    )
    assert [device.id for device in detect(probe)] == ["cpu"]


def test_remote_and_indirect_displays_are_no_devices() -> None:
    probe = windows(
        PnpDevice(instance_id=r"ROOT\DISPLAY\0000", description="Parsec Virtual Display Adapter"),
        PnpDevice(instance_id=r"SWD\REMOTEDISPLAYENUM\RDPIDD_INDIRECTDISPLAY"),
        pnp("10de:2684", driver="32.0.15.8129", service="nvlddmkm"),
    )
    assert [device.pci_id for device in detect(probe)] == ["10de:2684", ""]


def test_an_adreno_is_known_from_dxgi_alone() -> None:
    probe = windows(
        PnpDevice(instance_id=r"ACPI\QCOM0C36\0"),
        adapters=[
            DxgiAdapter(
                description="Qualcomm(R) Adreno(TM) X1-85 GPU",
                vendor_id=0x4D4F4351,
                device_id=0x36334330,
                luid="0:1",
            )
        ],
        machine="ARM64",
    )
    gpu = detect(probe)[0]
    assert (gpu.maker, gpu.kind) == ("qualcomm", "integrated")
    assert engines(probe, gpu) == ["ggml-vulkan"]
    assert host(probe).platform == "windows-arm64"


def test_a_neural_processor_is_found_in_its_own_class() -> None:
    probe = windows(pnp("8086:643e", service="npu", pci_class="1200"))
    npu, cpu = detect(probe)
    assert (npu.kind, npu.memory_bytes) == ("npu", 0)
    assert cpu.problems[0].code == "no-gpu"


@pytest.mark.parametrize(
    ("pci_id", "name", "gib", "kind"),
    [
        ("1002:fffe", "AMD Radeon(TM) 990M", 4, "integrated"),
        ("1002:fffe", "AMD Radeon(TM) 8060S Graphics", 64, "integrated"),
        ("1002:fffe", "AMD Radeon RX 9990 XT", 32, "discrete"),
        ("8086:fffe", "Intel(R) Graphics", 0.125, "integrated"),
        ("8086:fffe", "Intel(R) Arc(TM) C990 Graphics", 24, "discrete"),
        ("10de:fffe", "NVIDIA GeForce RTX 9090", 0.5, "discrete"),
    ],
)
def test_the_kind_of_a_card_newer_than_the_table(
    pci_id: str, name: str, gib: float, kind: str
) -> None:
    probe = windows(
        pnp(pci_id, name=name, service="x"), adapters=[dxgi(pci_id, name, gib, luid="0:1")]
    )
    assert detect(probe)[0].kind == kind


def test_without_dxgi_setupapi_is_enough_and_the_other_way_round() -> None:
    assert detect(windows(pnp("10de:2684", service="nvlddmkm")))[0].memory_bytes is None
    only_dxgi = windows(adapters=[dxgi("10de:2684", "NVIDIA GeForce RTX 4090", 24, luid="0:2")])
    gpu = detect(only_dxgi)[0]
    assert (gpu.id, gpu.arch, gpu.memory_bytes) == ("luid:0:2", "sm_89", 24 * 2**30)


def test_a_windows_that_answers_nothing_is_a_cpu() -> None:
    probe = FakeProbe(platform=windows().platform)
    assert [device.id for device in detect(probe)] == ["cpu"]


def test_structures_have_the_sizes_of_the_windows_headers() -> None:
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        pytest.skip("the sizes are those of 64-bit Windows")
    assert ctypes.sizeof(library.AdapterDescription) == 312
    assert ctypes.sizeof(library.DeviceInfoData) == 32
    assert ctypes.sizeof(library.PropertyKey) == 20
    assert ctypes.sizeof(library.OpenAdapter) == 12
    assert ctypes.sizeof(library.AdapterQuery) == 24
    assert ctypes.sizeof(library.MemoryStatus) == 64


def test_an_adapter_description_is_read_field_by_field() -> None:
    raw = library.AdapterDescription(
        vendor_id=0x10DE,
        device_id=0x2684,
        dedicated_video=24 * 2**30,
        luid=library.Luid(low=0xC4F3, high=0),
        flags=2,
    )
    for index, letter in enumerate("GeForce €".encode("utf-16-le")[::2]):
        raw.description[index] = letter
    raw.description[8] = 0x20AC
    adapter = library.adapter_from_description(raw, "0000:01:00.0")
    assert adapter.description == "GeForce €"
    assert adapter.dedicated_bytes == 24 * 2**30
    assert (adapter.luid, adapter.is_software) == ("00000000:0000c4f3", True)


@pytest.mark.parametrize(
    ("bus", "place", "address"),
    [(1, 0, "0000:01:00.0"), (0, 2 << 16, "0000:00:02.0"), (0x10003, 0x1F0007, "0100:03:1f.7")],
)
def test_the_address_is_made_of_bus_and_place(bus: int, place: int, address: str) -> None:
    raw = [number.to_bytes(4, "little") for number in (bus, place)]
    assert library.address_from_properties(*raw) == address


@pytest.mark.parametrize("raw", [(b"", b""), (b"\xff" * 4, b"\0" * 4), (b"\0" * 4, b"\xff" * 4)])
def test_a_place_that_is_none_gives_no_address(raw: tuple[bytes, bytes]) -> None:
    assert library.address_from_properties(*raw) == ""


def test_lists_of_texts_end_with_an_empty_one() -> None:
    data = "PCI\\VEN_10DE\0PCI\\CC_0300\0\0".encode("utf-16-le")
    assert library.texts_from_utf16(data) == ("PCI\\VEN_10DE", "PCI\\CC_0300")
