"""Graphs that nobody exported, in the workers of real runtimes: these may die, the caller not."""

import pytest

from fuzz_graphs import compile_in_a_worker
from sdkit_ggml import SPEC as GGML
from sdkit_onnxruntime import CPU as ONNXRUNTIME
from sdkit_openvino import SPEC as OPENVINO
from toy_pipeline import make_toy_pipeline


@pytest.mark.parametrize("spec", [ONNXRUNTIME, OPENVINO, GGML], ids=lambda spec: spec.name)
def test_graphs_in_a_worker(spec, tmp_path):
    pipeline = make_toy_pipeline(tmp_path / "pipeline", external=True)
    compile_in_a_worker(spec, pipeline, tmp_path, examples=8)
