"""openvino-genai's Text2ImagePipeline, from our ONNX files, with its own tokenizer conversion.

The graphs are read by OpenVINO and written as its IR. Its UNet takes the timestep as one int64 in a
vector, where an exported one takes a scalar: that input is replaced. The shapes are made static, as
its documentation advises for speed.
"""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from peer_lines import serve

SCHEDULERS = {"ddim": "DDIM", "euler": "EULER_DISCRETE", "euler_a": "EULER_ANCESTRAL_DISCRETE"}
PARTS = ("text_encoder", "text_encoder_2", "unet", "vae_decoder", "vae_encoder")
CLASSES = {"unet": "UNet2DConditionModel", "vae_decoder": "AutoencoderKL"}
DONE = "done.json"


class Peer:
    def __init__(self, job: Any) -> None:
        os.environ.setdefault("CI", "true")  # openvino sends no telemetry then
        self.job = job
        self.folder = Path(job["work"]) / "ir"
        self.pipeline: Any = None  # Any: Text2ImagePipeline

    def prepare(self) -> dict[str, Any]:
        import openvino_genai

        was_there = (self.folder / DONE).is_file()
        if not was_there:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.convert()
        size = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        return {
            "runtime": f"openvino-genai {openvino_genai.__version__}",
            "components": [],
            "images": True,
            "was_there": was_there,
            "bytes": size,
            "note": "Text2ImagePipeline on the same graphs as IR, static shapes, f32",
        }

    def convert(self) -> None:
        import openvino as ov

        source = Path(self.job["pipeline"])
        core = ov.Core()
        for name in PARTS:
            if not (source / name / "model.onnx").is_file():
                continue
            model = core.read_model(str(source / name / "model.onnx"))
            if name == "unet":
                model = with_whole_timestep(model)
            (self.folder / name).mkdir(parents=True)
            ov.save_model(model, self.folder / name / "openvino_model.xml", compress_to_fp16=False)
            shutil.copy(source / name / "config.json", self.folder / name)
        shutil.copytree(source / "scheduler", self.folder / "scheduler")
        index = json.loads((source / "model_index.json").read_text(encoding="utf-8"))
        (self.folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
        for name in ("tokenizer", "tokenizer_2"):
            if (source / name).is_dir():
                self.convert_tokenizer(source / name, self.folder / name)
        (self.folder / DONE).write_text(json.dumps({"at": time.time()}), encoding="utf-8")

    @staticmethod
    def convert_tokenizer(source: Path, target: Path) -> None:
        import openvino as ov
        from openvino_tokenizers import convert_tokenizer
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(source)
        shutil.copytree(source, target)
        model = convert_tokenizer(tokenizer, with_detokenizer=False)
        ov.save_model(model, target / "openvino_tokenizer.xml")

    def open(self, use: str) -> dict[str, Any]:
        import openvino_genai as genai

        request = self.job["request"]
        pipeline = genai.Text2ImagePipeline(str(self.folder))
        kind = getattr(genai.Scheduler.Type, SCHEDULERS[request["scheduler"]])
        config = self.folder / "scheduler" / "scheduler_config.json"
        pipeline.set_scheduler(genai.Scheduler.from_config(str(config), kind))
        pipeline.reshape(
            request["batch"], request["height_px"], request["width_px"], request["guidance"]
        )
        properties = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        if self.job["threads"]:
            properties["INFERENCE_NUM_THREADS"] = self.job["threads"]
        pipeline.compile("CPU", **properties)
        self.pipeline = pipeline
        return {"unet": {"device": "CPU", "precision": "f32"}}

    def image(self) -> Any:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        noise = np.load(self.job["noise"], allow_pickle=False).astype(np.float32).ravel()

        class Noise(genai.Generator):  # type: ignore[misc]  # it is Any without the library
            def __init__(self) -> None:
                genai.Generator.__init__(self)
                self.at = 0

            def next(self) -> float:
                value = float(noise[self.at % noise.size])
                self.at += 1
                return value

            def randn_tensor(self, shape: Any) -> Any:
                return ov.Tensor(noise.reshape(list(shape)).copy())

        request = self.job["request"]
        result = self.pipeline.generate(
            request["prompt"],
            negative_prompt=request["negative_prompt"],
            width=request["width_px"],
            height=request["height_px"],
            num_inference_steps=request["steps"],
            guidance_scale=request["guidance"],
            num_images_per_prompt=request["batch"],
            generator=Noise(),
        )
        return np.array(result.data)


def with_whole_timestep(model: Any) -> Any:  # Any: openvino.Model
    """Returns the UNet with a timestep of int64 and shape [1], as openvino-genai feeds it."""
    import openvino as ov
    from openvino import opset13 as ops

    port = next(one for one in model.inputs if "timestep" in one.get_names())
    old = port.get_node()
    rank, kind = len(port.get_partial_shape()), port.get_element_type()
    new = ops.parameter([1], ov.Type.i64, name="timestep")
    new.output(0).set_names({"timestep"})
    value = ops.convert(new, kind)
    if rank == 0:
        value = ops.squeeze(value, ops.constant([0], dtype="int64"))
    for target in list(old.output(0).get_target_inputs()):
        target.replace_source_output(value.output(0))
    model.remove_parameter(old)
    model.add_parameters([new])
    model.validate_nodes_and_infer_types()
    return model


if __name__ == "__main__":
    serve(Peer)
