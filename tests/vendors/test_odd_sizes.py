"""Latents whose sides do not halve evenly, against what diffusers' UNets compute of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sdkit_ggml
import sdkit_onnxruntime
import sdkit_openvino
from ggml_harness import feeds_of, shapes_for
from sdkit_dispatch.contract import VendorSpec
from sdkit_dispatch.graph.static_shapes import make_static
from sdkit_ggml.compiler.fold import fold
from sdkit_ggml.compiler.graph import graph_from_model
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
SECONDS_A_PROGRAM = 2.0
STEP = 9
"""Of the heights that are looked at."""

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


@pytest.mark.parametrize("name", ["sd15-optimum", "deep-torchscript", "deep-dynamo"])
def test_every_size_from_128_to_1024_pixels_has_shapes_that_fit(name: str) -> None:
    """A factor of 8, as published VAEs have it: latents of 16 to 128, batches of 1 to 4."""
    path = MODELS / GRAPHS[name] / name / "unet" / "model.onnx"
    widths = np.random.default_rng(1).permutation(np.arange(16, 129))
    for height, width in zip(range(16, 129, STEP), widths.tolist(), strict=False):
        shapes = shapes_for(path, batch=1 + height % 4, height=height, width=width)
        graph = graph_from_model(make_static(path, shapes), path.parent)
        fold(graph)
        assert graph.type_of("out_sample").shape == (1 + height % 4, 4, height, width)


@pytest.mark.parametrize(("batch", "height", "width"), [(3, 77, 32), (1, 65, 66)])
def test_programs_of_odd_sizes_are_made_quickly_and_agree(
    batch: int, height: int, width: int, tmp_path: Path
) -> None:
    path = MODELS / "odd" / "deep-dynamo" / "unet" / "model.onnx"
    shapes = shapes_for(path, batch=batch, height=height, width=width)
    built = {}
    for spec in (sdkit_onnxruntime.CPU, sdkit_ggml.SPEC):
        start = time.process_time()
        built[spec.name] = build(spec, tmp_path / spec.name, onnx_file=path, shapes=shapes)
        seconds = time.process_time() - start
    assert seconds < SECONDS_A_PROGRAM
    sessions = [one.load() for one in built.values()]
    feeds = feeds_of(sessions[0])
    found, wanted = (one.run(feeds)["out_sample"] for one in sessions)
    assert float(np.abs(found - wanted).max()) <= TOLERANCE
