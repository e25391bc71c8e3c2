from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sdkit_dispatch.contract import GenerateRequest
from sdkit_dispatch.diffusion.image import FACTS_KEY, parameters_text, png_from_image
from sdkit_dispatch.diffusion.schedulers import SAMPLERS


def request(**changes: Any) -> GenerateRequest:  # Any: fields of a request
    fields: dict[str, Any] = {
        "prompt": "a red three",
        "negative_prompt": "blurry, dark",
        "width_px": 32,
        "height_px": 48,
        "steps": 8,
        "guidance": 3.0,
        "seed": 1,
        **changes,
    }
    return GenerateRequest(**fields)


def test_parameters_have_the_form_of_stable_diffusion_webui() -> None:
    text = parameters_text(request(), seed=2, extra={"Model": "digits-sd"})
    assert text == (
        "a red three\n"
        "Negative prompt: blurry, dark\n"
        "Steps: 8, Sampler: DPM++ 2M, Schedule type: Automatic, CFG scale: 3, Seed: 2, "
        "Size: 32x48, Model: digits-sd"
    )


def test_parameters_have_no_line_for_an_empty_negative_prompt() -> None:
    text = parameters_text(request(negative_prompt="", guidance=7.5), seed=1)
    assert text.splitlines()[1].startswith("Steps: 8")
    assert "CFG scale: 7.5" in text


@pytest.mark.parametrize(
    ("scheduler", "label"),
    [
        ("euler", "Sampler: Euler, Schedule type: Automatic"),
        ("euler_a", "Sampler: Euler a, Schedule type: Automatic"),
        ("ddim", "Sampler: DDIM, Schedule type: Automatic"),
        ("dpmpp_2m_karras", "Sampler: DPM++ 2M, Schedule type: Karras"),
        ("lcm", "Sampler: LCM, Schedule type: Automatic"),
    ],
)
def test_samplers_are_named_as_their_users_know_them(scheduler: str, label: str) -> None:
    assert label in parameters_text(request(scheduler=scheduler), seed=1)


def test_every_sampler_has_a_label() -> None:
    for scheduler in SAMPLERS:
        assert f"Sampler: {scheduler}" not in parameters_text(request(scheduler=scheduler), seed=1)


def test_a_value_that_the_format_would_split_is_quoted() -> None:
    text = parameters_text(request(), seed=1, extra={"Note": "a, b: c"})
    assert text.endswith('Note: "a, b: c"')


@pytest.mark.parametrize("prompt", ["a red three", "\u732b, \U0001f431", "two\nlines"])
def test_png_holds_the_pixels_and_both_texts(prompt: str) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (48, 32, 3), dtype=np.uint8)
    made = request(prompt=prompt)
    data = png_from_image(pixels, made, seed=7, facts={"device": "cpu"})
    assert data.startswith(b"\x89PNG")
    image = Image.open(io.BytesIO(data))
    image.load()
    np.testing.assert_array_equal(np.asarray(image), pixels)
    assert image.info["parameters"] == parameters_text(made, seed=7)
    facts = json.loads(image.info[FACTS_KEY])
    assert facts["seed"] == 7
    assert facts["device"] == "cpu"
    assert facts["request"]["prompt"] == prompt
    assert facts["request"]["height_px"] == 48
