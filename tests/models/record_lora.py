"""Records what diffusers and peft make of LoRAs on the tiny pipelines: `record_lora.py BUILD`.

Writes `lora/{sd15,sdxl}-{kohya,peft}.safetensors`, LoRAs of drawn numbers in two dialects, and
`lora/{sd15,sdxl}.npz`: inputs of the UNet and the text encoders, and what these compute with no
LoRA, with each, and with both. See README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import diffusers
import numpy as np
import tiny
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

OUT = Path(__file__).parent / "lora"
CASES = {
    "none": {},
    "kohya": {"kohya": 0.8},
    "peft": {"peft": -0.6},
    "both": {"kohya": 0.5, "peft": 1.25},
}
"""Name -> strength of each LoRA."""
SIZE = 0.35
"""Of what a LoRA adds at strength 1, over the size of the weights."""
ORIGINAL = {
    "conv_in": "input_blocks.0.0",
    "down_blocks.0.resnets.0": "input_blocks.1.0",
    "down_blocks.0.attentions.0": "input_blocks.1.1",
    "down_blocks.0.downsamplers.0.conv": "input_blocks.2.0.op",
    "down_blocks.1.resnets.0": "input_blocks.3.0",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
    "up_blocks.0.resnets.0": "output_blocks.0.0",
    "up_blocks.0.resnets.1": "output_blocks.1.0",
    "up_blocks.1.resnets.0": "output_blocks.2.0",
    "up_blocks.1.attentions.0": "output_blocks.2.1",
    "up_blocks.1.resnets.1": "output_blocks.3.0",
    "up_blocks.1.attentions.1": "output_blocks.3.1",
}
"""Blocks of the tiny SDXL UNet in the layout in which kohya's scripts train. Its upsampler stands
where diffusers 0.42 takes it for an attention, and is left out."""
INNER = {
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}


def parts_of(pipeline: diffusers.DiffusionPipeline) -> dict[str, torch.nn.Module]:
    names = ("unet", "text_encoder", "text_encoder_2")
    return {name: part for name in names if (part := getattr(pipeline, name, None)) is not None}


def targets(part: torch.nn.Module, *, convolutions: bool) -> dict[str, torch.nn.Module]:
    """The layers of a part that get a LoRA."""
    kinds = (torch.nn.Linear, torch.nn.Conv2d) if convolutions else (torch.nn.Linear,)
    skipped = ("time_embedding", "add_embedding", "conv_in", "conv_out", "text_projection")
    return {
        name.removesuffix(".base_layer"): layer
        for name, layer in part.named_modules()
        if isinstance(layer, kinds) and not name.startswith(skipped) and ".lora_" not in name
    }


def matrices(layer: torch.nn.Module, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws `down` and `up`, so that their product is a part of the weight in size."""
    weight = layer.weight.detach()
    down = torch.randn(rank, *weight.shape[1:])
    up = torch.randn(weight.shape[0], rank, *([1, 1] if weight.ndim == 4 else []))
    return down, up * (SIZE * float(weight.std()) / rank**0.5)


def kohya_name(part: str, path: str, family: str) -> str:
    if part != "unet":
        prefix = {"text_encoder": "lora_te", "text_encoder_2": "lora_te2"}[part]
        prefix += "1" if family == "sdxl" and part == "text_encoder" else ""
        path = path if path.startswith("text_model.") else f"text_model.{path}"
        return f"{prefix}_{path.replace('.', '_')}"
    if family == "sdxl":
        start = next(one for one in ORIGINAL if path == one or path.startswith(f"{one}."))
        rest = path.removeprefix(start).removeprefix(".")
        inner = INNER.get(rest, rest) if ".resnets." in start else rest
        path = ".".join(filter(None, (ORIGINAL[start], inner)))
    return f"lora_unet_{path.replace('.', '_')}"


