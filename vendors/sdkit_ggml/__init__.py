"""ggml: any processor, and GPUs through Vulkan, Metal, CUDA, HIP or SYCL."""

import platform
import sys

from sdkit_dispatch.contract import VendorSpec

_HAS_VULKAN_WHEEL = (sys.platform, platform.machine().lower()) in {
    ("linux", "x86_64"),
    ("win32", "amd64"),
    ("darwin", "arm64"),
}
"""Where a wheel brings ggml with CPU variants, the fast matrix product, and Vulkan or Metal.
Elsewhere libggml-python brings the plain library."""

_FLAVOURS = ("-cuda12", "-rocm", "-sycl", "-vulkan", "")
"""Of wheels that hold ggml beside something else: `runtime/providers.py`."""

SPEC = VendorSpec(
    name="ggml",
    extra="ggml",
    adapter="sdkit_ggml.adapter:GgmlAdapter",
    device_kinds=("cpu", "integrated", "discrete"),
    revision=3,
    rank=30,
    runtime_packages=(
        "gguf",
        "transcribe-cpp-native" if _HAS_VULKAN_WHEEL else "libggml-python",
    ),
    shared_files=("weights.gguf",),
    also_used=(
        *("transcribe-cpp-native", "libggml-python"),
        *(f"{package}{flavour}" for package in ("cyllama", "inferna") for flavour in _FLAVOURS),
    ),
)
