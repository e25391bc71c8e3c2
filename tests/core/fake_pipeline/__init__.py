"""A fake vendor that takes whole checkpoints: for tests of what lies between it and the user."""

from sdkit_dispatch.contract import VendorSpec

SPEC = VendorSpec(
    name="fake-pipeline",
    extra="",
    adapter="fake_pipeline.adapter:FakePipelineAdapter",
    device_kinds=("cpu", "discrete"),
    revision=1,
    rank=None,
    takes="checkpoint",
)
