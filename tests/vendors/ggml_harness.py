"""What tests of the ggml vendor share: an engine of any ONNX file, and ONNX Runtime's numbers."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sdkit_dispatch
from sdkit_dispatch.contract import BuildRequest, Device, Engine, Precision
from sdkit_ggml import SPEC

SAMPLE = Path(sdkit_dispatch.__file__).parent / "_data" / "sample" / "digits-sd"
PIPELINES = Path(__file__).parents[1] / "models" / "pipelines"
CPU = Device(id="cpu", kind="cpu", maker="amd", name="the processor", arch="x86_64")
SOFTWARE_GPU = Device(id="vulkan", kind="integrated", maker="mesa", name="llvmpipe")

UNET_TOLERANCE = 5e-6
"""Largest difference from ONNX Runtime of UNets and text encoders in fp32. 1e-6 to 4e-6 was
measured; either is as far from the same graph in float64."""
VAE_TOLERANCE = 5e-5
"""The same of VAEs, whose sums are longer; 3e-5 was measured at full size."""
LAST_STATE_TOLERANCE = 1e-5
"""The same of the last hidden state of SDXL's encoders, which no pipeline reads: not normalised, up
to 10. 5.5e-6 was measured; `test_numbers_are_as_near_to_float64_as_onnx_runtimes` says whose."""


@dataclass
class GgmlEngine:
    """A compiled component."""

    adapter: Any  # GgmlAdapter, imported only where its runtime is
    engine: Engine
    device: Device

    @property
    def folder(self) -> Path:
        return Path(self.engine.folder)

    def load(self) -> Any:
        return self.adapter.load(self.engine, self.device)


def ggml_adapter(threads: int = 1) -> Any:
    """Returns an adapter; skips the test without the vendor's runtime."""
    for package in SPEC.runtime_packages:
        try:
            importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{package}, of the runtime of ggml, is not installed")
    from sdkit_ggml.adapter import GgmlAdapter

    adapter = GgmlAdapter()
    # Two threads of a small graph wait for each other longer than they compute.
    adapter.threads = threads
    return adapter


def compiled(
    onnx_file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    out: Path,
    *,
    precision: Precision = "fp32",
    device: Device = CPU,
    options: Mapping[str, Any] | None = None,
    threads: int = 1,
) -> GgmlEngine:
    """Compiles an ONNX file into the new folder `out`."""
    adapter = ggml_adapter(threads)
    plan = adapter.plan(device, precision, options or {})
    request = BuildRequest(
        vendor="ggml",
        revision=SPEC.revision,
        runtime=plan.runtime,
        target=plan.target,
        component=onnx_file.parent.name,
        graph_digest="0" * 64,
        weights_digest="",
        precision=plan.precision,
        shapes=shapes,
        options=plan.options,
    )
    out.mkdir(parents=True)
    adapter.compile(request, onnx_file, out, device=device, report=lambda progress: None)
    engine = Engine(key=request.key, request=request, folder=str(out), onnx=str(onnx_file))
    return GgmlEngine(adapter, engine, device)


def shapes_for(
    onnx_file: Path, *, batch: int = 2, height: int = 8, width: int = 8
) -> dict[str, tuple[int, ...]]:
    """Returns shapes of all inputs of a component; height and width of the latents."""
    import onnx

    sizes = {
        "input_ids": (batch, 77),
        "timestep": (),
        "latent_sample": (batch, 4, height, width),
        "time_ids": (batch, 6),
    }
    found = {}
    for value in onnx.load(onnx_file, load_external_data=False).graph.input:
        last = [dim.dim_value for dim in value.type.tensor_type.shape.dim][-1:]
        if value.name == "sample":
            is_picture = onnx_file.parent.name == "vae_encoder"
            found["sample"] = (
                (batch, 3, 4 * height, 4 * width) if is_picture else (batch, 4, height, width)
            )
        elif value.name == "encoder_hidden_states":
            found[value.name] = (batch, 77, *last)
        elif value.name == "text_embeds":
            found[value.name] = (batch, *last)
        else:
            found[value.name] = sizes[value.name]
    return found


def feeds_of(session: Any, seed: int = 0) -> dict[str, Any]:
    """Returns feeds of a realistic size; prompts end before their last place."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for spec in session.inputs:
        if spec.name == "timestep":
            feeds[spec.name] = np.array(501 - seed, spec.dtype)
        elif spec.name == "time_ids":
            feeds[spec.name] = np.tile([64, 96, 0, 0, 64, 96], (spec.shape[0], 1)).astype(
                spec.dtype
            )
        elif spec.dtype.startswith("float"):
            feeds[spec.name] = rng.standard_normal(spec.shape).astype(spec.dtype)
        else:
            ids = rng.integers(0, 400, spec.shape)
            ids[:, 20:] = ids.max() + 1
            feeds[spec.name] = ids.astype(spec.dtype)
    return feeds


def by_onnxruntime(onnx_file: Path, feeds: Mapping[str, Any], threads: int = 1) -> dict[str, Any]:
    """Returns what ONNX Runtime computes."""
    ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is the reference")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = ort.InferenceSession(str(onnx_file), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def by_float64(onnx_file: Path, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the graph gives in float64, by ONNX's own evaluator."""
    import onnx
    from onnx import TensorProto, numpy_helper
    from onnx.reference import ReferenceEvaluator

    def widen(tensor: onnx.TensorProto) -> None:
        if tensor.data_type == TensorProto.FLOAT:
            wide = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))

    model = onnx.load(onnx_file)
    for tensor in model.graph.initializer:
        widen(tensor)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                widen(attribute.t)
            elif node.op_type == "Cast" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.DOUBLE
    del model.graph.value_info[:]
    names = [value.name for value in model.graph.output]
    return dict(zip(names, ReferenceEvaluator(model).run(None, dict(feeds)), strict=True))


def tolerance_of(component: str, output: str, outputs: Iterable[str] = ()) -> float:
    """`outputs`: all of the component, where it may have hidden states."""
    states = [name for name in outputs if name.startswith("hidden_states.")]
    if states and output == max(states, key=lambda name: int(name.rpartition(".")[2])):
        return LAST_STATE_TOLERANCE
    return VAE_TOLERANCE if component.startswith("vae") else UNET_TOLERANCE


def differences(onnx_file: Path, session: Any, seed: int = 0, threads: int = 1) -> dict[str, float]:
    """Returns output -> largest absolute difference from ONNX Runtime."""
    feeds = feeds_of(session, seed)
    found, wanted = session.run(feeds), by_onnxruntime(onnx_file, feeds, threads)
    return {
        name: float(np.abs(found[name].astype(np.float64) - wanted[name]).max()) for name in wanted
    }
