"""What NVIDIA's driver says of its GPUs: through NVML, else through the text of `nvidia-smi`.

NVML is loaded with ctypes (nvml_library.py) and not through `nvidia-ml-py`, which is a ctypes
wrapper of the same library: the dozen functions that we need do not pay for a dependency that
most machines would carry for nothing. `nvidia-smi` is asked only where the driver is there and
its library cannot be loaded into this interpreter (a 32-bit or musl Python).
"""

from __future__ import annotations

import re

from sdkit_dispatch.detect.answers import NvmlGpu, NvmlReport, NvmlSlice
from sdkit_dispatch.detect.probe import Probe

SMI_TIMEOUT_S = 10.0
SMI_QUERY = "pci.bus_id,pci.device_id,name,uuid,driver_version,memory.total,mig.mode.current"
SMI_COMMANDS = (
    # Older ones refuse a whole query for one column that they do not know.
    f"--query-gpu={SMI_QUERY},compute_cap",
    f"--query-gpu={SMI_QUERY}",
    "--query-gpu=driver_version",
)
SMI_PATHS = ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi")

_ADDRESS = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")
_SLICE = re.compile(r"\bMIG\b\s+(\S+).*?\(UUID:\s*(MIG-[\w./-]+)\)")
_SLICE_GB = re.compile(r"\.(\d+)gb", re.IGNORECASE)


def nvidia_report(probe: Probe) -> NvmlReport | None:
    """Returns what the driver says of all GPUs; None if there is no driver to ask."""
    return probe.nvml() or _report_from_smi(probe)


def address_from_text(text: str) -> str:
    """Returns "0000:01:00.0" from any spelling of a PCI address; empty if it is none."""
    found = _ADDRESS.fullmatch(text.strip())
    if not found:
        return ""
    domain, bus, device, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function}".lower()


def _report_from_smi(probe: Probe) -> NvmlReport | None:
    for path in SMI_PATHS:
        for command in SMI_COMMANDS:
            result = probe.run([path, command, "--format=csv,noheader,nounits"], SMI_TIMEOUT_S)
            if result is None:
                break
            report = report_from_smi_csv(result.stdout) if result.code == 0 else None
            if report is None:
                continue
            if any(gpu.is_mig for gpu in report.gpus):
                listing = probe.run([path, "-L"], SMI_TIMEOUT_S)
                report = with_slices(report, listing.stdout if listing else b"")
            return report
    return None


def report_from_smi_csv(data: bytes) -> NvmlReport | None:
    """Parses the output of `nvidia-smi --query-gpu`, one GPU a line.

    A column is told by its shape and not by its place: versions differ in what they leave out,
    and what they cannot say is "[N/A]" or "[Not Supported]".
    """
    gpus = []
    driver = ""
    for line in data.decode("utf-8", "replace").splitlines():
        gpu, line_driver = _gpu_from_columns([column.strip() for column in line.split(",")])
        if gpu is not None:
            gpus.append(gpu)
            driver = driver or line_driver
    if not driver:  # an error message has no driver version in it
        return None
    return NvmlReport(driver=driver, gpus=tuple(gpus), source="nvidia-smi")


def _gpu_from_columns(columns: list[str]) -> tuple[NvmlGpu | None, str]:
    facts: dict[str, str] = {}
    shapes = {
        "address": _ADDRESS.pattern,
        "pci_id": r"0x[0-9a-fA-F]{8}",
        "uuid": r"GPU-[\w-]+",
        "driver": r"\d{3,4}(\.\d+){1,2}",
        "capability": r"\d{1,2}\.\d",
        "memory": r"\d{1,9}",
        "mig": r"Enabled|Disabled",
        "name": r"[^\[\]]*[A-Za-z][^\[\]]*",
    }
    for column in columns:
        kind = next((kind for kind, shape in shapes.items() if re.fullmatch(shape, column)), "")
        facts.setdefault(kind, column)
    if "driver" not in facts:
        return None, ""
    pci = facts.get("pci_id", "")
    major, _, minor = facts.get("capability", "").partition(".")
    gpu = NvmlGpu(
        name=facts.get("name", ""),
        uuid=facts.get("uuid", ""),
        pci_address=facts.get("address", ""),
        pci_id=f"{pci[6:]}:{pci[2:6]}".lower() if pci else "",  # 0x268410DE: device, vendor
        compute_capability=(int(major), int(minor)) if major and minor else None,
        memory_bytes=int(facts["memory"]) * 1024**2 if "memory" in facts else None,
        is_mig=facts.get("mig") == "Enabled",
    )
    return gpu, facts["driver"]


def with_slices(report: NvmlReport, listing: bytes) -> NvmlReport:
    """Adds the MIG instances that `nvidia-smi -L` lists below each GPU."""
    slices: dict[str, list[NvmlSlice]] = {}
    parent = ""
    for line in listing.decode("utf-8", "replace").splitlines():
        gpu = re.search(r"\(UUID:\s*(GPU-[\w-]+)\)", line)
        if gpu:
            parent = gpu.group(1)
        found = _SLICE.search(line)
        if found:
            size = _SLICE_GB.search(found.group(1))
            memory_bytes = int(size.group(1)) * 1024**3 if size and len(size.group(1)) < 6 else None
            slices.setdefault(parent, []).append(
                NvmlSlice(uuid=found.group(2), name=found.group(1), memory_bytes=memory_bytes)
            )
    gpus = tuple(
        NvmlGpu(**{**vars(gpu), "slices": tuple(slices.get(gpu.uuid, ()))}) for gpu in report.gpus
    )
    return NvmlReport(driver=report.driver, gpus=gpus, source=report.source)
