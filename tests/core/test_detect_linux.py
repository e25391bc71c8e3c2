"""Linux machines beyond the public reports: what is found, and what is said of it."""

from __future__ import annotations

import pytest

from detect_machines import (
    PCI,
    Card,
    FakeProbe,
    amd_card,
    kfd_files,
    linux,
    nvml,
    nvml_gpu,
    wsl,
)
from sdkit_dispatch.contract import Device
from sdkit_dispatch.detect import detect, host
from sdkit_dispatch.detect.answers import NvmlGpu, NvmlReport, NvmlSlice
from sdkit_dispatch.detect.support import Candidate, engines_for

ROCMINFO = b"""ROCk module is NOT loaded
=====================
HSA Agents
=====================
*******
Agent 1
*******
  Name:                    AMD Ryzen 9 7950X
  Marketing Name:          AMD Ryzen 9 7950X
  Device Type:             CPU
*******
Agent 2
*******
  Name:                    gfx1100
  Uuid:                    GPU-18d7b4d1f0a9c3e2
  Marketing Name:          AMD Radeon RX 7900 XTX
  Vendor Name:             AMD
  Device Type:             GPU
  Chip ID:                 29772(0x744c)
  Pool Info:
    Pool 1
      Segment:                 GLOBAL; FLAGS: COARSE GRAINED
      Size:                    25149440(0x17fc000) KB
*** Done ***
"""


def codes(device: Device) -> set[str]:
    return {problem.code for problem in device.problems}


def engines(probe: FakeProbe, device: Device) -> list[str]:
    return [e.name for e in engines_for(device, host(probe)) if isinstance(e, Candidate)]


def nvidia(address: str, pci_id: str, **rest: object) -> Card:
    return Card(address=address, pci_id=pci_id, driver="nvidia", **rest)  # type: ignore[arg-type]


def test_within_wsl_rocminfo_knows_the_amd_card() -> None:
    probe = wsl(
        files={"/opt/rocm/bin/rocminfo": b"", "/opt/rocm/.info/version": b"10.0.1\n"},
        outputs={"rocminfo": ROCMINFO},
    )
    gpu = detect(probe)[0]
    assert (gpu.maker, gpu.arch, gpu.kind) == ("amd", "gfx1100", "discrete")
    assert gpu.id == "uuid:GPU-18d7b4d1f0a9c3e2"
    assert gpu.memory_bytes == 25149440 * 1024
    assert engines(probe, gpu) == ["migraphx"]
    assert "env HSA_ENABLE_DXG_DETECTION=1 /opt/rocm/bin/rocminfo" in probe.asked


def test_rocminfo_is_found_on_the_path_and_obeys_a_variable_that_is_set() -> None:
    probe = wsl(outputs={"rocminfo": ROCMINFO}, env={"HSA_ENABLE_DXG_DETECTION": "1"})
    assert detect(probe)[0].arch == "gfx1100"
    assert probe.asked[-1] == "rocminfo"


def test_wsl_1_says_that_wsl_2_is_needed() -> None:
    probe = linux(release="4.4.0-19041-Microsoft")
    (cpu,) = detect(probe)
    assert host(probe).is_wsl
    assert "WSL 2" in cpu.problems[0].hint or "--set-version" in cpu.problems[0].hint


def test_a_slice_without_a_memory_figure_is_still_a_device() -> None:
    report = nvml(
        nvml_gpu(
            "00000000:01:00.0",
            "NVIDIA A100-SXM4-40GB",
            (8, 0),
            None,
            is_mig=True,
            slices=(NvmlSlice(uuid="MIG-1", name="1g.5gb", memory_bytes=None),),
        )
    )
    probe = linux(nvidia("0000:01:00.0", "10de:20b0", pci_class=0x030200), nvml=report)
    first = detect(probe)[0]
    assert first.id == "uuid:MIG-1"
    assert first.memory_bytes is None
    assert engines(probe, first)[0] == "tensorrt"
    assert "ggml-vulkan" not in engines(probe, first)


