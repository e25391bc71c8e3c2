"""Whole checkpoints: one file with all weights of a pipeline, `.safetensors` or `.gguf`.

Some engines take such a file as it is. Their loaders trust it, and some end the process when it
is not what it claims, so it is read here first: header, types and places of all tensors.
"""

from .entries import TensorEntry
from .files import SUFFIXES, Checkpoint, identity, is_checkpoint, read_checkpoint

__all__ = [
    "SUFFIXES",
    "Checkpoint",
    "TensorEntry",
    "identity",
    "is_checkpoint",
    "read_checkpoint",
]
