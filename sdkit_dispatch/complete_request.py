"""What the caller asked of a picture -> a request without gaps."""

from __future__ import annotations

from typing import Any

from .checkpoint import Checkpoint
from .config import Profile
from .contract import GenerateRequest
from .diffusion.request_values import check_request
from .diffusion.shapes import vae_factor
from .errors import PipelineError
from .pipeline_files import Pipeline

DEFAULT_STEPS = 20
DEFAULT_GUIDANCE = 7.0
DEFAULT_SCHEDULER = "dpmpp_2m"


def complete_request(
    pipeline: Pipeline | Checkpoint,
    profile: Profile,
    *,
    prompt: str,
    negative_prompt: str = "",
    width_px: int | None = None,
    height_px: int | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    seed: int = 0,
    batch: int | None = None,
    scheduler: str | None = None,
) -> GenerateRequest:
    """Returns a request; what is not given comes from the profile, then from the pipeline.

    Raises:
        ConfigError: A value is out of range.
    """
    side_px = _own_side_px(pipeline)
    request = GenerateRequest(
        prompt=prompt,
        negative_prompt=negative_prompt,
        width_px=_first(width_px, profile.width_px, side_px),
        height_px=_first(height_px, profile.height_px, side_px),
        steps=_first(steps, profile.steps, DEFAULT_STEPS),
        guidance=_first(guidance, profile.guidance, DEFAULT_GUIDANCE),
        seed=seed,
        batch=_first(batch, profile.batch, 1),
        scheduler=_first(scheduler, profile.scheduler, DEFAULT_SCHEDULER),
    )
    check_request(request)
    return request


def _own_side_px(pipeline: Pipeline | Checkpoint) -> int:
    if isinstance(pipeline, Checkpoint):
        return pipeline.side_px
    side = pipeline.configs["unet"].get("sample_size")
    if isinstance(side, list) and side:
        side = side[0]
    if not isinstance(side, int) or side <= 0:
        raise PipelineError(
            f"'{pipeline.folder}/unet/config.json' has the sample_size {side!r}, not a number",
            "give --width and --height",
        )
    return side * vae_factor(pipeline)


def _first(*values: Any) -> Any:  # Any: all of one type, the first that was given
    return next(value for value in values if value is not None)
