"""Which initializer of an ONNX graph holds the weight of which module of the model.

Exporters keep that in different places:

* the initializer's own name, `down_blocks.0.resnets.0.conv1.weight`: convolutions, always;
* the name of the node that uses it, `/down_blocks.0/attentions.0/.../to_q/MatMul`: TorchScript, and
  so optimum. The weight of a MatMul is `onnx::MatMul_123` there, and transposed;
* a note of the node, `pkg.torch.onnx.name_scopes`: dynamo, unless a tool dropped it;
* the bias that is added to the product, which keeps its name;
* the order of the nodes, which is that in which the model computes: `forward_order`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx

from .forward_order import linears_in_order
from .names import canonical_path

SCOPES = "pkg.torch.onnx.name_scopes"
MAX_SCOPES_CHARS = 10_000
WEIGHT_INPUT = {"MatMul": 1, "Gemm": 1, "Conv": 1}
"""Operator of a layer that can have a LoRA -> which input its weight is."""
CARRIERS = ("Identity", "Cast", "Transpose")
"""Operators between an initializer and the node that uses it."""


@dataclass(frozen=True, kw_only=True)
class ModuleWeight:
    """The weight of a module, and where it is used.

    Attributes:
        path: Of the module in the model: "down_blocks.0.attentions.0.proj_in".
        shape: As PyTorch has it: `[out, in]` or `[out, in, height, width]`.
        is_transposed: The initializer holds it the other way round.
        uses: Node and input that name the initializer.
        is_shared: The initializer is the weight of another module, too: exporters keep one of two
            tensors that are equal.
    """

    path: str
    initializer: str
    shape: tuple[int, ...]
    is_transposed: bool
    uses: tuple[tuple[int, int], ...]
    is_shared: bool = False


@dataclass(frozen=True, kw_only=True)
class _Site:
    """A node that uses an initializer as the weight of a layer."""

    node: int
    op_type: str
    initializer: str
    shape: tuple[int, ...]
    is_transposed: bool
    use: tuple[int, int]
    path: str = ""


def module_weights(
    graph: onnx.GraphProto, component: str, config: Mapping[str, Any]
) -> tuple[ModuleWeight, ...]:  # Any: JSON data
    """Returns the weight of every linear and convolution layer that can be named."""
    sites = list(_sites(graph))
    names = _Names(graph, component, sites)
    sites = [replace(site, path=names.path_of(site)) for site in sites]
    sites = _placed_by_order(sites, linears_in_order(component, config))
    owners: dict[str, set[str]] = {}
    for site in sites:
        owners.setdefault(site.initializer, set()).add(site.path)
    found: dict[tuple[str, str], ModuleWeight] = {}
    for site in sites:
        if not site.path:
            continue
        at = (site.path, site.initializer)
        known = found.get(at)
        found[at] = ModuleWeight(
            path=site.path,
            initializer=site.initializer,
            shape=site.shape,
            is_transposed=site.is_transposed,
            uses=(*(known.uses if known else ()), site.use),
            is_shared=len(owners[site.initializer]) > 1 or names.is_used_elsewhere(site),
        )
    return tuple(found.values())


def _sites(graph: onnx.GraphProto) -> Iterator[_Site]:
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    makers = {
        output: (index, node)
        for index, node in enumerate(graph.node)
        if node.op_type in CARRIERS
        for output in node.output
    }
    for index, node in enumerate(graph.node):
        place = WEIGHT_INPUT.get(node.op_type)
        if place is None or len(node.input) <= place or node.domain not in ("", "ai.onnx"):
            continue
        name, use, turns = node.input[place], (index, place), 0
        while name in makers:
            at, maker = makers[name]
            if not maker.input:
                break
            turns += maker.op_type == "Transpose"
            name, use = maker.input[0], (at, 0)
        tensor = initializers.get(name)
        rank = 4 if node.op_type == "Conv" else 2
        if tensor is None or len(tensor.dims) != rank or (rank == 4 and turns):
            continue
        is_plain = node.op_type == "Conv" or (node.op_type == "Gemm" and _attribute(node, "transB"))
        is_transposed = not is_plain if turns % 2 == 0 else bool(is_plain)
        shape = tuple(tensor.dims)
        yield _Site(
            node=index,
            op_type=node.op_type,
            initializer=name,
            shape=shape[::-1] if is_transposed else shape,
            is_transposed=is_transposed,
            use=use,
        )


class _Names:
    """What a graph says of the modules that its nodes belong to."""

    def __init__(self, graph: onnx.GraphProto, component: str, sites: Sequence[_Site]) -> None:
        self._graph = graph
        self._component = component
        self._uses: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self._uses.setdefault(name, []).append(node)
        self._initializers = {tensor.name for tensor in graph.initializer}
        self._layers: dict[str, int] = {}
        for site in sites:
            self._layers[site.initializer] = self._layers.get(site.initializer, 0) + 1

    def is_used_elsewhere(self, site: _Site) -> bool:
        """True if something that is no layer uses the initializer, too."""
        return len(self._uses[site.initializer]) > self._layers[site.initializer]

    def path_of(self, site: _Site) -> str:
        node = self._graph.node[site.node]
        candidates = (
            self._own_name(site.initializer),
            _noted_path(node),
            ".".join(node.name.strip("/").split("/")[:-1]) if "/" in node.name else "",
            self._bias_name(node),
        )
        paths = (canonical_path(self._component, one) for one in candidates if one)
        return next((path for path in paths if path), "")

    def _own_name(self, name: str) -> str:
        """The name says nothing where one tensor stands for several that are equal."""
        is_one = len(self._uses[name]) == 1
        return name.removesuffix(".weight") if is_one and name.endswith(".weight") else ""

    def _bias_name(self, node: onnx.NodeProto) -> str:
        for after in self._uses.get(node.output[0], ()) if node.op_type == "MatMul" else ():
            for name in after.input if after.op_type == "Add" else ():
                is_one = name in self._initializers and len(self._uses[name]) == 1
                if is_one and name.endswith(".bias"):
                    return name.removesuffix(".bias")
        return ""


def _noted_path(node: onnx.NodeProto) -> str:
    """Returns the module in dynamo's note: a list of scopes in Python, the operator the last."""
    for note in node.metadata_props:
        if note.key == SCOPES and len(note.value) <= MAX_SCOPES_CHARS:
            try:
                scopes = ast.literal_eval(note.value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return ""
            if isinstance(scopes, list) and len(scopes) > 1 and isinstance(scopes[-2], str):
                return scopes[-2]
    return ""


def _placed_by_order(sites: list[_Site], order: Sequence[str]) -> list[_Site]:
    """Names the products that have no name by their place; all of them, or none.

    The number of products must be that of the model, and every name that is known must stand where
    the model computes it.
    """
    known = set(order)
    products = [
        index
        for index, site in enumerate(sites)
        if site.op_type == "MatMul" and (not site.path or site.path in known)
    ]
    if len(products) != len(order) or all(sites[index].path for index in products):
        return sites
    pairs = list(zip(products, order, strict=True))
    if any(sites[index].path not in ("", path) for index, path in pairs):
        return sites
    placed = list(sites)
    for index, path in pairs:
        placed[index] = replace(sites[index], path=path)
    return placed


def _attribute(node: onnx.NodeProto, name: str) -> int:
    return next((one.i for one in node.attribute if one.name == name), 0)
