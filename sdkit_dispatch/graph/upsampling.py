"""Lets the way up of a UNet meet skip connections of odd sides.

A UNet halves its latents once a level on the way down (a side of n becomes ceil(n / 2)) and doubles
them on the way up, where they are joined with what was halved. diffusers looks at the sizes while
it runs and interpolates to the size of the other side (`upsample_size`); an exporter sees even
sizes and bakes "twice as large" in. Here an odd side is known, for shapes are static.

PyTorch's nearest neighbours of m rows in 2m - 1 are the rows floor(i m / (2m - 1)), which is
floor(i / 2 + i / (4m - 2)) with a second term below 1/2: row floor(i / 2). That is doubling, and
leaving the last row out, so a Slice behind the Resize computes what diffusers does. (In float32,
where PyTorch multiplies, it holds for sides up to 4000 or so.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

_MARK = "sdkit_crop"
"""How names of what this pass adds begin."""
_UPSAMPLERS = frozenset({"Resize", "Upsample"})
_PASSED = frozenset(
    {
        *("Add", "Cast", "Conv", "Div", "Identity", "Mul", "Sub"),
        *("DequantizeLinear", "QuantizeLinear"),
    }
)
"""What may stand between the Resize and the Concat: its convolution, and what an exporter, a
precision or a quantisation adds. One doubling that is missed makes the others' sides wrong."""
_CHANNELS = 1


@dataclass(frozen=True, kw_only=True)
class _Level:
    """A doubling on the way up.

    Attributes:
        index: Of the Resize among the nodes.
        baked: Height and width of its result as the exporter saw it.
        real: The same, of the skip connection that it meets.
    """

    index: int
    baked: tuple[int, int]
    real: tuple[int, int]


def crop_upsampling(model: onnx.ModelProto) -> bool:
    """Makes doublings meet odd skip connections, in place; False if there is none to change.

    Args:
        model: Its inputs have static shapes.
    """
    sides = _sides(model.graph)
    if sides is None:
        return False
    if model.functions:
        from onnx.inliner import inline_local_functions

        found = _doublings(inline_local_functions(model).graph)
        if all(side % 2 ** len(found) == 0 for side in sides):
            return False
        model.CopyFrom(inline_local_functions(model))
    levels = _levels(_doublings(model.graph), sides)
    if all(level.baked == level.real for level in levels):
        return False
    _correct_reshapes(model, levels, sides)
    for level in reversed(levels):
        _crop(model.graph, level)
    return True


def is_cropped(model: onnx.ModelProto) -> bool:
    """Says whether `crop_upsampling` changed this model."""
    return any(node.name.startswith(_MARK) for node in model.graph.node)


def _sides(graph: onnx.GraphProto) -> tuple[int, int] | None:
    """Returns height and width of the first input that is a picture."""
    for value in graph.input:
        dims = value.type.tensor_type.shape.dim
        if len(dims) == 4:
            return dims[2].dim_value, dims[3].dim_value
    return None


def _doublings(graph: onnx.GraphProto) -> list[int]:
    """Returns the indices of the nodes that double what then meets a skip connection."""
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    constants = _constants(graph)
    return [
        index
        for index, node in enumerate(graph.node)
        if node.op_type in _UPSAMPLERS
        and _doubles(node, constants)
        and _meets_skip(node.output[0], users)
    ]


