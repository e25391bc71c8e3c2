"""LoRA files of drawn numbers, and a pipeline of a dozen nodes that they fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from toy_pipeline import make_toy_pipeline

MODELS = Path(__file__).parents[1] / "models"
PIPELINES = MODELS / "pipelines"
RECORDED = MODELS / "lora"
NAMES = {"float32": "F32", "float16": "F16", "float64": "F64", "uint16": "BF16", "uint8": "F8_E4M3"}
"""numpy's name of a dtype -> the file's; bfloat16 and float8 are given as their bits."""
CONV = "lora_unet_conv_in"
"""The one layer of the toy pipeline that a LoRA can change."""


def lora_bytes(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Returns a .safetensors file."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, array in tensors.items():
        part = np.asarray(array)
        header[name] = {
            "dtype": NAMES[part.dtype.name],
            "shape": list(part.shape),
            "data_offsets": [len(data), len(data) + part.nbytes],
        }
        data += part.tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_lora(path: Path, tensors: Mapping[str, Any], **metadata: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lora_bytes(tensors, metadata or None))
    return path


def layer(
    module: str = CONV,
    *,
    rank: int = 2,
    into: tuple[int, ...] = (4, 3, 3),
    out: int = 4,
    alpha: float | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> dict[str, Any]:
    """Returns the tensors of one layer as kohya's scripts name them."""
    rng = np.random.default_rng(seed)
    tail = (1, 1) if len(into) == 3 else ()
    tensors = {
        f"{module}.lora_down.weight": rng.standard_normal((rank, *into)).astype(dtype),
        f"{module}.lora_up.weight": rng.standard_normal((out, rank, *tail)).astype(dtype),
    }
    if alpha is not None:
        tensors[f"{module}.alpha"] = np.array(alpha, dtype)
    return tensors


def make_named_pipeline(folder: Path, *, external: bool = True) -> Path:
    """The toy pipeline, whose UNet calls its kernel as a real export does."""
    make_toy_pipeline(folder, external=external)
    path = folder / "unet" / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        tensor.name = {"kernel": "unet.conv_in.weight"}.get(tensor.name, tensor.name)
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = {"kernel": "unet.conv_in.weight"}.get(name, name)
    path.write_bytes(model.SerializeToString())
    return folder


def weights(path: Path) -> dict[str, np.ndarray]:
    """Returns all initializers of a graph."""
    return {
        tensor.name: onnx.numpy_helper.to_array(tensor, str(path.parent))
        for tensor in onnx.load(path).graph.initializer
    }


def kernel(folder: Path) -> np.ndarray:
    return weights(folder / "unet" / "model.onnx")["unet.conv_in.weight"]
