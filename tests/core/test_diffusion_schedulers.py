from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdkit_dispatch.diffusion.schedulers import SAMPLERS, advance, schedule_from_config
from sdkit_dispatch.errors import ConfigError, PipelineError

DATA = Path(__file__).parent / "data" / "diffusion"
CASES = json.loads((DATA / "schedulers.json").read_text(encoding="utf-8"))["cases"]
SD15 = CASES[0]["config"]

TOLERANCE = 2e-5
"""Of the largest value. Ours makes the constants in double precision, diffusers in float32; the
largest difference measured is 1.8e-5 (Karras over linear betas), the median 5e-7."""
STEEP_TOLERANCE = 1e-4
"""Where sigma rises to 4096 (zero SNR) or 20291 (cosine) and float32 has lost digits of
1 - alpha: 7.3e-5 measured."""


def _is_steep(config: dict[str, Any]) -> bool:
    return bool(config.get("rescale_betas_zero_snr")) or config["beta_schedule"].startswith("sq")


def _name(number: int) -> str:
    case = CASES[number]
    return f"{number}-{case['sampler']}-{case['steps']}"


@pytest.mark.parametrize("number", range(len(CASES)), ids=_name)
def test_every_step_is_that_of_diffusers(number: int) -> None:
    case = CASES[number]
    recorded = np.load(DATA / "schedulers.npz")
    schedule = schedule_from_config(case["sampler"], case["config"], case["steps"])
    states, inputs = recorded[f"{number}.states"], recorded[f"{number}.inputs"]
    tolerance = STEEP_TOLERANCE if _is_steep(case["config"]) else TOLERANCE

    x = recorded["noises"][0] * np.float32(schedule.start_scale)
    _assert_close(x, states[0], tolerance)
    previous = None
    for index, step in enumerate(schedule.steps):
        _assert_close(x * np.float32(step.input_scale), inputs[index], tolerance)
        x, previous = advance(
            step,
            x,
            recorded["outputs"][index],
            previous_x0=previous,
            noise=recorded["noises"][index],
        )
        assert x.dtype == np.float32
        _assert_close(x, states[index + 1], tolerance)


@pytest.mark.parametrize("number", range(len(CASES)), ids=_name)
def test_timesteps_are_those_of_diffusers(number: int) -> None:
    case = CASES[number]
    recorded = np.load(DATA / "schedulers.npz")[f"{number}.timesteps"]
    schedule = schedule_from_config(case["sampler"], case["config"], case["steps"])
    ours = [step.timestep for step in schedule.steps]
    # diffusers cuts the cosine schedule's Karras timesteps off after a rounding error: its first
    # is 998 where the largest sigma belongs to 999.
    slack = 1 if "karras" in case["sampler"] and _is_steep(case["config"]) else 0
    np.testing.assert_allclose(ours, recorded, rtol=0, atol=slack)


def _assert_close(ours: np.ndarray, recorded: np.ndarray, tolerance: float) -> None:
    limit = tolerance * float(np.abs(recorded).max())
    np.testing.assert_allclose(ours, recorded, rtol=0, atol=limit)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_perfect_model_is_denoised_to_its_image(name: str) -> None:
    """If the model always knows the noise, every sampler must arrive at the clean latents."""
    random = np.random.default_rng(3)
    clean = random.standard_normal((1, 4, 5, 3)).astype(np.float32)
    schedule = schedule_from_config(name, {**SD15, "set_alpha_to_one": True}, 10)
    x = random.standard_normal(clean.shape).astype(np.float32) * np.float32(schedule.start_scale)
    previous = None
    for step in schedule.steps:
        perfect = (clean - np.float32(step.x0_from_x) * x) / np.float32(step.x0_from_output)
        noise = random.standard_normal(clean.shape).astype(np.float32)
        x, previous = advance(step, x, perfect, previous_x0=previous, noise=noise)
    # LCM's boundary condition keeps a trace (c_skip) of its last, least noisy input.
    np.testing.assert_allclose(x, clean, atol=2e-4)


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "lcm"])
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
def test_any_number_of_steps_gives_that_many_falling_timesteps(name: str, spacing: str) -> None:
    config = {**SD15, "timestep_spacing": spacing}
    for steps in (1, 2, 3, 6, 7, 11, 13, 49, 50, 99, 100, 333, 999, 1000):
        schedule = schedule_from_config(name, config, steps)
        timesteps = [step.timestep for step in schedule.steps]
        assert len(timesteps) == steps
        assert timesteps == sorted(timesteps, reverse=True)
        assert 0 <= timesteps[-1] <= timesteps[0] <= 999


def test_steps_are_deterministic_unless_the_sampler_is_ancestral() -> None:
    for name in SAMPLERS:
        uses_noise = any(s.to_noise for s in schedule_from_config(name, SD15, 8).steps)
        assert uses_noise == (name in ("euler_a", "lcm"))


def test_unknown_scheduler_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'heun' is unknown; known are euler, euler_a, ddim"):
        schedule_from_config("heun", SD15, 8)


@pytest.mark.parametrize("steps", [0, -1, 1001])
def test_steps_outside_the_training_are_refused(steps: int) -> None:
    with pytest.raises(ConfigError, match=r"outside 1\.\.1000"):
        schedule_from_config("euler", SD15, steps)


def test_lcm_refuses_more_steps_than_it_was_distilled_on() -> None:
    with pytest.raises(ConfigError, match="distilled on 50 timesteps"):
        schedule_from_config("lcm", SD15, 51)


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [
        ("beta_schedule", "sigmoid", "linear, scaled_linear, squaredcos_cap_v2"),
        ("prediction_type", "flow_prediction", "epsilon, v_prediction, sample"),
        ("timestep_spacing", "random", "linspace, leading, trailing"),
        ("_class_name", "FlowMatchEulerDiscreteScheduler", "DDPM, DDIM"),
        ("use_flow_sigmas", True, "DDPM, DDIM"),
        ("thresholding", True, "DDPM, DDIM"),
        ("timestep_type", "continuous", "DDPM, DDIM"),
        ("beta_start", "0.1", "not a number"),
        ("trained_betas", [0.1, 1.5], "between 0 and 1"),
    ],
)
def test_a_value_we_cannot_serve_is_named(key: str, value: object, known: str) -> None:
    with pytest.raises(PipelineError) as caught:
        schedule_from_config("euler", {**SD15, key: value}, 8)
    assert known in caught.value.message
    assert key in caught.value.message
    assert caught.value.hint


def test_latents_are_not_clipped_unless_the_file_says_so() -> None:
    config = {key: value for key, value in SD15.items() if key != "clip_sample"}
    for name in SAMPLERS:
        assert all(step.clip is None for step in schedule_from_config(name, config, 4).steps)
    clipped = schedule_from_config("ddim", {**config, "clip_sample": True}, 4)
    assert {step.clip for step in clipped.steps} == {1.0}


def test_the_sampler_of_the_file_does_not_bind_the_caller() -> None:
    config = {**SD15, "_class_name": "PNDMScheduler", "use_karras_sigmas": True}
    assert schedule_from_config("euler", config, 8) == schedule_from_config("euler", SD15, 8)
