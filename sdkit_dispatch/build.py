"""Plan + component -> BuildRequest -> Engine, and the ladder of plans when one fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from .cache import EngineStore, Manifest, StoredFile, Verdict, new_manifest
from .check import SAFER, Recording, gate_precision, judge, require_passed
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
from .diffusion.shapes import component_shapes
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
from .pipeline_files import Pipeline, component_digests
from .reference import Reference
from .worker_client import WorkerClient
from .workers import Workers

log = logging.getLogger(__name__)

LADDER_ERRORS = (CompileError, NumericError, WorkerError, CacheError, RunError, VendorEnvError)
"""What makes the ladder take its next step; everything else concerns the user's request."""
REMEMBERED_ERRORS = (CompileError, NumericError, WorkerError, RunError)


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
    """

    component: str
    engine: Engine
    manifest: Manifest
    is_hit: bool
    elapsed_s: float
    damage: str = ""


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

    @property
    def is_hit(self) -> bool:
        """True if nothing was compiled."""
        return all(built.is_hit for built in self.components)


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
    """Returns the request whose key names the engine."""
    graph_digest, weights_digest = want.digests[component]
    return BuildRequest(
        vendor=plan.vendor,
        revision=spec.revision,
        runtime=plan.runtime,
        target=plan.target,
        component=component,
        graph_digest=graph_digest,
        weights_digest=weights_digest,
        precision=plan.precision,
        shapes=want.shapes[component],
        options=plan.options,
    )


class Builder:
    """Builds engines, or finds them in the store."""

    def __init__(
        self,
        *,
        store: EngineStore,
        workers: Workers,
        reference: Reference,
        install: Callable[[VendorSpec, Report], None],
        must_check: bool = True,
        is_strict: bool = False,
        may_retry: bool = False,
    ) -> None:
        """Nothing is started yet.

        Args:
            store: Where engines are kept.
            workers: Who builds them.
            reference: What they are checked against.
            install: Makes a vendor's environment, or raises VendorEnvError if it may not.
            must_check: False leaves engines unchecked, and their manifests say so.
            is_strict: A failure is an error, not a step.
            may_retry: What failed before is tried again.
        """
        self.store = store
        self.failures = Failures(store.home)
        self._workers = workers
        self._reference = reference
        self._install = install
        self._must_check = must_check
        self._is_strict = is_strict
        self._may_retry = may_retry

    def build(self, want: Wanted, plans: Sequence[Plan], report: Report) -> BuildResult:
        """Builds all components with the first plan that serves; walks down the ladder once.

        Raises:
            DispatchError: The only plan failed, or all did; or the first one with `is_strict`.
        """
        steps: list[Step] = []
        for index, plan in enumerate(plans):
            try:
                return BuildResult(
                    plan=plan,
                    components=self.build_with(want, plan, report),
                    steps=tuple(steps),
                )
            except LADDER_ERRORS as error:
                steps.append(failed_step(plan, error))
                if self._is_strict or len(plans) == 1:
                    raise
                if index + 1 == len(plans):
                    raise _all_failed(steps) from error
                log.warning("%s on %s: %s", plan.vendor, plan.device.name, error.message)
        raise AssertionError("a decision has at least one plan")

    def build_with(self, want: Wanted, plan: Plan, report: Report) -> tuple[ComponentBuild, ...]:
        """Builds all components with one plan."""
        spec = self._workers.specs[plan.vendor]
        if plan.state == "installable":
            plan = self._installed(spec, plan, report)
        with ExitStack() as stack:
            bench = _Bench(self, want, plan, spec, report, stack)
            return tuple(bench.component(name) for name in want.shapes)

    def _installed(self, spec: VendorSpec, plan: Plan, report: Report) -> Plan:
        """Installs the vendor and confirms the plan with its real runtime."""
        self._install(spec, report)
        self._workers.forget(spec)
        confirmed = self._workers.probe(spec, plan.device, plan.precision, plan.options)
        if isinstance(confirmed, Rejection):
            raise VendorEnvError(
                f"the vendor '{spec.name}' was installed, but {confirmed.reason}", confirmed.hint
            )
        return confirmed


class _Bench:
    """One build of all components with one plan; its checking worker lives as long."""

    def __init__(
        self,
        builder: Builder,
        want: Wanted,
        plan: Plan,
        spec: VendorSpec,
        report: Report,
        stack: ExitStack,
    ) -> None:
        self._builder = builder
        self._want = want
        self._plan = plan
        self._spec = spec
        self._report = report
        self._stack = stack
        self._checker: WorkerClient | None = None

    def component(self, name: str) -> ComponentBuild:
        """Builds one component; at the next safer precision if the gate refuses it."""
        plan = self._plan
        earlier: tuple[Verdict, ...] = ()
        while True:
            request = build_request(plan, self._spec, self._want, name)
            try:
                with self._remembering(request, plan.device):
                    return self._engine(request, plan.device, earlier)
            except NumericError as error:
                safer = SAFER.get(plan.precision)
                if safer is None or earlier:
                    raise
                again = self._builder._workers.probe(self._spec, plan.device, safer, plan.options)
                if isinstance(again, Rejection):
                    raise
                log.warning("%s; building it again in %s", error.message, safer)
                earlier = (Verdict(status="failed", reason=f"{plan.precision}: {error.message}"),)
                plan = again

    @contextmanager
    def _remembering(self, request: BuildRequest, device: Device) -> Iterator[None]:
        failures = self._builder.failures
        if self._builder._may_retry:
            failures.forget(request, device)
        remembered = failures.recall(request, device)
        if remembered is not None:
            raise remembered.as_error()
        try:
            yield
        except REMEMBERED_ERRORS as error:
            if not getattr(error, "was_killed", False):
                failures.remember(request, device, error)
            raise

    def _engine(
        self, request: BuildRequest, device: Device, earlier: tuple[Verdict, ...]
    ) -> ComponentBuild:
        started_s = time.monotonic()
        found, damage = self._found(request)
        if found is not None:
            return self._hit(found, started_s)

        def wait() -> None:
            self._report(Progress(phase=f"wait: another process builds {request.component}"))

        store = self._builder.store
        with store.locked(request.key, while_waiting=wait):
            found, damage = self._found(request)  # another process may have built it meanwhile
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
        )

    def _found(self, request: BuildRequest) -> tuple[tuple[Engine, Manifest] | None, str]:
        """Returns the stored engine, or what is wrong with it."""
        onnx = self._want.pipeline.components[request.component].onnx
        try:
            found = self._builder.store.look_up(request, onnx=onnx)
        except CacheError as error:
            return None, error.message
        if found is not None and self._can_check and found[1].verdict.status == "unchecked":
            return None, ""  # it was built with --no-check, or without a reference at hand
        return found, ""

    @property
    def _can_check(self) -> bool:
        return self._builder._must_check and self._builder._reference.is_available

    @staticmethod
    def _hit(found: tuple[Engine, Manifest], started_s: float) -> ComponentBuild:
        engine, manifest = found
        return ComponentBuild(
            component=engine.request.component,
            engine=engine,
            manifest=manifest,
            is_hit=True,
            elapsed_s=time.monotonic() - started_s,
        )

    def _make(
        self, request: BuildRequest, device: Device, earlier: tuple[Verdict, ...]
    ) -> tuple[Engine, Manifest]:
        """Compiles, checks and publishes; the caller holds the key's lock."""
        store, onnx = self._builder.store, self._want.pipeline.components[request.component].onnx
        started_s = time.monotonic()
        with store.workshop(request.key) as shop:
            out = shop / "engine"
            out.mkdir()
            self._report(Progress(phase=f"{request.vendor}: compile {request.component}"))
            client = self._builder._workers.client(self._spec)
            client.compile(request, onnx, out, device=device, report=self._named(request))
            files = store.seal(out)
            engine = Engine(key=request.key, request=request, folder=str(out), onnx=str(onnx))
            verdict, facts = self._checked(engine, device)
            require_passed(verdict, request.component, request.vendor)
            _require_unchanged(store, out, files)
            manifest = replace(
                new_manifest(request, files, verdict=verdict, started_s=started_s),
                facts=facts,
                earlier=earlier,
            )
            store.publish(out, manifest)
        return replace(engine, folder=str(store.folder(request.key))), manifest

    def _checked(self, engine: Engine, device: Device) -> tuple[Verdict, Mapping[str, str]]:
        """Opens the engine in a fresh process and compares its outputs with the reference's."""
        component = engine.request.component
        self._report(Progress(phase=f"{engine.request.vendor}: check {component}"))
        recording = self._recording() if self._builder._must_check else None
        if self._checker is None:
            self._checker = self._stack.enter_context(self._builder._workers.fresh(self._spec))
        session = self._checker.load(engine, device)
        try:
            if recording is None:
                missing = self._builder._reference.missing
                reason = missing if self._builder._must_check else "built with --no-check"
                return Verdict(status="unchecked", reason=reason), session.facts
            cases = recording.cases[component]
            outputs = [session.run(case.feeds) for case in cases]
        finally:
            session.close()
        verdict = judge(
            component,
            gate_precision(
                engine.request.precision, self._want.pipeline.components[component].dtype
            ),
            cases,
            outputs,
            reference=recording.reference,
        )
        return verdict, session.facts

    def _recording(self) -> Recording | None:
        return self._builder._reference.recording(
            self._want.pipeline,
            self._want.request,
            shapes=self._want.shapes,
            digests=self._want.digests,
            token_chunks=self._want.token_chunks,
            report=self._report,
        )

    def _named(self, request: BuildRequest) -> Report:
        def report(progress: Progress) -> None:
            self._report(replace(progress, phase=f"{request.vendor}: {progress.phase}"))

        return report


def failed_step(plan: Plan, error: DispatchError) -> Step:
    """Returns the step of the ladder that `error` ended."""
    return Step(
        vendor=plan.vendor, device=plan.device.id, kind=type(error).__name__, reason=error.message
    )


def _all_failed(steps: Sequence[Step]) -> CompileError:
    lines = "".join(f"\n  - {step.vendor} on {step.device}: {step.reason}" for step in steps)
    return CompileError(
        f"none of {len(steps)} ways to run this pipeline here worked:{lines}",
        "sdkit-dispatch doctor",
    )


def _require_unchanged(store: EngineStore, folder: Path, files: Mapping[str, StoredFile]) -> None:
    """Refuses an engine that its own vendor wrote to while it was loaded and run.

    Raises:
        CacheError: Names the file.
    """
    for name in {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    } ^ set(files):
        raise CacheError(f"the vendor changed the engine while it ran: '{name}'")
    for name, before in files.items():
        if (folder / name).stat().st_size != before.size_bytes:
            raise CacheError(f"the vendor changed the engine while it ran: '{name}'")
