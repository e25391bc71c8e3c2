"""Other weights for an engine that was built with `refit`: no second build.

Not run on hardware yet; tests show it with a stub. TensorRT's own notes (11.3) say that such an
engine may drop the bias of a matrix product: like every engine, it is checked before it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdkit_dispatch.contract import BuildRequest, Engine, Progress, Report
from sdkit_dispatch.errors import CacheError, RunError
from sdkit_tensorrt.builder_log import Lines, Runtime, new_log
from sdkit_tensorrt.building import Prepared
from sdkit_tensorrt.engine_files import PLAN_FILE, EngineNote, read_note
from sdkit_tensorrt.opened_engine import open_engine
from sdkit_tensorrt.undisturbed import undisturbed

logger = logging.getLogger(__name__)


def refitted(
    trt: Runtime,
    prepared: Prepared,
    *,
    request: BuildRequest,
    siblings: Sequence[Engine],
    out: Path,
    report: Report,
) -> EngineNote | None:
    """Writes the plan of a sibling with the weights of `prepared`; returns its note.

    None, and nothing written, if there is no such sibling or it does not take them: building
    helps. There is a driver.
    """
    for sibling in siblings:
        if dict(sibling.request.shapes) != dict(request.shapes):
            continue
        report(Progress(phase=f"refit {request.component}"))
        lines = Lines()
        try:
            note = read_note(Path(sibling.folder))
            with undisturbed():
                plan = _refitted(trt, prepared, Path(sibling.folder), lines, request.runtime)
        except (OSError, ValueError, CacheError, RunError) as error:
            logger.info("%s: %s is not refitted: %s", request.component, sibling.key[:12], error)
            continue
        (out / PLAN_FILE).write_bytes(plan)
        logger.info("%s: %s with other weights", request.component, sibling.key[:12])
        return replace(note, plan_bytes=len(plan))
    return None


def _refitted(trt: Runtime, prepared: Prepared, folder: Path, lines: Lines, who: str) -> memoryview:
    log = new_log(trt, lines)
    runtime: Any = trt.Runtime(log)  # Any: of the bindings, as all below
    engine = open_engine(trt, runtime, folder / PLAN_FILE, lines, who=who)
    refitter = parser = None
    try:
        if not engine.refittable:
            raise ValueError("it was built without refit")
        refitter = trt.Refitter(engine, log)
        parser = trt.OnnxParserRefitter(refitter, log)
        if not parser.refit_from_bytes(prepared.graph, str(prepared.path)):
            told = [parser.get_error(index).desc() for index in range(parser.num_errors)]
            raise ValueError("; ".join(told) or lines.words)
        missing = refitter.get_missing_weights()
        if missing:
            raise ValueError(f"the graph does not give {', '.join(sorted(missing)[:5])}")
        if not refitter.refit_cuda_engine():
            raise ValueError(lines.words)
        plan = engine.serialize()
        if plan is None:
            raise ValueError(lines.words)
        return memoryview(plan)
    finally:
        # In this order: each holds on to the next.
        del parser, refitter, engine, runtime
