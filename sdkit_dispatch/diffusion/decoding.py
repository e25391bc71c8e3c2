"""Latents -> pictures, through the VAE decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdkit_dispatch.contract import Progress, Report, Session
from sdkit_dispatch.diffusion.feeds import Floats, first_output, run_component
from sdkit_dispatch.errors import NumericError

FLAT_RANGE = 1e-3
"""A decode whose values (about -1..1) span less is one grey: an eighth of an 8-bit level."""


def decode(
    session: Session, latents: Floats, config: Mapping[str, Any], report: Report
) -> NDArray[np.uint8]:
    """Returns `[N, H, W, 3]`, decoded one image at a time.

    Args:
        session: The VAE decoder, at batch 1.
        latents: Denoised, `[N, channels, H / factor, W / factor]`.
        config: `vae_decoder/config.json` (`Any`: whatever diffusers wrote).
        report: Called before the first image and after every one.

    Raises:
        NumericError: An image is not finite, or one flat colour.
    """
    report(Progress(phase="decode", fraction=0.0))
    ready = unscaled_latents(latents, config)
    images = []
    for index, row in enumerate(ready):
        where = f" for image {index + 1} of {len(ready)}"
        outputs = run_component(
            "vae_decoder", session, {"latent_sample": row[np.newaxis]}, where=where
        )
        pixels = first_output("vae_decoder", outputs, ("sample",), rank=4)[0]
        if float(np.ptp(pixels)) < FLAT_RANGE:
            raise NumericError(
                f"vae_decoder: the image is one flat colour ({float(pixels.flat[0]):.4g}){where}",
                "build vae_decoder at a safer precision (fp32)",
            )
        images.append(_bytes_from_pixels(pixels))
        report(Progress(phase="decode", fraction=(index + 1) / len(ready)))
    return np.stack(images)


def unscaled_latents(latents: Floats, config: Mapping[str, Any]) -> Floats:
    """Undoes the scaling that keeps latents near unit variance for the UNet."""
    ready: Floats = latents / np.float32(config.get("scaling_factor") or 1.0)
    if config.get("latents_mean") is not None and config.get("latents_std") is not None:
        mean, std = (
            np.asarray(config[key], dtype=np.float32).reshape(1, -1, 1, 1)
            for key in ("latents_mean", "latents_std")
        )
        ready = ready * std + mean
    return ready + np.float32(config.get("shift_factor") or 0.0)


def _bytes_from_pixels(pixels: Floats) -> NDArray[np.uint8]:
    """`[3, H, W]` in about -1..1 -> `[H, W, 3]` in 0..255."""
    unit = np.clip(pixels * np.float32(0.5) + np.float32(0.5), 0, 1)
    return np.asarray(np.rint(unit * np.float32(255)), dtype=np.uint8).transpose(1, 2, 0)
