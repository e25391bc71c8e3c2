"""The files of an engine: the serialized plan, and a note of what it does not say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from sdkit_dispatch.contract import TensorSpec
from sdkit_tensorrt.profiles import InputRange

PLAN_FILE = "engine.plan"
NOTE_FILE = "engine.json"


@dataclass(frozen=True, kw_only=True)
class EngineNote:
    """What the plan does not say without a GPU.

    Attributes:
        inputs: Of the one size that was asked for.
        outputs: Likewise; a size that only the runtime knows is -1.
        profiles: For each optimization profile, input -> range; empty for a static engine.
        plan_bytes: Size of the plan.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[dict[str, InputRange], ...] = ()
    plan_bytes: int


def write_note(folder: Path, note: EngineNote) -> None:
    """Writes the note of an engine."""
    (folder / NOTE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(note), indent=1))


def read_note(folder: Path) -> EngineNote:
    """Returns the note of an engine.

    Raises:
        OSError: It, or the plan, cannot be read.
        ValueError: It is damaged, or the plan has another size.
    """
    note = msgspec.json.decode((folder / NOTE_FILE).read_bytes(), type=EngineNote)
    size_bytes = (folder / PLAN_FILE).stat().st_size
    if size_bytes != note.plan_bytes:
        raise ValueError(f"the plan has {size_bytes} bytes, noted are {note.plan_bytes}")
    return note
