"""Exports full-size pipelines without their weights: `make_suite_graphs.py [sd15] [sdxl/unet]`.

Writes `sdkit_dispatch/_data/suites/NAME`: a folder in optimum's layout whose graphs are compressed
and say of every weight what it is filled with (`benchmark/seeded_pipeline.py` does that). They are
what `torch.onnx.export` makes of diffusers' own models, so operators and sizes are the real ones.

How the weights are told from what the exporter computed: every parameter is set to one number, the
bound of the uniform distribution that PyTorch would draw it from, before the export. A tensor of
the graph that is one number throughout is a weight, whatever the exporter has made of it.
"""

from __future__ import annotations

import json
import lzma
import math
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from export_direct import (
    Call,
    Graph,
    decoder_graph,
    drop_notes,
    name_axes,
    text_graph,
    unet_graph,
)
from networks import TEXT, UNET, VAE, WIDE_TEXT, WIDE_UNET
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

OUT = Path(__file__).parents[2] / "sdkit_dispatch" / "_data" / "suites"
SMALLEST = 256
"""Bytes; smaller tensors stay in the graph as they are."""
ALIGNED = 64
"""Where in the file of weights each may start."""
DATA = "model.onnx.data"
OPSET = 18
EMBEDDING = 0.02 * math.sqrt(3)
"""The bound of a uniform distribution as wide as CLIP's normal one."""
LAST = 0.25
"""Pictures of a trained decoder lie within -1..1; those of random weights within -4.4..4.4."""
KINDS = {
    "text_encoder": CLIPTextModel,
    "text_encoder_2": CLIPTextModelWithProjection,
    "unet": UNet2DConditionModel,
    "vae_decoder": AutoencoderKL,
}
SUITES: dict[str, dict[str, tuple[dict[str, Any], torch.dtype]]] = {
    "sd15": {
        "text_encoder": (TEXT, torch.float32),
        "unet": (UNET, torch.float32),
        "vae_decoder": (VAE, torch.float32),
    },
    # As it is used: the decoder's numbers are too large for float16.
    "sdxl": {
        "text_encoder": (TEXT, torch.float16),
        "text_encoder_2": (WIDE_TEXT, torch.float16),
        "unet": (WIDE_UNET, torch.float16),
        "vae_decoder": ({**VAE, "sample_size": 1024, "scaling_factor": 0.13025}, torch.float32),
    },
}


def model_of(component: str, config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Makes a model whose parameters are what they are to be drawn from."""
    kind = KINDS[component]
    torch.set_default_dtype(dtype)
    with torch.device("meta"):
        is_text = component.startswith("text_encoder")
        model = kind(CLIPTextConfig(**config)) if is_text else kind.from_config(config)
    torch.set_default_dtype(torch.float32)
    if component == "vae_decoder":
        model.encoder = model.quant_conv = None
    model = model.to_empty(device="cpu").to(dtype).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            assert name.endswith("position_ids"), name
            buffer.copy_(torch.arange(buffer.shape[-1]).expand(buffer.shape))
        for name, module in model.named_modules():
            bound = LAST if name == "decoder.conv_out" else 1.0
            for key, value in module.named_parameters(recurse=False):
                value.requires_grad_(False)
                value.fill_(bound * bound_of(module, key))
    return model


def bound_of(module: torch.nn.Module, key: str) -> float:
    if isinstance(module, torch.nn.GroupNorm | torch.nn.LayerNorm):
        return 1.0 if key == "weight" else 0.0
    if isinstance(module, torch.nn.Embedding):
        return EMBEDDING
    assert isinstance(module, torch.nn.Linear | torch.nn.Conv2d), module
    return 1 / math.sqrt(math.prod(module.weight.shape[1:]))


def exported(graph: Graph) -> onnx.ModelProto:
    """Exports a graph; its weights lie outside, in a file that is not there, with their bounds."""
    dynamic = tuple(
        dict.fromkeys(graph.axes[key], torch.export.Dim.DYNAMIC) for key in graph.inputs
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            graph.module,
            tuple(graph.inputs.values()),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=(dynamic,),
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
            verbose=False,
        )
    model = program.model
    bounds, at = {}, 0
    for name, value in model.graph.initializers.items():
        array = value.const_value.numpy()
        first = array.flat[0]
        if array.nbytes < SMALLEST or array.dtype.kind != "f" or not (array == first).all():
            continue
        bounds[name] = float(first)
        value.const_value = onnx_ir.ExternalTensor(
            DATA,
            at,
            array.nbytes,
            value.const_value.dtype,
            shape=value.const_value.shape,
            name=name,
        )
        at += -(-array.nbytes // ALIGNED) * ALIGNED
    print(f"  {at / 1e9:.2f} GB of weights", flush=True)
    proto = onnx_ir.to_proto(model)
    name_axes(proto, graph)
    drop_notes(proto)
    del proto.graph.value_info[:]
    for tensor in proto.graph.initializer:
        if tensor.name in bounds:
            bound = bounds[tensor.name]
            key = "value" if bound in (0, 1) else "uniform"
            tensor.metadata_props.add(key=key, value=f"{bound:.6g}")
    return proto


def graph_of(component: str, model: Any, dtype: torch.dtype, *, states: bool) -> Graph:
    if component.startswith("text_encoder"):
        return text_graph(model, states=states)
    if component == "vae_decoder":
        return decoder_graph(model, dtype)
    graph = unet_graph(model, dtype)
    inner = graph.module.call

    def call(unet: Any, sample: Any, timestep: Any, hidden: Any, *added: torch.Tensor) -> Any:
        # It is joined with an embedding in float32, and torch 2.13 exports that without a cast.
        return inner(unet, sample, timestep, hidden, *(one.float() for one in added))

    return replace(graph, module=Call(model, call))


def main(names: list[str]) -> None:
    for name in names:
        suite, _, only = name.partition("/")
        for component, (config, dtype) in SUITES[suite].items():
            if only not in ("", component):
                continue
            print(suite, component, flush=True)
            model = model_of(component, config, dtype)
            graph = graph_of(component, model, dtype, states=suite == "sdxl")
            proto = exported(graph)
            del model, graph
            out = OUT / suite / component
            out.mkdir(parents=True, exist_ok=True)
            packed = lzma.compress(proto.SerializeToString(), preset=9)
            (out / "model.onnx.xz").write_bytes(packed)
            written = {**config, "_class_name": KINDS[component].__name__}
            (out / "config.json").write_text(json.dumps(written, indent=1) + "\n")
            print(f"  {len(packed)} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(SUITES))
