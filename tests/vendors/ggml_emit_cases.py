"""Run with the libraries that emitted programs are linked to: engines, programs and numbers.

    SDKIT_GGML_DIR=.../lib64 python ggml_emit_cases.py OUT

In OUT/<case>: program/ as emitted, in/ the feeds, wanted/<variant>/ what our executor makes of
them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ggml_harness import PIPELINES, SAMPLE, GgmlEngine, compiled, feeds_of, shapes_for
from sdkit_dispatch.contract import Precision
from sdkit_ggml.emit.names import identifiers
from sdkit_ggml.emit.program_folder import write_program
from sdkit_ggml.engine_files import map_weights, read_program
from sdkit_ggml.runtime.devices import offered_devices
from sdkit_ggml.runtime.executor import Executor
from sdkit_ggml.runtime.loader import load_runtime
from sdkit_ggml.session import GgmlSession
from test_ggml_siblings import compiled as compiled_beside
from test_ggml_siblings import resizing

HOSTILE = '"; #include <x>\n*/ \\'
"""Ends a string, a comment and a line, and begins another."""


@dataclass(frozen=True, kw_only=True)
class Case:
    component: str
    pipeline: Path = SAMPLE
    precision: Precision = "fp32"
    batch: int = 1
    side: int = 8
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "text_encoder": Case(component="text_encoder", batch=2),
    "unet": Case(component="unet", batch=2),
    "vae_decoder": Case(component="vae_decoder"),
    # Larger than a block: convolved by parts.
    "vae_blocks": Case(
        component="vae_encoder", side=32, options={"block_mb": 1, "winograd": False}
    ),
    "text_float16": Case(
        component="text_encoder", pipeline=PIPELINES / "sd15-dynamo-fp16", precision="fp16"
    ),
    "vae_float16": Case(
        component="vae_decoder", pipeline=PIPELINES / "sd15-dynamo-fp16", precision="fp16"
    ),
    "unet_q8": Case(
        component="unet",
        pipeline=PIPELINES / "sd15-optimum",
        precision="q8_0",
        options={"winograd": False},
    ),
    "hostile": Case(component=f"unet{HOSTILE}"),
    # Shares the weights of another size, and has some of its own in a second file.
    "sibling": Case(component="resizing"),
}


def hostile_graph(path: Path) -> Path:
    """Names that would be code, macros, keywords, or the same, if they were taken as they are."""
    names = [f"x{HOSTILE}", "EOF", "int", "a/b", "a.b"]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in names]
    weight = numpy_helper.from_array(np.ones((2, 4), np.float32), f"w{HOSTILE}")
    nodes = [helper.make_node("Add", [names[0], f"w{HOSTILE}"], ["s0"], name=f"n{HOSTILE}")]
    for place, name in enumerate(names[1:]):
        nodes.append(helper.make_node("Mul", [f"s{place}", name], [f"s{place + 1}"], name="??/"))
    outputs = [f"y{HOSTILE}", "y;", "ggml_tensor"]
    nodes += [helper.make_node("Sin", [f"s{i}"], [name]) for i, name in enumerate(outputs)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in outputs]
    graph = helper.make_graph(nodes, "g", inputs, values, [weight])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def prepare(name: str, case: Case, out: Path) -> None:
    """Writes what a test of a case compares."""
    out.mkdir()
    made = _engine(name, case, out)
    request = replace(made.engine.request, component=case.component)
    (out / "program").mkdir()
    write_program(replace(made.engine, request=request), out / "program")
    feeds = feeds_of(made.load())
    _save(out / "in", feeds)
    program, runtime = read_program(made.folder), load_runtime()
    (processor,) = (one for one in offered_devices(runtime.library) if one.kind == "cpu")
    for variant in program.variants:
        # What is meant for GPUs runs on a processor too.
        only = msgspec.structs.replace(variant, device="cpu")
        alone = msgspec.structs.replace(program, variants=(only,))
        weights = map_weights(made.folder, program)
        executor = Executor(runtime.library, processor, alone, weights, threads=1)
        session = GgmlSession(alone, executor, {})
        _save(out / "wanted" / variant.name, session.run(feeds))
        session.close()


def _engine(name: str, case: Case, out: Path) -> GgmlEngine:
    if name == "sibling":
        path = resizing(out)
        first = compiled_beside(path, {"x": (1, 1, 8, 8)}, out / "first")
        return compiled_beside(path, {"x": (1, 1, 6, 9)}, out / "engine", (first,))
    if name == "hostile":
        path = hostile_graph(out / "model.onnx")
        shapes = {value.name: (2, 4) for value in onnx.load(path).graph.input}
    else:
        path = case.pipeline / case.component / "model.onnx"
        shapes = shapes_for(path, batch=case.batch, height=case.side, width=case.side)
    return compiled(path, shapes, out / "engine", precision=case.precision, options=case.options)


def _save(folder: Path, arrays: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True)
    for name, file in identifiers(arrays).items():
        np.save(folder / f"{file}.npy", arrays[name])


if __name__ == "__main__":
    for case_name, one in CASES.items():
        prepare(case_name, one, Path(sys.argv[1]) / case_name)
