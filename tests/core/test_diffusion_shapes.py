from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdkit_dispatch.contract import GenerateRequest
from sdkit_dispatch.diffusion.shapes import (
    component_shapes,
    count_token_chunks,
    latent_shape,
)
from sdkit_dispatch.errors import ConfigError, PipelineError
from sdkit_dispatch.pipeline_files import GraphTensor, Pipeline, read_pipeline

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "models" / "pipelines"


def request(**changes: Any) -> GenerateRequest:  # Any: fields of a request
    fields: dict[str, Any] = {"prompt": "a cat", "width_px": 96, "height_px": 64, **changes}
    return GenerateRequest(**fields)


@pytest.fixture(scope="module")
def sd15() -> Pipeline:
    return read_pipeline(TINY / "sd15-optimum")


@pytest.fixture(scope="module")
def sdxl() -> Pipeline:
    return read_pipeline(TINY / "sdxl-optimum")


def with_dims(
    pipeline: Pipeline, component: str, tensor: str, dims: tuple[int | str, ...]
) -> Pipeline:
    """The pipeline, with one graph input declared otherwise (added if it was not there)."""
    found = pipeline.components[component]
    inputs = [t for t in found.inputs if t.name != tensor]
    inputs.append(GraphTensor(name=tensor, dtype="float32", dims=dims))
    changed = replace(found, inputs=tuple(inputs))
    return replace(pipeline, components={**pipeline.components, component: changed})


def with_config(pipeline: Pipeline, component: str, **values: object) -> Pipeline:
    config = {**pipeline.configs[component], **values}
    return replace(pipeline, configs={**pipeline.configs, component: config})


def test_sd15_shapes_double_the_batch_for_guidance(sd15: Pipeline) -> None:
    assert component_shapes(sd15, request(batch=3), token_chunks=2) == {
        "text_encoder": {"input_ids": (1, 77)},
        "unet": {
            "sample": (6, 4, 16, 24),
            "timestep": (),
            "encoder_hidden_states": (6, 154, 16),
        },
        "vae_decoder": {"latent_sample": (1, 4, 16, 24)},
    }


@pytest.mark.parametrize("guidance", [1.0, 0.0])
def test_without_guidance_the_batch_is_that_of_the_images(sd15: Pipeline, guidance: float) -> None:
    shapes = component_shapes(sd15, request(batch=3, guidance=guidance))
    assert shapes["unet"]["sample"] == (3, 4, 16, 24)


def test_sdxl_shapes_hold_both_encoders_and_the_size_ids(sdxl: Pipeline) -> None:
    assert component_shapes(sdxl, request()) == {
        "text_encoder": {"input_ids": (1, 77)},
        "text_encoder_2": {"input_ids": (1, 77)},
        "unet": {
            "sample": (2, 4, 16, 24),
            "timestep": (),
            "encoder_hidden_states": (2, 77, 40),
            "text_embeds": (2, 24),
            "time_ids": (2, 6),
        },
        "vae_decoder": {"latent_sample": (1, 4, 16, 24)},
    }


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_every_exporter_gets_the_same_shapes(family: str, exporter: str) -> None:
    ours = component_shapes(read_pipeline(TINY / f"{family}-{exporter}"), request())
    assert ours == component_shapes(read_pipeline(TINY / f"{family}-optimum"), request())


@pytest.mark.parametrize(
    ("dims", "shape"),
    [((), ()), ((1,), (1,)), (("batch_size",), (4,)), (("steps",), (1,)), (("",), (1,))],
)
def test_timestep_may_be_a_scalar_or_a_vector(
    sd15: Pipeline, dims: tuple[int | str, ...], shape: tuple[int, ...]
) -> None:
    changed = with_dims(sd15, "unet", "timestep", dims)
    assert component_shapes(changed, request(batch=2))["unet"]["timestep"] == shape


