"""Every machine of data/detect/reports.json: public bug reports, and what must be said of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from detect_machines import (
    BASIC_RENDER,
    Card,
    FakeProbe,
    amd_card,
    dxgi,
    kfd_files,
    linux,
    mac,
    nvml,
    nvml_gpu,
    pnp,
    windows,
    wsl,
)
from sdkit_dispatch.contract import Device, Problem, VendorSpec
from sdkit_dispatch.detect import detect, host
from sdkit_dispatch.detect.answers import NvmlSlice
from sdkit_dispatch.detect.support import Candidate, engines_for, support_table
from sdkit_dispatch.env import find_vendors
from sdkit_dispatch.plan import Decision, make_plans

REPORTS = {
    report["id"]: report
    for report in json.loads(
        (Path(__file__).parent / "data/detect/reports.json").read_text(encoding="utf-8")
    )["fixtures"]
}
CPU_ENGINES = {"openvino", "cpu", "ggml-cpu"}
"""On a CPU-only machine any of these is right."""
EQUALS = {"tensorrt": "tensorrt-rtx"}
"""Both fit; either may come first."""


def nvidia(address: str, pci_id: str, pci_class: int = 0x030000) -> Card:
    return Card(address=address, pci_id=pci_id, driver="nvidia", pci_class=pci_class)


MACHINES: dict[str, Callable[[], FakeProbe]] = {
    "rx9070xt-unknown-id": lambda: windows(pnp("1002:7550", service="amdwddmg")),
    "a10-3d-controller": lambda: linux(
        nvidia("0000:00:06.0", "10de:2236", 0x030200),
        nvml=nvml(nvml_gpu("00000000:00:06.0", "NVIDIA A10", (8, 6), 22.5)),
    ),
    "h200x8": lambda: linux(
        *(nvidia(f"0000:{bus:02x}:00.0", "10de:2335", 0x030200) for bus in range(0x1B, 0x23)),
        nvml=nvml(
            *(
                nvml_gpu(f"00000000:{bus:02X}:00.0", "NVIDIA H200", (9, 0), 140.4)
                for bus in range(0x1B, 0x23)
            )
        ),
    ),
    "rtx5060ti-wmi-4gb": lambda: windows(
        pnp(
            "10de:2d04",
            driver="32.0.15.7652",
            service="nvlddmkm",
            name="NVIDIA GeForce RTX 5060 Ti",
        ),
        adapters=[
            dxgi("10de:2d04", "NVIDIA GeForce RTX 5060 Ti", 15.7, luid="0:1"),
            BASIC_RENDER,
        ],
    ),
    "macpro2013": lambda: mac(
        brand="Intel(R) Xeon(R) CPU E5-1650 v2 @ 3.50GHz",
        machine="x86_64",
        sysctls={"hw.model": b"MacPro6,1\0"},
        displays=[
            {
                "sppci_model": f"AMD FirePro {model}",
                "spdisplays_vendor": "sppci_vendor_amd",
                "spdisplays_vram": "3 GB",
            }
            for model in ("D500", "D500")
        ],
    ),
    "wsl2-two-gpu-smi": lambda: wsl(outputs={"nvidia-smi": b"572.60\n572.60\n"}),
    "igpu-shared-mem-wins": lambda: windows(
        pnp("8086:a788", driver="32.0.101.6078", service="igfxn", name="Intel(R) UHD Graphics"),
        pnp("10de:27e0", driver="32.0.15.8097", service="nvlddmkm"),
        adapters=[
            dxgi("8086:a788", "Intel(R) UHD Graphics", 0.125, luid="0:1", shared_gib=31.8),
            dxgi("10de:27e0", "NVIDIA GeForce RTX 4080 Laptop GPU", 12, luid="0:2"),
        ],
    ),
    "h100nvl-mig": lambda: linux(
        nvidia("0000:01:00.0", "10de:2321", 0x030200),
        nvml=nvml(
            nvml_gpu(
                "00000000:01:00.0",
                "NVIDIA H100 NVL",
                (9, 0),
                93.6,
                is_mig=True,
                slices=(NvmlSlice(uuid="MIG-xxxx", name="1g.24gb", memory_bytes=23 * 2**30),),
            )
        ),
    ),
    "card0-simple-framebuffer": lambda: linux(
        nvidia("0000:00:1e.0", "10de:2237", 0x030200),
        links={
            "/sys/class/drm/card0/device": "../../../simple-framebuffer.0",
            "/sys/class/drm/card1/device": "../../../0000:00:1e.0",
        },
        nvml=nvml(nvml_gpu("00000000:00:1E.0", "NVIDIA A10G", (8, 6), 22.5)),
    ),
    "wsl2-nvidia": lambda: wsl(
        nvml=nvml(nvml_gpu("00000000:01:00.0", "NVIDIA GeForce RTX 3090", (8, 6), 24)),
    ),
    "container-no-kfd": lambda: linux(
        amd_card("0000:03:00.0", "1002:744c", pci_class=0x038000), files={"/.dockerenv": b""}
    ),
    "raphael-hides-navi48": lambda: linux(
        amd_card("0000:03:00.0", "1002:7550", render="renderD129", vram_bytes=16 * 2**30),
        amd_card("0000:0e:00.0", "1002:164e", vram_bytes=512 * 2**20),
        files=kfd_files((100306, "164e", "0000:0e:00.0"), (120001, "7550", "0000:03:00.0")),
    ),
    "apu-780m-gfx1103": lambda: linux(
        amd_card("0000:c4:00.0", "1002:15bf", vram_bytes=4 * 2**30),
        files=kfd_files((110003, "15bf", "0000:c4:00.0")),
    ),
    "turing-trt-rtx": lambda: linux(
        nvidia("0000:01:00.0", "10de:1e04"),
        nvml=nvml(nvml_gpu("00000000:01:00.0", "NVIDIA GeForce RTX 2080 Ti", (7, 5), 11)),
    ),
    "intel-igpu-plus-b580": lambda: linux(
        Card(address="0000:00:02.0", pci_id="8086:a780", driver="i915", render="renderD128"),
        Card(address="0000:03:00.0", pci_id="8086:e20b", driver="xe", render="renderD129"),
        release="6.14.0-15-generic",
    ),
    "vfio-bound-dgpu": lambda: linux(
        Card(address="0000:00:02.0", pci_id="8086:3e92", driver="i915", render="renderD128"),
        Card(address="0000:01:00.0", pci_id="10de:1b06", driver="vfio-pci"),
    ),
    "no-gpu-vm": lambda: linux(
        *(
            Card(
                address=f"0000:00:0{index}.0",
                pci_id=f"1af4:{device}",
                driver="virtio-pci",
                pci_class=pci_class,
            )
            for index, (device, pci_class) in enumerate(
                (("1045", 0xFFFF00), ("1042", 0x018000), ("1041", 0x020000), ("1053", 0xFFFF00)), 1
            )
        )
    ),
    "llvmpipe-only": lambda: linux(),
    "rosetta-m3": lambda: mac(
        brand="Apple M3 Max",
        machine="x86_64",
        sysctls={
            "sysctl.proc_translated": (1).to_bytes(4, "little"),
            "hw.optional.arm64": (1).to_bytes(4, "little"),
        },
    ),
    "raphael-runtime-lies": lambda: linux(
        amd_card("0000:03:00.0", "1002:744c", render="renderD129", vram_bytes=24 * 2**30),
        amd_card("0000:0e:00.0", "1002:164e", vram_bytes=512 * 2**20),
        files=kfd_files((100306, "164e", "0000:0e:00.0"), (110000, "744c", "0000:03:00.0"))
        | {"/opt/rocm/.info/version": b"7.2.4-42\n"},
    ),
    "wsl2-780m-llvmpipe": lambda: wsl(
        files={"/usr/lib/wsl/drivers/u0412345.inf_amd64_0123456789abcdef/amdxc64.so": b""}
    ),
    "immich-rx6600-override": lambda: linux(
        amd_card("0000:03:00.0", "1002:73ff", vram_bytes=8 * 2**30),
        files=kfd_files((100302, "73ff", "0000:03:00.0")),
        env={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"},
    ),
}


def specs_of_the_table() -> list[VendorSpec]:
    """A vendor for every engine of the support table, with the table's rank if it has any."""
    rows, _ = support_table()
    unranked = {spec.name for spec in find_vendors().values() if spec.rank is None}
    return [
        VendorSpec(
            name=row.engine,
            extra=row.engine,
            adapter="none:None",
            device_kinds=("discrete", "integrated", "npu", "cpu"),
            revision=1,
            rank=None if row.engine in unranked else row.rank,
        )
        for row in {row.engine: row for row in reversed(rows)}.values()
    ]


