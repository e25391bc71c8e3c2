"""Images -> PNG files that say how they were made."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdkit_dispatch.contract import GenerateRequest, record_to_json

FACTS_KEY = "sdkit_dispatch"
"""Name of the PNG text chunk that holds our facts as JSON."""

_LABELS = {
    "euler": ("Euler", "Automatic"),
    "euler_a": ("Euler a", "Automatic"),
    "ddim": ("DDIM", "Automatic"),
    "dpmpp_2m": ("DPM++ 2M", "Automatic"),
    "dpmpp_2m_karras": ("DPM++ 2M", "Karras"),
    "lcm": ("LCM", "Automatic"),
}
"""Scheduler -> "Sampler" and "Schedule type", as Stable Diffusion WebUI writes them."""


def parameters_text(
    request: GenerateRequest, *, seed: int, extra: Mapping[str, str | int | float] | None = None
) -> str:
    """Returns the text that Stable Diffusion WebUI writes and that its users' tools read.

    Args:
        request: What made the image.
        seed: Of this image.
        extra: Further fields ("Model": "digits-sd"), in order.
    """
    sampler, schedule_type = _LABELS.get(request.scheduler, (request.scheduler, "Automatic"))
    fields: dict[str, str | int | float] = {
        "Steps": request.steps,
        "Sampler": sampler,
        "Schedule type": schedule_type,
        "CFG scale": request.guidance,
        "Seed": seed,
        "Size": f"{request.width_px}x{request.height_px}",
        **(extra or {}),
    }
    lines = [request.prompt]
    if request.negative_prompt:
        lines.append(f"Negative prompt: {request.negative_prompt}")
    lines.append(", ".join(f"{key}: {_quoted(value)}" for key, value in fields.items()))
    return "\n".join(lines)


def png_from_image(
    image: NDArray[np.uint8],
    request: GenerateRequest,
    *,
    seed: int,
    facts: Mapping[str, Any] | None = None,
    extra: Mapping[str, str | int | float] | None = None,
) -> bytes:
    """Returns the bytes of a PNG file with two text chunks.

    "parameters" is `parameters_text`; `FACTS_KEY` is JSON: the request, the seed and `facts`.

    Args:
        image: `[H, W, 3]`.
        request: What made it.
        seed: Of this image.
        facts: Anything that JSON can hold (`Any`): vendor, device, engine keys, seconds.
        extra: For `parameters_text`.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    text = PngInfo()
    text.add_text("parameters", parameters_text(request, seed=seed, extra=extra))
    document = {"request": record_to_json(request), "seed": seed, **(facts or {})}
    text.add_text(FACTS_KEY, json.dumps(document, sort_keys=True))
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(buffer, format="PNG", pnginfo=text)
    return buffer.getvalue()


def _quoted(value: str | int | float) -> str:
    """WebUI quotes as JSON what its parser would split."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if any(sign in text for sign in ",:\n"):
        return json.dumps(text, ensure_ascii=False)
    return text
