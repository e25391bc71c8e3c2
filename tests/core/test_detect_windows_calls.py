"""The ctypes calls of Windows, made against stand-ins with the same functions and tables."""

from __future__ import annotations

import ctypes
import uuid
from typing import Any

from sdkit_dispatch.detect import windows_library as library

NO_MORE_ADAPTERS = -2005270526
"""DXGI_ERROR_NOT_FOUND."""


class FakeSetupApi:
    """Stands in for setupapi.dll: two display devices, no accelerator; answers in UTF-16."""

    properties = {
        0x0: "Microsoft-Basisanzeigeadapter\0",
        0x1: "PCI\\VEN_10DE&DEV_2684&SUBSYS_16F110DE\0PCI\\VEN_10DE&DEV_2684\0\0",
        0x2: "PCI\\VEN_10DE&CC_0300\0PCI\\CC_0300\0\0",
        0x4: "nvlddmkm\0",
        0xC: "NVIDIA GeForce RTX 4090\0",
    }
    numbers = {0x15: 1, 0x1C: 0}

    def __init__(self) -> None:
        self.closed = 0

    def SetupDiGetClassDevsW(self, guid: Any, *_: Any) -> int:  # noqa: N802 - Windows' names
        text = str(uuid.UUID(bytes_le=bytes(guid._obj.data)))
        return {library.DEVICE_CLASSES[0]: 77}.get(text, ctypes.c_void_p(-1).value or -1)

    def SetupDiEnumDeviceInfo(self, devices: Any, index: Any, info: Any) -> int:  # noqa: N802
        assert devices.value == 77
        assert info._obj.size == ctypes.sizeof(library.DeviceInfoData)
        info._obj.instance = 100 + index.value
        return int(index.value < 2)

    def SetupDiGetDeviceRegistryPropertyW(  # noqa: N802
        self, devices: Any, info: Any, code: Any, kind: Any, buffer: Any, room: Any, size: Any
    ) -> int:
        if code.value in self.numbers:
            data = self.numbers[code.value].to_bytes(4, "little")
        elif code.value in self.properties:
            data = self.properties[code.value].encode("utf-16-le")
        else:
            return 0
        ctypes.memmove(buffer, data, len(data))
        size._obj.value = len(data)
        return 1

    def SetupDiGetDevicePropertyW(  # noqa: N802
        self,
        devices: Any,
        info: Any,
        key: Any,
        kind: Any,
        buffer: Any,
        room: Any,
        size: Any,
        _: Any,
    ) -> int:
        assert bytes(key._obj)[:16] == uuid.UUID(library.DRIVER_VERSION_KEY[0]).bytes_le
        assert key._obj.id == 3
        if info._obj.instance == 101:
            return 0
        data = "32.0.15.8129\0".encode("utf-16-le")
        ctypes.memmove(buffer, data, len(data))
        size._obj.value = len(data)
        return 1

    def SetupDiGetDeviceInstanceIdW(  # noqa: N802
        self, devices: Any, info: Any, buffer: Any, room: Any, size: Any
    ) -> int:
        data = f"PCI\\VEN_10DE&DEV_2684\\{info._obj.instance}\0".encode("utf-16-le")
        ctypes.memmove(buffer, data, len(data))
        return 1

    def SetupDiDestroyDeviceInfoList(self, devices: Any) -> int:  # noqa: N802
        self.closed += 1
        return 1


class FakeConfigManager:
    """Stands in for cfgmgr32.dll: the second device was stopped with code 43."""

    def CM_Get_DevNode_Status(  # noqa: N802
        self, status: Any, problem: Any, instance: Any, flags: int
    ) -> int:
        if instance.value == 101:
            status._obj.value, problem._obj.value = library.DN_HAS_PROBLEM, 43
        return 0


