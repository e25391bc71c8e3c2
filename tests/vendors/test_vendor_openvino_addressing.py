"""Which OpenVINO device is which of ours; told from what its plugins say, so without hardware."""

from __future__ import annotations

import sys

import pytest

from sdkit_dispatch.contract import Device
from sdkit_openvino.addressing import OfferedDevice, find_device, luid_bytes, why_not_offered

PROCESSOR = OfferedDevice(name="CPU", full_name="AMD EPYC")
INTEGRATED = OfferedDevice(
    name="GPU.0",
    full_name="Intel(R) Graphics (iGPU)",
    pci_address="0000:00:02.0",
    luid="f3c4000000000000",
    device_id="7d55",
)
CARD = OfferedDevice(
    name="GPU.1",
    full_name="Intel(R) Arc(TM) B580 Graphics (dGPU)",
    pci_address="0000:03:00.0",
    luid="a1d0000000000000",
    uuid="8680 0be2".replace(" ", "") + "0" * 24,
    device_id="e20b",
)
OFFERED = (PROCESSOR, INTEGRATED, CARD)


def gpu(**known: str) -> Device:
    return Device(id="pci:0000:03:00.0", kind="discrete", maker="intel", name="Arc B580", **known)


def test_the_processor_is_cpu_whoever_made_it() -> None:
    device = Device(id="cpu", kind="cpu", maker="amd", name="EPYC")
    assert find_device(device, OFFERED) == PROCESSOR


@pytest.mark.parametrize(
    "known",
    [
        {"pci_address": "0000:03:00.0"},
        {"luid": "00000000:0000d0a1"},
        {"uuid": "86800be2-0000-0000-0000-000000000000"},
        {"pci_id": "8086:E20B"},
    ],
    ids=lambda known: next(iter(known)),
)
def test_a_card_is_found_by_whatever_is_known_of_it(known: dict[str, str]) -> None:
    assert find_device(gpu(**known), OFFERED) == CARD


def test_the_address_decides_between_two_equal_cards() -> None:
    twin = OfferedDevice(name="GPU.2", pci_address="0000:04:00.0", device_id="e20b")
    device = gpu(pci_address="0000:04:00.0", pci_id="8086:e20b")
    assert find_device(device, (*OFFERED, twin)) == twin


def test_two_equal_cards_without_an_address_are_not_guessed_between() -> None:
    twin = OfferedDevice(name="GPU.2", device_id="e20b")
    assert find_device(gpu(pci_id="8086:e20b"), (*OFFERED, twin)) is None


def test_a_card_of_another_maker_is_none_of_them() -> None:
    device = Device(
        id="pci:0000:05:00.0",
        kind="discrete",
        maker="nvidia",
        name="RTX",
        pci_address="0000:05:00.0",
        pci_id="10de:2684",
    )
    assert find_device(device, OFFERED) is None
    answer = why_not_offered(device, OFFERED, "")
    assert answer.code == "device-not-found"
    assert "GPU.1 at 0000:03:00.0" in answer.reason


def test_an_npu_is_no_gpu() -> None:
    device = Device(
        id="pci:0000:00:0b.0", kind="npu", maker="intel", name="NPU", pci_address="0000:03:00.0"
    )
    assert find_device(device, OFFERED) is None


def test_a_luid_is_written_byte_by_byte_as_memory_holds_it() -> None:
    assert luid_bytes("00000000:0000c4f3") == "f3c4000000000000"
    assert luid_bytes("luid:00000001:0000c4f3") == "f3c4000001000000"
    assert luid_bytes("") == ""


@pytest.mark.parametrize(
    ("kind", "words", "code"),
    [
        ("discrete", "Cannot load library: libOpenCL.so.1: cannot open", "no-opencl-loader"),
        ("integrated", "Can't get X property as no supported devices found", "no-gpu-driver"),
        ("npu", "No available backend", "no-npu-driver"),
    ],
)
def test_an_absent_family_is_explained_with_what_would_help(
    kind: str, words: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    device = Device(id="pci:0000:00:02.0", kind=kind, maker="intel", name="Graphics")  # type: ignore[arg-type]
    answer = why_not_offered(device, (PROCESSOR,), words)
    assert answer.code == code
    assert words in answer.reason
    assert answer.hint
