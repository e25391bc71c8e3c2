"""An ONNX graph with static shapes -> a program and its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from sdkit_dispatch.contract import TensorSpec
from sdkit_dispatch.errors import CompileError, UnsupportedOpError
from sdkit_ggml.compiler.emitter import Ref
from sdkit_ggml.compiler.evaluate import EVALUATE
from sdkit_ggml.compiler.fold import fold
from sdkit_ggml.compiler.graph import Array, Constant, Graph, Node, graph_from_model
from sdkit_ggml.compiler.lowering import Lowering
from sdkit_ggml.compiler.ops.table import TABLE
from sdkit_ggml.compiler.patterns import canonicalise
from sdkit_ggml.compiler.values import Choices, Fed, HostProgram, Unsupported
from sdkit_ggml.compiler.weights import (
    Weight,
    WeightTable,
    bytes_of,
    layout_digest,
    placed,
    section_bytes,
)
from sdkit_ggml.instructions import ProgramError
from sdkit_ggml.program import Feed, HostConstant, HostStep, Program, Variant

HOST_ELEMENTS = 1 << 20
"""Constants that the host reads are written into the program; a larger one is not meant for it."""
_INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool", "uint32", "uint64"})

PRECISIONS: Mapping[str, tuple[str, str]] = {
    "fp32": ("f32", "f32"),
    "fp16": ("f16", "f16"),
    # Activations beyond float16's range are why bf16 is asked for: filters stay f32.
    "bf16": ("bf16", "f32"),
    "q8_0": ("q8_0", "f16"),
    "q5_0": ("q5_0", "f16"),
    "q4_0": ("q4_0", "f16"),
}
"""Precision -> types of the weights of matrix products and of convolutions. Everything is summed
in float32."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program, and what is to be written beside it.

    Attributes:
        weights: Of the weights file, in order; None: that of the engine whose program was given.
        extras: Of the extra file.
    """

    program: Program
    weights: tuple[Weight, ...] | None
    extras: tuple[Weight, ...] = ()


def compile_model(
    model: onnx.ModelProto,
    folder: Path,
    *,
    component: str,
    precision: str = "fp32",
    block_bytes: int = Choices.block_bytes,
    has_winograd: bool = True,
    shared: Program | None = None,
    report: Callable[[str], None] = lambda phase: None,
) -> Compiled:
    """Compiles a model whose inputs have static shapes.

    Args:
        model: Without the contents of external files.
        folder: Where the external files are.
        component: For messages.
        precision: A key of `PRECISIONS`.
        block_bytes: See `Choices`.
        has_winograd: See `Choices`.
        shared: The program of an engine of the same graph and weights, whose weights file may
            serve this one too.
        report: Told what is being done.

    Raises:
        UnsupportedOpError: Names all operators that cannot be lowered, and why.
        CompileError: The graph contradicts itself.
    """
    reads = _Reads()
    graph = graph_from_model(model, folder, reads.note)
    report("fold")
    fold(graph)
    canonicalise(graph)
    report("lower")
    matrix_type, filter_type = PRECISIONS[precision]
    host = _host_program(graph)
    table = WeightTable()
    lowered: list[Lowering] = []
    attends = _attends(graph)
    # A processor has every operation; a GPU may lack attention for some sizes of heads.
    ways = [(False, attends), (True, attends), *([(True, False)] if attends else [])]
    for is_dense, has_flash in ways:
        choices = Choices(
            matrix_type=matrix_type,
            filter_type=filter_type,
            has_flash=has_flash,
            is_dense=is_dense,
            block_bytes=block_bytes,
            has_winograd=has_winograd,
        )
        lowered.append(_lower(graph, table, choices, host, component))
    if not table.weights:
        # A file of no tensors has no data section to map.
        table.add(Constant.of(np.zeros(1, np.float32)), "", "f32", (1, 1, 1, 1))
    report("plan memory")
    places = placed(table.weights, shared)
    variants = tuple(_variant(low, graph, places.offsets) for low in lowered)
    extras = tuple(one.stored for one in places.extras)
    program = Program(
        inputs=tuple(_spec(graph, name) for name in graph.inputs),
        outputs=tuple(_spec(graph, name) for name in graph.outputs),
        precision=precision,
        weights_bytes=section_bytes(places.stored),
        weights_digest=layout_digest(places.stored),
        weights=places.stored,
        host=tuple(host.steps.values()),
        constants={name: _host_constant(one) for name, one in host.constants.items()},
        variants=variants,
        nodes=tuple(map(str, graph.nodes)),
        extra_bytes=section_bytes(extras),
        extra_digest=layout_digest(extras) if extras else "",
        extras=extras,
        read=reads.taken(),
    )
    return Compiled(
        program=program,
        weights=places.weights,
        extras=places.extras,
    )


def digest_of(array: Array) -> str:
    """Returns the sha256 of the numbers of an initializer."""
    return hashlib.sha256(bytes_of(array)).hexdigest()


class _Reads:
    """The initializers whose numbers a program depends on: those that making it has read."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self._is_open = True

    def note(self, name: str, array: Array) -> None:
        if self._is_open and name not in self._digests:
            self._digests[name] = digest_of(array)

    def taken(self) -> dict[str, str]:
        """Returns their digests, by name; what is read from now on is only written out."""
        self._is_open = False
        return dict(sorted(self._digests.items()))


