"""Writes a seeded checkpoint with the names and shapes of Stable Diffusion 1.5, at its real size.

    python tests/models/seeded_checkpoint.py sd15.safetensors [--dtype float16] [--seed 15]

4.3 GB in float32, 2.1 GB in float16; needs numpy alone and a minute. The weights are random, as
PyTorch would start them, so pictures are noise; sizes, operators and speed are those of the real
one. Names are those of the original latent diffusion code, which most checkpoints carry.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

Tensors = Iterator[tuple[str, tuple[int, ...]]]
TOKENS, PLACES, TEXT, LAYERS = 49408, 77, 768, 12
TIME = 1280
"""Width of the embedding of a time step."""
DTYPES = {"float32": "F32", "float16": "F16"}

# Channels in and out of each level's blocks, as they follow each other; `True`: with attention.
UNET_IN = (
    (1, 320, 320, True),
    (2, 320, 320, True),
    (4, 320, 640, True),
    (5, 640, 640, True),
    (7, 640, 1280, True),
    (8, 1280, 1280, True),
    (10, 1280, 1280, False),
    (11, 1280, 1280, False),
)
UNET_DOWN = ((3, 320), (6, 640), (9, 1280))
UNET_OUT = (
    (0, 2560, 1280, False),
    (1, 2560, 1280, False),
    (2, 2560, 1280, False),
    (3, 2560, 1280, True),
    (4, 2560, 1280, True),
    (5, 1920, 1280, True),
    (6, 1920, 640, True),
    (7, 1280, 640, True),
    (8, 960, 640, True),
    (9, 960, 320, True),
    (10, 640, 320, True),
    (11, 640, 320, True),
)
UNET_UP = ((2, 1, 1280), (5, 2, 1280), (8, 2, 640))
"""Block, place in it (behind the attention, if it has one) and channels."""
VAE_LEVELS = (128, 256, 512, 512)


def norm(name: str, channels: int) -> Tensors:
    yield f"{name}.weight", (channels,)
    yield f"{name}.bias", (channels,)


def linear(name: str, inputs: int, outputs: int) -> Tensors:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def conv(name: str, inputs: int, outputs: int, size: int = 3) -> Tensors:
    yield f"{name}.weight", (outputs, inputs, size, size)
    yield f"{name}.bias", (outputs,)


def text_encoder(prefix: str) -> Tensors:
    yield f"{prefix}.embeddings.token_embedding.weight", (TOKENS, TEXT)
    yield f"{prefix}.embeddings.position_embedding.weight", (PLACES, TEXT)
    for layer in range(LAYERS):
        here = f"{prefix}.encoder.layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from linear(f"{here}.self_attn.{part}", TEXT, TEXT)
        yield from norm(f"{here}.layer_norm1", TEXT)
        yield from norm(f"{here}.layer_norm2", TEXT)
        yield from linear(f"{here}.mlp.fc1", TEXT, 4 * TEXT)
        yield from linear(f"{here}.mlp.fc2", 4 * TEXT, TEXT)
    yield from norm(f"{prefix}.final_layer_norm", TEXT)


def unet_block(name: str, inputs: int, outputs: int) -> Tensors:
    yield from norm(f"{name}.in_layers.0", inputs)
    yield from conv(f"{name}.in_layers.2", inputs, outputs)
    yield from linear(f"{name}.emb_layers.1", TIME, outputs)
    yield from norm(f"{name}.out_layers.0", outputs)
    yield from conv(f"{name}.out_layers.3", outputs, outputs)
    if inputs != outputs:
        yield from conv(f"{name}.skip_connection", inputs, outputs, 1)


def unet_attention(name: str, channels: int) -> Tensors:
    yield from norm(f"{name}.norm", channels)
    yield from conv(f"{name}.proj_in", channels, channels, 1)
    block = f"{name}.transformer_blocks.0"
    for attention, keys in (("attn1", channels), ("attn2", TEXT)):
        yield f"{block}.{attention}.to_q.weight", (channels, channels)
        yield f"{block}.{attention}.to_k.weight", (channels, keys)
        yield f"{block}.{attention}.to_v.weight", (channels, keys)
        yield from linear(f"{block}.{attention}.to_out.0", channels, channels)
    for index in (1, 2, 3):
        yield from norm(f"{block}.norm{index}", channels)
    yield from linear(f"{block}.ff.net.0.proj", channels, 8 * channels)
    yield from linear(f"{block}.ff.net.2", 4 * channels, channels)
    yield from conv(f"{name}.proj_out", channels, channels, 1)


def unet(prefix: str) -> Tensors:
    yield from linear(f"{prefix}.time_embed.0", 320, TIME)
    yield from linear(f"{prefix}.time_embed.2", TIME, TIME)
    yield from conv(f"{prefix}.input_blocks.0.0", 4, 320)
    for side, blocks in (("input_blocks", UNET_IN), ("output_blocks", UNET_OUT)):
        for index, inputs, outputs, attends in blocks:
            yield from unet_block(f"{prefix}.{side}.{index}.0", inputs, outputs)
            if attends:
                yield from unet_attention(f"{prefix}.{side}.{index}.1", outputs)
    for index, channels in UNET_DOWN:
        yield from conv(f"{prefix}.input_blocks.{index}.0.op", channels, channels)
    for index, place, channels in UNET_UP:
        yield from conv(f"{prefix}.output_blocks.{index}.{place}.conv", channels, channels)
    yield from unet_block(f"{prefix}.middle_block.0", 1280, 1280)
    yield from unet_attention(f"{prefix}.middle_block.1", 1280)
    yield from unet_block(f"{prefix}.middle_block.2", 1280, 1280)
    yield from norm(f"{prefix}.out.0", 320)
    yield from conv(f"{prefix}.out.2", 320, 4)


def vae_block(name: str, inputs: int, outputs: int) -> Tensors:
    yield from norm(f"{name}.norm1", inputs)
    yield from conv(f"{name}.conv1", inputs, outputs)
    yield from norm(f"{name}.norm2", outputs)
    yield from conv(f"{name}.conv2", outputs, outputs)
    if inputs != outputs:
        yield from conv(f"{name}.nin_shortcut", inputs, outputs, 1)


def vae_ends(name: str, inner: int) -> Tensors:
    """The middle of the network, and the normalisation before its last convolution."""
    top = VAE_LEVELS[-1]
    yield from vae_block(f"{name}.mid.block_1", top, top)
    yield from norm(f"{name}.mid.attn_1.norm", top)
    for part in ("q", "k", "v", "proj_out"):
        yield from conv(f"{name}.mid.attn_1.{part}", top, top, 1)
    yield from vae_block(f"{name}.mid.block_2", top, top)
    yield from norm(f"{name}.norm_out", inner)


def vae(prefix: str) -> Tensors:
    yield from conv(f"{prefix}.encoder.conv_in", 3, VAE_LEVELS[0])
    inputs = VAE_LEVELS[0]
    for level, channels in enumerate(VAE_LEVELS):
        here = f"{prefix}.encoder.down.{level}"
        yield from vae_block(f"{here}.block.0", inputs, channels)
        yield from vae_block(f"{here}.block.1", channels, channels)
        if level < len(VAE_LEVELS) - 1:
            yield from conv(f"{here}.downsample.conv", channels, channels)
        inputs = channels
    yield from vae_ends(f"{prefix}.encoder", VAE_LEVELS[-1])
    yield from conv(f"{prefix}.encoder.conv_out", VAE_LEVELS[-1], 8)
    yield from conv(f"{prefix}.quant_conv", 8, 8, 1)
    yield from conv(f"{prefix}.post_quant_conv", 4, 4, 1)
    yield from conv(f"{prefix}.decoder.conv_in", 4, VAE_LEVELS[-1])
    yield from vae_ends(f"{prefix}.decoder", VAE_LEVELS[0])
    for level, channels in reversed(list(enumerate(VAE_LEVELS))):
        here = f"{prefix}.decoder.up.{level}"
        yield from vae_block(f"{here}.block.0", inputs, channels)
        yield from vae_block(f"{here}.block.1", channels, channels)
        yield from vae_block(f"{here}.block.2", channels, channels)
        if level:
            yield from conv(f"{here}.upsample.conv", channels, channels)
        inputs = channels
    yield from conv(f"{prefix}.decoder.conv_out", VAE_LEVELS[0], 3)


def sd15() -> Tensors:
    yield from text_encoder("cond_stage_model.transformer.text_model")
    yield from unet("model.diffusion_model")
    yield from vae("first_stage_model")


def values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """What PyTorch would start this tensor with, near enough; a picture of it is not NaN."""
    if len(shape) == 1:
        is_scale = "norm" in name or name.split(".")[-2] == "0"
        full = 1.0 if name.endswith("weight") and is_scale else 0.0
        return np.full(shape, full, np.float32)
    if "embedding" in name:
        return rng.standard_normal(shape, np.float32) * np.float32(0.02)
    bound = np.float32(1 / math.sqrt(math.prod(shape[1:])))
    drawn = rng.random(shape, np.float32)
    drawn *= 2 * bound
    drawn -= bound
    return drawn


def header(dtype: str) -> tuple[bytes, dict[str, int]]:
    """Returns the beginning of the file, and where each tensor starts in it; "": where it ends."""
    rows: dict[str, object] = {"__metadata__": {"made_by": "seeded_checkpoint.py"}}
    places, at = {}, 0
    for name, shape in sd15():
        size = math.prod(shape) * np.dtype(dtype).itemsize
        rows[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [at, at + size]}
        places[name] = at
        at += size
    text = json.dumps(rows).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    return start, {name: len(start) + place for name, place in places.items()} | {
        "": len(start) + at
    }


def write(path: Path, *, dtype: str = "float32", seed: int = 15) -> None:
    """Writes the checkpoint tensor by tensor: it never is in memory as a whole."""
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(header(dtype)[0])
        for name, shape in sd15():
            file.write(values(name, shape, rng).astype(dtype, copy=False).tobytes())


def write_blank(path: Path, given: Mapping[str, np.ndarray], *, dtype: str = "float16") -> None:
    """Writes a checkpoint of zeros but for a few tensors: a file with holes, at once and small.

    A UNet of zeros changes nothing, and a decoder of zeros draws its last bias.
    """
    start, places = header(dtype)
    with path.open("wb") as file:
        file.write(start)
        for name, array in given.items():
            file.seek(places[name])
            file.write(array.astype(dtype).tobytes())
        file.truncate(places[""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--seed", type=int, default=15)
    asked = parser.parse_args()
    write(asked.out, dtype=asked.dtype, seed=asked.seed)
