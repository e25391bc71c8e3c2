"""The Python API: detect, plan, build, load a pipeline, generate."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from . import graph
from .build import Builder, BuildResult
from .build_tools import BuildTools
from .cache import EngineStore, Entry
from .checkpoint import Checkpoint, is_checkpoint, read_checkpoint
from .choice import SAMPLE, Choice, pipeline_folder, sample_choice, serving, vendor_options
from .complete_request import complete_request
from .component_build import ComponentBuilder
from .config import Config, home_folder, load_config, load_profile
from .contract import (
    Device,
    GenerateRequest,
    Plan,
    Rejection,
    Report,
    VendorSpec,
    no_report,
)
from .detect import detect, host
from .detect.absent import absent_device
from .detect.choice import gpu_choice
from .emit import VENDOR as EMITTING_VENDOR
from .emit import Emitted, emit_component
from .env import InstallPlan, VendorState, find_vendors, state
from .errors import ConfigError, NoVendorError, PipelineError
from .failures import Failures
from .installer import Installer
from .loaded_checkpoint import LoadedCheckpoint, require_leave
from .loaded_pipeline import LoadedPipeline
from .lora import AppliedLora, Lora
from .measured_order import load_order, with_measured_order
from .native.builds import right_build
from .pipeline_files import Pipeline, file_digest, read_pipeline
from .plan import Decision, check_vendor, explain_rejections, make_plans, unsupported_vendors
from .plan_report import PlanReport, plan_report
from .reference import Reference
from .store_cleaning import Removal, superseded
from .store_explain import EntryExplanation, Explanation, explain, explain_entry
from .wanted import Wanted, wanted
from .workers import Workers

if TYPE_CHECKING:
    from .lora.merged import MergedPipeline


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
        self.may_install = self.config.may_install == "yes"
        self.store = EngineStore(self.home, shared=self._shared_stores())
        self.specs = find_vendors()
        self.workers = Workers(home=self.home, config=self.config, specs=self.specs)
        self._devices: list[Device] | None = None

    @property
    def devices(self) -> list[Device]:
        """The processors of this machine, the CPU last."""
        if self._devices is None:
            self._devices = detect()
        return self._devices

    def plan(
        self,
        choice: Choice | None = None,
        *,
        devices: Sequence[Device] | None = None,
        may_install: bool | None = None,
    ) -> Decision:
        """Decides which vendor serves which device, and why the others do not.

        Args:
            choice: What the caller chose.
            devices: To choose among; those of this machine by default.
            may_install: Whether a vendor that is missing here counts; as configured by default.
        """
        choice = choice or Choice()
        profile = load_profile(choice.profile or "default", home=self.home)
        is_free = choice.gpu == "auto"
        for name in profile.options:
            check_vendor(name, list(self.specs))
        decision = make_plans(
            self.devices if devices is None else devices,
            host(),
            list(self.specs.values()),
            gpu=gpu_choice(os.environ) if is_free and devices is None else choice.gpu,
            vendor=choice.vendor,
            precision=choice.precision or profile.precision,
            options=vendor_options(profile, choice),
            env_states=self._states(),
            probe=self.workers.probe,
            may_install=self.may_install if may_install is None else may_install,
        )
        return with_measured_order(decision, load_order(self.home))

    def plan_report(self, choice: Choice | None = None) -> PlanReport:
        """Returns the decision with everything that an installer needs to act on it."""
        failures = Failures(self.home).all()
        return plan_report(
            host(), self.devices, self.plan(choice), self._states(), failures=failures
        )

    def vendor_states(self) -> list[VendorState]:
        """Returns what `vendors list` says: a vendor that serves no device here is unsupported."""
        refused = self.unsupported()
        states = [
            replace(state(spec, home=self.home), build=self._build_words(spec))
            for spec in self.specs.values()
        ]
        return [
            replace(one, state="unsupported", message=refused[one.vendor].reason, action="")
            if one.vendor in refused and one.state != "installed"
            else one
            for one in states
        ]

    def _build_words(self, spec: VendorSpec) -> str:
        build = right_build(spec.name, self.home)
        return build.words if build is not None else ""

    def unsupported(self) -> dict[str, Rejection]:
        """Returns the vendors that serve no device here, and the nearest reason."""
        return unsupported_vendors(self.devices, host(), list(self.specs.values()))

    def _states(self) -> dict[str, str | Rejection]:
        """Returns vendor -> "ready", "installable", or why no environment can serve it."""
        return {spec.name: self._state(spec) for spec in self.specs.values()}

    def _state(self, spec: VendorSpec) -> str | Rejection:
        environment = self.workers.environment(spec)
        if not isinstance(environment, Rejection):
            return "ready"
        # Only a managed environment is ever made; a Python that the user chose stays theirs.
        can_install = self.config.env in ("auto", "managed")
        is_in_reach = environment.code in ("not-installed", "outdated", "broken")
        return "installable" if can_install and is_in_reach else environment

    def read(self, pipeline: str | Path) -> Pipeline:
        """Reads a pipeline folder; `SAMPLE` is the one in the package.

        Raises:
            PipelineError: It cannot be read.
        """
        folder = pipeline_folder(pipeline)
        if is_checkpoint(folder):
            raise self._not_for(folder, "a checkpoint", "checkpoint")
        return read_pipeline(folder, memo=self.store.memo)

    def read_checkpoint(self, pipeline: str | Path) -> Checkpoint:
        """Reads the header of a checkpoint.

        Raises:
            PipelineError: It is none, or damaged.
        """
        return read_checkpoint(pipeline_folder(pipeline))

    def _not_for(self, path: Path, what: str, takes: str) -> PipelineError:
        """Names the vendors that take what another vendor was given."""
        takers = [name for name, spec in self.specs.items() if spec.takes == takes]
        if path.is_file():
            read_checkpoint(path)  # what is wrong with the file comes first
        return PipelineError(
            f"'{path}' is {what}; {' and '.join(takers) or 'no vendor'} takes it",
            f"--vendor {takers[0]}" if takers else "sdkit-dispatch vendors list",
        )

    def _takes_whole(self, pipeline: str | Path, choice: Choice) -> bool:
        """True if the pipeline is a checkpoint for a vendor that takes it as it is.

        Raises:
            PipelineError: The vendor that was chosen takes something else.
        """
        path = pipeline_folder(pipeline)
        spec = self.specs.get(choice.vendor or "")
        is_file = is_checkpoint(path)
        if spec is not None and spec.takes == "checkpoint" and not is_file:
            if not path.exists():
                read_checkpoint(path)  # raises: it is not there
            what = "a folder; the checkpoint of a model is one file"
            raise PipelineError(
                f"'{path}' is {what}, .safetensors or .gguf, and {spec.name} takes that",
                "give such a file, or leave --vendor out",
            )
        if is_file and spec is not None and spec.takes != "checkpoint":
            raise self._not_for(path, f"a checkpoint, and {spec.name} takes none", "checkpoint")
        return is_file

    def build(
        self,
        pipeline: str | Path = SAMPLE,
        choice: Choice | None = None,
        *,
        width_px: int | None = None,
        height_px: int | None = None,
        batch: int | None = None,
        loras: Sequence[Lora] = (),
    ) -> BuildResult:
        """Compiles all components of a pipeline, or finds them in the store.

        Args:
            pipeline: A pipeline folder, `SAMPLE`, or a checkpoint.
            choice: What the caller chose.
            width_px: As for `request`.
            height_px: As for `request`.
            batch: As for `request`.
            loras: What is added to the weights first, in this order.

        Raises:
            NoVendorError: No vendor serves; lists every reason.
            DispatchError: What every way down the ladder said.
        """
        choice = sample_choice(pipeline, choice or Choice())
        if self._takes_whole(pipeline, choice):
            checkpoint = self.read_checkpoint(pipeline)
            _refuse_loras(checkpoint, loras)
            plan = self.builder(choice).confirmed(self._checkpoint_plans(choice)[0], self.report)
            digest = file_digest(checkpoint.path, memo=self.store.memo)
            return BuildResult(plan=plan, components=(), checkpoint_sha256=digest)
        with self._with_loras(pipeline, loras) as (read, applied):
            want = self._want(read, choice, width_px, height_px, batch)
            result = self.builder(choice).build(want, self._plans(choice), self.report)
        return replace(result, loras=applied)

    def build_for(
        self,
        archs: Sequence[str],
        pipeline: str | Path = SAMPLE,
        choice: Choice | None = None,
        *,
        width_px: int | None = None,
        height_px: int | None = None,
        batch: int | None = None,
        loras: Sequence[Lora] = (),
    ) -> list[BuildResult]:
        """Compiles engines ahead of time for devices that are elsewhere ("sm_89", "gfx1100").

        Such engines are `unchecked-target`: the gate runs when a device first loads them.

        Raises:
            ConfigError: No device of that architecture is known.
            NoVendorError: No vendor builds for one of them here; lists every reason.
            DispatchError: What every way down the ladder said.
        """
        choice = sample_choice(pipeline, choice or Choice())
        devices = [absent_device(arch) for arch in archs]
        with self._with_loras(pipeline, loras) as (read, applied):
            want = self._want(read, choice, width_px, height_px, batch)
            plans = [self._plans(replace(choice, gpu="auto"), devices=[one]) for one in devices]
            builder = self.builder(choice)
            results = [builder.build(want, ladder, self.report) for ladder in plans]
        return [replace(result, loras=applied) for result in results]

    def emit(
        self,
        pipeline: str | Path,
        component: str,
        out: Path,
        choice: Choice | None = None,
        *,
        width_px: int | None = None,
        height_px: int | None = None,
        batch: int | None = None,
        may_replace: bool = False,
        loras: Sequence[Lora] = (),
    ) -> Emitted:
        """Writes the source of a program that computes one component; builds its engine if needed.

        Args:
            pipeline: As for `build`.
            component: "unet", "vae_decoder", ...
            out: A folder that is empty or not there.
            choice: As for `build`; without a vendor it is the one that writes source code.
            width_px: As for `build`.
            height_px: As for `build`.
            batch: As for `build`.
            may_replace: Whether `out` may be a folder that was written so before.
            loras: As for `build`.

        Raises:
            ConfigError: There is no such component, the vendor writes no source code, or the
                folder is not free.
            DispatchError: As for `build`.
        """
        choice = sample_choice(pipeline, choice or Choice())
        choice = replace(choice, vendor=choice.vendor or EMITTING_VENDOR)
        with self._with_loras(pipeline, loras) as (read, _):
            return emit_component(
                self.builder(choice),
                self._want(read, choice, width_px, height_px, batch),
                self._plans(choice),
                component=component,
                out=out,
                may_replace=may_replace,
                report=self.report,
            )

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
        want = self._want(pipeline, choice, width_px, height_px, batch)
        plan = self._plans(choice)[0]
        with ComponentBuilder(self.builder(choice).tools, want, plan, self.report) as bench:
            requests = [bench.current_request(name) for name in want.shapes]
        return tuple(explain(self.store, request) for request in requests)

    def explain_stored(self, prefix: str) -> EntryExplanation:
        """Says what the stored engine is whose key begins so, and its nearest neighbour.

        Raises:
            ConfigError: None has such a key, or more than one.
        """
        return explain_entry(self.store, self.stored(prefix))

    def stored(self, prefix: str) -> Entry:
        """Returns the stored engine whose key begins so.

        Raises:
            ConfigError: None has such a key, or more than one.
        """
        found = self.store.find(prefix)
        if len(found) != 1:
            raise ConfigError(
                f"{len(found)} stored engines have a key that starts with '{prefix}'",
                "sdkit-dispatch cache list",
            )
        return found[0]

    def superseded(self, entries: Sequence[Entry]) -> list[Removal]:
        """Returns those engines that no build here can hit any more."""
        vendors = {entry.manifest.request.vendor for entry in entries if entry.manifest}
        return superseded(
            entries,
            revisions={spec.name: spec.revision for spec in self.specs.values()},
            passes=graph.REVISION,
            runtimes={
                spec.name: names
                for spec in self.specs.values()
                if spec.name in vendors and (names := self._runtimes(spec))
            },
        )

    def _runtimes(self, spec: VendorSpec) -> frozenset[str]:
        """Returns what the installed runtime of a vendor calls itself on the devices here."""
        if isinstance(self.workers.environment(spec), Rejection):
            return frozenset()
        answers = [
            self.workers.probe(spec, device, None, {})
            for device in self.devices
            if device.kind in spec.device_kinds
        ]
        return frozenset(plan.runtime for plan in answers if isinstance(plan, Plan))

    def _shared_stores(self) -> list[Path]:
        """Returns the homes of the shared stores that there are."""
        return [
            Path(path) for path in self.config.shared_stores if Path(path) != self.home.absolute()
        ]

    def settle_installing(
        self, pipeline: str | Path, choice: Choice, *, ask: Callable[[str], bool] | None
    ) -> None:
        """Decides for this run whether a missing vendor may be installed.

        Args:
            pipeline: As for `build`.
            choice: As for `build`.
            ask: Puts a yes-or-no question to the user; None: nobody can be asked.
        """
        self.may_install = False
        if ask is not None:
            choice = sample_choice(pipeline, choice)
            if self._takes_whole(pipeline, choice):
                plans = self._checkpoint_decision(choice, may_install=True).plans
            else:
                plans = self.plan(choice, may_install=True).plans
            if plans and plans[0].state == "installable":
                summaries = [plan.summary for plan in self.install_plans(plans[0].vendor)]
                self.may_install = ask("\n".join([*summaries, "Install now?"]))

    def best_installable(self) -> VendorSpec:
        """Returns the vendor that serves this machine best, installed or not.

        Raises:
            NoVendorError: None does; lists every reason.
        """
        decision = self.plan(may_install=True)
        if not decision.plans:
            raise NoVendorError(explain_rejections(decision), "sdkit-dispatch vendors list")
        return self.specs[decision.plans[0].vendor]

    def load(
        self,
        pipeline: str | Path = SAMPLE,
        choice: Choice | None = None,
        *,
        loras: Sequence[Lora] = (),
    ) -> LoadedPipeline | LoadedCheckpoint:
        """Prepares a pipeline for `generate`; engines are built when a request needs them.

        A checkpoint is taken by a vendor that needs no engines.

        Args:
            pipeline: As for `build`.
            choice: As for `build`.
            loras: As for `build`.

        Raises:
            NoVendorError: No vendor serves; lists every reason.
            PipelineError: The folder or checkpoint cannot be read.
        """
        choice = sample_choice(pipeline, choice or Choice())
        if self._takes_whole(pipeline, choice):
            checkpoint = self.read_checkpoint(pipeline)
            _refuse_loras(checkpoint, loras)
            return LoadedCheckpoint(
                checkpoint=checkpoint,
                plans=self._checkpoint_plans(choice),
                builder=self.builder(choice),
                workers=self.workers,
                make_request=partial(self.request, checkpoint, choice),
                report=self.report,
                is_strict=self.config.strict,
            )
        read, merged = self._merged(pipeline, loras)
        loaded = LoadedPipeline(
            pipeline=read,
            plans=self._plans(choice),
            builder=self.builder(choice),
            workers=self.workers,
            make_request=partial(self.request, read, choice),
            report=self.report,
            is_strict=self.config.strict,
            memory_budget_bytes=_bytes_of_mb(self.config.memory_budget_mb),
            machine_memory_bytes=self._processor.memory_bytes,
            loras=merged.loras if merged is not None else (),
        )
        if merged is not None:  # nobody removes the folder as long as it may be drawn from
            weakref.finalize(loaded, merged.close)
        return loaded

    def _merged(
        self, pipeline: str | Path, loras: Sequence[Lora]
    ) -> tuple[Pipeline, MergedPipeline | None]:
        """Reads a pipeline, with LoRAs in its weights if there are any."""
        read = self.read(pipeline)
        if not loras:
            return read, None
        from .lora.merged import merged_pipeline  # late: it needs onnx

        merged = merged_pipeline(self.store, read, loras, report=self.report)
        return read_pipeline(merged.folder, memo=self.store.memo), merged

    @contextmanager
    def _with_loras(
        self, pipeline: str | Path, loras: Sequence[Lora]
    ) -> Iterator[tuple[Pipeline, tuple[AppliedLora, ...]]]:
        """Gives what `_merged` does, which is in use until the end."""
        read, merged = self._merged(pipeline, loras)
        try:
            yield read, merged.loras if merged is not None else ()
        finally:
            if merged is not None:
                merged.close()

    def request(
        self,
        pipeline: Pipeline | Checkpoint,
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
        """Returns a request; what is not given comes from the profile, then from the pipeline.

        Raises:
            ConfigError: A value is out of range.
        """
        return complete_request(
            pipeline,
            load_profile(choice.profile or "default", home=self.home),
            prompt=prompt,
            negative_prompt=negative_prompt,
            width_px=width_px,
            height_px=height_px,
            steps=steps,
            guidance=guidance,
            seed=seed,
            batch=batch,
            scheduler=scheduler,
        )

    def _want(
        self,
        pipeline: str | Path | Pipeline,
        choice: Choice,
        width_px: int | None,
        height_px: int | None,
        batch: int | None,
    ) -> Wanted:
        """Returns what must be built for prompts of one chunk at this size."""
        read = pipeline if isinstance(pipeline, Pipeline) else self.read(pipeline)
        request = self.request(
            read, choice, prompt="", width_px=width_px, height_px=height_px, batch=batch
        )
        return wanted(read, request, token_chunks=1, memo=self.store.memo)

    def _plans(
        self, choice: Choice, *, devices: Sequence[Device] | None = None
    ) -> tuple[Plan, ...]:
        return serving(self.plan(choice, devices=devices), choice)

    def _checkpoint_plans(self, choice: Choice) -> tuple[Plan, ...]:
        require_leave(is_strict=self.config.strict, must_check=choice.must_check)
        return serving(self._checkpoint_decision(choice), choice)

    def _checkpoint_decision(self, choice: Choice, *, may_install: bool | None = None) -> Decision:
        """As `plan`, among the vendors that take a checkpoint; these count without being named.

        Raises:
            PipelineError: There is none.
        """
        takers = [spec.name for spec in self.specs.values() if spec.takes == "checkpoint"]
        names = [choice.vendor] if choice.vendor else takers
        if not names:
            raise PipelineError("no vendor takes a checkpoint", "give an exported ONNX pipeline")
        decisions = [
            self.plan(replace(choice, vendor=name), may_install=may_install) for name in names
        ]
        return Decision(
            plans=tuple(plan for one in decisions for plan in one.plans),
            rejections=tuple(
                no for one in decisions for no in one.rejections if no.vendor in takers
            ),
            advice=tuple(dict.fromkeys(text for one in decisions for text in one.advice)),
        )

    def builder(self, choice: Choice) -> Builder:
        """Returns what builds engines as `choice` asks."""
        reference = Reference(store=self.store, workers=self.workers, device=self._processor)
        tools = BuildTools(
            store=self.store,
            workers=self.workers,
            reference=reference,
            failures=Failures(self.home),
            must_check=choice.must_check,
            is_strict=self.config.strict,
            may_retry=choice.may_retry,
            parallel_builds=self.config.parallel_builds,
            quota_bytes=_bytes_of_mb(self.config.store_quota_mb),
            must_use_gpu=choice.must_use_gpu,
        )
        return Builder(tools, install=self._installer.install, precision=choice.precision)

    @property
    def _processor(self) -> Device:
        return next(device for device in self.devices if device.kind == "cpu")

    def install_plans(self, vendor: str) -> list[InstallPlan]:
        """Returns what installing a vendor fetches, with the reference that checks its engines.

        Raises:
            VendorEnvError: The requirements cannot be satisfied.
        """
        return self._installer.plans(self.specs[vendor], self.report)

    def suited(self, spec: VendorSpec) -> VendorSpec:
        """Returns a vendor with the build of its runtime that the driver here can serve."""
        return self._installer.suited(spec)

    @property
    def _installer(self) -> Installer:
        return Installer(
            home=self.home,
            workers=self.workers,
            specs=self.specs,
            devices=self.devices,
            may_install=self.may_install,
        )

    def close(self) -> None:
        """Ends all workers, and takes a temporary store away; twice is fine."""
        self.workers.close()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _refuse_loras(checkpoint: Checkpoint, loras: Sequence[Lora]) -> None:
    """Refuses LoRAs for a file whose weights we never see.

    Raises:
        ConfigError: There are some.
    """
    if loras:
        raise ConfigError(
            f"LoRAs are merged into an exported ONNX pipeline, and '{checkpoint.path}' is a "
            f"checkpoint that its vendor takes whole: '{loras[0].path}' cannot be added",
            "give the exported ONNX pipeline of that model with --pipeline",
        )


def _bytes_of_mb(size_mb: int | None) -> int | None:
    return None if size_mb is None else size_mb * 10**6
