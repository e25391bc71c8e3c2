"""MIGraphX's own parser, asked before the minutes of a compilation; it needs no card."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from sdkit_dispatch.errors import CompileError, UnsupportedOpError
from sdkit_onnxruntime.rocm import library_folders

logger = logging.getLogger(__name__)

TOOL = "migraphx-driver"
LIMIT_S = 600.0
"""Reading a full-size UNet takes seconds; the parser folds constants while it reads."""
_UNKNOWN = re.compile(r"[Uu]nknown operator:?\s*\"?([\w.:]+)")
_FAILED = re.compile(r"^.*\bparse_\w+:.*$", re.MULTILINE)
_HINT = "take --vendor ggml, or export the pipeline with opset 18 to 20"


def find_parser(folders: Iterable[Path] | None = None) -> Path | None:
    """Returns the tool of ROCm that parses ONNX, if it is installed.

    Args:
        folders: Of ROCm's libraries; those of this machine by default.
    """
    places = library_folders() if folders is None else list(folders)
    for place in places:
        beside = place.parent / "bin" / TOOL
        if beside.is_file():
            return beside
    found = shutil.which(TOOL)
    return None if found is None else Path(found)


def ask_parser(component: str, graph: Path, *, tool: Path | None = None) -> bool:
    """Has MIGraphX parse a graph with static shapes. Returns whether there was one to ask.

    Args:
        component: For messages.
        graph: With its external data beside it.
        tool: The parser; the installed one by default.

    Raises:
        UnsupportedOpError: Names all operators that MIGraphX does not know.
        CompileError: It does not parse the graph for another reason; with its own words.
    """
    parser = tool or find_parser()
    if parser is None:
        return False
    # Without the flag it stops at the first unknown operator.
    command = [str(parser), "read", "--onnx", str(graph), "--skip-unknown-operators"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("%s does not answer, so it was not asked: %s", parser, error)
        return False
    words = done.stdout + done.stderr
    unknown = sorted(set(_UNKNOWN.findall(words)))
    if unknown:
        raise UnsupportedOpError(
            f"migraphx refuses {component}; its parser does not know {', '.join(unknown)}", _HINT
        )
    failed = _FAILED.search(words)
    if done.returncode and failed:
        raise CompileError(f"migraphx does not parse {component}: {failed.group(0).strip()}", _HINT)
    if done.returncode:  # a library of its own is missing, say: nothing about the graph
        logger.warning("%s ended with %d, so it says nothing", parser, done.returncode)
        return False
    return True
