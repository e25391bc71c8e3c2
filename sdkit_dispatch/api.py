"""The Python API: detect, plan, build, load a pipeline, generate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from .build import (
    LADDER_ERRORS,
    REMEMBERED_ERRORS,
    Builder,
    BuildResult,
    ComponentBuild,
    Step,
    Wanted,
    build_request,
    failed_step,
    wanted,
)
from .cache import EngineStore, Explanation, explain
from .config import Config, home_folder, load_config, load_profile
from .contract import (
    Arrays,
    Device,
    GenerateRequest,
    Plan,
    Precision,
    Progress,
    Rejection,
    Report,
    VendorSpec,
    record_to_json,
)
from .detect import detect, host
from .detect.choice import gpu_choice
from .diffusion.shapes import count_token_chunks, vae_factor
from .env import InstallPlan, find_vendors, install, plan_install
from .errors import NoVendorError, PipelineError, VendorEnvError
from .pipeline_files import Pipeline, read_pipeline
from .plan import Decision, explain_rejections, make_plans
from .plan_report import PlanReport, plan_report
from .reference import VENDOR as REFERENCE_VENDOR
from .reference import Reference
from .worker_client import no_report
from .workers import Workers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SAMPLE = "sample"
"""In place of a pipeline folder: the small pipeline in the package, with its profile."""
DEFAULT_STEPS = 20
DEFAULT_GUIDANCE = 7.0
DEFAULT_SCHEDULER = "dpmpp_2m"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the caller chose; the rest is chosen for them.

    Attributes:
        gpu: "auto", "cpu", "gpu:N", a device id or a part of a device's name.
        vendor: Only this vendor.
        precision: Of the build; the vendor's best by default.
        profile: A name or a file; the sample's own for the sample, else "default".
    """

    gpu: str = "auto"
    vendor: str | None = None
    precision: Precision | None = None
    profile: str | None = None
    must_check: bool = True
    may_retry: bool = False