def best(probe: FakeProbe) -> tuple[Device, list[str], Decision]:
    """The device that the plan puts first, the engines for it, and the whole decision."""
    machine = host(probe)
    decision = make_plans(detect(probe), machine, specs_of_the_table(), probe=never)
    first = decision.plans[0]
    names = [e for e in engines_for(first.device, machine) if isinstance(e, Candidate)]
    assert names[0].engine == first.vendor
    return first.device, [engine.name for engine in names], decision


def never(*_: object) -> Any:
    raise AssertionError("nothing is installed, so nothing may be asked")


def all_problems(probe: FakeProbe) -> list[Problem]:
    return [problem for device in detect(probe) for problem in device.problems]


def text_of(probe: FakeProbe) -> str:
    return " ".join(f"{problem.message} {problem.hint}" for problem in all_problems(probe))


def test_every_report_has_a_machine() -> None:
    assert set(MACHINES) == set(REPORTS)


@pytest.mark.parametrize("name", sorted(REPORTS))
def test_the_right_device_and_engine_come_first(name: str) -> None:
    expect = REPORTS[name]["expect"]
    probe = MACHINES[name]()
    device, engines, _ = best(probe)

    wanted = [engine for engine in expect.get("engines", []) if not engine.endswith("?")]
    if wanted:
        first = wanted[0]
        if first == "ggml-cpu":
            assert device.kind == "cpu"
            assert engines[0] in CPU_ENGINES
        else:
            assert EQUALS.get(engines[0], engines[0]) == EQUALS.get(first, first)
    elif expect["vendor"] is not None and "cc" not in expect:
        device = detect(probe)[0]  # the report says too little of the card to choose an engine
    if expect.get("engines") != ["ggml-cpu"] and expect["vendor"] is not None:
        assert device.maker == expect["vendor"]
    if "arch" in expect:
        assert device.arch == expect["arch"]
    if "cc" in expect:
        assert device.arch == "sm_" + expect["cc"].replace(".", "")
    if "driver" in expect:
        assert device.driver == expect["driver"]
    for engine in expect.get("not_engines", []):
        assert engine not in engines


