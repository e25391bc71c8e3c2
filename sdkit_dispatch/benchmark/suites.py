"""Named suites: everything that bears on speed is fixed, so that two people's numbers compare."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from sdkit_dispatch.errors import ConfigError

PROMPT = "a photograph of a red fox in the snow, sharp focus"
SEED = 20260101


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What a suite draws.

    Attributes:
        family: Of the pipeline; another one is refused.
        pipeline: "sample", or empty: one of seeded weights, unless the user names a folder.
    """

    name: str
    family: str
    width_px: int
    height_px: int
    steps: int
    guidance: float
    batch: int = 1
    scheduler: str = "ddim"
    seed: int = SEED
    prompt: str = PROMPT
    pipeline: str = ""


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            name="sample",
            family="sd",
            width_px=32,
            height_px=32,
            steps=8,
            guidance=3.0,
            prompt="a red seven",
            pipeline="sample",
        ),
        Suite(name="sd15", family="sd", width_px=512, height_px=512, steps=20, guidance=7.0),
        Suite(name="sdxl", family="sdxl", width_px=1024, height_px=1024, steps=20, guidance=6.0),
    )
}
"""DDIM everywhere: every peer has it, it draws the same picture from the same noise, and a sampler
costs nothing beside the UNet."""


def suite_named(name: str) -> Suite:
    """Returns a suite.

    Raises:
        ConfigError: There is none of that name; names those that there are.
    """
    if name not in SUITES:
        near = difflib.get_close_matches(name, SUITES, n=1)
        raise ConfigError(
            f"there is no suite '{name}'; there are {', '.join(SUITES)}",
            f"did you mean {near[0]}?" if near else "sdkit-dispatch bench --suite sample",
        )
    return SUITES[name]
