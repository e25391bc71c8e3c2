"""Lists the ONNX operators of diffusion graphs: `list_operators.py` rewrites operators.json.

SD 1.5 and SDXL come from the tiny pipelines of tests/models. SD 2.1, SD 3 and FLUX are built here
in miniature and exported with torch.onnx; needs PyTorch, diffusers, transformers and onnxscript.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel
from transformers import T5Config, T5EncoderModel

HERE = Path(__file__).parent
PIPELINES = HERE.parents[2] / "models" / "pipelines"


class Call(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self.model, *inputs)


def sd21() -> tuple[Call, tuple[torch.Tensor, ...]]:
    unet = UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
    )
    inputs = (torch.randn(1, 4, 8, 8), torch.tensor(5.0), torch.randn(1, 77, 32))
    return Call(unet, lambda m, x, t, c: m(x, t, c, return_dict=False)[0]), inputs


def sd3() -> tuple[Call, tuple[torch.Tensor, ...]]:
    model = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )
    inputs = (
        torch.randn(1, 4, 16, 16),
        torch.randn(1, 7, 32),
        torch.randn(1, 64),
        torch.tensor([5.0]),
    )
    return Call(model, lambda m, x, c, p, t: m(x, c, p, t, return_dict=False)[0]), inputs


def flux() -> tuple[Call, tuple[torch.Tensor, ...]]:
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = (
        torch.randn(1, 16, 4),
        torch.randn(1, 6, 32),
        torch.randn(1, 32),
        torch.tensor([0.5]),
        torch.zeros(16, 3),
        torch.zeros(6, 3),
    )
    return (
        Call(
            model,
            lambda m, x, c, p, t, i, j: m(x, c, p, t, img_ids=i, txt_ids=j, return_dict=False)[0],
        ),
        inputs,
    )


def t5() -> tuple[Call, tuple[torch.Tensor, ...]]:
    config = T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    model = T5EncoderModel(config)
    return Call(model, lambda m, i: m(i, return_dict=False)[0]), (
        torch.ones(1, 9, dtype=torch.long),
    )


MODELS = {"sd21": sd21, "sd3": sd3, "flux": flux, "t5": t5}


def exported(make: Callable[[], tuple[Call, tuple[torch.Tensor, ...]]]) -> Iterator[Path]:
    module, inputs = make()
    for dynamo in (True, False):
        with tempfile.TemporaryDirectory() as folder, torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = Path(folder) / "model.onnx"
            try:
                torch.onnx.export(
                    module.eval(), inputs, str(path), dynamo=dynamo, opset_version=18 + 2 * dynamo
                )
            except torch.onnx.errors.UnsupportedOperatorError:
                # The older exporter knows no RMSNorm; nobody has such a graph then.
                continue
            yield path


def operators_of(path: Path) -> set[str]:
    model = onnx.load(path, load_external_data=False)
    nodes = [*model.graph.node, *(node for f in model.functions for node in f.node)]
    return {node.op_type for node in nodes if node.domain in ("", "ai.onnx")}


def main() -> None:
    found: dict[str, set[str]] = {}
    for path in PIPELINES.glob("*/*/model.onnx"):
        family = path.parents[1].name.split("-")[0]
        found.setdefault(family, set()).update(operators_of(path))
    for name, make in MODELS.items():
        for path in exported(make):
            found.setdefault(name, set()).update(operators_of(path))
    rows = {"operators": {name: sorted(found[name]) for name in sorted(found)}}
    (HERE / "operators.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
