"""Writes full-size Stable Diffusion 1.5 with seeded weights as ONNX: `make_full_size_sd15.py OUT`.

Needs PyTorch, diffusers, transformers and onnxscript, 5 GB of disk and 12 GB of memory; 3 minutes.
The weights are random, so pictures are noise; sizes, operators and speed are those of the real one.
OUT is a whole pipeline: `sdkit-dispatch bench OUT --suite sd15` measures it.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from networks import TEXT, UNET, VAE

SEED = 15
LATENT = (1, 4, 64, 64)


class Call(torch.nn.Module):
    """A model whose forward is one function of it."""

    def __init__(self, model: torch.nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self.model, *inputs)


def export(
    name: str, module: torch.nn.Module, inputs: dict[str, Any], output: str, out: Path
) -> None:
    free = {
        "sample": {0: "batch", 2: "height", 3: "width"},
        "latent_sample": {0: "batch", 2: "height", 3: "width"},
        "encoder_hidden_states": {0: "batch"},
        "input_ids": {0: "batch"},
    }
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            tuple(inputs.values()),
            str(folder / "model.onnx"),
            dynamo=True,
            opset_version=18,
            external_data=True,
            verbose=False,
            input_names=list(inputs),
            output_names=[output],
            dynamic_shapes=(
                tuple(dict.fromkeys(free.get(key, {}), torch.export.Dim.DYNAMIC) for key in inputs),
            ),
        )


def write_settings(out: Path) -> None:
    """Writes config.json of every component; tokenizer and scheduler are those of the sample."""
    sample = Path(__file__).parents[2] / "sdkit_dispatch" / "_data" / "sample" / "digits-sd"
    configs = {
        "text_encoder": TEXT,
        "unet": {**UNET, "_class_name": "UNet2DConditionModel"},
        "vae_decoder": {**VAE, "_class_name": "AutoencoderKL"},
    }
    for name, config in configs.items():
        (out / name).mkdir(parents=True, exist_ok=True)
        (out / name / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for name in ("tokenizer", "scheduler"):
        shutil.copytree(sample / name, out / name, dirs_exist_ok=True)
    shutil.copy(sample / "model_index.json", out)


def main(out: Path) -> None:
    write_settings(out)
    torch.manual_seed(SEED)
    ids = torch.randint(0, 49000, (1, 77))
    text = CLIPTextModel(CLIPTextConfig(**TEXT))
    export(
        "text_encoder",
        Call(text, lambda m, i: m(i, return_dict=False)[0]),
        {"input_ids": ids},
        "last_hidden_state",
        out,
    )
    vae = AutoencoderKL(**VAE)
    with torch.no_grad():
        # Pictures of a trained decoder lie within -1..1; those of random weights within -4.4..4.4.
        vae.decoder.conv_out.weight *= 0.25
        vae.decoder.conv_out.bias *= 0.25
    export(
        "vae_decoder",
        Call(vae, lambda m, z: m.decode(z, return_dict=False)[0]),
        {"latent_sample": torch.randn(1, 4, 16, 24)},
        "sample",
        out,
    )
    del text, vae
    unet = UNet2DConditionModel(**UNET)
    export(
        "unet",
        Call(unet, lambda m, x, t, c: m(x, t, c, return_dict=False)[0]),
        {
            "sample": torch.randn(2, 4, 16, 24),
            "timestep": torch.tensor(500.0),
            "encoder_hidden_states": torch.randn(2, 77, 768),
        },
        "out_sample",
        out,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
