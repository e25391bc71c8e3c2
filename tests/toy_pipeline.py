"""A Stable Diffusion pipeline of a dozen nodes, for tests that run on the reference evaluator.

It draws nothing sensible, but has every component, input and file that a real one has, and every
output depends on every input.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from sdkit_dispatch.choice import pipeline_folder

HIDDEN = 4
SIDE_PX = 16
CONFIGS = {
    "text_encoder": {"max_position_embeddings": 77, "hidden_size": HIDDEN},
    "unet": {
        "sample_size": SIDE_PX // 2,
        "block_out_channels": [4],
        "cross_attention_dim": HIDDEN,
        "in_channels": 4,
    },
    "vae_decoder": {
        "block_out_channels": [4, 4],
        "latent_channels": 4,
        "scaling_factor": 0.5,
    },
}


def make_toy_pipeline(folder: Path, *, external: bool = False) -> Path:
    """Writes the pipeline; with `external`, the UNet's weights go to `unet/model.onnx_data`."""
    real = pipeline_folder("sample")
    for name in ("scheduler", "tokenizer"):
        shutil.copytree(real / name, folder / name)
    shutil.copy(real / "model_index.json", folder)
    models = {
        "text_encoder": text_encoder(),
        "unet": unet(),
        "vae_decoder": vae_decoder(),
    }
    for name, model in models.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(CONFIGS[name]))
        kwargs = {}
        if external and name == "unet":
            kwargs = {
                "save_as_external_data": True,
                "all_tensors_to_one_file": True,
                "location": "model.onnx_data",
                "size_threshold": 0,
            }
        onnx.save_model(model, folder / name / "model.onnx", **kwargs)
    return folder


def text_encoder() -> onnx.ModelProto:
    rng = np.random.default_rng(1)
    return _model(
        [
            helper.make_node("Gather", ["words", "input_ids"], ["word"]),
            helper.make_node("Add", ["word", "places"], ["last_hidden_state"]),
        ],
        {
            "words": rng.standard_normal((49408, HIDDEN)),
            "places": rng.standard_normal((77, HIDDEN)),
        },
        inputs=[("input_ids", TensorProto.INT64, ["batch", 77])],
        outputs=[("last_hidden_state", ["batch", 77, HIDDEN])],
    )


def unet() -> onnx.ModelProto:
    rng = np.random.default_rng(2)
    return _model(
        [
            helper.make_node("Conv", ["sample", "kernel"], ["mixed"], pads=[1, 1, 1, 1]),
            helper.make_node("ReduceMean", ["encoder_hidden_states", "axes"], ["mean"], keepdims=0),
            helper.make_node("Unsqueeze", ["mean", "plane"], ["context"]),
            helper.make_node("Add", ["mixed", "context"], ["told"]),
            helper.make_node("Mul", ["timestep", "slope"], ["time"]),
            helper.make_node("Add", ["told", "time"], ["timed"]),
            helper.make_node("Tanh", ["timed"], ["out_sample"]),
        ],
        {
            "kernel": rng.standard_normal((4, 4, 3, 3)) / 6,
            "axes": np.array([1]),
            "plane": np.array([2, 3]),
            "slope": np.array(1e-3),
        },
        inputs=[
            ("sample", TensorProto.FLOAT, ["batch", 4, "height", "width"]),
            ("timestep", TensorProto.FLOAT, []),
            ("encoder_hidden_states", TensorProto.FLOAT, ["batch", "sequence", HIDDEN]),
        ],
        outputs=[("out_sample", ["batch", 4, "height", "width"])],
    )


def vae_decoder() -> onnx.ModelProto:
    rng = np.random.default_rng(3)
    return _model(
        [
            helper.make_node("Conv", ["latent_sample", "kernel"], ["deep"]),
            helper.make_node("DepthToSpace", ["deep"], ["sample"], blocksize=2),
        ],
        {"kernel": rng.standard_normal((12, 4, 1, 1)) / 4},
        inputs=[("latent_sample", TensorProto.FLOAT, ["batch", 4, "height", "width"])],
        outputs=[("sample", ["batch", 3, "height_px", "width_px"])],
    )


def _model(nodes, weights, *, inputs, outputs) -> onnx.ModelProto:
    initializers = [
        numpy_helper.from_array(
            value.astype(np.int64 if value.dtype.kind == "i" else np.float32), name
        )
        for name, value in weights.items()
    ]
    graph = helper.make_graph(
        nodes,
        "toy",
        [helper.make_tensor_value_info(*row) for row in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in outputs],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
