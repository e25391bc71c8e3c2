"""What the numbers of a request may be."""

from __future__ import annotations

import math

from sdkit_dispatch.contract import SCHEDULERS, GenerateRequest
from sdkit_dispatch.diffusion.noise import image_seeds
from sdkit_dispatch.errors import ConfigError

MAX_STEPS = 1000
MAX_BATCH = 64
MAX_SIDE_PX = 8192
MAX_GUIDANCE = 100.0


def check_request(request: GenerateRequest) -> None:
    """Refuses values that no pipeline could serve, before anything is built for them.

    Raises:
        ConfigError: Names the value and what it may be.
    """
    for name, value, low, high in (
        ("steps", request.steps, 1, MAX_STEPS),
        ("batch", request.batch, 1, MAX_BATCH),
        ("width", request.width_px, 8, MAX_SIDE_PX),
        ("height", request.height_px, 8, MAX_SIDE_PX),
    ):
        if type(value) is not int or not low <= value <= high:
            wanted = f"a whole number from {low} to {high}"
            raise ConfigError(f"{name} is {value!r}; it may be {wanted}", f"change --{name}")
    guidance = request.guidance
    is_number = type(guidance) in (int, float) and math.isfinite(guidance)
    if not (is_number and 0 <= guidance <= MAX_GUIDANCE):
        raise ConfigError(
            f"guidance is {guidance!r}; it may be 0 to {MAX_GUIDANCE:g}", "change --guidance"
        )
    if request.scheduler not in SCHEDULERS:
        raise ConfigError(
            f"the scheduler '{request.scheduler}' is unknown; there are {', '.join(SCHEDULERS)}",
            "change --scheduler",
        )
    if type(request.seed) is not int:
        raise ConfigError(f"seed is {request.seed!r}, not a whole number", "change --seed")
    image_seeds(request.seed, request.batch)
    for name, text in (("prompt", request.prompt), ("negative", request.negative_prompt)):
        if not isinstance(text, str):
            raise ConfigError(f"the {name} prompt is {text!r}, not a text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the {name} prompt holds bytes that are no text (at {error.start})",
                "write it in UTF-8",
            ) from error