def test_devices_are_read_through_setupapi() -> None:
    setup = FakeSetupApi()
    first, second = library.devices_from_libraries(setup, FakeConfigManager())
    assert first.instance_id == "PCI\\VEN_10DE&DEV_2684\\100"
    assert first.description == "NVIDIA GeForce RTX 4090"
    assert first.hardware_ids == (
        "PCI\\VEN_10DE&DEV_2684&SUBSYS_16F110DE",
        "PCI\\VEN_10DE&DEV_2684",
        "PCI\\VEN_10DE&CC_0300",
        "PCI\\CC_0300",
    )
    assert (first.service, first.driver_version) == ("nvlddmkm", "32.0.15.8129")
    assert (first.pci_address, first.problem) == ("0000:01:00.0", 0)
    assert (second.driver_version, second.problem) == ("", 43)
    assert setup.closed == 1


class FakeDxgi:
    """Stands in for dxgi.dll: real COM objects in memory, with one card and the basic renderer."""

    def __init__(self) -> None:
        self.released = 0
        self._keep: list[Any] = []
        self.adapters = [
            self._object({library.RELEASE: self._release, library.GET_DESC1: self._describe(n)})
            for n in range(2)
        ]
        self.factory = self._object(
            {library.RELEASE: self._release, library.ENUM_ADAPTERS1: self._enumerate}
        )

    def CreateDXGIFactory1(self, guid: Any, factory: Any) -> int:  # noqa: N802
        assert str(uuid.UUID(bytes_le=bytes(guid._obj.data))) == library.FACTORY_ID
        factory._obj.value = self.factory
        return 0

    def _object(self, methods: dict[int, Any]) -> int:
        table = (ctypes.c_void_p * 16)()
        for place, method in methods.items():
            table[place] = ctypes.cast(method, ctypes.c_void_p).value
        self_pointer = ctypes.c_void_p(ctypes.addressof(table))
        self._keep += [table, self_pointer, methods]
        return ctypes.addressof(self_pointer)

    @property
    def _release(self) -> Any:
        def release(this: int) -> int:
            self.released += 1
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(release)

    @property
    def _enumerate(self) -> Any:
        def enumerate_adapters(this: int, index: int, out: int) -> int:
            if index >= len(self.adapters):
                return NO_MORE_ADAPTERS
            ctypes.c_void_p.from_address(out).value = self.adapters[index]
            return 0

        kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p)
        return kind(enumerate_adapters)

    def _describe(self, number: int) -> Any:
        def describe(this: int, out: int) -> int:
            description = library.AdapterDescription.from_address(out)
            description.vendor_id, description.device_id = ((0x10DE, 0x2684), (0x1414, 0x8C))[
                number
            ]
            description.dedicated_video = (24 * 2**30, 0)[number]
            description.luid.low = 0xC4F3 + number
            description.flags = (0, library.ADAPTER_SOFTWARE)[number]
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(describe)


class FakeGdi:
    """Stands in for gdi32.dll: knows where the first adapter is, and refuses the second."""

    def __init__(self) -> None:
        self.closed: list[int] = []

    def D3DKMTOpenAdapterFromLuid(self, opened: Any) -> int:  # noqa: N802
        opened._obj.handle = 9
        return 0 if opened._obj.luid.low == 0xC4F3 else -1

    def D3DKMTQueryAdapterInfo(self, query: Any) -> int:  # noqa: N802
        assert (query._obj.handle, query._obj.kind, query._obj.size) == (9, 6, 12)
        library.AdapterAddress.from_address(query._obj.data).bus = 1
        return 0

    def D3DKMTCloseAdapter(self, handle: Any) -> int:  # noqa: N802
        self.closed.append(handle._obj.value)
        return 0


def test_adapters_are_read_through_dxgi_and_everything_is_released() -> None:
    dxgi, gdi = FakeDxgi(), FakeGdi()
    adapters = library.adapters_from_libraries(dxgi, gdi)
    assert adapters is not None
    card, basic = adapters
    assert (card.vendor_id, card.device_id, card.dedicated_bytes) == (0x10DE, 0x2684, 24 * 2**30)
    assert (card.luid, card.pci_address) == ("00000000:0000c4f3", "0000:01:00.0")
    assert (basic.is_software, basic.pci_address) == (True, "")
    assert dxgi.released == 3
    assert gdi.closed == [9]


def test_a_windows_without_d3dkmt_has_no_addresses() -> None:
    adapters = library.adapters_from_libraries(FakeDxgi(), object())
    assert adapters is not None
    assert [adapter.pci_address for adapter in adapters] == ["", ""]
