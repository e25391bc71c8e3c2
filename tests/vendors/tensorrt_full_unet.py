"""Writes a UNet of SD1.5's layout and size (860 million weights, seeded) as ONNX, without PyTorch.

Its weights are random, so it draws noise; sizes, operators and memory are those of the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CHANNELS = (320, 640, 1280, 1280)
HEADS = 8
CONTEXT = 768
TIME = 1280
GROUPS = 32
LATENT = (2, 4, 64, 64)
TOKENS = 77
SHAPES = {
    "sample": LATENT,
    "timestep": (),
    "encoder_hidden_states": (LATENT[0], TOKENS, CONTEXT),
}


class Writer:
    """Collects nodes, and writes each weight to the external file as it is made."""

    def __init__(self, stream: BinaryIO, location: str) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.count = 0
        self._stream = stream
        self._location = location
        self._rng = np.random.default_rng(15)

    def weight(self, shape: Sequence[int], scale: float | None = None) -> str:
        fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else 1
        size = int(np.prod(shape))
        factor = scale if scale is not None else fan_in**-0.5
        values = self._rng.standard_normal(size, np.float32) * np.float32(factor)
        if len(shape) == 1 and scale == 0.0:
            values += 1
        tensor = TensorProto(
            name=f"w{len(self.initializers)}",
            dims=shape,
            data_type=TensorProto.FLOAT,
            data_location=TensorProto.EXTERNAL,
        )
        for key, value in (
            ("location", self._location),
            ("offset", str(self._stream.tell())),
            ("length", str(values.nbytes)),
        ):
            tensor.external_data.add(key=key, value=value)
        self._stream.write(values.tobytes())
        self.initializers.append(tensor)
        self.count += size
        return str(tensor.name)

    def constant(self, values: Sequence[float] | float, dtype: type = np.int64) -> str:
        name = f"w{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.array(values, dtype), name))
        return name

    def op(
        self, op_type: str, inputs: Sequence[str], outputs: int = 1, **attributes: object
    ) -> str:
        names = [f"v{len(self.nodes)}_{k}" for k in range(outputs)]
        name = f"/{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), names, name=name, **attributes))
        return names[0]

    def conv(self, x: str, cin: int, cout: int, kernel: int = 3, stride: int = 1) -> str:
        weights = [self.weight((cout, cin, kernel, kernel)), self.weight((cout,), 0.01)]
        pad = kernel // 2
        return self.op("Conv", [x, *weights], pads=[pad] * 4, strides=[stride] * 2)

    def linear(self, x: str, cin: int, cout: int, *, has_bias: bool = True) -> str:
        product = self.op("MatMul", [x, self.weight((cin, cout), cin**-0.5)])
        return self.op("Add", [product, self.weight((cout,), 0.01)]) if has_bias else product

    def silu(self, x: str) -> str:
        return self.op("Mul", [x, self.op("Sigmoid", [x])])

    def group_norm(self, x: str, channels: int, side: int) -> str:
        rows = self.op("Reshape", [x, self.constant([0, GROUPS, -1])])
        ones, zeros = (self.constant([value] * GROUPS, np.float32) for value in (1.0, 0.0))
        norm = self.op("InstanceNormalization", [rows, ones, zeros], epsilon=1e-5)
        image = self.op("Reshape", [norm, self.constant([LATENT[0], channels, side, side])])
        axes = self.constant([1, 2])
        scale = self.op("Unsqueeze", [self.weight((channels,), 0.0), axes])
        shift = self.op("Unsqueeze", [self.weight((channels,), 0.01), axes])
        return self.op("Add", [self.op("Mul", [image, scale]), shift])

    def layer_norm(self, x: str, size: int) -> str:
        weights = [self.weight((size,), 0.0), self.weight((size,), 0.01)]
        return self.op("LayerNormalization", [x, *weights], axis=-1, epsilon=1e-5)

    def resnet(self, x: str, time: str, cin: int, cout: int, side: int) -> str:
        hidden = self.conv(self.silu(self.group_norm(x, cin, side)), cin, cout)
        shift = self.linear(self.silu(time), TIME, cout)
        shift = self.op("Unsqueeze", [shift, self.constant([2, 3])])
        hidden = self.op("Add", [hidden, shift])
        hidden = self.conv(self.silu(self.group_norm(hidden, cout, side)), cout, cout)
        skip = x if cin == cout else self.conv(x, cin, cout, 1)
        return self.op("Add", [skip, hidden])

    def attention(self, x: str, context: str, size: int, context_size: int) -> str:
        head = size // HEADS
        parts = []
        for source, width in ((x, size), (context, context_size), (context, context_size)):
            flat = self.linear(source, width, size, has_bias=False)
            split = self.op("Reshape", [flat, self.constant([0, -1, HEADS, head])])
            parts.append(self.op("Transpose", [split], perm=[0, 2, 1, 3]))
        query = self.op("Mul", [parts[0], self.constant(head**-0.5, np.float32)])
        scores = self.op("MatMul", [query, self.op("Transpose", [parts[1]], perm=[0, 1, 3, 2])])
        mixed = self.op("MatMul", [self.op("Softmax", [scores], axis=-1), parts[2]])
        back = self.op("Transpose", [mixed], perm=[0, 2, 1, 3])
        return self.linear(self.op("Reshape", [back, self.constant([0, 0, size])]), size, size)

    def transformer(self, x: str, context: str, size: int, side: int) -> str:
        hidden = self.conv(self.group_norm(x, size, side), size, size, 1)
        hidden = self.op("Reshape", [hidden, self.constant([0, size, side * side])])
        hidden = self.op("Transpose", [hidden], perm=[0, 2, 1])
        norm = self.layer_norm(hidden, size)
        hidden = self.op("Add", [hidden, self.attention(norm, norm, size, size)])
        norm = self.layer_norm(hidden, size)
        hidden = self.op("Add", [hidden, self.attention(norm, context, size, CONTEXT)])
        wide = self.linear(self.layer_norm(hidden, size), size, 8 * size)
        left = self.op("Split", [wide, self.constant([4 * size, 4 * size])], 2, axis=-1)
        gate = self.op("Gelu", [left[:-2] + "_1"])
        inner = self.linear(self.op("Mul", [left, gate]), 4 * size, size)
        hidden = self.op("Transpose", [self.op("Add", [hidden, inner])], perm=[0, 2, 1])
        image = self.op("Reshape", [hidden, self.constant([0, size, side, side])])
        return self.op("Add", [x, self.conv(image, size, size, 1)])


def write_full_unet(folder: Path) -> int:
    """Writes `model.onnx` and its 3.4 GB of weights; returns how many weights it has."""
    with (folder / "weights.bin").open("wb") as stream:
        writer = Writer(stream, "weights.bin")
        result = _unet(writer)
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in SHAPES.items()
    ]
    output = helper.make_tensor_value_info(result, TensorProto.FLOAT, LATENT)
    graph = helper.make_graph(writer.nodes, "unet", values, [output], writer.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, folder / "model.onnx")
    return writer.count


def _unet(w: Writer) -> str:
    time, context, side = _time(w), "encoder_hidden_states", LATENT[2]
    x = w.conv("sample", 4, CHANNELS[0])
    skips, size = [(x, CHANNELS[0])], CHANNELS[0]
    for level, channels in enumerate(CHANNELS):
        for _ in range(2):
            x, size = w.resnet(x, time, size, channels, side), channels
            if level < 3:
                x = w.transformer(x, context, size, side)
            skips.append((x, size))
        if level < 3:
            x, side = w.conv(x, size, size, stride=2), side // 2
            skips.append((x, size))
    x = w.resnet(x, time, size, size, side)
    x = w.resnet(w.transformer(x, context, size, side), time, size, size, side)
    for level in reversed(range(4)):
        for _ in range(3):
            skip, width = skips.pop()
            joined = w.op("Concat", [x, skip], axis=1)
            x, size = w.resnet(joined, time, size + width, CHANNELS[level], side), CHANNELS[level]
            if level < 3:
                x = w.transformer(x, context, size, side)
        if level > 0:
            scales = w.constant([1, 1, 2, 2], np.float32)
            x = w.conv(w.op("Resize", [x, "", scales], mode="nearest"), size, size)
            side *= 2
    return w.conv(w.silu(w.group_norm(x, size, side)), size, 4)


def _time(w: Writer) -> str:
    half = CHANNELS[0] // 2
    frequencies = np.exp(-np.log(10000) * np.arange(half) / half)
    angles = w.op("Mul", ["timestep", w.constant(list(frequencies), np.float32)])
    waves = w.op("Concat", [w.op("Cos", [angles]), w.op("Sin", [angles])], axis=0)
    row = w.op("Unsqueeze", [waves, w.constant([0])])
    return w.linear(w.silu(w.linear(row, CHANNELS[0], TIME)), TIME, TIME)
