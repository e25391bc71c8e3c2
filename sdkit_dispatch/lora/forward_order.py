"""The linear layers of a model in the order in which it computes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
TEXT_LAYER = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")),
    "mlp.fc1",
    "mlp.fc2",
)
MAX_LAYERS = 1000
"""More than any model has: a config is somebody else's file."""


def linears_in_order(component: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the paths of the linear layers of all transformer blocks; none if unsure.

    Source: diffusers, models/unets/unet_2d_condition.py; transformers, models/clip.
    """
    try:
        rows = _unet(config) if component == "unet" else _text(config)
        found = []
        for path in rows:
            found.append(path)
            if len(found) > MAX_LAYERS * len(TEXT_LAYER):
                return ()
    except (KeyError, TypeError, IndexError, ValueError):
        return ()
    return tuple(found)


def _text(config: Mapping[str, Any]) -> Iterator[str]:
    for index in range(min(int(config["num_hidden_layers"]), MAX_LAYERS)):
        yield from (f"encoder.layers.{index}.{name}" for name in TEXT_LAYER)


def _unet(config: Mapping[str, Any]) -> Iterator[str]:
    downs, ups = config["down_block_types"], config["up_block_types"]
    layers = _each(config["layers_per_block"], len(downs))
    depths = _each(config.get("transformer_layers_per_block", 1), len(downs))
    is_linear = bool(config.get("use_linear_projection"))
    for index, kind in enumerate(downs):
        if "CrossAttn" in kind:
            for number in range(layers[index]):
                path = f"down_blocks.{index}.attentions.{number}"
                yield from _transformer(path, depths[index], is_linear)
    if "CrossAttn" in str(config.get("mid_block_type", "UNetMidBlock2DCrossAttn")):
        yield from _transformer("mid_block.attentions.0", depths[-1], is_linear)
    for index, kind in enumerate(ups):
        if "CrossAttn" in kind:
            for number in range(layers[-1 - index] + 1):
                path = f"up_blocks.{index}.attentions.{number}"
                yield from _transformer(path, depths[-1 - index], is_linear)


def _transformer(path: str, depth: int, is_linear: bool) -> Iterator[str]:
    if is_linear:  # else it is a convolution
        yield f"{path}.proj_in"
    for index in range(min(depth, MAX_LAYERS)):
        block = f"{path}.transformer_blocks.{index}"
        for attention in ("attn1", "attn2"):
            yield from (f"{block}.{attention}.{name}" for name in ATTENTION)
        yield from (f"{block}.ff.net.0.proj", f"{block}.ff.net.2")
    if is_linear:
        yield f"{path}.proj_out"


def _each(value: Any, count: int) -> list[int]:  # Any: JSON data
    return [int(one) for one in value] if isinstance(value, list) else [int(value)] * count
