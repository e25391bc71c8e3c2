"""What TensorRT-RTX 1.7 compiles for, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sdkit_dispatch.contract import Precision

HALVES: tuple[Precision, ...] = ("fp16", "bf16", "fp32", "int8")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A compute capability.

    Attributes:
        capability: Member of the runtime's enumeration ComputeCapability.
        header_bit: Its bit in the header of a plan (undocumented; seen with 1.7.1).
        precisions: What it computes in, the best first.
        has_fp8: Whether graphs may hold FP8 values.
        caution: Why it is compiled for on request only; empty for a supported one.
    """

    capability: str
    header_bit: int
    precisions: tuple[Precision, ...] = HALVES
    has_fp8: bool = False
    caution: str = ""


TARGETS: Mapping[str, Target] = {
    # NVIDIA/TensorRT-RTX#11: no FP32 matrix products on Turing; bfloat16 is refused by the builder.
    "sm_75": Target(capability="SM75", header_bit=0x01, precisions=("fp16", "int8")),
    "sm_80": Target(
        capability="SM80",
        header_bit=0x02,
        caution="the runtime compiles for it, but NVIDIA's support matrix does not list it",
    ),
    "sm_86": Target(capability="SM86", header_bit=0x04),
    "sm_89": Target(capability="SM89", header_bit=0x08, has_fp8=True),
    "sm_120": Target(capability="SM120", header_bit=0x10, has_fp8=True),
    "sm_121": Target(capability="SM121", header_bit=0x20, has_fp8=True),
}
"""Source: enumeration ComputeCapability of 1.7.1.116 and NVIDIA's support matrix."""

REFUSED: Mapping[str, str] = {
    "sm_70": "Volta is older than what it serves",
    "sm_87": "it serves no Jetson Orin",
    "sm_90": "it serves no Hopper cards of data centres",
    "sm_100": "it serves no Blackwell cards of data centres",
    "sm_103": "it serves no Blackwell cards of data centres",
    "sm_110": "it serves no Jetson Thor",
}
"""Compute capabilities that exist and that it does not serve."""
INSTEAD: Mapping[str, tuple[str, ...]] = {
    "sm_70": ("ggml",),
    "sm_80": ("tensorrt", "cuda"),
    "sm_87": ("tensorrt", "ggml"),
    "sm_90": ("tensorrt", "cuda"),
    "sm_100": ("tensorrt", "cuda"),
    "sm_103": ("tensorrt", "cuda"),
    "sm_110": ("tensorrt", "cuda"),
}
"""Vendors that serve what it does not, the best first."""


def archs_of(target: str) -> tuple[str, ...]:
    """Returns the architectures of a target: "sm_89,sm_120" -> ("sm_89", "sm_120")."""
    return tuple(part.strip() for part in target.split(",") if part.strip())


def target_of(archs: tuple[str, ...]) -> str:
    """Returns the target that is all of `archs`, each once, in the order of their numbers."""
    return ",".join(sorted(set(archs), key=lambda arch: int(arch.removeprefix("sm_"))))


def why_refused(arch: str, *, is_forced: bool) -> tuple[str, str]:
    """Returns the reason and the remedy for an architecture that is not compiled for; or "", ""."""
    known = TARGETS.get(arch)
    if known is not None and (is_forced or not known.caution):
        return "", ""
    others = INSTEAD.get(arch, ("cuda", "ggml"))
    remedy = f"--vendor {others[0]}"
    if known is not None:
        return f"{arch}: {known.caution}", f"{remedy}, or --vendor tensorrt-rtx --force"
    listed = ", ".join(name for name, one in TARGETS.items() if not one.caution)
    why = REFUSED.get(arch, "it is not an architecture that it knows")
    return (
        f"TensorRT-RTX does not compile for {arch or 'an unknown architecture'}: {why}; it "
        f"compiles for {listed}",
        remedy,
    )
