"""Latents whose sides do not halve evenly, against what diffusers' UNets compute of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sdkit_ggml
import sdkit_onnxruntime
import sdkit_openvino
from sdkit_dispatch.contract import VendorSpec
from vendor_harness import build

MODELS = Path(__file__).parents[1] / "models"
GRAPHS = {
    "sd15-optimum": "pipelines",
    "sd15-torchscript": "pipelines",
    "sd15-dynamo": "pipelines",
    "sdxl-optimum": "pipelines",
    "sdxl-torchscript": "pipelines",
    "sdxl-dynamo": "pipelines",
    "deep-torchscript": "odd",
    "deep-dynamo": "odd",
}
"""Exported UNet -> where it lies. "deep" has four levels, as SD1.5's; the others have two."""
SPECS = (sdkit_onnxruntime.CPU, sdkit_openvino.SPEC, sdkit_ggml.SPEC)
TOLERANCE = 2e-5
"""Largest difference from PyTorch in fp32, of outputs up to 5. The same graphs are off by 1e-5 at
even sizes; a wrong neighbour in one row would be off by more than 0.1."""

each_vendor = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


def recorded_cases(name: str) -> dict[str, tuple[dict[str, Any], Any]]:
    """Returns size -> feeds and output, as diffusers had them."""
    with np.load(MODELS / "odd" / f"{name.partition('-')[0]}.npz") as file:
        arrays = dict(file)
    cases: dict[str, tuple[dict[str, Any], Any]] = {}
    for title in dict.fromkeys(key.partition(".")[0] for key in arrays):
        feeds = {
            key.partition(".")[2]: array
            for key, array in arrays.items()
            if key.startswith(f"{title}.")
        }
        wanted = feeds.pop("out_sample")
        cases[title] = ({**feeds, "timestep": np.array(501.0, np.float32)}, wanted)
    return cases


@each_vendor
@pytest.mark.parametrize("name", GRAPHS)
def test_odd_sides_give_what_diffusers_gives(name: str, spec: VendorSpec, tmp_path: Path) -> None:
    path = MODELS / GRAPHS[name] / name / "unet" / "model.onnx"
    for title, (feeds, wanted) in recorded_cases(name).items():
        shapes = {key: array.shape for key, array in feeds.items()}
        built = build(spec, tmp_path / title, onnx_file=path, shapes=shapes, precision="fp32")
        session = built.load()
        dtypes = {one.name: one.dtype for one in session.inputs}
        found = session.run({key: array.astype(dtypes[key]) for key, array in feeds.items()})
        session.close()
        assert float(np.abs(found["out_sample"] - wanted).max()) <= TOLERANCE, title
