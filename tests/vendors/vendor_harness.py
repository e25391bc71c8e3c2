"""What the tests of vendors share: the sample, and an engine built without the store."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sdkit_dispatch
from sdkit_dispatch.contract import (
    BuildRequest,
    Device,
    Engine,
    Plan,
    Precision,
    Progress,
    Session,
    TensorSpec,
    Vendor,
    VendorSpec,
)

SAMPLE = Path(sdkit_dispatch.__file__).parent / "_data" / "sample" / "digits-sd"
SHAPES = {
    "text_encoder": {"input_ids": (2, 77)},
    "unet": {"sample": (2, 4, 8, 8), "timestep": (), "encoder_hidden_states": (2, 77, 32)},
    "vae_decoder": {"latent_sample": (1, 4, 8, 8)},
    "vae_encoder": {"sample": (1, 3, 32, 32)},
}
OUTPUTS = {
    "text_encoder": (("last_hidden_state", (2, 77, 32)), ("pooler_output", (2, 32))),
    "unet": (("out_sample", (2, 4, 8, 8)),),
    "vae_decoder": (("sample", (1, 3, 32, 32)),),
    "vae_encoder": (("latent_parameters", (1, 8, 8, 8)),),
}
CPU = Device(id="cpu", kind="cpu", maker="amd", name="the processor", arch="x86_64")


@dataclass(frozen=True)
class Built:
    """An engine, the plan and the adapter that made it, and what was reported meanwhile."""

    adapter: Vendor
    plan: Plan
    engine: Engine
    seen: tuple[Progress, ...] = ()

    def load(self) -> Session:
        return self.adapter.load(self.engine, CPU)


def adapter_of(spec: VendorSpec) -> Vendor:
    """Returns an adapter as a worker makes it; skips the test without the vendor's runtime."""
    for package in spec.runtime_packages:
        # Not importorskip: importing openvino before its adapter does sends telemetry.
        try:
            importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{package}, the runtime of {spec.name}, is not installed")
    module, _, name = spec.adapter.partition(":")
    adapter: Vendor = getattr(importlib.import_module(module), name)()
    return adapter


def plan_of(
    spec: VendorSpec,
    adapter: Vendor,
    precision: Precision | None = None,
    options: Mapping[str, Any] | None = None,
) -> Plan:
    plan = adapter.plan(CPU, precision, options or {})
    assert isinstance(plan, Plan), plan
    return plan


def request_of(spec: VendorSpec, plan: Plan, component: str, **changes: Any) -> BuildRequest:
    request = BuildRequest(
        vendor=spec.name,
        revision=spec.revision,
        runtime=plan.runtime,
        target=plan.target,
        component=component,
        graph_digest="0" * 64,
        weights_digest="",
        precision=plan.precision,
        shapes=SHAPES.get(component, {}),
        options=plan.options,
    )
    return replace(request, **changes)


def build(
    spec: VendorSpec,
    out: Path,
    component: str = "unet",
    *,
    onnx_file: Path | None = None,
    precision: Precision | None = None,
    options: Mapping[str, Any] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Built:
    """Compiles a component of the sample, or `onnx_file`, into the new folder `out`."""
    adapter = adapter_of(spec)
    plan = plan_of(spec, adapter, precision, options)
    path = onnx_file or SAMPLE / component / "model.onnx"
    request = request_of(spec, plan, component)
    if shapes is not None:
        request = replace(request, shapes=shapes)
    out.mkdir(parents=True)
    seen: list[Progress] = []
    adapter.compile(request, path, out, device=CPU, report=seen.append)
    engine = Engine(key=request.key, request=request, folder=str(out), onnx=str(path))
    return Built(adapter, plan, engine, tuple(seen))


def feeds_for(inputs: tuple[TensorSpec, ...], seed: int = 0) -> dict[str, Any]:
    """Returns feeds of a realistic size: unit noise, a timestep in the middle, small token ids."""
    rng = np.random.default_rng(seed)
    return {
        spec.name: np.array(501 - seed, spec.dtype)
        if spec.name == "timestep"
        else rng.standard_normal(spec.shape).astype(spec.dtype)
        if spec.dtype.startswith("float")
        else rng.integers(0, 1000, spec.shape, spec.dtype)
        for spec in inputs
    }


def with_external_weights(component: str, folder: Path, files: int = 1) -> Path:
    """Writes a component of the sample with its weights in one file, or one file a tensor."""
    folder.mkdir(parents=True)
    path = folder / "model.onnx"
    onnx.save_model(
        onnx.load(SAMPLE / component / "model.onnx"),
        path,
        save_as_external_data=True,
        all_tensors_to_one_file=files == 1,
        location="model.onnx_data" if files == 1 else None,
        size_threshold=1024,
    )
    return path


def snapshot(folder: Path) -> dict[str, tuple[str, int]]:
    """Returns every file below `folder` with its sha256 and mtime."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            os.stat(path).st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
