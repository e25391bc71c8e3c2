"""All components of a pipeline with one plan, and the ladder of plans when one fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .build_tools import BuildTools
from .component_build import ComponentBuild, ComponentBuilder
from .contract import Plan, Precision, Rejection, Report, VendorSpec
from .errors import (
    CacheError,
    CompileError,
    DispatchError,
    NoVendorError,
    NumericError,
    RunError,
    VendorEnvError,
    WorkerError,
)
from .forecast import Forecast
from .lora import AppliedLora
from .store_cleaning import Removal, shrink
from .store_layout import UNWRITABLE, as_store_error
from .wanted import Wanted

log = logging.getLogger(__name__)

LADDER_ERRORS = (CompileError, NumericError, WorkerError, CacheError, RunError, VendorEnvError)
"""What makes the ladder take its next step; everything else concerns the user's request."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the ladder that did not serve."""

    vendor: str
    device: str
    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """Engines of all components for one plan, and the steps that were tried before it.

    Attributes:
        forecast: What building was expected to take; None if nothing had to be built.
        evicted: Engines that went afterwards, because the store was over its quota.
    """

    plan: Plan
    components: tuple[ComponentBuild, ...]
    steps: tuple[Step, ...] = ()
    forecast: Forecast | None = None
    evicted: tuple[Removal, ...] = ()
    checkpoint_sha256: str = ""
    """Of a checkpoint that the vendor takes as it is: there are no components then."""
    loras: tuple[AppliedLora, ...] = ()
    """What is in the weights, in order."""

    @property
    def is_hit(self) -> bool:
        """True if nothing was compiled."""
        return all(built.is_hit for built in self.components)

    @property
    def is_stored(self) -> bool:
        """False if an engine is gone with the process: the store cannot be written."""
        return all(built.is_stored for built in self.components)


class Builder:
    """Builds engines, or finds them in the store."""

    def __init__(
        self,
        tools: BuildTools,
        *,
        install: Callable[[VendorSpec, Report], None],
        precision: Precision | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            tools: The store, workers and settings.
            install: Makes a vendor's environment, or raises VendorEnvError if it may not.
            precision: What the user asked for; a vendor that is installed first is asked for it.
        """
        self.tools = tools
        self._install = install
        self._precision = precision

    def build(
        self,
        want: Wanted,
        plans: Sequence[Plan],
        report: Report,
        *,
        names: Sequence[str] | None = None,
    ) -> BuildResult:
        """Builds all components with the first plan that serves; walks down the ladder once.

        Args:
            want: What to build.
            plans: Best first.
            report: Told what is being done.
            names: Only these components.

        Raises:
            DispatchError: The only plan failed, or all did; or the first one if strict.
        """
        steps: list[Step] = []
        self.tools.store.let_go()
        for plan in plans:
            try:
                result = self._built(want, plan, report, names=names)
                return replace(result, steps=tuple(steps), evicted=self._evicted(result))
            except LADDER_ERRORS as error:
                if isinstance(error, CacheError) and error.concerns_store:
                    raise
                steps.append(failed_step(plan, error))
                if self.tools.is_strict or (len(plans) == 1 and not self.tools.must_use_gpu):
                    raise
                log.warning("%s on %s: %s", plan.vendor, plan.device.name, error.message)
        raise all_failed(steps, must_use_gpu=self.tools.must_use_gpu)

    def build_with(
        self, want: Wanted, plan: Plan, report: Report, *, names: Sequence[str] | None = None
    ) -> tuple[Plan, tuple[ComponentBuild, ...]]:
        """Builds all components with one plan; returns it as its vendor confirmed it.

        Raises:
            DispatchError: The vendor cannot be installed, or failed.
        """
        result = self._built(want, plan, report, names=names)
        return result.plan, result.components

    def _built(
        self, want: Wanted, plan: Plan, report: Report, *, names: Sequence[str] | None
    ) -> BuildResult:
        """Builds all components with one plan.

        Where the store cannot be written, it builds them in a temporary folder.

        Raises:
            DispatchError: The vendor cannot be installed, or failed.
        """
        plan = self.confirmed(plan, report)
        store = self.tools.store
        try:
            return self._attempt(want, plan, report, names or tuple(want.shapes))
        except OSError as error:
            reason = as_store_error(error, store.home)
            if error.errno not in UNWRITABLE or store.is_temporary:
                raise reason from error
        except CacheError as error:
            if not error.concerns_store:
                # What the vendor said of its target may be out of date: it is asked again.
                self.tools.workers.forget_answers(self.tools.workers.specs[plan.vendor])
            if not error.concerns_store or store.is_temporary:
                raise
            reason = error
        store.retreat(reason.message)
        try:
            return self._attempt(want, plan, report, names or tuple(want.shapes))
        except OSError as error:
            raise reason from error

    def _attempt(
        self, want: Wanted, plan: Plan, report: Report, names: Sequence[str]
    ) -> BuildResult:
        with ComponentBuilder(self.tools, want, plan, report) as bench:
            expected = bench.preflight(names)
            components = tuple(bench.build(name) for name in names)
        return BuildResult(plan=plan, components=components, forecast=expected)

    def _evicted(self, result: BuildResult) -> tuple[Removal, ...]:
        """Keeps the store within its quota after something was added to it."""
        store, limit_bytes = self.tools.store, self.tools.quota_bytes
        if limit_bytes is None or result.is_hit or store.is_temporary:
            return ()
        removals = shrink(store, limit_bytes=limit_bytes)
        for one in removals:
            what = f"the engine {one.key[:12]} ({one.component} for {one.vendor})"
            if one.kept:
                log.info("%s stays: %s", what, one.kept)
            else:
                log.warning("%s was evicted: %s", what, one.reason)
        return tuple(one for one in removals if not one.kept)

    def confirmed(self, plan: Plan, report: Report) -> Plan:
        """Returns the plan as its vendor confirms it, which is installed first if it is missing.

        Raises:
            VendorEnvError: It may not be installed, cannot be, or does not serve after all.
        """
        if plan.state != "installable":
            return plan
        workers = self.tools.workers
        spec = workers.specs[plan.vendor]
        self._install(spec, report)
        workers.forget(spec)
        confirmed = workers.probe(spec, plan.device, self._precision, plan.options)
        if isinstance(confirmed, Rejection):
            raise VendorEnvError(
                f"the vendor '{spec.name}' was installed, but {confirmed.reason}", confirmed.hint
            )
        return confirmed


def failed_step(plan: Plan, error: DispatchError) -> Step:
    """Returns the step of the ladder that `error` ended."""
    return Step(
        vendor=plan.vendor, device=plan.device.id, kind=type(error).__name__, reason=error.message
    )


def all_failed(steps: Sequence[Step], *, must_use_gpu: bool = False) -> DispatchError:
    """Returns the error that lists every step.

    Without any environment it is a NoVendorError, and where only a GPU would have done.
    """
    lines = "".join(f"\n  - {step.vendor} on {step.device}: {step.reason}" for step in steps)
    if all(step.kind == VendorEnvError.__name__ for step in steps):
        names = " and ".join(dict.fromkeys(step.vendor for step in steps))
        return NoVendorError(
            f"no vendor is ready to run this here:{lines}",
            f"install one of {names}: sdkit-dispatch vendors install {steps[0].vendor}",
        )
    if must_use_gpu:
        return NoVendorError(
            f"no GPU serves, and --require-gpu forbids the CPU:{lines}", "sdkit-dispatch doctor"
        )
    return CompileError(
        f"none of {len(steps)} ways to run this pipeline here worked:{lines}",
        "sdkit-dispatch doctor",
    )