@pytest.mark.parametrize("name", sorted(REPORTS))
def test_the_cpu_is_always_there_and_last(name: str) -> None:
    devices = detect(MACHINES[name]())
    assert [device.kind for device in devices].count("cpu") == 1
    assert devices[-1].id == "cpu"


@pytest.mark.parametrize("name", sorted(REPORTS))
def test_ids_of_devices_are_unique(name: str) -> None:
    ids = [device.id for device in detect(MACHINES[name]())]
    assert len(ids) == len(set(ids))


def test_a_machine_without_a_vendor_gets_only_its_cpu() -> None:
    for name, report in REPORTS.items():
        if report["expect"]["vendor"] is None:
            assert [device.id for device in detect(MACHINES[name]())] == ["cpu"]


def test_the_memory_of_the_5060_ti_is_not_the_one_of_wmi() -> None:
    gpu = detect(MACHINES["rtx5060ti-wmi-4gb"]())[0]
    assert gpu.memory_bytes == int(15.7 * 2**30)
    assert gpu.sources["memory_bytes"] == "DXGI"


def test_a_driver_below_580_gets_the_cuda_12_build_and_the_advice_to_update() -> None:
    probe = MACHINES["rtx5060ti-wmi-4gb"]()
    gpu = detect(probe)[0]
    first = engines_for(gpu, host(probe))[0]
    assert isinstance(first, Candidate)
    assert first.variant == "cu12"
    assert any("580" in caution for caution in first.cautions)
    assert any("580" in remedy for remedy in first.remedies)


def test_the_intel_mac_says_why_its_cards_are_not_used() -> None:
    devices = detect(MACHINES["macpro2013"]())
    assert [device.maker for device in devices[:2]] == ["amd", "amd"]
    assert devices[0].memory_bytes == 3 * 2**30
    assert "MacPro6,1" in text_of(MACHINES["macpro2013"]())


def test_two_lines_of_nvidia_smi_are_two_gpus() -> None:
    devices = detect(MACHINES["wsl2-two-gpu-smi"]())
    assert [device.driver for device in devices[:-1]] == ["572.60", "572.60"]


