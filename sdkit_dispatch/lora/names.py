"""The names that LoRA files give to modules, as names of the modules of a diffusers pipeline.

A dotted path and the same with underscores are one name here: kohya's scripts write the latter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

UNET_ROOTS = (
    "conv_in",
    "time_embedding",
    "add_embedding",
    "down_blocks",
    "mid_block",
    "up_blocks",
    "conv_out",
)
TEXT_ROOTS = ("embeddings", "encoder", "final_layer_norm", "text_projection")
ROOTS: Mapping[str, tuple[str, ...]] = {
    "unet": UNET_ROOTS,
    "text_encoder": TEXT_ROOTS,
    "text_encoder_2": TEXT_ROOTS,
}
"""Component that a LoRA can change -> what the paths of its modules begin with."""
PREFIXES: tuple[tuple[str, str], ...] = (
    ("lora_unet_", "unet"),
    ("lora_te1_", "text_encoder"),
    ("lora_te2_", "text_encoder_2"),
    ("lora_te_", "text_encoder"),
    ("unet.", "unet"),
    ("text_encoder.", "text_encoder"),
    ("text_encoder_2.", "text_encoder_2"),
    ("diffusion_model.", "unet"),
    ("", "unet"),
)
"""How a name begins -> the component; of a bare UNet's LoRA nothing says so."""
RESNET = {
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
OUTSIDE = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
"""Module of a diffusers UNet -> the same in the original layout."""


def canonical_path(component: str, path: str) -> str:
    """Returns a module's path without what an exporter or library wraps the model in.

    Empty if it is no path of that component.
    """
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part in ROOTS[component]:
            return ".".join(parts[index:])
    return ""


def place_of(module: str) -> tuple[str, str]:
    """Returns the component and the name in it, with underscores, of a module in a LoRA file."""
    module = module.removeprefix("base_model.model.")
    for prefix, component in PREFIXES:
        if module.startswith(prefix):
            name = module.removeprefix(prefix).removeprefix("base_model.model.").replace(".", "_")
            if component != "unet":
                name = name.removeprefix("text_model_")
            # As diffusers wrote them until 0.17: "attn1.processor.to_q_lora.down.weight".
            name = re.sub(r"_processor_to_(q|k|v)$", r"_to_\1", name)
            name = re.sub(r"_processor_to_out$", "_to_out_0", name)
            return component, name
    raise AssertionError("the last prefix is empty")


def module_names(
    component: str, paths: Iterable[str], config: Mapping[str, Any]
) -> dict[str, str]:  # Any: JSON data
    """Returns every name, with underscores, that a LoRA may give a module -> its path."""
    names = {}
    layers = config.get("layers_per_block")
    for path in paths:
        names[path.replace(".", "_")] = path
        if component == "unet" and isinstance(layers, int):
            original = original_path(path, layers, config)
            if original:
                names[original.replace(".", "_")] = path
    return names


def original_path(path: str, layers: int, config: Mapping[str, Any]) -> str:
    """Returns a UNet module's path in the layout of the first releases; empty if it has none.

    There the blocks are counted through: `down_blocks.1.attentions.0` of a UNet with two layers a
    block is `input_blocks.4.1`, for a block's last input is its downsampler.

    Source: https://github.com/CompVis/stable-diffusion (openaimodel.py)
    """
    if path in OUTSIDE:
        return OUTSIDE[path]
    found = re.fullmatch(r"(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.+)", path)
    if found is None:
        middle = re.fullmatch(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)", path)
        if middle is None:
            return ""
        kind, number, rest = middle[1], int(middle[2]), middle[3]
        index = 2 * number + (kind == "attentions")
        return f"middle_block.{index}.{RESNET.get(rest, rest) if kind == 'resnets' else rest}"
    side, block, kind, number, rest = found[1], int(found[2]), found[3], int(found[4]), found[5]
    size = layers + 1
    start = f"input_blocks.{1 + block * size}" if side == "down" else ""
    index = (1 if side == "down" else 0) + block * size + number
    start = f"{'input' if side == 'down' else 'output'}_blocks"
    if kind == "resnets":
        return f"{start}.{index}.0.{RESNET.get(rest, rest)}"
    if kind == "attentions":
        return f"{start}.{index}.1.{rest}"
    if kind == "downsamplers":
        return f"{start}.{block * size + size}.0.op"
    if kind == "upsamplers":
        types = config.get("up_block_types")
        has_attention = isinstance(types, list) and "CrossAttn" in str(types[block : block + 1])
        return f"{start}.{block * size + layers}.{1 + has_attention}.{rest}"
    return ""
