"""A loaded checkpoint that draws."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from sdkit_dispatch.contract import GenerateRequest, Progress, Report
from sdkit_dispatch.errors import ConfigError, RunError
from sdkit_sdcpp.library import LibraryLog
from sdkit_sdcpp.names import SCHEDULERS

SIDE_STEP_PX = 64
"""The library rounds other widths and heights up."""


class SdcppSession:
    """A context of stable-diffusion.cpp."""

    def __init__(
        self,
        context: Any,  # SDContext of the binding, which has no types
        sd: Any,  # the binding's module
        *,
        log: LibraryLog,
        facts: Mapping[str, str],
    ) -> None:
        self.facts: Mapping[str, str] = MappingProxyType(dict(facts))
        self._context = context
        self._sd = sd
        self._log = log

    def generate(self, request: GenerateRequest, report: Report) -> Any:
        if self._context is None:
            raise RunError("sdcpp: the session is closed")
        values = self._values(request)
        progress = _StepReport(request, report)
        report(Progress(phase="denoise", fraction=0.0))
        self._log.clear()
        self._sd.set_progress_callback(progress)
        try:
            images = self._context.generate(**values)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise RunError(f"sdcpp: {error}: {self._log.last_words}") from error
        finally:
            self._sd.set_progress_callback(None)
        progress.raise_if_stopped()
        return np.stack([np.array(image.to_numpy()) for image in images])

    def _values(self, request: GenerateRequest) -> dict[str, Any]:
        """Returns the request in the words of the binding."""
        for name, side in (("width", request.width_px), ("height", request.height_px)):
            if side % SIDE_STEP_PX:
                raise ConfigError(
                    f"{name} is {side}; stable-diffusion.cpp draws multiples of {SIDE_STEP_PX}",
                    f"give --{name} {-(-side // SIDE_STEP_PX) * SIDE_STEP_PX}",
                )
        method, scheduler = _scheduler(self._sd, request.scheduler)
        return {
            "prompt": request.prompt,
            "negative_prompt": request.negative_prompt,
            "width": request.width_px,
            "height": request.height_px,
            "seed": request.seed,
            "batch_count": request.batch,
            "sample_steps": request.steps,
            # One is how the library says "without guidance".
            "cfg_scale": max(float(request.guidance), 1.0),
            "sample_method": method,
            "scheduler": scheduler,
        }

    def close(self) -> None:
        self._context = None


def _scheduler(sd: Any, name: str) -> tuple[Any, Any]:  # Any: members of the binding's enums
    """Raises ConfigError if the library, or this version of it, lacks the scheduler."""
    there = {
        ours: (getattr(sd.SampleMethod, method, None), getattr(sd.Scheduler, scheduler, None))
        for ours, (method, scheduler) in SCHEDULERS.items()
    }
    method, scheduler = there.get(name, (None, None))
    if method is None or scheduler is None:
        known = ", ".join(ours for ours, pair in there.items() if None not in pair)
        raise ConfigError(
            f"stable-diffusion.cpp lacks the scheduler '{name}'; it has {known}",
            "change --scheduler",
        )
    return method, scheduler


class _StepReport:
    """Passes the library's steps on. It cannot be stopped: a cancelled worker is killed instead."""

    def __init__(self, request: GenerateRequest, report: Report) -> None:
        self._steps = request.steps
        self._total = request.steps * request.batch
        self._done = 0
        self._report = report
        self._stopped: BaseException | None = None

    def __call__(self, step: int, steps: int, _seconds: float) -> None:
        # It also tells of tensors while it reads, and of tiles, and repeats the first step as 0.
        if steps != self._steps or step < 1 or self._stopped is not None:
            return
        self._done = min(self._done + 1, self._total)
        try:
            self._report(Progress(phase="denoise", fraction=self._done / self._total))
            if self._done == self._total:
                self._report(Progress(phase="decode"))
        except BaseException as error:  # nothing may pass through the library's frames
            self._stopped = error

    def raise_if_stopped(self) -> None:
        if self._stopped is not None:
            raise self._stopped
