"""Records what diffusers' UNets compute where sides do not halve evenly: `record_odd.py BUILD`.

Writes, in odd/, `{sd15,sdxl,deep}.npz` (inputs and `out_sample` for each of `SIZES`), and the UNet
"deep", of four levels as SD1.5's, in two exports. See README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import tiny
import torch
from export_direct import OPSET, export, unet_graph

OUT = Path(__file__).parent / "odd"
SIZES = ((1, 17, 19), (2, 16, 13))
DEEP_SIZES = ((1, 21, 32), (1, 9, 39))
"""Batch, height and width of the latents."""
TIMESTEP = 501.0


def deep() -> diffusers.UNet2DConditionModel:
    """Four levels, so that an odd side appears at one, at several, at all."""
    torch.manual_seed(4)
    return tiny.liven(
        diffusers.UNet2DConditionModel(
            sample_size=32,
            block_out_channels=(8, 8, 8, 8),
            down_block_types=(*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"),
            up_block_types=("UpBlock2D", *("CrossAttnUpBlock2D",) * 3),
            layers_per_block=1,
            norm_num_groups=4,
            cross_attention_dim=8,
            attention_head_dim=2,
        )
    )


def recorded(unet: Any, sizes: Any) -> dict[str, np.ndarray]:
    config, random = unet.config, np.random.default_rng(11)
    hidden_size = config.cross_attention_dim
    arrays = {}
    for batch, height, width in sizes:
        feeds = {
            "sample": random.standard_normal((batch, 4, height, width)),
            "encoder_hidden_states": random.standard_normal((batch, 77, hidden_size)),
        }
        if config.addition_embed_type == "text_time":
            pooled = config.projection_class_embeddings_input_dim
            pooled -= 6 * config.addition_time_embed_dim
            feeds["text_embeds"] = random.standard_normal((batch, pooled))
            feeds["time_ids"] = np.tile([64.0, 96, 0, 0, 64, 96], (batch, 1))
        feeds = {name: array.astype(np.float32) for name, array in feeds.items()}
        given = {name: torch.from_numpy(array) for name, array in feeds.items()}
        sample, hidden = given.pop("sample"), given.pop("encoder_hidden_states")
        conditions = given or None
        with torch.no_grad():
            found = unet(sample, torch.tensor(TIMESTEP), hidden, added_cond_kwargs=conditions)
        title = f"{batch}x{height}x{width}"
        arrays |= {f"{title}.{name}": array for name, array in feeds.items()}
        arrays[f"{title}.out_sample"] = found.sample.numpy()
    return arrays


def main(build: Path) -> None:
    unets = {
        family: diffusers.UNet2DConditionModel.from_pretrained(build / family / "unet")
        for family in tiny.FAMILIES
    }
    unets["deep"] = deep()
    OUT.mkdir(exist_ok=True)
    for name, unet in unets.items():
        sizes = (*SIZES, *DEEP_SIZES) if name == "deep" else SIZES
        np.savez_compressed(OUT / f"{name}.npz", **recorded(unet.eval(), sizes))
    for style in OPSET:
        path = OUT / f"deep-{style}" / "unet" / "model.onnx"
        export(unet_graph(unets["deep"], torch.float32), path, style=style, external=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
