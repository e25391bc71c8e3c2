"""The files of an OpenVINO engine: the exported model, and a note of what it does not hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from sdkit_dispatch.contract import TensorSpec

BLOB_FILE = "model.blob"
NOTE_FILE = "engine.json"


@dataclass(frozen=True, kw_only=True)
class EngineNote:
    """What the exported model does not say.

    Attributes:
        weights: External file, relative to the folder of the ONNX file, that holds the weights of
            an engine that maps them; empty if the engine holds its weights.
        weights_bytes: Its size.
        winograd: How many convolutions are computed with fewer multiplications.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights: str = ""
    weights_bytes: int = 0
    winograd: int = 0


def write_note(folder: Path, note: EngineNote) -> None:
    """Writes the note of an engine."""
    (folder / NOTE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(note), indent=1))


def read_note(folder: Path) -> EngineNote:
    """Returns the note of an engine.

    Raises:
        OSError: It cannot be read.
        msgspec.DecodeError: It is damaged.
    """
    return msgspec.json.decode((folder / NOTE_FILE).read_bytes(), type=EngineNote)
