"""How long TensorRT's kernels took on a card, kept so that the next build need not measure again.

TensorRT-RTX has no such cache: it does not measure.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from sdkit_tensorrt.driver import Card

logger = logging.getLogger(__name__)


class TimingCache:
    """The timings of one card and version, in a folder that may be lost at any time."""

    def __init__(self, scratch: Path | None, runtime: str, card: Card) -> None:
        name = f"{runtime}\0{card.name}\0{card.arch}\0{card.processors}\0{card.cuda}"
        digest = hashlib.sha256(name.encode()).hexdigest()[:32]
        self._path = None if scratch is None else scratch / "tensorrt" / f"{digest}.timings"
        self._cache: Any = None  # Any: an ITimingCache

    def open(self, config: Any) -> None:  # Any: an IBuilderConfig
        """Gives the builder what is known."""
        if self._path is None:
            return
        try:
            known = self._path.read_bytes()
        except OSError:
            known = b""
        self._cache = config.create_timing_cache(known)
        if self._cache is None or not config.set_timing_cache(self._cache, False):
            logger.info("the timings in %s do not fit; all is measured again", self._path)
            self._cache = config.create_timing_cache(b"")
            config.set_timing_cache(self._cache, False)

    def keep(self) -> None:
        """Writes what is known now, whole or not at all; a failure is no loss."""
        if self._path is None or self._cache is None:
            return
        try:
            data = bytes(memoryview(self._cache.serialize()))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
            part.write_bytes(data)
            os.replace(part, self._path)
        except (OSError, TypeError) as error:
            logger.info("the timings are not kept: %s", error)
