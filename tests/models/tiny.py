"""Tiny, seeded Stable Diffusion pipelines in PyTorch, and a tokenizer of 1000 tokens for them.

The weights mean nothing, but they are large enough that every input moves the output: a swapped
prompt or a wrong coefficient shows.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

START, END = "<|startoftext|>", "<|endoftext|>"
VOCABULARY = 1000
WORDS = tuple(
    """a an and the of in on with by at photo portrait picture painting drawing sketch style
red green blue white black yellow cat dog horse bird house tree sea mountain forest city castle
street woman man girl boy person face hair eyes hand light dark night day sunset sunrise morning
sky cloud rain snow water fire masterpiece best quality detailed high low bad worst blurry text
error artstation trending sharp focus studio soft cinematic realistic anime digital oil color
zero one two three four five six seven eight nine""".split()  # noqa: SIM905 - a list of 88 strings is no easier to read
)

FAMILIES = ("sd15", "sdxl")
FACTOR = 4
"""Pixels along one side of a latent cell."""


def byte_letters() -> list[str]:
    """The 256 letters that a byte-level BPE writes bytes with, in CLIP's order ("!" first)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) for byte in shown] + [chr(256 + i) for i in range(len(hidden))]


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """All letters, all letters at the end of a word, merges that spell `WORDS`, two marks."""
    letters = byte_letters()
    tokens = [*letters, *(f"{letter}</w>" for letter in letters)]
    room = VOCABULARY - 2 - len(tokens)
    merges: dict[str, tuple[str, str]] = {}
    for word in WORDS:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        joined = parts[0]
        for part in parts[1:]:
            if joined + part not in merges and len(merges) < room:
                merges[joined + part] = (joined, part)
            joined += part
    tokens += [*merges, *(f"<unused{i}>" for i in range(room - len(merges))), START, END]
    return {token: i for i, token in enumerate(tokens)}, list(merges.values())


def write_tokenizer(folder: Path, *, pad: str) -> None:
    """Writes vocab.json and merges.txt, and the two files of special tokens, as transformers 4."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab, merges = vocabulary()
    config = {
        "add_prefix_space": False,
        "bos_token": START,
        "do_lower_case": True,
        "eos_token": END,
        "errors": "replace",
        "model_max_length": 77,
        "pad_token": pad,
        "tokenizer_class": "CLIPTokenizer",
        "unk_token": END,
    }
    special = {"bos_token": START, "eos_token": END, "pad_token": pad, "unk_token": END}
    for name, data in (
        ("vocab.json", vocab),
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", special),
    ):
        (folder / name).write_text(json.dumps(data) + "\n", encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def liven(module: torch.nn.Module) -> torch.nn.Module:
    """Draws weights that keep the variance of what flows through them."""
    for parameter in module.parameters():
        if parameter.ndim > 1:
            fan_in = parameter[0].numel()
            torch.nn.init.normal_(parameter, std=1.2 / math.sqrt(fan_in))
    return module.eval()


def text_config(hidden: int, projection: int) -> transformers.CLIPTextConfig:
    return transformers.CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        projection_dim=projection,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=77,
        hidden_act="quick_gelu",
        bos_token_id=VOCABULARY - 2,
        eos_token_id=VOCABULARY - 1,
        pad_token_id=1,
    )


def vae(scaling: float) -> diffusers.AutoencoderKL:
    return diffusers.AutoencoderKL(
        block_out_channels=(4, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=64,
        scaling_factor=scaling,
    )


def unet(**extra: Any) -> diffusers.UNet2DConditionModel:
    return diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        **extra,
    )


def make_sd15(folder: Path) -> None:
    torch.manual_seed(15)
    write_tokenizer(folder / "tokenizer", pad=END)
    diffusers.StableDiffusionPipeline(
        vae=liven(vae(0.18215)),
        text_encoder=liven(transformers.CLIPTextModel(text_config(16, 16))),
        tokenizer=transformers.CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        unet=liven(unet(cross_attention_dim=16, attention_head_dim=2)),
        scheduler=diffusers.PNDMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            skip_prk_steps=True,
            steps_offset=1,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)


def make_sdxl(folder: Path) -> None:
    torch.manual_seed(10)
    write_tokenizer(folder / "tokenizer", pad=END)
    write_tokenizer(folder / "tokenizer_2", pad="!")
    diffusers.StableDiffusionXLPipeline(
        vae=liven(vae(0.13025)),
        text_encoder=liven(transformers.CLIPTextModel(text_config(16, 16))),
        text_encoder_2=liven(transformers.CLIPTextModelWithProjection(text_config(24, 24))),
        tokenizer=transformers.CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        tokenizer_2=transformers.CLIPTokenizer.from_pretrained(folder / "tokenizer_2"),
        unet=liven(
            unet(
                cross_attention_dim=40,
                attention_head_dim=(2, 4),
                transformer_layers_per_block=(1, 2),
                use_linear_projection=True,
                addition_embed_type="text_time",
                addition_time_embed_dim=8,
                projection_class_embeddings_input_dim=6 * 8 + 24,
            )
        ),
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            timestep_spacing="leading",
            steps_offset=1,
        ),
        force_zeros_for_empty_prompt=True,
    ).save_pretrained(folder)
