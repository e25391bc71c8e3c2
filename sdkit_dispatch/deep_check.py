"""Opens every stored engine where that can be done here, and asks the numeric gate again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .cache import Entry, Manifest
from .check import (
    WIDEST_DTYPE,
    Case,
    Recording,
    judge,
    limits_for,
    load_recording,
    recordings_of,
)
from .component_gate import require_as_planned
from .contract import BuildRequest, Engine, Plan, Progress, Rejection, VendorSpec
from .errors import ConfigError, DispatchError, PipelineError
from .pipeline_files import Component, component_digests, known_dtype, read_pipeline
from .store_use import last_use
from .worker_client import WorkerClient

if TYPE_CHECKING:
    from .api import Dispatcher


@dataclass(frozen=True, kw_only=True)
class DeepResult:
    """What came of opening one engine.

    Attributes:
        status: "passed": it computes what the reference did; "opened": it opens, but there is no
            recording to compare with; "unknown": it cannot be opened here; "failed": it is wrong.
        message: What was found, or why nothing could be.
    """

    key: str
    vendor: str
    component: str
    status: Literal["passed", "opened", "unknown", "failed"]
    message: str


@dataclass(frozen=True, kw_only=True)
class _Job:
    entry: Entry
    manifest: Manifest
    plan: Plan
    recordings: tuple[Path, ...]


def check_deeply(dispatcher: Dispatcher, entries: Sequence[Entry]) -> list[DeepResult]:
    """Opens every engine in a worker of its vendor; those whose files are damaged are left out."""
    results, jobs = [], []
    for entry in entries:
        if entry.damage or entry.manifest is None:
            continue
        plan = _plan_for(dispatcher, entry.manifest.request)
        if isinstance(plan, str):
            results.append(_result(entry.manifest, "unknown", plan))
            continue
        request = entry.manifest.request
        digests = (request.graph_digest, request.weights_digest)
        recordings = [
            path
            for home in dispatcher.store.homes
            for path in recordings_of(home, request.component, digests)
        ]
        jobs.append(
            _Job(entry=entry, manifest=entry.manifest, plan=plan, recordings=tuple(recordings))
        )
    # One vendor after the other, and what shares a recording together: it is read once.
    jobs.sort(key=lambda job: (job.plan.vendor, [str(path) for path in job.recordings]))
    with _Workers(dispatcher) as workers:
        results += [_checked(dispatcher, job, workers) for job in jobs]
    return sorted(results, key=lambda one: one.key)


class _Workers(ExitStack):
    """The worker of the vendor at hand, and the recording at hand."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__()
        self._dispatcher = dispatcher
        self._client: WorkerClient | None = None
        self._recording: tuple[Path, Recording | None] | None = None

    def client(self, spec: VendorSpec) -> WorkerClient:
        if self._client is None or self._client.spec != spec or not self._client.is_alive:
            self.close()
            self._client = self.enter_context(self._dispatcher.workers.fresh(spec))
        return self._client

    def recording(self, path: Path) -> Recording | None:
        if self._recording is None or self._recording[0] != path:
            self._recording = path, load_recording(path)
        return self._recording[1]


def _plan_for(dispatcher: Dispatcher, request: BuildRequest) -> Plan | str:
    """Returns a plan of this machine that the engine was built for, or why there is none."""
    spec = dispatcher.specs.get(request.vendor)
    if spec is None:
        return f"the vendor '{request.vendor}' is not part of this installation"
    environment = dispatcher.workers.environment(spec)
    if isinstance(environment, Rejection):
        return f"the vendor '{spec.name}' is not ready: {environment.reason}"
    seen = []
    for device in dispatcher.devices:
        if device.kind in spec.device_kinds:
            try:
                plan = dispatcher.workers.probe(spec, device, request.precision, request.options)
            except ConfigError as error:  # of an earlier revision of the adapter, or a later one
                return f"its options are not known here: {error.message}"
            if isinstance(plan, Rejection):
                seen.append(f"{device.id}: {plan.reason}")
            elif (plan.runtime, plan.target) == (request.runtime, request.target):
                return plan
            else:
                seen.append(f"{device.id}: {plan.runtime}, target '{plan.target}'")
    here = "; ".join(seen) or "no device"
    return f"built with {request.runtime} for the target '{request.target}'; here is {here}"