def test_mig_mode_without_slices_says_how_to_make_one() -> None:
    report = nvml(nvml_gpu("00000000:01:00.0", "NVIDIA A100", (8, 0), 40, is_mig=True))
    probe = linux(nvidia("0000:01:00.0", "10de:20b0"), nvml=report)
    gpu = detect(probe)[0]
    assert codes(gpu) == {"mig-parent"}
    assert "nvidia-smi mig" in gpu.problems[0].hint
    assert engines(probe, gpu) == []


def test_nvidia_smi_lists_slices_where_nvml_cannot_be_loaded() -> None:
    class SmiProbe(FakeProbe):
        def run(self, command, timeout_s):  # type: ignore[no-untyped-def]
            from sdkit_dispatch.detect.answers import RunResult

            if "-L" in command:
                return RunResult(
                    code=0,
                    stdout=b"GPU 0: NVIDIA H100 NVL (UUID: GPU-aaaa)\n"
                    b"  MIG 1g.24gb     Device  0: (UUID: MIG-bbbb)\n"
                    b"  MIG 2g.47gb     Device  1: (UUID: MIG-cccc)\n",
                )
            return RunResult(
                code=0,
                stdout=b"00000000:01:00.0, 0x232110DE, NVIDIA H100 NVL, GPU-aaaa, 570.86.15, "
                b"[N/A], Enabled, 9.0\n",
            )

    base = linux(nvidia("0000:01:00.0", "10de:2321"))
    devices = detect(SmiProbe(**vars(base)))
    assert [device.id for device in devices] == [
        "uuid:MIG-bbbb",
        "uuid:MIG-cccc",
        "pci:0000:01:00.0",
        "cpu",
    ]
    assert devices[1].memory_bytes == 47 * 2**30
    assert devices[0].driver == "570.86.15"


def test_two_generations_of_nvidia_each_get_what_they_can() -> None:
    probe = linux(
        nvidia("0000:01:00.0", "10de:1b06"),
        nvidia("0000:02:00.0", "10de:2684"),
        nvml=nvml(
            nvml_gpu("00000000:01:00.0", "NVIDIA GeForce GTX 1080 Ti", (6, 1), 11),
            nvml_gpu("00000000:02:00.0", "NVIDIA GeForce RTX 4090", (8, 9), 24),
        ),
    )
    old, new, _ = detect(probe)
    assert engines(probe, old) == ["ggml-vulkan", "sdcpp-vulkan"]
    assert engines(probe, new)[0] == "tensorrt-rtx"


def test_an_optimus_laptop_has_both_gpus() -> None:
    probe = linux(
        Card(address="0000:00:02.0", pci_id="8086:46a6", driver="i915", render="renderD128"),
        nvidia("0000:01:00.0", "10de:25a2", pci_class=0x030200),
        nvml=nvml(nvml_gpu("00000000:01:00.0", "NVIDIA GeForce RTX 3050 Laptop GPU", (8, 6), 4)),
    )
    intel, card, _ = detect(probe)
    assert (intel.kind, intel.memory_bytes) == ("integrated", 0)
    assert (card.kind, card.arch) == ("discrete", "sm_86")
    assert card.problems == ()


def test_an_external_gpu_is_a_discrete_one_that_can_be_unplugged() -> None:
    probe = linux(
        Card(address="0000:00:02.0", pci_id="8086:9a49", driver="i915", render="renderD128"),
        nvidia("0000:07:00.0", "10de:2206", is_external=True),
        nvml=nvml(nvml_gpu("00000000:07:00.0", "NVIDIA GeForce RTX 3080", (8, 6), 10)),
    )
    card = detect(probe)[1]
    assert codes(card) == {"external"}
    assert engines(probe, card)[0] == "tensorrt-rtx"


