"""The denoising loop: noise -> latents."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from sdkit_dispatch.contract import Progress, Report, Session
from sdkit_dispatch.diffusion.feeds import Floats, Value, first_output, run_component
from sdkit_dispatch.diffusion.schedulers import Schedule, advance
from sdkit_dispatch.errors import NumericError


def denoise(
    schedule: Schedule,
    session: Session,
    noise_at_start: Floats,
    values: Mapping[str, Value],
    *,
    guidance: float | None,
    noise: Callable[[int], Floats],
    report: Report,
) -> Floats:
    """Runs all steps of a schedule and returns the denoised latents.

    Args:
        schedule: Of the sampler.
        session: The UNet.
        noise_at_start: Unit noise `[N, channels, H, W]`.
        values: The UNet's inputs that stay the same; with guidance the negative rows come first.
        guidance: CFG scale; None where the UNet sees the prompt only.
        noise: Step -> unit noise like `noise_at_start`; called for the steps that add some.
        report: Called before the first step and after every one.

    Raises:
        NumericError: The UNet or a step gave values that are not finite; names the step.
    """
    report(Progress(phase="denoise", fraction=0.0))
    count = len(schedule.steps)
    latents: Floats = noise_at_start * np.float32(schedule.start_scale)
    previous_x0 = None
    for index, step in enumerate(schedule.steps):
        scaled = latents * np.float32(step.input_scale)
        outputs = run_component(
            "unet",
            session,
            {
                **values,
                "sample": scaled if guidance is None else np.concatenate([scaled, scaled]),
                "timestep": np.asarray(step.timestep, dtype=np.float32),
            },
            where=f" at step {index + 1} of {count} (timestep {step.timestep:g})",
        )
        output = first_output("unet", outputs, ("out_sample",), rank=4)
        if guidance is not None:
            half = len(output) // 2
            negative, positive = output[:half], output[half:]
            with np.errstate(over="ignore", invalid="ignore"):  # checked below
                output = negative + np.float32(guidance) * (positive - negative)
        latents, previous_x0 = advance(
            step,
            latents,
            output,
            previous_x0=previous_x0,
            noise=noise(index) if step.to_noise else None,
        )
        if not np.isfinite(latents).all():
            raise NumericError(
                f"unet: the latents are not finite after step {index + 1} of {count} "
                f"(timestep {step.timestep:g})",
                "lower the guidance, or build unet at a safer precision (fp32)",
            )
        report(Progress(phase="denoise", fraction=(index + 1) / count))
    return latents
