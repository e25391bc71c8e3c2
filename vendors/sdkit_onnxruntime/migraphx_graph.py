"""What MIGraphX cannot compile, said before the minutes that it would take to find out."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from sdkit_dispatch.errors import UnsupportedOpError

LATEST_OPSET = 22
UNSUPPORTED: Mapping[str, str] = {
    # Operator -> since when that is known.
    "Attention": "MIGraphX 2.14 asks for an attribute of another operator of that name",
    "Det": "its provider leaves it to the processor",
    "Mish": "one of it sends a whole graph to the processor",
    "RMSNormalization": "its provider leaves it to the processor",
    "RotaryEmbedding": "it came with opset 23",
    "STFT": "MIGraphX 2.14 has no parser for it",
    "TensorScatter": "it came with opset 24",
}
"""Seen with onnxruntime-migraphx 1.27.1 and MIGraphX 2.14."""
_HINT = "export the pipeline with opset 18 to 20, or take --vendor ggml"


def check_graph(component: str, model: onnx.ModelProto) -> None:
    """Refuses a graph that MIGraphX is known not to compile.

    Raises:
        UnsupportedOpError: Names all operators, or the opset.
    """
    opset = max(
        (one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), default=0
    )
    found: dict[str, str] = {}
    for node in model.graph.node:
        if node.domain not in ("", "ai.onnx"):
            found[f"{node.domain}:{node.op_type}"] = "it is no operator of ONNX"
        elif node.op_type in UNSUPPORTED:
            found[node.op_type] = UNSUPPORTED[node.op_type]
    if found:
        listed = "; ".join(f"{name} ({why})" for name, why in sorted(found.items()))
        raise UnsupportedOpError(
            f"migraphx refuses {component}; operators it does not have: {listed}", _HINT
        )
    if opset > LATEST_OPSET:
        raise UnsupportedOpError(
            f"migraphx refuses {component}: it takes opset {LATEST_OPSET} and older, this is "
            f"{opset}",
            _HINT,
        )
