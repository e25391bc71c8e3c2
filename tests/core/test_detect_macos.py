"""Macs: Apple chips from sysctl alone, Intel ones with their reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from detect_machines import mac
from sdkit_dispatch.detect import detect, host
from sdkit_dispatch.detect.cpu import integer_from_sysctl
from sdkit_dispatch.detect.support import Candidate, engines_for


@pytest.mark.parametrize(
    ("brand", "arch"), [("Apple M1", "apple-m1"), ("Apple M4 Pro", "apple-m4"), ("Apple", "")]
)
def test_an_apple_chip_needs_no_tool(brand: str, arch: str) -> None:
    probe = mac(brand=brand)
    gpu, cpu = detect(probe)
    assert (gpu.id, gpu.arch, gpu.memory_bytes, gpu.problems) == ("metal:0", arch, 0, ())
    assert (cpu.name, cpu.memory_bytes, cpu.arch) == (brand, 36 * 2**30, "arm64")
    assert probe.asked == []
    engines = [e.name for e in engines_for(gpu, host(probe)) if isinstance(e, Candidate)]
    assert engines == ["ggml-metal"]


def test_the_cpu_of_an_apple_chip_is_served_by_openvino() -> None:
    probe = mac(brand="Apple M2")
    engines = [e for e in engines_for(detect(probe)[-1], host(probe)) if isinstance(e, Candidate)]
    assert engines[0].name == "openvino"


def test_an_x86_python_on_an_apple_chip_keeps_metal_and_loses_arm_wheels() -> None:
    probe = mac(
        brand="Apple M3 Max",
        machine="x86_64",
        sysctls={"sysctl.proc_translated": b"1\n", "hw.optional.arm64": b"1\n"},
    )
    assert host(probe).is_translated
    gpu, cpu = detect(probe)
    assert [problem.code for problem in gpu.problems] == ["rosetta"]
    no = next(e for e in engines_for(cpu, host(probe)) if getattr(e, "vendor", "") == "openvino")
    assert (no.code, no.hint) == ("platform", "use an arm64 Python")


def test_an_intel_mac_with_two_gpus_names_both_and_uses_neither() -> None:
    probe = mac(
        brand="Intel(R) Core(TM) i9-9980HK CPU @ 2.40GHz",
        machine="x86_64",
        sysctls={"hw.model": b"MacBookPro16,1\0"},
        displays=[
            {
                "sppci_model": "Intel UHD Graphics 630",
                "spdisplays_vendor": "Intel",
                "spdisplays_device-id": "0x3e9b",
            },
            {
                "sppci_model": "AMD Radeon Pro 5500M",
                "spdisplays_vendor": "sppci_vendor_amd",
                "spdisplays_device-id": "0x7340",
                "spdisplays_vram": "8 GB",
            },
        ],
    )
    intel, amd, _ = detect(probe)
    assert (intel.kind, intel.pci_id) == ("integrated", "8086:3e9b")
    assert (amd.kind, amd.pci_id, amd.memory_bytes) == ("discrete", "1002:7340", 8 * 2**30)
    for gpu in (intel, amd):
        assert gpu.problems[0].code == "intel-mac"
        assert not [e for e in engines_for(gpu, host(probe)) if isinstance(e, Candidate)]


def test_an_intel_mac_whose_profiler_fails_still_has_its_cpu() -> None:
    probe = mac(brand="Intel(R) Core(TM) i5", machine="x86_64", sysctls={"hw.model": b"iMac19,1\0"})
    (cpu,) = detect(replace(probe, outputs={}))
    assert "iMac19,1" in cpu.problems[0].message


def test_metal_in_a_virtual_machine_is_reported() -> None:
    probe = mac(brand="Apple M1 (Virtual)", sysctls={"kern.hv_vmm_present": b"\1\0\0\0"})
    assert [problem.code for problem in detect(probe)[0].problems] == ["virtual-machine"]


@pytest.mark.parametrize(
    ("raw", "value"),
    [(b"\1\0\0\0", 1), (b"\0" * 7 + b"\1", 1 << 56), (b"1\n", 1), (b"", None), (b"\1\2\3", None)],
)
def test_sysctl_integers_are_raw_or_text(raw: bytes, value: int | None) -> None:
    assert integer_from_sysctl(raw) == value