def _doubles(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    """Whether it takes nearest neighbours, twice as many along the last two axes.

    Where the size comes from elsewhere it is taken for the double: what else would meet the skip?
    """
    mode = next((one.s for one in node.attribute if one.name == "mode"), b"nearest")
    scales = [list(one.floats) for one in node.attribute if one.name == "scales"]
    for name in node.input[1:]:
        tensor = constants.get(name)
        if tensor is not None and tensor.data_type == onnx.TensorProto.FLOAT:
            scales.append(numpy_helper.to_array(tensor).ravel().tolist())
    return mode == b"nearest" and all(one in ([1, 1, 2, 2], [2, 2]) for one in scales if one)


def _meets_skip(name: str, users: Mapping[str, Sequence[onnx.NodeProto]]) -> bool:
    while True:
        following = [node for node in users.get(name, ()) if node.op_type != "Shape"]
        if len(following) != 1:
            return False
        (node,) = following
        if node.op_type == "Concat":
            axis = next(one.i for one in node.attribute if one.name == "axis")
            return axis == _CHANNELS and len(node.input) > 1
        if node.op_type not in _PASSED:
            return False
        name = node.output[0]


def _levels(doublings: Sequence[int], sides: tuple[int, int]) -> list[_Level]:
    count = len(doublings)
    height, width = (-(-side // 2**count) for side in sides)
    levels = []
    for step, index in enumerate(doublings, start=1):
        high, wide = (-(-side // 2 ** (count - step)) for side in sides)
        baked = (height * 2**step, width * 2**step)
        levels.append(_Level(index=index, baked=baked, real=(high, wide)))
    return levels


def _crop(graph: onnx.GraphProto, level: _Level) -> None:
    """Leaves the last row or column of a doubled picture out."""
    node = graph.node[level.index]
    result = node.output[0]
    _by_scales(graph, node)
    if level.baked == level.real:
        return
    names = [f"{_MARK}:{result}:{part}" for part in ("whole", "starts", "ends", "axes")]
    node.output[0] = names[0]
    for name, values in zip(names[1:], ([0, 0], level.real, [2, 3]), strict=True):
        graph.initializer.append(_integers(name, values))
    crop = helper.make_node("Slice", names, [result], name=f"{_MARK}:{result}")
    graph.node.insert(level.index + 1, crop)


def _by_scales(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    """Lets a Resize to a size that was computed of the exporter's sizes double what it gets."""
    if len(node.input) < 4 or not node.input[3]:
        return
    name = f"{_MARK}:{node.output[0]}:scales"
    scales = np.array([1, 1, 2, 2], np.float32)
    graph.initializer.append(numpy_helper.from_array(scales, name))
    kept = [
        one
        for one in node.attribute
        if one.name not in ("axes", "coordinate_transformation_mode", "nearest_mode")
    ]
    del node.input[1:], node.attribute[:]
    node.input.extend(["", name])
    node.attribute.extend(
        [
            *kept,
            helper.make_attribute("coordinate_transformation_mode", "asymmetric"),
            helper.make_attribute("nearest_mode", "floor"),
        ]
    )


def _correct_reshapes(
    model: onnx.ModelProto, levels: Sequence[_Level], sides: tuple[int, int]
) -> None:
    """Corrects shapes that an exporter computed from the sizes of the inputs (dynamo does).

    Between two doublings they speak of the sizes that the first of them gave.
    """
    graph = model.graph
    ends = [*(level.index for level in levels[1:]), len(graph.node)]
    reshapes: dict[str, list[tuple[onnx.NodeProto, _Level]]] = {}
    for level, end in zip(levels, ends, strict=True):
        for node in graph.node[level.index + 1 : end]:
            if node.op_type == "Reshape":
                reshapes.setdefault(node.input[1], []).append((node, level))
    here = _evaluated(model, reshapes, (0, 0))
    # What another height and width changes is made of them.
    step = 2 ** (len(levels) + 1)
    there = _evaluated(model, reshapes, (step, 3 * step))
    for name, users in reshapes.items():
        if name not in here:
            continue
        for node, level in users:
            right = _corrected(here[name], there[name], level)
            if right != here[name]:
                node.input[1] = f"{_MARK}:{node.output[0]}:shape"
                graph.initializer.append(_integers(node.input[1], right))


def _corrected(here: Sequence[int], there: Sequence[int], level: _Level) -> list[int]:
    right = list(here)
    moved = [place for place, (a, b) in enumerate(zip(here, there, strict=True)) if a != b]
    values = tuple(here[place] for place in moved)
    if values == level.baked:
        for place, size in zip(moved, level.real, strict=True):
            right[place] = size
    elif values == (level.baked[0] * level.baked[1],):
        right[moved[0]] = level.real[0] * level.real[1]
    return right


def _evaluated(
    model: onnx.ModelProto, names: Mapping[str, object], more: tuple[int, int]
) -> dict[str, list[int]]:
    """Returns those of the values that are computed of the shapes of the inputs alone.

    Args:
        model: Its inputs have static shapes.
        names: Values.
        more: Rows and columns that pictures have more than they do.
    """
    from onnx.reference import ReferenceEvaluator

    graph = model.graph
    constants = _constants(graph)
    inputs = {value.name: value for value in graph.input}
    producers = {name: node for node in graph.node for name in node.output if name}
    wanted: dict[int, onnx.NodeProto] = {}
    is_known: dict[str, bool] = {"": True}

    def visit(name: str) -> bool:
        if name not in is_known:
            node = producers.get(name)
            if name in constants:
                is_known[name] = True
            elif node is None or node.op_type in _UPSAMPLERS:
                is_known[name] = False
            elif node.op_type == "Shape":
                is_known[name] = node.input[0] in inputs
            else:
                is_known[name] = all(visit(one) for one in node.input)
        return is_known[name]

    found = [name for name in names if name in producers and visit(name) and name not in constants]
    pending = list(found)
    while pending:
        node = producers.get(pending.pop())
        if node is not None and id(node) not in wanted:
            wanted[id(node)] = node
            pending += [] if node.op_type == "Shape" else list(node.input)
    nodes = [node for node in graph.node if id(node) in wanted]
    used = {name for node in nodes for name in node.input}
    part = helper.make_graph(
        nodes,
        "shapes",
        [inputs[name] for name in sorted(used & set(inputs))],
        [helper.make_empty_tensor_value_info(name) for name in found],
        [tensor for tensor in graph.initializer if tensor.name in used],
    )
    made = helper.make_model(part, opset_imports=model.opset_import)
    feeds = {value.name: _nothing(value, more) for value in part.input}
    if not found:
        return {}
    results = ReferenceEvaluator(made).run(found, feeds)
    return {
        name: [int(size) for size in np.asarray(one).ravel()]
        for name, one in zip(found, results, strict=True)
    }


def _nothing(value: onnx.ValueInfoProto, more: tuple[int, int]) -> np.ndarray:
    """Returns zeros of the shape of an input, which take no memory."""
    shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    if len(shape) == 4:
        shape[2:] = [side + extra for side, extra in zip(shape[2:], more, strict=True)]
    dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    return np.broadcast_to(np.zeros((), dtype), shape)


def _constants(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Returns what is constant and inside of the file."""
    return dict(_constant_items(graph))


def _constant_items(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    for tensor in graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            yield tensor.name, tensor
    for node in graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    yield node.output[0], attribute.t


def _integers(name: str, values: Sequence[int]) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)
