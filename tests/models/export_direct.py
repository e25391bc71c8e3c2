"""Exports the tiny pipelines with torch.onnx.export: `export_direct.py BUILD`. See README.md.

Traps that this script knows:

* The example latents are 16x24: at 8x8 the middle of the UNet is 1x1, and dynamo then silently
  freezes height and width. Non-square, so that a mixed-up axis shows.
* `Dim.DYNAMIC` and not a named dimension, which makes dynamo prove things it cannot; the names
  are given afterwards, and an axis that came out frozen stops the script.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import onnx
import tiny
import torch
import transformers

OUT = Path(__file__).parent / "pipelines"
HEIGHT, WIDTH = 16, 24
OPSET = {"dynamo": 20, "torchscript": 18}
EXTERNAL_DATA = {"sdxl-dynamo"}
"""Exports whose UNet keeps its weights in `model.onnx_data`, as every large one does."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """What to export: a module that takes `inputs` in order and returns `outputs` in order."""

    module: torch.nn.Module
    inputs: Mapping[str, torch.Tensor]
    axes: Mapping[str, Mapping[int, str]]
    outputs: tuple[str, ...]


class Call(torch.nn.Module):
    """A module whose forward is a function of the wrapped model and positional inputs."""

    def __init__(self, model: torch.nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.call(self.model, *inputs)


def text_graph(model: Any, *, states: bool) -> Graph:
    is_projected = isinstance(model, transformers.CLIPTextModelWithProjection)

    def call(encoder: Any, ids: torch.Tensor) -> Any:
        found = encoder(ids, output_hidden_states=states)
        first = (
            [found.text_embeds, found.last_hidden_state]
            if is_projected
            else [found.last_hidden_state, found.pooler_output]
        )
        return tuple([*first, *(found.hidden_states if states else ())])

    names = (
        ["text_embeds", "last_hidden_state"]
        if is_projected
        else ["last_hidden_state", "pooler_output"]
    )
    if states:
        names += [f"hidden_states.{i}" for i in range(model.config.num_hidden_layers + 1)]
    return Graph(
        module=Call(model, call),
        inputs={"input_ids": torch.randint(0, tiny.VOCABULARY, (2, 77))},
        axes={"input_ids": {0: "batch_size"}},
        outputs=tuple(names),
    )


def unet_graph(model: Any, dtype: torch.dtype) -> Graph:
    config = model.config
    inputs = {
        "sample": torch.randn(2, config.in_channels, HEIGHT, WIDTH, dtype=dtype),
        "timestep": torch.tensor(801.0),
        "encoder_hidden_states": torch.randn(2, 77, config.cross_attention_dim, dtype=dtype),
    }
    axes = {
        "sample": {0: "batch_size", 2: "height", 3: "width"},
        "timestep": {},
        "encoder_hidden_states": {0: "batch_size", 1: "sequence_length"},
    }
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        inputs |= {
            "text_embeds": torch.randn(2, pooled, dtype=dtype),
            "time_ids": torch.randn(2, 6, dtype=dtype),
        }
        axes |= {"text_embeds": {0: "batch_size"}, "time_ids": {0: "batch_size"}}

    def call(unet: Any, sample: Any, timestep: Any, hidden: Any, *added: torch.Tensor) -> Any:
        conditions = dict(zip(("text_embeds", "time_ids"), added, strict=False)) or None
        return unet(sample, timestep, hidden, added_cond_kwargs=conditions, return_dict=False)[0]

    return Graph(module=Call(model, call), inputs=inputs, axes=axes, outputs=("out_sample",))


def decoder_graph(model: Any, dtype: torch.dtype) -> Graph:
    return Graph(
        module=Call(model, lambda vae, latents: vae.decode(latents, return_dict=False)[0]),
        inputs={"latent_sample": torch.randn(2, 4, HEIGHT, WIDTH, dtype=dtype)},
        axes={"latent_sample": {0: "batch_size", 2: "latent_height", 3: "latent_width"}},
        outputs=("sample",),
    )


def encoder_graph(model: Any, dtype: torch.dtype) -> Graph:
    size = (tiny.FACTOR * HEIGHT, tiny.FACTOR * WIDTH)
    return Graph(
        module=Call(model, lambda vae, image: vae.encode(image).latent_dist.parameters),
        inputs={"sample": torch.randn(2, 3, *size, dtype=dtype)},
        axes={"sample": {0: "batch_size", 2: "sample_height", 3: "sample_width"}},
        outputs=("latent_parameters",),
    )


def export(graph: Graph, path: Path, *, style: str, external: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arguments = tuple(graph.inputs.values())
    names = {"input_names": list(graph.inputs), "output_names": list(graph.outputs)}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if style == "torchscript":
            torch.onnx.export(
                graph.module,
                arguments,
                str(path),
                dynamo=False,
                opset_version=OPSET[style],
                dynamic_axes={key: dict(axes) for key, axes in graph.axes.items() if axes},
                **names,
            )
        else:
            dynamic = tuple(
                dict.fromkeys(graph.axes[key], torch.export.Dim.DYNAMIC) for key in graph.inputs
            )
            torch.onnx.export(
                graph.module,
                arguments,
                str(path),
                dynamo=True,
                opset_version=OPSET[style],
                dynamic_shapes=(dynamic,),
                external_data=False,
                verbose=False,
                **names,
            )
    model = onnx.load(path)
    name_axes(model, graph)
    drop_notes(model)
    onnx.checker.check_model(model)
    if external:
        onnx.save_model(model, path, save_as_external_data=True, location="model.onnx_data")
    else:
        onnx.save_model(model, path)


def name_axes(model: onnx.ModelProto, graph: Graph) -> None:
    """Gives the free axes of the inputs their names; stops where one was frozen."""
    renamed: dict[str, str] = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        for axis, name in graph.axes[value.name].items():
            if not dims[axis].dim_param:
                raise SystemExit(f"{value.name}: axis {axis} ({name}) was frozen by the exporter")
            renamed[dims[axis].dim_param] = name
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in renamed:
                dim.dim_param = renamed[dim.dim_param]


def drop_notes(model: onnx.ModelProto) -> None:
    """Drops what dynamo notes about its source: stack traces with paths, half of the file."""
    for holder in (model, model.graph, *model.graph.node, *model.graph.value_info,
                   *model.graph.initializer, *model.graph.input, *model.graph.output):  # fmt: skip
        holder.ClearField("metadata_props")
        holder.ClearField("doc_string")


def export_pipeline(source: Path, out: Path, *, style: str, dtype: torch.dtype) -> None:
    """Writes `source` as ONNX in optimum's layout."""
    shutil.rmtree(out, ignore_errors=True)
    is_sdxl = (source / "text_encoder_2").is_dir()
    kind = diffusers.StableDiffusionXLPipeline if is_sdxl else diffusers.StableDiffusionPipeline
    torch.manual_seed(1)
    pipeline = kind.from_pretrained(source, dtype=dtype)
    graphs = {
        "text_encoder": text_graph(pipeline.text_encoder, states=is_sdxl),
        "unet": unet_graph(pipeline.unet, dtype),
        "vae_decoder": decoder_graph(pipeline.vae, dtype),
        "vae_encoder": encoder_graph(pipeline.vae, dtype),
    }
    if is_sdxl:
        graphs["text_encoder_2"] = text_graph(pipeline.text_encoder_2, states=True)
    for name, graph in graphs.items():
        external = name == "unet" and out.name in EXTERNAL_DATA
        export(graph, out / name / "model.onnx", style=style, external=external)
        origin = source / ("vae" if name.startswith("vae") else name) / "config.json"
        shutil.copy(origin, out / name / "config.json")
    shutil.copy(source / "model_index.json", out)
    shutil.copytree(source / "scheduler", out / "scheduler")
    for name in ("tokenizer", "tokenizer_2") if is_sdxl else ("tokenizer",):
        # As transformers 5 writes it: tokenizer.json and tokenizer_config.json alone.
        getattr(pipeline, name).save_pretrained(out / name)
        minify(out / name / "tokenizer.json")


def minify(path: Path) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    path.write_text(text + "\n", encoding="utf-8")


def main(build: Path) -> None:
    for family in tiny.FAMILIES:
        for style in OPSET:
            out = OUT / f"{family}-{style}"
            export_pipeline(build / family, out, style=style, dtype=torch.float32)
    out = OUT / "sd15-dynamo-fp16"
    export_pipeline(build / "sd15", out, style="dynamo", dtype=torch.float16)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
