"""stable-diffusion.cpp: whole checkpoints, as they are, on processors and Vulkan GPUs."""

from sdkit_dispatch.contract import VendorSpec

SPEC = VendorSpec(
    name="sdcpp",
    extra="sdcpp",
    adapter="sdkit_sdcpp.adapter:SdcppAdapter",
    device_kinds=("cpu", "integrated", "discrete"),
    revision=1,
    rank=None,
    platforms=("linux-x86_64", "windows-x86_64"),
    runtime_packages=("cyllama-vulkan",),
    conflicts=("cyllama", "cyllama-cuda12", "cyllama-rocm", "cyllama-sycl"),
    takes="checkpoint",
)
