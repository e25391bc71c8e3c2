"""IREE: one compiler for processors and, without having them, NVIDIA's, AMD's and Apple's GPUs."""

from sdkit_dispatch.contract import VendorSpec

SPEC = VendorSpec(
    name="iree",
    extra="iree",
    adapter="sdkit_iree.adapter:IreeAdapter",
    device_kinds=("cpu", "discrete", "integrated"),
    revision=1,
    # No rank: it is used only when named. The others are faster wherever both serve.
    platforms=("linux-x86_64", "linux-arm64", "windows-x86_64", "macos-arm64", "macos-x86_64"),
    runtime_packages=("iree-base-compiler", "iree-base-runtime"),
)
