"""The import of `openvino`, kept from talking to anyone, and its errors made readable."""

from __future__ import annotations

import sys

# `import openvino` reports itself to Google Analytics and writes ~/intel/openvino_ga_cid, unless
# its telemetry package cannot be imported: then it uses a stub of its own and misses nothing.
# Seen with strace, OpenVINO 2026.4.1. An opt-out file would do as well, but in the user's home.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]

import openvino as ov  # noqa: E402

__all__ = ["RUNTIME", "ov", "words_of"]

RUNTIME = f"openvino {ov.get_version().split('-')[0]}"

_NOISE = ("Exception from ", "Check '", "FrontEnd API failed")


def words_of(error: Exception) -> str:
    """Returns what an error of OpenVINO says, without the trail of its source files."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(_NOISE)]
    return " ".join(said) or str(error).strip() or type(error).__name__
