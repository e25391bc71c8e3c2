"""3x3 convolutions with half the multiplications: Winograd's F(4, 3) along the height.

OpenVINO multiplies every weight with every pixel (2026.4.1, fp32 on x86): no algorithm of its own
saves multiplications there. Four rows of a result need 3 * 4 row products that way, and 6 this way:
six sums of six rows are convolved with six 1x3 kernels, and the four rows are sums of the results.
Along one axis only: it makes the pictures between 1.5 times as large for the while, where both axes
would make them 2.25 times, and slices of whole rows are cheap.

The matrices are Toom-Cook's with the points 0, 1, -1, 2, -2 and infinity (A. Lavin, S. Gray, "Fast
Algorithms for Convolutional Neural Networks", 2015). Sums of rows times up to 8 cost digits: a
convolution is off by 4e-6 to 7e-6 of its largest value, a full-size UNet by 7e-6 and its VAE by
1.4e-5, where 1e-3 is allowed. What is infinite becomes NaN in its block of four rows.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sdkit_dispatch.contract import Precision
from sdkit_openvino.runtime import ov

CHANNELS = 256
"""The fewest channels, in and out, for which it is worth while.

Its sums are memory traffic, and grow with the channels; what it saves grows with their square. Of
two processors, 128 channels of 256x256 took 0.80 of the time, 256 of 128x128 0.68, 640 of 32x32
0.53; more processors share the same memory.
"""
COLUMNS = 256
"""The fewest columns of four rows, over the batch, for which the larger weights are worth it.

