"""ONNX files that nobody exported: an error of ours in the caller, and never its death."""

from contextlib import suppress
from pathlib import Path

import pytest

from fuzz_graphs import SHAPES, compile_in_a_worker, graphs
from fuzzing import fuzz
from sdkit_dispatch.errors import DispatchError
from sdkit_dispatch.graph.static_shapes import make_static
from sdkit_dispatch.graph.weight_files import load_small_tensors, pieces_of
from sdkit_dispatch.pipeline_files import component_digests, read_pipeline
from sdkit_null import SPEC
from toy_pipeline import make_toy_pipeline


@pytest.fixture
def pipeline(tmp_path) -> Path:
    return make_toy_pipeline(tmp_path / "pipeline", external=True)


def read_all(pipeline: Path) -> None:
    """What the caller's process does with a graph, before any worker sees it."""
    component = read_pipeline(pipeline).components["unet"]
    component_digests(component)
    model = make_static(component.onnx, SHAPES)
    load_small_tensors(model, component.onnx.parent, 1 << 20)
    for tensor in model.graph.initializer:
        for _ in pieces_of(tensor, component.onnx.parent):
            pass


@pytest.mark.filterwarnings("ignore:Ignoring unknown external data key:UserWarning")
def test_graphs_in_the_callers_process(pipeline):
    file = pipeline / "unet" / "model.onnx"

    def check(data: bytes) -> None:
        file.write_bytes(data)
        with suppress(DispatchError):
            read_all(pipeline)

    fuzz(graphs(file.read_bytes()), check, examples=150)
    assert sorted(path.name for path in pipeline.parent.iterdir()) == ["pipeline"]


def test_graphs_in_a_worker(pipeline, tmp_path):
    compile_in_a_worker(SPEC, pipeline, tmp_path, examples=8)
