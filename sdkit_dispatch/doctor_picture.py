"""Draws a picture with one vendor on one device, and compares it with the reference's."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .contract import Device, Rejection
from .reference import VENDOR as REFERENCE_VENDOR

if TYPE_CHECKING:
    from .api import Dispatcher
    from .loaded_pipeline import GenerateAnswer

PROMPT = "a red seven"
SEED = 1
LIMIT_S = 120.0
"""No step may take longer: the sample pipeline has four million weights."""
LIMIT_LEVELS = 2.0
"""Largest mean difference of two pictures, in levels of 0..255. Engines in fp16 and bf16 were seen
to differ from float32 by 0.01 to 0.3; another number in the picture is more than 20."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """How the sample pipeline fared on a device.

    Attributes:
        build_s: Seconds to build and check the engines; near zero where they were stored.
        was_stored: All engines were in the store.
        first_s: Seconds until the first picture, engines being opened.
        image_ms: Milliseconds of a picture after that.
        ran_on: Where the UNet's session says that it ran.
        verdicts: Component -> what the numeric gate said.
        difference: Mean difference from the reference's picture in levels of 0..255; None if the
            reference is not installed.
    """

    build_s: float
    was_stored: bool
    first_s: float
    image_ms: float
    ran_on: str
    verdicts: dict[str, str]
    difference: float | None = None

    @property
    def is_right(self) -> bool:
        """False if it is another picture than the reference's."""
        return self.difference is None or self.difference <= LIMIT_LEVELS

    @property
    def sentence(self) -> str:
        """What happened, for people."""
        against = (
            "not compared: the vendor cpu is not installed"
            if self.difference is None
            else f"{self.difference:.2f} of 255 levels from the reference's"
        )
        built = "stored engines" if self.was_stored else f"engines built in {self.build_s:.1f} s"
        return (
            f"{built}, first picture in {self.first_s:.2f} s, then {self.image_ms:.0f} ms each, "
            f"{against}"
        )


def draw(dispatcher: Dispatcher, vendor: str, device: Device, *, pipeline: str) -> Picture:
    """Builds the pipeline for that vendor and device alone, and draws with it twice.

    Raises:
        DispatchError: The vendor failed: nothing else serves in its place.
    """
    from .choice import Choice

    choice = Choice(gpu=device.id, vendor=vendor)
    with dispatcher.workers.limited(LIMIT_S):
        started_s = time.monotonic()
        built = dispatcher.build(pipeline, choice)
        built_s = time.monotonic()
        loaded = dispatcher.load(pipeline, choice)
        answer = loaded.generate(PROMPT, seed=SEED)
        first_s = time.monotonic()
        answer = loaded.generate(PROMPT, seed=SEED)
        second_s = time.monotonic()
        difference = _difference(dispatcher, pipeline, answer)
    return Picture(
        build_s=round(built_s - started_s, 3),
        was_stored=built.is_hit,
        first_s=round(first_s - built_s, 3),
        image_ms=round((second_s - first_s) * 1e3, 2),
        ran_on=answer.ran["unet"].get("device", ""),
        verdicts={one.component: one.manifest.verdict.status for one in answer.components},
        difference=difference,
    )


def _difference(dispatcher: Dispatcher, pipeline: str, answer: GenerateAnswer) -> float | None:
    import numpy as np

    from .choice import Choice

    spec = dispatcher.specs.get(REFERENCE_VENDOR)
    if spec is None or isinstance(dispatcher.workers.environment(spec), Rejection):
        return None
    reference = dispatcher.load(pipeline, Choice(gpu="cpu", vendor=spec.name))
    expected: Any = reference.generate(PROMPT, seed=SEED).images  # Any: numpy.ndarray
    levels = np.abs(answer.images.astype(np.int16) - expected.astype(np.int16))
    return round(float(levels.mean()), 4)
