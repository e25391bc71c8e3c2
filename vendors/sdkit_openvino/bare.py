"""OpenVINO used directly, as its documentation shows: what our sessions are measured against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sdkit_dispatch.contract import Arrays, Device, Shapes
from sdkit_dispatch.errors import RunError
from sdkit_openvino.addressing import find_device
from sdkit_openvino.devices import offered_devices
from sdkit_openvino.runtime import ov


class BareSession:
    """The exported graph, reshaped and compiled for latency; no engine, no file of ours."""

    def __init__(
        self, onnx: Path, shapes: Shapes, device: Device, *, threads: int | None = None
    ) -> None:
        core = ov.Core()
        offered = find_device(device, offered_devices(core))
        if offered is None:
            raise RunError(f"openvino: it does not offer the device {device.id}")
        model = core.read_model(str(onnx))
        model.reshape({name: list(shape) for name, shape in shapes.items()})
        properties: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}  # Any: each has its own type
        if device.kind == "cpu":
            properties["INFERENCE_PRECISION_HINT"] = "f32"
            if threads is not None:
                properties["INFERENCE_NUM_THREADS"] = threads
        self._compiled = core.compile_model(model, offered.name, properties)

    def run(self, feeds: Arrays) -> dict[str, Any]:  # Any: numpy.ndarray
        """Computes all outputs."""
        results = self._compiled(dict(feeds))
        return {port.get_any_name(): np.asarray(results[port]) for port in self._compiled.outputs}
