"""The options of the iree vendor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Backend = Literal["llvm-cpu", "cuda", "rocm", "vulkan-spirv", "metal-spirv"]
CpuLevel = Literal["x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4"]


@dataclass(frozen=True, kw_only=True)
class IreeOptions:
    """The options of the iree vendor.

    Attributes:
        backend: What to compile with, as IREE names it; "auto" is the device's own: llvm-cpu for
            the processor, cuda, rocm or metal-spirv for a card of NVIDIA, AMD or Apple.
            vulkan-spirv serves cards of NVIDIA and AMD.
        cpu: The instruction set that processor engines use; "auto" is the best level that this
            processor has. A lower one runs on more machines, slower.
        force: Compile in spite of the memory estimate.
    """

    backend: Literal["auto"] | Backend = "auto"
    cpu: Literal["auto"] | CpuLevel = "auto"
    force: bool = False
