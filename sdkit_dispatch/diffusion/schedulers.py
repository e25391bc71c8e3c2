"""Samplers: from a trained noise schedule to the coefficients of every denoising step.

Every sampler here is linear in what a step sees, so a sampler is a function that fills a table of
coefficients, and one function (`advance`) runs them all:

    model input = input_scale * x
    x0          = x0_from_x * x + x0_from_output * output          (then clipped, if asked)
    next x      = x * keep + x0 * to_x0 + previous x0 * to_previous_x0
                  + output * to_output + noise * to_noise

The coefficients are made in double precision and applied in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdkit_dispatch.diffusion.trained_noise import (
    ZERO_SNR_ALPHA,
    TrainedNoise,
    trained_noise_from_config,
)
from sdkit_dispatch.errors import ConfigError

Latents = NDArray[np.float32]

KARRAS_RHO = 7.0
"""Source: "Elucidating the Design Space of Diffusion-Based Generative Models", 2206.00364."""

LCM_SIGMA_DATA = 0.5
"""Source: "Latent Consistency Models", arXiv 2310.04378, boundary condition."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One denoising step; the coefficients are those of the module's formula."""

    timestep: float
    x0_from_x: float
    x0_from_output: float
    keep: float = 0.0
    to_x0: float = 0.0
    to_previous_x0: float = 0.0
    to_output: float = 0.0
    to_noise: float = 0.0
    input_scale: float = 1.0
    clip: float | None = None


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All steps of one image.

    Attributes:
        start_scale: Standard deviation of the latents that denoising starts from.
    """

    start_scale: float
    steps: tuple[Step, ...]


def schedule_from_config(name: str, config: Mapping[str, Any], steps: int) -> Schedule:
    """Makes the steps of sampler `name` for a model with that `scheduler_config.json`.

    Raises:
        ConfigError: The sampler is unknown, or the number of steps does not fit the model.
        PipelineError: The configuration is not one we can serve.
    """
    if name not in SAMPLERS:
        raise ConfigError(
            f"scheduler {name!r} is unknown; known are {', '.join(SAMPLERS)}",
            "pass --scheduler dpmpp_2m",
        )
    noise = trained_noise_from_config(config)
    if not 1 <= steps <= noise.train_steps:
        raise ConfigError(
            f"{steps} steps are outside 1..{noise.train_steps}, the timesteps the model knows",
            "pass --steps 20",
        )
    return SAMPLERS[name](noise, steps)


def advance(
    step: Step,
    x: Latents,
    output: Latents,
    *,
    previous_x0: Latents | None = None,
    noise: Latents | None = None,
) -> tuple[Latents, Latents]:
    """Returns the latents after `step`, and the predicted denoised latents.

    An overflow gives infinities and no warning: the caller checks.

    Args:
        step: Of a schedule.
        x: Latents before the step (not scaled by `input_scale`).
        output: What the model said.
        previous_x0: The predicted latents of the step before; needed if `to_previous_x0`.
        noise: Unit noise; needed if `to_noise`.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        x0 = _sum((step.x0_from_x, x), (step.x0_from_output, output))
        if step.clip is not None:
            x0 = np.clip(x0, -step.clip, step.clip)
        after = _sum(
            (step.keep, x),
            (step.to_x0, x0),
            (step.to_previous_x0, previous_x0),
            (step.to_output, output),
            (step.to_noise, noise),
        )
    return after, x0


def _sum(*terms: tuple[float, Latents | None]) -> Latents:
    """Adds the terms whose factor is not 0, so that 0 * inf is never formed."""
    used = [np.float32(factor) * array for factor, array in terms if factor and array is not None]
    total: Latents = used[0]
    for term in used[1:]:
        total = total + term
    return total


def _euler(noise: TrainedNoise, steps: int) -> Schedule:
    """Source: 2206.00364, algorithm 2 without churn; k-diffusion `sample_euler`."""
    return _sigma_steps(noise, steps, ancestral=False)


def _euler_a(noise: TrainedNoise, steps: int) -> Schedule:
    """Source: k-diffusion `sample_euler_ancestral` with eta 1."""
    return _sigma_steps(noise, steps, ancestral=True)


