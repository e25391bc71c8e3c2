"""IREE used directly, as its documentation shows: what our sessions are measured against."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import iree.runtime as rt
import numpy as np
import onnx as onnx_package

from sdkit_dispatch.contract import Arrays, Device, Shapes
from sdkit_dispatch.graph.static_shapes import make_static
from sdkit_iree.runtime import open_device
from sdkit_iree.tools import compiler, importer


class BareSession:
    """The exported graph at these sizes, its weights in the module, compiled for this processor."""

    def __init__(
        self, onnx: Path, shapes: Shapes, device: Device, *, threads: int | None = None
    ) -> None:
        model = make_static(onnx, shapes)
        onnx_package.load_external_data_for_model(model, str(onnx.parent))
        model.graph.name = "main"
        self._names = [value.name for value in model.graph.output]
        self._inputs = list(shapes)
        with tempfile.TemporaryDirectory() as folder:
            onnx_package.save_model(model, f"{folder}/model.onnx")
            steps = (
                (*importer(), "model.onnx", "-o", "model.mlir"),
                (
                    *compiler(),
                    "model.mlir",
                    "--iree-input-type=onnx",
                    "--iree-hal-target-device=local",
                    "--iree-hal-local-target-device-backends=llvm-cpu",
                    "--iree-llvmcpu-target-cpu=host",
                    *("-o", "model.vmfb"),
                ),
            )
            for step in steps:
                subprocess.run(step, cwd=folder, check=True, stdout=sys.stderr)
            module = Path(folder, "model.vmfb").read_bytes()
        config = rt.Config(device=open_device(threads))
        code = rt.VmModule.copy_buffer(config.vm_instance, module)
        self._function = rt.load_vm_module(code, config)["main"]

    def run(self, feeds: Arrays) -> dict[str, Any]:  # Any: numpy.ndarray
        """Computes all outputs."""
        results = self._function(*(feeds[name] for name in self._inputs))
        results = results if isinstance(results, tuple) else (results,)
        return {
            name: np.array(one.to_host()) for name, one in zip(self._names, results, strict=True)
        }
