"""Records what diffusers makes of the tiny pipelines in PyTorch: `record_tiny.py BUILD`.

Writes pipelines/sd15.npz and pipelines/sdxl.npz: noise, and the denoised latents and decoded
images of the cases in `CASES`. See README.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import tiny
import torch
from record_schedulers import SAMPLERS

OUT = Path(__file__).parent / "pipelines"
WIDTH_PX, HEIGHT_PX, STEPS = 96, 64, 4

CASES: dict[str, dict[str, Any]] = {  # Any: values of a request
    "euler": {"prompt": "a photo of a red cat", "negative_prompt": "blurry, bad quality"},
    "dpmpp_2m": {"prompt": "castle by the sea, sunset", "negative_prompt": ""},
    "euler_a": {"prompt": "a dog", "negative_prompt": "low quality", "batch": 2},
    "lcm": {"prompt": "mountain at night", "negative_prompt": "", "guidance": 1.0},
    "long": {
        "scheduler": "ddim",
        "prompt": ", ".join(tiny.WORDS),
        "negative_prompt": "blurry text error",
    },
}
DEFAULTS = {"guidance": 5.0, "batch": 1}


def encode_long(pipeline: Any, text: str, chunks: int) -> torch.Tensor:
    """Encodes 75 tokens at a time: what community pipelines of diffusers do by hand."""
    tokenizer = pipeline.tokenizer
    ids = tokenizer(text, add_special_tokens=False).input_ids
    rows = []
    for chunk in range(chunks):
        part = ids[75 * chunk : 75 * chunk + 75]
        row = [tokenizer.bos_token_id, *part, tokenizer.eos_token_id]
        row += [tokenizer.pad_token_id] * (77 - len(row))
        rows.append(pipeline.text_encoder(torch.tensor([row]))[0])
    return torch.cat(rows, dim=1)


def arguments(pipeline: Any, family: str, case: dict[str, Any]) -> dict[str, Any]:
    """How the pipeline is told the prompts."""
    batch = case["batch"]
    if case["scheduler"] == "ddim" and family == "sd15":
        count = len(pipeline.tokenizer(case["prompt"], add_special_tokens=False).input_ids)
        chunks = -(-count // 75)
        assert chunks > 1, "the long prompt must not fit one chunk"
        return {
            "prompt_embeds": encode_long(pipeline, case["prompt"], chunks),
            "negative_prompt_embeds": encode_long(pipeline, case["negative_prompt"], chunks),
        }
    # None: no negative prompt at all, which SDXL answers with zeros.
    negative = [case["negative_prompt"]] * batch if case["negative_prompt"] else None
    return {"prompt": [case["prompt"]] * batch, "negative_prompt": negative}


def main(build: Path) -> None:
    for family in tiny.FAMILIES:
        kind = {
            "sd15": diffusers.StableDiffusionPipeline,
            "sdxl": diffusers.StableDiffusionXLPipeline,
        }[family]
        pipeline = kind.from_pretrained(build / family)
        pipeline.set_progress_bar_config(disable=True)
        config = pipeline.scheduler.config
        random = np.random.default_rng(5)
        shape = (2, 4, HEIGHT_PX // tiny.FACTOR, WIDTH_PX // tiny.FACTOR)
        start = random.standard_normal(shape).astype(np.float32)
        noises = random.standard_normal((STEPS, *shape)).astype(np.float32)
        arrays = {"start": start, "noises": noises}
        requests = {}
        for name, given in CASES.items():
            if name == "long" and family == "sdxl":
                continue  # diffusers' SDXL has one pooled vector; ours is tested with sd15
            case = {"scheduler": name, **DEFAULTS, **given}
            class_name, extra = SAMPLERS[case["scheduler"]]
            scheduler = getattr(diffusers, class_name)
            # diffusers' DDIM would clip latents at 1 where the file of another scheduler does not
            # say; its pipeline takes that for a mistake too, when it is made with such a scheduler.
            pipeline.scheduler = scheduler.from_config(config, clip_sample=False, **extra)
            batch = case["batch"]
            drawn = iter(noises[:, :batch])
            kept: dict[str, np.ndarray] = {}

            def keep(_pipeline: Any, _step: int, _time: Any, values: Any, kept: Any = kept) -> Any:
                kept["latents"] = values["latents"].numpy()
                return values

            with mock.patch(
                f"{scheduler.__module__}.randn_tensor",
                lambda *_, drawn=drawn, **__: torch.from_numpy(next(drawn)),
            ):
                images = pipeline(
                    **arguments(pipeline, family, case),
                    width=WIDTH_PX,
                    height=HEIGHT_PX,
                    num_inference_steps=STEPS,
                    guidance_scale=case["guidance"],
                    latents=torch.from_numpy(start[:batch]),
                    output_type="np",
                    callback_on_step_end=keep,
                ).images
            arrays[f"{name}.latents"] = kept["latents"]
            arrays[f"{name}.images"] = (images * 255).round().astype(np.uint8)
            requests[name] = {
                **case,
                "width_px": WIDTH_PX,
                "height_px": HEIGHT_PX,
                "steps": STEPS,
            }
        np.savez_compressed(OUT / f"{family}.npz", **arrays)
        document = {"made_with": f"diffusers {diffusers.__version__}", "requests": requests}
        text = json.dumps(document, indent=1) + "\n"
        (OUT / f"{family}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
