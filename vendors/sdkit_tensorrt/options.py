"""The options of both vendors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sdkit_dispatch.graph.size_ranges import Ranges


@dataclass(frozen=True, kw_only=True)
class RtxOptions:
    """The options of the vendor tensorrt-rtx.

    Attributes:
        profiles: Component -> the size ranges that its engine serves; one engine for the one size
            that is asked for where there are none.
        keep_fp32: Shell patterns over node names and operator types that compute in float32.
        weight_streaming: Engines may leave weights in the computer's memory when the card's is
            short.
        refit: Engines take other weights of the same graph (a LoRA, say) without a build; such
            engines are built on the card alone, and may be slower.
        force: Compile in spite of the support matrix and of the memory estimate.
    """

    profiles: Mapping[str, tuple[Ranges, ...]] = field(default_factory=dict)
    keep_fp32: tuple[str, ...] = ()
    weight_streaming: bool = False
    refit: bool = False
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class TensorRtOptions:
    """The options of the vendor tensorrt.

    Attributes:
        profiles: As in `RtxOptions`.
        keep_fp32: As in `RtxOptions`.
        weight_streaming: As in `RtxOptions`.
        hardware_compatibility: "none" binds an engine to the very model of card, "ampere_plus" to
            none from Ampere on (slower), "same_compute_capability" to the architecture.
        optimization_level: 0..5: how long the builder searches.
        refit: As in `RtxOptions`.
        force: Compile in spite of the memory estimate.
    """

    profiles: Mapping[str, tuple[Ranges, ...]] = field(default_factory=dict)
    keep_fp32: tuple[str, ...] = ()
    weight_streaming: bool = False
    refit: bool = False
    hardware_compatibility: Literal["none", "ampere_plus", "same_compute_capability"] = "none"
    optimization_level: Literal[0, 1, 2, 3, 4, 5] = 3
    force: bool = False
