"""Which function lowers which operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sdkit_ggml.compiler.ops import (
    convolution,
    elementwise,
    linear,
    movement,
    normalization,
    resizing,
)
from sdkit_ggml.compiler.patterns import DOMAIN

Function = Callable[..., Any]
"""(Lowering, input names, **attributes) -> a Value, or a list of them (`Any`: one or the other)."""

ONNX: dict[str, Function] = {
    "Abs": elementwise.unary("abs"),
    "Add": elementwise.add,
    "AveragePool": convolution.average_pool,
    "Ceil": elementwise.unary("ceil"),
    "Clip": elementwise.clip,
    "Concat": movement.concat,
    "Conv": convolution.conv,
    "Cos": elementwise.named("cos"),
    "DepthToSpace": movement.depth_to_space,
    "Div": elementwise.div,
    "Einsum": linear.einsum,
    "Elu": elementwise.elu,
    "Exp": elementwise.unary("exp"),
    "Expand": movement.expand_,
    "Flatten": movement.flatten,
    "Floor": elementwise.unary("floor"),
    "Gather": movement.gather,
    "GatherND": movement.gather_nd,
    "Gelu": elementwise.gelu,
    "Gemm": linear.gemm,
    "GlobalAveragePool": normalization.global_average_pool,
    "GroupNormalization": normalization.group_normalization,
    "HardSigmoid": elementwise.hard_sigmoid,
    "HardSwish": elementwise.unary("hardswish"),
    "Identity": lambda low, x: low.value(x),
    "InstanceNormalization": normalization.instance_normalization,
    "LayerNormalization": normalization.layer_normalization,
    "LeakyRelu": elementwise.leaky_relu,
    "Log": elementwise.named("log"),
    "MatMul": linear.mat_mul,
    "Max": elementwise.maximum,
    "MaxPool": convolution.max_pool,
    "Mean": elementwise.mean_of,
    "Min": elementwise.minimum,
    "Mish": elementwise.mish,
    "Mul": elementwise.mul,
    "Neg": elementwise.unary("neg"),
    "Pad": movement.pad,
    "Pow": elementwise.power,
    "RMSNormalization": normalization.rms_normalization,
    "Reciprocal": elementwise.reciprocal,
    "ReduceMean": normalization.reduce("mean"),
    "ReduceSum": normalization.reduce("sum_rows"),
    "Relu": elementwise.relu,
    "Reshape": movement.reshape,
    "Resize": resizing.resize,
    "Selu": elementwise.selu,
    "Sigmoid": elementwise.unary("sigmoid"),
    "Sign": elementwise.unary("sign"),
    "Sin": elementwise.named("sin"),
    "Slice": movement.slice_,
    "Softmax": normalization.softmax,
    "Softplus": elementwise.unary("softplus"),
    "Softsign": elementwise.softsign,
    "SpaceToDepth": movement.space_to_depth,
    "Split": movement.split,
    "Sqrt": elementwise.named("sqrt"),
    "Squeeze": movement.squeeze,
    "Sub": elementwise.sub,
    "Sum": elementwise.sum_of,
    "Swish": elementwise.swish,
    "Tanh": elementwise.unary("tanh"),
    "Tile": movement.tile,
    "Transpose": movement.transpose_,
    "Unsqueeze": movement.unsqueeze,
    "Upsample": resizing.upsample,
    "Where": elementwise.where,
}
OURS: dict[str, Function] = {
    "Attention": linear.attention,
    "GeGlu": elementwise.ge_glu,
    "GeluErf": elementwise.gelu,
    "GroupNorm": normalization.group_norm,
    "Normalize": normalization.normalize,
    "Silu": elementwise.silu,
}
TABLE: dict[tuple[str, str], Function] = {
    **{("", name): function for name, function in ONNX.items()},
    **{(DOMAIN, name): function for name, function in OURS.items()},
}
"""(Domain, operator) -> the function that lowers it."""