def kohya(pipeline: diffusers.DiffusionPipeline, family: str) -> dict[str, torch.Tensor]:
    """Every layer, convolutions too, of several ranks, with alphas, in half precision."""
    found: dict[str, torch.Tensor] = {}
    for part, module in parts_of(pipeline).items():
        for index, (path, layer) in enumerate(targets(module, convolutions=True).items()):
            if family == "sdxl" and ".upsamplers." in path:
                continue
            rank = 2 + index % 3
            name = kohya_name(part, path, family)
            down, up = matrices(layer, rank)
            found[f"{name}.lora_down.weight"] = down
            found[f"{name}.lora_up.weight"] = up * 1.5
            found[f"{name}.alpha"] = torch.tensor(rank / 1.5)
    return {name: one.half().contiguous() for name, one in found.items()}


def peft(pipeline: diffusers.DiffusionPipeline) -> dict[str, torch.Tensor]:
    """The projections of attention only, without alpha, in single precision."""
    found: dict[str, torch.Tensor] = {}
    for part, module in parts_of(pipeline).items():
        for path, layer in targets(module, convolutions=False).items():
            if path.endswith(("to_q", "to_k", "to_v", "to_out.0", "q_proj", "v_proj")):
                down, up = matrices(layer, 3)
                found[f"{part}.{path}.lora_A.weight"] = down
                found[f"{part}.{path}.lora_B.weight"] = up
    return {name: one.contiguous() for name, one in found.items()}


def inputs(pipeline: diffusers.DiffusionPipeline) -> dict[str, torch.Tensor]:
    config = pipeline.unet.config
    feeds = {
        "input_ids": torch.randint(0, tiny.VOCABULARY, (1, 77)),
        "sample": torch.randn(1, 4, 16, 24),
        "timestep": torch.tensor(601.0),
        "encoder_hidden_states": torch.randn(1, 77, config.cross_attention_dim),
    }
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        feeds["text_embeds"] = torch.randn(1, pooled)
        feeds["time_ids"] = torch.tensor([[64.0, 96.0, 0.0, 0.0, 64.0, 96.0]])
    return feeds