def test_arc_on_an_old_kernel_is_told_which_one_it_needs() -> None:
    probe = linux(
        Card(address="0000:04:00.0", pci_id="8086:56a0", driver="i915", render="renderD128"),
        release="5.17.0-051700-generic",
    )
    arc = detect(probe)[0]
    no = next(e for e in engines_for(arc, host(probe)) if getattr(e, "vendor", "") == "openvino")
    assert no.code == "kernel-too-old"
    assert "6.2" in no.reason


def test_a_neural_processor_alone_leaves_the_cpu_as_the_choice() -> None:
    probe = linux(
        Card(address="0000:00:0b.0", pci_id="8086:643e", driver="intel_vpu", pci_class=0x120000)
    )
    npu, cpu = detect(probe)
    assert (npu.kind, npu.arch, npu.memory_bytes) == ("npu", "npu4000", 0)
    assert engines(probe, npu) == ["openvino"]
    assert {problem.code for problem in cpu.problems} == {"no-gpu"}


def test_the_neural_processor_of_amd_calls_itself_signal_processing() -> None:
    probe = linux(
        Card(address="0000:c5:00.1", pci_id="1022:17f0", driver="amdxdna", pci_class=0x118000)
    )
    npu = detect(probe)[0]
    assert (npu.kind, npu.maker) == ("npu", "amd")
    assert engines(probe, npu) == []


def test_an_instinct_is_a_gpu_although_its_class_is_accelerator() -> None:
    probe = linux(
        Card(
            address="0001:03:00.0",
            pci_id="1002:74a1",
            driver="amdgpu",
            pci_class=0x120000,
            render="renderD128",
            vram_bytes=192 * 2**30,
        ),
        files=kfd_files((90402, "74a1", "0001:03:00.0")) | {"/opt/rocm/.info/version": b"10.1.0"},
    )
    gpu = detect(probe)[0]
    assert (gpu.kind, gpu.arch) == ("discrete", "gfx942")
    assert engines(probe, gpu)[0] == "migraphx"


def test_a_raspberry_pi_is_a_cpu_with_its_board_and_core_named() -> None:
    cpuinfo = (
        b"processor\t: 0\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n"
        b"CPU part\t: 0xd0b\n\nRevision\t: d04170\nModel\t\t: Raspberry Pi 5 Model B Rev 1.0\n"
    )
    probe = linux(
        machine="aarch64",
        libc="glibc 2.36",
        files={"/proc/cpuinfo": cpuinfo, "/sys/class/drm/card0/dev": b""},
        links={"/sys/class/drm/card0/device/driver": "../../../bus/platform/drivers/v3d"},
    )
    (cpu,) = detect(probe)
    assert cpu.name == "Raspberry Pi 5 Model B Rev 1.0 / Cortex-A76"
    assert (cpu.arch, cpu.maker) == ("arm64", "arm")
    assert "v3d" in cpu.problems[0].message
    assert engines(probe, cpu)[0] == "openvino"


def test_a_32_bit_userland_on_a_64_bit_kernel_is_called_by_what_it_runs() -> None:
    from dataclasses import replace

    probe = linux(machine="aarch64")
    probe = replace(probe, platform=replace(probe.platform, pointer_bits=32))
    assert host(probe).arch == "armv7l"
    assert engines(probe, detect(probe)[0]) == ["ggml-cpu"]


def test_a_container_without_drm_still_finds_the_card_on_pci() -> None:
    probe = linux(
        nvidia("0000:01:00.0", "10de:2204"),
        files={"/.dockerenv": b""},
        nvml=nvml(nvml_gpu("00000000:01:00.0", "NVIDIA GeForce RTX 3090", (8, 6), 24)),
    )
    assert not probe.listdir("/sys/class/drm")
    assert detect(probe)[0].id == "pci:0000:01:00.0"


