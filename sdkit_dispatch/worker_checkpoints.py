"""The child side of image generation by an engine that takes a whole checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .contract import (
    Arrays,
    Device,
    GenerateRequest,
    PipelineSession,
    PipelineVendor,
    Progress,
    Report,
    record_from_json,
)
from .errors import RunError


class CheckpointDesk:
    """Keeps the last checkpoint of a worker open, for as long as the same one is asked for.

    The parameters of a request: `checkpoint` (file), `identity` (changes with the file), `device`,
    `options`.
    """

    def __init__(self, adapter: PipelineVendor) -> None:
        self._adapter = adapter
        self._session: PipelineSession | None = None
        self._asked = ""

    def generate(
        self,
        params: Mapping[str, Any],  # Any: JSON data
        request: GenerateRequest,
        report: Report,
    ) -> tuple[dict[str, Any], Arrays]:
        """Makes images."""
        started_s = time.monotonic()
        session = self._opened(params, report)
        loaded_s = time.monotonic()
        images = session.generate(request, report)
        wanted = (request.batch, request.height_px, request.width_px, 3)
        if images.shape != wanted or images.dtype.name != "uint8":
            raise RunError(
                f"the engine drew {images.dtype} {list(images.shape)}, asked for uint8 "
                f"{list(wanted)}"
            )
        return {
            "seeds": [request.seed + index for index in range(request.batch)],
            "timings": {"load": loaded_s - started_s, "generate": time.monotonic() - loaded_s},
            "facts": dict(session.facts),
        }, {"images": images}

    def _opened(self, params: Mapping[str, Any], report: Report) -> PipelineSession:
        asked = json.dumps(
            [params[name] for name in ("checkpoint", "identity", "device", "options")],
            sort_keys=True,
        )
        if self._session is None or asked != self._asked:
            if self._session is not None:  # two would not fit the memory
                self._session.close()
                self._session = None
            report(Progress(phase="load the checkpoint"))
            self._session = self._adapter.load(
                Path(params["checkpoint"]),
                record_from_json(Device, params["device"]),
                options=params["options"],
            )
            self._asked = asked
        return self._session
