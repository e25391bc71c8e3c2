"""One component: its request, its engine from the store or from the vendor, and the gate."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from . import graph
from .build_slots import Occupant, build_slot, first_occupant
from .cache import EngineStore, LaterVerdict, Manifest, StoredFile, Verdict, new_manifest
from .check import SAFER, Recording, judge, limits_for, require_passed
from .contract import (
    BuildRequest,
    Device,
    Engine,
    GenerateRequest,
    Plan,
    Progress,
    Rejection,
    Report,
    Shapes,
    VendorSpec,
)
from .diffusion.shapes import component_shapes, unet_multiple
from .errors import (
    CacheError,
    CompileError,
    DispatchError,
    NumericError,
    RunError,
    VendorEnvError,
    WorkerError,
)
from .failures import Failures
from .forecast import Forecast, forecast
from .graph.size_ranges import usual_shapes
from .pipeline_files import Pipeline, component_digests
from .reference import Reference
from .siblings import known_files, remember_files, siblings_of
from .store_cleaning import folder_bytes
from .store_layout import store_error
from .store_use import record_use
from .worker_client import WorkerClient
from .workers import Workers

log = logging.getLogger(__name__)

LEAST_ROOM_BYTES = 1 << 20
"""With less than this a disk is full while a build is under way: a vendor that wanted to write a
larger piece failed, and left what it had written."""
REMEMBERED_ERRORS = (CompileError, NumericError, WorkerError, CacheError, RunError)
UNCHECKED = ("unchecked", "unchecked-target")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to build engines for: a pipeline and the shapes that a request needs."""

    pipeline: Pipeline
    request: GenerateRequest
    token_chunks: int
    shapes: Mapping[str, Shapes]
    digests: Mapping[str, tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class ComponentBuild:
    """The engine of one component, and how it was come by.

    Attributes:
        is_hit: It was in the store: nothing was compiled.
        damage: What was wrong with the stored engine that this one replaced; usually empty.
        elapsed_s: Seconds that this took now; `manifest.build_s` is what building it took.
        is_stored: False if it is gone with the process: the store cannot be written.
    """

    component: str
    engine: Engine
    manifest: Manifest
    is_hit: bool
    elapsed_s: float
    damage: str = ""
    is_stored: bool = True


@dataclass(frozen=True, kw_only=True)
class BuildTools:
    """What every build of a run shares.

    Attributes:
        must_check: False leaves engines unchecked, and their manifests say so.
        is_strict: A failure is an error: no other plan, and no safer precision.
        may_retry: What failed before is tried again.
        parallel_builds: How many engines may be compiled on this host at a time.
        quota_bytes: What the engines may take together; None for no limit.
        must_use_gpu: The plans name GPUs only; when they failed, nothing serves.
    """

    store: EngineStore
    workers: Workers
    reference: Reference
    failures: Failures
    must_check: bool = True
    is_strict: bool = False
    may_retry: bool = False
    parallel_builds: int = 1
    quota_bytes: int | None = None
    must_use_gpu: bool = False


def wanted(
    pipeline: Pipeline, request: GenerateRequest, *, token_chunks: int, memo: Path
) -> Wanted:
    """Returns what must be built so that `request` can run.

    Raises:
        ConfigError: The size does not divide.
        PipelineError: A file cannot be read, or a graph is fixed at another shape.
    """
    shapes = component_shapes(pipeline, request, token_chunks=token_chunks)
    digests = {name: component_digests(pipeline.components[name], memo=memo) for name in shapes}
    return Wanted(
        pipeline=pipeline,
        request=request,
        token_chunks=token_chunks,
        shapes=shapes,
        digests=digests,
    )


def build_request(plan: Plan, spec: VendorSpec, want: Wanted, component: str) -> BuildRequest:
    """Returns the request whose key names the engine.

    Raises:
        CompileError: The sizes are outside all ranges that the plan's engine would serve.
    """
    graph_digest, weights_digest = want.digests[component]
    shapes: Shapes | None = want.shapes[component]
    rows = plan.ranges.get(component)
    if rows:
        shapes = usual_shapes(want.shapes[component], rows)
    if shapes is not None and rows and component == "unet":
        _require_even(want, plan, shapes)
    if shapes is None:
        raise CompileError(
            f"{component}: {_written(want.shapes[component])} is outside the size ranges "
            f"{'; '.join(_written(row) for row in rows or ())} of options.{plan.vendor}.profiles",
            "widen a range, or remove it: then an engine is built for each size",
        )
    return BuildRequest(
        vendor=plan.vendor,
        revision=spec.revision,
        runtime=plan.runtime,
        target=plan.target,
        component=component,
        graph_digest=graph_digest,
        weights_digest=weights_digest,
        precision=plan.precision,
        shapes=shapes,
        options=plan.options,
        passes=graph.REVISION,
    )


def _require_even(want: Wanted, plan: Plan, usual: Shapes) -> None:
    """Refuses sizes that only a graph made for them computes (`graph.upsampling`).

    Raises:
        CompileError: A side does not halve evenly; an engine of a range would not run.
    """
    multiple = unet_multiple(want.pipeline)
    for shapes in (want.shapes["unet"], usual):
        if any(side % multiple for side in shapes["sample"][2:]):
            raise CompileError(
                f"unet: sample {list(shapes['sample'])} has sides that do not divide by "
                f"{multiple}, and the engine of the size ranges of options.{plan.vendor}.profiles "
                "serves no others",
                "remove the range of unet: then an engine is built for each size",
            )


class ComponentBuilder:
    """Builds the components of one plan; its checking worker lives as long. A context manager."""

    def __init__(self, tools: BuildTools, want: Wanted, plan: Plan, report: Report) -> None:
        self._tools = tools
        self._want = want
        self._plan = plan
        self._spec = tools.workers.specs[plan.vendor]
        self._report = report
        self._stack = ExitStack()
        self._checker: WorkerClient | None = None
        self._recorded: tuple[Recording | None] | None = None  # None: not asked for yet

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        if isinstance(error, DispatchError):  # a device lost in a process is lost to all of it
            self._tools.workers.stop(self._spec)

    def preflight(self, names: Iterable[str]) -> Forecast | None:
        """Says what will be built and what it takes; None if nothing need be built.

        Raises:
            CacheError: The disk is too small; with the sizes.
        """
        store, parts = self._tools.store, self._want.pipeline.components
        found = forecast(
            store,
            self._spec,
            [self.current_request(name) for name in names],
            {name: part.weights_bytes for name, part in parts.items()},
        )
        if found is None:
            return None
        self._report(Progress(phase=str(found)))
        if found.is_short_of_disk:
            raise store_error(f"the disk of '{store.home}' is too full: {found}")
        if found.is_short_of_memory:
            log.warning("memory is short: %s", found)
        return found

    def build(self, name: str) -> ComponentBuild:
        """Builds one component; at the next safer precision if the gate refuses it.

        Raises:
            DispatchError: The vendor failed, now or before.
        """
        plan = self._plan
        earlier: tuple[Verdict, ...] = ()
        while True:
            request = build_request(plan, self._spec, self._want, name)
            try:
                with self._remembering(request, plan.device):
                    return self._engine(request, plan.device, earlier)
            except NumericError as error:
                safer = None if earlier or self._tools.is_strict else self._safer(plan)
                if safer is None:
                    raise
                log.warning("%s; building it again in %s", error.message, safer.precision)
                reason = f"{plan.precision}: {error.message}"
                earlier = (Verdict(status="failed", reason=reason),)
                plan = safer

    def current_request(self, name: str) -> BuildRequest:
        """Returns the request that `build` would look up: the safer one where the first failed."""
        request = build_request(self._plan, self._spec, self._want, name)
        failure = self._tools.failures.recall(self._asked(request), self._plan.device)
        if failure is not None and failure.kind == NumericError.__name__:
            safer = self._safer(self._plan)
            if safer is not None:
                return build_request(safer, self._spec, self._want, name)
        return request

    def _asked(self, request: BuildRequest) -> BuildRequest:
        """As `asked_request`, before there is an engine."""
        return replace(request, shapes=self._want.shapes[request.component])

    def _safer(self, plan: Plan) -> Plan | None:
        precision = SAFER.get(plan.precision)
        if precision is None:
            return None
        again = self._tools.workers.probe(self._spec, plan.device, precision, plan.options)
        return None if isinstance(again, Rejection) else again

    @contextmanager
    def _remembering(self, request: BuildRequest, device: Device) -> Iterator[None]:
        failures = self._tools.failures
        request = self._asked(request)
        if self._tools.may_retry:
            failures.forget(request, device)
        remembered = failures.recall(request, device)
        if remembered is not None:
            raise remembered.as_error()
        try:
            yield
        except REMEMBERED_ERRORS as error:
            if getattr(error, "concerns_store", False):
                raise
            if not getattr(error, "was_killed", False):
                failures.remember(request, device, error)
            raise

    @contextmanager
    def _naming_a_full_disk(self, request: BuildRequest, shop: Path) -> Iterator[None]:
        """Names a full disk, which vendors report in words of their own, or not at all.

        Raises:
            CacheError: With the sizes. It is no failure of the vendor, and is not remembered.
        """
        try:
            yield
        except REMEMBERED_ERRORS as error:
            home = self._tools.store.home
            needed_bytes = self._want.pipeline.components[request.component].weights_bytes
            free_bytes = shutil.disk_usage(home).free
            if free_bytes < max(LEAST_ROOM_BYTES, needed_bytes - folder_bytes(shop)):
                raise store_error(
                    f"the disk of '{home}' is full: building {request.component} needs about "
                    f"{needed_bytes / 1e6:.1f} MB, {free_bytes / 1e6:.1f} MB are free: "
                    f"{error.message}"
                ) from error
            raise

    def _engine(
        self, request: BuildRequest, device: Device, earlier: tuple[Verdict, ...]
    ) -> ComponentBuild:
        started_s = time.monotonic()
        found, damage = self._usable(request, device)
        if found is not None:
            return self._hit(found, started_s)

        def wait() -> None:
            words = f"wait: another process builds {request.component}"
            other = first_occupant(self._tools.store.locks)
            self._report(Progress(phase=words if other is None else f"{words} ({other})"))

        with self._tools.store.locked(request.key, while_waiting=wait):
            # Another process may have built it meanwhile.
            found, damage = self._usable(request, device)
            if found is not None:
                return self._hit(found, started_s)
            if damage:
                log.warning("%s; it is built again", damage)
            engine, manifest = self._make(request, device, earlier)
        return ComponentBuild(
            component=request.component,
            engine=engine,
            manifest=manifest,
            is_hit=False,
            elapsed_s=time.monotonic() - started_s,
            damage=damage,
            is_stored=not self._tools.store.is_temporary,
        )

    def _usable(
        self, request: BuildRequest, device: Device
    ) -> tuple[tuple[Engine, Manifest] | None, str]:
        """Returns the stored engine once it passed the gate, or what is wrong with it.

        One that its runtime refuses when the gate opens it is as good as damaged: it is built
        again, and only if the new one is refused too does the vendor fail.

        Raises:
            NumericError: It computes wrong numbers.
        """
        found, damage = self._found(request)
        if found is None:
            return None, damage
        try:
            return self._gated(found, device), ""
        except CacheError as error:
            if error.concerns_store:
                raise
            return None, error.message

    def _found(self, request: BuildRequest) -> tuple[tuple[Engine, Manifest] | None, str]:
        """Returns the stored engine, or what is wrong with it."""
        onnx = self._want.pipeline.components[request.component].onnx
        try:
            found = self._tools.store.look_up(request, onnx=onnx)
            return (found and (self._opened(found[0]), found[1])), ""
        except CacheError as error:
            return None, error.message

    def _opened(self, engine: Engine) -> Engine:
        """Says at which shapes an engine that serves a range is to be opened."""
        shapes = self._want.shapes[engine.request.component]
        return engine if shapes == engine.request.shapes else replace(engine, opened_at=shapes)

    def _hit(self, found: tuple[Engine, Manifest], started_s: float) -> ComponentBuild:
        engine, manifest = found
        store = self._tools.store
        is_lost = store.is_temporary and Path(engine.folder).is_relative_to(store.home)
        return ComponentBuild(
            component=engine.request.component,
            engine=engine,
            manifest=manifest,
            is_hit=True,
            elapsed_s=time.monotonic() - started_s,
            is_stored=not is_lost,
        )

    def _gated(self, found: tuple[Engine, Manifest], device: Device) -> tuple[Engine, Manifest]:
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
            verdict, facts = self._checked(engine, device)
            later = LaterVerdict(verdict=verdict, facts=facts)
            store.keep_later_verdict(engine.key, where, later)
        require_passed(later.verdict, engine.request.component, engine.request.vendor)
        return engine, replace(manifest, verdict=later.verdict, facts=later.facts)

    def _make(
        self, request: BuildRequest, device: Device, earlier: tuple[Verdict, ...]
    ) -> tuple[Engine, Manifest]:
        """Compiles, checks and publishes; the caller holds the key's lock."""
        with ExitStack() as borrowed:
            return self._made(request, device, earlier, borrowed)

    def _made(
        self,
        request: BuildRequest,
        device: Device,
        earlier: tuple[Verdict, ...],
        borrowed: ExitStack,
    ) -> tuple[Engine, Manifest]:
        store, onnx = self._tools.store, self._want.pipeline.components[request.component].onnx
        with (
            self._slot(request),
            store.workshop(request.key) as shop,
            self._naming_a_full_disk(request, shop),
        ):
            started_s = time.monotonic()
            out = shop / "engine"
            out.mkdir()
            self._report(Progress(phase=f"{request.vendor}: compile {request.component}"))
            client = self._tools.workers.client(self._spec)
            siblings = siblings_of(store, request, onnx=onnx)
            borrowed.callback(store.let_go, [sibling.key for sibling in siblings])
            known = known_files(store, siblings)
            client.compile(
                request, onnx, out, device=device, report=self._named(request), siblings=siblings
            )
            sealed_ns = time.time_ns()
            files = store.seal(out, known)
            engine = self._opened(
                Engine(key=request.key, request=request, folder=str(out), onnx=str(onnx))
            )
            verdict, facts = self._checked(engine, device)
            require_passed(verdict, request.component, request.vendor)
            _require_unchanged(out, files)
            manifest = replace(
                new_manifest(request, files, verdict=verdict, started_s=started_s),
                facts=facts,
                earlier=earlier,
            )
            store.publish(out, manifest)
        record_use(store.memo, request.key, onnx=onnx)
        folder = store.folder(request.key)
        remember_files(store, files, folder, siblings=siblings, sealed_ns=sealed_ns)
        return replace(engine, folder=str(folder)), manifest

    def _slot(self, request: BuildRequest) -> AbstractContextManager[None]:
        """Waits for the other builds of this host, and says for which."""

        def wait(other: Occupant | None) -> None:
            words = "" if other is None else f": {other}"
            self._report(Progress(phase=f"wait for another build on this machine{words}"))

        return build_slot(
            self._tools.store.locks,
            f"{request.component} for {request.vendor}",
            count=self._tools.parallel_builds,
            while_waiting=wait,
        )

    def _checked(self, engine: Engine, device: Device) -> tuple[Verdict, Mapping[str, str]]:
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

    def _named(self, request: BuildRequest) -> Report:
        def report(progress: Progress) -> None:
            self._report(replace(progress, phase=f"{request.vendor}: {progress.phase}"))

        return report


def place_of(device: Device) -> str:
    """Returns what a verdict is valid for: the device and its driver.

    An id alone is a slot ("pci:0000:03:00.0"), or "cpu" on every machine: another card may be put
    into it, and machines share stores.
    """
    parts = (device.id, device.pci_id, device.arch, device.name, device.driver)
    return ", ".join(part for part in parts if part)


def _place_of_check(engine: Engine, device: Device) -> str:
    """As `place_of`; for an engine that serves a range of sizes, a verdict is of one of them."""
    size = "" if engine.opened_at is None else f", at {_written(engine.opened_at)}"
    return f"{place_of(device)}{size}"


def asked_request(engine: Engine) -> BuildRequest:
    """Returns what failures of an engine are remembered under: another size of it may serve."""
    return replace(engine.request, shapes=engine.shapes)


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


def _written(sizes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(values)}" for name, values in sizes.items())


def _require_unchanged(folder: Path, files: Mapping[str, StoredFile]) -> None:
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
