"""Kernels that TensorRT-RTX compiled for a card, kept in a scratch folder: may be lost any time."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def cache_file(scratch: Path | None, key: str, runtime: str, arch: str) -> Path | None:
    """Returns where the cache of an engine on a card is; None without a scratch folder."""
    if scratch is None:
        return None
    name = hashlib.sha256(f"{key}\0{runtime}\0{arch}".encode()).hexdigest()[:32]
    return scratch / "tensorrt-rtx" / f"{name}.cache"


def fill_cache(cache: Any, path: Path | None) -> bool:  # Any: an IRuntimeCache
    """Fills a runtime's cache from a file; says whether the runtime took it."""
    if path is None:
        return False
    try:
        data = path.read_bytes()
    except OSError:
        return False
    # The runtime checks version, card and driver itself, and leaves the cache as it is on a "no".
    return bool(data) and bool(cache.deserialize(data))


def keep_cache(cache: Any, path: Path | None) -> None:  # Any: an IRuntimeCache
    """Writes a runtime's cache, whole or not at all; a failure is no loss."""
    if path is None:
        return
    try:
        data = bytes(memoryview(cache.serialize()))
        if path.is_file() and path.read_bytes() == data:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_bytes(data)
        os.replace(part, path)
    except (OSError, TypeError) as error:
        logger.info("the runtime cache is not kept: %s", error)
