"""A pipeline that is ready to make images, and its answers."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .build import LADDER_ERRORS, Builder, BuildResult, Step, all_failed, failed_step
from .component_build import ComponentBuild, asked_request
from .component_gate import require_as_planned
from .contract import Arrays, GenerateRequest, Plan, Report, record_to_json
from .diffusion.shapes import count_token_chunks
from .errors import CacheError, ConfigError, DispatchError, NumericError, WorkerError
from .lora import AppliedLora
from .pipeline_files import Pipeline
from .store_layout import as_store_error
from .wanted import Wanted, build_request, wanted
from .whole_file import write_whole
from .workers import Workers

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GenerateAnswer:
    """Images and everything about how they were made.

    Attributes:
        images: uint8 `[N, H, W, 3]`.
        latents: float32 `[N, 4, H/8, W/8]`, denoised, before the decoder; None from an engine
            that takes a whole checkpoint.
        ran: Component -> what the loaded engine says of itself: device, precision, runtime.
        timings: Seconds of each phase.
        steps: Steps of the ladder that did not serve, oldest first.
        components: The engines, each a hit or built for this call.
        checkpoint: The file that was taken whole, instead of engines: name and digest.
        ungated: What made the images without engines that the numeric gate knows -> why.
        loras: What is in the weights, in order.
    """

    request: GenerateRequest
    plan: Plan
    images: NDArray[np.uint8]
    latents: NDArray[np.float32] | None
    seeds: tuple[int, ...]
    ran: Mapping[str, Mapping[str, str]]
    timings: Mapping[str, float]
    steps: tuple[Step, ...]
    components: tuple[ComponentBuild, ...]
    checkpoint: Mapping[str, str] | None = None
    ungated: Mapping[str, str] = field(default_factory=dict)
    loras: tuple[AppliedLora, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Returns what ran, where and why, as JSON data (`Any`)."""
        return {
            "vendor": self.plan.vendor,
            "device": {"id": self.plan.device.id, "name": self.plan.device.name},
            "runtime": self.plan.runtime,
            "precision": self.plan.precision,
            "ran": {name: dict(facts) for name, facts in self.ran.items()},
            "engines": {built.component: built.engine.key for built in self.components},
            "is_stored": self.is_stored,
            "verdicts": {
                **{built.component: built.manifest.verdict.status for built in self.components},
                **dict.fromkeys(self.ungated, "unchecked"),
            },
            "rebuilt": {
                built.component: [verdict.reason for verdict in built.manifest.earlier]
                for built in self.components
                if built.manifest.earlier
            },
            "unchecked": self.unchecked,
            **({} if self.checkpoint is None else {"checkpoint": dict(self.checkpoint)}),
            **({"loras": [record_to_json(one) for one in self.loras]} if self.loras else {}),
            "steps": [record_to_json(step) for step in self.steps],
            "timings_s": {name: round(value, 4) for name, value in self.timings.items()},
        }

    def png(self, index: int = 0) -> bytes:
        """Returns image `index` as a PNG file with the prompt and `facts` in its text chunks."""
        from .diffusion.image import png_from_image

        return png_from_image(
            self.images[index], self.request, seed=self.seeds[index], facts=self.facts()
        )

    @property
    def is_stored(self) -> bool:
        """False if an engine is gone with the process: the store cannot be written."""
        return all(built.is_stored for built in self.components)

    @property
    def unchecked(self) -> dict[str, str]:
        """The components whose engines did not pass the numeric gate -> why."""
        return {
            built.component: built.manifest.verdict.reason or built.manifest.verdict.status
            for built in self.components
            if built.manifest.verdict.status != "passed"
        } | dict(self.ungated)

    @property
    def denoiser(self) -> Mapping[str, str]:
        """What the engine that denoised says of itself."""
        return self.ran["unet"] if "unet" in self.ran else next(iter(self.ran.values()))

    def save(self, path: str | Path) -> list[Path]:
        """Writes all images; a batch is numbered: "x.png" -> "x-1.png", "x-2.png".

        Returns:
            The files, in order.

        Raises:
            ConfigError: A file cannot be written.
        """
        target = Path(path)
        count = len(self.images)
        files = (
            [target]
            if count == 1
            else [
                target.with_name(f"{target.stem}-{index + 1}{target.suffix}")
                for index in range(count)
            ]
        )
        try:
            for index, file in enumerate(files):
                file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(file, self.png(index))
        except OSError as error:
            raise cannot_write(target, error) from error
        return files


