"""NVML through a stand-in library, and the text of nvidia-smi in the shapes that it has had."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from sdkit_dispatch.detect.nvml import address_from_text, report_from_smi_csv
from sdkit_dispatch.detect.nvml_library import report_from_library

NOT_SUPPORTED, LOST = 3, 15
"""Error codes of NVML."""


def set_value(target: Any, value: int) -> None:
    ctypes.cast(target, ctypes.POINTER(ctypes.c_uint))[0] = value


class FakeNvml:
    """Stands in for libnvidia-ml: GPU 0 has left the bus, 1 is whole, 2 is in MIG mode."""

    def __init__(self) -> None:
        self.is_shut = False

    def nvmlInit_v2(self) -> int:  # noqa: N802 - NVML's names
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.is_shut = True
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 3
        return 0

    def nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> int:  # noqa: N802
        buffer.value = b"580.95.05"
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:  # noqa: N802
        if index.value == 0:
            return LOST
        handle._obj.value = index.value
        return 0

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> int:  # noqa: N802
        buffer.value = {1: b"NVIDIA L4", 2: b"NVIDIA A100"}.get(
            handle.value, b"NVIDIA A100 MIG 1g.5gb"
        )
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> int:  # noqa: N802
        buffer.value = b"%s-%d" % (b"GPU" if handle.value < 10 else b"MIG", handle.value)
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, pci: Any) -> int:  # noqa: N802
        if handle.value == 2:
            return NOT_SUPPORTED
        pci._obj.bus_id = b"00000000:01:00.0"
        pci._obj.pci_device_id = 0x27B810DE
        return 0

    def nvmlDeviceGetCudaComputeCapability(  # noqa: N802
        self, handle: Any, major: Any, minor: Any
    ) -> int:
        major._obj.value, minor._obj.value = (8, 9) if handle.value == 1 else (8, 0)
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:  # noqa: N802
        if handle.value == 2:
            return NOT_SUPPORTED
        memory._obj.total = handle.value * 2**30
        return 0

    def nvmlDeviceGetMigMode(self, handle: Any, mode: Any, pending: Any) -> int:  # noqa: N802
        if handle.value == 1:
            return NOT_SUPPORTED
        mode._obj.value = 1
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> int:  # noqa: N802
        count._obj.value = 7
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(  # noqa: N802
        self, parent: Any, index: Any, handle: Any
    ) -> int:
        if index.value not in (0, 3):
            return LOST
        handle._obj.value = 10 + index.value
        return 0


def test_a_lost_gpu_and_refused_facts_hide_nothing_else() -> None:
    library = FakeNvml()
    report = report_from_library(library)
    assert report is not None
    assert report.driver == "580.95.05"
    whole, sliced = report.gpus
    assert (whole.name, whole.pci_id, whole.compute_capability) == (
        "NVIDIA L4",
        "10de:27b8",
        (8, 9),
    )
    assert (whole.memory_bytes, whole.is_mig) == (2**30, False)
    assert (sliced.memory_bytes, sliced.pci_address, sliced.is_mig) == (None, "", True)
    assert [(part.uuid, part.name, part.memory_bytes) for part in sliced.slices] == [
        ("MIG-10", "1g.5gb", 10 * 2**30),
        ("MIG-13", "1g.5gb", 13 * 2**30),
    ]
    assert library.is_shut


def test_an_old_library_that_lacks_functions_is_read_as_far_as_it_goes() -> None:
    class OldNvml:
        nvmlInit_v2 = nvmlShutdown = staticmethod(lambda: 0)  # noqa: N815

        @staticmethod
        def nvmlDeviceGetCount_v2(count: Any) -> int:  # noqa: N802
            count._obj.value = 1
            return 0

        @staticmethod
        def nvmlDeviceGetHandleByIndex_v2(index: Any, handle: Any) -> int:  # noqa: N802
            return 0

    report = report_from_library(OldNvml())
    assert report is not None
    assert len(report.gpus) == 1
    assert report.gpus[0].compute_capability is None


def test_a_library_without_a_driver_reports_nothing() -> None:
    class NoDriver:
        nvmlInit_v2 = staticmethod(lambda: 9)  # noqa: N815

    assert report_from_library(NoDriver()) is None


def test_the_columns_of_nvidia_smi_are_known_by_their_shape() -> None:
    report = report_from_smi_csv(
        b"00000000:01:00.0, 0x268410DE, NVIDIA GeForce RTX 4090, GPU-1, 580.65.06, 24564, "
        b"[N/A], 8.9\n"
        b"00000000:02:00.0, 0x1B0610DE, NVIDIA GeForce GTX 1080 Ti, GPU-2, 580.65.06, 11264, "
        b"[Not Supported], 6.1\n"
    )
    assert report is not None
    assert report.driver == "580.65.06"
    first, second = report.gpus
    assert (first.pci_id, first.compute_capability, first.memory_bytes) == (
        "10de:2684",
        (8, 9),
        24564 * 2**20,
    )
    assert (second.name, second.uuid) == ("NVIDIA GeForce GTX 1080 Ti", "GPU-2")


def test_two_driver_lines_are_two_gpus() -> None:
    report = report_from_smi_csv(b"572.60\r\n572.60\r\n")
    assert report is not None
    assert (report.driver, len(report.gpus)) == ("572.60", 2)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
        b'Field "compute_cap" is not a valid field to query.\n',
        b"No devices were found\n",
    ],
)
def test_what_is_no_table_is_no_report(text: bytes) -> None:
    assert report_from_smi_csv(text) is None


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:01:00.0", "0000:01:00.0"),
        ("0000:C4:00.0", "0000:c4:00.0"),
        ("01:00.0", "0000:01:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("PCI bus 1", ""),
        ("", ""),
    ],
)
def test_addresses_are_spelt_in_one_way(text: str, address: str) -> None:
    assert address_from_text(text) == address
