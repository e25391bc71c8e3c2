"""A checkpoint that an engine takes whole: nothing is built, and images come as from a pipeline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from .build import LADDER_ERRORS, Builder, Step, all_failed, failed_step
from .checkpoint import Checkpoint, identity, read_checkpoint
from .contract import BuildRequest, GenerateRequest, Plan, Precision, Report, record_to_json
from .errors import ConfigError, PipelineError, WorkerError
from .loaded_pipeline import GenerateAnswer
from .pipeline_files import file_digest
from .workers import Workers

log = logging.getLogger(__name__)

PART = "the whole checkpoint"
"""In place of the names of components."""
UNCHECKED = (
    "the numeric gate compares engines of ONNX components with a reference, and this engine takes "
    "the checkpoint whole"
)


@dataclass(kw_only=True)
class LoadedCheckpoint:
    """A checkpoint that makes images; it stays loaded in a worker between calls."""

    checkpoint: Checkpoint
    plans: Sequence[Plan]
    builder: Builder
    workers: Workers
    make_request: Callable[..., GenerateRequest]
    report: Report
    is_strict: bool = False
    _steps: list[Step] = field(default_factory=list)
    _sound: str = ""
    """Identity of the file whose header was read and found sound."""

    def generate(self, prompt: str, **values: Any) -> GenerateAnswer:
        """As `LoadedPipeline.generate`; the noise cannot be given.

        Raises:
            ConfigError: A value is out of range, or the engine lacks what it asks for.
            DispatchError: What every way down the ladder said.
        """
        if values.pop("latents", None) is not None:
            raise ConfigError(
                "the noise to start from cannot be given for a checkpoint",
                "give a seed, or an exported ONNX pipeline",
            )
        request = self.make_request(prompt=prompt, **values)
        while True:
            plan = self.plans[0]
            try:
                plan = self.builder.confirmed(plan, self.report)
                answer = self._run(plan, request)
            except LADDER_ERRORS as error:
                # A runtime binds its process to a device: the next step starts in a new one.
                self.workers.stop(self.workers.specs[plan.vendor])
                must_use_gpu = self.builder.tools.must_use_gpu
                is_only = len(self.plans) == 1 and not self._steps
                if self.is_strict or (is_only and not must_use_gpu):
                    raise
                self._steps.append(failed_step(plan, error))
                if len(self.plans) == 1:
                    raise all_failed(self._steps, must_use_gpu=must_use_gpu) from error
                log.warning("%s on %s: %s", plan.vendor, plan.device.name, error.message)
                self.plans = self.plans[1:]
            else:
                self.plans = [plan, *self.plans[1:]]
                return answer

    def _run(self, plan: Plan, request: GenerateRequest) -> GenerateAnswer:
        started_s = time.monotonic()
        path = self.checkpoint.path
        seen = identity(path)
        if seen != self._sound:  # the loaders of engines trust it, so it is read here first
            self.checkpoint, self._sound = read_checkpoint(path), seen
        digest = file_digest(path, memo=self.builder.tools.store.memo)
        params = {
            "checkpoint": str(path.resolve()),
            "identity": seen,
            "device": record_to_json(plan.device),
            "options": dict(plan.options),
            "request": record_to_json(request),
        }
        with self._remembering(plan, request, digest):
            client = self.workers.client(self.workers.specs[plan.vendor])
            answer = client.generate(params, {}, self.report)
        if identity(path) != seen:
            self.workers.stop(self.workers.specs[plan.vendor])  # it may hold a part of each
            raise PipelineError(
                f"the checkpoint '{path}' was changed while it was used", "run it again"
            )
        ran = answer.result["facts"]
        if ran["precision"] in get_args(Precision):  # planned before the file was looked into
            plan = replace(plan, precision=ran["precision"])
        return GenerateAnswer(
            request=request,
            plan=plan,
            images=answer.arrays["images"],
            latents=None,
            seeds=tuple(answer.result["seeds"]),
            ran={PART: ran},
            timings={**answer.result["timings"], "total": time.monotonic() - started_s},
            steps=tuple(self._steps),
            components=(),
            checkpoint={"file": path.name, "sha256": digest},
            ungated={PART: UNCHECKED},
        )

    @contextmanager
    def _remembering(self, plan: Plan, request: GenerateRequest, digest: str) -> Iterator[None]:
        """Does not let the same end a worker again; another size of the picture may serve.

        Raises:
            WorkerError: It did before.
        """
        tools = self.builder.tools
        asked = BuildRequest(
            vendor=plan.vendor,
            revision=self.workers.specs[plan.vendor].revision,
            runtime=plan.runtime,
            target=plan.target,
            component=PART,
            graph_digest=digest,
            weights_digest="",
            precision=plan.precision,
            shapes={"images": (request.batch, request.height_px, request.width_px, 3)},
            options=plan.options,
        )
        if tools.may_retry:
            tools.failures.forget(asked, plan.device)
        remembered = tools.failures.recall(asked, plan.device)
        if remembered is not None:
            raise remembered.as_error()
        try:
            yield
        except WorkerError as error:
            if error.was_lost:
                tools.failures.remember(asked, plan.device, error)
            raise


def require_leave(*, is_strict: bool, must_check: bool) -> None:
    """Refuses an engine that no reference can check, where nothing else than the best will do.

    Raises:
        ConfigError: Nobody said that it may be unchecked.
    """
    if is_strict and must_check:
        raise ConfigError(
            f"--strict refuses an engine that cannot be checked: {UNCHECKED}",
            "add --no-check, leave --strict out, or give an exported ONNX pipeline",
        )