def _sigma_steps(noise: TrainedNoise, steps: int, *, ancestral: bool) -> Schedule:
    spacing = noise.spacing or "linspace"
    timesteps = _timesteps(noise, steps, spacing, points=steps, last=noise.train_steps)
    sigmas = [*_sigmas_at(noise, timesteps), 0.0]
    made = []
    for timestep, sigma, target in zip(timesteps, sigmas[:-1], sigmas[1:], strict=True):
        up = math.sqrt(target**2 * (sigma**2 - target**2) / sigma**2) if ancestral else 0.0
        down = math.sqrt(target**2 - up**2)
        made.append(
            replace(
                _x0_in_sigma(noise.prediction, sigma),
                timestep=timestep,
                input_scale=1 / math.sqrt(sigma**2 + 1),
                keep=down / sigma,
                to_x0=1 - down / sigma,
                to_noise=up,
            )
        )
    top = sigmas[0]
    scale = top if spacing != "leading" else math.sqrt(top**2 + 1)
    return Schedule(start_scale=scale, steps=tuple(made))


def _ddim(noise: TrainedNoise, steps: int) -> Schedule:
    """Source: "Denoising Diffusion Implicit Models", arXiv 2010.02502, eq. 12 with eta 0."""
    spacing = noise.spacing or "leading"
    timesteps = _timesteps(noise, steps, spacing, points=steps, last=noise.train_steps, whole=True)
    made = []
    for timestep in timesteps:
        target = int(timestep) - noise.train_steps // steps
        alpha = float(noise.alphas_cumprod[int(timestep)])
        alpha_to = float(noise.alphas_cumprod[target]) if target >= 0 else noise.final_alpha
        step = _x0_in_alpha(noise, alpha)
        # The direction to x_t, written in x and the output before x0 is clipped.
        direction = math.sqrt(1 - alpha_to)
        from_x, from_output = _epsilon_in_alpha(noise.prediction, alpha)
        made.append(
            replace(
                step,
                timestep=timestep,
                keep=direction * from_x,
                to_output=direction * from_output,
                to_x0=math.sqrt(alpha_to),
            )
        )
    return Schedule(start_scale=1.0, steps=tuple(made))


def _dpmpp_2m(noise: TrainedNoise, steps: int) -> Schedule:
    lowest = np.searchsorted(-np.log(noise.sigmas[::-1]), noise.lambda_min)
    timesteps = _timesteps(
        noise,
        steps,
        noise.spacing or "linspace",
        points=steps + 1,
        last=noise.train_steps - int(lowest),
        whole=True,
    )
    return _multistep(noise, timesteps, _sigmas_at(noise, timesteps))


def _dpmpp_2m_karras(noise: TrainedNoise, steps: int) -> Schedule:
    """Source: 2206.00364, eq. 5, between the largest and the smallest trained sigma."""
    trained = noise.sigmas
    ramp = np.linspace(trained[-1] ** (1 / KARRAS_RHO), trained[0] ** (1 / KARRAS_RHO), steps)
    sigmas = ramp**KARRAS_RHO
    timesteps = np.interp(np.log(sigmas), np.log(trained), np.arange(noise.train_steps))
    # diffusers rounds, but for the cosine schedule it cuts off.
    whole = np.trunc(timesteps) if noise.is_cosine else np.rint(timesteps)
    return _multistep(noise, whole.tolist(), sigmas.tolist())


def _multistep(noise: TrainedNoise, timesteps: list[float], sigmas: list[float]) -> Schedule:
    """The second-order multistep DPM-Solver++; the first and the last step are first order.

    Source: "DPM-Solver++", arXiv 2211.01095, algorithm 2 (midpoint).
    """
    made = []
    targets = [*sigmas[1:], 0.0]
    for index, (sigma, target) in enumerate(zip(sigmas, targets, strict=True)):
        scale, scale_to = 1 / math.sqrt(sigma**2 + 1), 1 / math.sqrt(target**2 + 1)
        # exp(-h) = target / sigma, with h the step in half log-SNR.
        to_x0 = scale_to * (1 - target / sigma)
        to_previous = 0.0
        # Rounded timesteps may repeat: a step from or to the same sigma has no second order.
        if 0 < index < len(sigmas) - 1 and sigmas[index - 1] > sigma > target:
            ratio = math.log(sigmas[index - 1] / sigma) / math.log(sigma / target)
            to_previous = -0.5 * to_x0 / ratio
        made.append(
            replace(
                _x0_in_alpha(noise, scale**2),
                timestep=timesteps[index],
                keep=target * scale_to / (sigma * scale),
                to_x0=to_x0 - to_previous,
                to_previous_x0=to_previous,
                clip=None,
            )
        )
    return Schedule(start_scale=1.0, steps=tuple(made))


