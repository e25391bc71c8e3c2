"""A checkpoint file, told by what is in it and not by its name."""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sdkit_dispatch.errors import PipelineError

from .entries import NotACheckpointError, TensorEntry
from .gguf import MAGIC, read_gguf
from .safetensors import read_safetensors, starts_like_safetensors

SUFFIXES = (".safetensors", ".gguf")
PICKLED_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
PICKLED_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""A zip archive, as PyTorch writes since 1.6, and bare pickles."""
UNET = "model.diffusion_model."
WIDE_TEXT = "conditioner.embedders.1."
"""Only Stable Diffusion XL has a second text encoder, and draws 1024 x 1024 by itself."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A file with all weights of a pipeline, whose header was read and is sound."""

    path: Path
    format: Literal["safetensors", "gguf"]
    size_bytes: int
    tensors: tuple[TensorEntry, ...]

    @property
    def side_px(self) -> int:
        """Width and height that the pipeline draws unless told otherwise."""
        is_wide = any(one.name.startswith(WIDE_TEXT) for one in self.tensors)
        return 1024 if is_wide else 512

    @property
    def dtype(self) -> str:
        """The type that most weights have, those of the UNet if they can be told apart."""
        inner = [one for one in self.tensors if one.name.startswith(UNET)]
        counts: Counter[str] = Counter()
        for one in inner or self.tensors:
            counts[one.dtype] += one.size_bytes
        return counts.most_common(1)[0][0]


def is_checkpoint(path: Path) -> bool:
    """True for a file, whatever it holds, and for what is named as only checkpoints are."""
    try:
        return path.is_file() or (
            path.suffix.lower() in (*SUFFIXES, *PICKLED_SUFFIXES) and not path.is_dir()
        )
    except OSError:  # a name that is too long, or with a null byte
        return False


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads and checks the header of a checkpoint.

    Raises:
        PipelineError: The file is no checkpoint, or damaged; says where.
    """
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise PipelineError(f"'{path}' is not a plain file")
            start = stream.read(16)
            stream.seek(0)
            size_bytes = status.st_size
            if start.startswith(MAGIC):
                tensors = read_gguf(stream, size_bytes)
                return Checkpoint(path=path, format="gguf", size_bytes=size_bytes, tensors=tensors)
            if starts_like_safetensors(start):
                tensors = read_safetensors(stream, size_bytes)
                return Checkpoint(
                    path=path, format="safetensors", size_bytes=size_bytes, tensors=tensors
                )
    except NotACheckpointError as error:
        raise PipelineError(
            f"the checkpoint '{path}' {error}", "download or convert the file again"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise PipelineError(f"'{path}' cannot be read: {reason}") from error
    if start.startswith(PICKLED_STARTS) or path.suffix.lower() in PICKLED_SUFFIXES:
        raise PipelineError(
            f"'{path}' is a pickled checkpoint, which may run any program when it is opened",
            "take the .safetensors file of the same model, or convert it with a trusted tool",
        )
    raise PipelineError(
        f"'{path}' ({size_bytes} bytes) is neither a .safetensors nor a .gguf checkpoint",
        "give such a file, or the folder of an exported ONNX pipeline",
    )


def identity(path: Path) -> str:
    """Returns what changes whenever the file does: for a worker that keeps it loaded.

    Raises:
        PipelineError: The file cannot be read.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise PipelineError(f"'{path}' cannot be read: {error.strerror or error}") from error
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
