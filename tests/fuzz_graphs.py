"""ONNX graphs that nobody exported, and what a worker makes of them."""

import importlib.metadata
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from fuzzing import fuzz, mutated
from sdkit_dispatch.contract import BuildRequest, Device, Plan, VendorSpec, no_report
from sdkit_dispatch.errors import DispatchError
from sdkit_dispatch.worker_client import WorkerClient
from sdkit_dispatch.worker_process import WorkerSettings

SHAPES = {"sample": (1, 4, 8, 8), "timestep": (), "encoder_hidden_states": (1, 7, 4)}
ODD_INTS = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 2**31, 2**32, 2**50, 2**63 - 1])


def graphs(sound: bytes) -> st.SearchStrategy[bytes]:
    return mutated(sound) | with_odd_fields(sound)


@st.composite
def with_odd_fields(draw: st.DrawFn, sound: bytes) -> bytes:
    """A graph that is well-formed protobuf, with values in it that cannot be."""
    model = onnx.load_from_string(sound)
    for _ in range(draw(st.integers(1, 3))):
        draw(st.sampled_from(EDITS))(draw, model)
    return model.SerializeToString()


def _tensor(draw: st.DrawFn, model: onnx.ModelProto) -> onnx.TensorProto:
    return draw(st.sampled_from(list(model.graph.initializer)))


def _dims(draw: st.DrawFn, model: onnx.ModelProto) -> None:
    tensor = _tensor(draw, model)
    del tensor.dims[:]
    tensor.dims.extend(draw(st.lists(ODD_INTS, max_size=5)))


def _element_type(draw: st.DrawFn, model: onnx.ModelProto) -> None:
    _tensor(draw, model).data_type = draw(st.integers(-1, 30))


def _external(draw: st.DrawFn, model: onnx.ModelProto) -> None:
    tensor = _tensor(draw, model)
    tensor.data_location = TensorProto.EXTERNAL
    key = draw(st.sampled_from(["location", "offset", "length", "checksum", "basepath"]))
    value = draw(
        st.sampled_from(["", "..", "/", "../x", "a" * 300, "model.onnx", "\0", "/dev/zero", "١٢"])
        | ODD_INTS.map(str)
    )
    for row in tensor.external_data:
        if row.key == key:
            row.value = value
            return
    tensor.external_data.add(key=key, value=value)


def _input_dims(draw: st.DrawFn, model: onnx.ModelProto) -> None:
    value = draw(st.sampled_from([*model.graph.input, *model.graph.output]))
    for dim in value.type.tensor_type.shape.dim:
        dim.dim_value = draw(ODD_INTS)


def _input_type(draw: st.DrawFn, model: onnx.ModelProto) -> None:
    value = draw(st.sampled_from([*model.graph.input, *model.graph.output]))
    value.type.tensor_type.elem_type = draw(st.integers(-1, 30))


def _name(draw: st.DrawFn, model: onnx.ModelProto) -> None:
    value = draw(st.sampled_from([*model.graph.input, *model.graph.initializer]))
    value.name = draw(st.sampled_from(["", "x" * 1000, "\0", "sample", "kernel", "../x", "é"]))


def _typed(draw: st.DrawFn, model: onnx.ModelProto) -> None:
    tensor = _tensor(draw, model)
    tensor.ClearField("raw_data")
    tensor.ClearField("data_location")
    tensor.int32_data.extend(draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8)))


def _branch(draw: st.DrawFn, model: onnx.ModelProto) -> None:
    value = numpy_helper.from_array(np.zeros(2, np.float32))
    value.dims[0] = draw(ODD_INTS)
    inner = helper.make_graph([helper.make_node("Constant", [], ["c"], value=value)], "b", [], [])
    node = helper.make_node("If", ["c"], ["d"], then_branch=inner, else_branch=inner)
    model.graph.node.append(node)


def _remove(draw: st.DrawFn, model: onnx.ModelProto) -> None:
    field = draw(st.sampled_from(["node", "input", "output", "initializer"]))
    rows = getattr(model.graph, field)
    if rows and (field != "initializer" or len(rows) > 1):
        del rows[0]


EDITS: list[Callable[[st.DrawFn, onnx.ModelProto], None]] = [
    *(_dims, _element_type, _external, _typed, _branch, _name, _remove),
    *(_input_dims, _input_type),
]


def compile_in_a_worker(spec: VendorSpec, pipeline: Path, folder: Path, *, examples: int) -> None:
    """Compiles mutations of a UNet; whatever becomes of the worker, only our errors arrive."""
    for package in spec.runtime_packages:
        try:
            importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{package}, the runtime of {spec.name}, is not installed")
    file, out = pipeline / "unet" / "model.onnx", folder / "out"
    settings = WorkerSettings(timeouts_s={"compile": 60}, scratch=folder / "scratch", threads=1)
    device = Device(id="cpu", kind="cpu", maker="unknown", name="a processor", arch="x86_64")
    clients: list[WorkerClient] = []

    def client() -> WorkerClient:
        if not clients or not clients[-1].is_alive:
            clients.append(WorkerClient(spec, settings=settings))
        return clients[-1]

    plan = client().plan(device, None, {})
    assert isinstance(plan, Plan), plan
    request = BuildRequest(
        vendor=spec.name,
        revision=spec.revision,
        runtime=plan.runtime,
        target=plan.target,
        component="unet",
        graph_digest="",
        weights_digest="",
        precision=plan.precision,
        shapes=SHAPES,
        options=plan.options,
    )

    def check(data: bytes) -> None:
        file.write_bytes(data)
        out.mkdir()
        try:
            with suppress(DispatchError):
                client().compile(request, file, out, device=device, report=no_report)
        finally:
            shutil.rmtree(out)

    try:
        fuzz(graphs(file.read_bytes()), check, examples=examples)
    finally:
        for one in clients:
            one.close()
