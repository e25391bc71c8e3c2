"""Engines that leave their weights in the external file of the ONNX pipeline.

With CACHE_MODE=OPTIMIZE_SIZE an export holds no weight that came from an external file, and an
import with the same setting and WEIGHTS_PATH maps them. It works through `read_model`, `reshape`,
`compile_model` and `export_model`; WEIGHTS_PATH is not needed to compile (OpenVINO 2026.4.1). With
the weights of another model of the same size it computes wrong numbers without a word, so whoever
loads must know the file by its digest.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdkit_openvino.engine_files import EngineNote
from sdkit_openvino.runtime import ov, words_of

logger = logging.getLogger(__name__)

_MAPS_WEIGHTS = frozenset({"CPU"})
"""Families on which engines without weights were tried; a GPU's would be a guess."""
_WEIGHTLESS = {"CACHE_MODE": "OPTIMIZE_SIZE"}
"""Leaves weights out of an export, and on import takes them from WEIGHTS_PATH (2026.4.1)."""


def mapped_location(locations: tuple[str, ...], family: str) -> str:
    """Returns the external file that an engine can leave its weights in, or "".

    OpenVINO takes one WEIGHTS_PATH and knows a weight by its offset alone.
    """
    return locations[0] if family in _MAPS_WEIGHTS and len(locations) == 1 else ""


def export_properties(note: EngineNote) -> dict[str, str]:
    """Returns the properties that leave the weights out, if they are to be left out."""
    return dict(_WEIGHTLESS) if note.weights else {}


def import_properties(note: EngineNote, folder: Path) -> dict[str, str]:
    """Returns the properties that let an import map the weights that the engine does not hold.

    Raises:
        OSError, ValueError: The file is gone or has another size. That its content is the one the
            engine was built with is for the caller to know, by its digest.
    """
    if not note.weights:
        return {}
    path = folder / note.weights
    size = path.stat().st_size
    if size != note.weights_bytes:
        raise ValueError(f"{path} has {size} bytes, the engine expects {note.weights_bytes}")
    return {**_WEIGHTLESS, "WEIGHTS_PATH": str(path)}


def can_import(
    core: ov.Core,
    blob: io.BytesIO,
    name: str,
    properties: Mapping[str, Any],  # Any: each property has its own type
    note: EngineNote,
    folder: Path,
) -> bool:
    """Whether this runtime can read back the export without weights that it has just written.

    2026.4 can; 2025.4 and 2026.0 write it and then refuse it.
    """
    try:
        core.import_model(blob, name, {**properties, **import_properties(note, folder)})
    except Exception as error:  # the bindings raise more than RuntimeError
        logger.warning("openvino: weights will be copied into the engine: %s", words_of(error))
        return False
    return True