def outputs(
    pipeline: diffusers.DiffusionPipeline, feeds: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    added = {name: feeds[name] for name in ("text_embeds", "time_ids") if name in feeds} or None
    found = {
        "unet": pipeline.unet(
            feeds["sample"],
            feeds["timestep"],
            feeds["encoder_hidden_states"],
            added_cond_kwargs=added,
            return_dict=False,
        )[0]
    }
    for name, encoder in parts_of(pipeline).items():
        if name != "unet":
            found[name] = encoder(feeds["input_ids"]).last_hidden_state
    return found


def main(build: Path) -> None:
    OUT.mkdir(exist_ok=True)
    for number, family in enumerate(tiny.FAMILIES):
        torch.manual_seed(100 + number)
        pipeline = diffusers.DiffusionPipeline.from_pretrained(build / family)
        files = {"kohya": kohya(pipeline, family), "peft": peft(pipeline)}
        for name, tensors in files.items():
            save_file(tensors, OUT / f"{family}-{name}.safetensors")
        feeds = inputs(pipeline)
        arrays = {f"inputs.{name}": one.numpy() for name, one in feeds.items()}
        with torch.no_grad():
            for case, strengths in CASES.items():
                pipeline = diffusers.DiffusionPipeline.from_pretrained(build / family)
                for name, strength in strengths.items():
                    path = OUT / f"{family}-{name}.safetensors"
                    load(pipeline, name, path, strength)
                if strengths:
                    pipeline.unet.set_adapters(list(strengths), list(strengths.values()))
                    scale(pipeline.unet, family, strengths)
                for name, one in outputs(pipeline, feeds).items():
                    arrays[f"{case}.{name}"] = one.numpy()
        np.savez_compressed(OUT / f"{family}.npz", **arrays)


def load(pipeline: diffusers.DiffusionPipeline, name: str, path: Path, strength: float) -> None:
    """Gives a LoRA to the UNet by diffusers, and to the text encoders by peft.

    diffusers 0.42 leaves a text encoder of transformers 5 with drawn numbers where the file has
    kohya's names: there is no `text_model` in between any more.
    """
    tensors = {key: one.float() for key, one in load_file(path).items()}
    unet = {key: one for key, one in tensors.items() if key.startswith(("unet.", "lora_unet_"))}
    pipeline.load_lora_weights(unet, adapter_name=name)
    for part, encoder in parts_of(pipeline).items():
        if part != "unet":
            load_text(encoder, part, name, tensors, strength)
    for part, module in parts_of(pipeline).items():
        prefix = {"unet": "lora_unet_|unet.", "text_encoder": "lora_te1_|lora_te_|text_encoder."}
        prefixes = tuple(prefix.get(part, "lora_te2_|text_encoder_2.").split("|"))
        meant = [
            one
            for key, one in tensors.items()
            if key.startswith(prefixes) and key.endswith(("lora_down.weight", "lora_A.weight"))
        ]
        there = [
            one for key, one in module.state_dict().items() if key.endswith(f"lora_A.{name}.weight")
        ]
        sums = [sorted(float(one.double().sum()) for one in side) for side in (meant, there)]
        if not np.allclose(*sums, rtol=1e-6):
            raise SystemExit(f"{path.name}: {part} has {len(there)} of {len(meant)} layers")


def scale(unet: torch.nn.Module, family: str, strengths: Mapping[str, float]) -> None:
    """Gives each layer its own alpha: diffusers 0.42 mixes them up where they differ."""
    for name, strength in strengths.items():
        tensors = load_file(OUT / f"{family}-{name}.safetensors")
        for path, layer in unet.named_modules():
            if isinstance(layer, LoraLayer) and name in layer.scaling:
                rank = layer.r[name]
                alpha = tensors.get(f"{kohya_name('unet', path, family)}.alpha", rank)
                layer.scaling[name] = strength * float(alpha) / rank


def load_text(
    encoder: torch.nn.Module,
    part: str,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    strength: float,
) -> None:
    """Injects a LoRA with peft."""
    layers = {
        path: next(
            key.removesuffix(end)
            for start in (f"{part}.{path}", *(kohya_name(part, path, f) for f in tiny.FAMILIES))
            for end in (".lora_A.weight", ".lora_down.weight")
            if (key := start + end) in tensors
        )
        for path, layer in targets(encoder, convolutions=False).items()
        if any(
            f"{start}{end}" in tensors
            for start in (f"{part}.{path}", *(kohya_name(part, path, f) for f in tiny.FAMILIES))
            for end in (".lora_A.weight", ".lora_down.weight")
        )
    }
    pairs = {
        path: [
            next(tensors[start + end] for end in ends if start + end in tensors)
            for ends in (
                (".lora_A.weight", ".lora_down.weight"),
                (".lora_B.weight", ".lora_up.weight"),
            )
        ]
        for path, start in layers.items()
    }
    ranks = {path: down.shape[0] for path, (down, _) in pairs.items()}
    config = LoraConfig(
        r=1,
        lora_alpha=1,
        target_modules=list(pairs),
        rank_pattern=ranks,
        alpha_pattern={
            path: strength * float(tensors.get(f"{start}.alpha", torch.tensor(float(ranks[path]))))
            for path, start in layers.items()
        },
    )
    inject_adapter_in_model(config, encoder, adapter_name=name)
    found = dict(encoder.named_modules())
    for path, (down, up) in pairs.items():
        found[path].lora_A[name].weight.data.copy_(down)
        found[path].lora_B[name].weight.data.copy_(up)
    for layer in found.values():
        if isinstance(layer, LoraLayer):
            layer.set_adapter(sorted(layer.lora_A))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
