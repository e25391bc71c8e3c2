"""What IREE compiles for: a backend and an architecture, as the target of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sdkit_dispatch.contract import Device
from sdkit_iree.cpu_levels import llvm_cpu
from sdkit_iree.options import Backend


@dataclass(frozen=True, kw_only=True)
class BackendFacts:
    """One backend of the compiler.

    Attributes:
        prefix: How the target of its engines begins, before the architecture.
        makers: Whose devices it compiles for; empty: the processor's.
        flags: Of `iree-compile`; "{arch}" is the architecture.
    """

    prefix: str
    makers: tuple[str, ...] = ()
    flags: tuple[str, ...]


BACKENDS: Mapping[Backend, BackendFacts] = {
    "llvm-cpu": BackendFacts(
        prefix="isa=",
        flags=(
            "--iree-hal-target-device=local",
            "--iree-hal-local-target-device-backends=llvm-cpu",
            "--iree-llvmcpu-target-cpu={arch}",
            # They are a quarter of a module's size, and its speed is the same.
            "--iree-llvmcpu-debug-symbols=false",
        ),
    ),
    "cuda": BackendFacts(
        prefix="cuda=",
        makers=("nvidia",),
        flags=("--iree-hal-target-device=cuda", "--iree-cuda-target={arch}"),
    ),
    "rocm": BackendFacts(
        prefix="rocm=",
        makers=("amd",),
        flags=("--iree-hal-target-device=hip", "--iree-rocm-target={arch}"),
    ),
    "metal-spirv": BackendFacts(
        prefix="metal=",
        makers=("apple",),
        flags=(
            "--iree-hal-target-device=metal",
            "--iree-metal-target-platform=macos",
            # Shader sources: a library would need Apple's own compiler, which is on Macs only.
            "--iree-metal-compile-to-metallib=false",
        ),
    ),
    "vulkan-spirv": BackendFacts(
        prefix="vulkan=",
        makers=("nvidia", "amd"),
        flags=("--iree-hal-target-device=vulkan", "--iree-vulkan-target={arch}"),
    ),
}
"""The first that serves a maker is the one that "auto" means."""


def backends_for(device: Device) -> tuple[Backend, ...]:
    """Returns the backends that compile for a device, the default first."""
    if device.kind == "cpu":
        return ("llvm-cpu",)
    return tuple(name for name, facts in BACKENDS.items() if device.maker in facts.makers)


def target_of(backend: Backend, arch: str) -> str:
    """Returns the target of an engine: "isa=x86-64-v3", "cuda=sm_89"."""
    return f"{BACKENDS[backend].prefix}{arch}"


def flags_of(target: str) -> tuple[str, ...] | None:
    """Returns the compiler's flags for a target; None if it is none of ours."""
    for backend, facts in BACKENDS.items():
        if target.startswith(facts.prefix):
            arch = target.removeprefix(facts.prefix)
            arch = llvm_cpu(arch) if backend == "llvm-cpu" else arch
            return tuple(flag.format(arch=arch) for flag in facts.flags)
    return None
