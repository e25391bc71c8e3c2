"""An inference session that runs on the GPU's provider, or is not opened at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from sdkit_dispatch.contract import Shapes
from sdkit_dispatch.graph.precision import Conversion, GraphPrecision, write_at_precision
from sdkit_dispatch.graph.static_shapes import make_static
from sdkit_onnxruntime.placement import (
    RECORD_ENTRY,
    Placement,
    flops_by_node,
    placement_of,
    why_not_on,
)

GRAPH_FILE = "model.onnx"


class NotOnGpuError(Exception):
    """ONNX Runtime opened a session, but it does not run where it was asked to."""


def open_on(
    provider: str,
    options: Mapping[str, str],
    model: str | bytes,
    *,
    is_strict: bool,
    flops: Mapping[str, int] | None = None,
    threads: int | None = None,
) -> tuple[ort.InferenceSession, Placement]:
    """Returns a session and where its nodes run.

    Args:
        provider: The execution provider.
        options: Its own, as it names them.
        model: A file, or a serialized graph.
        is_strict: Not one node may run on the processor.
        flops: As `flops_by_node` gives it.
        threads: Of the processor's part.

    Raises:
        NotOnGpuError: With how many nodes run where.
        Exception: Whatever the bindings raise; they share no base class.
    """
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    settings.add_session_config_entry(RECORD_ENTRY, "1")
    if is_strict:
        settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if threads is not None:
        settings.intra_op_num_threads = threads
    # Without enable_fallback=0 a provider that does not load is replaced by the processor's. With
    # it, 1.27 raises for MIGraphX, but 1.31 still does that for CUDA: hence the checks below.
    session = ort.InferenceSession(
        model, settings, providers=[(provider, dict(options))], enable_fallback=0
    )
    if provider not in session.get_providers():
        raise NotOnGpuError(
            f"asked for {provider}, ONNX Runtime gave {', '.join(session.get_providers())}"
        )
    placement = placement_of(session.get_provider_graph_assignment_info(), flops or {})
    reason = why_not_on(placement, provider)
    if reason:
        raise NotOnGpuError(reason)
    return session, placement


def write_graph(
    source: Path,
    shapes: Shapes,
    precision: GraphPrecision,
    out: Path,
    *,
    keep: tuple[str, ...] = (),
    on_fraction: Any = lambda fraction: None,  # Any: Callable[[float], None]
) -> Conversion:
    """Writes the graph of an engine with static shapes and all its weights into the folder `out`.

    Raises:
        PipelineError: The graph or its data cannot be read, or the shapes do not fit.
    """
    model = make_static(source, shapes)
    return write_at_precision(
        model, source.parent, out / GRAPH_FILE, precision, keep=keep, on_fraction=on_fraction
    )


def flops_of_file(path: Path) -> dict[str, int]:
    """Returns node name -> arithmetic of an engine's graph."""
    return flops_by_node(onnx.load(path, load_external_data=False))


def one_node_model() -> bytes:
    """Returns a graph that only a working provider runs: y = x * x, float32 `[4]`."""
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [4])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [4])
    node = onnx.helper.make_node("Mul", ["x", "x"], ["y"], name="square")
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "probe", [value], [result]),
        opset_imports=[onnx.helper.make_opsetid("", 17)],
        ir_version=8,
    )
    return bytes(model.SerializeToString())
