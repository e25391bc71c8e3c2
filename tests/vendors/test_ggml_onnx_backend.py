"""The node cases of ONNX's own backend test suite, against the ggml compiler.

Of them: those that use only operators of Stable Diffusion 1.x, 2.x, XL, 3 and FLUX graphs
(data/ggml/operators.json), on float32 tensors of rank 4 or less. Integers and scalars are baked
in, as a pipeline has them, and so is what a layer holds as weights. Each case runs in a forked
process of its own: an assertion of ggml would end it.

Run as a script, this file writes what each case did to the file it is given.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from ggml_harness import ggml_adapter

DATA = Path(__file__).parent / "data" / "ggml"
RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""What ONNX's own runner allows (its absolute 1e-7 is below the rounding of one float32 sum)."""
LEAST_PASSING = 0.95
WEIGHTS: dict[str, tuple[int, ...]] = {
    "Clip": (1, 2),
    "Conv": (1, 2),
    "Pad": (2,),
    "Pow": (1,),
    "Resize": (1, 2),
    "Upsample": (1,),
    "Max": (1,),
    "Min": (1,),
}
"""Operator -> inputs that are weights or parameters in any pipeline, and baked in here."""

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="cases run in forked processes")


def operators() -> frozenset[str]:
    listed = json.loads((DATA / "operators.json").read_text(encoding="utf-8"))
    return frozenset(name for names in listed["operators"].values() for name in names)


def cases() -> Iterator[Any]:  # Any: onnx's TestCase
    """Yields the cases that the compiler is meant for."""
    from onnx.backend.test.loader import load_model_tests

    known = operators()
    for case in load_model_tests(kind="node"):
        model = case.model
        nodes = [*model.graph.node, *(node for f in model.functions for node in f.node)]
        if not all(node.op_type in known and node.domain in ("", "ai.onnx") for node in nodes):
            continue
        if _is_ours(model, case):
            yield case


def _is_ours(model: onnx.ModelProto, case: Any) -> bool:
    values = [*model.graph.input, *model.graph.output]
    kinds = [value.type.tensor_type.elem_type for value in values]
    if not all(value.type.HasField("tensor_type") for value in values):
        return False
    if not all(kind in (1, 6, 7, 9) for kind in kinds) or 1 not in kinds[: len(model.graph.input)]:
        return False
    if model.graph.output[0].type.tensor_type.elem_type != 1:
        return False
    arrays = [array for part in case.data_sets[0] for array in part]
    return all(
        isinstance(array, np.ndarray | np.generic) and array.ndim <= 4 and array.size
        for array in arrays
    )


def outcome(case: Any) -> str:  # Any: onnx's TestCase
    """Returns "" if a case passes, else why not, beginning with "refused" or "wrong"."""
    from sdkit_dispatch.contract import BuildRequest, Device, Engine
    from sdkit_dispatch.errors import CompileError
    from sdkit_ggml.adapter import GgmlAdapter

    model = case.model
    inputs, outputs = case.data_sets[0]
    arrays = dict(zip([value.name for value in model.graph.input], inputs, strict=True))
    baked = {name for name, array in arrays.items() if array.dtype != np.float32 or array.ndim == 0}
    for node in model.graph.node:
        baked |= {
            node.input[place] for place in WEIGHTS.get(node.op_type, ()) if place < len(node.input)
        } & set(arrays)
    kept = [value for value in model.graph.input if value.name not in baked]
    model.graph.initializer.extend(
        numpy_helper.from_array(arrays[name], name) for name in sorted(baked)
    )
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.ir_version = max(model.ir_version, 4)
    cpu = Device(id="cpu", kind="cpu", maker="", name="the processor")
    adapter = GgmlAdapter()
    adapter.threads = 1
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.onnx"
        onnx.save(model, path)
        request = BuildRequest(
            vendor="ggml",
            revision=1,
            runtime=str(adapter.probe(cpu)),
            target="",
            component=case.name,
            graph_digest="0" * 64,
            weights_digest="",
            precision="fp32",
            shapes={value.name: arrays[value.name].shape for value in kept},
        )
        out = Path(scratch) / "engine"
        out.mkdir()
        try:
            adapter.compile(request, path, out, device=cpu, report=lambda progress: None)
        except CompileError as error:
            return f"refused: {error.message}"
        engine = Engine(key="0", request=request, folder=str(out), onnx=str(path))
        session = adapter.load(engine, cpu)
        found = session.run({value.name: arrays[value.name] for value in kept})
        for got, wanted in zip(found.values(), outputs, strict=True):
            if got.shape != wanted.shape or got.dtype != wanted.dtype:
                return f"wrong: {got.dtype}{got.shape}, not {wanted.dtype}{wanted.shape}"
            if not np.allclose(got, wanted, RELATIVE, ABSOLUTE, equal_nan=True):
                return f"wrong: off by {np.abs(got - wanted).max():.3g}"
    return ""


def run_all(report: Path) -> None:
    results = {}
    for case in cases():
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                words = outcome(case)
            except BaseException as error:
                words = f"wrong: {type(error).__name__}: {error}"
            os.write(writer, words.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            words = stream.read().decode()
        _, status = os.waitpid(child, 0)
        results[case.name] = words if status == 0 else f"wrong: ended with status {status}"
    report.write_text(json.dumps(results, indent=1, sort_keys=True), encoding="utf-8")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    ggml_adapter()
    report = tmp_path_factory.mktemp("onnx") / "results.json"
    paths = [str(Path(__file__).parent), *sys.path]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # A process of its own, for one with threads must not fork.
    subprocess.run(
        [sys.executable, __file__, str(report)],
        env=environ,
        check=True,
        timeout=900,
        stderr=subprocess.DEVNULL,
    )
    found: dict[str, str] = json.loads(report.read_text(encoding="utf-8"))
    return found


@needs_fork
def test_no_case_of_the_onnx_suite_gives_a_wrong_answer_or_ends_its_process(
    results: dict[str, str],
) -> None:
    assert not {name: words for name, words in results.items() if words.startswith("wrong")}


@needs_fork
def test_at_least_95_percent_of_the_onnx_suite_pass(results: dict[str, str]) -> None:
    passed = sum(not words for words in results.values())
    assert passed >= LEAST_PASSING * len(results), f"{passed} of {len(results)}"


@needs_fork
def test_refused_cases_are_the_ones_in_the_table(results: dict[str, str]) -> None:
    table = json.loads((DATA / "refused.json").read_text(encoding="utf-8"))
    refused = {name: words for name, words in results.items() if words.startswith("refused")}
    assert sorted(refused) == sorted(table)
    for name, words in refused.items():
        assert table[name] in words


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
