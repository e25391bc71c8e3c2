"""The components of small pipelines, from three exporters, against ONNX Runtime."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggml_harness import (
    CPU,
    PIPELINES,
    SAMPLE,
    SOFTWARE_GPU,
    UNET_TOLERANCE,
    by_float64,
    by_onnxruntime,
    compiled,
    differences,
    feeds_of,
    ggml_adapter,
    shapes_for,
    tolerance_of,
)
from sdkit_dispatch.contract import Device, GenerateRequest, Rejection, Shapes, TensorSpec
from sdkit_dispatch.diffusion.pipeline import DiffusionPipeline
from sdkit_dispatch.pipeline_files import Component, read_pipeline
from sdkit_ggml.engine_files import read_program

FP32 = sorted(
    path
    for folder in (SAMPLE, *PIPELINES.glob("*"))
    if not folder.name.endswith("fp16")
    for path in folder.glob("*/model.onnx")
)
PRECISE = {"fp16": 3e-2, "bf16": 2e-1, "q8_0": 2e-1, "q5_0": 1.5, "q4_0": 2.0}
"""Precision -> largest difference of the tiny pipelines, whose random weights of 16 to 64 columns
quantise badly: 1e-2, 5e-2, 8e-2, 0.4 and 0.6 were measured, of outputs up to 3.5."""
HALF_GRAPH_TOLERANCE = 2e-2
"""Of a float16 graph, which ONNX Runtime computes in float16 steps and ggml in float32."""
LARGE_TOLERANCE = 1e-5
"""Of pictures with up to 64 times the elements, among which the largest difference is looked for;
6e-6 was measured."""
VULKAN_TOLERANCE = 1e-4
"""In float32 (`GGML_VK_DISABLE_F16`); 4e-6 was measured, 5e-4 where float16 slips in."""
SECONDS_A_PROGRAM = 2.0
LEVELS = 1
"""Of 255: how far a pixel may be off after all steps."""
PICTURE = GenerateRequest(
    prompt="a red three",
    width_px=32,
    height_px=32,
    steps=4,
    guidance=3.0,
    seed=7,
    scheduler="euler",
)
BOUNDS = {
    # component: (operations, copies) of the CPU's program of the sample, at batch 1
    "text_encoder": (70, 6),
    "unet": (547, 21),
    "vae_decoder": (373, 6),
    "vae_encoder": (240, 7),
}
"""What the compiler was at; more is a step back."""

each_component = pytest.mark.parametrize(
    "path", FP32, ids=lambda path: f"{path.parent.parent.name}-{path.parent.name}"
)


@each_component
def test_numbers_are_those_of_onnx_runtime(path: Path, tmp_path: Path) -> None:
    session = compiled(path, shapes_for(path), tmp_path / "out").load()
    found = differences(path, session)
    for output, difference in found.items():
        assert difference <= tolerance_of(path.parent.name, output, found), output


@pytest.mark.parametrize("component", ["text_encoder", "text_encoder_2"])
def test_numbers_are_as_near_to_float64_as_onnx_runtimes(component: str, tmp_path: Path) -> None:
    path = PIPELINES / "sdxl-optimum" / component / "model.onnx"
    session = compiled(path, shapes_for(path), tmp_path / "out").load()
    feeds = feeds_of(session)
    found, wanted, exact = session.run(feeds), by_onnxruntime(path, feeds), by_float64(path, feeds)
    for name, numbers in exact.items():
        assert numbers.dtype == np.float64
        ours, theirs = np.abs(found[name] - numbers).max(), np.abs(wanted[name] - numbers).max()
        assert ours <= UNET_TOLERANCE
        assert ours <= 1.5 * theirs, "half an ulp more of a few is chance"


@pytest.mark.parametrize("component", ["text_encoder", "unet", "vae_decoder", "vae_encoder"])
def test_a_half_precision_graph_keeps_its_types_outside(component: str, tmp_path: Path) -> None:
    path = PIPELINES / "sd15-dynamo-fp16" / component / "model.onnx"
    session = compiled(path, shapes_for(path), tmp_path / "out").load()
    assert session.outputs[0].dtype == "float16"
    found = session.run(feeds_of(session))
    assert found[session.outputs[0].name].dtype == np.float16
    assert max(differences(path, session).values()) <= HALF_GRAPH_TOLERANCE


@pytest.mark.parametrize("precision", PRECISE)
def test_weights_of_fewer_bits_stay_within_their_bound(precision: Any, tmp_path: Path) -> None:
    path = PIPELINES / "sd15-optimum" / "unet" / "model.onnx"
    engine = compiled(path, shapes_for(path), tmp_path / "out", precision=precision)
    session = engine.load()
    assert session.facts["precision"] == precision
    (difference,) = differences(path, session).values()
    # It must differ too, or the weights are what they were.
    assert 1e-5 < difference <= PRECISE[precision]


@pytest.mark.parametrize(
    ("height_px", "width_px", "batch"),
    [(128, 128, 1), (128, 1024, 1), (1024, 144, 1), (272, 208, 2), (144, 128, 4)],
)
def test_any_size_runs_and_its_program_is_made_quickly(
    height_px: int, width_px: int, batch: int, tmp_path: Path
) -> None:
    # Even latents: ONNX Runtime runs the file as it was exported. `test_odd_sizes` has the others.
    path = PIPELINES / "sd15-optimum" / "unet" / "model.onnx"
    shapes = shapes_for(path, batch=batch, height=height_px // 8, width=width_px // 8)
    start = time.process_time()
    engine = compiled(path, shapes, tmp_path / "out")
    assert time.process_time() - start < SECONDS_A_PROGRAM
    (difference,) = differences(path, engine.load()).values()
    assert difference <= LARGE_TOLERANCE


@pytest.mark.parametrize(("height", "width", "batch"), [(17, 33, 1), (25, 16, 3)])
def test_a_decoder_takes_odd_latents(height: int, width: int, batch: int, tmp_path: Path) -> None:
    path = PIPELINES / "sd15-dynamo" / "vae_decoder" / "model.onnx"
    shapes = shapes_for(path, batch=batch, height=height, width=width)
    (difference,) = differences(path, compiled(path, shapes, tmp_path / "out").load()).values()
    assert difference <= tolerance_of("vae_decoder", "sample")


def test_a_picture_is_the_same_by_blocks_of_rows(tmp_path: Path) -> None:
    path = SAMPLE / "vae_decoder" / "model.onnx"
    shapes = shapes_for(path, batch=1, height=16, width=24)
    whole = compiled(path, shapes, tmp_path / "whole")
    parts = compiled(path, shapes, tmp_path / "parts", options={"block_mb": 1})
    one, other = whole.load(), parts.load()
    assert int(other.facts["nodes"]) > int(one.facts["nodes"])
    assert int(other.facts["arena_bytes"]) < int(one.facts["arena_bytes"])
    feeds = feeds_of(one)
    np.testing.assert_allclose(
        one.run(feeds)["sample"], other.run(feeds)["sample"], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("component", BOUNDS)
def test_the_counts_of_operations_and_copies_do_not_grow(component: str, tmp_path: Path) -> None:
    path = SAMPLE / component / "model.onnx"
    engine = compiled(path, shapes_for(path, batch=1), tmp_path / "out")
    program = read_program(engine.folder)
    (variant,) = (one for one in program.variants if one.device == "cpu")
    nodes, copies = BOUNDS[component]
    assert variant.nodes <= nodes
    assert variant.copies <= copies


def test_two_engines_of_one_graph_are_alike_byte_by_byte(tmp_path: Path) -> None:
    path = SAMPLE / "vae_decoder" / "model.onnx"
    one = compiled(path, shapes_for(path), tmp_path / "one")
    two = compiled(path, shapes_for(path), tmp_path / "two")
    for name in ("weights.gguf", "program.json"):
        assert (one.folder / name).read_bytes() == (two.folder / name).read_bytes()


def test_programs_of_two_sizes_go_with_one_file_of_weights(tmp_path: Path) -> None:
    # Weights lie in an order that no size changes: a new size is a new program alone.
    path = SAMPLE / "unet" / "model.onnx"
    one = compiled(path, shapes_for(path, height=8, width=8), tmp_path / "one")
    two = compiled(path, shapes_for(path, height=24, width=16), tmp_path / "two")
    assert (one.folder / "weights.gguf").read_bytes() == (two.folder / "weights.gguf").read_bytes()
    assert (one.folder / "program.json").read_bytes() != (two.folder / "program.json").read_bytes()


class OnnxRuntimeSession:
    """A graph in ONNX Runtime, as a session."""

    facts: Mapping[str, str] = {}

    def __init__(self, component: Component, shapes: Shapes) -> None:
        self._path = component.onnx
        self.inputs = tuple(
            TensorSpec(name=one.name, dtype=one.dtype, shape=shapes[one.name])
            for one in component.inputs
        )
        self.outputs = tuple(
            TensorSpec(name=one.name, dtype=one.dtype, shape=()) for one in component.outputs
        )

    def run(self, feeds: Any) -> Any:
        return by_onnxruntime(self._path, feeds)

    def close(self) -> None:
        pass


def picture(folder: Path, device: Device, scratch: Path) -> Any:
    """Returns a picture that a whole pipeline of ggml engines makes."""
    pipeline = read_pipeline(folder)

    def opened(component: str, shapes: Shapes) -> Any:
        path = pipeline.components[component].onnx
        out = scratch / f"{component}-{len(list(scratch.iterdir()))}"
        return compiled(path, shapes, out, device=device).load()

    scratch.mkdir(parents=True)
    with DiffusionPipeline(pipeline, opened) as diffusion:
        return diffusion.generate(PICTURE, lambda progress: None).images


def reference_picture(folder: Path) -> Any:
    """Returns the picture that ONNX Runtime makes."""
    pipeline = read_pipeline(folder)

    def opened(component: str, shapes: Shapes) -> Any:
        return OnnxRuntimeSession(pipeline.components[component], shapes)

    with DiffusionPipeline(pipeline, opened) as diffusion:
        return diffusion.generate(PICTURE, lambda progress: None).images


@pytest.mark.parametrize("name", ["sample", "sd15-torchscript", "sdxl-dynamo"])
def test_a_picture_is_that_of_onnx_runtime(name: str, tmp_path: Path) -> None:
    folder = SAMPLE if name == "sample" else PIPELINES / name
    found, wanted = picture(folder, CPU, tmp_path / "engines"), reference_picture(folder)
    assert found.shape == wanted.shape
    assert found.std() > 1
    assert np.abs(found.astype(int) - wanted).max() <= LEVELS


def vulkan_differences(scratch: Path) -> None:
    """Prints the differences of all components on the software GPU; run in a process of its own."""
    adapter = ggml_adapter()
    probed = adapter.probe(SOFTWARE_GPU)
    if isinstance(probed, Rejection):
        print(f"skip: {probed.reason}")
        return
    for folder in (SAMPLE, PIPELINES / "sd15-optimum", PIPELINES / "sdxl-dynamo"):
        for path in sorted(folder.glob("*/model.onnx")):
            out = scratch / folder.name / path.parent.name
            engine = compiled(path, shapes_for(path, batch=1), out, device=SOFTWARE_GPU)
            session = engine.load()
            for output, difference in differences(path, session).items():
                print(f"{folder.name} {path.parent.name} {output} {difference:.3g}")
            session.close()
    found = picture(SAMPLE, SOFTWARE_GPU, scratch / "picture").astype(int)
    print(f"picture {np.abs(found - reference_picture(SAMPLE)).max() * VULKAN_TOLERANCE / LEVELS}")


def test_numbers_on_a_vulkan_driver_are_those_of_onnx_runtime(tmp_path: Path) -> None:
    ggml_adapter()
    environ = {**os.environ, "GGML_VK_VISIBLE_DEVICES": "0"}
    code = (
        "import sys; from pathlib import Path; from test_ggml_pipelines import vulkan_differences; "
        "vulkan_differences(Path(sys.argv[1]))"
    )
    paths = [str(Path(__file__).parent), *sys.path]
    environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    if lines and lines[0].startswith("skip: "):
        pytest.skip(f"no Vulkan driver here (Mesa's lavapipe would do): {lines[0]}")
    found = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
    assert len(found) >= 14
    assert not {name: value for name, value in found.items() if not value <= VULKAN_TOLERANCE}
