"""Asks Windows through ctypes: SetupAPI, DXGI, D3DKMT, the registry.

All calls are the wide-character ones and none returns text to be understood, so the language of
the system does not matter. Source of structures and numbers: the Windows SDK headers setupapi.h,
devpkey.h, cfgmgr32.h, dxgi.h and d3dkmthk.h.
"""

from __future__ import annotations

import ctypes
import sys
import uuid
from typing import Any

from sdkit_dispatch.detect.answers import DxgiAdapter, PnpDevice

DIGCF_PRESENT = 0x2
SPDRP_DEVICEDESC, SPDRP_HARDWAREID, SPDRP_COMPATIBLEIDS, SPDRP_SERVICE = 0x0, 0x1, 0x2, 0x4
SPDRP_FRIENDLYNAME, SPDRP_BUSNUMBER, SPDRP_ADDRESS = 0xC, 0x15, 0x1C
DN_HAS_PROBLEM = 0x400
ADAPTER_REMOTE, ADAPTER_SOFTWARE = 0x1, 0x2
KMTQAITYPE_ADAPTERADDRESS = 6
MAX_DEVICES = 64
PROPERTY_BYTES = 8192


class Guid(ctypes.Structure):
    """GUID, filled from its text."""

    _fields_ = [("data", ctypes.c_ubyte * 16)]

    @classmethod
    def of(cls, text: str) -> Guid:
        return cls.from_buffer_copy(uuid.UUID(text).bytes_le)


