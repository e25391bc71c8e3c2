"""NVIDIA. TensorRT-RTX compiles ahead of time, also for absent cards; TensorRT needs the card.

Both come in a build for CUDA 13 and one for CUDA 12, of which the driver decides.
"""

from sdkit_dispatch.contract import RuntimeVariant, VendorSpec

TENSORRT_RTX = VendorSpec(
    name="tensorrt-rtx",
    extra="tensorrt-rtx",
    adapter="sdkit_tensorrt.rtx_adapter:RtxAdapter",
    device_kinds=("discrete", "integrated"),
    revision=1,
    rank=10,
    pci_vendors=("10de",),
    platforms=("linux-x86_64", "linux-arm64", "windows-x86_64", "windows-arm64"),
    # The distribution tensorrt-rtx is a source that names these two, and nothing more.
    runtime_packages=("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs"),
    # Both builds install the same modules.
    conflicts=("tensorrt-rtx-cu12-bindings", "tensorrt-rtx-cu12-libs"),
    variant="cu13",
    variants={
        "cu12": RuntimeVariant(
            extra="tensorrt-rtx-cu12",
            runtime_packages=("tensorrt-rtx-cu12-bindings", "tensorrt-rtx-cu12-libs"),
            conflicts=("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs"),
        ),
    },
)

TENSORRT = VendorSpec(
    name="tensorrt",
    extra="tensorrt",
    adapter="sdkit_tensorrt.tensorrt_adapter:TensorRtAdapter",
    device_kinds=("discrete", "integrated"),
    revision=1,
    rank=11,
    pci_vendors=("10de",),
    platforms=("linux-x86_64", "linux-arm64", "windows-x86_64"),
    runtime_packages=("tensorrt-cu13-bindings", "tensorrt-cu13-libs"),
    conflicts=("tensorrt-cu12-bindings", "tensorrt-cu12-libs"),
    variant="cu13",
    variants={
        "cu12": RuntimeVariant(
            extra="tensorrt-cu12",
            runtime_packages=("tensorrt-cu12-bindings", "tensorrt-cu12-libs"),
            conflicts=("tensorrt-cu13-bindings", "tensorrt-cu13-libs"),
        ),
    },
    install_note="its libraries are on NVIDIA's own package index only, and the placeholders on "
    "PyPI fetch them from there: if that fails, name that index to the installer with "
    "PIP_EXTRA_INDEX_URL (NVIDIA's installation guide of TensorRT has its address)",
)