def test_a_container_without_any_sys_believes_nvml() -> None:
    probe = linux(
        files={"/dev/nvidiactl": b""},
        nvml=nvml(nvml_gpu("00000000:01:00.0", "NVIDIA L4", (8, 9), 22)),
    )
    gpu = detect(probe)[0]
    assert (gpu.id, gpu.arch) == ("pci:0000:01:00.0", "sm_89")


def test_a_container_without_the_nvidia_toolkit_is_told_the_flag() -> None:
    probe = linux(
        Card(address="0000:01:00.0", pci_id="10de:2204", driver=None),
        files={"/.dockerenv": b""},
        links={f"{PCI}/0000:01:00.0/driver": "../../../../bus/pci/drivers/nvidia"},
    )
    gpu = detect(probe)[0]
    assert codes(gpu) == {"not-in-container"}
    assert "--gpus all" in gpu.problems[0].hint
    assert engines(probe, gpu) == []


def test_without_nvml_the_table_and_the_kernel_module_speak() -> None:
    probe = linux(
        nvidia("0000:01:00.0", "10de:2684"),
        files={
            "/proc/driver/nvidia/version": b"NVRM version: NVIDIA UNIX Open Kernel Module "
            b"for x86_64  550.107.02  Release Build\n"
        },
    )
    gpu = detect(probe)[0]
    assert (gpu.arch, gpu.driver) == ("sm_89", "550.107.02")
    assert codes(gpu) == {"no-nvml"}
    assert engines(probe, gpu)[0] == "tensorrt-rtx"


def test_one_card_that_fell_off_the_bus_hides_no_other() -> None:
    probe = linux(
        nvidia("0000:01:00.0", "10de:2684"),
        nvidia("0000:02:00.0", "10de:2684"),
        nvml=nvml(nvml_gpu("00000000:02:00.0", "NVIDIA GeForce RTX 4090", (8, 9), 24)),
    )
    broken, good, _ = detect(probe)
    assert codes(broken) == {"not-in-nvml"}
    assert "tensorrt-rtx" not in engines(probe, broken)
    assert engines(probe, good)[0] == "tensorrt-rtx"


@pytest.mark.parametrize("bad", [b"", b"\xff\xfe", b"0x", b"banana\n"])
def test_one_card_with_unreadable_facts_hides_no_other(bad: bytes) -> None:
    probe = linux(
        Card(address="0000:03:00.0", pci_id="8086:e20b", driver="xe", render="renderD128"),
        files={f"{PCI}/0000:01:00.0/class": b"0x030000\n", f"{PCI}/0000:01:00.0/vendor": bad},
    )
    assert [device.pci_id for device in detect(probe)[:-1]] == ["8086:e20b"]


def test_nouveau_leaves_vulkan_and_asks_for_the_driver() -> None:
    probe = linux(
        Card(address="0000:01:00.0", pci_id="10de:2684", driver="nouveau", render="renderD128")
    )
    gpu = detect(probe)[0]
    assert codes(gpu) >= {"free-nvidia-driver"}
    assert engines(probe, gpu) == ["ggml-vulkan", "sdcpp-vulkan"]


def test_a_card_without_a_driver_is_reported_and_not_used() -> None:
    probe = linux(Card(address="0000:01:00.0", pci_id="1002:7550", driver=""))
    gpu = detect(probe)[0]
    assert codes(gpu) == {"no-driver"}
    assert engines(probe, gpu) == []


def test_a_sandbox_that_hides_the_driver_is_not_held_against_the_card() -> None:
    probe = linux(Card(address="0000:01:00.0", pci_id="10de:2684", driver=None))
    assert "no-driver" not in codes(detect(probe)[0])


def test_no_permission_on_kfd_names_the_group_that_owns_it() -> None:
    probe = linux(
        amd_card("0000:03:00.0", "1002:744c"),
        files=kfd_files((110000, "744c", "0000:03:00.0")),
        denied=["/dev/kfd"],
        groups={"/dev/kfd": "kvm-render"},
    )
    gpu = detect(probe)[0]
    problem = next(p for p in gpu.problems if p.code == "kfd-denied")
    assert "usermod -aG kvm-render" in problem.hint
    assert engines(probe, gpu) == ["ggml-vulkan", "sdcpp-vulkan"]