def _checked(dispatcher: Dispatcher, job: _Job, workers: _Workers) -> DeepResult:
    request = job.manifest.request
    dispatcher.report(Progress(phase=f"open {request.component} with {request.vendor}"))
    part = _component_of(dispatcher, request)
    # A vendor that maps the weights of the graph finds none beside this name.
    engine = Engine(
        key=request.key,
        request=request,
        folder=str(job.entry.folder),
        onnx=str(part.onnx if part else job.entry.folder / "no-graph.onnx"),
    )
    try:
        session = workers.client(dispatcher.specs[request.vendor]).load(engine, job.plan.device)
        try:
            require_as_planned(request, session.facts)
            for cases, reference in _cases_for(job, workers):
                outputs = [session.run(case.feeds) for case in cases]
                for limits, doubt in _limits_of(dispatcher, job.manifest, part):
                    verdict = judge(cases, outputs, limits, reference=reference)
                    if verdict.status != "failed" and doubt:
                        return _result(job.manifest, "unknown", doubt)
                    if verdict.status != "failed":
                        return _result(job.manifest, "passed", f"it computes what {reference} does")
                return _result(job.manifest, "failed", verdict.reason)
        finally:
            session.close()
    except DispatchError as error:
        if part is None:  # it may be the mapped weights that are missing
            words = f"it does not open without its model: {error.message}"
            return _result(job.manifest, "unknown", words)
        return _result(job.manifest, "failed", error.message)
    words = "it opens; no stored recording has its graph, weights and shapes"
    return _result(job.manifest, "opened", words)


def _cases_for(job: _Job, workers: _Workers) -> Iterator[tuple[tuple[Case, ...], str]]:
    """Yields the recorded calls of the engine's own shapes, and who made them."""
    request = job.manifest.request
    wanted = {name: tuple(shape) for name, shape in request.shapes.items()}
    for path in job.recordings:
        recording = workers.recording(path)
        cases = recording.cases.get(request.component, ()) if recording else ()
        shapes = [{name: tuple(array.shape) for name, array in one.feeds.items()} for one in cases]
        if recording and cases and all(one == wanted for one in shapes):
            yield cases, recording.reference


def _limits_of(
    dispatcher: Dispatcher, manifest: Manifest, part: Component | None
) -> Iterator[tuple[Mapping[str, float], str]]:
    """Yields what an engine may be off by; with a doubt, if that is no more than a guess.

    An engine that nobody checked was never held to any limits, and which they are depends on the
    weights of its graph, which may be gone.
    """
    precision, digest = manifest.request.precision, manifest.request.graph_digest
    dtype = part.dtype if part else known_dtype(digest, memo=dispatcher.store.memo)
    if manifest.verdict.limits:
        yield manifest.verdict.limits, ""
    elif dtype:
        yield limits_for(precision, dtype), ""
    else:
        yield limits_for(precision, "float32"), ""
        words = "its graph is not at hand, and it is off by more than a graph of full precision is"
        yield limits_for(precision, WIDEST_DTYPE), f"{words} allowed, and less than one of half"


def _component_of(dispatcher: Dispatcher, request: BuildRequest) -> Component | None:
    """Returns the component that the engine was last used with, if it is still the same."""
    use = last_use(dispatcher.store.memo, request.key)
    if use is None or not use.onnx:
        return None
    onnx = Path(use.onnx)
    try:
        pipeline = read_pipeline(onnx.parent.parent, memo=dispatcher.store.memo)
        component = pipeline.components[request.component]
        digests = component_digests(component, memo=dispatcher.store.memo)
    except (PipelineError, KeyError):
        return None
    is_same = digests == (request.graph_digest, request.weights_digest)
    return component if is_same else None


def _result(
    manifest: Manifest, status: Literal["passed", "opened", "unknown", "failed"], message: str
) -> DeepResult:
    request = manifest.request
    return DeepResult(
        key=manifest.key,
        vendor=request.vendor,
        component=request.component,
        status=status,
        message=message,
    )
