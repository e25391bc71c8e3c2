"""What tells processors of one name apart."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path


def processor_features() -> str:
    """Returns what tells processors of one name apart: a virtual machine may hide some of it."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        flags = next(line for line in lines if line.startswith(("flags", "Features")))
        return hashlib.sha256(flags.encode()).hexdigest()[:16]
    import platform

    return platform.processor()