def test_any_multiple_of_the_vae_factor_is_a_size(sd15: Pipeline) -> None:
    four = {"block_out_channels": [320, 640, 1280, 1280]}
    vae = {"block_out_channels": [128, 256, 512, 512]}
    full_size = with_config(with_config(sd15, "unet", **four), "vae_decoder", **vae)
    for side_px in range(128, 1025, 8):
        wanted = (4, side_px // 8, 65)
        assert latent_shape(full_size, request(width_px=520, height_px=side_px)) == wanted


def test_a_size_that_does_not_divide_names_the_nearest(sd15: Pipeline) -> None:
    with pytest.raises(ConfigError) as caught:
        component_shapes(sd15, request(width_px=102, height_px=64))
    assert "102x64" in caught.value.message
    assert "multiples of 4" in caught.value.message
    assert caught.value.hint == "the nearest sizes are 100x64, 104x64"


@pytest.mark.parametrize(("width", "height"), [(0, 64), (3, 2), (64, -8)])
def test_a_size_that_is_too_small_is_refused(sd15: Pipeline, width: int, height: int) -> None:
    with pytest.raises(ConfigError, match="multiples of 4"):
        latent_shape(sd15, request(width_px=width, height_px=height))


def test_an_empty_batch_is_refused(sd15: Pipeline) -> None:
    with pytest.raises(ConfigError, match="a batch of 0"):
        component_shapes(sd15, request(batch=0))


def test_a_graph_of_fixed_size_names_it(sd15: Pipeline) -> None:
    fixed = with_dims(sd15, "unet", "sample", (2, 4, 16, 16))
    assert component_shapes(fixed, request(width_px=64))["unet"]["sample"] == (2, 4, 16, 16)
    with pytest.raises(PipelineError) as caught:
        component_shapes(fixed, request())
    assert "unet: input 'sample' was exported for 2x4x16x16" in caught.value.message
    assert "64x64 px" in caught.value.message
    assert "needs 2x4x16x24" in caught.value.message
    assert caught.value.hint.startswith("ask for 64x64 px")


def test_a_graph_of_fixed_size_needs_no_even_halves(sd15: Pipeline) -> None:
    fixed = with_dims(sd15, "unet", "sample", ("batch", 4, 17, 19))
    shapes = component_shapes(fixed, request(width_px=76, height_px=68))
    assert shapes["unet"]["sample"] == (2, 4, 17, 19)


def test_a_graph_of_fixed_batch_names_it(sd15: Pipeline) -> None:
    fixed = with_dims(sd15, "unet", "sample", (2, 4, "height", "width"))
    with pytest.raises(PipelineError, match=r"batch 2 \(guidance doubles it\)"):
        component_shapes(fixed, request(batch=2))


def test_a_graph_of_77_tokens_refuses_a_long_prompt(sd15: Pipeline) -> None:
    fixed = with_dims(sd15, "unet", "encoder_hidden_states", ("batch", 77, 16))
    with pytest.raises(PipelineError, match="77 tokens, and the prompts need 154") as caught:
        component_shapes(fixed, request(), token_chunks=2)
    assert "shorten" in caught.value.hint


def test_an_inpainting_model_is_recognised(sd15: Pipeline) -> None:
    fixed = with_dims(sd15, "unet", "sample", ("batch", 9, "height", "width"))
    with pytest.raises(PipelineError, match="9 channels are not the 4 of the VAE"):
        component_shapes(fixed, request())


def test_an_input_we_cannot_feed_is_named_with_the_known_ones(sd15: Pipeline) -> None:
    strange = with_dims(sd15, "unet", "controlnet_cond", ("batch", 3))
    with pytest.raises(PipelineError, match="'controlnet_cond' is not one we can feed") as caught:
        component_shapes(strange, request())
    assert "sample, encoder_hidden_states" in caught.value.message


def test_a_missing_config_value_is_named(sd15: Pipeline) -> None:
    with pytest.raises(PipelineError, match=r"vae_decoder/config.json: block_out_channels is None"):
        component_shapes(with_config(sd15, "vae_decoder", block_out_channels=None), request())


def test_lcm_unet_takes_guidance_as_an_input_and_no_second_batch(sd15: Pipeline) -> None:
    lcm = with_dims(sd15, "unet", "timestep_cond", ("batch", 32))
    lcm = with_config(lcm, "unet", time_cond_proj_dim=32)
    shapes = component_shapes(lcm, request(guidance=8.0))
    assert shapes["unet"]["sample"] == (1, 4, 16, 24)
    assert shapes["unet"]["timestep_cond"] == (1, 32)


def test_chunks_are_those_of_the_longer_prompt(sdxl: Pipeline) -> None:
    long = "x " * 80
    assert count_token_chunks(sdxl, request()) == 1
    assert count_token_chunks(sdxl, request(prompt=long)) == 2
    assert count_token_chunks(sdxl, request(negative_prompt=long)) == 2
    assert count_token_chunks(sdxl, request(negative_prompt=long, guidance=1.0)) == 1
