"""Whatever a probe returns, detection neither raises nor loses the CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from detect_machines import CPUINFO, KFD, PCI
from sdkit_dispatch.contract import Device, record_from_json, record_to_json
from sdkit_dispatch.detect import detect, host
from sdkit_dispatch.detect.amd import gpus_from_rocminfo, numbers_from_properties
from sdkit_dispatch.detect.answers import (
    DxgiAdapter,
    NvmlGpu,
    NvmlReport,
    NvmlSlice,
    PnpDevice,
    RunResult,
)
from sdkit_dispatch.detect.cpu import fields_from_cpuinfo, memory_from_meminfo, number_from_text
from sdkit_dispatch.detect.macos import gpus_from_profiler
from sdkit_dispatch.detect.nvml import address_from_text, report_from_smi_csv, with_slices
from sdkit_dispatch.detect.overrides import with_overrides
from sdkit_dispatch.detect.probe import Access, Platform
from sdkit_dispatch.detect.support import engines_for
from sdkit_dispatch.detect.windows import driver_from_windows_version
from sdkit_dispatch.plan import make_plans

NOISE = st.binary(max_size=300)
NUMBERS = st.sampled_from([b"0x030000", b"0x120000", b"0x118000", b"0x10de", b"0x1002", b"0x8086"])
NEAR = st.one_of(
    NOISE,
    NUMBERS,
    st.sampled_from(
        [
            CPUINFO,
            b"gfx_target_version 110000\ndevice_id 29772\nlocation_id 768\n",
            b"572.60\n572.60",
            b"00000000:01:00.0, 0x268410DE, NVIDIA X, GPU-1, 580.65, 24564, Enabled, 8.9",
            b"GPU 0: X (UUID: GPU-1)\n MIG 1g.5gb Device 0: (UUID: MIG-1)",
            b"***\nAgent 1\n***\n  Name: gfx1100\n  Device Type: GPU\n  Chip ID: 1(0x744c)\n",
            b'{"SPDisplaysDataType": [{"sppci_model": "AMD", "spdisplays_vram": "3 GB"}, 7, null]}',
            b"nvidia,tegra234\0",
            b"9" * 40,
        ]
    ),
)
"""Bytes of any kind, and the beginnings of real ones, so that parsing goes deep."""
TEXT = st.text(max_size=40)
IDS = st.integers(min_value=0, max_value=2**32 - 1)
MAYBE_BYTES = st.one_of(st.none(), st.integers(min_value=0, max_value=2**50))

SLICES = st.builds(NvmlSlice, uuid=TEXT, name=TEXT, memory_bytes=MAYBE_BYTES)
REPORTS = st.builds(
    NvmlReport,
    driver=TEXT,
    source=TEXT,
    gpus=st.lists(
        st.builds(
            NvmlGpu,
            name=TEXT,
            uuid=TEXT,
            pci_address=st.one_of(TEXT, st.just("00000000:01:00.0")),
            pci_id=st.one_of(TEXT, st.just("10de:2684")),
            compute_capability=st.one_of(st.none(), st.tuples(IDS, IDS)),
            memory_bytes=MAYBE_BYTES,
            is_mig=st.booleans(),
            slices=st.lists(SLICES, max_size=2).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
)
ADAPTERS = st.builds(
    DxgiAdapter,
    description=TEXT,
    vendor_id=st.one_of(IDS, st.sampled_from([0x10DE, 0x1002, 0x8086, 0x1414])),
    device_id=IDS,
    subsystem_id=IDS,
    dedicated_bytes=IDS,
    shared_bytes=IDS,
    luid=TEXT,
    is_software=st.booleans(),
    pci_address=TEXT,
)
INSTANCES = st.one_of(
    TEXT, st.just(r"PCI\VEN_10DE&DEV_2684&SUBSYS_16F110DE"), st.just(r"PCI\VEN_8086&DEV_FFFF")
)
DEVICES = st.builds(
    PnpDevice,
    instance_id=INSTANCES,
    hardware_ids=st.lists(INSTANCES, max_size=3).map(tuple),
    description=TEXT,
    driver_version=TEXT,
    service=TEXT,
    pci_address=TEXT,
    problem=st.integers(min_value=0, max_value=60),
)
NAMES = st.one_of(
    TEXT, st.sampled_from(["0000:01:00.0", "0", "1", "renderD128", "accel0", "card0", "rocm-7.2"])
)


class NoiseProbe:
    """Answers every question with whatever hypothesis draws; the same question, the same way."""

    def __init__(self, data: st.DataObject, platform: Platform) -> None:
        self._data = data
        self._memory: dict[object, object] = {}
        self.platform = platform
        self.env = self._draw(
            "env",
            st.dictionaries(
                st.sampled_from(
                    ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"]
                    + ["GGML_VK_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION", "ROCM_PATH"]
                    + ["SDKIT_DISPATCH_ARCH"]
                ),
                TEXT,
                max_size=3,
            ),
        )

    def _draw(self, key: object, strategy):  # type: ignore[no-untyped-def]
        if key not in self._memory:
            self._memory[key] = self._data.draw(strategy)
        return self._memory[key]

    def read_file(self, path: str) -> bytes | None:
        return self._draw(("read", path), st.one_of(st.none(), NEAR))

    def listdir(self, path: str) -> Sequence[str]:
        return self._draw(("list", path), st.lists(NAMES, max_size=2, unique=True))

    def readlink(self, path: str) -> str | None:
        return self._draw(
            ("link", path),
            st.one_of(st.none(), TEXT, st.sampled_from(["../nvidia", "../amdgpu", "../vfio-pci"])),
        )

    def access(self, path: str) -> Access:
        return self._draw(("access", path), st.sampled_from(["ok", "denied", "missing"]))

    def group(self, path: str) -> str:
        return self._draw(("group", path), TEXT)

    def run(self, command: Sequence[str], timeout_s: float) -> RunResult | None:
        result = st.builds(RunResult, code=st.integers(-1, 2), stdout=NEAR)
        return self._draw(("run", tuple(command)), st.one_of(st.none(), result))

    def nvml(self) -> NvmlReport | None:
        return self._draw("nvml", st.one_of(st.none(), REPORTS))

    def sysctl(self, name: str) -> bytes | None:
        return self._draw(("sysctl", name), st.one_of(st.none(), NEAR))

    def dxgi_adapters(self) -> Sequence[DxgiAdapter] | None:
        return self._draw("dxgi", st.one_of(st.none(), st.lists(ADAPTERS, max_size=3)))

    def pnp_devices(self) -> Sequence[PnpDevice] | None:
        return self._draw("pnp", st.one_of(st.none(), st.lists(DEVICES, max_size=3)))

    def registry(self, key: str, value: str) -> str | int | None:
        return self._draw(("registry", value), st.one_of(st.none(), TEXT, IDS))

    def windows_memory_bytes(self) -> int | None:
        return self._draw("memory", MAYBE_BYTES)


PLATFORMS = st.builds(
    Platform,
    system=st.sampled_from(["linux", "win32", "darwin", "freebsd14"]),
    machine=st.one_of(st.sampled_from(["x86_64", "AMD64", "arm64", "aarch64"]), TEXT),
    release=st.one_of(TEXT, st.just("5.15.0-microsoft-standard-WSL2"), st.just("6.8.0")),
    python=st.tuples(st.integers(3, 4), st.integers(0, 20), st.integers(0, 9)),
    pointer_bits=st.sampled_from([32, 64]),
    libc=st.one_of(TEXT, st.just("glibc 2.39"), st.just("musl")),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), platform=PLATFORMS)
def test_no_answer_of_a_probe_makes_detection_or_planning_raise(
    data: st.DataObject, platform: Platform
) -> None:
    probe = NoiseProbe(data, platform)
    devices = detect(probe)
    machine = host(probe)
    assert devices[-1].id == "cpu"
    assert [device.kind for device in devices].count("cpu") == 1
    assert len({device.id for device in devices}) == len(devices)
    text = json.dumps(record_to_json(devices))
    assert record_from_json(list[Device], json.loads(text)) == devices
    for device in devices:
        engines_for(device, machine)
    decision = make_plans(devices, machine, [], probe=lambda *_: None)  # type: ignore[arg-type,return-value]
    assert decision.plans == ()


@settings(deadline=None)
@given(data=NEAR)
def test_no_parser_raises_on_arbitrary_bytes(data: bytes) -> None:
    fields_from_cpuinfo(data)
    memory_from_meminfo(data)
    number_from_text(data)
    numbers_from_properties(data)
    gpus_from_rocminfo(data)
    gpus_from_profiler(data, "Mac")
    report = report_from_smi_csv(data)
    if report is not None:
        with_slices(report, data)


@given(text=st.text())
def test_no_parser_raises_on_arbitrary_text(text: str) -> None:
    address_from_text(text)
    driver_from_windows_version(text)


@given(value=st.text(max_size=60))
def test_no_value_of_a_variable_raises(value: str) -> None:
    device = Device(id="pci:0", kind="discrete", maker="nvidia", name="Card", uuid="GPU-1")
    names = ("CUDA_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES", "SDKIT_DISPATCH_ARCH")
    assert len(with_overrides([device], dict.fromkeys(names, value))) == 1


def test_the_paths_of_the_tests_are_those_of_the_kernel() -> None:
    assert PCI == "/sys/bus/pci/devices"
    assert KFD.startswith("/sys/class/kfd/")
