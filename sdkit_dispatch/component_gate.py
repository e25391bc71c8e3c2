"""The numeric gate of one plan: opens engines in a fresh process, and compares their outputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from .build_tools import BuildTools
from .cache import LaterVerdict, Manifest, StoredFile, Verdict
from .check import Recording, judge, limits_for, require_passed
from .contract import BuildRequest, Device, Engine, Progress, Report, VendorSpec
from .errors import CacheError, RunError, VendorEnvError
from .wanted import Wanted, written_sizes
from .worker_client import WorkerClient

log = logging.getLogger(__name__)

UNCHECKED = ("unchecked", "unchecked-target")


class ComponentGate:
    """Checks the engines of one plan; its worker and the recording are had once."""

    def __init__(self, tools: BuildTools, want: Wanted, spec: VendorSpec, report: Report) -> None:
        self._tools = tools
        self._want = want
        self._spec = spec
        self._report = report
        self._stack = ExitStack()
        self._checker: WorkerClient | None = None
        self._recorded: tuple[Recording | None] | None = None  # None: not asked for yet

    def close(self) -> None:
        """Ends its worker."""
        self._stack.close()

    def admitted(self, found: tuple[Engine, Manifest], device: Device) -> tuple[Engine, Manifest]:
        """Runs the gate on a stored engine that has not passed it, where that can be done now.

        It was built for a device elsewhere, with --no-check, or without a reference at hand; or it
        was checked on another device or driver, which says nothing of this one. The entry is not
        modified; the verdict is kept beside it.

        Raises:
            NumericError: It computes wrong numbers.
        """
        engine, manifest = found
        where, known = _place_of_check(engine, device), manifest.verdict
        is_due = known.status in UNCHECKED or known.device != where
        if device.is_absent or not is_due or not self._tools.must_check:
            return found
        store = self._tools.store
        later = store.later_verdict(engine.key, where)
        if later is None or (later.verdict.status == "failed" and self._tools.may_retry):
            if self._recording() is None:
                if known.status in UNCHECKED:
                    return found
                reason = f"checked on {known.device or 'an unknown device'} only"
                return engine, replace(manifest, verdict=Verdict(status="unchecked", reason=reason))
            verdict, facts = self.check(engine, device)
            later = LaterVerdict(verdict=verdict, facts=facts)
            store.keep_later_verdict(engine.key, where, later)
        require_passed(later.verdict, engine.request.component, engine.request.vendor)
        return engine, replace(manifest, verdict=later.verdict, facts=later.facts)

    def check(self, engine: Engine, device: Device) -> tuple[Verdict, Mapping[str, str]]:
        """Opens the engine in a fresh process and compares its outputs with the reference's."""
        component, vendor = engine.request.component, engine.request.vendor
        if device.is_absent:
            reason = f"built for {device.arch}; checked when such a device first loads it"
            return Verdict(status="unchecked-target", reason=reason), {}
        self._report(Progress(phase=f"{vendor}: check {component}"))
        recording = self._recording() if self._tools.must_check else None
        if self._checker is None:
            self._checker = self._stack.enter_context(self._tools.workers.fresh(self._spec))
        session = self._checker.load(engine, device)
        try:
            require_as_planned(engine.request, session.facts)
            if recording is None:
                missing = self._tools.reference.missing
                reason = missing if self._tools.must_check else "built with --no-check"
                return Verdict(status="unchecked", reason=reason), session.facts
            cases = recording.cases.get(component, ())
            outputs = [session.run(case.feeds) for case in cases]
        finally:
            session.close()
        limits = limits_for(
            engine.request.precision, self._want.pipeline.components[component].dtype
        )
        verdict = judge(cases, outputs, limits, reference=recording.reference)
        return replace(verdict, device=_place_of_check(engine, device)), session.facts

    def _recording(self) -> Recording | None:
        """Returns the reference's recording; asked for once, also if it cannot be had."""
        if self._recorded is None:
            recording = self._tools.reference.recording(
                self._want.pipeline,
                self._want.request,
                shapes=self._want.shapes,
                digests=self._want.digests,
                token_chunks=self._want.token_chunks,
                report=self._report,
                is_for_a_build=not self._tools.store.is_temporary,
            )
            self._recorded = (recording,)
            if recording is None and self._tools.is_strict:
                raise VendorEnvError(
                    f"engines cannot be checked: {self._tools.reference.missing}",
                    "sdkit-dispatch vendors install cpu, or build without --strict",
                )
            if recording is None:
                log.warning("engines stay unchecked: %s", self._tools.reference.missing)
        return self._recorded[0]


def place_of(device: Device) -> str:
    """Returns what a verdict is valid for: the device and its driver.

    An id alone is a slot ("pci:0000:03:00.0"), or "cpu" on every machine: another card may be put
    into it, and machines share stores.
    """
    parts = (device.id, device.pci_id, device.arch, device.name, device.driver)
    return ", ".join(part for part in parts if part)


def _place_of_check(engine: Engine, device: Device) -> str:
    """As `place_of`; for an engine that serves a range of sizes, a verdict is of one of them."""
    size = "" if engine.opened_at is None else f", at {written_sizes(engine.opened_at)}"
    return f"{place_of(device)}{size}"


def require_as_planned(request: BuildRequest, facts: Mapping[str, str]) -> None:
    """Refuses a session that says that it computes in another precision than was planned.

    Raises:
        RunError: With both.
    """
    runs = facts.get("precision", request.precision)
    if runs != request.precision:
        raise RunError(
            f"{request.component} was planned in {request.precision}, but {request.vendor} runs "
            f"it in {runs}",
            f"sdkit-dispatch build --precision {runs}",
        )


def require_unchanged(folder: Path, files: Mapping[str, StoredFile]) -> None:
    """Refuses an engine that its own vendor wrote to while it was loaded and run.

    Raises:
        CacheError: Names the file.
    """
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    changed = there ^ set(files) | {
        name
        for name, before in files.items()
        if name in there and (folder / name).stat().st_size != before.size_bytes
    }
    if changed:
        raise CacheError(f"the vendor changed the engine while it ran: '{min(changed)}'")