def _attends(graph: Graph) -> bool:
    return any(node.op_type == "Attention" and node.domain for node in graph.nodes)


def _spec(graph: Graph, name: str) -> TensorSpec:
    kind = graph.type_of(name)
    return TensorSpec(name=name, dtype=kind.dtype, shape=kind.shape)


def _host_program(graph: Graph) -> HostProgram:
    """Takes out of the graph what computes integers from integer inputs."""
    host = HostProgram()
    host.values |= {name for name in graph.inputs if graph.types[name].dtype in _INTEGERS}
    kept = []
    for node in graph.nodes:
        if _is_for_host(graph, node, host):
            attributes = {
                key: value
                for key, value in node.attributes.items()
                if isinstance(value, (int, float, str, list))
            }
            host.add(
                HostStep(
                    node.op_type, graph.opset, tuple(node.inputs), tuple(node.outputs), attributes
                )
            )
            for name in node.inputs:
                if name in graph.constants:
                    host.constants[name] = graph.constants[name]
        else:
            kept.append(node)
    graph.nodes = kept
    return host


def _is_for_host(graph: Graph, node: Node, host: HostProgram) -> bool:
    if node.domain or node.op_type not in EVALUATE or not node.inputs:
        return False
    computed = [name for name in node.inputs if name and name not in graph.constants]
    if not computed or not all(name in host.values for name in computed):
        return False
    if not all(graph.types[name].dtype in _INTEGERS for name in computed):
        return False
    constants = [graph.constants[name] for name in node.inputs if name in graph.constants]
    # A table of floats that is looked up in belongs to the device.
    return not any(one.dtype not in _INTEGERS and one.size > 1 for one in constants) and not any(
        one.size > HOST_ELEMENTS for one in constants
    )


