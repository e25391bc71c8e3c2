"""Text to image: the loop from a request to images, over sessions of any vendor."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sdkit_dispatch.contract import GenerateRequest, Progress, Report, Session, Shapes
from sdkit_dispatch.diffusion.conditioning import (
    Conditioning,
    encode_prompt,
    guidance_embedding,
)
from sdkit_dispatch.diffusion.decoding import decode
from sdkit_dispatch.diffusion.denoising import denoise
from sdkit_dispatch.diffusion.feeds import Floats, Value, run_component
from sdkit_dispatch.diffusion.noise import image_seeds, start_noise, step_noise
from sdkit_dispatch.diffusion.schedulers import Schedule, schedule_from_config
from sdkit_dispatch.diffusion.shapes import (
    TEXT_COMPONENTS,
    component_shapes,
    guidance_channels,
    latent_shape,
    load_tokenizers,
    longest_chunk_count,
    uses_guidance,
)
from sdkit_dispatch.errors import ConfigError
from sdkit_dispatch.pipeline_files import Pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

KEPT_PROMPTS = 4
"""Encoded texts kept for later requests: most have other seeds, or the same negative prompt."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """Images, and what made them.

    Attributes:
        images: `[N, H, W, 3]`, 0..255.
        latents: `[N, channels, H / factor, W / factor]`: denoised, before the VAE's scaling.
        seeds: Of every image; alone, each makes the same image again.
        timings: Seconds of "open", "encode", "denoise" and "decode"; "open" is in no other.
        facts: Component -> `Session.facts`, of everything that ran.
    """

    images: NDArray[np.uint8]
    latents: Floats
    seeds: tuple[int, ...]
    timings: Mapping[str, float]
    facts: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    conditioning: Conditioning
    facts: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class _Opened:
    shapes: Mapping[str, tuple[int, ...]]
    session: Session


class DiffusionPipeline:
    """Generates images with the components of one pipeline; not for two threads at once.

    Sessions are opened when they are first needed and kept for the next call. They are opened
    anew when a request needs other shapes.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        open_session: Callable[[str, Shapes], Session],
        *,
        keep_loaded: bool = True,
        keep_prompts: int = KEPT_PROMPTS,
    ) -> None:
        """Opens nothing yet.

        Args:
            pipeline: An exported pipeline.
            open_session: (component, static shape of every input) -> a session that the
                pipeline owns from then on.
            keep_prompts: How many encoded texts are kept for later requests.
            keep_loaded: False closes the components of a phase as soon as it is over, so that
                never more than one phase's weights are in memory.
        """
        self._pipeline = pipeline
        self._open_session = open_session
        self.keep_loaded = keep_loaded
        self.keep_prompts = keep_prompts
        self._tokenizers = load_tokenizers(pipeline)
        self._opened: dict[str, _Opened] = {}
        self._encoded: dict[tuple[str, int], _Encoded] = {}
        self._schedule: tuple[tuple[str, int], Schedule] | None = None

    def __enter__(self) -> DiffusionPipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def loaded(self) -> tuple[str, ...]:
        """The components whose sessions are open."""
        return tuple(self._opened)

    def release(self, *components: str) -> None:
        """Closes those sessions, if they are open; the next call opens them again.

        What text encoders among them said is forgotten.
        """
        if set(components) & set(TEXT_COMPONENTS):
            self._encoded.clear()
        self._close(*components)

    def _close(self, *components: str) -> None:
        for component in components:
            if (opened := self._opened.pop(component, None)) is not None:
                opened.session.close()

    def close(self) -> None:
        """Closes all sessions; twice is fine."""
        self.release(*self._opened)

    def generate(
        self,
        request: GenerateRequest,
        report: Report,
        *,
        latents: Floats | None = None,
        noises: Sequence[Floats] | None = None,
        token_chunks: int | None = None,
    ) -> GenerateResult:
        """Makes `request.batch` images.

        Args:
            request: What to draw.
            report: Called with the phases "encode", "denoise" (after every step) and "decode"; may
                raise `CancelledByUser`, which passes through.
            latents: Unit noise `[N, channels, H, W]` to start from instead of the seeds'.
            noises: Unit noise of every step of an ancestral sampler, instead of the seeds'.
            token_chunks: Chunks that the prompts are padded to; as many as they fill by default.

        Raises:
            ConfigError: A value of the request is wrong.
            PipelineError: The pipeline cannot serve the request.
            NumericError: A component said something that is not finite, or a flat image.
        """
        pipeline = self._pipeline
        schedule = self._scheduled(request.scheduler, request.steps)
        seeds = image_seeds(request.seed, request.batch)
        has_guidance = uses_guidance(pipeline, request)
        chunks = token_chunks or longest_chunk_count(
            self._tokenizers, request, has_guidance=has_guidance
        )
        shapes = component_shapes(pipeline, request, token_chunks=chunks)
        shape = latent_shape(pipeline, request)
        if latents is not None and latents.shape != (request.batch, *shape):
            raise ConfigError(
                f"latents of shape {latents.shape} do not fit the request, which needs "
                f"{(request.batch, *shape)}",
                "pass latents of that shape, or none",
            )
        clock = _Clock()
        facts: dict[str, Mapping[str, str]] = {}

        def opened(component: str) -> Session:
            with clock.measure("open"):
                session = self._session(component, shapes[component])
            facts[component] = dict(session.facts)
            return session

        with clock.measure("encode"), self._phase(*TEXT_COMPONENTS):
            report(Progress(phase="encode", fraction=0.0))
            values = self._conditions(
                request, opened, facts=facts, chunks=chunks, has_guidance=has_guidance
            )
        with clock.measure("denoise"), self._phase("unet"):
            start = start_noise(seeds, shape) if latents is None else latents
            denoised = denoise(
                schedule,
                opened("unet"),
                start.astype(np.float32),
                values,
                guidance=request.guidance if has_guidance else None,
                noise=lambda step: (
                    step_noise(seeds, step, shape) if noises is None else noises[step]
                ),
                report=report,
            )
        with clock.measure("decode"), self._phase("vae_decoder"):
            config = pipeline.configs.get("vae_decoder", {})
            images = decode(opened("vae_decoder"), denoised, config, report)
        return GenerateResult(
            images=images, latents=denoised, seeds=seeds, timings=clock.seconds, facts=facts
        )

    def _scheduled(self, name: str, steps: int) -> Schedule:
        """Returns the steps; the last ones are kept, for most requests are like the one before."""
        if self._schedule is None or self._schedule[0] != (name, steps):
            config = self._pipeline.configs.get("scheduler", {})
            self._schedule = ((name, steps), schedule_from_config(name, config, steps))
        return self._schedule[1]

    def _session(self, component: str, shapes: Mapping[str, tuple[int, ...]]) -> Session:
        opened = self._opened.get(component)
        if opened is not None and opened.shapes == shapes:
            return opened.session
        self._close(component)
        log.debug("opening %s for %s", component, dict(shapes))
        session = self._open_session(component, shapes)
        self._opened[component] = _Opened(shapes=shapes, session=session)
        return session

    @contextmanager
    def _phase(self, *components: str) -> Iterator[None]:
        try:
            yield
        finally:
            if not self.keep_loaded:
                self._close(*components)

    def _conditions(
        self,
        request: GenerateRequest,
        opened: Callable[[str], Session],
        *,
        facts: dict[str, Mapping[str, str]],
        chunks: int,
        has_guidance: bool,
    ) -> dict[str, Value]:
        """Returns the UNet's inputs that stay the same in every step, a row for every image."""
        before = dict(self._encoded)  # a text that is both prompts is encoded twice, as any other

        def encode(text: str) -> Conditioning:
            if (known := before.get((text, chunks))) is not None:
                facts.update(known.facts)
                return known.conditioning
            made = encode_prompt(
                text,
                self._tokenizers,
                lambda component, feeds: run_component(component, opened(component), feeds),
                chunks=chunks,
                family=self._pipeline.family,
            )
            ran = {name: facts[name] for name in TEXT_COMPONENTS if name in facts}
            self._encoded[text, chunks] = _Encoded(conditioning=made, facts=ran)
            while len(self._encoded) > self.keep_prompts:
                del self._encoded[next(iter(self._encoded))]
            return made

        positive = encode(request.prompt)
        prompts = [positive]
        if has_guidance:
            index = self._pipeline.configs.get("model_index", {})
            is_zero = not request.negative_prompt and index.get("force_zeros_for_empty_prompt")
            prompts = [
                positive.zeros() if is_zero else encode(request.negative_prompt),
                positive,
            ]
        values: dict[str, Value] = {
            "encoder_hidden_states": np.repeat(
                np.stack([prompt.hidden for prompt in prompts]), request.batch, axis=0
            )
        }
        rows = len(prompts) * request.batch
        pooled = [prompt.pooled for prompt in prompts if prompt.pooled is not None]
        if pooled:
            values["text_embeds"] = np.repeat(np.stack(pooled), request.batch, axis=0)
            size = (request.height_px, request.width_px)
            values["time_ids"] = np.tile(
                np.array([*size, 0, 0, *size], dtype=np.float32), (rows, 1)
            )
        if channels := guidance_channels(self._pipeline):
            values["timestep_cond"] = np.tile(
                guidance_embedding(request.guidance, channels), (rows, 1)
            )
        return values


class _Clock:
    """Adds up seconds by phase; a phase inside another is taken out of it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = 0.0

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        outside, self._inner = self._inner, 0.0
        begin = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - begin
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent - self._inner
            self._inner = outside + spent
