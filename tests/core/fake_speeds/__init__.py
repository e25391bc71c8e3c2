"""Fake vendors of known speed: the null vendor's numbers, some of them late or never."""

from sdkit_dispatch.contract import VendorSpec

SPECS = {
    name: VendorSpec(
        name=name,
        extra="",
        adapter=f"fake_speeds.adapter:{name.partition('-')[2].capitalize()}Adapter",
        device_kinds=("cpu",),
        revision=1,
        rank=rank,
    )
    for rank, name in enumerate(("fake-broken", "fake-slow", "fake-swift"))
}
"""The fastest is ranked last, and the first one cannot compile."""
