"""ONNX Runtime. The `cpu` vendor is the numeric reference and the last step of the ladder."""

from sdkit_dispatch.contract import VendorSpec

# Every one of these installs the same import package, over each other's files, and no package
# tool notices.
_OTHER_WHEELS = (
    "onnxruntime-directml",
    "onnxruntime-gpu",
    "onnxruntime-migraphx",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
    "onnxruntime-rocm",
    "onnxruntime-training",
    "onnxruntime-windowsml",
)

CPU = VendorSpec(
    name="cpu",
    extra="cpu",
    adapter="sdkit_onnxruntime.adapter:CpuAdapter",
    device_kinds=("cpu",),
    revision=1,
    rank=20,
    runtime_packages=("onnxruntime",),
    conflicts=_OTHER_WHEELS,
)
