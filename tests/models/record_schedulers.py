"""Records what diffusers' schedulers do with a synthetic model output, step by step.

Writes tests/core/data/diffusion/schedulers.npz and schedulers.json. See README.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import torch

OUT = Path(__file__).parents[1] / "core" / "data" / "diffusion"
SHAPE = (1, 4, 3, 2)

SD15 = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "steps_offset": 1,
    "set_alpha_to_one": False,
    "clip_sample": False,
    "prediction_type": "epsilon",
}
SD21 = {**SD15, "prediction_type": "v_prediction"}
LINEAR = {**SD15, "beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02}
COSINE = {**SD15, "beta_schedule": "squaredcos_cap_v2"}
ZERO_SNR = {**SD21, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
SHORT = {
    **SD15,
    "trained_betas": [round(0.001 + 0.0002 * i, 6) for i in range(100)],
    "num_train_timesteps": 100,
    "steps_offset": 0,
}

SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {  # Any: keyword arguments of diffusers
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "ddim": ("DDIMScheduler", {}),
    "dpmpp_2m": ("DPMSolverMultistepScheduler", {}),
    "dpmpp_2m_karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "lcm": ("LCMScheduler", {}),
}


def cases() -> list[tuple[str, int, dict[str, Any]]]:
    """(sampler, steps, scheduler_config.json) of every recording."""
    found: list[tuple[str, int, dict[str, Any]]] = []
    for sampler in SAMPLERS:
        for steps in (4, 20):
            found.append((sampler, steps, SD15))
            found.append((sampler, steps, ZERO_SNR))
        if sampler not in ("dpmpp_2m_karras", "lcm"):  # these have their own timesteps
            for spacing in ("leading", "trailing", "linspace"):
                for steps in (4, 7, 20):
                    found.append((sampler, steps, {**SD15, "timestep_spacing": spacing}))
        found.append((sampler, 7, SD21))
        found.append((sampler, 7, LINEAR))
        found.append((sampler, 7, COSINE))
        if sampler != "lcm":
            found.append((sampler, 7, SHORT))
        if sampler != "euler_a":  # diffusers has not implemented it
            found.append((sampler, 7, {**SD15, "prediction_type": "sample"}))
    for sampler in ("ddim", "lcm"):
        found.append((sampler, 7, {**SD15, "clip_sample": True, "clip_sample_range": 0.8}))
        found.append((sampler, 7, {**SD15, "set_alpha_to_one": True}))
    found.append(("lcm", 8, {**SD15, "original_inference_steps": 25, "timestep_scaling": 3.0}))
    found.append(("dpmpp_2m", 7, {**COSINE, "lambda_min_clipped": -5.1}))
    return found


def main() -> None:
    random = np.random.default_rng(7)
    outputs = random.standard_normal((20, *SHAPE)).astype(np.float32)
    noises = random.standard_normal((20, *SHAPE)).astype(np.float32)
    arrays = {"outputs": outputs, "noises": noises}
    described = []
    for number, (sampler, steps, config) in enumerate(cases()):
        class_name, extra = SAMPLERS[sampler]
        kind = getattr(diffusers, class_name)
        scheduler = kind.from_config(config, **extra)  # drops what the class does not know
        scheduler.set_timesteps(steps)
        if hasattr(scheduler, "set_begin_index"):
            # Else a schedule that starts with the same timestep twice loses its first step.
            scheduler.set_begin_index(0)
        x = torch.from_numpy(noises[0]) * scheduler.init_noise_sigma
        inputs, states = [], [x.numpy()]
        for index, timestep in enumerate(scheduler.timesteps):
            inputs.append(scheduler.scale_model_input(x, timestep).numpy())
            with mock.patch(
                f"{kind.__module__}.randn_tensor",
                lambda *_, index=index, **__: torch.from_numpy(noises[index]),
            ):
                x = scheduler.step(torch.from_numpy(outputs[index]), timestep, x).prev_sample
            states.append(x.numpy())
        arrays[f"{number}.timesteps"] = scheduler.timesteps.numpy().astype(np.float32)
        arrays[f"{number}.inputs"] = np.stack(inputs).astype(np.float32)
        arrays[f"{number}.states"] = np.stack(states).astype(np.float32)
        described.append({"sampler": sampler, "steps": steps, "config": config})
    OUT.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(OUT / "schedulers.npz", **arrays)
    document = {"made_with": f"diffusers {diffusers.__version__}", "cases": described}
    (OUT / "schedulers.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
