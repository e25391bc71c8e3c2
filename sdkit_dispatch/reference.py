"""Makes the recording that engines are checked against: the `cpu` vendor, graphs unoptimised."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import graph
from .cache import EngineStore
from .check import (
    CASES_PER_COMPONENT,
    Recording,
    index_recording,
    load_recording,
    recorded_request,
    recording_from_arrays,
    recording_name,
    save_recording,
)
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
    record_to_json,
)
from .errors import DispatchError, WorkerError
from .pipeline_files import Pipeline
from .store_layout import UNWRITABLE
from .worker_client import WorkerClient
from .workers import Workers

VENDOR = "cpu"
OPTIONS: Mapping[str, Any] = {"graph_optimization": "disabled"}  # Any: the vendor's values

log = logging.getLogger(__name__)


class Reference:
    """Recordings of one home folder, made when they are first needed."""

    def __init__(self, *, store: EngineStore, workers: Workers, device: Device) -> None:
        """`device` is the processor of this machine."""
        self._store = store
        self._workers = workers
        self._device = device
        self.missing = ""
        """Why there is no reference; empty as long as none was needed in vain."""

    def recording(
        self,
        pipeline: Pipeline,
        request: GenerateRequest,
        *,
        shapes: Mapping[str, Shapes],
        digests: Mapping[str, tuple[str, str]],
        token_chunks: int,
        report: Report,
        is_for_a_build: bool = False,
    ) -> Recording | None:
        """Returns what the components must compute for these shapes.

        Without the reference itself, a recording that came in a bundle serves: it shows that an
        engine computes on this device what its maker's reference computed. A recording that is
        made here always comes first: it need not be believed.

        None if neither can be had; `missing` says why, and engines stay unchecked.

        Raises:
            WorkerError: The reference's worker was killed from outside.
            OSError: It is for a build, and the store cannot be written.
        """
        recorded = recorded_request(request)
        spec = self._workers.specs.get(VENDOR)
        if spec is None:
            why = f"the vendor '{VENDOR}' is not part of this installation"
            return self._imported(pipeline, recorded, digests, token_chunks, why)
        plan = self._workers.probe(spec, self._device, None, OPTIONS)
        if isinstance(plan, Rejection):
            why = f"the vendor '{VENDOR}' cannot serve as the reference: {plan.reason}"
            return self._imported(pipeline, recorded, digests, token_chunks, why)
        maker = [spec.revision, plan.runtime, plan.target, dict(plan.options), token_chunks]
        name = recording_name(digests, pipeline.configs, recorded, [*maker, graph.REVISION])
        path = _file(self._store.home, name)
        for home in self._store.homes:
            found = load_recording(_file(home, name))
            if found is not None:
                if home == self._store.home:
                    index_recording(path, digests)
                return found

        def wait() -> None:
            report(Progress(phase="wait for another process that makes the reference"))

        try:
            with self._store.locked(name, while_waiting=wait):
                found = load_recording(path)
                if found is None:
                    found = self._record(
                        pipeline, recorded, plan, shapes, name, token_chunks, report
                    )
                    _save(path, found)
                    index_recording(path, digests)
                return found
        except (DispatchError, OSError) as error:
            if isinstance(error, WorkerError) and error.was_killed:
                raise  # from outside: it says nothing of the reference
            if isinstance(error, OSError) and is_for_a_build and error.errno in UNWRITABLE:
                raise  # the build goes on in a temporary store, which can hold it
            self.missing = f"the reference could not be made: {error}"
            return None

    def _imported(
        self,
        pipeline: Pipeline,
        recorded: GenerateRequest,
        digests: Mapping[str, tuple[str, str]],
        token_chunks: int,
        why: str,
    ) -> Recording | None:
        name = portable_name(pipeline, recorded, digests, token_chunks=token_chunks)
        found = load_recording(imported_path(self._store.home, name))
        if found is None:
            self.missing = why
            return None
        return replace(found, reference=f"{found.reference}, from a bundle")

    def _record(
        self,
        pipeline: Pipeline,
        request: GenerateRequest,
        plan: Plan,
        shapes: Mapping[str, Shapes],
        name: str,
        token_chunks: int,
        report: Report,
    ) -> Recording:
        spec = self._workers.specs[VENDOR]

        def prefixed(progress: Progress) -> None:
            report(replace(progress, phase=f"reference: {progress.phase}"))

        with self._store.workshop(name) as shop, self._workers.fresh(spec) as client:
            engines = [
                _compile(client, pipeline, plan, component, shapes[component], shop, prefixed)
                for component in shapes
            ]
            params = {
                "pipeline": str(pipeline.folder),
                "memo": str(self._store.memo),
                "engines": [record_to_json(engine) for engine in engines],
                "device": record_to_json(self._device),
                "request": record_to_json(request),
                "cases": CASES_PER_COMPONENT,
                "token_chunks": token_chunks,
            }
            answer = client.record(params, prefixed)
        return recording_from_arrays(answer.arrays, reference=plan.runtime)


def portable_name(
    pipeline: Pipeline,
    recorded: GenerateRequest,
    digests: Mapping[str, tuple[str, str]],
    *,
    token_chunks: int,
) -> str:
    """Returns the name of a recording in a bundle: the same whichever reference made it."""
    maker = ["portable", token_chunks, graph.REVISION]
    return recording_name(digests, pipeline.configs, recorded, maker)


def imported_path(home: Path, name: str) -> Path:
    """Returns where a recording from a bundle is; never where one that was made here could be."""
    return home / "references" / "imported" / f"{name}.npz"


def _compile(
    client: WorkerClient,
    pipeline: Pipeline,
    plan: Plan,
    component: str,
    shapes: Shapes,
    shop: Path,
    report: Report,
) -> Engine:
    onnx = pipeline.components[component].onnx
    request = BuildRequest(
        vendor=VENDOR,
        revision=client.spec.revision,
        runtime=plan.runtime,
        target=plan.target,
        component=component,
        graph_digest="",  # it never reaches the store
        weights_digest="",
        precision=plan.precision,
        shapes=shapes,
        options=plan.options,
    )
    out = shop / component
    out.mkdir()
    client.compile(request, onnx, out, device=plan.device, report=report)
    return Engine(key=request.key, request=request, folder=str(out), onnx=str(onnx))


def _file(home: Path, name: str) -> Path:
    return home / "references" / name[:2] / f"{name}.npz"


def _save(path: Path, recording: Recording) -> None:
    try:
        save_recording(path, recording)
    except OSError as error:
        log.warning("the reference is not kept: '%s' cannot be written: %s", path, error)
