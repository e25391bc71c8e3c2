"""A vendor without hardware: the template for a new one, and what the tests run on.

It evaluates graphs with the reference evaluator of the `onnx` package: right numbers on any
machine, slowly, and faults on request. It is never chosen unless it is named.
"""

from sdkit_dispatch.contract import VendorSpec

SPEC = VendorSpec(
    name="null",
    extra="",
    adapter="sdkit_null.adapter:NullAdapter",
    device_kinds=("cpu", "integrated", "discrete", "npu"),
    revision=2,
    rank=None,
)
