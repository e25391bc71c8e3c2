"""diffusers in PyTorch, eager or compiled: the same architecture with random weights.

An ONNX pipeline holds no PyTorch weights, so the models are made from the pipeline's own
config.json files. That says everything of speed and nothing of pictures: no error is shown.
"""

import json
import os
from pathlib import Path
from typing import Any

from peer_lines import serve, threads_of


class Peer:
    def __init__(self, job: Any) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        self.job = job
        self.folder = Path(job["pipeline"])
        self.models: dict[str, Any] = {}
        self.pipeline: Any = None

    def prepare(self) -> dict[str, Any]:
        import diffusers
        import torch

        mode = self.job["mode"]
        if (self.folder / "text_encoder_2").is_dir():
            raise ValueError("this script has only Stable Diffusion with one text encoder")
        return {
            "runtime": f"diffusers {diffusers.__version__}, torch {torch.__version__} ({mode})",
            "components": list(self.job["components"]),
            "images": True,
            "note": f"PyTorch on the CPU, {mode}, fp32, random weights",
        }

    def open(self, use: str) -> dict[str, Any]:
        import torch

        torch.set_num_threads(threads_of(self.job))
        torch.manual_seed(0)
        self.models = {name: self.make(name) for name in self.job["components"]}
        if self.job["mode"] == "compiled":
            for name in ("unet", "vae_decoder"):
                self.models[name].forward = torch.compile(self.models[name].forward)
            vae = self.models["vae_decoder"]
            vae.decoder.forward = torch.compile(vae.decoder.forward)
        if use == "images":
            self.pipeline = self.assemble()
        return {name: {"device": "cpu", "precision": "fp32"} for name in self.models}

    def make(self, component: str) -> Any:
        from diffusers import AutoencoderKL, UNet2DConditionModel
        from transformers import CLIPTextConfig, CLIPTextModel

        config = json.loads((self.folder / component / "config.json").read_text("utf-8"))
        config = {key: value for key, value in config.items() if not key.startswith("_")}
        if component == "text_encoder":
            model = CLIPTextModel(CLIPTextConfig(**config))
        elif component == "unet":
            model = UNet2DConditionModel.from_config(config)
        else:
            model = AutoencoderKL.from_config(config)
        return model.eval()

    def compute(self, component: str, feeds: dict[str, Any]) -> dict[str, Any]:
        import torch

        model = self.models[component]
        tensors = {name: torch.from_numpy(value) for name, value in feeds.items()}
        with torch.inference_mode():
            if component == "text_encoder":
                output = model(tensors["input_ids"].long(), return_dict=False)[0]
            elif component == "unet":
                output = model(
                    tensors["sample"],
                    tensors["timestep"],
                    tensors["encoder_hidden_states"],
                    return_dict=False,
                )[0]
            else:
                output = model.decode(tensors["latent_sample"], return_dict=False)[0]
        return {"output": output.numpy()}

    def assemble(self) -> Any:
        from diffusers import DDIMScheduler, EulerDiscreteScheduler, StableDiffusionPipeline
        from transformers import AutoTokenizer

        kinds = {"ddim": DDIMScheduler, "euler": EulerDiscreteScheduler}
        kind = kinds[self.job["request"]["scheduler"]]
        pipeline = StableDiffusionPipeline(
            vae=self.models["vae_decoder"],
            text_encoder=self.models["text_encoder"],
            tokenizer=AutoTokenizer.from_pretrained(self.folder / "tokenizer"),
            unet=self.models["unet"],
            scheduler=kind.from_pretrained(self.folder, subfolder="scheduler"),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def image(self) -> Any:
        import numpy as np
        import torch

        request = self.job["request"]
        self.pipeline(
            request["prompt"],
            negative_prompt=request["negative_prompt"],
            width=request["width_px"],
            height=request["height_px"],
            num_inference_steps=request["steps"],
            guidance_scale=request["guidance"],
            num_images_per_prompt=request["batch"],
            latents=torch.from_numpy(np.load(self.job["noise"], allow_pickle=False)),
            output_type="np",
        )
        return None  # random weights: the picture says nothing


if __name__ == "__main__":
    serve(Peer)
