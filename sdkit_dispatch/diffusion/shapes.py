"""A pipeline and a request -> the static shape of every graph input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sdkit_dispatch.contract import GenerateRequest
from sdkit_dispatch.diffusion.tokenizer import (
    DEFAULT_CHUNK_TOKENS,
    ClipTokenizer,
    load_tokenizer,
)
from sdkit_dispatch.errors import ConfigError, PipelineError
from sdkit_dispatch.pipeline_files import Component, GraphTensor, Pipeline

Shape = tuple[int, ...]

TEXT_COMPONENTS = ("text_encoder", "text_encoder_2")
TIME_IDS = 6
"""SDXL's size conditioning: original size, crop corner, target size; two numbers each."""


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What the shapes of a request are made of."""

    factor: int
    channels: int
    height: int
    width: int
    images: int
    unet_batch: int
    chunk_tokens: int
    tokens: int
    hidden: int
    pooled: int
    guidance_channels: int


def component_shapes(
    pipeline: Pipeline, request: GenerateRequest, *, token_chunks: int = 1
) -> dict[str, dict[str, Shape]]:
    """Returns component -> input -> shape, for the components that text to image runs.

    Text encoders and the VAE decoder run one row at a time; the UNet runs the whole batch, twice
    as large with guidance (negative rows first).

    Args:
        pipeline: An exported pipeline.
        request: Its size, batch and guidance count.
        token_chunks: As `count_token_chunks` says.

    Raises:
        ConfigError: The size in pixels does not divide.
        PipelineError: A graph has an unknown input, or is fixed at another shape.
    """
    sizes = _sizes(pipeline, request, token_chunks)
    return {
        name: {tensor.name: _input_shape(component, tensor, sizes) for tensor in component.inputs}
        for name, component in pipeline.components.items()
        if name in (*TEXT_COMPONENTS, "unet", "vae_decoder")
    }


def count_token_chunks(pipeline: Pipeline, request: GenerateRequest) -> int:
    """Returns the chunks of 75 tokens that the longer of the prompts fills, in any tokenizer."""
    tokenizers = load_tokenizers(pipeline)
    return longest_chunk_count(tokenizers, request, has_guidance=uses_guidance(pipeline, request))


def longest_chunk_count(
    tokenizers: Mapping[str, ClipTokenizer], request: GenerateRequest, *, has_guidance: bool
) -> int:
    """As `count_token_chunks`, with tokenizers that are already open."""
    texts = [request.prompt, request.negative_prompt] if has_guidance else [request.prompt]
    return max(found.chunk_count(text) for found in tokenizers.values() for text in texts)


def load_tokenizers(pipeline: Pipeline) -> dict[str, ClipTokenizer]:
    """Opens every tokenizer of the pipeline: "tokenizer" and, for SDXL, "tokenizer_2"."""
    return {
        name: load_tokenizer(folder, chunk_tokens=_chunk_tokens(pipeline))
        for name, folder in pipeline.tokenizers.items()
    }


def uses_guidance(pipeline: Pipeline, request: GenerateRequest) -> bool:
    """Says whether the UNet sees the negative prompt too.

    A model with a `timestep_cond` input (LCM) was distilled to take the scale as a number.
    """
    return request.guidance > 1 and guidance_channels(pipeline) == 0


def guidance_channels(pipeline: Pipeline) -> int:
    """Returns the width of the guidance embedding of an LCM UNet; 0 for any other."""
    names = {tensor.name for tensor in _component(pipeline, "unet").inputs}
    if "timestep_cond" not in names:
        return 0
    return _config_int(pipeline, "unet", "time_cond_proj_dim")


def vae_factor(pipeline: Pipeline) -> int:
    """Returns the pixels along one side of a latent cell: 8 for every published model."""
    return int(2 ** (len(_levels(pipeline, "vae_decoder")) - 1))


def unet_multiple(pipeline: Pipeline) -> int:
    """Returns what sides of latents divide by that the UNet halves evenly: 8 for SD1.5.

    Other sides need a graph of their own: see `graph.upsampling`.
    """
    return int(2 ** (len(_levels(pipeline, "unet")) - 1))


def latent_shape(pipeline: Pipeline, request: GenerateRequest) -> Shape:
    """Returns `(channels, height, width)` of one image's latents.

    Raises:
        ConfigError: Width or height does not divide; names the nearest that do.
    """
    multiple = vae_factor(pipeline)
    if any(side < multiple or side % multiple for side in (request.width_px, request.height_px)):
        raise ConfigError(
            f"size {request.width_px}x{request.height_px} px does not fit this model: width and "
            f"height must be multiples of {multiple}",
            f"the nearest sizes are {_nearest(request, multiple)}",
        )
    channels = _config_int(pipeline, "vae_decoder", "latent_channels")
    return channels, request.height_px // multiple, request.width_px // multiple


def _nearest(request: GenerateRequest, multiple: int) -> str:
    def below_and_above(side: int) -> list[int]:
        below = max(multiple, side // multiple * multiple)
        return sorted({below, max(multiple, -(-side // multiple) * multiple)})

    return ", ".join(
        f"{width}x{height}"
        for width in below_and_above(request.width_px)
        for height in below_and_above(request.height_px)
    )


def _sizes(pipeline: Pipeline, request: GenerateRequest, token_chunks: int) -> _Sizes:
    if request.batch < 1:
        raise ConfigError(f"a batch of {request.batch} has no images", "pass --batch 1")
    channels, height, width = latent_shape(pipeline, request)
    chunk_tokens = _chunk_tokens(pipeline)
    is_sdxl = pipeline.family == "sdxl"
    return _Sizes(
        factor=vae_factor(pipeline),
        channels=channels,
        height=height,
        width=width,
        images=request.batch,
        unet_batch=request.batch * (2 if uses_guidance(pipeline, request) else 1),
        chunk_tokens=chunk_tokens,
        tokens=chunk_tokens * token_chunks,
        hidden=_config_int(pipeline, "unet", "cross_attention_dim"),
        pooled=_config_int(pipeline, "text_encoder_2", "projection_dim") if is_sdxl else 0,
        guidance_channels=guidance_channels(pipeline),
    )


_INPUT_SHAPES: Mapping[str, Mapping[str, Callable[[_Sizes], Shape]]] = {
    "text": {"input_ids": lambda s: (1, s.chunk_tokens)},
    "unet": {
        "sample": lambda s: (s.unet_batch, s.channels, s.height, s.width),
        "encoder_hidden_states": lambda s: (s.unet_batch, s.tokens, s.hidden),
        "text_embeds": lambda s: (s.unet_batch, s.pooled),
        "time_ids": lambda s: (s.unet_batch, TIME_IDS),
        "timestep_cond": lambda s: (s.unet_batch, s.guidance_channels),
    },
    "vae_decoder": {"latent_sample": lambda s: (1, s.channels, s.height, s.width)},
}
"""Kind of component -> input -> its shape; "timestep" comes in several forms (`_timestep`)."""


def _input_shape(component: Component, tensor: GraphTensor, sizes: _Sizes) -> Shape:
    kind = "text" if component.name in TEXT_COMPONENTS else component.name
    known = _INPUT_SHAPES[kind]
    if kind == "unet" and tensor.name == "timestep":
        shape = _timestep(component, tensor, sizes)
    elif tensor.name in known:
        shape = known[tensor.name](sizes)
    else:
        raise PipelineError(
            f"{component.name}: input {tensor.name!r} is not one we can feed; known are "
            f"{', '.join([*known, *(['timestep'] if kind == 'unet' else [])])}",
            "export the pipeline in the layout of optimum (`optimum-cli export onnx`)",
        )
    _check_fixed(component, tensor, shape, sizes)
    return shape


def _timestep(component: Component, tensor: GraphTensor, sizes: _Sizes) -> Shape:
    """A scalar in new exports; `[1]` or `[batch]` in older ones."""
    if not tensor.dims:
        return ()
    length = tensor.dims[0]
    if isinstance(length, int):
        return (length,)
    batch_symbol = _tensor(component, "sample").dims[0]
    return (sizes.unet_batch,) if length and length == batch_symbol else (1,)


def _check_fixed(component: Component, tensor: GraphTensor, shape: Shape, sizes: _Sizes) -> None:
    agrees = len(shape) == len(tensor.dims) and all(
        fixed == wanted
        for fixed, wanted in zip(tensor.dims, shape, strict=True)
        if isinstance(fixed, int)
    )
    if agrees:
        return
    fixed = "x".join(str(dim or "?") for dim in tensor.dims)
    wanted = "x".join(map(str, shape))
    meaning, hint = "", "export the graph with dynamic axes"
    if tensor.name in ("sample", "latent_sample") and len(tensor.dims) == len(shape):
        meaning, hint = _fixed_latents(tensor, shape, sizes)
    elif tensor.name == "encoder_hidden_states" and tensor.dims[1:2] != (shape[1],):
        meaning = f": {tensor.dims[1]} tokens, and the prompts need {shape[1]}"
        hint = "shorten the prompts, or export the graph with dynamic axes"
    raise PipelineError(
        f"{component.name}: input {tensor.name!r} was exported for {fixed}{meaning}; "
        f"this request needs {wanted}",
        hint,
    )


def _fixed_latents(tensor: GraphTensor, shape: Shape, sizes: _Sizes) -> tuple[str, str]:
    batch, channels, height, width = tensor.dims
    if isinstance(channels, int) and channels != shape[1]:
        return (
            f", and {channels} channels are not the {shape[1]} of the VAE (an inpainting model?)",
            "use a text-to-image pipeline",
        )
    parts, hints = [], []
    if isinstance(width, int) and isinstance(height, int):
        size = f"{width * sizes.factor}x{height * sizes.factor}"
        parts.append(f"{size} px")
        if (height, width) != shape[2:]:
            hints.append(f"ask for {size} px")
    if isinstance(batch, int) and batch != shape[0]:
        parts.append(f"batch {batch} (guidance doubles it)")
        hints.append("change the batch or the guidance")
    meaning = f", that is {' and '.join(parts)}" if parts else ""
    return meaning, " and ".join([*hints]) + (", or " if hints else "") + (
        "export the graph with dynamic axes"
    )


def _chunk_tokens(pipeline: Pipeline) -> int:
    config = pipeline.configs.get("text_encoder", {})
    return int(config.get("max_position_embeddings") or DEFAULT_CHUNK_TOKENS)


def _levels(pipeline: Pipeline, component: str) -> list[int]:
    levels = pipeline.configs.get(component, {}).get("block_out_channels")
    if not isinstance(levels, list) or not levels:
        raise _missing(component, "block_out_channels", levels)
    return levels


def _config_int(pipeline: Pipeline, component: str, key: str) -> int:
    value = pipeline.configs.get(component, {}).get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _missing(component, key, value)
    return value


def _missing(component: str, key: str, value: object) -> PipelineError:
    return PipelineError(
        f"{component}/config.json: {key} is {value!r}, which tells no shape",
        f"copy {component}/config.json from the original pipeline",
    )


def _component(pipeline: Pipeline, name: str) -> Component:
    if name not in pipeline.components:
        raise PipelineError(
            f"pipeline {pipeline.folder} has no {name}; it has {', '.join(pipeline.components)}",
            "export the whole pipeline",
        )
    return pipeline.components[name]


def _tensor(component: Component, name: str) -> GraphTensor:
    for tensor in component.inputs:
        if tensor.name == name:
            return tensor
    raise PipelineError(
        f"{component.name}: no input {name!r}; its inputs are "
        f"{', '.join(tensor.name for tensor in component.inputs)}",
        "export the pipeline in the layout of optimum (`optimum-cli export onnx`)",
    )
