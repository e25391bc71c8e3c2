"""What the values of a pipeline's JSON files may be: the ones that are read, and no others.

Checked once, when the folder is read, so that a wrong value is an error with its file and key, and
not a strange number in the middle of a picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import PipelineError

Check = Callable[[object], bool]


def _whole(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def _number(low: float, high: float) -> Check:
    # Of a whole number with thousands of digits only the comparison is safe.
    return lambda value: (
        type(value) in (int, float)
        and not (isinstance(value, float) and not math.isfinite(value))
        and low <= value <= high  # type: ignore[operator]  # it is a number
    )


def _numbers(low: float, high: float, *, longest: int) -> Check:
    one = _number(low, high)
    return lambda value: (
        isinstance(value, list) and 0 < len(value) <= longest and all(map(one, value))
    )


def _side(value: object) -> bool:
    one = _whole(1, 4096)
    return one(value) or (isinstance(value, list) and 0 < len(value) <= 2 and all(map(one, value)))


VALUES: Mapping[str, Mapping[str, tuple[Check, str]]] = {
    "scheduler": {
        "num_train_timesteps": (_whole(1, 100_000), "a whole number from 1 to 100000"),
        "beta_start": (_number(0, 1), "a number from 0 to 1"),
        "beta_end": (_number(0, 1), "a number from 0 to 1"),
        "trained_betas": (_numbers(0, 1, longest=100_000), "numbers from 0 to 1"),
        "steps_offset": (_whole(0, 1000), "a whole number from 0 to 1000"),
        "clip_sample_range": (_number(1e-6, 1e6), "a positive number"),
        "original_inference_steps": (_whole(1, 1000), "a whole number from 1 to 1000"),
        "timestep_scaling": (_number(1e-6, 1e6), "a positive number"),
    },
    "unet": {
        "sample_size": (_side, "a whole number of latent cells"),
        "block_out_channels": (_numbers(1, 1 << 20, longest=12), "1 to 12 whole numbers"),
        "cross_attention_dim": (_whole(1, 1 << 20), "a whole number"),
        "time_cond_proj_dim": (_whole(1, 1 << 20), "a whole number"),
    },
    "vae_decoder": {
        "scaling_factor": (_number(1e-6, 1e6), "a positive number"),
        "shift_factor": (_number(-1e6, 1e6), "a number"),
        "latents_mean": (_numbers(-1e6, 1e6, longest=4096), "numbers"),
        "latents_std": (_numbers(1e-6, 1e6, longest=4096), "positive numbers"),
        "block_out_channels": (_numbers(1, 1 << 20, longest=12), "1 to 12 whole numbers"),
        "latent_channels": (_whole(1, 4096), "a whole number"),
    },
    "text_encoder": {
        "max_position_embeddings": (_whole(3, 8192), "a whole number from 3 to 8192"),
    },
    "text_encoder_2": {
        "max_position_embeddings": (_whole(3, 8192), "a whole number from 3 to 8192"),
        "projection_dim": (_whole(1, 1 << 20), "a whole number"),
    },
}
"""Config -> key -> check, and what the value may be; null and a missing key are always fine."""


def check_configs(folder: Path, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses a value that could not be used.

    Raises:
        PipelineError: Names the file, the key, the value and what it may be.
    """
    for name, values in configs.items():
        for key, (is_fine, wanted) in VALUES.get(name, {}).items():
            value = values.get(key)
            if value is not None and not is_fine(value):
                raise PipelineError(
                    f"the JSON file in '{folder / name}' has {key}: {_shown(value)}; "
                    f"it may be {wanted}",
                    f"copy the JSON file of '{name}' from the original pipeline",
                )


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of hundreds of digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
