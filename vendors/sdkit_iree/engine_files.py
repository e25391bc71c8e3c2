"""The files of an engine: the compiled module, its weights, and a note of what neither says."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sdkit_dispatch.contract import TensorSpec

MODULE_FILE = "module.vmfb"
WEIGHTS_FILE = "weights.irpa"
NOTE_FILE = "engine.json"


@dataclass(frozen=True, kw_only=True)
class EngineNote:
    """What the module does not say of itself.

    Attributes:
        outputs: A size that only a run will show is -1.
        module_sha256: The runtime checks no code: one changed byte in it was seen to end the
            process with SIGILL, SIGSEGV or SIGBUS (IREE 3.13).
        weights_bytes: Size of the archive; that its content is the right one is for the store to
            know, by its digest.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    module_sha256: str
    weights_bytes: int


def write_note(
    folder: Path, *, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> None:
    """Writes the note of the engine whose other files are in `folder`."""
    note = EngineNote(
        inputs=inputs,
        outputs=outputs,
        module_sha256=hashlib.sha256((folder / MODULE_FILE).read_bytes()).hexdigest(),
        weights_bytes=(folder / WEIGHTS_FILE).stat().st_size,
    )
    (folder / NOTE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(note), indent=1))


def read_engine(folder: Path) -> tuple[EngineNote, bytes]:
    """Returns the note and the module of an engine.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is damaged.
    """
    note = msgspec.json.decode((folder / NOTE_FILE).read_bytes(), type=EngineNote)
    module = (folder / MODULE_FILE).read_bytes()
    if hashlib.sha256(module).hexdigest() != note.module_sha256:
        raise ValueError(f"{MODULE_FILE} is not what was written")
    size_bytes = (folder / WEIGHTS_FILE).stat().st_size
    if size_bytes != note.weights_bytes:
        raise ValueError(f"{WEIGHTS_FILE} has {size_bytes} bytes, noted are {note.weights_bytes}")
    return note, module
