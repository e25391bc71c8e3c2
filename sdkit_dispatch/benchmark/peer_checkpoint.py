"""The checkpoint that a peer takes in the place of a folder of ONNX graphs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from sdkit_dispatch.checkpoint import SUFFIXES, read_checkpoint
from sdkit_dispatch.checkpoint.files import UNET
from sdkit_dispatch.contract import Rejection
from sdkit_dispatch.errors import PipelineError
from sdkit_dispatch.pipeline_files import Pipeline

ALIKE = 0.05
"""How far the numbers of weights may differ: an export folds some of them into others."""
GIVE_ONE = "add --checkpoint FILE.safetensors; `bench --suite sd15` brings one of its own"


def checkpoint_for(peer: str, pipeline: Pipeline, given: Path | None) -> Path | Rejection:
    """Returns the checkpoint of the same network as a pipeline, or why there is none.

    Args:
        peer: Name of who takes it.
        pipeline: What all others take.
        given: By the user; else the only one in the pipeline's folder counts.

    Raises:
        PipelineError: What was given is no checkpoint.
    """
    found = [given] if given is not None else _lying_in(pipeline.folder)
    if len(found) != 1:
        names = ", ".join(path.name for path in found)
        reason = (
            f"it reads whole checkpoints, and the folder holds several: {names}"
            if found
            else "it reads whole checkpoints, and this is a folder of ONNX graphs without one"
        )
        return Rejection(vendor=peer, code="no-checkpoint", reason=reason, hint=GIVE_ONE)
    try:
        checkpoint = read_checkpoint(found[0])
    except PipelineError as error:
        if given is not None:
            raise
        return Rejection(
            vendor=peer, code="no-checkpoint", reason=error.message, hint=error.hint or GIVE_ONE
        )
    inside = sum(math.prod(one.shape) for one in checkpoint.tensors if one.name.startswith(UNET))
    unet = pipeline.components["unet"]
    exported = unet.weights_bytes / _bytes_of(unet.dtype)
    # Names of another style cannot be told apart: then the peer itself has to say.
    if inside and abs(inside - exported) > ALIKE * max(inside, exported):
        reason = (
            f"the checkpoint '{found[0].name}' is of another network: its UNet has "
            f"{inside / 1e6:.3g} million weights, that of the pipeline {exported / 1e6:.3g}"
        )
        return Rejection(vendor=peer, code="no-checkpoint", reason=reason, hint=GIVE_ONE)
    return found[0]


def _lying_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


def _bytes_of(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
