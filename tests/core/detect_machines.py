"""Machines for the tests of detection: a FakeProbe, and the evidence that machines have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sdkit_dispatch.detect.answers import DxgiAdapter, NvmlGpu, NvmlReport, PnpDevice, RunResult
from sdkit_dispatch.detect.probe import Access, Platform

PCI = "/sys/bus/pci/devices"
KFD = "/sys/class/kfd/kfd/topology/nodes"
DISPLAY_CLASSES = {"vga": 0x030000, "3d": 0x030200, "display": 0x038000, "accel": 0x120000}
CPUINFO = b"processor\t: 0\nmodel name\t: AMD Ryzen 7 7800X3D\nflags\t\t: fpu sse4_2 avx avx2\n\n"
MEMINFO = b"MemTotal:       32594328 kB\nMemFree:         1000000 kB\n"


@dataclass(frozen=True, kw_only=True)
class FakeProbe:
    """A machine made of files and answers. Folders exist where something lies below them."""

    platform: Platform
    files: Mapping[str, bytes] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    denied: frozenset[str] = frozenset()
    groups: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, bytes] = field(default_factory=dict)
    nvml_report: NvmlReport | None = None
    sysctls: Mapping[str, bytes] = field(default_factory=dict)
    adapters: tuple[DxgiAdapter, ...] | None = None
    pnp: tuple[PnpDevice, ...] | None = None
    values: Mapping[str, str | int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def read_file(self, path: str) -> bytes | None:
        return None if path in self.denied else self.files.get(path)

    def listdir(self, path: str) -> Sequence[str]:
        start = path.rstrip("/") + "/"
        below = [name for name in (*self.files, *self.links) if name.startswith(start)]
        return tuple(sorted({name[len(start) :].partition("/")[0] for name in below}))

    def readlink(self, path: str) -> str | None:
        return self.links.get(path)

    def access(self, path: str) -> Access:
        if path in self.denied:
            return "denied"
        is_there = path in self.files or path in self.links or bool(self.listdir(path))
        return "ok" if is_there else "missing"

    def group(self, path: str) -> str:
        return self.groups.get(path, "")

    def run(self, command: Sequence[str], timeout_s: float) -> RunResult | None:
        """Answers by the name of the tool, whatever it is asked."""
        self.asked.append(" ".join(command))
        tool = next((name for name in self.outputs if any(name in part for part in command)), None)
        return None if tool is None else RunResult(code=0, stdout=self.outputs[tool])

    def nvml(self) -> NvmlReport | None:
        self.asked.append("nvml")
        return self.nvml_report

    def sysctl(self, name: str) -> bytes | None:
        return self.sysctls.get(name)

    def dxgi_adapters(self) -> tuple[DxgiAdapter, ...] | None:
        return self.adapters

    def pnp_devices(self) -> tuple[PnpDevice, ...] | None:
        return self.pnp

    def registry(self, key: str, value: str) -> str | int | None:
        return self.values.get(value)

    def windows_memory_bytes(self) -> int | None:
        return 32 * 2**30 if self.platform.system == "win32" else None


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a kernel shows of one PCI function.

    Attributes:
        driver: None: the folder has neither a link nor a uevent file; empty: nothing is bound.
    """

    address: str
    pci_id: str
    driver: str | None
    pci_class: int = 0x030000
    vram_bytes: int | None = None
    is_external: bool = False
    render: str = ""

    def files(self) -> dict[str, bytes]:
        folder = f"{PCI}/{self.address}"
        vendor, device = self.pci_id.split(":")
        files = {
            f"{folder}/class": f"0x{self.pci_class:06x}\n".encode(),
            f"{folder}/vendor": f"0x{vendor}\n".encode(),
            f"{folder}/device": f"0x{device}\n".encode(),
        }
        if self.driver is not None:
            bound = f"DRIVER={self.driver}\n" if self.driver else ""
            files[f"{folder}/uevent"] = f"{bound}PCI_CLASS={self.pci_class:X}\n".encode()
        if self.vram_bytes is not None:
            files[f"{folder}/mem_info_vram_total"] = f"{self.vram_bytes}\n".encode()
        if self.is_external:
            files[f"{folder}/removable"] = b"removable\n"
        if self.render:
            files[f"{folder}/drm/{self.render}/dev"] = b"226:128\n"
            files[f"/dev/dri/{self.render}"] = b""
        return files

    def links(self) -> dict[str, str]:
        if not self.driver:
            return {}
        return {f"{PCI}/{self.address}/driver": f"../../../../bus/pci/drivers/{self.driver}"}


def linux(
    *cards: Card,
    files: Mapping[str, bytes] | None = None,
    links: Mapping[str, str] | None = None,
    machine: str = "x86_64",
    release: str = "6.8.0-48-generic",
    python: tuple[int, int, int] = (3, 12, 7),
    libc: str = "glibc 2.39",
    denied: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    outputs: Mapping[str, bytes] | None = None,
    nvml: NvmlReport | None = None,
    groups: Mapping[str, str] | None = None,
) -> FakeProbe:
    """A Linux machine with these cards, and the files that every such machine has."""
    every: dict[str, bytes] = {
        "/proc/cpuinfo": CPUINFO,
        "/proc/meminfo": MEMINFO,
        f"{PCI}/0000:00:00.0/class": b"0x060000\n",
        f"{PCI}/0000:00:00.0/vendor": b"0x8086\n",
        f"{PCI}/0000:00:00.0/device": b"0x0d57\n",
    }
    if any(card.driver == "nvidia" for card in cards):
        every |= {"/dev/nvidiactl": b"", "/dev/nvidia0": b""}
    every_link: dict[str, str] = {}
    for card in cards:
        every |= card.files()
        every_link |= card.links()
    return FakeProbe(
        platform=Platform(
            system="linux", machine=machine, release=release, python=python, libc=libc
        ),
        files=every | dict(files or {}),
        links=every_link | dict(links or {}),
        denied=frozenset(denied),
        env=env or {},
        outputs=outputs or {},
        nvml_report=nvml,
        groups=groups or {},
    )


