"""ONNX Runtime. The `cpu` vendor is the numeric reference and the last step of the ladder.

`cuda` comes after TensorRT on NVIDIA's cards; `migraphx` is AMD's own compiler, for who has ROCm.
"""

from sdkit_dispatch.contract import VendorSpec

# Every one of these installs the same import package, over each other's files, and no package
# tool notices.
_WHEELS = (
    "onnxruntime",
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
    conflicts=tuple(name for name in _WHEELS if name != "onnxruntime"),
)

CUDA = VendorSpec(
    name="cuda",
    extra="cuda",
    adapter="sdkit_onnxruntime.cuda:CudaAdapter",
    device_kinds=("discrete", "integrated"),
    revision=1,
    rank=20,
    pci_vendors=("10de",),
    platforms=("linux-x86_64", "windows-x86_64"),
    runtime_packages=("onnxruntime-gpu",),
    conflicts=tuple(name for name in _WHEELS if name != "onnxruntime-gpu"),
)

MIGRAPHX = VendorSpec(
    name="migraphx",
    extra="migraphx",
    adapter="sdkit_onnxruntime.migraphx:MigraphxAdapter",
    device_kinds=("discrete", "integrated"),
    revision=1,
    rank=10,
    pci_vendors=("1002",),
    platforms=("linux-x86_64",),
    runtime_packages=("onnxruntime-migraphx",),
    conflicts=tuple(name for name in _WHEELS if name != "onnxruntime-migraphx"),
)
