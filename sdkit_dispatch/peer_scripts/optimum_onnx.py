"""optimum-onnx: diffusers' pipeline in PyTorch, its models in ONNX Runtime."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from peer_lines import serve


class Peer:
    def __init__(self, job: Any) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        self.job = job
        self.pipeline: Any = None  # Any: ORTDiffusionPipeline

    def prepare(self) -> dict[str, Any]:
        from importlib.metadata import version

        import onnxruntime as ort

        self.load()  # what it says of the folder, it says now
        return {
            "runtime": f"optimum-onnx {version('optimum-onnx')}, onnxruntime {ort.__version__}",
            "components": [],
            "images": True,
            "note": "diffusers' loop in PyTorch, CPUExecutionProvider",
        }

    def folder(self) -> Path:
        """Returns the pipeline with a tokenizer in the older form, which this stack asks for."""
        source, target = Path(self.job["pipeline"]), Path(self.job["work"]) / "pipeline"
        if target.is_dir():
            return target
        target.mkdir(parents=True)
        for path in source.iterdir():
            if not path.name.startswith("tokenizer"):
                (target / path.name).symlink_to(path)
        for path in source.glob("tokenizer*"):
            shutil.copytree(path, target / path.name)
            whole = path / "tokenizer.json"
            if whole.is_file() and not (path / "vocab.json").is_file():
                model = json.loads(whole.read_text("utf-8"))["model"]
                vocabulary = json.dumps(model["vocab"], ensure_ascii=False)
                (target / path.name / "vocab.json").write_text(vocabulary, "utf-8")
                pairs = (one if isinstance(one, str) else " ".join(one) for one in model["merges"])
                merges = "\n".join(["#version: 0.2", *pairs])
                (target / path.name / "merges.txt").write_text(merges + "\n", "utf-8")
        return target

    def load(self) -> None:
        import onnxruntime as ort
        import torch
        from diffusers import DDIMScheduler, EulerDiscreteScheduler
        from optimum.onnxruntime import ORTDiffusionPipeline

        settings = ort.SessionOptions()
        settings.log_severity_level = 3
        if self.job["threads"]:
            settings.intra_op_num_threads = self.job["threads"]
            torch.set_num_threads(self.job["threads"])
        self.pipeline = ORTDiffusionPipeline.from_pretrained(
            self.folder(), provider="CPUExecutionProvider", session_options=settings
        )
        kinds = {"ddim": DDIMScheduler, "euler": EulerDiscreteScheduler}
        kind = kinds[self.job["request"]["scheduler"]]
        self.pipeline.scheduler = kind.from_config(self.pipeline.scheduler.config)
        self.pipeline.set_progress_bar_config(disable=True)

    def open(self, use: str) -> dict[str, Any]:
        self.load()
        return {"unet": {"device": "cpu", "precision": "fp32"}}

    def image(self) -> Any:
        import numpy as np
        import torch

        request = self.job["request"]
        result = self.pipeline(
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
        return (result.images * 255).round().astype(np.uint8)


if __name__ == "__main__":
    serve(Peer)