def wsl(files: Mapping[str, bytes] | None = None, **rest: object) -> FakeProbe:
    """WSL 2: a Microsoft kernel, /dev/dxg, and a virtual display on PCI."""
    card = Card(address="5582:00:00.0", pci_id="1414:008e", driver="dxgkrnl", pci_class=0x030200)
    return linux(
        card,
        files={"/dev/dxg": b"", **(files or {})},
        links={"/sys/class/drm/card0/device": "../../../platform/vgem"},
        release="5.15.167.4-microsoft-standard-WSL2",
        **rest,  # type: ignore[arg-type]
    )


def amd_card(address: str, pci_id: str, *, render: str = "renderD128", **rest: object) -> Card:
    return Card(address=address, pci_id=pci_id, driver="amdgpu", render=render, **rest)  # type: ignore[arg-type]


def kfd_files(*nodes: tuple[int, str, str]) -> dict[str, bytes]:
    """KFD nodes: (gfx_target_version, device id, PCI address), after the CPU's; and /dev/kfd."""
    files = {"/dev/kfd": b"", f"{KFD}/0/properties": b"cpu_cores_count 16\ngfx_target_version 0\n"}
    for index, (version, device, address) in enumerate(nodes, start=1):
        domain, bus, rest = address.split(":")
        slot, function = rest.split(".")
        location = int(bus, 16) << 8 | int(slot, 16) << 3 | int(function)
        files[f"{KFD}/{index}/properties"] = (
            f"simd_count 64\ngfx_target_version {version}\nvendor_id 4098\n"
            f"device_id {int(device, 16)}\nlocation_id {location}\ndomain {int(domain, 16)}\n"
            f"unique_id {0xABC0 + index}\n"
        ).encode()
    return files


def nvml(*gpus: NvmlGpu, driver: str = "580.95.05") -> NvmlReport:
    return NvmlReport(driver=driver, gpus=gpus)


def nvml_gpu(
    address: str, name: str, capability: tuple[int, int], gib: float | None, **rest: object
) -> NvmlGpu:
    return NvmlGpu(
        name=name,
        uuid="GPU-" + address.replace(":", "-").replace(".", "-").lower(),
        pci_address=address,
        compute_capability=capability,
        memory_bytes=None if gib is None else int(gib * 2**30),
        **rest,  # type: ignore[arg-type]
    )


def pnp(
    pci_id: str,
    *,
    address: str = "",
    driver: str = "",
    service: str = "",
    name: str = "",
    subsystem: str = "00000000",
    problem: int = 0,
    pci_class: str = "0300",
) -> PnpDevice:
    vendor, device = pci_id.upper().split(":")
    return PnpDevice(
        instance_id=rf"PCI\VEN_{vendor}&DEV_{device}&SUBSYS_{subsystem}&REV_A1\4&2283F625&0&0019",
        hardware_ids=(rf"PCI\VEN_{vendor}&DEV_{device}&CC_{pci_class}",),
        description=name,
        driver_version=driver,
        service=service,
        pci_address=address,
        problem=problem,
    )


def windows(
    *devices: PnpDevice,
    adapters: Sequence[DxgiAdapter] = (),
    nvml: NvmlReport | None = None,
    machine: str = "AMD64",
    env: Mapping[str, str] | None = None,
) -> FakeProbe:
    return FakeProbe(
        platform=Platform(system="win32", machine=machine, release="10.0.26100", python=(3, 12, 7)),
        pnp=devices,
        adapters=tuple(adapters),
        nvml_report=nvml,
        values={"ProcessorNameString": "13th Gen Intel(R) Core(TM) i7-13700K  "},
        env=env or {},
    )


def dxgi(
    pci_id: str,
    name: str,
    dedicated_gib: float,
    *,
    luid: str,
    shared_gib: float = 16,
    **rest: object,
) -> DxgiAdapter:
    vendor, device = pci_id.split(":")
    return DxgiAdapter(
        description=name,
        vendor_id=int(vendor, 16),
        device_id=int(device, 16),
        dedicated_bytes=int(dedicated_gib * 2**30),
        shared_bytes=int(shared_gib * 2**30),
        luid=luid,
        **rest,  # type: ignore[arg-type]
    )


BASIC_RENDER = DxgiAdapter(
    description="Microsoft Basic Render Driver",
    vendor_id=0x1414,
    device_id=0x8C,
    luid="00000000:0000b6a1",
    is_software=True,
)


def mac(
    *,
    brand: str,
    machine: str = "arm64",
    sysctls: Mapping[str, bytes] | None = None,
    displays: Sequence[Mapping[str, str]] = (),
) -> FakeProbe:
    base = {
        "machdep.cpu.brand_string": brand.encode() + b"\0",
        "hw.memsize": (36 * 2**30).to_bytes(8, "little"),
    }
    return FakeProbe(
        platform=Platform(system="darwin", machine=machine, release="24.6.0", python=(3, 12, 7)),
        sysctls=base | dict(sysctls or {}),
        outputs={"system_profiler": json.dumps({"SPDisplaysDataType": list(displays)}).encode()},
    )


def with_env(probe: FakeProbe, **env: str) -> FakeProbe:
    return replace(probe, env={**probe.env, **env})