def test_the_mig_slice_is_the_device_and_its_parent_is_not() -> None:
    probe = MACHINES["h100nvl-mig"]()
    device, _, _ = best(probe)
    assert device.id == "uuid:MIG-xxxx"
    assert device.memory_bytes == 23 * 2**30
    parent = next(device for device in detect(probe) if device.id == "pci:0000:01:00.0")
    verdicts = engines_for(parent, host(probe))
    assert not any(isinstance(verdict, Candidate) for verdict in verdicts)


def test_in_wsl_the_facts_come_from_nvml() -> None:
    gpu = detect(MACHINES["wsl2-nvidia"]())[0]
    assert set(gpu.sources.values()) == {"NVML"}
    assert gpu.id.startswith("uuid:GPU-")


def test_a_missing_kfd_names_the_device_node_and_the_group() -> None:
    text = text_of(MACHINES["container-no-kfd"]())
    assert "--device=/dev/kfd" in text
    assert "render" in text


def test_the_780m_needs_the_rocm_that_supports_it() -> None:
    probe = MACHINES["apu-780m-gfx1103"]()
    gpu = detect(probe)[0]
    no = next(e for e in engines_for(gpu, host(probe)) if getattr(e, "vendor", "") == "migraphx")
    assert "gfx1103" in no.reason
    assert "10.2" in no.hint
    newer = linux(
        amd_card("0000:c4:00.0", "1002:15bf"),
        files=kfd_files((110003, "15bf", "0000:c4:00.0"))
        | {"/opt/rocm/.info/version": b"10.2.0\n"},
    )
    assert best(newer)[1][0] == "migraphx"


def test_turing_ranks_tensorrt_rtx_last_and_wants_the_numeric_check() -> None:
    _, engines, _ = best(MACHINES["turing-trt-rtx"]())
    assert engines.index("tensorrt-rtx") > engines.index("cuda")
    gpu = detect(MACHINES["turing-trt-rtx"]())[0]
    candidate = next(
        e
        for e in engines_for(gpu, host(MACHINES["turing-trt-rtx"]()))
        if isinstance(e, Candidate) and e.engine == "tensorrt-rtx"
    )
    assert any("numeric check" in caution for caution in candidate.cautions)


def test_the_b580_beats_the_integrated_gpu_of_the_same_maker() -> None:
    assert best(MACHINES["intel-igpu-plus-b580"]())[0].pci_id == "8086:e20b"


def test_a_card_set_aside_for_a_virtual_machine_is_named_and_not_used() -> None:
    assert "10de:1b06 is bound to vfio-pci" in text_of(MACHINES["vfio-bound-dgpu"]())


def test_without_a_gpu_the_cpu_says_why() -> None:
    assert "no display-class PCI device" in text_of(MACHINES["no-gpu-vm"]())
    assert "llvmpipe" in text_of(MACHINES["wsl2-780m-llvmpipe"]())
    assert "AMD" in text_of(MACHINES["wsl2-780m-llvmpipe"]())


def test_python_under_rosetta_is_told_so() -> None:
    assert "Rosetta" in text_of(MACHINES["rosetta-m3"]())


def test_kfd_names_the_integrated_gpu_truly() -> None:
    devices = {device.pci_id: device for device in detect(MACHINES["raphael-runtime-lies"]())}
    assert devices["1002:164e"].arch == "gfx1036"
    assert devices["1002:164e"].sources["arch"] == "KFD"


def test_an_override_is_reported_and_does_not_change_the_architecture() -> None:
    problem = next(
        p for p in all_problems(MACHINES["immich-rx6600-override"]()) if p.code == "hsa-override"
    )
    assert "gfx1032" in problem.message


@pytest.mark.parametrize("name", sorted(REPORTS))
def test_every_pair_of_device_and_vendor_is_a_plan_or_has_one_reason(name: str) -> None:
    probe = MACHINES[name]()
    decision = best(probe)[2]
    pairs = [(no.device, no.vendor) for no in decision.rejections]
    pairs += [(plan.device.id, plan.vendor) for plan in decision.plans]
    assert len(pairs) == len(set(pairs))
    assert {device for device, _ in pairs} == {device.id for device in detect(probe)}
    assert all(rejection.code and rejection.reason for rejection in decision.rejections)
