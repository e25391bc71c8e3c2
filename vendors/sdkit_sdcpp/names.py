"""Our words for schedulers and weights, and those of stable-diffusion.cpp."""

from __future__ import annotations

from collections.abc import Mapping

from sdkit_dispatch.contract import Precision

SCHEDULERS: Mapping[str, tuple[str, str]] = {
    # ours: sample method, scheduler
    "euler": ("EULER", "DISCRETE"),
    "euler_a": ("EULER_A", "DISCRETE"),
    "dpmpp_2m": ("DPMPP2M", "DISCRETE"),
    "dpmpp_2m_karras": ("DPMPP2M", "KARRAS"),
    "lcm": ("LCM", "LCM"),
    # It spaces time steps from the end ("trailing"), with eta 0.
    "ddim": ("DDIM_TRAILING", "SIMPLE"),
}

WEIGHTS: Mapping[Precision, str] = {
    "fp32": "F32",
    "fp16": "F16",
    "bf16": "BF16",
    "q8_0": "Q8_0",
    "q5_0": "Q5_0",
    "q4_0": "Q4_0",
}
"""Precision -> type of weights that a checkpoint is converted to while it is read."""

PRECISION_FROM_WEIGHTS = {"f32": "fp32", "f16": "fp16"}
"""As the library's log names them; others are named alike."""