@dataclass(kw_only=True)
class LoadedPipeline:
    """A pipeline that makes images; its engines stay loaded in a worker between calls."""

    pipeline: Pipeline
    plans: Sequence[Plan]
    builder: Builder
    workers: Workers
    make_request: Callable[..., GenerateRequest]
    report: Report
    is_strict: bool = False
    memory_budget_bytes: int | None = None
    machine_memory_bytes: int | None = None
    loras: tuple[AppliedLora, ...] = ()
    _steps: list[Step] = field(default_factory=list)
    _discarded: set[str] = field(default_factory=set)

    def generate(
        self,
        prompt: str,
        *,
        latents: NDArray[np.float32] | None = None,
        **values: Any,  # Any: the fields of GenerateRequest, by name
    ) -> GenerateAnswer:
        """Makes `batch` images with the seeds `seed`, `seed + 1`, ...

        Args:
            prompt: What to draw.
            latents: Unit noise `[N, 4, H/8, W/8]` to start from, instead of the seeds'.
            **values: Other fields of `GenerateRequest`; those that are not given come from the
                profile, then from the pipeline.

        Raises:
            ConfigError: A value is out of range.
            DispatchError: What every way down the ladder said.
        """
        request = self.make_request(prompt=prompt, **values)
        want = wanted(
            self.pipeline,
            request,
            token_chunks=count_token_chunks(self.pipeline, request),
            memo=self.builder.tools.store.memo,
        )
        arrays = {} if latents is None else {"latents": np.asarray(latents, np.float32)}
        while True:
            built = self.builder.build(want, self.plans, self.report)
            self._move_to(built)
            try:
                return self._run(want, built, arrays)
            except LADDER_ERRORS as error:
                if not isinstance(error, NumericError):
                    # A device lost in a process is lost to all of it (stable-diffusion.cpp#2015).
                    self.workers.stop(self.workers.specs[built.plan.vendor])
                if self._discard_refused(built, error):
                    continue
                self._remember(want, built, error)
                step = failed_step(built.plan, error)
                must_use_gpu = self.builder.tools.must_use_gpu
                is_only = len(self.plans) == 1 and not self._steps
                if self.is_strict or (is_only and not must_use_gpu):
                    raise
                self._steps.append(step)
                if len(self.plans) == 1:
                    raise all_failed(self._steps, must_use_gpu=must_use_gpu) from error
                log.warning("%s on %s: %s", step.vendor, step.device, step.reason)
                self.plans = self.plans[1:]

    def _move_to(self, built: BuildResult) -> None:
        """Stays on the step of the ladder that served: each is tried once."""
        self._steps += built.steps
        self.plans = [built.plan, *self.plans[len(built.steps) + 1 :]]

    def _discard_refused(self, built: BuildResult, error: DispatchError) -> bool:
        """Takes stored engines that their runtime refuses out of the store: they are built anew.

        It happens once to an engine; True if it did now. Vendors name the folder of an engine
        that they refuse, and that ends with its key.
        """
        refused = {part.engine.key for part in _refused(built, error) if part.is_hit}
        store = self.builder.tools.store
        for key in refused - self._discarded:
            try:
                with store.locked(key):
                    store.remove(key)
            except OSError as problem:
                if store.is_temporary:
                    return False
                store.retreat(as_store_error(problem, store.home).message)
                store.remove(key)  # no more than a note that it is not handed out again
            log.warning("%s; it is built again", error.message)
        is_new = bool(refused - self._discarded)
        self._discarded |= refused
        return is_new

    def _remember(self, want: Wanted, built: BuildResult, error: DispatchError) -> None:
        # Nothing else: a request can overflow a sound engine, and a config can be wrong.
        if isinstance(error, WorkerError) and error.was_lost:
            spec = self.workers.specs[built.plan.vendor]
            request = build_request(built.plan, spec, want, "unet")
            request = replace(request, shapes=want.shapes["unet"])
            self.builder.tools.failures.remember(request, built.plan.device, error)
        for part in _refused(built, error):  # again, though it was built anew: not in every run
            request = asked_request(part.engine)
            self.builder.tools.failures.remember(request, built.plan.device, error)

    def _run(self, want: Wanted, built: BuildResult, arrays: Arrays) -> GenerateAnswer:
        started_s = time.monotonic()
        spec = self.workers.specs[built.plan.vendor]
        params = {
            "pipeline": str(self.pipeline.folder),
            "memo": str(self.builder.tools.store.memo),
            "engines": [record_to_json(part.engine) for part in built.components],
            "device": record_to_json(built.plan.device),
            "request": record_to_json(want.request),
            "keep_loaded": self._may_keep_loaded(built),
        }
        client = self.workers.client(spec)
        answer = client.generate(params, arrays, self.report)
        for part in built.components:
            require_as_planned(part.engine.request, answer.result["facts"][part.component])
        return GenerateAnswer(
            request=want.request,
            plan=built.plan,
            images=answer.arrays["images"],
            latents=answer.arrays["latents"],
            seeds=tuple(answer.result["seeds"]),
            ran=answer.result["facts"],
            timings={**answer.result["timings"], "total": time.monotonic() - started_s},
            steps=tuple(self._steps),
            components=built.components,
            loras=self.loras,
        )

    def _may_keep_loaded(self, built: BuildResult) -> bool:
        """True if all components together fit the memory budget."""
        # A device that owns no memory borrows the machine's.
        owned_bytes = built.plan.device.memory_bytes or self.machine_memory_bytes
        budget_bytes = self.memory_budget_bytes or owned_bytes
        needed_bytes = sum(
            self.pipeline.components[part.component].weights_bytes for part in built.components
        )
        return budget_bytes is None or needed_bytes <= budget_bytes


def _refused(built: BuildResult, error: DispatchError) -> list[ComponentBuild]:
    """Returns the engines that their runtime would not open."""
    if not isinstance(error, CacheError):
        return []
    return [part for part in built.components if part.engine.key in error.message]


def require_writable(path: Path) -> None:
    """Refuses an output file that could not be written, before anything is computed for it.

    Raises:
        ConfigError: Says why.
    """
    if path.suffix.lower() != ".png":
        raise ConfigError(f"'{path}' does not end in .png, and PNG is what is written")
    if path.is_dir():
        raise ConfigError(f"'{path}' is a folder; give a file, such as '{path / 'image.png'}'")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"'{path}' cannot be written: permission denied", "change --out")


def cannot_write(path: Path, error: OSError) -> ConfigError:
    """Names an output file that cannot be written."""
    return ConfigError(f"'{path}' cannot be written: {error.strerror or error}", "change --out")
