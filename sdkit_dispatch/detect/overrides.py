"""The environment variables that change what is found: the makers' own, and ours.

The makers' variables hide GPUs from programs. An engine obeys them whether we do or not, so a
device that they hide must not be planned for; it stays in the list with a problem that names the
variable. Which engines a code rules out is in support.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sdkit_dispatch.contract import Device, Problem

ARCH_VARIABLE = "SDKIT_DISPATCH_ARCH"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A variable that lists what may be seen: indices, or the beginnings of UUIDs.

    Attributes:
        unless: Another variable that takes its place where it is set.
    """

    variable: str
    maker: str
    code: str
    unless: str = ""


RULES = (
    # CUDA numbers by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID, which our workers are given.
    Rule(variable="CUDA_VISIBLE_DEVICES", maker="nvidia", code="hidden"),
    Rule(variable="ROCR_VISIBLE_DEVICES", maker="amd", code="hidden"),
    Rule(variable="HIP_VISIBLE_DEVICES", maker="amd", code="hidden"),
    # HIP reads it for the sake of programs written for CUDA; Vulkan does not.
    Rule(
        variable="CUDA_VISIBLE_DEVICES",
        maker="amd",
        code="hidden-from-hip",
        unless="HIP_VISIBLE_DEVICES",
    ),
)
"""In the order in which they apply: HIP numbers what ROCR_VISIBLE_DEVICES has left."""

UNSEEN = frozenset({"passthrough", "no-driver", "stopped", "mig-parent", "no-kfd", "hidden"})
"""Problems of devices that CUDA and HIP do not number."""


def with_overrides(devices: Sequence[Device], env: Mapping[str, str]) -> list[Device]:
    """Returns the devices as the environment wants them seen."""
    result = _with_archs(devices, env.get(ARCH_VARIABLE, ""))
    for rule in RULES:
        value = env.get(rule.variable)
        if value is not None and not (rule.unless and rule.unless in env):
            result = _with_hidden(result, rule, value)
    return _with_vulkan_order(result, env.get("GGML_VK_VISIBLE_DEVICES"))


def _with_archs(devices: Sequence[Device], value: str) -> list[Device]:
    """Applies "10de:3000=sm_130, pci:0000:03:00.0=gfx1210": for a card newer than our table."""
    wanted = dict(re.findall(r"([^\s,=]+)\s*=\s*([\w-]+)", value))
    return [
        replace(device, arch=arch, sources={**device.sources, "arch": ARCH_VARIABLE})
        if (arch := wanted.get(device.id) or wanted.get(device.pci_id))
        else device
        for device in devices
    ]


def _with_hidden(devices: list[Device], rule: Rule, value: str) -> list[Device]:
    numbered = _numbered(devices, rule.maker)
    seen = seen_ids(value, numbered, [d for d in devices if d.maker == rule.maker])
    return [
        _hidden(device, rule, value)
        if device.maker == rule.maker
        and device.kind in ("discrete", "integrated")
        and device.id not in seen
        and not {problem.code for problem in device.problems} & UNSEEN
        else device
        for device in devices
    ]


def _numbered(devices: Sequence[Device], maker: str) -> list[Device]:
    """Returns the GPUs of a maker as its runtime numbers them: of a card's slices only one."""
    result: list[Device] = []
    for device in devices:
        if device.maker != maker or device.kind not in ("discrete", "integrated"):
            continue
        if {problem.code for problem in device.problems} & UNSEEN:
            continue
        is_slice = device.uuid.startswith("MIG-")
        if is_slice and any(
            other.uuid.startswith("MIG-") and other.pci_address == device.pci_address
            for other in result
        ):
            continue
        result.append(device)
    return result


def seen_ids(value: str, numbered: Sequence[Device], named: Sequence[Device]) -> set[str]:
    """Returns the ids of the devices that a list lets through.

    Args:
        value: "0,2", "GPU-3f2a", "MIG-...". As the runtimes do, everything after the first entry
            that names nothing is ignored; so "-1", "" and "none" hide all.
        numbered: What an index counts.
        named: What a UUID may name.
    """
    seen: set[str] = set()
    for entry in value.split(","):
        token = entry.strip()
        if re.fullmatch(r"\d{1,4}", token):
            found = [numbered[int(token)]] if int(token) < len(numbered) else []
        else:
            found = [d for d in named if len(token) > 4 and d.uuid.startswith(token)]
        if len(found) != 1:
            break
        seen.add(found[0].id)
    return seen


def _hidden(device: Device, rule: Rule, value: str) -> Device:
    problem = Problem(
        code=rule.code,
        message=f"{rule.variable}={value} hides {device.name}",
        hint=f"unset {rule.variable}",
    )
    return replace(device, problems=(*device.problems, problem))


def _with_vulkan_order(devices: list[Device], value: str | None) -> list[Device]:
    """Obeys GGML_VK_VISIBLE_DEVICES where that can be known without Vulkan: with one GPU."""
    if value is None:
        return devices
    gpus = [
        device
        for device in devices
        if device.kind in ("discrete", "integrated")
        and not {problem.code for problem in device.problems} & UNSEEN
    ]
    indices = {token.strip() for token in value.split(",")}
    if len(gpus) == 1 and "0" in indices:
        return devices
    if len(gpus) > 1 and indices - {""}:
        code = "vulkan-order"
        message = "lists devices by Vulkan's own numbers; which one this is shows only in a run"
    else:
        code, message = "hidden-from-vulkan", "hides it from ggml"
    problem = Problem(
        code=code,
        message=f"GGML_VK_VISIBLE_DEVICES={value} {message}",
        hint="unset GGML_VK_VISIBLE_DEVICES",
    )
    return [
        replace(device, problems=(*device.problems, problem)) if device in gpus else device
        for device in devices
    ]
