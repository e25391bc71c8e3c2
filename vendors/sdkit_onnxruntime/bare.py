"""ONNX Runtime used directly, as its documentation shows: our sessions are measured against it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime as ort

from sdkit_dispatch.contract import Arrays, Device, Shapes


class BareSession:
    """A session on the exported graph with every optimisation, sizes free as exported."""

    def __init__(
        self, onnx: Path, shapes: Shapes, device: Device, *, threads: int | None = None
    ) -> None:
        settings = ort.SessionOptions()
        settings.log_severity_level = 3
        if threads is not None:
            settings.intra_op_num_threads = threads
        self._session = ort.InferenceSession(
            str(onnx), settings, providers=["CPUExecutionProvider"]
        )

    def run(self, feeds: Arrays) -> dict[str, Any]:  # Any: numpy.ndarray
        """Computes all outputs."""
        names = [output.name for output in self._session.get_outputs()]
        return dict(zip(names, self._session.run(None, dict(feeds)), strict=True))
