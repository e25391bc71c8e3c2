"""scheduler_config.json -> the noise that a model was trained to remove.

The file mixes two things: how the model was trained (betas, what it predicts, which timesteps it
knows) and which sampler somebody liked. The first is read here and binds every sampler; the
second is the caller's choice (`GenerateRequest.scheduler`) and is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdkit_dispatch.errors import PipelineError

Array = NDArray[np.float64]

PREDICTIONS = ("epsilon", "v_prediction", "sample")
SPACINGS = ("linspace", "leading", "trailing")

ZERO_SNR_ALPHA = 2.0**-24
"""Stands for the last cumulative alpha of a zero-SNR schedule where sigma must be finite.

Source: diffusers, `EulerDiscreteScheduler` (the smallest subnormal of float16).
"""


@dataclass(frozen=True, kw_only=True)
class TrainedNoise:
    """How a model was trained.

    Attributes:
        alphas_cumprod: `[train_steps]`, falling from almost 1; 0 at the end for zero SNR.
        prediction: What the model's output is: one of `PREDICTIONS`.
        spacing: One of `SPACINGS`; None leaves it to the sampler.
        final_alpha: Cumulative alpha "after" the last step of DDIM.
        clip: Limit for predicted samples; None for none.
        lcm_original_steps: Timesteps that an LCM was distilled on.
        lcm_timestep_scaling: Of an LCM's boundary condition.
        lambda_min: Half log-SNR below which DPM++ starts no step.
        is_cosine: The betas are "squaredcos_cap_v2".
    """

    alphas_cumprod: Array
    prediction: str
    spacing: str | None
    steps_offset: int
    final_alpha: float
    clip: float | None
    lcm_original_steps: int
    lcm_timestep_scaling: float
    lambda_min: float
    is_cosine: bool

    @property
    def train_steps(self) -> int:
        """Timesteps of the training."""
        return len(self.alphas_cumprod)

    @property
    def sigmas(self) -> Array:
        """Noise over signal at every timestep, rising and finite."""
        alphas = self.alphas_cumprod.copy()
        if alphas[-1] == 0:
            alphas[-1] = ZERO_SNR_ALPHA
        return np.asarray(np.sqrt((1 - alphas) / alphas))


def trained_noise_from_config(config: Mapping[str, Any]) -> TrainedNoise:
    """Reads `scheduler_config.json`; what is absent gets diffusers' default.

    One default differs: without `clip_sample` nothing is clipped. diffusers' DDIM would clip at
    1, made for pixels, and its Stable Diffusion pipeline then switches it off.

    Raises:
        PipelineError: A value is unknown or of another kind of model; names the known ones.
    """
    _refuse_other_models(config)
    prediction = _choice(config, "prediction_type", PREDICTIONS, "epsilon")
    spacing = (
        _choice(config, "timestep_spacing", SPACINGS, "leading")
        if config.get("timestep_spacing") is not None
        else None
    )
    alphas: Array = np.asarray(np.cumprod(1 - _betas(config)), dtype=np.float64)
    if config.get("rescale_betas_zero_snr"):
        alphas = _with_zero_terminal_snr(alphas)
    clip = _number(config, "clip_sample_range", 1.0) if config.get("clip_sample") else None
    return TrainedNoise(
        alphas_cumprod=alphas,
        prediction=prediction,
        spacing=spacing,
        steps_offset=int(_number(config, "steps_offset", 0)),
        final_alpha=1.0 if config.get("set_alpha_to_one", True) else float(alphas[0]),
        clip=clip,
        lcm_original_steps=int(_number(config, "original_inference_steps", 50)),
        lcm_timestep_scaling=_number(config, "timestep_scaling", 10.0),
        lambda_min=_number(config, "lambda_min_clipped", -math.inf),
        is_cosine=config.get("beta_schedule") == "squaredcos_cap_v2",
    )


def _linear(start: float, end: float, count: int) -> Array:
    return np.linspace(start, end, count)


def _scaled_linear(start: float, end: float, count: int) -> Array:
    return np.asarray(np.linspace(start**0.5, end**0.5, count) ** 2)


def _squared_cosine(_start: float, _end: float, count: int) -> Array:
    # Source: "Improved Denoising Diffusion Probabilistic Models", arXiv 2102.09672, eq. 17.
    time = np.arange(count + 1) / count
    signal = np.cos((time + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.asarray(np.minimum(1 - signal[1:] / signal[:-1], 0.999))


_BETA_SCHEDULES = {
    "linear": _linear,
    "scaled_linear": _scaled_linear,
    "squaredcos_cap_v2": _squared_cosine,
}


def _betas(config: Mapping[str, Any]) -> Array:
    trained = config.get("trained_betas")
    if trained is not None:
        betas = np.asarray(trained, dtype=np.float64)
    else:
        # The default differs between diffusers' classes (LCM: scaled_linear); files name it.
        schedule = _choice(config, "beta_schedule", tuple(_BETA_SCHEDULES), "linear")
        betas = _BETA_SCHEDULES[schedule](
            _number(config, "beta_start", 0.0001),
            _number(config, "beta_end", 0.02),
            int(_number(config, "num_train_timesteps", 1000)),
        )
    if betas.ndim != 1 or len(betas) == 0 or not ((betas > 0) & (betas < 1)).all():
        raise PipelineError(
            "scheduler_config.json: trained_betas, or beta_start and beta_end, must give numbers "
            "between 0 and 1",
            "copy scheduler/ from the original pipeline",
        )
    return np.asarray(betas)


def _with_zero_terminal_snr(alphas_cumprod: Array) -> Array:
    # Source: "Common Diffusion Noise Schedules and Sample Steps are Flawed", arXiv 2305.08891,
    # algorithm 1.
    root = np.sqrt(alphas_cumprod)
    return np.asarray(((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2)


def _refuse_other_models(config: Mapping[str, Any]) -> None:
    """Schedulers of flow matching, EDM and the like are trained on another kind of noise."""
    name = str(config.get("_class_name", ""))
    wrong = {
        "_class_name": ("FlowMatch" in name or "EDM" in name, name),
        "use_flow_sigmas": (bool(config.get("use_flow_sigmas")), True),
        "thresholding": (bool(config.get("thresholding")), True),
        "timestep_type": (
            config.get("timestep_type", "discrete") != "discrete",
            config.get("timestep_type"),
        ),
    }
    for key, (is_wrong, value) in wrong.items():
        if is_wrong:
            raise PipelineError(
                f"scheduler_config.json: {key} {value!r} is not supported; models trained on "
                "discrete timesteps with betas are (DDPM, DDIM, PNDM, Euler, DPM-Solver, LCM)",
                "use a Stable Diffusion 1.x, 2.x or SDXL pipeline",
            )


def _choice(config: Mapping[str, Any], key: str, known: tuple[str, ...], default: str) -> str:
    value = config.get(key, default)
    if value not in known:
        raise PipelineError(
            f"scheduler_config.json: {key} {value!r} is unknown; known are {', '.join(known)}",
            f"set {key} to what the model was trained with",
        )
    return str(value)


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PipelineError(
            f"scheduler_config.json: {key} {value!r} is not a number",
            f"correct {key} in scheduler/scheduler_config.json",
        )
    return float(value)
