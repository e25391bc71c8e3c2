"""Records what diffusers' own pipeline makes of the sample, from the same noise.

The sample's weights exist as ONNX graphs only. So diffusers' StableDiffusionPipeline runs with its
own loop, schedulers and tokenizer, and its three models hand their inputs to the graphs through
onnxruntime. Writes tests/core/data/diffusion/digits.npz and digits.json. See README.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import onnxruntime
import torch
import transformers
from record_schedulers import SAMPLERS

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "sdkit_dispatch" / "_data" / "sample" / "digits-sd"
OUT = ROOT / "tests" / "core" / "data" / "diffusion"

PROMPT, NEGATIVE_PROMPT = "a red three", "a white zero"
BATCH, STEPS, GUIDANCE = 2, 8, 3.0


def open_graph(component: str) -> Any:  # Any: onnxruntime has no types
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        str(SAMPLE / component / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )


def run(graph: Any, **feeds: Any) -> torch.Tensor:
    return torch.from_numpy(graph.run(None, {k: v.numpy() for k, v in feeds.items()})[0])


def make_pipeline() -> diffusers.StableDiffusionPipeline:
    """diffusers' pipeline, whose models answer with the outputs of the ONNX graphs."""
    unet_graph, text_graph, vae_graph = map(open_graph, ("unet", "text_encoder", "vae_decoder"))

    def config(component: str) -> Any:
        return json.loads((SAMPLE / component / "config.json").read_text(encoding="utf-8"))

    class Unet(diffusers.UNet2DConditionModel):
        def forward(self, sample: Any, timestep: Any, encoder_hidden_states: Any, **_: Any) -> Any:
            return (
                run(
                    unet_graph,
                    sample=sample,
                    timestep=timestep.to(torch.float32),
                    encoder_hidden_states=encoder_hidden_states,
                ),
            )

    class Text(transformers.CLIPTextModel):
        def forward(self, input_ids: Any, **_: Any) -> Any:
            return (run(text_graph, input_ids=input_ids),)

    class Vae(diffusers.AutoencoderKL):
        def decode(self, latents: Any, **_: Any) -> Any:
            rows = [run(vae_graph, latent_sample=row[None]) for row in latents]
            return (torch.cat(rows),)

    pipeline = diffusers.StableDiffusionPipeline(
        vae=Vae.from_config(config("vae_decoder")),
        text_encoder=Text(transformers.CLIPTextConfig(**config("text_encoder"))),
        tokenizer=transformers.CLIPTokenizer.from_pretrained(SAMPLE / "tokenizer"),
        unet=Unet.from_config(config("unet")),
        scheduler=diffusers.DDIMScheduler.from_pretrained(SAMPLE / "scheduler"),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def main() -> None:
    random = np.random.default_rng(11)
    shape = (BATCH, 4, 8, 8)
    start = random.standard_normal(shape).astype(np.float32)
    noises = random.standard_normal((STEPS, *shape)).astype(np.float32)
    arrays = {"start": start, "noises": noises}
    pipeline = make_pipeline()
    config = pipeline.scheduler.config
    for sampler, (class_name, extra) in SAMPLERS.items():
        kind = getattr(diffusers, class_name)
        pipeline.scheduler = kind.from_config(config, **extra)
        drawn = iter(noises)
        found = {}
        with mock.patch(
            f"{kind.__module__}.randn_tensor",
            lambda *_, drawn=drawn, **__: torch.from_numpy(next(drawn)),
        ):

            def keep(
                _pipeline: Any, _step: int, _time: Any, values: Any, found: Any = found
            ) -> Any:
                found["latents"] = values["latents"].numpy()
                return values

            images = pipeline(
                [PROMPT] * BATCH,
                negative_prompt=[NEGATIVE_PROMPT] * BATCH,
                height=32,
                width=32,
                num_inference_steps=STEPS,
                guidance_scale=GUIDANCE,
                latents=torch.from_numpy(start),
                output_type="np",
                callback_on_step_end=keep,
            ).images
        arrays[f"{sampler}.latents"] = found["latents"]
        arrays[f"{sampler}.images"] = (images * 255).round().astype(np.uint8)
    np.savez_compressed(OUT / "digits.npz", **arrays)
    document = {
        "made_with": f"diffusers {diffusers.__version__}, onnxruntime {onnxruntime.__version__}",
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE_PROMPT,
        "steps": STEPS,
        "guidance": GUIDANCE,
        "samplers": list(SAMPLERS),
    }
    (OUT / "digits.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