def test_kfd_without_a_render_node_serves_nothing() -> None:
    probe = linux(
        Card(address="0000:c4:00.0", pci_id="1002:15bf", driver="amdgpu"),
        files=kfd_files((110003, "15bf", "0000:c4:00.0")),
    )
    gpu = detect(probe)[0]
    assert "no-render-node" in codes(gpu)
    assert engines(probe, gpu) == []


def test_no_permission_on_the_render_node_names_the_group() -> None:
    probe = linux(
        Card(address="0000:03:00.0", pci_id="8086:e20b", driver="xe", render="renderD128"),
        denied=["/dev/dri/renderD128"],
        groups={"/dev/dri/renderD128": "render"},
    )
    gpu = detect(probe)[0]
    assert codes(gpu) == {"render-denied"}
    assert "usermod -aG render" in gpu.problems[0].hint
    assert engines(probe, gpu) == []


@pytest.mark.parametrize(
    ("pci_id", "kind", "arch"),
    [("10de:ffff", "discrete", ""), ("1002:ffff", "discrete", ""), ("8086:ffff", "integrated", "")],
)
def test_an_unknown_id_of_a_known_maker_is_a_gpu(pci_id: str, kind: str, arch: str) -> None:
    driver = {"10de": "nvidia", "1002": "amdgpu", "8086": "xe"}[pci_id[:4]]
    probe = linux(Card(address="0000:00:02.0", pci_id=pci_id, driver=driver, render="renderD128"))
    gpu = detect(probe)[0]
    assert (gpu.kind, gpu.arch) == (kind, arch)
    assert "ggml-vulkan" in engines(probe, gpu)


@pytest.mark.parametrize(("gib", "kind"), [(0.5, "integrated"), (16, "discrete")])
def test_an_amd_gpu_newer_than_the_table_is_judged_by_its_memory(gib: float, kind: str) -> None:
    probe = linux(amd_card("0000:03:00.0", "1002:ffff", vram_bytes=int(gib * 2**30)))
    assert detect(probe)[0].kind == kind


def test_a_virtual_function_without_a_driver_is_no_device() -> None:
    probe = linux(
        Card(address="0000:00:02.0", pci_id="8086:a780", driver="i915", render="renderD128"),
        Card(address="0000:00:02.1", pci_id="8086:a780", driver=""),
        links={f"{PCI}/0000:00:02.1/physfn": "../0000:00:02.0"},
    )
    assert [device.id for device in detect(probe)] == ["pci:0000:00:02.0", "cpu"]


def test_a_container_on_docker_desktop_is_told_the_flag() -> None:
    probe = linux(release="5.15.167.4-microsoft-standard-WSL2", files={"/.dockerenv": b""})
    assert "--gpus all" in detect(probe)[0].problems[0].hint


def test_two_gpus_that_nobody_tells_apart_still_have_ids_of_their_own() -> None:
    same = nvml_gpu("00000000:01:00.0", "NVIDIA L4", (8, 9), 22)
    probe = linux(files={"/dev/nvidiactl": b""}, nvml=nvml(same, same))
    assert [device.id for device in detect(probe)] == [
        "pci:0000:01:00.0",
        "pci:0000:01:00.0#2",
        "cpu",
    ]


def test_an_unknown_card_learns_its_architecture_from_the_driver() -> None:
    nvidia_probe = linux(
        nvidia("0000:01:00.0", "10de:ffff"),
        nvml=nvml(nvml_gpu("00000000:01:00.0", "NVIDIA GeForce RTX 9090", (12, 0), 64)),
    )
    assert detect(nvidia_probe)[0].arch == "sm_120"
    amd_probe = linux(
        amd_card("0000:03:00.0", "1002:ffff"),
        files=kfd_files((120001, "ffff", "0000:03:00.0")),
    )
    assert detect(amd_probe)[0].arch == "gfx1201"


