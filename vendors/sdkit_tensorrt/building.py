"""A graph -> a serialized engine, with either runtime."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from sdkit_dispatch.contract import Precision, Progress, Report, Shapes
from sdkit_dispatch.errors import CompileError
from sdkit_dispatch.graph.precision import GraphPrecision, is_half_graph, write_at_precision
from sdkit_dispatch.graph.size_ranges import Ranges
from sdkit_dispatch.graph.static_shapes import free_inputs, make_static, read_graph
from sdkit_dispatch.graph.tensor_sizes import tensor_bytes
from sdkit_tensorrt.build_memory import estimated_peak_bytes, machine_bytes
from sdkit_tensorrt.builder_log import (
    Lines,
    Monitoring,
    Runtime,
    new_log,
    new_monitor,
    throttled,
)
from sdkit_tensorrt.profiles import Profile, free_shapes, profiles_for
from sdkit_tensorrt.refusals import (
    CONTRIB_DOMAINS,
    MISSING_OPERATOR,
    BadNode,
    compile_error,
    parse_error,
)
from sdkit_tensorrt.undisturbed import undisturbed

logger = logging.getLogger(__name__)

FLOAT8_TYPES = frozenset(
    {
        onnx.TensorProto.FLOAT8E4M3FN,
        onnx.TensorProto.FLOAT8E5M2,
        onnx.TensorProto.FLOAT8E4M3FNUZ,
        onnx.TensorProto.FLOAT8E5M2FNUZ,
    }
)
_GB = 1e9
_GRAPH_PRECISIONS: Mapping[Precision, GraphPrecision] = {
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    # What is not quantised is float16.
    "int8": "fp16",
}


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """What is to be built.

    Attributes:
        who: The runtime, for messages: "tensorrt-rtx 1.7.1.116".
        ranges: Size ranges that the engine is to serve; without any, `shapes` alone.
        has_fp8: Whether the target computes in FP8.
        must_fit: Whether a build that needs more memory than there is is refused.
    """

    who: str
    component: str
    onnx: Path
    shapes: Shapes
    precision: Precision
    ranges: Sequence[Ranges] = ()
    keep_fp32: tuple[str, ...] = ()
    has_fp8: bool = True
    must_fit: bool = True


@dataclass(frozen=True, kw_only=True)
class Built:
    """A serialized engine (`Any`: an IHostMemory), its profiles and its outputs' shapes."""

    plan: Any
    profiles: tuple[Profile, ...]
    outputs: Mapping[str, tuple[int, ...]]
    graph: onnx.GraphProto


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A graph in the precision of its build.

    Attributes:
        graph: The serialized model, whose external data lies beside `path`.
    """

    blueprint: Blueprint
    model: onnx.ModelProto
    graph: bytes
    path: Path
    profiles: tuple[Profile, ...]


def prepare(blueprint: Blueprint, workshop: Path, report: Report) -> Prepared:
    """Reads a graph, refuses what cannot be built, and writes it in the precision of the build.

    Args:
        blueprint: What to build.
        workshop: An empty folder.
        report: Called often; what it raises comes out of here as it is.

    Raises:
        CompileError: The graph, its sizes or the machine's memory do not fit the build.
    """
    component, report = blueprint.component, throttled(report)
    report(Progress(phase=f"read {component}"))
    model = read_graph(blueprint.onnx)
    profiles = profiles_for(component, model.graph, blueprint.shapes, blueprint.ranges)
    shapes = free_shapes(profiles)
    model = _with_shapes(blueprint, model, shapes)
    _check_graph(blueprint, model)
    _check_memory(blueprint, model)
    graph, path = _at_precision(blueprint, model, workshop, report)
    return Prepared(blueprint=blueprint, model=model, graph=graph, path=path, profiles=profiles)


def build_plan(
    trt: Runtime,
    prepared: Prepared,
    report: Report,
    *,
    configure: Callable[[Any, Any], None],  # Any: an IBuilderConfig and an ILogger
) -> Built:
    """Builds an engine.

    Args:
        trt: The module of the runtime.
        prepared: The graph.
        report: Called often; what it raises comes out of here as it is.
        configure: Sets targets, flags and the like on the builder's configuration.

    Raises:
        CompileError: With the node and operator at fault where the runtime names them.
    """
    with undisturbed():
        return _built(trt, prepared, throttled(report), configure)


def _built(
    trt: Runtime,
    prepared: Prepared,
    report: Report,
    configure: Callable[[Any, Any], None],  # Any: an IBuilderConfig and an ILogger
) -> Built:
    blueprint, model, lines = prepared.blueprint, prepared.model, Lines()
    component = blueprint.component
    log = new_log(trt, lines)
    monitoring = Monitoring(component, report)
    monitor = new_monitor(trt, monitoring)  # it must outlive everything that the builder made
    builder = network = parser = config = None
    try:
        builder = trt.Builder(log)
        network = builder.create_network(_network_flags(trt))
        parser = trt.OnnxParser(network, log)
        report(Progress(phase=f"parse {component}"))
        _parse(parser, prepared, lines)
        config = builder.create_builder_config()
        config.progress_monitor = monitor
        configure(config, log)
        for profile in prepared.profiles:
            _add_profile(builder, config, network, profile, blueprint, lines)
        plan = builder.build_serialized_network(network, config)
        if monitoring.stopped_by is not None:
            raise monitoring.stopped_by
        if plan is None:
            raise compile_error(blueprint.who, component, lines.words)
        outputs = {
            network.get_output(index).name: tuple(network.get_output(index).shape)
            for index in range(network.num_outputs)
        }
    finally:
        # Here and now, in this order: the traceback of an error would keep them.
        del config, parser, network, builder
    report(Progress(phase=f"compile {component}", fraction=1.0))
    for line in dict.fromkeys(lines.warnings):
        logger.info("%s: %s", component, line)
    return Built(plan=plan, profiles=prepared.profiles, outputs=outputs, graph=model.graph)


def _with_shapes(
    blueprint: Blueprint, model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]
) -> onnx.ModelProto:
    static = make_static(model, blueprint.shapes)
    if not any(-1 in shape for shape in shapes.values()):
        return static
    for value in free_inputs(static.graph):
        for axis, size in enumerate(shapes[value.name]):
            if size == -1:
                dim = value.type.tensor_type.shape.dim[axis]
                dim.Clear()
                dim.dim_param = f"{value.name}_{axis}"
    return static


def _check_graph(blueprint: Blueprint, model: onnx.ModelProto) -> None:
    """Refuses what the builder would fail on late, or, with FP8, not at all."""
    held = {tensor.data_type for tensor in model.graph.initializer}
    for node in model.graph.node:
        held |= {one.i for one in node.attribute if one.name in ("to", "output_dtype")}
        held |= {one.t.data_type for one in node.attribute if one.HasField("t")}
    if held & FLOAT8_TYPES and not blueprint.has_fp8:
        raise CompileError(
            f"{blueprint.who} refuses {blueprint.component}: the graph holds FP8 values, and the "
            "target does not compute in FP8",
            hint="build for sm_89 or newer, or take a graph in float16",
        )
    is_quantised = any(node.op_type == "DequantizeLinear" for node in model.graph.node)
    if blueprint.precision == "int8" and not is_quantised:
        raise CompileError(
            f"{blueprint.who} refuses {blueprint.component}: int8 comes from the graph, and this "
            "one has no QuantizeLinear or DequantizeLinear",
            hint="quantise the graph first, or ask for --precision fp16",
        )


def _check_memory(blueprint: Blueprint, model: onnx.ModelProto) -> None:
    is_half = blueprint.precision != "fp32"
    weights_bytes = sum(
        tensor_bytes(tensor) // (2 if is_half and tensor.data_type == 1 else 1)
        for tensor in model.graph.initializer
    )
    peak, have = estimated_peak_bytes(weights_bytes), machine_bytes()
    if have is None or peak <= have:
        return
    sentence = (
        f"building {blueprint.component} takes about {peak / _GB:.1f} GB of memory "
        f"(3.4 times its {weights_bytes / _GB:.1f} GB of weights), and there are {have / _GB:.1f}"
    )
    if blueprint.must_fit:
        raise CompileError(
            f"{blueprint.who}: {sentence}",
            hint="build on a machine with more memory, or set options.tensorrt-rtx.force: true",
        )
    logger.warning("%s", sentence)


def _at_precision(
    blueprint: Blueprint, model: onnx.ModelProto, workshop: Path, report: Report
) -> tuple[bytes, Path]:
    """Returns the graph in the precision of the build, and the path that its data is beside."""
    is_half = is_half_graph(model)
    if blueprint.precision == "fp32" and not is_half:
        return model.SerializeToString(), blueprint.onnx
    precision = _GRAPH_PRECISIONS.get(blueprint.precision, "fp16")
    if is_half and precision == "fp16":
        logger.info("%s: the graph is float16 as exported, and stays so", blueprint.component)
    path, folder = workshop / "model.onnx", blueprint.onnx.parent
    phase = f"write {blueprint.component} in {precision}"
    write_at_precision(
        model,
        folder,
        path,
        precision,
        keep=blueprint.keep_fp32,
        on_fraction=lambda fraction: report(Progress(phase=phase, fraction=fraction)),
    )
    return path.read_bytes(), path


def _network_flags(trt: Runtime) -> int:
    """Strongly typed: types are what the graph says. TensorRT-RTX knows nothing else."""
    return 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


def _parse(
    parser: Any,  # Any: an OnnxParser
    prepared: Prepared,
    lines: Lines,
) -> None:
    blueprint, model = prepared.blueprint, prepared.model
    bad = [
        BadNode(op_type=op_type, name=node.name, reason="no importer", is_missing=True)
        for node in model.graph.node
        if (op_type := _unknown_op_type(parser, node))
    ]
    if not bad and parser.parse(prepared.graph, str(prepared.path)):
        return
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        bad.append(
            BadNode(
                op_type=error.node_operator(),
                name=error.node_name(),
                reason=error.desc(),
                is_missing=bool(MISSING_OPERATOR.search(error.desc())),
            )
        )
    raise parse_error(blueprint.who, blueprint.component, bad, lines.words)


def _unknown_op_type(parser: Any, node: onnx.NodeProto) -> str:  # Any: an OnnxParser
    """Returns how to call an operator that the parser does not have; "" if it has it."""
    if node.domain in CONTRIB_DOMAINS:
        return f"{node.domain}:{node.op_type}"
    if parser.supports_operator(node.op_type):
        return ""
    return f"{node.domain}:{node.op_type}" if node.domain else node.op_type


def _add_profile(
    builder: Any,  # Any: of the bindings, as the next two
    config: Any,
    network: Any,
    profile: Profile,
    blueprint: Blueprint,
    lines: Lines,
) -> None:
    free = {
        network.get_input(index).name
        for index in range(network.num_inputs)
        if -1 in tuple(network.get_input(index).shape)
    }
    if not free:
        return
    made = builder.create_optimization_profile()
    try:
        for name in sorted(free):
            one = profile[name]
            made.set_shape(name, one.least, one.usual, one.largest)
    except ValueError as error:
        raise compile_error(blueprint.who, blueprint.component, str(error)) from error
    if config.add_optimization_profile(made) < 0:
        raise compile_error(blueprint.who, blueprint.component, lines.words)