class DeviceInfoData(ctypes.Structure):
    """SP_DEVINFO_DATA."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("class_guid", ctypes.c_uint32 * 4),
        ("instance", ctypes.c_uint32),
        ("reserved", ctypes.c_size_t),
    ]


class PropertyKey(ctypes.Structure):
    """DEVPROPKEY."""

    _fields_ = [("guid", ctypes.c_uint32 * 4), ("id", ctypes.c_uint32)]


class Luid(ctypes.Structure):
    """LUID: a number of an adapter that lasts until Windows restarts."""

    _fields_ = [("low", ctypes.c_uint32), ("high", ctypes.c_int32)]

    def __str__(self) -> str:
        return f"{self.high & 0xFFFFFFFF:08x}:{self.low:08x}"


class AdapterDescription(ctypes.Structure):
    """DXGI_ADAPTER_DESC1."""

    _fields_ = [
        ("description", ctypes.c_uint16 * 128),
        ("vendor_id", ctypes.c_uint32),
        ("device_id", ctypes.c_uint32),
        ("subsystem_id", ctypes.c_uint32),
        ("revision", ctypes.c_uint32),
        ("dedicated_video", ctypes.c_size_t),
        ("dedicated_system", ctypes.c_size_t),
        ("shared_system", ctypes.c_size_t),
        ("luid", Luid),
        ("flags", ctypes.c_uint32),
    ]


class OpenAdapter(ctypes.Structure):
    """D3DKMT_OPENADAPTERFROMLUID."""

    _fields_ = [("luid", Luid), ("handle", ctypes.c_uint32)]


class AdapterAddress(ctypes.Structure):
    """D3DKMT_ADAPTERADDRESS."""

    _fields_ = [
        ("bus", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("function", ctypes.c_uint32),
    ]


class AdapterQuery(ctypes.Structure):
    """D3DKMT_QUERYADAPTERINFO."""

    _fields_ = [
        ("handle", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint32),
    ]


class MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total_physical", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 6),
    ]


DEVICE_CLASSES = (
    "4d36e968-e325-11ce-bfc1-08002be10318",  # display
    "f01a9d53-3ff6-48d2-9f97-c8a7004be10c",  # compute accelerator: neural processors
)
DRIVER_VERSION_KEY = ("a8b865dd-2e3d-4094-ad97-e593a70c75d6", 3)
FACTORY_ID = "770aae78-f26f-4dba-a829-253c83d1b387"
# Places in the virtual function tables.
RELEASE, ENUM_ADAPTERS1, GET_DESC1 = 2, 12, 10


def text_from_utf16(data: bytes) -> str:
    """Decodes a zero-terminated UTF-16 text."""
    return data.decode("utf-16-le", "replace").split("\0")[0]


def texts_from_utf16(data: bytes) -> tuple[str, ...]:
    """Decodes a REG_MULTI_SZ."""
    return tuple(filter(None, data.decode("utf-16-le", "replace").split("\0")))


def read_pnp_devices() -> tuple[PnpDevice, ...] | None:
    """Lists the present devices of the display and accelerator classes."""
    if sys.platform != "win32":
        return None
    try:
        setup = ctypes.WinDLL("setupapi")
        manager = ctypes.WinDLL("cfgmgr32")
    except OSError:
        return None
    setup.SetupDiGetClassDevsW.restype = ctypes.c_void_p
    return devices_from_libraries(setup, manager)


# `Any`, here and below: libraries that ctypes has loaded, or a test's stand-ins for them.
def devices_from_libraries(setup: Any, manager: Any) -> tuple[PnpDevice, ...]:
    """Lists devices through setupapi and cfgmgr32."""
    found: list[PnpDevice] = []
    for guid in DEVICE_CLASSES:
        handle = setup.SetupDiGetClassDevsW(
            ctypes.byref(Guid.of(guid)), None, None, ctypes.c_uint32(DIGCF_PRESENT)
        )
        if handle in (None, ctypes.c_void_p(-1).value):
            continue
        devices = ctypes.c_void_p(handle)
        for index in range(MAX_DEVICES):
            info = DeviceInfoData(size=ctypes.sizeof(DeviceInfoData))
            if not setup.SetupDiEnumDeviceInfo(devices, ctypes.c_uint32(index), ctypes.byref(info)):
                break
            found.append(_pnp_device(setup, manager, devices, info))
        setup.SetupDiDestroyDeviceInfoList(devices)
    return tuple(found)


def _pnp_device(
    setup: Any, manager: Any, devices: ctypes.c_void_p, info: DeviceInfoData
) -> PnpDevice:
    def registry_property(code: int) -> bytes:
        buffer = ctypes.create_string_buffer(PROPERTY_BYTES)
        size = ctypes.c_uint32()
        ok = setup.SetupDiGetDeviceRegistryPropertyW(
            devices,
            ctypes.byref(info),
            ctypes.c_uint32(code),
            None,
            buffer,
            ctypes.c_uint32(PROPERTY_BYTES),
            ctypes.byref(size),
        )
        return buffer.raw[: size.value] if ok else b""

    def driver_version() -> str:
        guid, number = DRIVER_VERSION_KEY
        key = PropertyKey.from_buffer_copy(uuid.UUID(guid).bytes_le + number.to_bytes(4, "little"))
        buffer = ctypes.create_string_buffer(PROPERTY_BYTES)
        kind, size = ctypes.c_uint32(), ctypes.c_uint32()
        ok = setup.SetupDiGetDevicePropertyW(
            devices,
            ctypes.byref(info),
            ctypes.byref(key),
            ctypes.byref(kind),
            buffer,
            ctypes.c_uint32(PROPERTY_BYTES),
            ctypes.byref(size),
            ctypes.c_uint32(0),
        )
        return text_from_utf16(buffer.raw[: size.value]) if ok else ""

    instance = ctypes.create_string_buffer(PROPERTY_BYTES)
    setup.SetupDiGetDeviceInstanceIdW(
        devices, ctypes.byref(info), instance, ctypes.c_uint32(PROPERTY_BYTES // 2), None
    )
    status, problem = ctypes.c_uint32(), ctypes.c_uint32()
    failed = manager.CM_Get_DevNode_Status(
        ctypes.byref(status), ctypes.byref(problem), ctypes.c_uint32(info.instance), 0
    )
    has_problem = not failed and bool(status.value & DN_HAS_PROBLEM)
    return PnpDevice(
        instance_id=text_from_utf16(instance.raw),
        hardware_ids=texts_from_utf16(registry_property(SPDRP_HARDWAREID))
        + texts_from_utf16(registry_property(SPDRP_COMPATIBLEIDS)),
        description=text_from_utf16(registry_property(SPDRP_FRIENDLYNAME))
        or text_from_utf16(registry_property(SPDRP_DEVICEDESC)),
        driver_version=driver_version(),
        service=text_from_utf16(registry_property(SPDRP_SERVICE)),
        pci_address=address_from_properties(
            registry_property(SPDRP_BUSNUMBER), registry_property(SPDRP_ADDRESS)
        ),
        problem=problem.value if has_problem else 0,
    )


def address_from_properties(bus: bytes, address: bytes) -> str:
    """Returns "0000:01:00.0": the address holds the device above, the function below."""
    if len(bus) != 4 or len(address) != 4:
        return ""
    number, place = int.from_bytes(bus, "little"), int.from_bytes(address, "little")
    return _address_text(number, place >> 16, place & 0xFFFF)


def read_dxgi_adapters() -> tuple[DxgiAdapter, ...] | None:
    """Lists the adapters of DXGI."""
    if sys.platform != "win32":
        return None
    try:
        dxgi = ctypes.WinDLL("dxgi")
        gdi = ctypes.WinDLL("gdi32")
    except OSError:
        return None
    return adapters_from_libraries(dxgi, gdi)


def adapters_from_libraries(dxgi: Any, gdi: Any) -> tuple[DxgiAdapter, ...] | None:
    """Lists adapters through dxgi, and their places through gdi32."""
    factory = ctypes.c_void_p()
    if dxgi.CreateDXGIFactory1(ctypes.byref(Guid.of(FACTORY_ID)), ctypes.byref(factory)) != 0:
        return None
    found: list[DxgiAdapter] = []
    for index in range(MAX_DEVICES):
        adapter = ctypes.c_void_p()
        if _method(factory, ENUM_ADAPTERS1, ctypes.c_uint32(index), ctypes.byref(adapter)) != 0:
            break
        description = AdapterDescription()
        if _method(adapter, GET_DESC1, ctypes.byref(description)) == 0:
            found.append(adapter_from_description(description, _address(gdi, description.luid)))
        _method(adapter, RELEASE)
    _method(factory, RELEASE)
    return tuple(found)


def adapter_from_description(description: AdapterDescription, address: str) -> DxgiAdapter:
    """Returns the record of one adapter."""
    return DxgiAdapter(
        description=text_from_utf16(bytes(description.description)),
        vendor_id=description.vendor_id,
        device_id=description.device_id,
        subsystem_id=description.subsystem_id,
        dedicated_bytes=description.dedicated_video,
        shared_bytes=description.shared_system,
        luid=str(description.luid),
        is_software=bool(description.flags & (ADAPTER_REMOTE | ADAPTER_SOFTWARE)),
        pci_address=address,
    )


# `Any`: the arguments of a COM method are whatever ctypes takes.
def _method(interface: ctypes.c_void_p, place: int, *arguments: Any) -> int:
    """Calls a method of a COM object by its place in the table of functions."""
    table = ctypes.cast(interface, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p))).contents
    kinds = [type(a) if isinstance(a, ctypes.c_uint32) else ctypes.c_void_p for a in arguments]
    # The conventions differ on 32-bit Windows only.
    make_prototype = getattr(ctypes, "WINFUNCTYPE", ctypes.CFUNCTYPE)
    prototype = make_prototype(ctypes.c_int32, ctypes.c_void_p, *kinds)
    passed = [
        a if isinstance(a, ctypes.c_uint32) else ctypes.cast(a, ctypes.c_void_p) for a in arguments
    ]
    return int(prototype(table[place])(interface, *passed))


def _address(gdi: Any, luid: Luid) -> str:
    """Asks the kernel for the PCI address of an adapter, which joins DXGI with SetupAPI."""
    opened = OpenAdapter(luid=luid)
    place = AdapterAddress()
    try:
        if gdi.D3DKMTOpenAdapterFromLuid(ctypes.byref(opened)) != 0:
            return ""
        query = AdapterQuery(
            handle=opened.handle,
            kind=KMTQAITYPE_ADAPTERADDRESS,
            data=ctypes.addressof(place),
            size=ctypes.sizeof(place),
        )
        failed = gdi.D3DKMTQueryAdapterInfo(ctypes.byref(query))
        gdi.D3DKMTCloseAdapter(ctypes.byref(ctypes.c_uint32(opened.handle)))
    except AttributeError:  # an old Windows without these calls
        return ""
    return "" if failed else _address_text(place.bus, place.device, place.function)


def _address_text(bus: int, device: int, function: int) -> str:
    """Returns "0000:01:00.0"; the segment of a machine with many buses stands above the bus."""
    if bus > 0xFFFFFF or device > 0x1F or function > 7:
        return ""
    return f"{bus >> 8:04x}:{bus & 0xFF:02x}:{device:02x}.{function}"


def read_registry(key: str, value: str) -> str | int | None:
    """Returns a text or number below HKEY_LOCAL_MACHINE."""
    if sys.platform != "win32":
        return None
    import winreg

    try:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, key) as opened:
            found = winreg.QueryValueEx(opened, value)[0]
    except OSError:
        return None
    return found if isinstance(found, str | int) else None


def read_memory_bytes() -> int | None:
    """Returns the physical memory of the machine."""
    if sys.platform != "win32":
        return None
    status = MemoryStatus(size=ctypes.sizeof(MemoryStatus))
    if not ctypes.WinDLL("kernel32").GlobalMemoryStatusEx(ctypes.byref(status)):
        return None
    return int(status.total_physical)