def _lcm(noise: TrainedNoise, steps: int) -> Schedule:
    """Source: "Latent Consistency Models", arXiv 2310.04378, algorithm 3."""
    if steps > noise.lcm_original_steps:
        raise ConfigError(
            f"{steps} steps are too many for lcm: the model was distilled on "
            f"{noise.lcm_original_steps} timesteps",
            "pass --steps 4",
        )
    spread = noise.train_steps // noise.lcm_original_steps
    trained = (np.arange(noise.lcm_original_steps, 0, -1)) * spread - 1
    chosen = np.floor(np.linspace(0, len(trained), steps, endpoint=False)).astype(int)
    timesteps = [int(value) for value in trained[chosen]]
    made = []
    for timestep, target in zip(timesteps, [*timesteps[1:], None], strict=True):
        scaled = timestep * noise.lcm_timestep_scaling
        norm = scaled**2 + LCM_SIGMA_DATA**2
        c_skip, c_out = LCM_SIGMA_DATA**2 / norm, scaled / math.sqrt(norm)
        alpha_to = 1.0 if target is None else float(noise.alphas_cumprod[target])
        made.append(
            replace(
                _x0_in_alpha(noise, float(noise.alphas_cumprod[timestep])),
                timestep=float(timestep),
                keep=math.sqrt(alpha_to) * c_skip,
                to_x0=math.sqrt(alpha_to) * c_out,
                to_noise=math.sqrt(1 - alpha_to),
            )
        )
    return Schedule(start_scale=1.0, steps=tuple(made))


SAMPLERS: Mapping[str, Callable[[TrainedNoise, int], Schedule]] = {
    "euler": _euler,
    "euler_a": _euler_a,
    "ddim": _ddim,
    "dpmpp_2m": _dpmpp_2m,
    "dpmpp_2m_karras": _dpmpp_2m_karras,
    "lcm": _lcm,
}
"""Name in a `GenerateRequest` -> what makes its steps."""


def _timesteps(
    noise: TrainedNoise,
    steps: int,
    spacing: str,
    *,
    points: int,
    last: int,
    whole: bool = False,
) -> list[float]:
    """Falling timesteps. Source: arXiv 2305.08891, table 2, with diffusers' roundings.

    Args:
        noise: Of the model.
        steps: How many are returned.
        spacing: "linspace", "leading" or "trailing".
        points: Size of the grid of "linspace" and "leading"; its lowest is left out if larger.
        last: One more than the highest timestep used.
        whole: Round the grid of "linspace".
    """
    if spacing == "linspace":
        grid: NDArray[np.float64] = np.linspace(0, last - 1, points)[::-1]
        # float32 as diffusers has it; the sigmas are looked up at the rounded place.
        grid = np.rint(grid) if whole else grid.astype(np.float32).astype(np.float64)
    elif spacing == "leading":
        grid = (
            np.arange(points, dtype=np.float64)[::-1] * max(1, last // points) + noise.steps_offset
        )
    else:
        grid = np.rint(np.arange(last, 0, -noise.train_steps / steps)) - 1
    # An offset may push the first one past the end: 1000 steps of 1000, say.
    return [float(value) for value in np.minimum(grid[:steps], noise.train_steps - 1)]


def _sigmas_at(noise: TrainedNoise, timesteps: list[float]) -> list[float]:
    found = np.interp(timesteps, np.arange(noise.train_steps), noise.sigmas)
    return [float(value) for value in found]


def _x0_in_sigma(prediction: str, sigma: float) -> Step:
    """x0 where x = x0 + sigma * noise, and the model saw x / sqrt(sigma^2 + 1)."""
    squared = sigma**2 + 1
    from_x, from_output = {
        "epsilon": (1.0, -sigma),
        "v_prediction": (1 / squared, -sigma / math.sqrt(squared)),
        "sample": (0.0, 1.0),
    }[prediction]
    return Step(timestep=0.0, x0_from_x=from_x, x0_from_output=from_output)


def _x0_in_alpha(noise: TrainedNoise, alpha: float) -> Step:
    """x0 where x = sqrt(alpha) * x0 + sqrt(1 - alpha) * noise."""
    signal, spread = math.sqrt(alpha), math.sqrt(1 - alpha)
    safe = signal or math.sqrt(ZERO_SNR_ALPHA)
    from_x, from_output = {
        "epsilon": (1 / safe, -spread / safe),
        "v_prediction": (signal, -spread),
        "sample": (0.0, 1.0),
    }[noise.prediction]
    return Step(timestep=0.0, x0_from_x=from_x, x0_from_output=from_output, clip=noise.clip)


def _epsilon_in_alpha(prediction: str, alpha: float) -> tuple[float, float]:
    """The predicted noise as factors of (x, output), in the terms of `_x0_in_alpha`."""
    signal, spread = math.sqrt(alpha), math.sqrt(1 - alpha)
    return {
        "epsilon": (0.0, 1.0),
        "v_prediction": (spread, signal),
        "sample": (1 / spread, -signal / spread),
    }[prediction]
