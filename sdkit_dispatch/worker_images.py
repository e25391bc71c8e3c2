"""The child side of image generation: a diffusion pipeline over the worker's own sessions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .contract import (
    Arrays,
    Engine,
    GenerateRequest,
    Report,
    Session,
    Shapes,
    record_from_json,
)
from .diffusion.pipeline import KEPT_PROMPTS, DiffusionPipeline
from .errors import RunError
from .pipeline_files import Mark, Pipeline, pipeline_mark, read_pipeline

Params = Mapping[str, Any]  # Any: JSON data


class ImageDesk:
    """Keeps the pipelines of a worker, with the sessions that they have open.

    The parameters of a request: `pipeline` (folder), `memo` (folder or None), `engines` (records
    of all components at the shapes that the request needs), `device`, `keep_loaded`, and perhaps
    `keep_prompts`.
    """

    def __init__(self, open_engine: Callable[[Engine, Any], Session]) -> None:
        self._open_engine = open_engine
        self._read: Pipeline | None = None
        self._mark: Mark | None = None
        self._running: DiffusionPipeline | None = None
        self._engines: dict[tuple[str, str], Engine] = {}
        self._identity: dict[str, str] = {}
        self._asked: tuple[Any, Any] | None = None  # JSON data: the engines and the device
        self._device: Any = None  # JSON data of the device of the current request

    def generate(
        self, params: Params, request: GenerateRequest, arrays: Arrays, report: Report
    ) -> tuple[dict[str, Any], Arrays]:
        """Makes images; tensor `latents`, if given, is the noise to start from."""
        pipeline = self._prepared(params)
        result = pipeline.generate(request, report, latents=arrays.get("latents"))
        facts = {
            "seeds": list(result.seeds),
            "timings": dict(result.timings),
            "facts": {name: dict(facts) for name, facts in result.facts.items()},
        }
        return facts, {"images": result.images, "latents": result.latents}

    def record(
        self, params: Params, request: GenerateRequest, report: Report
    ) -> tuple[dict[str, Any], Arrays]:
        """Runs a request once and returns the first `cases` calls of every component."""
        calls: dict[str, Any] = {}
        engines = self._table(params)
        limit = int(params["cases"])

        def open_session(component: str, shapes: Shapes) -> Session:
            engine = _engine_for(engines, component, shapes)
            session = self._open_engine(engine, params["device"])
            return RecordingSession(session, component, calls, limit)

        pipeline = read_pipeline(Path(params["pipeline"]), memo=_memo(params))
        with DiffusionPipeline(pipeline, open_session, keep_loaded=False) as running:
            running.generate(request, report, token_chunks=int(params["token_chunks"]))
        return {}, calls

    def _prepared(self, params: Params) -> DiffusionPipeline:
        """Returns the pipeline, without any session that belongs to another engine or device."""
        self._device = params["device"]
        read = self._read_again(Path(params["pipeline"]), _memo(params))
        if self._running is None or read != self._read:
            if self._running is not None:
                self._running.close()
            self._read, self._running = read, DiffusionPipeline(read, self._open)
            self._identity, self._asked = {}, None
        asked = (params["engines"], self._device)
        if asked != self._asked:
            self._engines = self._table(params)
            identity = {
                component: json.dumps([engine.key, engine.shapes, self._device], sort_keys=True)
                for (component, _), engine in self._engines.items()
            }
            changed = [name for name in identity if self._identity.get(name) != identity[name]]
            self._running.release(*changed)
            self._identity, self._asked = identity, asked
        self._running.keep_loaded = bool(params["keep_loaded"])
        self._running.keep_prompts = int(params.get("keep_prompts", KEPT_PROMPTS))
        return self._running

    def _read_again(self, folder: Path, memo: Path | None) -> Pipeline:
        """Reads the pipeline, unless no file of it has changed since the last time.

        Reading hashes every graph: a fifth of the time that a small pipeline takes to draw.
        """
        mark = pipeline_mark(folder, known=self._mark)
        if mark is not None and mark == self._mark and self._read is not None:
            return self._read
        read = read_pipeline(folder, memo=memo)
        self._mark = mark if mark == pipeline_mark(folder) else None
        return read

    def _open(self, component: str, shapes: Shapes) -> Session:
        return self._open_engine(_engine_for(self._engines, component, shapes), self._device)

    @staticmethod
    def _table(params: Params) -> dict[tuple[str, str], Engine]:
        engines = [record_from_json(Engine, entry) for entry in params["engines"]]
        return {(engine.request.component, shapes_key(engine.shapes)): engine for engine in engines}


class RecordingSession:
    """A session that keeps what it was fed and what it answered."""

    def __init__(self, session: Session, component: str, calls: dict[str, Any], limit: int) -> None:
        self.inputs = session.inputs
        self.outputs = session.outputs
        self.facts = session.facts
        self._session = session
        self._component = component
        self._calls = calls
        self._limit = limit
        prefix = f"{component}/"
        self._count = len({name.split("/")[1] for name in calls if name.startswith(prefix)})

    def run(self, feeds: Arrays) -> dict[str, Any]:  # Any: numpy.ndarray
        """As `Session.run`."""
        outputs = self._session.run(feeds)
        if self._count < self._limit:
            for side, arrays in (("feeds", feeds), ("outputs", outputs)):
                for name, array in arrays.items():
                    self._calls[f"{self._component}/{self._count}/{side}/{name}"] = np.array(array)
            self._count += 1
        return outputs

    def close(self) -> None:
        """As `Session.close`."""
        self._session.close()


def _engine_for(
    engines: Mapping[tuple[str, str], Engine], component: str, shapes: Shapes
) -> Engine:
    engine = engines.get((component, shapes_key(shapes)))
    if engine is None:
        raise RunError(f"no engine of {component} for the shapes {dict(shapes)} was handed over")
    return engine


def shapes_key(shapes: Shapes) -> str:
    """Returns a canonical text of the shapes of all inputs."""
    return json.dumps({name: list(shape) for name, shape in shapes.items()}, sort_keys=True)


def _memo(params: Params) -> Path | None:
    return Path(params["memo"]) if params.get("memo") else None
