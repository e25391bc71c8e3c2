"""Environment variables that hide devices, or say what they are."""

from __future__ import annotations

import pytest

from detect_machines import (
    Card,
    FakeProbe,
    amd_card,
    kfd_files,
    linux,
    nvml,
    nvml_gpu,
    with_env,
)
from sdkit_dispatch.detect import detect, host
from sdkit_dispatch.detect.answers import NvmlSlice
from sdkit_dispatch.detect.choice import gpu_choice
from sdkit_dispatch.detect.support import Candidate, engines_for


def two_nvidia() -> FakeProbe:
    return linux(
        Card(address="0000:01:00.0", pci_id="10de:2684", driver="nvidia"),
        Card(address="0000:02:00.0", pci_id="10de:2204", driver="nvidia"),
        nvml=nvml(
            nvml_gpu("00000000:01:00.0", "NVIDIA GeForce RTX 4090", (8, 9), 24),
            nvml_gpu("00000000:02:00.0", "NVIDIA GeForce RTX 3090", (8, 6), 24),
        ),
    )


def two_amd() -> FakeProbe:
    return linux(
        amd_card("0000:03:00.0", "1002:7550", render="renderD129"),
        amd_card("0000:0e:00.0", "1002:164e"),
        files=kfd_files((120001, "7550", "0000:03:00.0"), (100306, "164e", "0000:0e:00.0")),
    )


def hidden(probe: FakeProbe, code: str = "hidden") -> list[bool]:
    return [
        any(problem.code == code for problem in device.problems) for device in detect(probe)[:-1]
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", [False, True]),
        ("1", [True, False]),
        ("1,0", [False, False]),
        ("", [True, True]),
        ("-1", [True, True]),
        ("none", [True, True]),
        ("0,-1,1", [False, True]),
        ("7", [True, True]),
        ("GPU-00000000-02", [True, False]),
        ("GPU", [True, True]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(value: str, expected: list[bool]) -> None:
    assert hidden(with_env(two_nvidia(), CUDA_VISIBLE_DEVICES=value)) == expected


def test_a_hidden_gpu_stays_in_the_list_with_the_variable_named_and_serves_nothing() -> None:
    probe = with_env(two_nvidia(), CUDA_VISIBLE_DEVICES="1")
    first = detect(probe)[0]
    problem = next(p for p in first.problems if p.code == "hidden")
    assert "CUDA_VISIBLE_DEVICES=1" in problem.message
    assert problem.hint == "unset CUDA_VISIBLE_DEVICES"
    assert not [e for e in engines_for(first, host(probe)) if isinstance(e, Candidate)]


def test_a_slice_is_named_by_its_uuid() -> None:
    slices = tuple(
        NvmlSlice(uuid=f"MIG-{name * 8}", name="1g.10gb", memory_bytes=10 * 2**30) for name in "ab"
    )
    probe = linux(
        Card(address="0000:01:00.0", pci_id="10de:2330", driver="nvidia"),
        nvml=nvml(
            nvml_gpu("00000000:01:00.0", "NVIDIA H100", (9, 0), 80, is_mig=True, slices=slices)
        ),
        env={"CUDA_VISIBLE_DEVICES": "MIG-bbbbbbbb"},
    )
    assert hidden(probe) == [True, False, False]
    # Of a card's slices, an index reaches only the first.
    assert hidden(with_env(probe, CUDA_VISIBLE_DEVICES="0")) == [False, True, False]


def test_hip_numbers_what_rocr_has_left() -> None:
    assert hidden(with_env(two_amd(), HIP_VISIBLE_DEVICES="1")) == [True, False]
    assert hidden(with_env(two_amd(), ROCR_VISIBLE_DEVICES="1", HIP_VISIBLE_DEVICES="0")) == [
        True,
        False,
    ]
    assert hidden(with_env(two_amd(), ROCR_VISIBLE_DEVICES="1", HIP_VISIBLE_DEVICES="1")) == [
        True,
        True,
    ]


def test_rocr_names_cards_by_the_unique_id_of_the_kernel() -> None:
    probe = with_env(two_amd(), ROCR_VISIBLE_DEVICES="GPU-000000000000abc1")
    assert hidden(probe) == [False, True]


def test_cuda_visible_devices_hides_amd_cards_from_hip_but_not_from_vulkan() -> None:
    probe = with_env(two_amd(), CUDA_VISIBLE_DEVICES="-1")
    card = detect(probe)[0]
    names = [e.name for e in engines_for(card, host(probe)) if isinstance(e, Candidate)]
    assert names == ["ggml-vulkan", "sdcpp-vulkan"]
    assert hidden(with_env(probe, HIP_VISIBLE_DEVICES="0,1"), "hidden-from-hip") == [False, False]


def test_the_variable_of_one_maker_leaves_the_others_alone() -> None:
    probe = linux(
        Card(address="0000:01:00.0", pci_id="10de:2684", driver="nvidia"),
        Card(address="0000:03:00.0", pci_id="8086:e20b", driver="xe", render="renderD128"),
        nvml=nvml(nvml_gpu("00000000:01:00.0", "NVIDIA GeForce RTX 4090", (8, 9), 24)),
        env={"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"},
    )
    assert hidden(probe) == [True, False]


def test_the_vulkan_list_is_obeyed_where_its_numbers_can_be_known() -> None:
    one = linux(Card(address="0000:03:00.0", pci_id="8086:e20b", driver="xe", render="renderD128"))
    assert hidden(with_env(one, GGML_VK_VISIBLE_DEVICES="0"), "hidden-from-vulkan") == [False]
    assert hidden(with_env(one, GGML_VK_VISIBLE_DEVICES="1"), "hidden-from-vulkan") == [True]
    two = with_env(two_amd(), GGML_VK_VISIBLE_DEVICES="1")
    assert hidden(two, "hidden-from-vulkan") == [False, False]
    assert hidden(two, "vulkan-order") == [True, True]


def test_the_architecture_of_a_new_card_can_be_said() -> None:
    probe = linux(
        Card(address="0000:01:00.0", pci_id="10de:ffff", driver="nvidia"),
        env={"SDKIT_DISPATCH_ARCH": "10de:ffff=sm_120, 8086:1=xe9"},
    )
    gpu = detect(probe)[0]
    assert gpu.arch == "sm_120"
    assert gpu.sources["arch"] == "SDKIT_DISPATCH_ARCH"
    by_id = with_env(probe, SDKIT_DISPATCH_ARCH="pci:0000:01:00.0=sm_89")
    assert detect(by_id)[0].arch == "sm_89"


def test_the_gpu_variable_is_automatic_when_unset() -> None:
    assert gpu_choice({}) == "auto"
    assert gpu_choice({"SDKIT_DISPATCH_GPU": " gpu:1 "}) == "gpu:1"
