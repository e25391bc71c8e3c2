"""OpenVINO: any processor, and the GPUs and NPUs of Intel."""

from sdkit_dispatch.contract import VendorSpec

SPEC = VendorSpec(
    name="openvino",
    extra="openvino",
    adapter="sdkit_openvino.adapter:OpenVinoAdapter",
    device_kinds=("cpu", "integrated", "discrete", "npu"),
    revision=2,
    rank=10,
    # Of GPUs and NPUs; the processor is on no PCI bus, and OpenVINO runs on AMD's and Arm's too.
    pci_vendors=("8086",),
    platforms=("linux-x86_64", "linux-arm64", "windows-x86_64", "macos-arm64"),
    runtime_packages=("openvino",),
)
