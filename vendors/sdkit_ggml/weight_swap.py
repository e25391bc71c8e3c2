"""Other weights for an engine whose program stays: what a LoRA merged into a model needs.

A program is made of the graph, the shapes and the numbers of a few initializers, which it names. If
those are the same, other weights have the same program, and each tensor says how it is made.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx

from sdkit_ggml.compiler.compile import digest_of
from sdkit_ggml.compiler.graph import Array, Graph, graph_from_model
from sdkit_ggml.compiler.recipes import formed, stepped
from sdkit_ggml.compiler.weights import Weight
from sdkit_ggml.engine_files import map_weights
from sdkit_ggml.program import Program, StoredWeight, stored_bytes

_DTYPES = {"f32": np.float32, "i32": np.int32}


def other_weights(
    program: Program, model: onnx.ModelProto, folder: Path, engine_folder: Path
) -> tuple[Weight, ...] | None:
    """Returns the weights file of `program` with the numbers of another model.

    None if the program depends on those numbers.

    Args:
        program: Of an engine of the same graph and shapes.
        model: That graph, without the contents of external files.
        folder: Where the external files are.
        engine_folder: That engine's.
    """
    # What was quantised cannot be read back as it was; tables of the graph are not.
    if program.extras or any(one.type not in _DTYPES for one in program.weights if not one.origin):
        return None
    graph = graph_from_model(model, folder)
    for name, digest in program.read.items():
        if name not in graph.constants or digest_of(graph.constants[name].array()) != digest:
            return None
    (stored,) = map_weights(engine_folder, program)
    return tuple(
        Weight(one, partial(_made, graph, one) if one.origin else partial(_kept, stored, one))
        for one in program.weights
    )


def _made(graph: Graph, weight: StoredWeight) -> Array:
    return formed(stepped(graph.constants[weight.origin].array(), weight.steps), weight.form)


def _kept(stored: memoryview, weight: StoredWeight) -> Array:
    """Returns what the graph says by itself (a mask, indices): it is what it was."""
    end = weight.offset + stored_bytes(weight)
    return np.frombuffer(stored[weight.offset : end], _DTYPES[weight.type])