def _lower(
    graph: Graph, table: WeightTable, choices: Choices, host: HostProgram, component: str
) -> Lowering:
    low = Lowering(graph, table, choices, host)
    for name in graph.inputs:
        kind = graph.types[name]
        if kind.is_float:
            ref = low.feed(Fed(name, "f32"), int(np.prod(kind.shape, dtype=np.int64)))
            low.values[name] = low.fresh(ref, kind.shape)
    refused: dict[str, str] = {}
    lost: set[str] = set()
    for index, node in enumerate(graph.nodes):
        function = TABLE.get((node.domain, node.op_type))
        if function is None:
            refused.setdefault(_title(node), "")
            lost.update(node.outputs)
            continue
        if any(name in lost for name in node.inputs):
            lost.update(node.outputs)
            continue
        for name in node.inputs:
            _feed_floats(low, name)
        low.node, low.emitter.origin = node, index
        try:
            result = function(low, *node.inputs, **node.attributes)
        except Unsupported as reason:
            refused.setdefault(_title(node), f"{node} {reason}")
            lost.update(node.outputs)
            continue
        except (ProgramError, TypeError, ValueError, KeyError, IndexError) as error:
            # A form of the operator that no function of ours foresees.
            refused.setdefault(_title(node), f"{node}: {type(error).__name__}: {error}")
            lost.update(node.outputs)
            continue
        results = result if isinstance(result, list) else [result]
        low.values.update(zip(node.outputs, results, strict=False))
        missing = [name for name in node.outputs[len(results) :] if low.is_used(name)]
        if missing:
            refused.setdefault(_title(node), f"{node} has more outputs than ggml computes")
            lost.update(missing)
            continue
        for name, one in zip(node.outputs, results, strict=False):
            if name in graph.types and one.shape != graph.types[name].shape:
                raise CompileError(
                    f"ggml: {node} was lowered to {list(one.shape)}, not "
                    f"{list(graph.types[name].shape)}: a fault of ours"
                )
    low.emitter.origin = -1
    if refused:
        reasons = "; ".join(sorted(reason for reason in refused.values() if reason))
        raise UnsupportedOpError(
            f"ggml: {component}: cannot lower the operators {', '.join(sorted(refused))}"
            + (f" ({reasons})" if reasons else "")
        )
    for name in graph.outputs:
        if name in graph.constants or (name in low.values and low.values[name].buffer < 0):
            # What is constant is copied into the arena like any other output.
            low.values[name] = low.unary("scale", low.value(name), 1.0, 0.0)
    return low


def _feed_floats(low: Lowering, name: str) -> None:
    """Lets the device read a float that the host has cast from integers."""
    if name in low.host.values and name not in low.values:
        kind = low.graph.types.get(name)
        if kind is not None and kind.is_float:
            ref = low.feed(Fed(name, "f32"), int(np.prod(kind.shape, dtype=np.int64)))
            low.values[name] = low.fresh(ref, kind.shape)


def _title(node: Node) -> str:
    return f"{node.domain}:{node.op_type}" if node.domain else node.op_type


def _variant(low: Lowering, graph: Graph, offsets: Sequence[int]) -> Variant:
    outputs: dict[str, Ref | None] = {}
    for name in graph.outputs:
        _feed_floats(low, name)
        if name in low.host.values and name not in low.values:
            outputs[name] = None
            continue
        value = low.value(name)
        flat = low.flat(value, (value.layout.size,))
        outputs[name] = flat
    feeds = {str(index): ref for index, ref in enumerate(low.feeds.values())}
    variant = low.emitter.finish(
        "gpu" if low.choices.is_dense else "cpu",
        has_flash=low.choices.has_flash,
        weights=offsets,
        feeds=feeds,
        outputs=outputs,
    )
    named = tuple(
        Feed(fed.name, one.operand, fed.limit)
        for fed, one in zip(low.feeds, variant.feeds, strict=True)
    )
    return replace_feeds(variant, named)


def replace_feeds(variant: Variant, feeds: tuple[Feed, ...]) -> Variant:
    """Returns the variant with its feeds named."""
    return Variant(
        device=variant.device,
        has_flash=variant.has_flash,
        arena_bytes=variant.arena_bytes,
        operands=variant.operands,
        ops=variant.ops,
        feeds=feeds,
        outputs=variant.outputs,
        origins=variant.origins,
    )


def _host_constant(constant: Constant) -> HostConstant:
    array = constant.array()
    values: Any = array.ravel().tolist()  # Any: numpy's own scalars as Python has them
    return HostConstant(array.dtype.name, array.shape, tuple(values))