@pytest.mark.parametrize(
    "pci_id", ["1234:1111", "1af4:1050", "15ad:0405", "1a03:2000", "102b:0522"]
)
def test_displays_that_compute_nothing_are_no_devices(pci_id: str) -> None:
    (cpu,) = detect(linux(Card(address="0000:00:02.0", pci_id=pci_id, driver="bochs-drm")))
    assert "only display-class PCI device" in cpu.problems[0].message


def test_a_jetson_is_found_in_the_device_tree() -> None:
    probe = linux(
        machine="aarch64",
        files={
            "/proc/device-tree/compatible": b"nvidia,p3737-0000+p3701-0000\0nvidia,tegra234\0",
            "/proc/device-tree/model": b"NVIDIA Jetson AGX Orin Developer Kit\0",
            "/etc/nv_tegra_release": b"# R36 (release), REVISION: 4.3, GCID: 38968081\n",
        },
    )
    gpu = detect(probe)[0]
    assert (gpu.arch, gpu.kind, gpu.driver) == ("sm_87", "integrated", "L4T 36.4.3")


def test_nvml_is_not_loaded_where_there_is_no_nvidia_card() -> None:
    probe = linux(amd_card("0000:03:00.0", "1002:744c"))
    detect(probe)
    assert probe.asked == []


def test_a_bare_machine_asks_for_no_tool_at_all() -> None:
    probe = linux()
    detect(probe)
    assert probe.asked == []


def test_the_memory_of_a_container_is_its_limit() -> None:
    limited = linux(files={"/sys/fs/cgroup/memory.max": b"8589934592\n"})
    free = linux(files={"/sys/fs/cgroup/memory.max": b"max\n"})
    assert detect(limited)[0].memory_bytes == 8 * 2**30
    assert detect(free)[0].memory_bytes == 32594328 * 1024


def test_the_memory_of_an_amd_card_comes_from_drm_and_else_from_kfd() -> None:
    with_drm = linux(amd_card("0000:03:00.0", "1002:744c", vram_bytes=24 * 2**30))
    assert detect(with_drm)[0].memory_bytes == 24 * 2**30
    files = kfd_files((110000, "744c", "0000:03:00.0"))
    files["/sys/class/kfd/kfd/topology/nodes/1/mem_banks/0/properties"] = (
        b"heap_type 1\nsize_in_bytes 25753026560\n"
    )
    assert detect(linux(amd_card("0000:03:00.0", "1002:744c"), files=files))[0].memory_bytes == (
        25753026560
    )


def test_musl_has_no_prebuilt_engines_and_the_reason_says_so() -> None:
    probe = linux(libc="musl")
    verdicts = engines_for(detect(probe)[0], host(probe))
    assert [v.name for v in verdicts if isinstance(v, Candidate)] == ["ggml-cpu"]
    no = next(v for v in verdicts if getattr(v, "vendor", "") == "openvino")
    assert "musl" in no.reason


def test_a_cpu_without_avx2_is_reported() -> None:
    probe = linux(files={"/proc/cpuinfo": b"model name : Intel(R) Core(TM)2 Duo\nflags : sse2\n"})
    assert "no-avx2" in codes(detect(probe)[0])


def test_a_report_without_addresses_joins_the_only_card() -> None:
    report = NvmlReport(driver="570.10", gpus=(NvmlGpu(name="NVIDIA GeForce RTX 4070"),))
    probe = linux(nvidia("0000:01:00.0", "10de:2786"), nvml=report)
    devices = detect(probe)
    assert [device.id for device in devices] == ["pci:0000:01:00.0", "cpu"]
    assert devices[0].driver == "570.10"