@dataclass(frozen=True, kw_only=True)
class GenerateAnswer:
    """Images and everything about how they were made.

    Attributes:
        images: uint8 `[N, H, W, 3]`.
        latents: float32 `[N, 4, H/8, W/8]`, denoised, before the decoder.
        ran: Component -> what the loaded engine says of itself: device, precision, runtime.
        timings: Seconds of each phase.
        steps: Steps of the ladder that did not serve, oldest first.
        components: The engines, each a hit or built for this call.
    """

    request: GenerateRequest
    plan: Plan
    images: NDArray[np.uint8]
    latents: NDArray[np.float32]
    seeds: tuple[int, ...]
    ran: Mapping[str, Mapping[str, str]]
    timings: Mapping[str, float]
    steps: tuple[Step, ...]
    components: tuple[ComponentBuild, ...]

    def facts(self) -> dict[str, Any]:
        """Returns what ran, where and why, as JSON data (`Any`)."""
        return {
            "vendor": self.plan.vendor,
            "device": {"id": self.plan.device.id, "name": self.plan.device.name},
            "runtime": self.plan.runtime,
            "precision": self.plan.precision,
            "ran": {name: dict(facts) for name, facts in self.ran.items()},
            "engines": {built.component: built.engine.key for built in self.components},
            "verdicts": {
                built.component: built.manifest.verdict.status for built in self.components
            },
            "steps": [record_to_json(step) for step in self.steps],
            "timings_s": {name: round(value, 4) for name, value in self.timings.items()},
        }

    def png(self, index: int = 0) -> bytes:
        """Returns image `index` as a PNG file with the prompt and `facts` in its text chunks."""
        from .diffusion.image import png_from_image

        return png_from_image(
            self.images[index], self.request, seed=self.seeds[index], facts=self.facts()
        )

    def save(self, path: str | Path) -> list[Path]:
        """Writes all images; a batch is numbered: "x.png" -> "x-1.png", "x-2.png".

        Returns:
            The files, in order.
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
        for index, file in enumerate(files):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self.png(index))
        return files


class Dispatcher:
    """Detects, plans, builds and runs with one home folder and config. A context manager."""

    def __init__(
        self,
        *,
        home: Path | None = None,
        config: Config | None = None,
        report: Report = no_report,
    ) -> None:
        """Starts nothing.

        Args:
            home: Folder of engines and environments; `config.home_folder()` by default.
            config: How to run here; the user's by default.
            report: Called by long work; raises CancelledByUser to stop it.
        """
        self.home = home or home_folder()
        self.config = config or load_config(home=self.home)
        self.report = report
        self.store = EngineStore(self.home)
        self.specs = find_vendors()
        self.workers = Workers(home=self.home, config=self.config, specs=self.specs)
        self._devices: list[Device] | None = None

    @property
    def devices(self) -> list[Device]:
        """The processors of this machine, the CPU last."""
        if self._devices is None:
            self._devices = detect()
        return self._devices

    def plan(self, choice: Choice | None = None) -> Decision:
        """Decides which vendor serves which device, and why the others do not."""
        choice = choice or Choice()
        profile = load_profile(choice.profile or "default", home=self.home)
        return make_plans(
            self.devices,
            host(),
            list(self.specs.values()),
            gpu=gpu_choice(os.environ) if choice.gpu == "auto" else choice.gpu,
            vendor=choice.vendor,
            precision=choice.precision or profile.precision,
            options=profile.options,
            env_states=self._states(),
            probe=self.workers.probe,
            may_install=self.config.may_install == "yes",
        )

    def plan_report(self, choice: Choice | None = None) -> PlanReport:
        """Returns the decision with everything that an installer needs to act on it."""
        return plan_report(host(), self.devices, self.plan(choice), self._states())

    def _states(self) -> dict[str, str]:
        return {
            spec.name: "installable"
            if isinstance(self.workers.environment(spec), Rejection)
            else "ready"
            for spec in self.specs.values()
        }

    def read(self, pipeline: str | Path) -> Pipeline:
        """Reads a pipeline folder; `SAMPLE` is the one in the package.

        Raises:
            PipelineError: It cannot be read.
        """
        return read_pipeline(pipeline_folder(pipeline), memo=self.store.memo)

    def build(
        self,
        pipeline: str | Path = SAMPLE,
        choice: Choice | None = None,
        *,
        width_px: int | None = None,
        height_px: int | None = None,
        batch: int | None = None,
    ) -> BuildResult:
        """Compiles all components of a pipeline, or finds them in the store.

        Raises:
            NoVendorError: No vendor serves; lists every reason.
            DispatchError: What every way down the ladder said.
        """
        choice = sample_choice(pipeline, choice or Choice())
        read = self.read(pipeline)
        request = self.request(
            read, choice, prompt="", width_px=width_px, height_px=height_px, batch=batch
        )
        want = wanted(read, request, token_chunks=1, memo=self.store.memo)
        return self.builder(choice).build(want, self._plans(choice), self.report)

    def explain(
        self,
        pipeline: str | Path = SAMPLE,
        choice: Choice | None = None,
        *,
        width_px: int | None = None,
        height_px: int | None = None,
        batch: int | None = None,
    ) -> tuple[Explanation, ...]:
        """Says for each component whether `build` would find its engine, and why not.

        Raises:
            NoVendorError: No vendor serves; lists every reason.
        """
        choice = sample_choice(pipeline, choice or Choice())
        read = self.read(pipeline)
        request = self.request(
            read, choice, prompt="", width_px=width_px, height_px=height_px, batch=batch
        )
        want = wanted(read, request, token_chunks=1, memo=self.store.memo)
        plan = self._plans(choice)[0]
        requests = [
            build_request(plan, self.specs[plan.vendor], want, name) for name in want.shapes
        ]
        return tuple(explain(self.store, request) for request in requests)

    def settle_installing(self, choice: Choice, *, ask: Callable[[str], bool] | None) -> None:
        """Decides for this run whether a missing vendor may be installed.

        Args:
            choice: As for `build`.
            ask: Puts a yes-or-no question to the user; None: nobody can be asked.
        """
        may: Literal["yes", "no"] = "no"
        if ask is not None:
            self.config = replace(self.config, may_install="yes")
            plans = self.plan(choice).plans
            if plans and plans[0].state == "installable":
                summaries = [plan.summary for plan in self.install_plans(plans[0].vendor)]
                may = "yes" if ask("\n".join([*summaries, "Install now?"])) else "no"
        self.config = replace(self.config, may_install=may)

    def best_installable(self) -> VendorSpec:
        """Returns the vendor that serves this machine best, installed or not.

        Raises:
            NoVendorError: None does; lists every reason.
        """
        allowed = replace(self.config, may_install="yes")
        before, self.config = self.config, allowed
        try:
            return self.specs[self._plans(Choice())[0].vendor]
        finally:
            self.config = before

    def load(self, pipeline: str | Path = SAMPLE, choice: Choice | None = None) -> LoadedPipeline:
        """Prepares a pipeline for `generate`; engines are built when a request needs them.

        Raises:
            NoVendorError: No vendor serves; lists every reason.
            PipelineError: The folder cannot be read.
        """
        choice = sample_choice(pipeline, choice or Choice())
        read = self.read(pipeline)
        return LoadedPipeline(
            dispatcher=self,
            pipeline=read,
            choice=choice,
            plans=self._plans(choice),
            builder=self.builder(choice),
        )

    def request(
        self,
        pipeline: Pipeline,
        choice: Choice,
        *,
        prompt: str,
        negative_prompt: str = "",
        width_px: int | None = None,
        height_px: int | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        seed: int = 0,
        batch: int | None = None,
        scheduler: str | None = None,
    ) -> GenerateRequest:
        """Returns a request; what is not given comes from the profile, then from the pipeline."""
        profile = load_profile(choice.profile or "default", home=self.home)
        side_px = _own_side_px(pipeline)
        return GenerateRequest(
            prompt=prompt,
            negative_prompt=negative_prompt,
            width_px=_first(width_px, profile.width_px, side_px),
            height_px=_first(height_px, profile.height_px, side_px),
            steps=_first(steps, profile.steps, DEFAULT_STEPS),
            guidance=_first(guidance, profile.guidance, DEFAULT_GUIDANCE),
            seed=seed,
            batch=_first(batch, profile.batch, 1),
            scheduler=_first(scheduler, profile.scheduler, DEFAULT_SCHEDULER),
        )

    def _plans(self, choice: Choice) -> tuple[Plan, ...]:
        decision = self.plan(choice)
        if not decision.plans:
            raise NoVendorError(explain_rejections(decision), "sdkit-dispatch vendors list")
        return decision.plans

    def builder(self, choice: Choice) -> Builder:
        """Returns what builds engines as `choice` asks."""
        cpu = next(device for device in self.devices if device.kind == "cpu")
        return Builder(
            store=self.store,
            workers=self.workers,
            reference=Reference(store=self.store, workers=self.workers, device=cpu),
            install=self._install,
            must_check=choice.must_check,
            is_strict=self.config.strict,
            may_retry=choice.may_retry,
        )

    def install_plans(self, vendor: str) -> list[InstallPlan]:
        """Returns what installing a vendor fetches, with the reference that checks its engines.

        Raises:
            VendorEnvError: The requirements cannot be satisfied.
        """
        return [
            plan_install(spec, home=self.home, report=self.report)
            for spec in self._missing_with_reference(self.specs[vendor])
        ]

    def _missing_with_reference(self, spec: VendorSpec) -> list[VendorSpec]:
        reference = self.specs.get(REFERENCE_VENDOR)
        needed = [spec] if reference is None or reference == spec else [spec, reference]
        return [
            one
            for one in needed
            if one is spec or isinstance(self.workers.environment(one), Rejection)
        ]

    def _install(self, spec: VendorSpec, report: Report) -> None:
        if self.config.may_install != "yes":
            raise VendorEnvError(
                f"the vendor '{spec.name}' is not installed",
                f"sdkit-dispatch vendors install {spec.name}",
            )
        for one in self._missing_with_reference(spec):
            plan = plan_install(one, home=self.home, report=report)
            report(Progress(phase=f"install {plan.summary}"))
            install(one, home=self.home, report=report, plan=plan)
            self.workers.forget(one)

    def close(self) -> None:
        """Ends all workers; twice is fine."""
        self.workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(kw_only=True)
class LoadedPipeline:
    """A pipeline that makes images; its engines stay loaded in a worker between calls."""

    dispatcher: Dispatcher
    pipeline: Pipeline
    choice: Choice
    plans: Sequence[Plan]
    builder: Builder
    _steps: list[Step] = field(default_factory=list)

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
        request = self.dispatcher.request(self.pipeline, self.choice, prompt=prompt, **values)
        want = wanted(
            self.pipeline,
            request,
            token_chunks=count_token_chunks(self.pipeline, request),
            memo=self.dispatcher.store.memo,
        )
        while True:
            built = self.builder.build(want, self.plans, self.dispatcher.report)
            self._move_to(built)
            try:
                return self._run(want, built, {} if latents is None else {"latents": latents})
            except LADDER_ERRORS as error:
                self._remember(want, built, error)
                if self.dispatcher.config.strict or len(self.plans) == 1:
                    raise
                self._steps.append(failed_step(built.plan, error))
                self.plans = self.plans[1:]

    def _move_to(self, built: BuildResult) -> None:
        """Stays on the step of the ladder that served: each is tried once."""
        self._steps += built.steps
        self.plans = [built.plan, *self.plans[len(built.steps) + 1 :]]

    def _remember(self, want: Wanted, built: BuildResult, error: Exception) -> None:
        if isinstance(error, REMEMBERED_ERRORS) and not getattr(error, "was_killed", False):
            spec = self.dispatcher.specs[built.plan.vendor]
            request = build_request(built.plan, spec, want, "unet")
            self.builder.failures.remember(request, built.plan.device, error)

    def _run(self, want: Wanted, built: BuildResult, arrays: Arrays) -> GenerateAnswer:
        started_s = time.monotonic()
        spec = self.dispatcher.specs[built.plan.vendor]
        params = {
            "pipeline": str(self.pipeline.folder),
            "memo": str(self.dispatcher.store.memo),
            "engines": [record_to_json(part.engine) for part in built.components],
            "device": record_to_json(built.plan.device),
            "request": record_to_json(want.request),
            "keep_loaded": self._may_keep_loaded(built),
        }
        client = self.dispatcher.workers.client(spec)
        answer = client.generate(params, arrays, self.dispatcher.report)
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
        )

    def _may_keep_loaded(self, built: BuildResult) -> bool:
        """True if all components together fit the memory budget."""
        budget_mb = self.dispatcher.config.memory_budget_mb
        budget_bytes = built.plan.device.memory_bytes if budget_mb is None else budget_mb * 10**6
        needed_bytes = sum(
            self.pipeline.components[part.component].weights_bytes for part in built.components
        )
        return budget_bytes is None or needed_bytes <= budget_bytes


def pipeline_folder(pipeline: str | Path) -> Path:
    """Returns the folder that the user means; `SAMPLE` is the one in the package."""
    if str(pipeline) != SAMPLE:
        return Path(pipeline).expanduser()
    return Path(__file__).with_name("_data") / "sample" / "digits-sd"


def sample_choice(pipeline: str | Path, choice: Choice) -> Choice:
    """Returns `choice` with the sample's own profile, if it is the sample and none was chosen."""
    if str(pipeline) == SAMPLE and choice.profile is None:
        return replace(choice, profile=SAMPLE)
    return choice


def _own_side_px(pipeline: Pipeline) -> int:
    side = pipeline.configs["unet"].get("sample_size")
    if isinstance(side, list) and side:
        side = side[0]
    if not isinstance(side, int) or side <= 0:
        raise PipelineError(
            f"'{pipeline.folder}/unet/config.json' has the sample_size {side!r}, not a number",
            "give --width and --height",
        )
    return side * vae_factor(pipeline)


def _first(*values: Any) -> Any:  # Any: all of one type, the first that was given
    return next(value for value in values if value is not None)