They double: with 128, a UNet of 512x512 would take 2.2 GB more instead of 0.6, and 0.84 of the time
instead of 0.96 (medians of five runs each; by the times of its operators, 0.88).
"""
_ROWS, _TAPS, _SUMS = 4, 3, 6
_TYPES = (ov.Type.f32, ov.Type.f16)
"""Of pictures, and of weights, behind a Convert or not. numpy has neither bf16 nor fp8: it shows
their bits as other numbers; and four-bit weights are packed."""
_FROM_INPUT = (
    (4, 0, -5, 0, 1, 0),
    (0, -4, -4, 1, 1, 0),
    (0, 4, -4, -1, 1, 0),
    (0, -2, -1, 2, 1, 0),
    (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)
_FROM_WEIGHTS = (
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)
_TO_OUTPUT = (
    (1, 1, 1, 1, 1, 0),
    (0, 1, -1, 2, -2, 0),
    (0, 1, 1, 4, 4, 0),
    (0, 1, -1, 8, -8, 1),
)


@dataclass(frozen=True, kw_only=True)
class _Convolution:
    """A convolution that can be computed this way.

    Attributes:
        weights: A constant, K x C x 3 x 3.
        above, below: Rows of zeros that it adds.
        sides: Columns of zeros that it adds on the left and on the right.
        shape: Of the result, N x K x H x W.
    """

    node: ov.Node
    weights: ov.Node
    above: int
    below: int
    sides: tuple[int, int]
    shape: tuple[int, int, int, int]

    @property
    def is_worth_while(self) -> bool:
        batch, _, height, width = self.shape
        columns = batch * -(-height // _ROWS) * width
        return min(tuple(self.weights.shape)[:2]) >= CHANNELS and columns >= COLUMNS


def has_use_for_winograd(family: str, precision: Precision) -> bool:
    """Whether OpenVINO's convolutions on such a device can be made faster so.

    Half precision has no digits to spare for it. It was tried on x86 only: the library that
    OpenVINO uses on Arm has such convolutions itself, and GPUs were not looked at.
    """
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return family == "CPU" and precision == "fp32" and is_x86


def use_winograd(model: ov.Model, *, everywhere: bool) -> int:
    """Rewrites the 3x3 convolutions of a model with static shapes, in place; returns how many.

    Args:
        model: As it was read and reshaped.
        everywhere: Also those that it makes slower or the weights of which grow for little.
    """
    found = [one for node in model.get_ordered_ops() if (one := _convolution(node)) is not None]
    chosen = [one for one in found if everywhere or one.is_worth_while]
    for one in chosen:
        result = _rewritten(one)
        result.get_node().set_friendly_name(one.node.get_friendly_name())
        one.node.output(0).replace(result)
    if chosen:
        model.validate_nodes_and_infer_types()
    return len(chosen)


def _convolution(node: ov.Node) -> _Convolution | None:
    if node.get_type_name() != "Convolution" or node.get_output_partial_shape(0).is_dynamic:
        return None
    weights = node.input_value(1).get_node()
    if weights.get_type_name() == "Convert":  # of a graph that keeps its weights in fp16
        weights = weights.input_value(0).get_node()
    if weights.get_type_name() != "Constant":
        return None
    kinds = {node.get_input_element_type(0), weights.get_element_type()}
    if not kinds <= set(_TYPES):
        return None
    said = node.get_attributes()
    kernel, ones = tuple(weights.shape)[2:], [1, 1]
    is_plain = list(said["strides"]) == ones and list(said["dilations"]) == ones
    if kernel != (_TAPS, _TAPS) or not is_plain:
        return None
    (above, left), (below, right) = said["pads_begin"], said["pads_end"]
    batch, channels, height, width = node.get_output_shape(0)
    return _Convolution(
        node=node,
        weights=weights,
        above=above,
        below=below,
        sides=(left, right),
        shape=(batch, channels, height, width),
    )


def _rewritten(one: _Convolution) -> ov.Output:
    ops = ov.opset8
    batch, channels, height, width = one.shape
    blocks = -(-height // _ROWS)
    added = blocks * _ROWS - height
    source = one.node.input_value(0)  # asked for now: it may have been rewritten before
    kind = source.get_element_type()
    if kind != ov.Type.f32:
        # A graph of fp16 that runs in fp32: kernels rounded to fp16 would be other kernels.
        source = ops.convert(source, ov.Type.f32).output(0)
    padded = ops.pad(
        source,
        _integers(0, 0, one.above, 0),
        _integers(0, 0, one.below + added, 0),
        "constant",
        ops.constant(np.float32(0)),
    )
    last = (blocks - 1) * _ROWS + 1
    rows = [
        ops.slice(padded, _integers(at), _integers(at + last), _integers(_ROWS), _integers(2))
        for at in range(_SUMS)
    ]
    weights = one.weights.data.astype(np.float32, copy=False)
    products = [
        ops.convolution(
            _sum(_FROM_INPUT[at], rows),
            ops.constant(_kernel(weights, _FROM_WEIGHTS[at])),
            [1, 1],
            [0, one.sides[0]],
            [0, one.sides[1]],
            [1, 1],
        )
        for at in range(_SUMS)
    ]
    # Row r of every block lies together; as an axis of four next to the blocks they are in order.
    apart = _integers(batch, channels, blocks, 1, width)
    results = [ops.reshape(_sum(one_row, products), apart, False) for one_row in _TO_OUTPUT]
    shape = _integers(batch, channels, blocks * _ROWS, width)
    result = ops.reshape(ops.concat(results, 3), shape, False)
    if added:
        result = ops.slice(result, _integers(0), _integers(height), _integers(1), _integers(2))
    if kind != ov.Type.f32:
        result = ops.convert(result, kind)
    return result.output(0)


def _kernel(
    weights: np.ndarray[Any, np.dtype[np.float32]], factors: Sequence[float]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns K x C x 1 x 3: the rows of K x C x 3 x 3, each times its factor."""
    total = np.zeros_like(weights[:, :, 0, :])
    for at, factor in enumerate(factors):
        if factor:
            total += np.float32(factor) * weights[:, :, at, :]
    return total[:, :, None, :]


def _sum(factors: Sequence[int], values: Sequence[ov.Node]) -> ov.Node:
    """Returns the sum of the values, each times its factor."""
    ops = ov.opset8
    (first, total), *others = [
        (factor, value) for factor, value in zip(factors, values, strict=True) if factor
    ]
    if first != 1:
        total = ops.multiply(total, ops.constant(np.float32(first)))
    for factor, value in others:
        size = abs(factor)
        term = value if size == 1 else ops.multiply(value, ops.constant(np.float32(size)))
        total = ops.add(total, term) if factor > 0 else ops.subtract(total, term)
    return total


def _integers(*values: int) -> ov.Node:
    return ov.opset8.constant(np.array(values, np.int64))
