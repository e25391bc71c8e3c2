"""Which execution provider each node of a session really runs on, by count and by arithmetic.

`InferenceSession.get_providers()` says nothing of that: it lists a GPU's provider when every node
went to the processor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

CPU_PROVIDER = "CPUExecutionProvider"
HEAVY_OP_TYPES = frozenset(
    {"Attention", "Conv", "ConvTranspose", "Einsum", "FusedConv", "FusedMatMul", "Gemm", "MatMul"}
    | {"MultiHeadAttention", "NhwcConv", "NhwcFusedConv"}
)
"""What a diffusion model spends its time in; one of these on the processor ruins it."""
RECORD_ENTRY = "session.record_ep_graph_assignment_info"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the nodes of a session run.

    Attributes:
        nodes: Execution provider -> how many nodes it runs.
        flops: Execution provider -> multiplications and additions, as far as they are known.
        heavy_on_cpu: Operator types of heavy nodes on the processor, with how many.
    """

    nodes: Mapping[str, int]
    flops: Mapping[str, int] = field(default_factory=dict)
    heavy_on_cpu: Mapping[str, int] = field(default_factory=dict)

    def share_of(self, provider: str) -> float:
        """Returns the share of the arithmetic that a provider does; of the nodes if unknown."""
        counts = self.flops if sum(self.flops.values()) else self.nodes
        return counts.get(provider, 0) / max(sum(counts.values()), 1)

    def facts(self, provider: str) -> dict[str, str]:
        """Returns what a session says of it."""
        return {
            "nodes": ", ".join(f"{name} {count}" for name, count in sorted(self.nodes.items())),
            "flops_share": f"{100 * self.share_of(provider):.1f} % on {provider}",
        }


def placement_of(
    subgraphs: Iterable[Any],  # Any: OrtEpAssignedSubgraph, of the bindings
    flops: Mapping[str, int],
) -> Placement:
    """Returns the placement that a session recorded.

    Args:
        subgraphs: What `get_provider_graph_assignment_info()` gave.
        flops: Node name -> its arithmetic; a node that an optimiser made is not in it.
    """
    nodes: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    heavy: Counter[str] = Counter()
    for subgraph in subgraphs:
        for node in subgraph.get_nodes():
            nodes[subgraph.ep_name] += 1
            spent[subgraph.ep_name] += flops.get(node.name, 0)
            if subgraph.ep_name == CPU_PROVIDER and node.op_type in HEAVY_OP_TYPES:
                heavy[node.op_type] += 1
    return Placement(nodes=dict(nodes), flops=dict(spent), heavy_on_cpu=dict(heavy))


def why_not_on(placement: Placement, provider: str) -> str:
    """Returns why a session must not be called one of `provider`; "" if it may."""
    if not placement.nodes.get(provider):
        where = ", ".join(f"{name} {count}" for name, count in placement.nodes.items()) or "none"
        return f"no node runs on {provider}; nodes: {where}"
    if placement.heavy_on_cpu:
        listed = ", ".join(f"{count} {name}" for name, count in placement.heavy_on_cpu.items())
        return (
            f"{listed} run on the processor, and {100 * placement.share_of(provider):.0f} % of the "
            f"arithmetic on {provider}"
        )
    return ""


def flops_by_node(model: onnx.ModelProto) -> dict[str, int]:
    """Returns node name -> multiplications and additions of convolutions and matrix products.

    Of a graph with static shapes; external data is not read. A node whose shapes the `onnx` package
    cannot infer (it computes few of the sizes that a TorchScript export computes) counts as 0.
    """
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    shapes: dict[str, tuple[int, ...]] = {
        value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for value in (*graph.value_info, *graph.input, *graph.output)
    }
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    counted: dict[str, int] = {}
    for node in graph.node:
        read = [shapes.get(name, ()) for name in node.input]
        made = shapes.get(node.output[0], ()) if node.output else ()
        size = int(np.prod(made, dtype=np.int64)) if made else 0
        if node.op_type in ("Conv", "ConvTranspose") and len(read) > 1 and len(read[1]) > 2:
            counted[node.name] = 2 * size * int(np.prod(read[1][1:], dtype=np.int64))
        elif node.op_type in ("MatMul", "Gemm") and read and read[0]:
            is_flipped = any(one.name == "transA" and one.i for one in node.attribute)
            counted[node.name] = 2 * size * read[0][0 if is_flipped else -1]
    return counted
