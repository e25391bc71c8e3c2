"""Which device the user means: the words that `--gpu` and SDKIT_DISPATCH_GPU take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sdkit_dispatch.contract import Device
from sdkit_dispatch.errors import ConfigError

GPU_VARIABLE = "SDKIT_DISPATCH_GPU"


def gpu_choice(env: Mapping[str, str]) -> str:
    """Returns the device that SDKIT_DISPATCH_GPU names, as `--gpu` takes it; "auto" if unset."""
    return env.get(GPU_VARIABLE, "").strip() or "auto"


def select_devices(devices: Sequence[Device], gpu: str) -> tuple[Device, ...]:
    """Returns the devices that a choice allows, in their order.

    Raises:
        ConfigError: It names no device, or more than one.
    """
    choice = gpu.strip()
    word = choice.lower()
    if word in ("", "auto"):
        return tuple(devices)
    if word in ("cpu", "npu"):
        found = [device for device in devices if device.kind == word]
    elif word.startswith("gpu:") and word[4:].isascii() and word[4:].isdigit():
        found = gpus_of(devices)[int(word[4:]) :][:1]
    else:
        found = [d for d in devices if word in (d.id.lower(), d.uuid.lower(), d.pci_address)]
        found = found or [
            device
            for device in devices
            if word in device.name.lower() or word == device.pci_id or word == device.arch
        ]
    if not found:
        raise ConfigError(
            f"no device of this machine is {choice!r}; there are:\n{_device_list(devices)}",
            "choose one of them by its id, as gpu:N, or take auto",
        )
    if len(found) > 1 and word != "npu":
        raise ConfigError(
            f"{choice!r} is {len(found)} devices of this machine:\n{_device_list(found)}",
            f"choose one by its id, such as {found[0].id}",
        )
    return tuple(found)


def gpus_of(devices: Iterable[Device]) -> list[Device]:
    """Returns the GPUs in the order that "gpu:N" counts."""
    return [device for device in devices if device.kind in ("discrete", "integrated")]


def _device_list(devices: Iterable[Device]) -> str:
    return "\n".join(f"  {device.id}  {device.name} ({device.kind})" for device in devices)
