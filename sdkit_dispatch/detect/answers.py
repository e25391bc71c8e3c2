"""What a probe answers with: records without any judgement in them.

They stand apart from `probe` because most machines never need them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a command printed; `stdout` is bytes because nobody knows its encoding."""

    code: int
    stdout: bytes


@dataclass(frozen=True, kw_only=True)
class NvmlSlice:
    """One MIG instance of a GPU."""

    uuid: str
    name: str
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class NvmlGpu:
    """One GPU as NVML reports it; a fact that NVML refused is None or empty.

    Attributes:
        pci_address: "00000000:01:00.0", as NVML spells it.
        pci_id: "10de:2684".
        is_mig: MIG mode is on, so that only its slices compute.
    """

    name: str = ""
    uuid: str = ""
    pci_address: str = ""
    pci_id: str = ""
    compute_capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    is_mig: bool = False
    slices: tuple[NvmlSlice, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NvmlReport:
    """All that NVML, or `nvidia-smi` in its place, says.

    Attributes:
        source: "NVML" or "nvidia-smi".
    """

    driver: str
    gpus: tuple[NvmlGpu, ...]
    source: str = "NVML"


@dataclass(frozen=True, kw_only=True)
class DxgiAdapter:
    """One adapter of DXGI.

    Attributes:
        luid: "00000000:0000c4f3"; changes when Windows restarts.
        is_software: WARP or the Basic Render Driver.
        pci_address: Through D3DKMT; empty if the kernel did not say.
    """

    description: str
    vendor_id: int
    device_id: int
    subsystem_id: int = 0
    dedicated_bytes: int = 0
    shared_bytes: int = 0
    luid: str = ""
    is_software: bool = False
    pci_address: str = ""


@dataclass(frozen=True, kw_only=True)
class PnpDevice:
    r"""One present device of SetupAPI, of the display or the compute accelerator class.

    Attributes:
        instance_id: r"PCI\VEN_10DE&DEV_2684&SUBSYS_16F110DE&REV_A1\4&2283F625&0&0019".
        hardware_ids: Hardware ids and compatible ids (these hold the class, "CC_0300").
        description: In the language of the system; only ever shown.
        driver_version: "32.0.15.7652".
        service: Kernel driver: "nvlddmkm", "amdkmdag", "igfxn", "BasicDisplay".
        pci_address: From the bus number and the address; empty if unknown.
        problem: Configuration manager problem code (43: stopped); 0 when it works.
    """

    instance_id: str
    hardware_ids: tuple[str, ...] = ()
    description: str = ""
    driver_version: str = ""
    service: str = ""
    pci_address: str = ""
    problem: int = 0
