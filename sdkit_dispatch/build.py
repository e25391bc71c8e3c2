"""All components of a pipeline with one plan, and the ladder of plans when one fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .component_build import (
    BuildTools,
    ComponentBuild,
    ComponentBuilder,
    Wanted,
    as_store_error,
)
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
    """Engines of all components for one plan, and the steps that were tried before it."""

    plan: Plan
    components: tuple[ComponentBuild, ...]
    steps: tuple[Step, ...] = ()
    checkpoint_sha256: str = ""
    """Of a checkpoint that the vendor takes as it is: there are no components then."""

    @property
    def is_hit(self) -> bool:
        """True if nothing was compiled."""
        return all(built.is_hit for built in self.components)


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

    def build(self, want: Wanted, plans: Sequence[Plan], report: Report) -> BuildResult:
        """Builds all components with the first plan that serves; walks down the ladder once.

        Raises:
            DispatchError: The only plan failed, or all did; or the first one if strict.
        """
        steps: list[Step] = []
        for plan in plans:
            try:
                confirmed, components = self.build_with(want, plan, report)
                return BuildResult(plan=confirmed, components=components, steps=tuple(steps))
            except LADDER_ERRORS as error:
                if isinstance(error, CacheError) and error.concerns_store:
                    raise
                steps.append(failed_step(plan, error))
                if self.tools.is_strict or len(plans) == 1:
                    raise
                log.warning("%s on %s: %s", plan.vendor, plan.device.name, error.message)
        raise all_failed(steps)

    def build_with(
        self, want: Wanted, plan: Plan, report: Report
    ) -> tuple[Plan, tuple[ComponentBuild, ...]]:
        """Builds all components with one plan; returns it as its vendor confirmed it.

        Raises:
            DispatchError: The vendor cannot be installed, or failed.
        """
        plan = self.confirmed(plan, report)
        try:
            with ComponentBuilder(self.tools, want, plan, report) as bench:
                return plan, tuple(bench.build(name) for name in want.shapes)
        except OSError as error:
            raise as_store_error(error, self.tools.store.home) from error
        except CacheError:
            # What the vendor said of its target may be out of date: it is asked again next time.
            self.tools.workers.forget_answers(self.tools.workers.specs[plan.vendor])
            raise

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


def all_failed(steps: Sequence[Step]) -> DispatchError:
    """Returns the error that lists every step; without any environment it is a NoVendorError."""
    lines = "".join(f"\n  - {step.vendor} on {step.device}: {step.reason}" for step in steps)
    if all(step.kind == VendorEnvError.__name__ for step in steps):
        names = " and ".join(dict.fromkeys(step.vendor for step in steps))
        return NoVendorError(
            f"no vendor is ready to run this here:{lines}",
            f"install one of {names}: sdkit-dispatch vendors install {steps[0].vendor}",
        )
    return CompileError(
        f"none of {len(steps)} ways to run this pipeline here worked:{lines}",
        "sdkit-dispatch doctor",
    )
